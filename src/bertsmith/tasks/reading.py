"""Labelled examples out of files: reading with checks, splitting off a dev set, a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.tasks.rows import SUFFIXES, read_columns
from bertsmith.tasks.table import Task

MAX_LISTED = 8  # labels named in a message or a summary


@dataclass(frozen=True)
class Examples:
    """N texts, or pairs of texts, with their classes."""

    texts: list[str]
    pairs: list[str] | None  # second texts
    labels: np.ndarray | None  # int64 [N], numbers into label_names
    label_names: tuple[str, ...]
    source: str  # file name, for messages
    lines: list[int]  # 1-based line of each example in `source`, for messages

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Sequence[int] | np.ndarray) -> Examples:
        """The examples at `indices`, in that order."""
        return replace(
            self,
            texts=[self.texts[i] for i in indices],
            pairs=None if self.pairs is None else [self.pairs[i] for i in indices],
            labels=None if self.labels is None else self.labels[np.asarray(indices, np.int64)],
            lines=[self.lines[i] for i in indices],
        )

    def identities(self) -> list[tuple[str, str]]:
        """What makes two examples exact duplicates: the text and its pair, spaces trimmed."""
        pairs = self.pairs or [""] * len(self)
        return [(a.strip(), b.strip()) for a, b in zip(self.texts, pairs, strict=True)]


def find_file(task: Task, data: Path, split: str) -> Path | None:
    """The file of `split` ("train", "dev" or "test") behind --data, a folder or a file.

    In a folder the data set's own file name comes first, then SPLIT.csv, .tsv, .jsonl,
    .parquet. A file is the training set and nothing else. None: there is no dev or test file.

    Errors: ValueError when `data` does not exist or has no training file.
    """
    if data.is_file():
        return data if split == "train" else None
    if not data.is_dir():
        raise ValueError(f"{data}: no such file or folder (--data)")
    own = [task.files[split]] if split in task.files else []
    names = dict.fromkeys(own + [split + suffix for suffix in SUFFIXES if suffix != ".txt"])
    for name in names:
        if (data / name).is_file():
            return data / name
    if split == "train":
        raise ValueError(f"{data}: no training file (--data); looked for {', '.join(names)}")
    return None


def find_evaluation_file(task: Task, data: Path) -> Path:
    """The labelled file to score a model on: `data` itself, or its test file, else its dev file.

    Errors: ValueError when a folder has neither.
    """
    if data.is_file():
        return data
    for split in ("test", "dev") if task.test_is_labelled else ("dev",):
        if path := find_file(task, data, split):
            return path
    raise ValueError(f"{data}: no labelled test or dev file; name the file itself with --data")


def read_examples(
    path: Path,
    task: Task,
    label_names: Sequence[str] | None = None,
    need_labels: bool = True,
) -> Examples:
    """Read one file of a task.

    `label_names` are the classes of the training file or of the model; without them the row's
    fixed labels, or those found here (numbers in order of size, words in alphabetical order),
    are the classes, and at least two must occur. `need_labels=False` reads the texts only.

    Errors: ValueError, one line with file and line, for all that `rows.read_columns` refuses,
    an empty text, an empty or unknown label, fewer than two classes.
    """
    asker = (lambda flag: flag) if task.name == "classify" else (lambda flag: f"task {task.name}")
    wanted = {task.text: asker("--text")}
    if task.text_pair is not None:
        wanted[task.text_pair] = asker("--text-pair")
    if need_labels:
        wanted[task.label] = asker("--label")
    columns, lines = read_columns(path, wanted)

    texts = _checked_texts(columns[task.text], task.text, path, lines)
    pairs = None
    if task.text_pair is not None:
        pairs = _checked_texts(columns[task.text_pair], task.text_pair, path, lines)
    if not need_labels:
        names = tuple(label_names or task.labels or ())
        return Examples(texts, pairs, None, names, str(path), lines)

    found = _checked_labels(columns[task.label], task.label, path, lines)
    names = tuple(label_names or task.labels or _in_order(set(found)))
    numbers = {name: number for number, name in enumerate(names)}
    for label, line in zip(found, lines, strict=True):
        if label not in numbers:
            raise ValueError(
                f"{path}:{line}: unknown label '{label}' (known: {_listed(names)}):"
                " correct it, or leave the row out"
            )
    if label_names is None and len(set(found)) < 2:
        raise ValueError(
            f"{path}: every example has the label '{found[0]}':"
            f" a classifier needs two classes or more in column '{task.label}'"
        )
    labels = np.array([numbers[label] for label in found], np.int64)
    return Examples(texts, pairs, labels, names, str(path), lines)


def _checked_texts(values: list[Any], column: str, path: Path, lines: list[int]) -> list[str]:
    for value, line in zip(values, lines, strict=True):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{path}:{line}: empty text in column '{column}': remove this row")
        if not isinstance(value, str):
            raise ValueError(f"{path}:{line}: column '{column}' holds {value!r:.60}, not a text")
    return values


def _checked_labels(values: list[Any], column: str, path: Path, lines: list[int]) -> list[str]:
    for value, line in zip(values, lines, strict=True):
        if isinstance(value, (list, dict)):
            raise ValueError(f"{path}:{line}: label {value!r:.60} in column '{column}': one a row")
        if value is None or not str(value).strip():
            raise ValueError(f"{path}:{line}: empty label in column '{column}'")
    return [str(value).strip() for value in values]


def _in_order(labels: set[str]) -> list[str]:
    if all(label.lstrip("-").isdecimal() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def split_dev(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Cut a dev set of about `share` of the examples out of a training set that came without one.

    Stratified: every class gives round(share * its distinct examples), at least one and never
    all, so a class seen once stays in train. Copies of a text go to the same side, so that
    nothing in dev was seen in training. A pure function of its arguments; file order is kept.

    Errors: ValueError when no class has two distinct examples.
    """
    assert examples.labels is not None and 0 < share < 1
    first: dict[tuple[str, str], int] = {}
    original = np.array([first.setdefault(key, i) for i, key in enumerate(examples.identities())])
    distinct = np.unique(original)
    random = np.random.default_rng(seed)
    in_dev = np.zeros(len(examples), bool)
    for label in np.unique(examples.labels[distinct]):
        members = distinct[examples.labels[distinct] == label]
        count = min(max(round(share * len(members)), 1), len(members) - 1)
        in_dev[random.permutation(members)[:count]] = True
    in_dev = in_dev[original]
    if not in_dev.any():
        raise ValueError(
            f"{examples.source}: too few examples to split a dev set off: name one with --dev"
        )
    return examples.select(np.flatnonzero(~in_dev)), examples.select(np.flatnonzero(in_dev))


def summarise(train: Examples, dev: Examples) -> str:
    """What a person should know before training: sizes, balance, lengths, duplicates."""
    train_keys, dev_keys = train.identities(), dev.identities()
    seen = set(train_keys)
    inside = len(train_keys) - len(seen)
    shared = sum(key in seen for key in dev_keys)
    return "\n".join(
        [
            f"train: {_describe(train)}",
            f"dev:   {_describe(dev)}",
            f"exact duplicates: {inside:,} rows of train repeat an earlier one,"
            f" {shared:,} of dev are also in train",
        ]
    )


def _describe(examples: Examples) -> str:
    words = [len(f"{text} {pair}".split()) for text, pair in examples.identities()]
    middle, long, longest = np.percentile(words, [50, 95, 100])
    assert examples.labels is not None
    counts = Counter(examples.label_names[label] for label in examples.labels).most_common()
    balance = [f"{name} {count / len(examples):.1%}" for name, count in counts]
    return (
        f"{len(examples):,} examples; {_listed(balance)};"
        f" words: median {middle:.0f}, 95% up to {long:.0f}, longest {longest:.0f}"
    )
