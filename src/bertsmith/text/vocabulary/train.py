"""Learn a WordPiece vocabulary from text.

The learner of the paper was never released. This one counts words and joins pieces by byte-pair
encoding: the most frequent pair of neighbouring pieces, again and again (Sennrich et al., arXiv
1508.07909), with WordPiece's "##" on pieces inside a word, as the WordPiece trainer of the
`tokenizers` library does. But it learns a fifth more pieces than asked for and keeps those that the
tokenizer then uses most: many are but steps on the way to longer ones, which the tokenizer, longest
piece first, never takes. Every choice is settled by counts and code points, so the result depends
on the text alone.

`Joining` holds the words one after the other as a chain of *places*, a piece on each. All places of
a pair hang on one list, so that a join touches only what it changes; these loops are compiled.
Python keeps the names of the pieces and a queue of the frequent pairs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.base.terminal import Progress
from bertsmith.text.readers.documents import Document
from bertsmith.text.readers.files import read_lines
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED, Normalization, words_of
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.word_counts import count_words

SURPLUS = 1.2  # pieces learned for each one that is kept
GOOGLE_UNUSED = 99  # [unused0] to [unused98] stand between [PAD] and [UNK] in Google's files

# Columns of `places`: the piece, its word, the places beside it in the word, the pair of this place
# and the one after it, the places beside it on that pair's list. -1 stands for none.
PIECE, WORD, BEFORE, AFTER, PAIR, LIST_BEFORE, LIST_AFTER = range(7)
# Columns of `pairs`: the two pieces, how often they stand side by side in the text, at how many
# places, the first place on the list.
LEFT, RIGHT, COUNT, NUM_PLACES, FIRST = range(5)

INSIDE = 1 << 21  # added to the code points of characters inside a word; above all of them
BATCH = 1 << 16  # places entered at a time
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


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
    for flag, value, least in (
        ("--min-frequency", min_frequency, 1),
        ("--reserve-unused", reserve_unused, 0),
        ("max_alphabet", max_alphabet, 1),
        ("--workers", workers, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value}: must be {least} or more")
    if not 0 < coverage <= 1:
        raise ValueError(f"--coverage {coverage}: must be above 0 and at most 1")
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
            "(or fewer characters with --coverage)"
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
    """The most frequent characters: as many as cover a share of all, at most `limit`."""
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
    """Join up to `number` pieces that are not among the fixed ones; in the order of the joins."""
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


class Joining:
    """Words as chains of pieces, which `join` makes longer one pair at a time.

    `pieces` begins with the characters of the words in the forms seen: those that begin a word,
    then those inside one, each by code point. What is joined follows.

    >>> joining = Joining({"low": 4, "slow": 1}, min_frequency=2)
    >>> joining.pieces
    ['l', 's', '##l', '##o', '##w']
    >>> joining.join(), joining.join(), joining.join()
    ('##ow', 'low', None)
    """

    def __init__(self, words: dict[str, int], min_frequency: int):
        """`words` with their counts; pairs that stand side by side less often than `min_frequency`
        are not joined."""
        self._min_frequency = min_frequency
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        letters = np.frombuffer("".join(words).encode("utf-32-le"), np.int32) + INSIDE
        letters[np.cumsum(lengths) - lengths] -= INSIDE
        alphabet = np.flatnonzero(np.bincount(letters))
        numbers = np.zeros(2 * INSIDE, np.int32)
        numbers[alphabet] = np.arange(len(alphabet))
        self.pieces = ["##" * (k >= INSIDE) + chr(k % INSIDE) for k in alphabet.tolist()]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}

        self._counts = np.fromiter(words.values(), np.int64, len(words))
        self._places = _chains(numbers[letters], lengths)
        self._pairs, self._num_pairs = np.empty((0, 5), np.int64), 0
        for begin in range(0, len(letters), BATCH):
            self._make_room(BATCH)
            self._num_pairs = _enter_all(
                self._places, self._counts, self._pairs, self._buckets, self._num_pairs, begin
            )
        # Of each pair that stands `_floor` times or more the queue has an entry with that count or
        # a higher one, from before. Most pairs are never that frequent, and never need a name.
        self._floor = int(self._pairs[: self._num_pairs, COUNT].max(initial=0)) + 1
        self._queue: list[tuple[int, str, str, int]] = []

    def join(self) -> str | None:
        """Join the most frequent pair everywhere; the piece it makes, None when no pair is left.

        Pairs of one count go in the order of their names. A piece may be made again, of other
        parts: "abc" of "ab" and "##c", and of "a" and "##bc".
        """
        while self._queue or self._lower_floor():
            negative, left, right, pair = heapq.heappop(self._queue)
            count = int(self._pairs[pair, COUNT])
            if count == -negative:
                piece = left + right.removeprefix("##")
                number = self._numbers.setdefault(piece, len(self.pieces))
                if number == len(self.pieces):
                    self.pieces.append(piece)
                self._join(pair, number)
                return piece
            if count >= self._floor:
                heapq.heappush(self._queue, (-count, left, right, pair))
        return None

    def _join(self, pair: int, joined: int) -> None:
        self._make_room(2 * int(self._pairs[pair, NUM_PLACES]))
        self._num_pairs, risen = _join(
            self._places, self._counts, self._pairs, self._buckets, self._num_pairs, pair, joined
        )
        for k in np.unique(risen[self._pairs[risen, COUNT] >= self._floor]).tolist():
            heapq.heappush(self._queue, self._entry(k))

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

    def _make_room(self, num_more: int) -> None:
        """Make the table of pairs large enough for so many new ones."""
        least = self._num_pairs + num_more
        if least > len(self._pairs):
            pairs = np.empty((2 * least, 5), np.int64)
            pairs[: self._num_pairs] = self._pairs[: self._num_pairs]
            self._pairs = pairs
            self._buckets = np.full(1 << (4 * least).bit_length(), -1, np.int32)
            _hash_all(pairs, self._buckets, self._num_pairs)


@compiled
def _chains(pieces, lengths):
    """The places of words of the given lengths, not yet on a list."""
    places = np.full((len(pieces), 7), -1, np.int32)
    begin = 0
    for word in range(len(lengths)):
        end = begin + lengths[word]
        for place in range(begin, end):
            places[place, PIECE], places[place, WORD] = pieces[place], word
            if place > begin:
                places[place, BEFORE] = place - 1
            if place < end - 1:
                places[place, AFTER] = place + 1
        begin = end
    return places


@compiled
def _enter_all(places, counts, pairs, buckets, num_pairs, begin):
    """Put a batch of places on the lists of their pairs; the number of pairs."""
    for place in range(begin, min(begin + BATCH, len(places))):
        if places[place, AFTER] >= 0:
            num_pairs, _ = _enter(places, counts, pairs, buckets, num_pairs, place)
    return num_pairs


@compiled
def _join(places, counts, pairs, buckets, num_pairs, pair, joined):
    """Join a pair at all its places; the number of pairs, those that rose (some more than once)."""
    listed = np.empty(pairs[pair, NUM_PLACES], np.int32)
    place = pairs[pair, FIRST]
    for k in range(len(listed)):
        listed[k] = place
        place = places[place, LIST_AFTER]
    if pairs[pair, LEFT] == pairs[pair, RIGHT]:
        listed.sort()  # of three in a row the first two are joined
    risen, num_risen = np.empty(2 * len(listed), np.int64), 0
    for place in listed:
        if places[place, PAIR] != pair:
            continue
        before, gone = places[place, BEFORE], places[place, AFTER]
        after = places[gone, AFTER]
        _leave(places, counts, pairs, place)
        places[place, PIECE], places[place, AFTER] = joined, after
        if before >= 0:
            _leave(places, counts, pairs, before)
            num_pairs, new = _enter(places, counts, pairs, buckets, num_pairs, before)
            risen[num_risen] = new
            num_risen += 1
        if after >= 0:
            _leave(places, counts, pairs, gone)
            places[after, BEFORE] = place
            num_pairs, new = _enter(places, counts, pairs, buckets, num_pairs, place)
            risen[num_risen] = new
            num_risen += 1
    return num_pairs, risen[:num_risen]


@compiled
def _enter(places, counts, pairs, buckets, num_pairs, place):
    """Put a place on the list of the pair that begins there; the number of pairs, the pair."""
    left, right = places[place, PIECE], places[places[place, AFTER], PIECE]
    bucket = _bucket(pairs, buckets, left, right)
    pair = np.int64(buckets[bucket])
    if pair < 0:
        pair = num_pairs
        num_pairs += 1
        buckets[bucket] = pair
        pairs[pair, LEFT], pairs[pair, RIGHT] = left, right
        pairs[pair, COUNT] = pairs[pair, NUM_PLACES] = 0
        pairs[pair, FIRST] = -1
    first = pairs[pair, FIRST]
    if first >= 0:
        places[first, LIST_BEFORE] = place
    places[place, PAIR], places[place, LIST_BEFORE], places[place, LIST_AFTER] = pair, -1, first
    pairs[pair, FIRST] = place
    pairs[pair, COUNT] += counts[places[place, WORD]]
    pairs[pair, NUM_PLACES] += 1
    return num_pairs, pair


@compiled
def _leave(places, counts, pairs, place):
    """Take a place off its pair's list."""
    pair, before, after = places[place, PAIR], places[place, LIST_BEFORE], places[place, LIST_AFTER]
    if before >= 0:
        places[before, LIST_AFTER] = after
    else:
        pairs[pair, FIRST] = after
    if after >= 0:
        places[after, LIST_BEFORE] = before
    places[place, PAIR] = -1
    pairs[pair, COUNT] -= counts[places[place, WORD]]
    pairs[pair, NUM_PLACES] -= 1


@compiled
def _bucket(pairs, buckets, left, right):
    """The bucket of a pair in the hash table, or the empty one where it belongs."""
    key = np.uint64(left) << np.uint64(32) | np.uint64(right)
    bucket = np.int64((key * MULTIPLIER) >> np.uint64(32)) & (len(buckets) - 1)
    while True:
        pair = buckets[bucket]
        if pair < 0 or (pairs[pair, LEFT] == left and pairs[pair, RIGHT] == right):
            return bucket
        bucket = (bucket + 1) & (len(buckets) - 1)


@compiled
def _hash_all(pairs, buckets, num_pairs):
    for pair in range(num_pairs):
        buckets[_bucket(pairs, buckets, pairs[pair, LEFT], pairs[pair, RIGHT])] = pair
