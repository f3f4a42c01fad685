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

from bertsmith.tasks.examples import asker, check_texts, only_labelled
from bertsmith.tasks.features import Features, choice_windows, text_rows
from bertsmith.tasks.labels import give_label, shares
from bertsmith.tasks.task import Layout, Task
from bertsmith.text.readers.tables import read_columns
from bertsmith.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceExamples:
    """N contexts with n options each."""

    contexts: list[str]
    options: list[list[str]]  # [N][n]
    labels: np.ndarray | None  # int64 [N], the number of the right option
    source: str  # file name, for messages
    lines: list[int]  # 1-based line of each example in `source`, for messages
    rows: list[dict[str, Any]] | None = None  # the whole rows, to be written with an answer each

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def num_options(self) -> int:
        return len(self.options[0])

    @property
    def num_classes(self) -> int:
        return self.num_options

    def record(self, k: int) -> dict[str, Any]:
        """Example k for `dev_scores.json`."""
        return {"text": self.contexts[k], "options": self.options[k]}

    def select(self, indices: Sequence[int] | np.ndarray) -> ChoiceExamples:
        """The examples at `indices`, in that order."""
        return replace(
            self,
            contexts=[self.contexts[i] for i in indices],
            options=[self.options[i] for i in indices],
            labels=None if self.labels is None else self.labels[np.asarray(indices, np.int64)],
            lines=[self.lines[i] for i in indices],
        )

    def describe_labels(self) -> str:
        """Share of rows in which each option is the right one."""
        assert self.labels is not None
        names = [str(number) for number in range(self.num_options)]
        balance = shares(names, np.bincount(self.labels, minlength=len(names)), len(self))
        return f"{len(names)} options, the right one is {balance}"

    def identities(self) -> list[tuple[str, ...]]:
        """Context and options of each, spaces trimmed; equal ones are exact duplicates."""
        return [
            (context.strip(), *(option.strip() for option in options))
            for context, options in zip(self.contexts, self.options, strict=True)
        ]


def read_choices(path: Path, task: Task, need_labels: bool = True) -> ChoiceExamples:
    """Read one file of a choice task.

    The context is the text, with the start of the sentence (the row's text_pair) behind it where
    there is one; a cell of it may be empty or null. The options are a column each, or one column
    with a list or a mapping of them. A label is the number of the right option from 0, its column's
    name or its key in the mapping.

    Errors: ValueError, one line with file and line, for all that `read_columns` refuses, an empty
    context or option, fewer than two options, rows of unequal numbers of options, a label
    that is none of them.
    """
    assert task.task_type == "choice"
    wanted = {task.text: asker(task, "--text")}
    if task.text_pair is not None:
        wanted[task.text_pair] = asker(task, "--text-pair")
    wanted |= dict.fromkeys(task.options, asker(task, "--options"))
    if need_labels:
        wanted[task.label] = asker(task, "--label")
    columns, lines = read_columns(path, wanted, task.header)
    if need_labels:
        columns, lines = only_labelled(columns, lines, task, path)

    contexts = check_texts(columns[task.text], task.text, path, lines)
    if task.text_pair is not None:
        name, starts = task.text_pair, columns[task.text_pair]
        for start, line in zip(starts, lines, strict=True):
            if start is not None and not isinstance(start, str):
                raise ValueError(f"{path}:{line}: column '{name}' holds {start!r:.60}, not a text")
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
        found = [_label(value, names, f"{path}:{line}", task) for value, names, line in values]
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


def _label(value: Any, names: list[str], where: str, task: Task) -> int:
    """The number of the option that a label names.

    >>> from bertsmith.tasks.task import find_task
    >>> [_label(value, ["one", "two", "three"], "x:1", find_task("swag")) for value in ("2", "two")]
    [2, 1]
    """
    label = "" if value is None or isinstance(value, bool) else str(value).strip()
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    if not label:
        raise ValueError(
            f"{where}: empty label {value!r:.60}: number the right option from 0;"
            f" {give_label(task)}"
        )
    raise ValueError(
        f"{where}: label {value!r:.60} is no option: they are numbered 0 to {len(names) - 1}"
        f" (names: {', '.join(names)[:60]})"
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceFeatures(Features):
    """Rows of U units with n options each, the rows of a unit one after the other."""

    num_options: int

    @property
    def unit_lengths(self) -> np.ndarray:
        return self.lengths.reshape(-1, self.num_options).max(axis=1)

    def unit_rows(self, units: np.ndarray) -> np.ndarray:
        """The options of one unit after the other: [B] -> [B * n]."""
        return (units[:, None] * self.num_options + np.arange(self.num_options)).reshape(-1)

    def pooled(self, outputs: np.ndarray, how: str, exclusive: bool = True) -> np.ndarray:
        """The outputs of rows [U * n, 1] as those of the options [N * n, 1].

        One of the n options beside a window is right, so what is pooled is a choice.
        """
        choices = outputs.reshape(-1, self.num_options)
        return super().pooled(choices, how, exclusive).reshape(-1, 1)


def featurise_choice(
    tokenizer: Tokenizer, examples: ChoiceExamples, layout: Layout
) -> ChoiceFeatures:
    """Tokenise N examples of n options into N * n rows; the labels stay one an example, int64 [N].

    The longer text of a row that is too long loses its last token until it fits, as for pairs.
    `layout.long_texts` has other ways: `text_rows` and, for windows, `choice_windows`; then a
    window is a unit, with the label of its example.

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    if layout.long_texts == "windows":
        found = choice_windows(tokenizer, examples.contexts, examples.options, layout)
    else:
        contexts = [context for context in examples.contexts for _ in range(examples.num_options)]
        options = [option for row in examples.options for option in row]
        found = text_rows(tokenizer, contexts, options, layout)
    found = found._replace(is_cut=found.is_cut.reshape(len(examples), -1).any(axis=1))
    return ChoiceFeatures(**found.fields(examples.labels, layout), num_options=examples.num_options)
