"""The pre-training examples of a store's split, by position: a pure function of (seed, e, i).

    position (epoch e, index i)
      -> permutation of the epoch's pairs           draws.py    constant memory
      -> pair of segments, found from a waypoint    pairs.py    one pass over the index per epoch
      -> [CLS] A [SEP] B [SEP], positions masked    masking.py

Nothing is stored and no state moves: to resume is to ask for the next position.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from bertsmith.corpus.draws import derive, seed_key
from bertsmith.corpus.masking import MaskRules, mask_rows, predictions_per_length
from bertsmith.corpus.pairs import EpochPairs
from bertsmith.corpus.store import Split
from bertsmith.text.vocabulary import Vocabulary

NUM_SPECIAL = 3  # [CLS], [SEP], [SEP]
MIN_LENGTH = NUM_SPECIAL + 2  # one token of A and one of B
KEPT_EPOCHS = 2


@dataclass(frozen=True)
class ExampleSettings:
    """How examples are made; the defaults are the paper's (its section 3.1 and appendix A.2)."""

    length: int = 128
    """Tokens of a row, special ones included."""
    mask_rate: float = 0.15
    """Share of a row's tokens to predict."""
    short_rate: float = 0.1
    """Share of documents whose pass aims at a shorter length, drawn at random."""
    whole_word: bool = False
    """Mask all pieces of a word or none."""
    max_predictions: int | None = None
    """Most tokens to predict in a row; by default length x mask_rate, rounded."""
    mask_share: float = 0.8
    """Share of the chosen tokens that become [MASK]."""
    keep_share: float = 0.1
    """Share of the chosen tokens left as they are; the rest become random pieces."""

    def __post_init__(self) -> None:
        if self.length < MIN_LENGTH:
            raise ValueError(f"length = {self.length}: a pair needs at least {MIN_LENGTH} tokens")
        if not 0 < self.mask_rate <= 1:
            raise ValueError(f"mask_rate = {self.mask_rate}: expected above 0, at most 1")
        if not 0 <= self.short_rate <= 1:
            raise ValueError(f"short_rate = {self.short_rate}: expected 0 to 1")
        if self.max_predictions is not None and self.max_predictions < 1:
            raise ValueError(f"max_predictions = {self.max_predictions}: expected at least 1")
        if min(self.mask_share, self.keep_share) < 0 or self.mask_share + self.keep_share > 1:
            raise ValueError(
                f"mask_share = {self.mask_share}, keep_share = {self.keep_share}: "
                "shares are at least 0 and at most 1 together"
            )

    @property
    def num_predictions(self) -> int:
        """Width P of a batch's masked arrays.

        >>> ExampleSettings(length=128).num_predictions, ExampleSettings(512).num_predictions
        (19, 77)
        """
        return self.max_predictions or max(1, round(self.length * self.mask_rate))


@dataclass(frozen=True)
class Position:
    """The next example: number `index` in the shuffled order of `epoch`, both from 0."""

    epoch: int = 0
    index: int = 0


@dataclass
class PretrainingBatch:
    """B rows of S tokens, P of them to predict; rows shorter than S end in [PAD]."""

    input_ids: np.ndarray  # int32 [B, S]
    token_types: np.ndarray  # int32 [B, S], 0 = [CLS] A [SEP] and padding, 1 = B [SEP]
    lengths: np.ndarray  # int32 [B], tokens that are not padding
    masked_positions: np.ndarray  # int32 [B, P], ascending, then 0
    masked_labels: np.ndarray  # int32 [B, P], the original ids
    masked_weights: np.ndarray  # float32 [B, P], 1 = to predict, 0 = unused slot
    next_labels: np.ndarray  # int64 [B], 0 = B follows A, 1 = B is random

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


class PretrainingStream:
    """Batches of a split by position; every method is pure and may be called by any thread.

    Errors: ValueError when no pair can be made of the split, or it was built with another
    vocabulary; when a batch is read, ValueError that names a damaged file.
    """

    def __init__(
        self, split: Split, vocabulary: Vocabulary, settings: ExampleSettings, seed: int
    ) -> None:
        if split.num_documents < 2:
            raise ValueError(
                f"{split.folder}: {split.num_documents} document(s) in the {split.name} split, and "
                "next-sentence pairs need two: put a blank line between documents"
                + (", or build the store with a larger --held-out" * (split.name == "held_out"))
            )
        if vocabulary.fingerprint != split.vocabulary_fingerprint:
            raise ValueError(
                f"{split.folder}: built with vocabulary {split.vocabulary_fingerprint[:12]}, not "
                f"with {vocabulary.fingerprint[:12]} ({len(vocabulary):,} pieces): build a store "
                "with `bertsmith corpus ... --vocab` and this vocabulary"
            )
        self._split, self._settings = split, settings
        self._special_ids = vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id
        self._seed_key = seed_key(seed)
        self._predictions = predictions_per_length(
            settings.length, settings.mask_rate, settings.num_predictions
        )
        self._rules = MaskRules(
            vocabulary.continuation,
            settings.whole_word,
            settings.mask_share,
            settings.keep_share,
            vocabulary.mask_id,
            vocabulary.cls_id,
            vocabulary.sep_id,
        )
        self._epochs: dict[int, EpochPairs] = {}  # the most recently used last
        self._lock = threading.Lock()

    def examples_in_epoch(self, epoch: int) -> int:
        """Number of pairs in an epoch; it differs a little from epoch to epoch."""
        return len(self._pairs(epoch))

    def advance(self, position: Position, size: int) -> Position:
        """The position `size` examples later."""
        epoch, index = position.epoch, position.index + size
        while index >= (count := self.examples_in_epoch(epoch)):
            epoch, index = epoch + 1, index - count
        return Position(epoch, index)

    def positions(self, position: Position, size: int) -> list[Position]:
        """The position of each of the `size` rows of a batch, to name one in a message."""
        rows = [self.advance(position, 0)]
        while len(rows) < size:
            rows.append(self.advance(rows[-1], 1))
        return rows[:size]

    def batch(self, position: Position, size: int) -> tuple[PretrainingBatch, Position]:
        """The `size` examples from `position` on, across ends of epochs, and the next position."""
        length, num_predictions = self._settings.length, self._settings.num_predictions
        pad_id, cls_id, sep_id = self._special_ids
        batch = PretrainingBatch.empty(size, length, num_predictions, pad_id)
        keys = np.zeros(size, np.uint64)
        for row, place in enumerate(self.positions(position, size)):
            a, b, is_random, keys[row] = self._pairs(place.epoch).shuffled(place.index)
            middle, end = len(a) + 2, len(a) + len(b) + NUM_SPECIAL  # [CLS] A [SEP] | B [SEP]
            ids = batch.input_ids[row]
            ids[0], ids[middle - 1], ids[end - 1] = cls_id, sep_id, sep_id
            ids[1 : middle - 1], ids[middle : end - 1] = a, b
            batch.token_types[row, middle:end] = 1
            batch.lengths[row], batch.next_labels[row] = end, is_random
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

    def _pairs(self, epoch: int) -> EpochPairs:
        """The epoch's pairs; the plans of the two epochs used last are kept."""
        with self._lock:  # so that a plan is made once, however many threads ask
            pairs = self._epochs.pop(epoch, None)
            if pairs is None:
                key = np.uint64(derive(self._seed_key, epoch))
                max_tokens = self._settings.length - NUM_SPECIAL
                pairs = EpochPairs(self._split, max_tokens, self._settings.short_rate, key)
            self._epochs[epoch] = pairs
            while len(self._epochs) > KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            return pairs
