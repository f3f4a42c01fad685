"""Sentence pairs, made on the fly: the walk of `create_pretraining_data.py` over a document.

Letters: S sentences and D documents of one shard; a *chunk* is the run of sentences from which a
pair is made. Every draw is keyed by (seed, epoch, document) or (seed, epoch, document, example).

The walk never looks into the other document from which a random B comes, so the number of pairs
of a document depends on its own sentence lengths and draws alone. One quick pass over the sentence
index therefore plans an epoch: it counts the pairs and leaves a waypoint at every 64th, from where
any pair is a walk of at most 63 steps, however long or short the documents are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.draws import between, derive, permutation, uniform
from bertsmith.corpus.store import Split

STRIDE = 64  # pairs from one waypoint to the next: 24 bytes for 64 pairs
MAX_TRIES = 10  # to find a document other than the pair's own

# Keys under an epoch's; draws of a document; draws of an example; key under an example's (the
# other keys there are masking.py's).
DERIVE_ORDER, DERIVE_DOCUMENTS = 0, 1
DRAW_SHORT, DRAW_SHORT_LENGTH = 0, 1
DRAW_A_END, DRAW_COIN, DRAW_START, DRAW_OTHER = 0, 1, 2, 3  # other: 3..12, one for each try
DERIVE_TRUNCATION = 0


class Pair(NamedTuple):
    """A pair of segments; `key` (uint64) is the key of the example's draws."""

    a: np.ndarray  # ids, at least one
    b: np.ndarray
    is_random: bool
    key: np.uint64


@compiled
def target_length(document_key, max_tokens, short_rate):
    """The length to fill, drawn once for a document's pass: mostly the whole, at times less."""
    if uniform(document_key, DRAW_SHORT) < short_rate:
        return between(document_key, DRAW_SHORT_LENGTH, 2, max_tokens)
    return max_tokens


@compiled
def next_chunk(sentences, position, last, target, example_key):
    """One step of the walk: sentences position:a_end are A, a_end:end are B or are put back.

    sentences: int64 [S + 1] boundaries; the document ends before sentence `last`.
    Returns (a_end, end, is_random).
    """
    end = position + 1
    while end < last and sentences[end] - sentences[position] < target:
        end += 1
    a_end = position + 1
    if end - position >= 2:
        a_end = position + between(example_key, DRAW_A_END, 1, end - position - 1)
    is_random = end - position == 1 or uniform(example_key, DRAW_COIN) < 0.5
    return a_end, end, is_random


@compiled
def plan(sentences, documents, first_document, key, max_tokens, short_rate):
    """Walk a whole shard: (number of pairs, waypoints int64 [ceil(pairs / 64), 3]).

    A waypoint is (document in the shard, sentence, example in the document).
    """
    waypoints = np.empty((len(sentences) // STRIDE + 1, 3), np.int64)
    count = 0
    for document in range(len(documents) - 1):
        document_key = derive(key, first_document + document)
        target = target_length(document_key, max_tokens, short_rate)
        position, example = documents[document], 0
        while position < documents[document + 1]:
            if count % STRIDE == 0:
                waypoints[count // STRIDE] = document, position, example
            a_end, end, is_random = next_chunk(
                sentences,
                position,
                documents[document + 1],
                target,
                derive(document_key, example),
            )
            position = a_end if is_random else end  # the unused sentences are put back
            count, example = count + 1, example + 1
    return count, waypoints[: -(-count // STRIDE)].copy()


@compiled
def find(
    sentences,
    documents,
    first_document,
    key,
    max_tokens,
    short_rate,
    document,
    position,
    example,
    steps,
):
    """Walk `steps` pairs on from the waypoint (document, position, example).

    Returns (document, example, target, start, a_end, end, is_random): the document counts within
    the shard; start, a_end and end are sentences.
    """
    while True:
        document_key = derive(key, first_document + document)
        target = target_length(document_key, max_tokens, short_rate)
        while position < documents[document + 1]:
            a_end, end, is_random = next_chunk(
                sentences,
                position,
                documents[document + 1],
                target,
                derive(document_key, example),
            )
            if steps == 0:
                return document, example, target, position, a_end, end, is_random
            position = a_end if is_random else end
            steps, example = steps - 1, example + 1
        document, example = document + 1, 0


@compiled
def example_key(key, document, example):
    """The key of an example's draws; `document` counts through all shards."""
    return derive(derive(key, document), example)


@compiled
def other_document(key, document, num_documents):
    """Where a random B comes from; after ten tries it may be the pair's own document."""
    other = document
    for number in range(DRAW_OTHER, DRAW_OTHER + MAX_TRIES):
        other = between(key, number, 0, num_documents - 1)
        if other != document:
            break
    return other


@compiled
def random_segment(sentences, first, last, target, key):
    """Sentences of first:last from a random one on, until `target` tokens: a token range."""
    start = between(key, DRAW_START, first, last - 1)
    end = start + 1  # one sentence at least, even when nothing is left to fill
    while end < last and sentences[end] - sentences[start] < target:
        end += 1
    return sentences[start], sentences[end]


@compiled
def truncate(a_start, a_stop, b_start, b_stop, max_tokens, key):
    """Drop tokens off the longer range (ties: B), front or back by coin, until both fit.

    >>> a_start, a_stop, b_start, b_stop = truncate(0, 3, 0, 9, 8, np.uint64(1))
    >>> a_stop - a_start, b_stop - b_start
    (3, 5)
    """
    coins = derive(key, DERIVE_TRUNCATION)
    for drop in range(a_stop - a_start + b_stop - b_start - max_tokens):
        front = uniform(coins, drop) < 0.5
        if a_stop - a_start > b_stop - b_start:
            a_start, a_stop = (a_start + 1, a_stop) if front else (a_start, a_stop - 1)
        else:
            b_start, b_stop = (b_start + 1, b_stop) if front else (b_start, b_stop - 1)
    return a_start, a_stop, b_start, b_stop


class EpochPairs:
    """The pairs of one epoch, in the order of the documents (`pairs[i]`) or shuffled.

    max_tokens: of A and B together. Making this object walks the whole sentence index once (about
    100 million sentences a second); a pair is then found in constant time.
    """

    def __init__(
        self, split: Split, max_tokens: int, short_rate: float, epoch_key: np.uint64
    ) -> None:
        self._split, self._max_tokens = split, max_tokens
        self._order_key = np.uint64(derive(epoch_key, DERIVE_ORDER))
        self._key = np.uint64(derive(epoch_key, DERIVE_DOCUMENTS))
        self._draws = (self._key, max_tokens, short_rate)
        self._waypoints: list[np.ndarray] = []
        self._first_pairs = [0]
        for shard, first in zip(split.shards, split.first_documents, strict=True):
            count, waypoints = plan(shard.sentences, shard.documents, first, *self._draws)
            self._waypoints.append(waypoints)
            self._first_pairs.append(self._first_pairs[-1] + count)

    def __len__(self) -> int:
        return self._first_pairs[-1]

    def shuffled(self, index: int) -> Pair:
        """Pair `index` of the epoch's shuffled order, 0 <= index < len."""
        return self[int(permutation(index, len(self), self._order_key))]

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        number = bisect_right(self._first_pairs, index) - 1
        shard, first_document = self._split.shards[number], self._split.first_documents[number]
        block, steps = divmod(index - self._first_pairs[number], STRIDE)
        document, position, example = self._waypoints[number][block].tolist()
        document, example, target, start, a_end, end, is_random = find(
            shard.sentences,
            shard.documents,
            first_document,
            *self._draws,
            document,
            position,
            example,
            steps,
        )
        document += first_document
        key = np.uint64(example_key(self._key, document, example))
        bounds = shard.sentences
        a_start, a_stop = int(bounds[start]), int(bounds[a_end])
        b_shard, b_start, b_stop = shard, a_stop, int(bounds[end])
        if is_random:
            other = other_document(key, document, self._split.num_documents)
            where, local = self._split.locate(other)
            b_shard = self._split.shards[where]
            first, last = b_shard.documents[local], b_shard.documents[local + 1]
            target_b = target - (a_stop - a_start)
            b_start, b_stop = random_segment(b_shard.sentences, first, last, target_b, key)
        a_start, a_stop, b_start, b_stop = truncate(
            a_start, a_stop, b_start, b_stop, self._max_tokens, key
        )
        a, b = shard.tokens.read(a_start, a_stop), b_shard.tokens.read(b_start, b_stop)
        return Pair(a, b, bool(is_random), key)
