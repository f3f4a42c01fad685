"""Examples -> rows with labels for the model, and batches of them.

Everything is flat: row k is `boundaries[k]:boundaries[k + 1]`; no Python object per token. What
training draws is a unit: one row, or (choice) the rows of an example. A long text may be several
units, see `long_texts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.layout import Layout
from bertsmith.tasks.long_texts import pool, text_rows
from bertsmith.tasks.reading import Examples
from bertsmith.text.sequences import concatenated_ranges, pad, round_up
from bertsmith.text.wordpiece import Tokenizer

REMEDIES = {
    "cut": "--long-texts head-tail or windows, or a larger --max-length, reads more of them",
    "head-tail": "--long-texts windows or a larger --max-length reads all of them",
    "windows": "a larger --max-length reads more of them",
}
SORTED_TOGETHER = 50  # batches: little padding, yet an order that stays random


@dataclass(frozen=True)
class Features:
    """R rows as flat arrays of T tokens."""

    ids: np.ndarray  # int32 [T]
    token_types: np.ndarray  # int32 [T], 0 in the first text, 1 in the second
    boundaries: np.ndarray  # int64 [R + 1]
    labels: np.ndarray | None  # a unit each: int64 [R], float32 [R] or bool [R, K]
    max_length: int
    num_truncated: int  # examples of which a part is not read
    unit_examples: np.ndarray | None = None
    """With windows: the example each unit is of, int64 [U]. None: a unit is an example."""

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [R]."""
        return np.diff(self.boundaries)

    @property
    def unit_lengths(self) -> np.ndarray:
        """Tokens of the longest row of each unit, int64 [U]: what batches are sorted by."""
        return self.lengths

    @property
    def sorted_together(self) -> int:
        """Batches of training that are sorted by length together, see `training_batches`."""
        return SORTED_TOGETHER

    def batch(self, units: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
        """The rows of some units with their labels: ids, types [B, S], lengths [B], labels."""
        assert self.labels is not None
        ids, types, lengths = self.padded(units, pad_id)
        return {"ids": ids, "types": types, "lengths": lengths, "labels": self.labels[units]}

    def pooled(self, outputs: np.ndarray, how: str, exclusive: bool = False) -> np.ndarray:
        """The outputs of rows [R, K] as those of examples [N, K]; with windows by `pool`."""
        if self.unit_examples is None:
            return outputs
        return pool(outputs, self.unit_examples, how, exclusive)

    def long_note(self, layout: Layout) -> str | None:
        """What became of texts that do not fit into a row, for a person; None: all fit."""
        cut, at = f"{self.num_truncated:,}", f"{self.max_length} tokens"
        if self.unit_examples is not None:
            windows, examples = len(self.unit_examples), int(self.unit_examples[-1]) + 1
            note = f"{examples:,} examples are read in {windows:,} windows of at most {at}"
            if self.num_truncated:
                note += f"; of {cut} the end of the shorter text is lost"
            return note if windows > examples or self.num_truncated else None
        if not self.num_truncated:
            return None
        examples, part = len(self.unit_lengths), "end" if layout.long_texts == "cut" else "middle"
        return f"{cut} of {examples:,} examples have more than {at} and lose their {part}"

    def long_remedy(self, layout: Layout) -> str:
        """The flags of fine-tuning by which more of what is not read would be."""
        return REMEDIES[layout.long_texts]

    def of_rows(self, indices: np.ndarray) -> Features:
        """Some of the rows by themselves, without labels."""
        lengths = self.lengths[indices]
        tokens = concatenated_ranges(self.boundaries[indices], lengths)
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        ids, types = self.ids[tokens], self.token_types[tokens]
        return Features(ids, types, boundaries, None, self.max_length, 0)

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


def featurise(tokenizer: Tokenizer, examples: Examples, layout: Layout) -> Features:
    """Tokenise examples and lay them out as google-research/bert run_classifier.py does.

    A single text keeps its head; of a pair the longer text loses its last token until the
    example fits (`_truncate_seq_pair` there). `layout.long_texts` has other ways, see `text_rows`;
    every window of a text has its label.

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    rows, unit_examples, is_cut = text_rows(tokenizer, examples.texts, examples.pairs, layout)
    labels = examples.labels
    if labels is not None and unit_examples is not None:
        labels = labels[unit_examples]
    return Features(
        ids=rows.ids,
        token_types=rows.token_types,
        boundaries=rows.boundaries,
        labels=labels,
        max_length=layout.max_length,
        num_truncated=int(is_cut.sum()),
        unit_examples=unit_examples,
    )


def training_batches(
    lengths: np.ndarray,
    batch_size: int,
    seed: int,
    epoch: int,
    sorted_together: int = SORTED_TOGETHER,
) -> list[np.ndarray]:
    """An epoch in batches of `batch_size` examples (one may be smaller), as arrays of indices.

    Shuffle, sort by length inside pools of `sorted_together` batches, cut, shuffle the batches:
    every example once, the order random from epoch to epoch and a pure function of (seed, epoch).
    A batch has its shortest example first.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), sorted_together * batch_size):
        pool = order[start : start + sorted_together * batch_size]
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
