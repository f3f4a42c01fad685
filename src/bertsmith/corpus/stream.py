"""The pre-training examples of a store's split, by position: a pure function of (seed, e, i).

    position (epoch e, index i)
      -> permutation of the epoch's rows              draws.py     constant memory
      -> pair of segments, found from a waypoint      pairs.py     one pass over the index per epoch
         or a run of tokens                           packing.py   (mlm, ltr)
      -> positions masked, or (ltr) the next tokens   masking.py

Nothing is stored and no state moves: to resume is to ask for the next position.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.batch import PretrainingBatch
from bertsmith.corpus.draws import derive, permutation, seed_key
from bertsmith.corpus.masking import MASKINGS, MaskRules, mask_rows, predictions_per_length
from bertsmith.corpus.packing import EpochRows
from bertsmith.corpus.pairs import EpochPairs
from bertsmith.corpus.settings import NUM_SPECIAL, ExampleSettings
from bertsmith.corpus.store import Split
from bertsmith.text.vocabulary import Vocabulary

KEPT_EPOCHS = 2
DERIVE_ORDER = 0  # key under an epoch's; pairs.py and packing.py have the others


@dataclass(frozen=True)
class Position:
    """The next example: number `index` in the shuffled order of `epoch`, both from 0."""

    epoch: int = 0
    index: int = 0


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
        fewest = 2 if settings.objective == "mlm+nsp" else 1
        if split.num_documents < fewest:
            raise ValueError(
                f"{split.folder}: {split.num_documents} document(s) in the {split.name} split, and "
                + ("next-sentence pairs need two" if fewest == 2 else "none gives no rows")
                + ": put a blank line between documents"
                + (", or build the store with a larger --held-out" * (split.name == "held_out"))
            )
        if vocabulary.fingerprint != split.vocabulary_fingerprint:
            raise ValueError(
                f"{split.folder}: built with vocabulary {split.vocabulary_fingerprint[:12]}, not "
                f"with {vocabulary.fingerprint[:12]} ({len(vocabulary):,} pieces): build a store "
                "with `bertsmith corpus ... --vocab` and this vocabulary"
            )
        self.split, self.settings = split, settings
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
        self._epochs: dict[int, EpochPairs | EpochRows] = {}  # the most recently used last
        self._lock = threading.Lock()

    def examples_in_epoch(self, epoch: int) -> int:
        """Number of rows in an epoch; it differs a little from epoch to epoch."""
        return len(self.epoch(epoch))

    def advance(self, position: Position, size: int) -> Position:
        """The position `size` examples later."""
        epoch, index = position.epoch, position.index + size
        while index >= (count := self.examples_in_epoch(epoch)):
            epoch, index = epoch + 1, index - count
        return Position(epoch, index)

    def positions(self, position: Position, size: int) -> list[Position]:
        """The position of each of the `size` rows of a batch, to name one in a message."""
        return [
            Position(run.epoch, index)
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
            rows = self.epoch(run.epoch)
            order_key = np.uint64(derive(self._epoch_key(run.epoch), DERIVE_ORDER))
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
        """The parts of a batch that lie in one epoch: where each begins, and its rows."""
        while size > 0:
            position = self.advance(position, 0)
            count = min(size, self.examples_in_epoch(position.epoch) - position.index)
            yield position, count
            position, size = Position(position.epoch, position.index + count), size - count

    def _epoch_key(self, epoch: int) -> np.uint64:
        return np.uint64(derive(self._seed_key, epoch))

    def epoch(self, epoch: int) -> EpochPairs | EpochRows:
        """The epoch's rows in the order of the text; the plans of the two used last are kept."""
        with self._lock:  # so that a plan is made once, however many threads ask
            rows = self._epochs.pop(epoch, None)
            if rows is None:
                rows = self._plan(self._epoch_key(epoch))
            self._epochs[epoch] = rows
            while len(self._epochs) > KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            return rows

    def _plan(self, key: np.uint64) -> EpochPairs | EpochRows:
        settings = self.settings
        if not settings.has_pairs:
            return EpochRows(self.split, settings.length, key)
        pairs = EpochPairs(
            self.split,
            settings.length - NUM_SPECIAL,
            settings.short_rate,
            key,
            random_b=settings.objective == "mlm+nsp",
            clean=settings.pairs == "clean",
        )
        if len(pairs) == 0:  # of sentence order: no document has two tokens
            raise ValueError(
                f"{self.split.folder}: no document of the {self.split.name} split can be cut in "
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
