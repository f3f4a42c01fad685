"""The walk of `create_pretraining_data.py` over a document, as compiled kernels for many rows.

Letters: S sentences and D documents of one shard; a *chunk* is the run of sentences from which a
pair is made. Every draw is keyed by (seed, epoch, document) or (seed, epoch, document, example).

The walk never looks into the other document from which a random B comes, so the number of pairs
of a document depends on its own sentence lengths and draws alone. One quick pass over the sentence
index therefore plans an epoch: it counts the pairs and leaves a waypoint at every 64th, from where
any pair is a walk of at most 63 steps, however long or short the documents are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.draws import between, derive, uniform

STRIDE = 64  # pairs from one waypoint to the next: 24 bytes for 64 pairs
MAX_TRIES = 10  # to find a document other than the pair's own, or a B unlike the true one

# Draws of a document; draws of an example; keys under an example's (the other keys there are
# masking.py's).
DRAW_SHORT, DRAW_SHORT_LENGTH = 0, 1
DRAW_A_END, DRAW_COIN, DRAW_START, DRAW_OTHER = 0, 1, 2, 3  # other: 3..12, one for each try
DERIVE_TRUNCATION, DERIVE_CLEAN = 0, 3

FEWEST_TO_CUT = 2  # tokens of a chunk that gives an A and a B

# Two segments as token ranges of their shards. `key` is the key of the example's draws, `label`
# what is asked of the pair: 1 = B is random, or B comes first.
SEGMENTS = np.dtype(
    [
        ("key", np.uint64),
        ("label", np.int64),
        ("a_document", np.int64),  # counted through all shards
        ("a_shard", np.int64),
        ("a_start", np.int64),
        ("a_stop", np.int64),
        ("next_stop", np.int64),  # end of the sentence after A; a_stop where the document ends
        ("wanted", np.int64),  # tokens that a random B is to fill
        ("b_document", np.int64),
        ("b_shard", np.int64),
        ("b_start", np.int64),
        ("b_stop", np.int64),
        ("first_stop", np.int64),  # end of the first sentence of a random B
    ]
)


class Walk(NamedTuple):
    """What decides the pairs of an epoch."""

    key: np.uint64  # of the epoch's documents
    max_tokens: int  # of A and B together
    short_rate: float
    random_b: bool  # else B always follows A, and every sentence is used


@compiled
def target_length(document_key, walk):
    """The length to fill, drawn once for a document's pass: mostly the whole, at times less."""
    if uniform(document_key, DRAW_SHORT) < walk.short_rate:
        return between(document_key, DRAW_SHORT_LENGTH, 2, walk.max_tokens)
    return walk.max_tokens


@compiled
def next_chunk(sentences, position, last, target, random_b, example_key):
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
    is_random = random_b and (end - position == 1 or uniform(example_key, DRAW_COIN) < 0.5)
    return a_end, end, is_random


@compiled
def more_pairs(sentences, position, last, random_b):
    """Whether sentences position:last of a document give another pair."""
    fewest = 1 if random_b else FEWEST_TO_CUT
    return sentences[last] - sentences[position] >= fewest


@compiled
def plan(sentences, documents, first_document, walk):
    """Walk a whole shard: (number of pairs, waypoints int64 [ceil(pairs / 64), 3]).

    A waypoint is (document in the shard, sentence, example in the document).
    """
    waypoints = np.empty((len(sentences) // STRIDE + 1, 3), np.int64)
    count = 0
    for document in range(len(documents) - 1):
        document_key = derive(walk.key, first_document + document)
        target = target_length(document_key, walk)
        position, last, example = documents[document], documents[document + 1], 0
        while more_pairs(sentences, position, last, walk.random_b):
            if count % STRIDE == 0:
                waypoints[count // STRIDE] = document, position, example
            example_key = derive(document_key, example)
            a_end, end, is_random = next_chunk(
                sentences, position, last, target, walk.random_b, example_key
            )
            position = a_end if is_random else end  # the unused sentences are put back
            count, example = count + 1, example + 1
    return count, waypoints[: -(-count // STRIDE)].copy()


@compiled
def find_chunks(sentences, documents, first_document, walk, waypoints, numbers, rows, segments):
    """Write pair numbers[k] of this shard to segments[rows[k]], all but a random B."""
    for k in range(len(rows)):
        waypoint = waypoints[numbers[k] // STRIDE]
        document, position, example = waypoint[0], waypoint[1], waypoint[2]
        steps = numbers[k] % STRIDE
        while True:
            document_key = derive(walk.key, first_document + document)
            target = target_length(document_key, walk)
            last = documents[document + 1]
            while steps > 0 and more_pairs(sentences, position, last, walk.random_b):
                example_key = derive(document_key, example)
                a_end, end, is_random = next_chunk(
                    sentences, position, last, target, walk.random_b, example_key
                )
                position = a_end if is_random else end
                steps, example = steps - 1, example + 1
            if more_pairs(sentences, position, last, walk.random_b):
                break
            document, position, example = document + 1, last, 0
        segment = segments[rows[k]]
        segment.a_document = segment.b_document = first_document + document
        segment.key = derive(document_key, example)
        write_chunk(sentences, position, last, target, walk.random_b, segment)


@compiled
def write_chunk(sentences, position, last, target, random_b, segment):
    """The pair of the chunk at `position`: A, and B where it is not random."""
    a_end, end, is_random = next_chunk(sentences, position, last, target, random_b, segment.key)
    segment.a_start, segment.a_stop = sentences[position], sentences[a_end]
    if a_end == end and not random_b:  # one sentence, cut anywhere
        most = sentences[end] - sentences[position] - 1
        segment.a_stop = segment.a_start + between(segment.key, DRAW_A_END, 1, most)
    segment.next_stop = sentences[min(a_end + 1, last)]
    segment.b_start, segment.b_stop = segment.a_stop, sentences[end]
    segment.wanted = target - (segment.a_stop - segment.a_start)
    segment.label = is_random
    if not random_b:
        segment.label = uniform(segment.key, DRAW_COIN) < 0.5


@compiled
def draw_documents(segments, rows, num_documents, clean, attempt):
    """Where the random B of each row comes from.

    The original draws up to ten times until it is another document, then takes what it has. Clean
    draws among the others, with keys of its own for every attempt.
    """
    for row in rows:
        segment = segments[row]
        own = segment.a_document
        if clean:
            key = derive(derive(segment.key, DERIVE_CLEAN), attempt)
            other = between(key, DRAW_OTHER, 0, num_documents - 2)
            segment.b_document = other + 1 if other >= own else other
            continue
        for number in range(DRAW_OTHER, DRAW_OTHER + MAX_TRIES):
            segment.b_document = between(segment.key, number, 0, num_documents - 1)
            if segment.b_document != own:
                break


@compiled
def draw_segments(sentences, documents, first_document, segments, rows, clean, attempt):
    """The random B of each row: sentences from a random one on, until `wanted` tokens."""
    for row in rows:
        segment = segments[row]
        document = segment.b_document - first_document
        first, last = documents[document], documents[document + 1]
        key = derive(derive(segment.key, DERIVE_CLEAN), attempt) if clean else segment.key
        start = between(key, DRAW_START, first, last - 1)
        end = start + 1  # one sentence at least, even when nothing is left to fill
        while end < last and sentences[end] - sentences[start] < segment.wanted:
            end += 1
        segment.b_start, segment.b_stop = sentences[start], sentences[end]
        segment.first_stop = sentences[start + 1]


@compiled
def truncate(a_start, a_stop, b_start, b_stop, max_tokens, clean, key):
    """Drop tokens off the longer range (ties: B) until both fit.

    Front or back by coin; clean: off the front of A and the back of B, so that the seam stays.

    >>> a_start, a_stop, b_start, b_stop = truncate(0, 3, 0, 9, 8, False, np.uint64(1))
    >>> a_stop - a_start, b_stop - b_start
    (3, 5)
    >>> truncate(0, 7, 7, 10, 8, True, np.uint64(1))
    (2, 7, 7, 10)
    """
    coins = derive(key, DERIVE_TRUNCATION)
    for drop in range(a_stop - a_start + b_stop - b_start - max_tokens):
        a_is_longer = a_stop - a_start > b_stop - b_start
        front = a_is_longer if clean else uniform(coins, drop) < 0.5
        if a_is_longer:
            a_start, a_stop = (a_start + 1, a_stop) if front else (a_start, a_stop - 1)
        else:
            b_start, b_stop = (b_start + 1, b_stop) if front else (b_start, b_stop - 1)
    return a_start, a_stop, b_start, b_stop


@compiled
def fit_segments(segments, walk, clean):
    """Truncate every pair; where two segments of one document were swapped, B comes first."""
    for row in range(len(segments)):
        segment = segments[row]
        a_start, a_stop, b_start, b_stop = (
            segment.a_start,
            segment.a_stop,
            segment.b_start,
            segment.b_stop,
        )
        if not walk.random_b and segment.label:
            a_start, a_stop, b_start, b_stop = b_start, b_stop, a_start, a_stop
        segment.a_start, segment.a_stop, segment.b_start, segment.b_stop = truncate(
            a_start, a_stop, b_start, b_stop, walk.max_tokens, clean, segment.key
        )
