"""The pre-training examples of a store's split, by position: a pure function of (seed, e, i).

    position (epoch e, index i)
      -> permutation of the epoch's rows              draws.py     constant memory
      -> pair of segments, found from a waypoint      pairs.py     one pass over the index per epoch
         or a run of tokens                           packing.py   (mlm, ltr)
      -> positions masked, or (ltr) the next tokens   masking.py

Nothing is stored and no state moves: to resume is to ask for the next position.

A large split is read in *sections*, so that neither the pass over the index nor the shards in use
grow with it: every epoch puts the shards in another order and divides them among the sections, the
rows of a section are shuffled as those of an epoch, and a random B comes from A's section.

Full rows without padding: the text of a shard end to end, cut every length - 2 tokens.

    shard   w w w w [SEP] w w [SEP] w w w w w ...      each document is followed by one [SEP]
    row k   [CLS] items offset + k n .. offset + (k + 1) n [SEP]      n = length - 2

This is the FULL-SENTENCES packing of RoBERTa (arXiv 1907.11692, section 4.2), but for the cuts:
there a row holds whole sentences and may end early; here it ends at any token, and no row does.
The offset is drawn for each epoch and shard, so that the rows of two epochs are cut elsewhere.
What lies before the offset and after the last whole row waits for another epoch. A shard that has
less than one row gives one, padded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.masking import MASKINGS, MaskRules, mask_rows, predictions_per_length
from bertsmith.corpus.examples.pairs import EpochPairs, PretrainingBatch
from bertsmith.corpus.examples.rng import between, derive, permutation, seed_key
from bertsmith.corpus.examples.settings import NUM_SPECIAL, ExampleSettings
from bertsmith.corpus.store.store import Section, Split, by_number, check_room
from bertsmith.text.tokenizer.wordpiece import Vocabulary

DERIVE_PACKED_SHARDS, DERIVE_ROWS = 1, 2  # keys under an epoch's; stream.py has the other
DRAW_OFFSET = 0


@compiled
def pack_rows(tokens, begins, documents, starts, stops, rows, cls_id, sep_id, input_ids, lengths):
    """Write items starts[k]:stops[k] of a shard to input_ids[rows[k]], between [CLS] and [SEP].

    begins: int64 [D + 1], the item at which each document begins, `Shard.packed_documents`;
    documents[k]: the document in which items start.
    """
    for k in range(len(rows)):
        row, document = rows[k], documents[k]
        input_ids[row, 0] = cls_id
        column = 1
        for item in range(starts[k], stops[k]):
            if item == begins[document + 1] - 1:
                input_ids[row, column] = sep_id
                document += 1
            else:
                input_ids[row, column] = tokens[item - document]
            column += 1
        input_ids[row, column] = sep_id
        lengths[row] = column + 1


@compiled
def row_keys(key, numbers):
    """uint64 [B]: the key of each row's draws."""
    keys = np.empty(len(numbers), np.uint64)
    for k in range(len(numbers)):
        keys[k] = derive(key, numbers[k])
    return keys


class EpochRows:
    """The packed rows of one epoch (of one section), in text order; found in constant memory."""

    def __init__(self, section: Section, length: int, epoch_key: np.uint64) -> None:
        self.section, self._width = section, length - 2
        self._key = np.uint64(derive(epoch_key, DERIVE_ROWS))
        shards_key = np.uint64(derive(epoch_key, DERIVE_PACKED_SHARDS))
        self._offsets, counts = [], [0]
        for number, shard in enumerate(section.shards):
            spare = max(0, shard.num_tokens + shard.num_documents - self._width)
            key = np.uint64(derive(shards_key, number))
            offset = between(key, DRAW_OFFSET, 0, min(spare, self._width - 1))
            self._offsets.append(offset)
            counts.append((spare - offset) // self._width + 1 if shard.num_documents else 0)
        self._first_rows = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def fill(
        self, numbers: np.ndarray, batch: PretrainingBatch, cls_id: int, sep_id: int
    ) -> np.ndarray:
        """Write the rows of these numbers (int64 [B]); returns uint64 [B], the keys of draws.

        Errors: ValueError that names a damaged file.
        """
        places = np.searchsorted(self._first_rows, numbers, side="right") - 1
        for number, rows in by_number(places):
            shard, local = self.section.shards[number], numbers[rows] - self._first_rows[number]
            begins = shard.packed_documents
            starts = self._offsets[number] + local * self._width
            stops = np.minimum(starts + self._width, begins[-1])
            documents, last = (
                np.searchsorted(begins, items, side="right") - 1 for items in (starts, stops)
            )  # as many separators lie before an item
            tokens = shard.tokens.verified(starts - documents, stops - last)
            pack_rows(
                tokens,
                begins,
                documents,
                starts,
                stops,
                rows,
                cls_id,
                sep_id,
                batch.input_ids,
                batch.lengths,
            )
        return row_keys(self._key, numbers)


KEPT_PLANS = 2
# Keys under an epoch's, and of order under a section's; pairs.py and packing.py have 1 and 2.
DERIVE_ORDER, DERIVE_SECTIONS, DERIVE_SHARDS = 0, 3, 4


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
        """For messages.

        >>> str(Position(1, 7)), str(Position(0, 5, section=2))
        ('epoch 1, index 7', 'epoch 0, section 2, index 5')
        """
        section = f"section {self.section}, " if self.section else ""
        return f"epoch {self.epoch}, {section}index {self.index}"


@compiled
def shuffled(first, count, size, key):
    """int64 [count]: what comes at first, first + 1, ... in the order of `key` of 0..size-1."""
    numbers = np.empty(count, np.int64)
    for place in range(count):
        numbers[place] = permutation(first + place, size, key)
    return numbers


class PretrainingStream:
    """Batches of a split by position; every method is pure and may be called by any thread.

    Errors: ValueError when no pair can be made of the split, or it was built with another
    vocabulary; when a batch is read, ValueError that names a damaged file.
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
        self._special_ids = vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id
        self._seed_key = seed_key(seed)
        self._predictions = predictions_per_length(
            settings.length, settings.mask_rate, settings.num_predictions
        )
        self._rules = MaskRules(
            vocabulary.continuation,
            MASKINGS[settings.masking],
            settings.mask_share,
            settings.keep_share,
            vocabulary.mask_id,
            vocabulary.cls_id,
            vocabulary.sep_id,
        )
        check_room([split])
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
                + (", or build the store with a larger --held-out" * (name == "held_out"))
            )

    @property
    def streams(self) -> tuple[PretrainingStream, ...]:
        """As of a mixture: a stream of each store."""
        return (self,)

    def examples_in_epoch(self, epoch: int) -> int:
        """Number of rows in an epoch; it differs a little from epoch to epoch."""
        return sum(len(self.epoch(epoch, number)) for number in range(self.split.num_sections))

    def advance(self, position: Position, size: int) -> Position:
        """The position `size` examples later."""
        epoch, section, index = position.epoch, position.section, position.index + size
        while index >= (count := len(self.epoch(epoch, section))):
            (epoch, section), index = self._behind(epoch, section), index - count
        return Position(epoch, index, section)

    def _behind(self, epoch: int, section: int) -> tuple[int, int]:
        last = section + 1 == self.split.num_sections
        return (epoch + 1, 0) if last else (epoch, section + 1)

    def positions(self, position: Position, size: int) -> list[Position]:
        """The position of each of the `size` rows of a batch, to name one in a message."""
        return [
            Position(run.epoch, index, run.section)
            for run, count in self._runs(position, size)
            for index in range(run.index, run.index + count)
        ]

    def batch(self, position: Position, size: int) -> tuple[PretrainingBatch, Position]:
        """The `size` examples from `position` on, across ends of epochs, and the next position."""
        length, num_predictions = self.settings.length, self.settings.num_predictions
        pad_id, cls_id, sep_id = self._special_ids
        batch = PretrainingBatch.empty(size, length, num_predictions, pad_id)
        keys = np.zeros(size, np.uint64)
        filled = 0
        for run, count in self._runs(position, size):
            rows = self.epoch(run.epoch, run.section)
            key = self._section_key(run.epoch, run.section)
            order_key = np.uint64(derive(key, DERIVE_ORDER))
            numbers = shuffled(run.index, count, len(rows), order_key)
            part = batch.rows(filled, filled + count)
            keys[filled : filled + count] = rows.fill(numbers, part, cls_id, sep_id)
            filled += count
        if self.settings.objective == "ltr":
            predict_next(batch)
        else:
            mask_rows(
                batch.input_ids,
                batch.lengths,
                self._predictions[batch.lengths],
                keys,
                self._rules,
                batch.masked_positions,
                batch.masked_labels,
                batch.masked_weights,
            )
        return batch, self.advance(position, size)

    def _runs(self, position: Position, size: int) -> Iterator[tuple[Position, int]]:
        """The parts of a batch that lie in one section: where each begins, and its rows."""
        while size > 0:
            position = self.advance(position, 0)
            rows = len(self.epoch(position.epoch, position.section))
            count = min(size, rows - position.index)
            yield position, count
            index = position.index + count
            position, size = Position(position.epoch, index, position.section), size - count

    def _epoch_key(self, epoch: int) -> np.uint64:
        return np.uint64(derive(self._seed_key, epoch))

    def _section_key(self, epoch: int, section: int) -> np.uint64:
        key = self._epoch_key(epoch)
        if self.split.num_sections == 1:
            return key
        sections_key = np.uint64(derive(key, DERIVE_SECTIONS))
        return np.uint64(derive(sections_key, section))

    def epoch(self, epoch: int, section: int = 0) -> EpochPairs | EpochRows:
        """The rows of an epoch's section in the order of the text; the two used last are kept."""
        place = epoch, section
        with self._lock:  # so that a plan is made once, however many threads ask
            rows = self._plans.pop(place, None)
            if rows is None:
                rows = self._plan(*place)
            self._plans[place] = rows
            while len(self._plans) > KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            return rows

    def _section(self, epoch: int, number: int) -> Section:
        """The shards of a section, all of them where there is one section only."""
        split, count = self.split, self.split.num_sections
        if count == 1:
            return split
        first, last = (len(split.shards) * place // count for place in (number, number + 1))
        key = np.uint64(derive(self._epoch_key(epoch), DERIVE_SHARDS))
        return split.section(sorted(shuffled(first, last - first, len(split.shards), key)))

    def _fetch_ahead(self, place: tuple[int, int]) -> None:
        """Have the files of a section fetched while the one before it is read."""
        section = self._section(*place)
        self._ahead = {place: section}

        def fetch() -> None:
            with suppress(OSError, ValueError):  # who reads the section will be told
                for shard in section.shards:  # one by one: what is under way can be left
                    _ = shard.files

        threading.Thread(target=fetch, name="fetch", daemon=True).start()

    def _plan(self, epoch: int, number: int) -> EpochPairs | EpochRows:
        settings, key = self.settings, self._section_key(epoch, number)
        section = self._ahead.pop((epoch, number), None) or self._section(epoch, number)
        self._check_documents(section)
        section.open()
        if self.split.storage.room is not None and self.split.num_sections > 1:
            self._fetch_ahead(self._behind(epoch, number))
        if not settings.has_pairs:
            return EpochRows(section, settings.length, key)
        pairs = EpochPairs(
            section,
            settings.length - NUM_SPECIAL,
            settings.short_rate,
            key,
            random_b=settings.objective == "mlm+nsp",
            clean=settings.pairs == "clean",
        )
        if len(pairs) == 0:  # of sentence order: no document has two tokens
            raise ValueError(
                f"{self.split.storage}: no document of the {self.split.name} split can be cut in "
                "two segments: build the store of longer documents"
            )
        return pairs


def predict_next(batch: PretrainingBatch) -> None:
    """Every token is predicted at the position before it (a causal language model).

    But for the [SEP] that ends a row: it stands wherever the row was cut, which nobody can know.
    """
    following = batch.input_ids[:, 1:]
    batch.masked_positions[:] = np.arange(following.shape[1])
    batch.masked_labels[:] = following
    batch.masked_weights[:] = batch.masked_positions + 2 < batch.lengths[:, None]
