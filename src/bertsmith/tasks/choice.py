"""Choice: which of n options goes on from a text (SWAG, paper section 4.4).

Row k * n + j of the features is example k with its option j: [CLS] context [SEP] option [SEP]. The
model gives every row one number; a softmax over the n rows of an example is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.tasks.features import Features
from bertsmith.tasks.reading import asker, check_texts
from bertsmith.tasks.rows import read_columns
from bertsmith.tasks.table import Task
from bertsmith.text.wordpiece import Tokenizer


@dataclass(frozen=True)
class ChoiceExamples:
    """N contexts with n options each."""

    contexts: list[str]
    options: list[list[str]]  # [N][n]
    labels: np.ndarray | None  # int64 [N], the number of the right option
    source: str  # file name, for messages
    lines: list[int]  # 1-based line of each example in `source`, for messages

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def num_options(self) -> int:
        return len(self.options[0])

    def select(self, indices: Sequence[int] | np.ndarray) -> ChoiceExamples:
        """The examples at `indices`, in that order."""
        return replace(
            self,
            contexts=[self.contexts[i] for i in indices],
            options=[self.options[i] for i in indices],
            labels=None if self.labels is None else self.labels[np.asarray(indices, np.int64)],
            lines=[self.lines[i] for i in indices],
        )

    def identities(self) -> list[tuple[str, ...]]:
        """What makes two examples exact duplicates: the context and the options, spaces trimmed."""
        return [
            (context.strip(), *(option.strip() for option in options))
            for context, options in zip(self.contexts, self.options, strict=True)
        ]


def read_choices(path: Path, task: Task, need_labels: bool = True) -> ChoiceExamples:
    """Read one file of a choice task.

    The context is the text, with the start of the sentence (the row's text_pair) behind it where
    there is one. The options are a column each, or one column with a list or a mapping of them.
    A label is the number of the right option from 0, its column's name or its key in the mapping.

    Errors: ValueError, one line with file and line, for all that `rows.read_columns` refuses, an
    empty context or option, fewer than two options, rows of unequal numbers of options, a label
    that is none of them.
    """
    assert task.kind == "choice"
    wanted = {task.text: asker(task, "--text")}
    if task.text_pair is not None:
        wanted[task.text_pair] = asker(task, "--text-pair")
    wanted |= dict.fromkeys(task.options, asker(task, "--options"))
    if need_labels:
        wanted[task.label] = asker(task, "--label")
    columns, lines = read_columns(path, wanted, task.header)

    contexts = check_texts(columns[task.text], task.text, path, lines)
    if task.text_pair is not None:
        starts = columns[task.text_pair]
        contexts = [f"{a} {b or ''}".strip() for a, b in zip(contexts, starts, strict=True)]
    keys, options = [], []
    for number, line in enumerate(lines):
        cells = [columns[name][number] for name in task.options]
        found = _options(cells, task.options, f"{path}:{line}")
        keys.append(list(found))
        options.append(list(found.values()))
        if len(found) != len(options[0]):
            raise ValueError(
                f"{path}:{line}: {len(found)} options, but the first row has {len(options[0])}:"
                " give every row the same number"
            )
    labels = None
    if need_labels:
        values = zip(columns[task.label], keys, lines, strict=True)
        found = [_label(value, names, f"{path}:{line}") for value, names, line in values]
        labels = np.array(found, np.int64)
    return ChoiceExamples(contexts, options, labels, str(path), lines)


def _options(cells: list[Any], columns: Sequence[str], where: str) -> dict[str, str]:
    """The options of a row by the name that a label may call them."""
    found = dict(zip(columns, cells, strict=True))
    if len(cells) == 1:
        (whole,) = cells
        if not isinstance(whole, (list, dict)):
            raise ValueError(
                f"{where}: {whole!r:.60} in column '{columns[0]}' is not a list of options: name a"
                " column an option, or write a list in a .jsonl"
            )
        found = whole if isinstance(whole, dict) else {str(k): v for k, v in enumerate(whole)}
    for name, option in found.items():
        if not isinstance(option, str) or not option.strip():
            raise ValueError(f"{where}: option '{name}' is {option!r:.60}, not a text")
    if len(found) < 2:
        raise ValueError(f"{where}: {len(found)} options: a choice needs two or more")
    return found


def _label(value: Any, names: list[str], where: str) -> int:
    """The number of the option that a label names.

    >>> _label("2", ["ending0", "ending1", "ending2"], "x:1"), _label("B", ["A", "B"], "x:1")
    (2, 1)
    """
    label = "" if value is None or isinstance(value, bool) else str(value).strip()
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    if not label:
        raise ValueError(f"{where}: empty label {value!r:.60}: number the right option from 0")
    raise ValueError(
        f"{where}: label {value!r:.60} is no option: they are numbered 0 to {len(names) - 1}"
        f" (names: {', '.join(names)[:60]})"
    )


def featurise_choice(tokenizer: Tokenizer, examples: ChoiceExamples, max_length: int) -> Features:
    """Tokenise N examples of n options into N * n rows; the labels stay one an example, int64 [N].

    Of a row that is too long the longer text loses its last token until it fits, as for pairs.

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    contexts = [context for context in examples.contexts for _ in range(examples.num_options)]
    options = [option for row in examples.options for option in row]
    rows = tokenizer.rows(contexts, options, max_length=max_length, offsets=False)
    return Features(
        rows.ids, rows.token_types, rows.boundaries, examples.labels, max_length, rows.num_cut
    )


def example_lengths(features: Features, num_options: int) -> np.ndarray:
    """Tokens of the longest row of each example, int64 [N]: what batches of examples sort by."""
    return features.lengths.reshape(-1, num_options).max(axis=1)


def option_rows(examples: np.ndarray, num_options: int) -> np.ndarray:
    """The rows of a batch of examples, the options of one after the other: [B] -> [B * n].

    >>> option_rows(np.array([3, 0]), 2)
    array([6, 7, 0, 1])
    """
    return (examples[:, None] * num_options + np.arange(num_options)).reshape(-1)
