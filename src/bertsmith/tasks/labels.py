"""Cells of a label column -> an array: a class, a number or a set of labels a row."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.tasks.task import OWN_KINDS, Task

SEPARATORS = ";|,\t"  # what people put between labels
MAX_LISTED = 8  # labels named in a message or a summary


@dataclass(frozen=True)
class Cells:
    """The label column of a file."""

    values: list[Any]
    lines: list[int]  # 1-based line of each value
    column: str
    path: str
    is_train: bool  # then the labels found are those there are, and there must be two
    class_names: tuple[str, ...] | None  # given with the column (a Hugging Face ClassLabel)

    def place(self, number: int) -> str:
        return f"{self.path}:{self.lines[number]}"


def parse_labels(
    cells: Cells, task: Task, known: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels as the task's type has them and the names of its classes.

    classify    int64 [N], numbers into the names
    regress     float32 [N]; there are no names
    multilabel  bool [N, K]: row k has label j

    `known` are the classes of the training file or of the model; without them the row's fixed
    labels, those that come with the column, or those found here (numbers in order of size, words
    in alphabetical order) are the classes. Warnings on stderr tell what is odd in those of a
    training file.

    Errors: ValueError, one line with file and line, for an empty or unknown label, a score that is
    no finite number inside the row's bounds, a training file with nothing to tell apart.
    """
    given = tuple(known or task.labels or cells.class_names or ())
    labels, names = PARSERS[task.task_type](cells, task, given)
    if cells.is_train:
        for oddity in _oddities(names, task, cells):
            print(f"warning: {cells.path}: {oddity}", file=sys.stderr)
    return labels, names


def _oddities(names: Sequence[str], task: Task, cells: Cells) -> Iterator[str]:
    """Things that people may not have meant by the classes of a training file."""
    if same := same_but_for_case(names):
        yield different(same)
    if task.task_type != "classify" or len(names) < MAX_LISTED:
        return
    if all(number_of(name) is not None for name in names) and not all(map(_is_whole, names)):
        yield f"numbers are taken as {len(names)} classes ({listed(names)}): regress learns numbers"
    elif len(names) > len(cells.values) / 2:
        yield (
            f"{len(names)} classes in {len(cells.values)} rows: does column '{cells.column}' hold"
            " the label?"
        )


def _classes(
    cells: Cells, task: Task, known: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    found = []
    for number, value in enumerate(cells.values):
        if isinstance(value, (list, dict)):
            raise ValueError(
                f"{cells.place(number)}: label {value!r:.60} in column '{cells.column}': one a row"
                " (several are for multilabel)"
            )
        if is_missing(value):
            raise ValueError(
                f"{cells.place(number)}: empty label in column '{cells.column}': {give_label(task)}"
            )
        found.append(str(value).strip())
    names = known or in_order(set(found))
    if cells.is_train and task.positive is not None:
        names = _with_last(names, task.positive, cells)
    numbers = {name: number for number, name in enumerate(names)}
    for number, label in enumerate(found):
        _check_known(label, numbers, cells, number)
    if cells.is_train and len(set(found)) < 2:
        raise ValueError(
            f"{cells.path}: every example has the label '{found[0]}':"
            f" a classifier needs two classes or more in column '{cells.column}'"
        )
    return np.array([numbers[label] for label in found], np.int64), names


def _with_last(names: tuple[str, ...], last: str, cells: Cells) -> tuple[str, ...]:
    if last not in names or len(names) != 2:
        raise ValueError(
            f"--positive {last}: the labels of column '{cells.column}' of {cells.path} are"
            f" {listed(names)}: name one of two"
        )
    return (*(name for name in names if name != last), last)


def _scores(cells: Cells, task: Task, known: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    scores = np.empty(len(cells.values), np.float32)
    low, high = task.bounds or (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
    for number, value in enumerate(cells.values):
        score = number_of(value)
        if score is None or math.isnan(score):
            remedy = "write it such as 3.5, or leave the row out"
            if is_missing(value):
                remedy = give_label(task)
            raise ValueError(
                f"{cells.place(number)}: {value!r:.60} in column '{cells.column}' is not a number:"
                f" {remedy}"
            )
        if not low <= score <= high:
            raise ValueError(
                f"{cells.place(number)}: {score:g} in column '{cells.column}' is outside"
                f" {low:g} to {high:g}: correct it, or leave the row out"
            )
        scores[number] = score
    if cells.is_train and len(np.unique(scores)) < 2:
        raise ValueError(
            f"{cells.path}: every example has the score {scores[0]:g} in column '{cells.column}':"
            " there is nothing to learn"
        )
    return scores, ()


def is_missing(value: Any) -> bool:
    """Nothing, blanks, or the number NaN, which tables hold where nothing is known."""
    return value is None or value != value or not str(value).strip()


def give_label(task: Task) -> str:
    """The remedy for a row without a label; the file of a data set should be as published."""
    is_own = task.name in OWN_KINDS
    way = "such rows out with --skip-unlabelled" if is_own else "the row out"
    return f"give it one, or leave {way}"


def labelled_rows(values: Sequence[Any], task: Task, path: str) -> list[int]:
    """The rows to keep of a file: all, or with `task.skip_unlabelled` those that have a label.

    An empty cell of several labels is a label: there is none. A line on stderr says how many rows
    are left out. Errors: ValueError when no row has a label.
    """
    if not task.skip_unlabelled:
        return list(range(len(values)))
    empty = task.task_type == "multilabel"
    kept = [k for k, value in enumerate(values) if not is_missing(value) or (empty and value == "")]
    if not kept:
        raise ValueError(f"{path}: no row has a label in column '{task.label}'")
    if left_out := len(values) - len(kept):
        print(
            f"{path}: {left_out:,} of {len(values):,} rows have no label and are left out",
            file=sys.stderr,
        )
    return kept


def number_of(value: Any) -> float | None:
    """A cell as a number; None where it is none.

    >>> number_of("-1.0"), number_of(True), number_of("high")
    (-1.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _sets(cells: Cells, task: Task, known: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    rows = [_set_of(value, task, cells, number) for number, value in enumerate(cells.values)]
    found = set().union(*rows)
    names = known or in_order(found)
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.zeros((len(rows), len(names)), bool)
    for number, row in enumerate(rows):
        for label in row:
            labels[number, _check_known(label, numbers, cells, number)] = True
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


def _set_of(value: Any, task: Task, cells: Cells, number: int) -> list[str]:
    if isinstance(value, str):
        if value.strip().startswith("[") and value.strip().endswith("]"):
            raise ValueError(
                f"{cells.place(number)}: {value!r:.60} in column '{cells.column}' is a list written"
                f" as a text: write its labels with {task.separator!r} between, or the list itself"
                " into a .jsonl"
            )
        return [label.strip() for label in value.split(task.separator) if label.strip()]
    if not isinstance(value, list):
        missing = f"; {give_label(task)}" if is_missing(value) else ""
        raise ValueError(
            f"{cells.place(number)}: {value!r:.60} in column '{cells.column}' is not a list of"
            f" labels: write them with {task.separator!r} between, or as a list; none is [] or ''"
            f"{missing}"
        )
    for label in value:
        if isinstance(label, (list, dict)) or is_missing(label):
            raise ValueError(
                f"{cells.place(number)}: {label!r:.60} in a list of column '{cells.column}'"
                " is not a label"
            )
    return [str(label).strip() for label in value]


PARSERS: dict[str, Callable[..., tuple[np.ndarray, tuple[str, ...]]]] = {
    "classify": _classes,
    "regress": _scores,
    "multilabel": _sets,
}


def _check_known(label: str, numbers: dict[str, int], cells: Cells, number: int) -> int:
    if label not in numbers:
        raise ValueError(
            f"{cells.place(number)}: unknown label '{label}' (known: {listed(list(numbers))}):"
            " correct it, or leave the row out"
        )
    return numbers[label]


def same_but_for_case(names: Sequence[str]) -> list[str]:
    """The names that differ from others in capital letters alone, those beside each other.

    >>> same_but_for_case(["Billing", "Sales", "billing"])
    ['Billing', 'billing']
    """
    counts = Counter(name.casefold() for name in names)
    return sorted((name for name in names if counts[name.casefold()] > 1), key=str.casefold)


def different(same: Sequence[str]) -> str:
    """The warning about the names of `same_but_for_case`."""
    return f"labels that differ in case only are taken as different: {listed(same)}"


def in_order(labels: set[str]) -> tuple[str, ...]:
    """Numbers in order of size, words in alphabetical order.

    >>> in_order({"10", "9"}), in_order({"b", "a"})
    (('9', '10'), ('a', 'b'))
    """
    if all(map(_is_whole, labels)):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def _is_whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def listed(names: Sequence[str]) -> str:
    """The first few names.

    >>> listed(["a", "b"]), listed([str(k) for k in range(11)])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 3 more')
    """
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def shares(names: Sequence[str], counts: np.ndarray, total: int) -> str:
    """
    >>> shares(["bad", "good"], np.array([1, 3]), 4)
    'good 75.0%, bad 25.0%'
    """
    order = np.argsort(-counts, kind="stable")
    return listed([f"{names[k]} {counts[k] / total:.1%}" for k in order])
