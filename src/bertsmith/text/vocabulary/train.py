"""Train a WordPiece vocabulary from text.

The trainer of the BERT paper was never released. This one counts words and merges neighbouring
pieces by byte-pair encoding, the most frequent pair first (Sennrich et al., arXiv 1508.07909), with
WordPiece's "##" on pieces inside a word, as the `tokenizers` library does. It learns a fifth more
pieces than asked for and keeps those that the tokenizer uses most: many are only steps on the way
to longer ones, which greedy longest match never takes. Ties go by code point, so the result depends
on the text alone.

`PairMerger` keeps the words as chains of *positions*, a piece at each. All positions of a pair form
a linked list, so that a merge touches only what it changes; these loops are compiled. Python keeps
the names of the pieces and a queue of the frequent pairs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.base.settings import Count, NotNegative, PositiveFraction, check_bounds, checked
from bertsmith.base.terminal import Progress
from bertsmith.text.readers.documents import Document
from bertsmith.text.readers.files import read_lines
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED, Normalization, split_words
from bertsmith.text.tokenizer.tables import first_slot
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.word_counts import count_words

SURPLUS = 1.2  # pieces learned for each one that is kept
GOOGLE_UNUSED = 99  # [unused0] to [unused98] stand between [PAD] and [UNK] in Google's files

# Columns of `positions`: the piece, its word, the neighbouring positions in the word, the pair of
# this position and the one after it, the neighbours on that pair's list. -1 stands for none.
PIECE, WORD, BEFORE, AFTER, PAIR, LIST_BEFORE, LIST_AFTER = range(7)
# Columns of `pairs`: the two pieces, how often they are neighbours in the text, at how many
# positions, the first position on the list.
LEFT, RIGHT, COUNT, NUM_POSITIONS, FIRST = range(5)

INSIDE = 1 << 21  # added to the code points of characters inside a word; above all of them
BATCH = 1 << 16  # positions listed at a time


@dataclass(frozen=True)
class VocabularySettings:
    """Choice of a vocabulary's pieces.

    reserve_unused  number of [unused] pieces
    min_frequency   a pair seen less often is not merged
    coverage        fraction of the text's characters that the alphabet makes up; a word with one of
                    the rarest, which are left out, is [UNK] and teaches nothing
    max_alphabet    keep at most this many characters, the most frequent. None: no limit
    keep            pieces that must be in the vocabulary, normalized (see `read_kept`)

    Errors: ValueError for a number out of bounds.
    """

    reserve_unused: Annotated[int, NotNegative] = 0
    min_frequency: Annotated[int, Count] = 2
    coverage: Annotated[float, PositiveFraction] = 1.0
    max_alphabet: Annotated[int | None, Count] = None
    keep: Sequence[str] = ()

    def __post_init__(self):
        check_bounds(self)


DEFAULTS = VocabularySettings()


@checked()
def train_vocabulary(
    documents: Iterable[Document | str],
    size: int,
    normalization: Normalization = GOOGLE_UNCASED,
    settings: VocabularySettings = DEFAULTS,
    *,
    workers: int = 1,
) -> Vocabulary:
    """Train a vocabulary of exactly `size` pieces on texts (str), or documents of files.

        train_vocabulary(read_documents("books/"), 8000, PRESETS["multilingual"])

    First come the special tokens (see `special_pieces`), then the alphabet by code point (each
    character in the forms seen: "c" at the start of a word, "##c" inside), then the pieces to keep,
    then merged pieces in the order they were learned. The text is read once, in bounded memory (see
    `count_words`). The result does not depend on the number of worker processes.

    Errors: ValueError for no text, and for a size too small for the fixed pieces or too large for
    the text; it names a size that is possible.

    >>> vocabulary = train_vocabulary(["low lower lowest", "low slow"], 15)
    >>> vocabulary.pieces[5:]
    ('l', 's', '##e', '##l', '##o', '##r', '##s', '##t', '##w', '##ow')
    """
    special, keep = special_pieces(settings.reserve_unused), settings.keep
    if (least := len({*special, *keep})) >= size:  # found before hours of counting
        needs = f"special tokens and pieces to keep are {least:,}, without the text's characters"
        raise ValueError(f"a vocabulary of {size:,} is too small: {needs}: use a larger `size`")
    words = count_words(documents, normalization, workers)
    if not words:
        raise ValueError("no words in the text: a vocabulary needs some text to learn from")
    alphabet = _alphabet(words, settings)
    words = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    merger = PairMerger(words, settings.min_frequency)
    fixed = dict.fromkeys([*special, *merger.pieces, *keep])
    if len(fixed) > size:
        kept = f", {len(set(keep)):,} pieces to keep" if keep else ""
        needs = f"special tokens{kept} and the text's {len(alphabet):,} characters"
        hint = f"need `size={len(fixed)}` or more (or fewer characters with `coverage`)"
        raise ValueError(f"a vocabulary of {size:,} is too small: {needs} {hint}")
    pieces, surplus = fixed.copy(), round(SURPLUS * (size - len(fixed)))
    with Progress("merging pieces", total=surplus, unit="pieces") as progress:
        while len(pieces) < len(fixed) + surplus and (piece := merger.merge()):
            pieces[piece] = None  # it may be there already, merged of other parts
            progress.update(done=len(pieces) - len(fixed))
    if len(pieces) < size:
        hint = f"use `size={len(pieces)}` or less, give more text, or lower `min_frequency`"
        found = f"the text gives only {len(pieces):,} of {size:,} pieces"
        raise ValueError(f"{found}: {hint} ({settings.min_frequency})")
    encoded = Tokenizer(Vocabulary([*pieces]), normalization).encode_batch([*words], offsets=False)
    counts = np.repeat(np.array([*words.values()]), np.diff(encoded.boundaries))
    uses = np.bincount(encoded.ids, counts, len(pieces))
    uses[: len(fixed)] = np.inf
    most_used = set(np.argsort(-uses, kind="stable")[:size].tolist())
    return Vocabulary([piece for number, piece in enumerate(pieces) if number in most_used])


def special_pieces(reserve_unused: int = 0) -> list[str]:
    """Special tokens and reserved pieces in the order of BERT's vocabularies.

    With 99 reserved pieces or more they stand as in the released `vocab.txt` files: [PAD] 0,
    [unused0..98] 1-99, [UNK] 100, [CLS] 101, [SEP] 102, [MASK] 103, the rest after them.

    >>> special_pieces(2)
    ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[unused0]', '[unused1]']
    """
    unused = [f"[unused{i}]" for i in range(reserve_unused)]
    early = GOOGLE_UNUSED if reserve_unused >= GOOGLE_UNUSED else 0
    return [SPECIAL[0], *unused[:early], *SPECIAL[1:], *unused[early:]]


def read_kept(path: Path, normalization: Normalization) -> list[str]:
    """Read pieces to keep from a file, a word or ##part of one a line, and normalize them.

    Errors: ValueError that names file and line for a line of no word or of several; for a file that
    is absent, not UTF-8, or without a word.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file: `keep` names a file with a word or piece a line")
    pieces = []
    for number, line in read_lines(path):
        if not line or line in SPECIAL:
            continue
        inside = line.startswith("##") and len(line) > 2
        words = split_words(line.removeprefix("##") if inside else line, normalization)
        if len(words) != 1:
            becomes = f"{len(words)} words" if words else "no word"
            fault = f"{line!r:.60} becomes {becomes} when it is normalized"
            raise ValueError(f"{path}:{number}: {fault}: `keep` wants one word or ##piece a line")
        pieces.append("##" * inside + words[0].characters)
    if not pieces:
        raise ValueError(f"{path}: no words in it: `keep` wants one word or ##piece a line")
    return pieces


def _alphabet(words: dict[str, int], settings: VocabularySettings) -> set[str]:
    """The most frequent characters, as many as `coverage` and `max_alphabet` allow."""
    letters = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.repeat(np.array([*words.values()]), [len(word) for word in words])
    counts = np.bincount(letters, counts).astype(np.int64)
    counts[0xD800:0xE000] = 0  # half of a surrogate pair cannot be written to a file
    ranked = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    covered = np.cumsum(counts[ranked]) - counts[ranked]  # by the more frequent ones
    needed = np.count_nonzero(covered < settings.coverage * counts.sum())
    return set(map(chr, ranked[:needed][: settings.max_alphabet].tolist()))


class PairMerger:
    """Byte-pair encoding: words as chains of pieces, which `merge` makes longer pair by pair.

    `pieces` holds the characters that begin a word, then those inside one, each by code point, then
    merged pieces. Pairs seen less often than `min_frequency` are not merged.

    >>> merger = PairMerger({"low": 4, "slow": 1}, min_frequency=2)
    >>> merger.pieces
    ['l', 's', '##l', '##o', '##w']
    >>> merger.merge(), merger.merge(), merger.merge()
    ('##ow', 'low', None)
    """

    def __init__(self, words: dict[str, int], min_frequency: int):
        self._min_frequency = min_frequency
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        ends = np.cumsum(lengths)
        letters = np.frombuffer("".join(words).encode("utf-32-le"), np.int32) + INSIDE
        letters[ends - lengths] -= INSIDE
        alphabet, numbers = np.unique(letters, return_inverse=True)
        self.pieces = ["##" * (k >= INSIDE) + chr(k % INSIDE) for k in alphabet.tolist()]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}

        self._counts = np.fromiter(words.values(), np.int64, len(words))
        self._positions = positions = np.full((len(letters), 7), -1, np.int32)
        positions[:, PIECE] = numbers
        positions[:, WORD] = np.repeat(np.arange(len(words)), lengths)
        positions[:, BEFORE] = np.arange(len(letters)) - 1
        positions[ends - lengths, BEFORE] = -1
        positions[:, AFTER] = np.arange(len(letters)) + 1
        positions[ends - 1, AFTER] = -1

        self._pairs, self._num_pairs = np.empty((0, 5), np.int64), 0
        for begin in range(0, len(letters), BATCH):
            self._reserve(BATCH)
            end = min(begin + BATCH, len(letters))
            self._num_pairs = _list_all(
                positions, self._counts, self._pairs, self._buckets, self._num_pairs, begin, end
            )
        # Each pair seen `_floor` times or more has an entry in the queue, with its count or a
        # higher one from before. Most pairs are never that frequent, and never need a name.
        self._floor = int(self._pairs[: self._num_pairs, COUNT].max(initial=0)) + 1
        self._queue: list[tuple[int, str, str, int]] = []

    def merge(self) -> str | None:
        """Merge the most frequent pair, of equals the first by name; its piece, or None at the end.

        A piece may be made again: "abc" of "ab" and "##c", and of "a" and "##bc".
        """
        while self._queue or self._lower_floor():
            negative, left, right, pair = heapq.heappop(self._queue)
            count = int(self._pairs[pair, COUNT])
            if count != -negative:
                if count >= self._floor:
                    heapq.heappush(self._queue, (-count, left, right, pair))
                continue
            piece = left + right.removeprefix("##")
            number = self._numbers.setdefault(piece, len(self.pieces))
            if number == len(self.pieces):
                self.pieces.append(piece)
            self._reserve(2 * int(self._pairs[pair, NUM_POSITIONS]))
            table = self._positions, self._counts, self._pairs, self._buckets
            self._num_pairs, risen = _merge(*table, self._num_pairs, pair, number)
            for k in np.unique(risen[self._pairs[risen, COUNT] >= self._floor]).tolist():
                heapq.heappush(self._queue, self._entry(k))
            return piece
        return None

    def _lower_floor(self) -> bool:
        """Fill the empty queue with less frequent pairs; False when there are none."""
        counts = self._pairs[: self._num_pairs, COUNT]
        while not self._queue and self._floor > self._min_frequency:
            self._floor = max(self._floor // 2, self._min_frequency)
            self._queue = [self._entry(k) for k in np.flatnonzero(counts >= self._floor).tolist()]
            heapq.heapify(self._queue)
        return bool(self._queue)

    def _entry(self, pair: int) -> tuple[int, str, str, int]:
        left, right, count = self._pairs[pair, :3].tolist()
        return -count, self.pieces[left], self.pieces[right], pair

    def _reserve(self, num_more: int) -> None:
        """Make the table large enough for more pairs."""
        least = self._num_pairs + num_more
        if least > len(self._pairs):
            pairs = np.empty((2 * least, 5), np.int64)
            pairs[: self._num_pairs] = self._pairs[: self._num_pairs]
            self._pairs = pairs
            self._buckets = np.full(1 << (4 * least).bit_length(), -1, np.int32)
            _hash_all(pairs, self._buckets, self._num_pairs)


@compiled
def _list_all(positions, counts, pairs, buckets, num_pairs, begin, end):
    """Put positions on the lists of their pairs; the number of pairs."""
    for position in range(begin, end):
        if positions[position, AFTER] >= 0:
            num_pairs, _ = _enter(positions, counts, pairs, buckets, num_pairs, position)
    return num_pairs


@compiled
def _merge(positions, counts, pairs, buckets, num_pairs, pair, merged):
    """Merge a pair everywhere; the number of pairs, those that rose (some more than once)."""
    listed = np.empty(pairs[pair, NUM_POSITIONS], np.int32)
    position = pairs[pair, FIRST]
    for k in range(len(listed)):
        listed[k] = position
        position = positions[position, LIST_AFTER]
    if pairs[pair, LEFT] == pairs[pair, RIGHT]:
        listed.sort()  # of three in a row the first two are merged
    risen = [np.int64(0) for _ in range(0)]  # which tells Numba the type
    for position in listed:
        if positions[position, PAIR] != pair:
            continue
        before, gone = positions[position, BEFORE], positions[position, AFTER]
        after = positions[gone, AFTER]
        _leave(positions, counts, pairs, position)
        positions[position, PIECE], positions[position, AFTER] = merged, after
        if before >= 0:
            _leave(positions, counts, pairs, before)
            num_pairs, new = _enter(positions, counts, pairs, buckets, num_pairs, before)
            risen.append(new)
        if after >= 0:
            _leave(positions, counts, pairs, gone)
            positions[after, BEFORE] = position
            num_pairs, new = _enter(positions, counts, pairs, buckets, num_pairs, position)
            risen.append(new)
    return num_pairs, np.array(risen, np.int64)


@compiled
def _enter(positions, counts, pairs, buckets, num_pairs, position):
    """Put a position on the list of the pair that begins there; the number of pairs, the pair."""
    left, right = positions[position, PIECE], positions[positions[position, AFTER], PIECE]
    bucket = _bucket(pairs, buckets, left, right)
    pair = np.int64(buckets[bucket])
    if pair < 0:
        pair = num_pairs
        num_pairs += 1
        buckets[bucket] = pair
        pairs[pair, LEFT], pairs[pair, RIGHT] = left, right
        pairs[pair, COUNT] = pairs[pair, NUM_POSITIONS] = 0
        pairs[pair, FIRST] = -1
    first = pairs[pair, FIRST]
    if first >= 0:
        positions[first, LIST_BEFORE] = position
    positions[position, PAIR] = pair
    positions[position, LIST_BEFORE], positions[position, LIST_AFTER] = -1, first
    pairs[pair, FIRST] = position
    pairs[pair, COUNT] += counts[positions[position, WORD]]
    pairs[pair, NUM_POSITIONS] += 1
    return num_pairs, pair


@compiled
def _leave(positions, counts, pairs, position):
    """Take a position off its pair's list."""
    pair = positions[position, PAIR]
    before, after = positions[position, LIST_BEFORE], positions[position, LIST_AFTER]
    if before >= 0:
        positions[before, LIST_AFTER] = after
    else:
        pairs[pair, FIRST] = after
    if after >= 0:
        positions[after, LIST_BEFORE] = before
    positions[position, PAIR] = -1
    pairs[pair, COUNT] -= counts[positions[position, WORD]]
    pairs[pair, NUM_POSITIONS] -= 1


@compiled
def _bucket(pairs, buckets, left, right):
    """The bucket of a pair in the hash table, or the empty one where it belongs."""
    bucket = first_slot(np.int64(left) << 32 | np.int64(right)) & (len(buckets) - 1)
    while True:
        pair = buckets[bucket]
        if pair < 0 or (pairs[pair, LEFT] == left and pairs[pair, RIGHT] == right):
            return bucket
        bucket = (bucket + 1) & (len(buckets) - 1)


@compiled
def _hash_all(pairs, buckets, num_pairs):
    for pair in range(num_pairs):
        buckets[_bucket(pairs, buckets, pairs[pair, LEFT], pairs[pair, RIGHT])] = pair
