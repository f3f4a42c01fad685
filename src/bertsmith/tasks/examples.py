"""Labelled texts: find and read their files with checks, split a dev set off, sum both up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from bertsmith.base.files import nearby
from bertsmith.tasks.labels import (
    Cells,
    describe_balance,
    is_missing,
    only_labelled,
    parse_labels,
    parse_number,
)
from bertsmith.tasks.task import OTHER_NAMES, OWN_KINDS, Task
from bertsmith.text.readers.columnar import class_names
from bertsmith.text.readers.files import COMPRESSIONS
from bertsmith.text.readers.tables import (
    COLUMNAR_SUFFIXES,
    SUFFIXES,
    column_names,
    file_suffix,
    parts,
    read_columns,
    table_format,
)

# a Hugging Face `datasets` folder: as on the hub, and as `save_to_disk` writes it
HUGGING_FACE = ("data/{}-*.parquet", "{}-*.parquet", "{}/data-*.arrow")


class LabelledExamples:
    """N labelled examples: `Examples` and `ChoiceExamples`, dataclasses with these fields.

    Each of their lists and arrays has an entry an example.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    labels: np.ndarray | None
    source: str  # file name, for messages
    lines: list[int]  # 1-based line of each example in `source`, for messages

    def __len__(self) -> int:
        return len(self.lines)

    def select(self, indices: Sequence[int] | np.ndarray) -> Self:
        """The examples at `indices`, in that order."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {
            name: [column[k] for k in indices]
            for name, column in values.items()
            if isinstance(column, list)
        }
        if self.labels is not None:
            chosen["labels"] = self.labels[np.asarray(indices, np.int64)]
        return replace(self, **chosen)

    def duplicate_keys(self) -> list[tuple[str, ...]]:
        """The texts of each, spaces trimmed; equal ones are exact duplicates."""
        raise NotImplementedError

    def describe_labels(self) -> str:
        """Their balance or distribution."""
        raise NotImplementedError


AnyExamples = TypeVar("AnyExamples", bound=LabelledExamples)


@dataclass(frozen=True)
class Examples(LabelledExamples):
    """N texts, or pairs of texts, with their labels."""

    texts: list[str]
    pairs: list[str] | None  # second texts
    # classify: int64 [N], numbers into label_names; regress: float32 [N]; multilabel: bool [N, K]
    labels: np.ndarray | None
    label_names: tuple[str, ...]  # () in regress
    source: str
    lines: list[int]
    rows: list[dict[str, Any]] | None = None  # the full rows, to be written with an answer each

    @property
    def num_classes(self) -> int:
        return len(self.label_names)

    def record(self, k: int) -> dict[str, Any]:
        """Example k for `dev_scores.json`."""
        pair = {} if self.pairs is None else {"pair": self.pairs[k]}
        return {"text": self.texts[k], **pair}

    def duplicate_keys(self) -> list[tuple[str, ...]]:
        pairs = self.pairs or [""] * len(self)
        return [(a.strip(), b.strip()) for a, b in zip(self.texts, pairs, strict=True)]

    def describe_labels(self) -> str:
        labels, names = self.labels, self.label_names
        assert labels is not None
        if labels.dtype.kind == "f":
            low, quarter, middle, three, high = np.percentile(labels, [0, 25, 50, 75, 100])
            return (
                f"scores {low:g} to {high:g}, mean {labels.mean():.3g},"
                f" quartiles {quarter:.3g}, {middle:.3g}, {three:.3g}"
            )
        if labels.ndim == 1:
            return describe_balance(names, np.bincount(labels, minlength=len(names)), len(labels))
        each = labels.sum(axis=1)
        return (
            f"{each.mean():.2f} labels a text, {(each == 0).sum():,} without;"
            f" {describe_balance(names, labels.sum(axis=0), len(labels))}"
        )

    def counts(self) -> dict[str, int]:
        """Numbers of "texts", and of "empty" ones that hold nothing; see `empty_note`."""
        texts = [*self.texts, *(self.pairs or ())]
        return {"texts": len(texts), "empty": sum(not text.strip() for text in texts)}


def empty_note(texts: int, empty: int) -> str | None:
    """A note on texts that hold nothing; None: none is empty."""
    return f"{empty:,} of {texts:,} texts are empty" if empty else None


def find_file(task: Task, data: Path, split: str) -> Path | None:
    """The file of `split` ("train", "dev", "test", "dev_mismatched" ...) in `data`, or None.

    In a folder the data set's own file names come first, then SPLIT.csv, .tsv, .jsonl, .parquet,
    .arrow ("validation", "valid" and "val" are names for dev too), then HUGGING_FACE, as a path
    with a `*`; files of text may be packed. A file, or the folder of one saved split, is the
    training set and nothing else.

    Errors: ValueError when `data` does not exist or has no training file.
    """
    if single := single_file(data):
        return single if split == "train" else None
    if not data.is_dir():
        raise ValueError(f"{data}: no such file or folder{nearby(data)}")
    stems = (split, *OTHER_NAMES.get(split, ()))
    names = [
        *task.files.get(split, ()),
        *(stem + suffix for stem in stems for suffix in SUFFIXES if suffix != ".txt"),
        *(pattern.format(stem) for stem in stems for pattern in HUGGING_FACE),
    ]
    for name in names:
        for packed in ("",) if name.endswith(COLUMNAR_SUFFIXES) else ("", *COMPRESSIONS):
            if parts(data / f"{name}{packed}"):
                return data / f"{name}{packed}"
    if split == "train":
        looked = f"{', '.join(dict.fromkeys(names))} (text also with {', '.join(COMPRESSIONS)})"
        raise ValueError(f"{data}: no training file; looked for {looked}")
    return None


def single_file(path: Path) -> Path | None:
    """The file that a path means by itself: it is one, or the folder of one saved split, whose
    parts are a path with a `*`. None: it is another folder, or nothing at all."""
    if (path / "state.json").is_file():
        return path / "data-*.arrow"
    return path if path.is_file() else None


def is_labelled(path: Path, task: Task) -> bool:
    """True for a file that may have labels: one that names its columns has theirs, with another
    thing in it than nothing or -1, with which labels are withheld. Errors: as `read_columns`.
    """
    names = column_names(path) if file_suffix(path) else []
    if task.text not in names:
        return True
    if task.label not in names and file_suffix(path) != ".jsonl":  # whose later rows may have it
        return False
    wanted = {task.label: "`label`"}
    columns, _ = read_columns(path, wanted, task.header, optional=tuple(wanted))
    labels = (cell.get("text") if isinstance(cell, dict) else cell for cell in columns[task.label])
    return any(
        label != [] and not is_missing(label) and parse_number(label) != -1 for label in labels
    )


def read_examples(path: Path, task: Task, label_names: Sequence[str] | None = None) -> Examples:
    """Read one labelled file of a task of texts or pairs.

    `label_names` are the classes of the training file or model, None for a training file.
    Errors: ValueError, one line with file and line, as `read_task` and `parse_labels`.
    """
    columns, lines = read_task(path, task)
    texts = check_texts(columns[task.text], task.text, path, lines)
    pairs = None
    if task.text_pair is not None:
        pairs = check_texts(columns[task.text_pair], task.text_pair, path, lines)
    is_columnar, is_train = table_format(path) in COLUMNAR_SUFFIXES, label_names is None
    given = class_names(parts(path)[0], task.label) if is_columnar else None
    cells = Cells(columns[task.label], lines, task.label, str(path), is_train, given)
    labels, names = parse_labels(cells, task, label_names or ())
    return Examples(texts, pairs, labels, names, str(path), lines)


def read_task(
    path: Path, task: Task, need_labels: bool = True
) -> tuple[dict[str, list[Any]], list[int]]:
    """The columns of a file that a task names, and the line of each row, see `read_columns`.

    Rows without a label and broken ones are left out where the task says so.
    """
    roles = {task.text: "`text`", task.text_pair: "`text_pair`"}
    roles |= dict.fromkeys(task.options, "`options`")
    if need_labels:
        roles[task.label] = "`label`"
    is_own = task.name in OWN_KINDS
    wanted = {name: role if is_own else f"task {task.name}" for name, role in roles.items() if name}
    optional = (task.label,) if task.skip_unlabelled else ()
    columns, lines = read_columns(path, wanted, task.header, task.has_broken_rows, optional)
    return only_labelled(columns, lines, task, path) if need_labels else (columns, lines)


def check_texts(
    values: list[Any], column: str, path: Path, lines: list[int], may_be_empty: bool = False
) -> list[str]:
    """The values of a column. Errors: ValueError for one that is no text, or has nothing in it."""
    for value, line in zip(values, lines, strict=True):
        is_empty = value is None or (isinstance(value, str) and not value.strip())
        if is_empty and not may_be_empty:
            raise ValueError(f"{path}:{line}: empty text in column '{column}': remove this row")
        if not isinstance(value, str):
            raise ValueError(f"{path}:{line}: column '{column}' holds {value!r:.60}, not a text")
    return values


def split_dev(examples: AnyExamples, share: float, seed: int) -> tuple[AnyExamples, AnyExamples]:
    """Cut a dev set of about `share` of the examples out of a training set that came without one.

    Stratified: every class gives its share of distinct examples, at least one and never all. With
    several labels a text counts for the rarest of them; scores are one stratum. Copies of a text go
    to the same side, to train where a class would be without an example there. A pure function of
    its arguments; file order is kept.

    Errors: ValueError when no class has two distinct examples.
    """
    assert examples.labels is not None
    original, strata = first_copies(examples.duplicate_keys()), examples.labels
    distinct = np.unique(original)
    if strata.ndim == 2:  # the rarest label of each text, or none
        rarity = np.where(strata, strata.sum(axis=0), len(strata) + 1)
        strata = np.where(strata.any(axis=1), rarity.argmin(axis=1), strata.shape[1])
    elif strata.dtype.kind == "f":
        strata = np.zeros(len(strata), np.int64)
    strata = strata[distinct]
    random = np.random.default_rng(seed)
    in_dev = np.zeros(len(examples), bool)
    for stratum in np.unique(strata):
        members = distinct[strata == stratum]
        in_dev[random.permutation(members)[: dev_size(share, len(members))]] = True
    in_dev = in_dev[original]
    if examples.labels.dtype.kind != "f":  # copies of a text may have other labels than it
        rows, classes = np.arange(len(examples)), examples.labels
        if classes.ndim == 2:
            rows, classes = np.nonzero(classes)
        for lost in np.setdiff1d(classes, classes[~in_dev[rows]]):
            in_dev[original == original[rows[classes == lost][0]]] = False
    if not in_dev.any():
        raise ValueError(
            f"{examples.source}: too few examples to split a dev set off: name one with `dev`"
        )
    return examples.select(np.flatnonzero(~in_dev)), examples.select(np.flatnonzero(in_dev))


def first_copies(keys: Iterable[Hashable]) -> np.ndarray:
    """The index of the first key that equals each, int64 [N].

    >>> first_copies(["a", "b", "a"])
    array([0, 1, 0])
    """
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(key, index) for index, key in enumerate(keys)], np.int64)


def dev_size(share: float, total: int) -> int:
    """The number of `total` that is split off for dev: at least one, never all."""
    assert 0 < share < 1
    return min(max(round(share * total), 1), total - 1)


def summarize(train: LabelledExamples, dev: LabelledExamples) -> str:
    """Sizes, balance or distribution of the labels, lengths, duplicates, label conflicts."""
    train_keys, dev_keys = train.duplicate_keys(), dev.duplicate_keys()
    seen = set(train_keys)
    lines = [
        f"train: {_describe(train)}",
        f"dev:   {_describe(dev)}",
        f"exact duplicates: {len(train_keys) - len(seen):,} rows of train repeat an earlier one,"
        f" {sum(key in seen for key in dev_keys):,} of dev are also in train",
    ]
    if conflicts := label_conflicts(train):
        first = " and ".join(str(train.lines[index]) for index in conflicts[0][:2])
        lines.append(
            f"label conflicts: {len(conflicts):,} texts of train have two labels or more,"
            f" the first in lines {first}"
        )
    return "\n".join(lines)


def label_conflicts(examples: LabelledExamples) -> list[list[int]]:
    """The texts that have different labels: for each, the first example of a label."""
    assert examples.labels is not None
    firsts: dict[tuple[str, ...], dict[bytes, int]] = defaultdict(dict)
    for index, key in enumerate(examples.duplicate_keys()):
        firsts[key].setdefault(examples.labels[index].tobytes(), index)
    return [list(labels.values()) for labels in firsts.values() if len(labels) > 1]


def _describe(examples: LabelledExamples) -> str:
    # a choice repeats its context with every option
    texts = [f"{first} {other}" for first, *others in examples.duplicate_keys() for other in others]
    return f"{len(examples):,} examples; {examples.describe_labels()}; {describe_words(texts)}"


def describe_words(texts: Sequence[str]) -> str:
    """Numbers of words in texts."""
    middle, long, longest = np.percentile([len(text.split()) for text in texts], [50, 95, 100])
    return f"words: median {middle:.0f}, 95% up to {long:.0f}, longest {longest:.0f}"
