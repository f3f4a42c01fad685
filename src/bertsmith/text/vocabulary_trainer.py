"""Learn a WordPiece vocabulary from text.

The learner of the paper was never released. This one counts words and joins pieces by byte-pair
encoding (`piece_joining.py`), as the WordPiece trainer of the `tokenizers` library does. But it
learns a fifth more pieces than asked for and keeps those that the tokenizer then uses most: many
are but steps on the way to longer ones, which the tokenizer, longest piece first, never takes.
Every choice is settled by counts and code points, so the result depends on the text alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bertsmith.progress import Progress
from bertsmith.text.lines import read_lines
from bertsmith.text.normalize import GOOGLE_UNCASED, Normalization, words_of
from bertsmith.text.piece_joining import Joining
from bertsmith.text.readers import Document
from bertsmith.text.vocabulary import SPECIAL, Vocabulary
from bertsmith.text.word_counts import count_words
from bertsmith.text.wordpiece import Tokenizer

SURPLUS = 1.2  # pieces learned for each one that is kept
GOOGLE_UNUSED = 99  # [unused0] to [unused98] stand between [PAD] and [UNK] in Google's files


def train_vocabulary(
    documents: Iterable[Document | str],
    size: int,
    normalization: Normalization = GOOGLE_UNCASED,
    *,
    reserve_unused: int = 0,
    min_frequency: int = 2,
    coverage: float = 1.0,
    max_alphabet: int | None = None,
    keep: Sequence[str] = (),
    workers: int = 1,
) -> Vocabulary:
    """Learn a vocabulary of exactly `size` pieces.

    First come the special tokens (see `special_pieces`), then the alphabet by code point (each
    character in the forms seen: "c" at the start of a word, "##c" inside), then the pieces to keep,
    then joined pieces in the order they were learned.

    documents       documents, or plain strings; read once, in bounded memory
    normalization   how text becomes words, as in `Tokenizer`
    reserve_unused  number of [unused] pieces to set aside
    min_frequency   a pair of pieces seen less often is not joined
    coverage        share of the text's characters that the alphabet must make up; the rarest
                    beyond it are left out, and a word with one of them is [UNK] and teaches nothing
    max_alphabet    keep at most this many characters, the most frequent. None: no limit
    keep            pieces that must be in the vocabulary, normalised (`read_kept` makes them so)
    workers         processes that count words; the result does not depend on it

    When a text has very many distinct words the rarest are forgotten on the way: `count_words`.

    Errors: ValueError for no text, for a size below special tokens + alphabet + pieces to keep
    (says the least possible), for a size the text cannot give (says how many pieces it gives).

    >>> vocabulary = train_vocabulary(["low lower lowest", "low slow"], 15)
    >>> vocabulary.pieces[5:]
    ('l', 's', '##e', '##l', '##o', '##r', '##s', '##t', '##w', '##ow')
    """
    _check(min_frequency, reserve_unused, coverage, max_alphabet, workers)
    special = special_pieces(reserve_unused)
    if len(set(special).union(keep)) >= size:  # said before hours of counting
        raise ValueError(
            f"a vocabulary of {size:,} is too small: special tokens and pieces to keep are "
            f"{len(set(special).union(keep)):,}, without the text's characters: use a larger --size"
        )
    words = count_words(documents, normalization, workers)
    if not words:
        raise ValueError("no words in the text: a vocabulary needs some text to learn from")
    characters = _alphabet(words, coverage, max_alphabet)
    words = {word: count for word, count in words.items() if characters.issuperset(word)}
    joining = Joining(words, min_frequency)
    fixed = list(dict.fromkeys([*special, *joining.pieces, *keep]))
    if len(fixed) > size:
        kept = f", {len(set(keep)):,} pieces to keep" if keep else ""
        raise ValueError(
            f"a vocabulary of {size:,} is too small: special tokens{kept} and the text's "
            f"{len(characters):,} characters need --size {len(fixed)} or more "
            "(or fewer characters with --coverage or --max-alphabet)"
        )
    pieces = fixed + _learn(joining, fixed, round(SURPLUS * (size - len(fixed))))
    if len(pieces) < size:
        raise ValueError(
            f"the text gives only {len(pieces):,} of {size:,} pieces: use --size {len(pieces)} or "
            f"less, give more text, or lower --min-frequency ({min_frequency})"
        )
    return Vocabulary(_most_used(pieces, len(fixed), size, words, normalization))


def special_pieces(reserve_unused: int = 0) -> list[str]:
    """Special tokens and reserved pieces in the order of BERT's vocabularies.

    With room for 99 reserved pieces or more they stand as in the released `vocab.txt` files:
    [PAD] 0, [unused0..98] 1-99, [UNK] 100, [CLS] 101, [SEP] 102, [MASK] 103, the rest after them.

    >>> special_pieces(2)
    ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[unused0]', '[unused1]']
    >>> special_pieces(100).index("[MASK]")
    103
    """
    unused = [f"[unused{i}]" for i in range(reserve_unused)]
    early = GOOGLE_UNUSED if reserve_unused >= GOOGLE_UNUSED else 0
    return [SPECIAL[0], *unused[:early], *SPECIAL[1:], *unused[early:]]


def read_kept(path: Path, normalization: Normalization) -> list[str]:
    """The pieces of a file for `keep`: a word or, with "##" before it, a part of one on each line.

    Words are normalised as text is ("Caf\u00e9" may become "cafe"); blank lines are passed over.

    Errors: ValueError that names file and line for a line that is no word or several; for a file
    that is absent, not UTF-8, or without a word.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file: --keep names a file with a word or piece a line")
    pieces = []
    for number, line in read_lines(path):
        if not line or line in SPECIAL:
            continue
        inside = line.startswith("##") and len(line) > 2
        words = words_of(line.removeprefix("##") if inside else line, normalization)
        if len(words) != 1:
            becomes = f"{len(words)} words" if words else "no word"
            raise ValueError(
                f"{path}:{number}: {line!r:.60} becomes {becomes} when it is normalised: --keep "
                "wants one word or one ##piece a line"
            )
        pieces.append("##" * inside + words[0].characters)
    if not pieces:
        raise ValueError(f"{path}: no words in it: --keep wants one word or ##piece a line")
    return pieces


def _alphabet(words: dict[str, int], coverage: float, limit: int | None) -> set[str]:
    """The most frequent characters of the words: those it takes to cover a share of all, at most
    `limit` of them."""
    letters = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    each = np.fromiter(words.values(), np.int64, len(words))
    counts = np.bincount(letters, np.repeat(each, lengths)).astype(np.int64)
    counts[0xD800:0xE000] = 0  # half of a surrogate pair cannot be written to a file
    ranked = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    covered = np.cumsum(counts[ranked]) - counts[ranked]  # by the more frequent ones
    needed = np.count_nonzero(covered < coverage * counts.sum())
    return set(map(chr, ranked[:needed][:limit].tolist()))


def _learn(joining: Joining, fixed: list[str], number: int) -> list[str]:
    """So many pieces, not among the fixed ones, in the order they are joined; fewer at the end."""
    known = set(fixed)
    learned: dict[str, None] = {}  # a piece can be joined again, of other parts
    with Progress("joining pieces", total=number, unit="pieces") as progress:
        while len(learned) < number and (piece := joining.join()):
            if piece not in known:
                learned[piece] = None
                progress.update(done=len(learned))
    return list(learned)


def _most_used(
    pieces: list[str],
    num_fixed: int,
    size: int,
    words: dict[str, int],
    normalization: Normalization,
) -> list[str]:
    """The first `num_fixed` pieces and, in their order, those others that the words use most."""
    encoded = Tokenizer(Vocabulary(pieces), normalization).encode_batch(list(words), offsets=False)
    each = np.fromiter(words.values(), np.int64, len(words))
    uses = np.bincount(
        encoded.ids, np.repeat(each, np.diff(encoded.boundaries)), minlength=len(pieces)
    )
    uses[:num_fixed] = np.inf
    kept = np.sort(np.argsort(-uses, kind="stable")[:size])
    return [pieces[k] for k in kept.tolist()]


def _check(
    min_frequency: int,
    reserve_unused: int,
    coverage: float,
    max_alphabet: int | None,
    workers: int,
) -> None:
    for flag, value, least in (
        ("--min-frequency", min_frequency, 1),
        ("--reserve-unused", reserve_unused, 0),
        ("--max-alphabet", max_alphabet, 1),
        ("--workers", workers, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value}: must be {least} or more")
    if not 0 < coverage <= 1:
        raise ValueError(f"--coverage {coverage}: must be above 0 and at most 1")
