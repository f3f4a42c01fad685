"""Examples -> arrays for the model: [CLS] a [SEP] (b [SEP]), cut to a length; batches of them.

Everything is flat: example k is `boundaries[k]:boundaries[k + 1]`; no Python object per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.reading import Examples
from bertsmith.text.wordpiece import Encoded, Tokenizer

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
        width = min(-(-int(lengths.max()) // multiple) * multiple, self.max_length)
        tokens = concatenated_ranges(self.boundaries[:-1][indices], lengths)
        is_token = np.arange(width) < lengths[:, None]  # [B, S]
        input_ids = np.full(is_token.shape, pad_id, np.int32)
        token_types = np.zeros(is_token.shape, np.int32)
        input_ids[is_token] = self.ids[tokens]
        token_types[is_token] = self.token_types[tokens]
        return input_ids, token_types, lengths.astype(np.int32)


def featurise(tokenizer: Tokenizer, examples: Examples, max_length: int) -> Features:
    """Tokenise examples and lay them out as google-research/bert run_classifier.py does.

    A single text keeps its head; of a pair the longer text loses its last token until the
    example fits (`_truncate_seq_pair` there).

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    num_special = 2 if examples.pairs is None else 3
    smallest = 2 * num_special - 1
    if max_length < smallest:
        raise ValueError(f"max_length = {max_length} is too short: at least {smallest}")
    room = max_length - num_special

    first = tokenizer.encode_batch(examples.texts)
    a_full = np.diff(first.boundaries)
    if examples.pairs is None:
        second, b_full = None, np.zeros_like(a_full)
        a_kept, b_kept = np.minimum(a_full, room), b_full
    else:
        second = tokenizer.encode_batch(examples.pairs)
        b_full = np.diff(second.boundaries)
        a_kept, b_kept = truncate_pairs(a_full, b_full, room)

    vocabulary = tokenizer.vocabulary
    boundaries = np.zeros(len(examples) + 1, np.int64)
    np.cumsum(a_kept + b_kept + num_special, out=boundaries[1:])
    starts, ends = boundaries[:-1], boundaries[1:]
    ids = np.empty(boundaries[-1], np.int32)
    token_types = np.zeros(boundaries[-1], np.int32)
    ids[starts] = vocabulary.cls_id
    _place(ids, starts + 1, first, a_kept)
    ids[starts + 1 + a_kept] = vocabulary.sep_id
    if second is not None:
        b_starts = starts + 2 + a_kept
        _place(ids, b_starts, second, b_kept)
        ids[ends - 1] = vocabulary.sep_id
        token_types[concatenated_ranges(b_starts, b_kept + 1)] = 1
    num_truncated = int(np.count_nonzero((a_kept < a_full) | (b_kept < b_full)))
    return Features(ids, token_types, boundaries, examples.labels, max_length, num_truncated)


def _place(ids: np.ndarray, starts: np.ndarray, encoded: Encoded, counts: np.ndarray) -> None:
    """Copy the first counts[k] tokens of text k to ids[starts[k]:]."""
    source = concatenated_ranges(encoded.boundaries[:-1], counts)
    ids[concatenated_ranges(starts, counts)] = encoded.ids[source]


def truncate_pairs(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens of each pair stay, when the longer text (b if equal) loses its last token
    until both fit in `room`: int64 [N], [N] -> int64 [N], [N].

    >>> truncate_pairs(np.array([9, 2, 9]), np.array([3, 9, 9]), 7)
    (array([4, 2, 4]), array([3, 5, 3]))
    """
    a_kept = np.minimum(a, np.maximum(room - b, (room + 1) // 2))
    return a_kept, np.minimum(b, room - a_kept)


def concatenated_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers start, start + 1, ... of every range, one range after the other, int64.

    >>> concatenated_ranges(np.array([10, 50, 20]), np.array([2, 0, 3]))
    array([10, 11, 20, 21, 22])
    """
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)


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
