"""Cells of a label column -> an array: a class, a number or a set of labels a row."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.tasks.task import OWN_KINDS, Task

SEPARATORS = ";|,\t"  # what people put between labels
MAX_LISTED = 8  # labels named in a message or a summary
NOTHING = ("nan", "null")  # in lower case, as programs write a cell of which nothing is known
EXACT = 1 << 53  # below it a float64 is one integer


@dataclass(frozen=True)
class Cells:
    """The label column of a file."""

    values: list[Any]
    lines: list[int]  # 1-based line of each value
    column: str
    path: str
    is_train: bool  # then the labels found are all there are, two at least
    class_names: tuple[str, ...] | None  # given with the column (a Hugging Face ClassLabel)

    def error(self, row: int, value: Any, problem: str) -> ValueError:
        where = f"{self.path}:{self.lines[row]}"
        return ValueError(f"{where}: {value!r:.60} in column '{self.column}' {problem}")

    def find(self, row: int, label: str, indices: dict[str, int]) -> int:
        """The index of a label of the row. Errors: ValueError for an unknown one."""
        if label not in indices:
            raise ValueError(
                f"{self.path}:{self.lines[row]}: unknown label '{label}' (known:"
                f" {listed(list(indices))}): correct it, or leave the row out"
            )
        return indices[label]


def parse_labels(
    cells: Cells, task: Task, known: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels of N rows: int64 [N], indices of classes; float32 [N], scores; or bool [N, K],
    those that each row has. And the names of the classes: `known` (those of the training file or
    the model), else the task's, those that come with the column, or those found here in order.

    Warns on stderr of what is odd in those of a training file.

    Errors: ValueError, one line with file and line, for an empty or unknown label, a score that is
    not finite or out of bounds, a training file with nothing to tell apart.
    """
    given = tuple(known or task.labels or cells.class_names or ())
    labels, names = PARSERS[task.task_type](cells, task, given)
    if cells.is_train:
        for warning in _warnings(names, task, cells):
            print(f"warning: {cells.path}: {warning}", file=sys.stderr)
    return labels, names


def _warnings(names: Sequence[str], task: Task, cells: Cells) -> Iterator[str]:
    if same := same_but_for_case(names):
        yield different(same)
    whole = {name for name in names if name.isdigit()}
    if twice := next((name for name in names if label_text(name, whole) != name), None):
        yield f"'{label_text(twice, whole)}' and '{twice}' are two classes: write a number one way"
    if nothing := next((name for name in names if name.lower() in NOTHING), None):
        yield f"'{nothing}' is a class: leave the cell empty where the label is not known"
    if task.task_type != "classify" or len(names) < MAX_LISTED:
        return
    if all(parse_number(name) is not None for name in names) and not all(map(_is_whole, names)):
        yield f"numbers are taken as {len(names)} classes ({listed(names)}): regress learns numbers"
    elif len(names) > len(cells.values) / 2:
        yield (
            f"{len(names)} classes in {len(cells.values)} rows: does column '{cells.column}' hold"
            " the label?"
        )


def _parse_classes(
    cells: Cells, task: Task, known: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    found = []
    for row, value in enumerate(cells.values):
        if isinstance(value, (list, dict)):
            raise cells.error(row, value, "is not one label (several are for multilabel)")
        if is_missing(value):
            raise ValueError(
                f"{cells.path}:{cells.lines[row]}: empty label in column '{cells.column}':"
                f" {label_hint(task)}"
            )
        found.append(label_text(value, known))
    names, positive = known or sort_names(set(found)), task.positive
    if cells.is_train and positive is not None:
        positive = label_text(positive, names)
        if positive not in names or len(names) != 2:
            raise ValueError(
                f"`positive={positive!r}`: the labels of column '{cells.column}' of {cells.path}"
                f" are {listed(names)}: name one of two"
            )
        names = tuple(sorted(names, key=lambda name: name == positive))
    indices = {name: index for index, name in enumerate(names)}
    labels = [cells.find(row, label, indices) for row, label in enumerate(found)]
    if cells.is_train and len(set(found)) < 2:
        raise ValueError(
            f"{cells.path}: every example has the label '{found[0]}':"
            f" a classifier needs two classes or more in column '{cells.column}'"
        )
    return np.array(labels, np.int64), names


def _parse_scores(
    cells: Cells, task: Task, known: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    scores = np.empty(len(cells.values), np.float32)
    largest = float(np.finfo(np.float32).max)
    low, high = task.bounds or (-largest, largest)
    for row, value in enumerate(cells.values):
        score = parse_number(value)
        if score is None or math.isnan(score):
            hint = "write it such as 3.5, or leave the row out"
            if is_missing(value):
                hint = label_hint(task)
            raise cells.error(row, value, f"is not a number: {hint}")
        if not low <= score <= high:
            problem = f"is outside {low:g} to {high:g}: correct it, or leave the row out"
            raise cells.error(row, score, problem)
        scores[row] = score
    if cells.is_train and len(np.unique(scores)) < 2:
        is_rounded = len(set(map(parse_number, cells.values))) > 1
        remedy = "there is nothing to learn"
        if is_rounded:
            remedy = "they differ in later digits alone: subtract their mean"
        raise ValueError(
            f"{cells.path}: every example has the score {scores[0]:g}"
            f"{' in float32' * is_rounded} in column '{cells.column}': {remedy}"
        )
    return scores, ()


def _parse_sets(
    cells: Cells, task: Task, known: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    rows = [_parse_set(value, task, cells, row) for row, value in enumerate(cells.values)]
    rows = [[label_text(label, known) for label in labels] for labels in rows]
    found = set().union(*rows)
    names = known or sort_names(found)
    indices = {name: index for index, name in enumerate(names)}
    labels = np.zeros((len(rows), len(names)), bool)
    for row, row_labels in enumerate(rows):
        for label in row_labels:
            labels[row, cells.find(row, label, indices)] = True
    if cells.is_train and not found:
        raise ValueError(f"{cells.path}: no example has a label in column '{cells.column}'")
    if cells.is_train and max(map(len, rows)) == 1:
        # rows without a label beside them are no sign that the separator is right
        unparted = any(mark in name for name in found for mark in SEPARATORS)
        if all(rows) or (unparted and any(isinstance(value, str) for value in cells.values)):
            raise ValueError(
                f"{cells.path}: no example has two labels in column '{cells.column}': is"
                f" {task.separator!r} what separates them? With one a row the task is classify"
            )
    return labels, names


def _parse_set(value: Any, task: Task, cells: Cells, row: int) -> list[Any]:
    between = f"write its labels with {task.separator!r} between"
    if isinstance(value, str):
        if value.strip().startswith("[") and value.strip().endswith("]"):
            problem = f"is a list written as a text: {between}, or the list itself into a .jsonl"
            raise cells.error(row, value, problem)
        return [label.strip() for label in value.split(task.separator) if label.strip()]
    if not isinstance(value, list):
        missing = f"; {label_hint(task)}" if is_missing(value) else ""
        problem = f"is not a list of labels: {between}, or as a list; none is [] or ''{missing}"
        raise cells.error(row, value, problem)
    for label in value:
        if isinstance(label, (list, dict)) or is_missing(label):
            raise cells.error(row, label, "is not a label of a list")
    return value


PARSERS: dict[str, Callable[..., tuple[np.ndarray, tuple[str, ...]]]] = {
    "classify": _parse_classes,
    "regress": _parse_scores,
    "multilabel": _parse_sets,
}


def label_text(value: Any, known: Collection[str] = ()) -> str:
    """A label as a text; a whole float is its integer, unless it is `known` as it stands, and so
    is the text of one whose integer is known.

    >>> label_text(1.0), label_text("1.0"), label_text(1.0, ["1.0"]), label_text("1.0", ["0", "1"])
    ('1', '1.0', '1.0', '1')
    """
    text, is_float = str(value).strip(), isinstance(value, float | Decimal)
    number = parse_number(value) if is_float or known else None
    if text in known or number is None or not number.is_integer():
        return text
    whole = str(int(number))
    is_exact = abs(number) < EXACT  # a text of more digits may be another integer
    return whole if is_float or (is_exact and whole in known) else text


def is_missing(value: Any) -> bool:
    """True for None, blanks, and the NaN that tables hold where nothing is known."""
    return value is None or value != value or not str(value).strip()


def label_hint(task: Task) -> str:
    """The hint for a row without a label; the file of a data set should be as published."""
    if task.name in OWN_KINDS:
        return "give it one, or leave such rows out with `skip_unlabelled=True`"
    return "give it one, or leave the row out"


def only_labelled(
    columns: dict[str, list[Any]], lines: list[int], task: Task, path: Path
) -> tuple[dict[str, list[Any]], list[int]]:
    """With `task.skip_unlabelled` the rows that have a label, otherwise all.

    An empty cell of several labels is a label: there is none. Logs how many are left out on stderr.
    Errors: ValueError when no row has a label.
    """
    if not task.skip_unlabelled:
        return columns, lines
    may_be_empty, values = task.task_type == "multilabel", columns[task.label]
    is_kept = [not is_missing(value) or (may_be_empty and value == "") for value in values]
    kept = np.flatnonzero(is_kept).tolist()
    if not kept:
        fault = f"no row has a label in column '{task.label}'"
        raise ValueError(f"{path}: {fault}: name another with `label`, or fill it in")
    if left_out := len(values) - len(kept):
        counts = f"{left_out:,} of {len(values):,}"
        print(f"{path}: {counts} rows have no label and are left out", file=sys.stderr)
    selected = {name: [cells[k] for k in kept] for name, cells in columns.items()}
    return selected, [lines[k] for k in kept]


def parse_number(value: Any) -> float | None:
    """A cell as a number, or None.

    >>> parse_number("-1.0"), parse_number(True), parse_number("high")
    (-1.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    if isinstance(value, str) and "_" in value:  # 1_0 is 10 in Python alone
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def same_but_for_case(names: Sequence[str]) -> list[str]:
    """The names that differ from others in capital letters alone, next to each other.

    >>> same_but_for_case(["Billing", "Sales", "billing"])
    ['Billing', 'billing']
    """
    counts = Counter(name.casefold() for name in names)
    return sorted((name for name in names if counts[name.casefold()] > 1), key=str.casefold)


def different(same: Sequence[str]) -> str:
    """The warning about the names of `same_but_for_case`."""
    return f"labels that differ in case only are taken as different: {listed(same)}"


def sort_names(labels: set[str]) -> tuple[str, ...]:
    """Numbers by size, words by the alphabet.

    >>> sort_names({"10", "9"}), sort_names({"b", "a"})
    (('9', '10'), ('a', 'b'))
    """
    if all(map(_is_whole, labels)):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def _is_whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def listed(names: Sequence[str]) -> str:
    """The first few names.

    >>> listed([str(k) for k in range(11)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 3 more'
    """
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def describe_balance(names: Sequence[str], counts: np.ndarray, total: int) -> str:
    """The names with their fractions of the total, the largest first.

    >>> describe_balance(["bad", "good"], np.array([1, 3]), 4)
    'good 75.0%, bad 25.0%'
    """
    order = np.argsort(-counts, kind="stable")
    return listed([f"{names[k]} {counts[k] / total:.1%}" for k in order])
