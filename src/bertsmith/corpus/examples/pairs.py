"""Sentence pairs of an epoch, made on the fly: [CLS] A [SEP] B [SEP] for many rows at once.

    pair numbers -> chunks, by waypoint and walk      walk.py, a call for each shard
                 -> random B, where one is wanted     walk.py, a call for each shard of a B
                 -> truncated to the row, copied

The rows of a batch may lie in several shards: token ranges are planned with the sentence index
alone, the blocks of the ranges are verified, then the ids are copied.

A batch of pre-training examples, as arrays.

The walk of `create_pretraining_data.py` over a document, as compiled kernels for many rows.

Letters: S sentences and D documents of one shard; a *chunk* is the run of sentences from which a
pair is made. Every draw is keyed by (seed, epoch, document) or (seed, epoch, document, example).

The walk never looks into the other document from which a random B comes, so the number of pairs
of a document depends on its own sentence lengths and draws alone. One quick pass over the sentence
index therefore plans an epoch: it counts the pairs and leaves a waypoint at every 64th, from where
any pair is a walk of at most 63 steps, however long or short the documents are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.rng import between, derive, uniform
from bertsmith.corpus.store.store import Section, by_number


@dataclass
class PretrainingBatch:
    """B rows of S tokens, P of them to predict; rows shorter than S end in [PAD]."""

    input_ids: np.ndarray  # int32 [B, S]
    token_types: np.ndarray  # int32 [B, S], 0 = [CLS] A [SEP] and padding, 1 = B [SEP]
    lengths: np.ndarray  # int32 [B], tokens that are not padding
    masked_positions: np.ndarray  # int32 [B, P], ascending, then 0
    masked_labels: np.ndarray  # int32 [B, P], the original ids; with ltr those one position on
    masked_weights: np.ndarray  # float32 [B, P], 1 = to predict, 0 = unused slot
    next_labels: np.ndarray  # int64 [B], 1 = B is random (NSP) or the segments are swapped (SOP)

    @classmethod
    def empty(cls, size: int, length: int, num_predictions: int, pad_id: int) -> PretrainingBatch:
        return cls(
            input_ids=np.full((size, length), pad_id, np.int32),
            token_types=np.zeros((size, length), np.int32),
            lengths=np.zeros(size, np.int32),
            masked_positions=np.zeros((size, num_predictions), np.int32),
            masked_labels=np.zeros((size, num_predictions), np.int32),
            masked_weights=np.zeros((size, num_predictions), np.float32),
            next_labels=np.zeros(size, np.int64),
        )

    def rows(self, start: int, stop: int) -> PretrainingBatch:
        """Rows start:stop as a view: what is written to it is written here."""
        return PretrainingBatch(*(array[start:stop] for array in vars(self).values()))

    def words(self, unused: int) -> np.ndarray:
        """The tokens of each row as they were before masking, int64 [B, S].

        [CLS], [SEP] and padding are `unused`.
        """
        words = self.input_ids.astype(np.int64)
        rows, slots = np.nonzero(self.masked_weights)
        words[rows, self.masked_positions[rows, slots]] = self.masked_labels[rows, slots]
        separator = words[np.arange(len(words)), self.lengths - 1][:, None]  # ends every row
        is_padding = np.arange(words.shape[1]) >= self.lengths[:, None]
        words[(words == separator) | is_padding] = unused
        words[:, 0] = unused
        return words


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


DERIVE_DOCUMENTS = 1  # key under an epoch's; stream.py has the others


class Pair(NamedTuple):
    """A pair of segments; `key` (uint64) is the key of the example's draws."""

    a: np.ndarray  # ids, at least one
    b: np.ndarray
    label: bool
    key: np.uint64


@compiled
def copy_rows(tokens, starts, stops, rows, columns, input_ids):
    """Put tokens[starts[k]:stops[k]] into input_ids[rows[k]] from columns[k] on."""
    for k in range(len(rows)):
        row, column = rows[k], columns[k]
        for offset in range(stops[k] - starts[k]):
            input_ids[row, column + offset] = tokens[starts[k] + offset]


@compiled
def frame_rows(a_lengths, b_lengths, cls_id, sep_id, input_ids, token_types, lengths):
    """The special ids around A and B, the segment ids and the lengths."""
    for row in range(len(lengths)):
        middle = a_lengths[row] + 2
        end = middle + b_lengths[row] + 1
        input_ids[row, 0] = cls_id
        input_ids[row, middle - 1] = input_ids[row, end - 1] = sep_id
        token_types[row, middle:end] = 1
        lengths[row] = end


class EpochPairs:
    """The pairs of one epoch (of one section), in the order of the documents.

    max_tokens: of A and B together. random_b: half of the Bs or more come from elsewhere, with
    label 1 (next-sentence prediction); otherwise half of the pairs are swapped, with label 1
    (sentence order). clean: see `ExampleSettings.pairs`. Making this object walks the whole
    sentence index once (about 100 million sentences a second); a pair is then found in constant
    time.
    """

    def __init__(
        self,
        section: Section,
        max_tokens: int,
        short_rate: float,
        epoch_key: np.uint64,
        *,
        random_b: bool = True,
        clean: bool = False,
    ) -> None:
        self.section, self._clean = section, clean
        key = np.uint64(derive(epoch_key, DERIVE_DOCUMENTS))
        self._walk = Walk(key, max_tokens, float(short_rate), random_b)
        self._waypoints: list[np.ndarray] = []
        counts = [0]
        for shard, first in zip(section.shards, section.first_documents.tolist(), strict=True):
            count, waypoints = plan(shard.sentences, shard.documents, first, self._walk)
            self._waypoints.append(waypoints)
            counts.append(count)
        self._first_pairs = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._first_pairs[-1])

    def __getitem__(self, number: int) -> Pair:
        if not 0 <= number < len(self):
            raise IndexError(f"pair {number} of {len(self)}")
        segments = self.segments(np.array([number]))
        self.fit(segments)
        segment, shards = segments[0], self.section.shards
        a = shards[segment["a_shard"]].tokens.read(segment["a_start"], segment["a_stop"])
        b = shards[segment["b_shard"]].tokens.read(segment["b_start"], segment["b_stop"])
        return Pair(a, b, bool(segment["label"]), segment["key"])

    def fill(
        self, numbers: np.ndarray, batch: PretrainingBatch, cls_id: int, sep_id: int
    ) -> np.ndarray:
        """Write the pairs of these numbers (int64 [B]); returns uint64 [B], the keys of draws.

        Errors: ValueError that names a damaged file.
        """
        segments = self.segments(numbers)
        self.fit(segments)
        a_lengths = segments["a_stop"] - segments["a_start"]
        b_lengths = segments["b_stop"] - segments["b_start"]
        for side, columns in (("a", np.ones_like(a_lengths)), ("b", a_lengths + 2)):
            for number, rows in by_number(segments[f"{side}_shard"]):
                starts, stops = segments[f"{side}_start"][rows], segments[f"{side}_stop"][rows]
                tokens = self.section.shards[number].tokens.verified(starts, stops)
                copy_rows(tokens, starts, stops, rows, columns[rows], batch.input_ids)
        frame_rows(
            a_lengths,
            b_lengths,
            cls_id,
            sep_id,
            batch.input_ids,
            batch.token_types,
            batch.lengths,
        )
        batch.next_labels[:] = segments["label"]
        return segments["key"].copy()

    def segments(self, numbers: np.ndarray) -> np.ndarray:
        """The pairs before they are cut to the row: records `SEGMENTS` [B]."""
        segments = np.zeros(len(numbers), SEGMENTS)
        places = np.searchsorted(self._first_pairs, numbers, side="right") - 1
        segments["a_shard"] = segments["b_shard"] = places
        for number, rows in by_number(places):
            shard = self.section.shards[number]
            find_chunks(
                shard.sentences,
                shard.documents,
                self.section.first_documents[number],
                self._walk,
                self._waypoints[number],
                numbers[rows] - self._first_pairs[number],
                rows,
                segments,
            )
        if self._walk.random_b:
            rows = np.flatnonzero(segments["label"])
            for attempt in range(MAX_TRIES if self._clean else 1):
                self._draw_b(segments, rows, attempt)
                if not self._clean or len(rows) == 0:
                    break
                rows = rows[self.begins_like_the_true_one(segments[rows])]
        return segments

    def fit(self, segments: np.ndarray) -> None:
        """Cut the pairs to the row, in place."""
        fit_segments(segments, self._walk, self._clean)

    def begins_like_the_true_one(self, segments: np.ndarray) -> np.ndarray:
        """bool [B]: B's first sentence is random and equals the sentence that follows A."""
        wanted = segments["next_stop"] - segments["a_stop"]
        found = segments["first_stop"] - segments["b_start"]
        equal = (wanted == found) & (wanted > 0) & (segments["label"] == 1)
        shards = self.section.shards
        for row in np.flatnonzero(equal):
            segment = segments[row]
            a_tokens, b_tokens = (shards[segment[f"{side}_shard"]].tokens for side in "ab")
            true_one = a_tokens.read(segment["a_stop"], segment["next_stop"])
            equal[row] = (
                true_one == b_tokens.read(segment["b_start"], segment["first_stop"])
            ).all()
        return equal

    def _draw_b(self, segments: np.ndarray, rows: np.ndarray, attempt: int) -> None:
        """A random B for these rows."""
        section = self.section
        draw_documents(segments, rows, section.num_documents, self._clean, attempt)
        documents = segments["b_document"][rows]
        places = np.searchsorted(section.first_documents, documents, side="right") - 1
        segments["b_shard"][rows] = places
        for number, group in by_number(places):
            draw_segments(
                section.shards[number].sentences,
                section.shards[number].documents,
                section.first_documents[number],
                segments,
                rows[group],
                self._clean,
                attempt,
            )
