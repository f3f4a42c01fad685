"""Sentence pairs of an epoch, made on the fly: [CLS] A [SEP] B [SEP] for many rows at once.

    pair numbers -> chunks, by waypoint and walk      walk.py, a call for each shard
                 -> random B, where one is wanted     walk.py, a call for each shard of a B
                 -> truncated to the row, copied

The rows of a batch may lie in several shards: token ranges are planned with the sentence index
alone, the blocks of the ranges are verified, then the ids are copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.batch import PretrainingBatch
from bertsmith.corpus.draws import derive
from bertsmith.corpus.store import Section, by_number
from bertsmith.corpus.walk import (
    MAX_TRIES,
    SEGMENTS,
    Walk,
    draw_documents,
    draw_segments,
    find_chunks,
    fit_segments,
    plan,
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
