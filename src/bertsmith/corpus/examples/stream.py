"""The pre-training examples of a store's split, by position: a pure function of (seed, e, i).

    position (epoch e, index i)
      -> permutation of the epoch's rows              rng.py       constant memory
      -> pair of segments, found by the pair index    pairs.py     one pass over the index per epoch
         or a packed row                              `EpochRows`  (mlm, ltr, ltr+rtl)
      -> positions masked, or (ltr...) the next tokens   masking.py

Nothing is stored and no state moves: to resume is to ask for the next position.

A large split is read in *sections*, so that neither the pass over the index nor the shards in use
grow with it: every epoch puts the shards in another order and divides them among the sections, the
rows of a section are shuffled as those of an epoch, and a random B comes from A's section.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.masking import MASKINGS, MaskRules, mask_rows, predictions_per_length
from bertsmith.corpus.examples.pairs import EpochPairs, PairRules, PretrainingBatch
from bertsmith.corpus.examples.rng import (
    KEY_DOCUMENTS,
    KEY_OFFSETS,
    KEY_ORDER,
    KEY_PACKED_ROWS,
    KEY_SECTIONS,
    KEY_SHARDS,
    between,
    derived,
    fold_in,
    permutation,
    seed_key,
)
from bertsmith.corpus.examples.settings import NEXT_TOKEN, NUM_SPECIAL, ExampleSettings
from bertsmith.corpus.store.store import Section, Split, by_number, check_capacity
from bertsmith.text.tokenizer.wordpiece import Vocabulary

KEPT_PLANS = 2
DRAW_OFFSET = 0


@dataclass(frozen=True)
class Position:
    """The next example: number `index` in the shuffled order of `section` of `epoch`, all from 0.

    In a mixture of stores: example `index` of all, where each store stands at its own of `parts`.
    """

    epoch: int = 0
    index: int = 0
    section: int = 0
    parts: tuple[Position, ...] = ()

    def __str__(self) -> str:
        """
        >>> str(Position(1, 7)), str(Position(0, 5, section=2))
        ('epoch 1, index 7', 'epoch 0, section 2, index 5')
        """
        section = f"section {self.section}, " if self.section else ""
        return f"epoch {self.epoch}, {section}index {self.index}"


class NoPairs(ValueError):
    """A text in which no document has two tokens to put in order."""


class PretrainingStream:
    """Batches of a split by position; every method is pure and may be called by any thread.

    Errors: ValueError when no pair can be made of the split, it was built with another vocabulary,
    or, when a batch is read, a file is damaged.
    """

    def __init__(
        self, split: Split, vocabulary: Vocabulary, settings: ExampleSettings, seed: int
    ) -> None:
        self.split, self.settings = split, settings
        self._check_documents(split)
        if vocabulary.fingerprint != split.vocabulary_fingerprint:
            raise ValueError(
                f"{split.storage}: built with vocabulary {split.vocabulary_fingerprint[:12]}, not "
                f"with {vocabulary.fingerprint[:12]} ({len(vocabulary):,} pieces): build a store "
                "with `bertsmith corpus ... --vocab` and this vocabulary"
            )
        self._special_ids = vocabulary.cls_id, vocabulary.sep_id
        self._shape = settings.max_length, settings.num_predictions, vocabulary.pad_id
        self._seed_key = seed_key(seed)
        self._rules = MaskRules(
            predictions_per_length(
                settings.max_length, settings.mlm_probability, settings.num_predictions
            ),
            vocabulary.continuation,
            MASKINGS[settings.masking],
            settings.mask_replace_prob,
            1 - settings.random_replace_prob,
            vocabulary.mask_id,
            *self._special_ids,
        )
        check_capacity([split])
        self._plans: dict[tuple[int, int], EpochPairs | EpochRows] = {}  # the last used last
        self._ahead: dict[tuple[int, int], Section] = {}
        self._lock = threading.Lock()

    def _check_documents(self, section: Section) -> None:
        fewest = 2 if self.settings.objective == "mlm+nsp" else 1
        if section.num_documents < fewest:
            name = self.split.name
            raise ValueError(
                f"{self.split.storage}: {section.num_documents} document(s) in the {name} split, "
                + ("and next-sentence pairs need two" if fewest == 2 else "and none gives no rows")
                + ": put a blank line between documents"
                + (", or build a store that holds out more" * (name == "held_out"))
            )

    @property
    def streams(self) -> tuple[PretrainingStream, ...]:
        """The stream of each store: a mixture has several."""
        return (self,)

    def batch(self, position: Position, size: int) -> tuple[PretrainingBatch, Position]:
        """The `size` examples from `position` on, across ends of epochs, and the next position."""
        batch = PretrainingBatch.empty(size, *self._shape)
        keys = np.zeros(size, np.uint64)
        filled = 0
        for start, count in self._spans(position, size):
            rows = self.epoch(start.epoch, start.section)
            order_key = derived(self._section_key(start.epoch, start.section), KEY_ORDER)
            numbers = shuffled(start.index, count, len(rows), order_key)
            part = batch.rows(filled, filled + count)
            keys[filled : filled + count] = rows.fill(numbers, part, *self._special_ids)
            filled += count
        if self.settings.objective in NEXT_TOKEN:
            # each token at the position before it, but the [SEP] that was put at a row's end
            batch.masked_labels[:] = batch.input_ids[:, 1:]
            positions = np.arange(batch.masked_labels.shape[1])
            batch.masked_positions[:] = positions
            ends = batch.lengths - (not self.settings.bare)
            batch.masked_weights[:] = positions + 1 < ends[:, None]
        else:
            predictions = batch.masked_positions, batch.masked_labels, batch.masked_weights
            mask_rows(batch.input_ids, batch.lengths, keys, self._rules, predictions)
        return batch, self.advance(position, size)

    def advance(self, position: Position, size: int) -> Position:
        """The position `size` examples later."""
        epoch, section, index = position.epoch, position.section, position.index + size
        while index >= (count := len(self.epoch(epoch, section))):
            (epoch, section), index = self._next_section(epoch, section), index - count
        return Position(epoch, index, section)

    def positions(self, position: Position, size: int) -> list[Position]:
        """The position of each row of a batch, to name one in a message."""
        return [
            replace(start, index=start.index + k)
            for start, count in self._spans(position, size)
            for k in range(count)
        ]

    def examples_in_epoch(self, epoch: int) -> int:
        """Number of rows in an epoch; it differs a little from epoch to epoch."""
        return sum(len(self.epoch(epoch, number)) for number in range(self.split.num_sections))

    def epoch(self, epoch: int, section: int = 0) -> EpochPairs | EpochRows:
        """The rows of an epoch's section in the order of the text; the two used last are kept."""
        with self._lock:  # so that a plan is made once, however many threads ask
            rows = self._plans.pop((epoch, section), None)
            if rows is None:
                rows = self._plan(epoch, section)
            self._plans[epoch, section] = rows
            while len(self._plans) > KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            return rows

    def _spans(self, position: Position, size: int) -> Iterator[tuple[Position, int]]:
        """Yield the begin and the number of rows of each part of a batch, one section each."""
        while size > 0:
            position = self.advance(position, 0)
            rows = len(self.epoch(position.epoch, position.section))
            count = min(size, rows - position.index)
            yield position, count
            position = Position(position.epoch, position.index + count, position.section)
            size -= count

    def _next_section(self, epoch: int, section: int) -> tuple[int, int]:
        is_last = section + 1 == self.split.num_sections
        return (epoch + 1, 0) if is_last else (epoch, section + 1)

    def _section_key(self, epoch: int, section: int) -> np.uint64:
        key = derived(self._seed_key, epoch)
        return key if self.split.num_sections == 1 else derived(key, KEY_SECTIONS, section)

    def _section(self, epoch: int, number: int) -> Section:
        split, count = self.split, self.split.num_sections
        if count == 1:
            return split
        first, last = (len(split.shards) * k // count for k in (number, number + 1))
        key = derived(self._seed_key, epoch, KEY_SHARDS)
        return split.section(sorted(shuffled(first, last - first, len(split.shards), key)))

    def _plan(self, epoch: int, number: int) -> EpochPairs | EpochRows:
        settings, key = self.settings, self._section_key(epoch, number)
        section = self._ahead.pop((epoch, number), None) or self._section(epoch, number)
        self._check_documents(section)
        section.open()
        if self.split.storage.capacity is not None and self.split.num_sections > 1:
            self._fetch_ahead(*self._next_section(epoch, number))
        if not settings.has_pairs:
            return EpochRows(section, settings.max_length, key, settings.bare)
        rules = PairRules(
            derived(key, KEY_DOCUMENTS),
            settings.max_length - NUM_SPECIAL,
            float(settings.short_seq_prob),
            random_b=settings.objective == "mlm+nsp",
            clean=settings.nsp_sampling == "clean",
        )
        pairs = EpochPairs(section, rules)
        if len(pairs) == 0:  # of sentence order: no document has two tokens
            raise NoPairs(
                f"{self.split.storage}: no document of the {self.split.name} split can be cut in "
                "two segments: build the store of longer documents"
            )
        return pairs

    def _fetch_ahead(self, epoch: int, number: int) -> None:
        section = self._section(epoch, number)
        self._ahead = {(epoch, number): section}

        def fetch() -> None:
            with suppress(OSError, ValueError):  # raised again where the section is read
                for shard in section.shards:  # one by one: a thread that is not waited for
                    _ = shard.files

        threading.Thread(target=fetch, name="fetch", daemon=True).start()


@compiled
def shuffled(first, count, size, key):
    """int64 [count]: numbers first, first + 1, ... in the order of `key` of 0..size-1."""
    numbers = np.empty(count, np.int64)
    for k in range(count):
        numbers[k] = permutation(first + k, size, key)
    return numbers


class EpochRows:
    """The packed rows of one epoch (of one section), in text order; found in constant memory.

        shard   w w w w [SEP] w w [SEP] w w w w w ...      each document is followed by one [SEP]
        row k   [CLS] items offset + k n .. offset + (k + 1) n [SEP]      n = length - 2

    This is the FULL-SENTENCES packing of RoBERTa (arXiv 1907.11692, section 4.2), but cut at any
    token: no row ends early. A `bare` row is its items alone, n = length. The offset is drawn for
    each epoch and shard; items before it and after the last full row wait for another epoch. A
    shard of less than one row gives one, padded.
    """

    def __init__(
        self, section: Section, length: int, epoch_key: np.uint64, bare: bool = False
    ) -> None:
        self.section, self._edge = section, int(not bare)
        self._width = length - 2 * self._edge
        self._key = derived(epoch_key, KEY_PACKED_ROWS)
        self._offsets, counts = [], [0]
        for number, shard in enumerate(section.shards):
            spare = max(0, shard.num_tokens + shard.num_documents - self._width)
            key = derived(epoch_key, KEY_OFFSETS, number)
            offset = between(key, DRAW_OFFSET, 0, min(spare, self._width - 1))
            self._offsets.append(offset)
            counts.append((spare - offset) // self._width + 1 if shard.num_documents else 0)
        self._first_rows = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def fill(
        self, numbers: np.ndarray, batch: PretrainingBatch, cls_id: int, sep_id: int
    ) -> np.ndarray:
        """Write the rows of these numbers (int64 [B]); returns uint64 [B], the examples' keys."""
        shards = np.searchsorted(self._first_rows, numbers, side="right") - 1
        for number, rows in by_number(shards):
            shard, local = self.section.shards[number], numbers[rows] - self._first_rows[number]
            begins = shard.packed_documents
            starts = self._offsets[number] + local * self._width
            stops = np.minimum(starts + self._width, begins[-1])
            documents, last = (  # as many separators lie before an item
                np.searchsorted(begins, items, side="right") - 1 for items in (starts, stops)
            )
            tokens = shard.tokens.verified(starts - documents, stops - last)
            spans, special = (rows, documents, starts, stops), (cls_id, sep_id, self._edge)
            pack_rows(tokens, begins, spans, special, batch.input_ids, batch.lengths)
        return row_keys(self._key, numbers)


@compiled
def pack_rows(tokens, begins, spans, special, input_ids, lengths):
    """Write items of a shard to some rows, between [CLS] and [SEP] if these have an edge of 1.

    begins: int64 [D + 1], the item at which each document begins, `Shard.packed_documents`.
    spans: four int64 [R], the row, the document in which its items start, their start and stop.
    """
    rows, documents, starts, stops = spans
    cls_id, sep_id, edge = special
    for k in range(len(rows)):
        row, document, column = rows[k], documents[k], edge
        input_ids[row, 0] = cls_id
        for item in range(starts[k], stops[k]):
            if item == begins[document + 1] - 1:
                input_ids[row, column] = sep_id
                document += 1
            else:
                input_ids[row, column] = tokens[item - document]
            column += 1
        if edge:
            input_ids[row, column] = sep_id
        lengths[row] = column + edge


@compiled
def row_keys(key, numbers):
    """uint64 [B]: the key of each row."""
    keys = np.empty(len(numbers), np.uint64)
    for k in range(len(numbers)):
        keys[k] = fold_in(key, numbers[k])
    return keys
