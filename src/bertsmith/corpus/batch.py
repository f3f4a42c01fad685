"""A batch of pre-training examples, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
