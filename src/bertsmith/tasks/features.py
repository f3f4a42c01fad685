"""Examples -> rows with labels for the model, and batches of them.

Everything is flat: example k is `boundaries[k]:boundaries[k + 1]`; no Python object per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.reading import Examples
from bertsmith.text.sequences import pad, round_up
from bertsmith.text.wordpiece import Tokenizer

POOL = 50  # batches sorted by length together: little padding, yet an order that stays random


@dataclass(frozen=True)
class Features:
    """N examples as flat arrays of T tokens."""

    ids: np.ndarray  # int32 [T]
    token_types: np.ndarray  # int32 [T], 0 in the first text, 1 in the second
    boundaries: np.ndarray  # int64 [N + 1]
    labels: np.ndarray | None  # int64 [N]
    max_length: int
    num_truncated: int  # examples that were cut

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [N]."""
        return np.diff(self.boundaries)

    def padded(
        self, indices: np.ndarray, pad_id: int, multiple: int = 8
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A batch: (input_ids int32 [B, S], token_types int32 [B, S], lengths int32 [B]).

        S is the longest of the batch, rounded up to `multiple` but not above max_length.
        """
        lengths = self.lengths[indices]
        width = min(round_up(int(lengths.max()), multiple), self.max_length)
        input_ids = pad(self.ids, self.boundaries, indices, width, pad_id)
        token_types = pad(self.token_types, self.boundaries, indices, width, 0)
        return input_ids, token_types, lengths.astype(np.int32)


def featurise(tokenizer: Tokenizer, examples: Examples, max_length: int) -> Features:
    """Tokenise examples and lay them out as google-research/bert run_classifier.py does.

    A single text keeps its head; of a pair the longer text loses its last token until the
    example fits (`_truncate_seq_pair` there).

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    rows = tokenizer.rows(examples.texts, examples.pairs, max_length=max_length, offsets=False)
    return Features(
        rows.ids, rows.token_types, rows.boundaries, examples.labels, max_length, rows.num_cut
    )


def training_batches(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """An epoch in batches of `batch_size` examples (one may be smaller), as arrays of indices.

    Shuffle, sort by length inside pools of 50 batches, cut, shuffle the batches: every example
    once, the order random from epoch to epoch and a pure function of (seed, epoch).
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = order[start : start + POOL * batch_size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[k : k + batch_size] for k in range(0, len(pool), batch_size)]
    return [batches[k] for k in random.permutation(len(batches))]


def token_budget_batches(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Batches for evaluation: longest first, each at most `budget` tokens with its padding.

    An example longer than the budget is a batch of its own.

    >>> token_budget_batches(np.array([3, 9, 4, 4]), 10)
    [array([1]), array([2, 3]), array([0])]
    """
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // int(lengths[order[start]]))  # the first is the longest
        batches.append(order[start : start + size])
        start += size
    return batches
