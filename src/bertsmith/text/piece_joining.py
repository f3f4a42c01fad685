"""Byte-pair encoding on words: the most frequent pair of neighbouring pieces is joined, again and
again (Sennrich et al., arXiv 1508.07909), with WordPiece's "##" on pieces inside a word.

The words lie one after the other as a chain of *places*, a piece on each. All places of a pair hang
on one list, so that a join touches only what it changes; these loops are compiled. Python keeps the
names of the pieces and a queue of the frequent pairs.
"""

from __future__ import annotations

import heapq

import numpy as np

from bertsmith.compiled import compiled

# Columns of `places`: the piece, its word, the places beside it in the word, the pair of this place
# and the one after it, the places beside it on that pair's list. -1 stands for none.
PIECE, WORD, BEFORE, AFTER, PAIR, LIST_BEFORE, LIST_AFTER = range(7)
# Columns of `pairs`: the two pieces, how often they stand side by side in the text, at how many
# places, the first place on the list.
LEFT, RIGHT, COUNT, NUM_PLACES, FIRST = range(5)

INSIDE = 1 << 21  # added to the code points of characters inside a word; above all of them
BATCH = 1 << 16  # places entered at a time
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


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
                self._join(pair, self._number(piece))
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

    def _number(self, piece: str) -> int:
        number = self._numbers.setdefault(piece, len(self.pieces))
        if number == len(self.pieces):
            self.pieces.append(piece)
        return number

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
    """Where the hash table has a pair, or the empty bucket where it belongs."""
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
