"""Choice: which of n options goes on from a text (SWAG, paper section 4.4).

Row k * n + j of the features is example k with its option j: [CLS] context [SEP] option [SEP]. The
model gives every row one number; a softmax over the n rows of an example is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.tasks.examples import LabelledExamples, check_texts, read_task
from bertsmith.tasks.features import Features, choice_windows, text_rows
from bertsmith.tasks.labels import describe_balance, label_hint, label_text
from bertsmith.tasks.task import TASKS, EncodingSettings, Task
from bertsmith.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceExamples(LabelledExamples):
    """N contexts with n options each."""

    contexts: list[str]
    options: list[list[str]]  # [N][n]
    labels: np.ndarray | None  # int64 [N], the index of the correct option
    source: str
    lines: list[int]
    rows: list[dict[str, Any]] | None = None  # the full rows, to be written with an answer each
    names: list[list[Any]] | None = None  # [N][n], the options' columns or keys, else their numbers

    @property
    def num_options(self) -> int:
        return len(self.options[0])

    @property
    def num_classes(self) -> int:
        return self.num_options

    def record(self, k: int) -> dict[str, Any]:
        """Example k for `dev_scores.json`."""
        return {"text": self.contexts[k], "options": self.options[k]}

    def duplicate_keys(self) -> list[tuple[str, ...]]:
        texts = zip(self.contexts, self.options, strict=True)
        return [tuple(text.strip() for text in (context, *options)) for context, options in texts]

    def describe_labels(self) -> str:
        assert self.labels is not None
        names = [str(index) for index in range(self.num_options)]
        balance = describe_balance(names, np.bincount(self.labels, minlength=len(names)), len(self))
        return f"{len(names)} options, the right one is {balance}"


def read_choices(path: Path, task: Task, need_labels: bool = True) -> ChoiceExamples:
    """Read one file of a choice task.

    The context is the text, with the start of the sentence (the row's text_pair) after it where
    there is one; a cell of it may be empty or null. The options are a column each, or one column
    with a list or a mapping of them. A label is the index of the correct option, its column's name
    or its key in the mapping.

    Errors: ValueError, one line with file and line, as `read_task`, for an empty context or option,
    fewer than two options, another number of them than in the first row, a label that is none.
    """
    assert task.task_type == "choice"
    columns, lines = read_task(path, task, need_labels)
    contexts = check_texts(columns[task.text], task.text, path, lines)
    if task.text_pair is not None:
        cells = ["" if cell is None else cell for cell in columns[task.text_pair]]
        starts = check_texts(cells, task.text_pair, path, lines, may_be_empty=True)
        contexts = [f"{a} {b}".strip() for a, b in zip(contexts, starts, strict=True)]
    options, labels, names = [], [], []
    for row, line in enumerate(lines):
        cells, where = [columns[name][row] for name in task.options], f"{path}:{line}"
        found = _options(cells, task.options, where)
        options.append(list(found.values()))
        # published data sets number their options, as lists do
        has_names = task.name not in TASKS and not isinstance(cells[0], list)
        names.append(list(found) if has_names else list(range(len(found))))
        if len(found) != len(options[0]):
            raise ValueError(
                f"{where}: {len(found)} options, but the first row has {len(options[0])}:"
                " give every row the same number"
            )
        if need_labels:
            labels.append(_label(columns[task.label][row], list(found), where, task))
    found_labels = np.array(labels, np.int64) if need_labels else None
    return ChoiceExamples(contexts, options, found_labels, str(path), lines, names=names)


def _options(cells: list[Any], columns: Sequence[str], where: str) -> dict[str, str]:
    """The options of a row by their names, as labels call them."""
    found = dict(zip(columns, cells, strict=True))
    if len(cells) == 1:
        (value,) = cells
        if not isinstance(value, (list, dict)):
            raise ValueError(
                f"{where}: {value!r:.60} in column '{columns[0]}' is not a list of options: name a"
                " column an option, or write a list in a .jsonl"
            )
        found = value if isinstance(value, dict) else {str(k): v for k, v in enumerate(value)}
    for name, option in found.items():
        if not isinstance(option, str) or not option.strip():
            raise ValueError(f"{where}: option '{name}' is {option!r:.60}, not a text")
    if len(found) < 2:
        raise ValueError(f"{where}: {len(found)} options: a choice needs two or more")
    return found


def _label(value: Any, names: list[str], where: str, task: Task) -> int:
    """The index of the option that a label names.

    >>> from bertsmith.tasks.task import find_task
    >>> [_label(value, ["one", "two", "three"], "x:1", find_task("swag")) for value in ("2", "two")]
    [2, 1]
    """
    label = "" if value is None or isinstance(value, bool) else label_text(value, names)
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    if not label:
        hint = f"number the right option from 0; {label_hint(task)}"
        raise ValueError(f"{where}: empty label {value!r:.60}: {hint}")
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
        """The options of one unit after the other: [B * n]."""
        return (units[:, None] * self.num_options + np.arange(self.num_options)).reshape(-1)

    def pooled(self, outputs: np.ndarray, how: str, exclusive: bool = True) -> np.ndarray:
        """The outputs of rows [U * n, 1] as those of the options [N * n, 1].

        One of the options beside a window is correct: they are pooled as classes.
        """
        choices = outputs.reshape(-1, self.num_options)
        return super().pooled(choices, how, exclusive).reshape(-1, 1)


def featurize_choice(
    tokenizer: Tokenizer, examples: ChoiceExamples, encoding: EncodingSettings
) -> ChoiceFeatures:
    """Tokenize N examples of n options into N * n rows; labels stay one an example, int64 [N].

    Rows that are too long are cut as `encoding.long_texts` says, see `text_rows` and, for windows,
    `choice_windows`: a window is a unit, with the label of its example.

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    if encoding.long_texts == "windows":
        found = choice_windows(tokenizer, examples.contexts, examples.options, encoding)
    else:
        contexts = [context for context in examples.contexts for _ in range(examples.num_options)]
        options = [option for row in examples.options for option in row]
        found = text_rows(tokenizer, contexts, options, encoding)
    found = found._replace(is_cut=found.is_cut.reshape(len(examples), -1).any(axis=1))
    return ChoiceFeatures(
        **found.fields(examples.labels, encoding), num_options=examples.num_options
    )
