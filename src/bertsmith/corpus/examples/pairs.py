"""Sentence pairs of an epoch, made on the fly: [CLS] A [SEP] B [SEP].

The procedure is `create_instances_from_document` of Google's `create_pretraining_data.py`:

    target    tokens of A and B together, once for a document: `max_tokens`, at times fewer
    chunk     sentences until the target is reached or the document ends
    A         the chunk's first sentences, a random number of them
    B         by coin the chunk's other sentences, or random ones: those of another document, from
              a random one on, until the target is reached; the unused sentences are put back
    row       tokens are dropped off the ends of the longer segment until both fit

Clean pairs (`nsp_sampling`) fill their rows: the last chunk of a document reaches back as far as it
needs, and a random B begins where enough is left, in a document that has as much, if six draws
find one. Where a whole document is shorter than a row, random Bs are as short as its true one.

Every random number is a function of (seed, epoch, document, example), so that a pair can be made
alone. A pass over the sentence index plans an epoch: it counts the pairs and keeps the place of
every 64th, from where any pair is at most 63 steps away. The tokens are read last.

Letters: B rows of S tokens, P of them to predict; D documents of one shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.rng import KEY_CLEAN, KEY_TRUNCATION, between, fold_in, uniform
from bertsmith.corpus.store.store import Section, by_number

STRIDE = 64  # pairs from one entry of the pair index to the next: 24 bytes for 64 pairs
MAX_TRIES = 10  # to find another document than the pair's own; clean, also a B that will do

NO_LIMIT = 1 << 62

# Numbers of the draws under a document's key, and under an example's.
DRAW_SHORT, DRAW_SHORT_LENGTH = 0, 1
DRAW_A_END, DRAW_COIN, DRAW_START, DRAW_OTHER = 0, 1, 2, 3  # other: 3..12, one for each try


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

    def in_order(self, order: np.ndarray) -> PretrainingBatch:
        """A copy with the rows in that order, int64 [B]."""
        return PretrainingBatch(*(array[order] for array in vars(self).values()))

    def words(self, unused: int) -> np.ndarray:
        """int64 [B, S]: the ids before masking; [CLS], [SEP] and padding are `unused`."""
        words = self.input_ids.astype(np.int64)
        rows, slots = np.nonzero(self.masked_weights)
        words[rows, self.masked_positions[rows, slots]] = self.masked_labels[rows, slots]
        separator = words[np.arange(len(words)), self.lengths - 1][:, None]  # ends every row
        is_padding = np.arange(words.shape[1]) >= self.lengths[:, None]
        words[(words == separator) | is_padding] = unused
        words[:, 0] = unused
        return words


class PairRules(NamedTuple):
    """Rules that decide the pairs of an epoch."""

    key: np.uint64  # of the epoch's documents
    max_tokens: int  # of A and B together
    short_seq_prob: float  # of the documents whose pairs aim at fewer
    random_b: bool  # NSP, half of the Bs or more are random; else SOP, half of the pairs swapped
    clean: bool  # see `ExampleSettings.nsp_sampling`


# The segments of a pair as token ranges of their shards; documents are counted through all shards.
# label: 1 = B is random, or B comes first
# a_next_stop: end of the sentence after A; a_stop where the document ends
# b_target, b_most, b_first_stop: of a random B, the tokens to reach, its most, and the end of its
# first sentence
SEGMENTS = np.dtype(
    [("key", np.uint64), ("label", np.int64)]
    + [(f"a_{name}", np.int64) for name in ("document", "shard", "start", "stop", "next_stop")]
    + [(f"b_{name}", np.int64) for name in ("document", "shard", "start", "stop", "first_stop")]
    + [("b_target", np.int64), ("b_most", np.int64)]
)


@compiled
def target_length(document_key, rules):
    """Tokens of A and B together, drawn once for a document: mostly all that fit."""
    if uniform(document_key, DRAW_SHORT) < rules.short_seq_prob:
        return between(document_key, DRAW_SHORT_LENGTH, 2, rules.max_tokens)
    return rules.max_tokens


@compiled
def has_pair(sentences, start, last, rules):
    """Sentences start:last of a document give another pair: any do, or two tokens to cut."""
    return sentences[last] - sentences[start] >= (1 if rules.random_b else 2)


@compiled
def chunk_start(sentences, start, bounds, target, rules):
    """The sentence to begin with: clean, an earlier one where less than `target` is left."""
    first, last = bounds
    while rules.clean and start > first and sentences[last] - sentences[start] < target:
        start -= 1
    return start


@compiled
def next_segments(sentences, start, bounds, target, rules, example_key):
    """(begin, a_end, end, is_random): sentences begin:a_end are A, a_end:end B or are put back."""
    last = bounds[1]
    begin = chunk_start(sentences, start, bounds, target, rules)
    end = begin + 1
    while end < last and sentences[end] - sentences[begin] < target:
        end += 1
    if rules.clean and sentences[last] - sentences[begin + 1] < target:
        end = last  # what is left behind it would not fill a row
    a_end = begin + 1
    if end - begin >= 2:
        a_end = begin + between(example_key, DRAW_A_END, 1, end - begin - 1)
    is_random = rules.random_b and (end - begin == 1 or uniform(example_key, DRAW_COIN) < 0.5)
    return begin, a_end, end, is_random


@compiled
def plan(index, rules):
    """(number of pairs of a shard, pair_index int64 [ceil(pairs / 64), 3]).

    index: sentences and documents of the `Shard`, number of its first document through all shards.
    A row of pair_index is (document in the shard, sentence, example in the document).
    """
    sentences, documents, first_document = index
    pair_index = np.empty((len(sentences) // STRIDE + 1, 3), np.int64)
    count = 0
    for document in range(len(documents) - 1):
        document_key = fold_in(rules.key, first_document + document)
        target = target_length(document_key, rules)
        start, last, example = documents[document], documents[document + 1], 0
        while has_pair(sentences, start, last, rules):
            if count % STRIDE == 0:
                pair_index[count // STRIDE] = document, start, example
            key = fold_in(document_key, example)
            bounds = documents[document], last
            _, a_end, end, is_random = next_segments(sentences, start, bounds, target, rules, key)
            start = max(a_end, start + 1) if is_random else end  # the unused ones are put back
            count, example = count + 1, example + 1
    return count, pair_index[: -(-count // STRIDE)].copy()


@compiled
def find_segments(index, rules, pair_index, numbers, rows, segments):
    """Write pair numbers[k] of a shard to segments[rows[k]], all but a random B."""
    sentences, documents, first_document = index
    for k in range(len(rows)):
        place, steps = pair_index[numbers[k] // STRIDE], numbers[k] % STRIDE
        document, start, example = place[0], place[1], place[2]
        while True:
            last = documents[document + 1]
            if not has_pair(sentences, start, last, rules):
                document, start, example = document + 1, last, 0
                continue
            document_key = fold_in(rules.key, first_document + document)
            target, key = target_length(document_key, rules), fold_in(document_key, example)
            bounds = documents[document], last
            found = next_segments(sentences, start, bounds, target, rules, key)
            begin, a_end, end, is_random = found
            if steps == 0:
                break
            start = max(a_end, start + 1) if is_random else end
            steps, example = steps - 1, example + 1
        pair = segments[rows[k]]
        pair.key, pair.label = key, is_random
        pair.a_document = pair.b_document = first_document + document
        pair.a_start, pair.a_stop = sentences[begin], sentences[a_end]
        if not rules.random_b:
            pair.label = uniform(key, DRAW_COIN) < 0.5
            if a_end == end:  # one sentence, cut anywhere
                most = sentences[end] - sentences[begin] - 1
                pair.a_stop = pair.a_start + between(key, DRAW_A_END, 1, most)
        pair.a_next_stop = sentences[min(a_end + 1, last)]
        pair.b_start, pair.b_stop = pair.a_stop, sentences[end]
        pair.b_target, pair.b_most = target - (pair.a_stop - pair.a_start), NO_LIMIT
        true_length = sentences[end] - sentences[a_end]
        if rules.clean and 0 < true_length < pair.b_target:  # a short row: its length tells nothing
            pair.b_target = pair.b_most = true_length


@compiled
def draw_documents(num_documents, rules, attempt, rows, segments):
    """Draw the document of each row's random B.

    The original draws up to ten times until it is another document, then takes what it has; clean
    draws among the others, with keys of its own for every attempt.
    """
    for row in rows:
        pair = segments[row]
        if rules.clean:
            key = fold_in(fold_in(pair.key, KEY_CLEAN), attempt)
            other = between(key, DRAW_OTHER, 0, num_documents - 2)
            pair.b_document = other + 1 if other >= pair.a_document else other
            continue
        for number in range(DRAW_OTHER, DRAW_OTHER + MAX_TRIES):
            pair.b_document = between(pair.key, number, 0, num_documents - 1)
            if pair.b_document != pair.a_document:
                break


@compiled
def draw_segments(index, rules, attempt, rows, segments):
    """Draw each row's random B: sentences from a random one on, until the target is reached.

    Clean: from one behind which as many tokens are, or the document's first.
    """
    sentences, documents, first_document = index
    for row in rows:
        pair = segments[row]
        document = pair.b_document - first_document
        first, last = documents[document], documents[document + 1]
        key = fold_in(fold_in(pair.key, KEY_CLEAN), attempt) if rules.clean else pair.key
        latest = chunk_start(sentences, last - 1, (first, last), pair.b_target, rules)
        start = between(key, DRAW_START, first, latest)
        end = start + 1  # one sentence at least, even when nothing is left to fill
        while end < last and sentences[end] - sentences[start] < pair.b_target:
            end += 1
        pair.b_start = sentences[start]
        pair.b_stop = min(sentences[end], pair.b_start + pair.b_most)
        pair.b_first_stop = sentences[start + 1]


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
    coins = fold_in(key, KEY_TRUNCATION)
    for drop in range(a_stop - a_start + b_stop - b_start - max_tokens):
        a_is_longer = a_stop - a_start > b_stop - b_start
        front = a_is_longer if clean else uniform(coins, drop) < 0.5
        if a_is_longer:
            a_start, a_stop = (a_start + 1, a_stop) if front else (a_start, a_stop - 1)
        else:
            b_start, b_stop = (b_start + 1, b_stop) if front else (b_start, b_stop - 1)
    return a_start, a_stop, b_start, b_stop


@compiled
def fit_segments(segments, rules):
    """Truncate every pair; where two segments of one document were swapped, B comes first."""
    for row in range(len(segments)):
        pair = segments[row]
        a_start, a_stop, b_start, b_stop = pair.a_start, pair.a_stop, pair.b_start, pair.b_stop
        if not rules.random_b and pair.label:
            a_start, a_stop, b_start, b_stop = b_start, b_stop, a_start, a_stop
        pair.a_start, pair.a_stop, pair.b_start, pair.b_stop = truncate(
            a_start, a_stop, b_start, b_stop, rules.max_tokens, rules.clean, pair.key
        )


@compiled
def copy_tokens(tokens, starts, stops, rows, columns, input_ids):
    """Put tokens[starts[k]:stops[k]] into input_ids[rows[k]] from columns[k] on."""
    for k in range(len(rows)):
        row, column = rows[k], columns[k]
        for offset in range(stops[k] - starts[k]):
            input_ids[row, column + offset] = tokens[starts[k] + offset]


@compiled
def add_special_tokens(a_lengths, b_lengths, special_ids, input_ids, token_types, lengths):
    """Put [CLS] and [SEP] around A and B; fill the segment ids and the lengths."""
    cls_id, sep_id = special_ids
    for row in range(len(lengths)):
        middle = a_lengths[row] + 2
        end = middle + b_lengths[row] + 1
        input_ids[row, 0] = cls_id
        input_ids[row, middle - 1] = input_ids[row, end - 1] = sep_id
        token_types[row, middle:end] = 1
        lengths[row] = end


class EpochPairs:
    """The pairs of one epoch (of one section), in the order of the documents.

    It is made by one pass over the sentence index: 100 million sentences a second.
    """

    def __init__(self, section: Section, rules: PairRules) -> None:
        self.section, self._rules = section, rules
        self._indexes = [
            (shard.sentences, shard.documents, first)
            for shard, first in zip(section.shards, section.first_documents.tolist(), strict=True)
        ]
        plans = [plan(index, rules) for index in self._indexes]
        self._pair_indexes = [pair_index for _, pair_index in plans]
        self._first_pairs = np.cumsum([0, *(count for count, _ in plans)])

    def __len__(self) -> int:
        return int(self._first_pairs[-1])

    def fill(
        self, numbers: np.ndarray, batch: PretrainingBatch, cls_id: int, sep_id: int
    ) -> np.ndarray:
        """Write the pairs of these numbers (int64 [B]); returns uint64 [B], the examples' keys."""
        segments = self.segments(numbers)
        self.fit(segments)
        a_lengths = segments["a_stop"] - segments["a_start"]
        b_lengths = segments["b_stop"] - segments["b_start"]
        for side, columns in (("a", np.ones_like(a_lengths)), ("b", a_lengths + 2)):
            for number, rows in by_number(segments[f"{side}_shard"]):
                starts, stops = segments[f"{side}_start"][rows], segments[f"{side}_stop"][rows]
                tokens = self.section.shards[number].tokens.verified(starts, stops)
                copy_tokens(tokens, starts, stops, rows, columns[rows], batch.input_ids)
        ids, types, lengths = batch.input_ids, batch.token_types, batch.lengths
        add_special_tokens(a_lengths, b_lengths, (cls_id, sep_id), ids, types, lengths)
        batch.next_labels[:] = segments["label"]
        return segments["key"].copy()

    def segments(self, numbers: np.ndarray) -> np.ndarray:
        """The pairs before they are cut to the row: records `SEGMENTS` [B]."""
        segments = np.zeros(len(numbers), SEGMENTS)
        shards = np.searchsorted(self._first_pairs, numbers, side="right") - 1
        segments["a_shard"] = segments["b_shard"] = shards
        for shard, rows in by_number(shards):
            local = numbers[rows] - self._first_pairs[shard]
            pair_index = self._pair_indexes[shard]
            find_segments(self._indexes[shard], self._rules, pair_index, local, rows, segments)
        if not self._rules.random_b:
            return segments
        rows = np.flatnonzero(segments["label"])
        for attempt in range(MAX_TRIES if self._rules.clean else 1):
            if attempt > 0:
                drawn = segments[rows]
                is_short = drawn["b_stop"] - drawn["b_start"] < drawn["b_target"]
                again = is_short & (attempt <= MAX_TRIES // 2)  # the rest find one unlike the true
                rows = rows[again | self.begins_like_the_true_one(drawn)]
            if len(rows) == 0:
                break
            draw_documents(self.section.num_documents, self._rules, attempt, rows, segments)
            firsts = self.section.first_documents
            shards = np.searchsorted(firsts, segments["b_document"][rows], side="right") - 1
            segments["b_shard"][rows] = shards
            for shard, group in by_number(shards):
                draw_segments(self._indexes[shard], self._rules, attempt, rows[group], segments)
        return segments

    def fit(self, segments: np.ndarray) -> None:
        """Cut the pairs to the row, in place."""
        fit_segments(segments, self._rules)

    def begins_like_the_true_one(self, segments: np.ndarray) -> np.ndarray:
        """bool [B]: B is random, and its first sentence equals the one that follows A."""
        true_length = segments["a_next_stop"] - segments["a_stop"]
        length = segments["b_first_stop"] - segments["b_start"]
        equal = (true_length == length) & (true_length > 0) & (segments["label"] == 1)
        shards = self.section.shards
        for row in np.flatnonzero(equal):
            pair = segments[row]
            a_tokens, b_tokens = (shards[pair[f"{side}_shard"]].tokens for side in "ab")
            true_one = a_tokens.read(pair["a_stop"], pair["a_next_stop"])
            equal[row] = (true_one == b_tokens.read(pair["b_start"], pair["b_first_stop"])).all()
        return equal
