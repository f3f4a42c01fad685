"""A task type: its files, its rows, and the meaning of the head's outputs. No torch.

`TaskType` has the defaults that most types share. No other code of fine-tuning, evaluation or
prediction branches on the type of a task; losses (losses.py), flags, teachers and sections of
reports have tables by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertsmith.tasks.answer_files import no_column
from bertsmith.tasks.examples import find_file, is_labelled, single_file, split_dev, summarize
from bertsmith.tasks.metrics import sigmoid
from bertsmith.tasks.task import EncodingSettings, Task
from bertsmith.text.readers.tables import digest
from bertsmith.text.tokenizer.tokenizer import Tokenizer

DEV_RATIO, DEV_SEED = 0.1, 0  # of a training set that comes without a dev file


Records = list[dict[str, Any]]


@dataclass(frozen=True)
class ModelTask:
    """The task a model was fine-tuned for; stored with it."""

    task: Task
    label_names: tuple[str, ...]
    """The classes in the order of the outputs; () where the outputs are not classes."""
    encoding: EncodingSettings
    thresholds: dict[str, Any] = field(default_factory=dict)
    """Tuned on dev besides the weights, such as {"null_threshold": -1.5}; each type's own."""
    score_activation: Literal["identity", "sigmoid"] = "identity"
    """What makes a score of the head's output."""

    def scores(self, outputs: np.ndarray) -> np.ndarray:
        """The scores that a head's outputs are."""
        return sigmoid(outputs) if self.score_activation == "sigmoid" else outputs


class TaskType:
    """One object a type, without state.

    `data` is the type's own class of examples (`Examples`, `ChoiceExamples`, `Sentences`,
    `Questions`), `features` the rows its `featurize` makes of them, `outputs` the head's outputs in
    float32: [R, K] for R rows, or [T, K] for the T tokens of all rows. `answers` is the type's own,
    in the order of the data.
    """

    name: str
    head: str
    """The class of the model, one of `TASK_KINDS`."""
    default_length = 128
    """`max_length` where the user names none."""
    default_batch = 32
    """Units in a step where the user names no number."""
    problem_type: str | None = None
    """The name transformers has for it where one head serves several types."""
    has_scores = False
    """True: the labels are numbers of any scale."""
    always_tuned = False
    """True: every evaluation begins with `tune`; else the user asks for it."""

    # --- files to data

    def find_file(self, task: Task, data: Path, split: str) -> Path | None:
        return find_file(task, data, split)

    def is_labelled(self, path: Path, task: Task) -> bool:
        """True for a file that may have labels."""
        return is_labelled(path, task)

    def is_table(self, path: Path, task: Task) -> bool:
        """True for a file whose columns have names."""
        return True

    def read(self, path: Path, task: Task, label_names: Sequence[str] | None = None) -> Any:
        """Read a file's examples; None: a training set, which defines the labels."""
        raise NotImplementedError

    def read_input(self, source: str, model_task: ModelTask) -> Any:
        """Read data without labels for `predict`, from a file or "-"."""
        raise NotImplementedError

    def split_dev(self, data: Any, share: float, seed: int) -> tuple[Any, Any]:
        """(train, dev) where there is no dev file."""
        return split_dev(data, share, seed)

    def summarize(self, train: Any, dev: Any) -> str:
        """The text to print before training."""
        return summarize(train, dev)

    # --- data to rows

    def label_names(self, data: Any) -> tuple[str, ...]:
        """The classes of a training set; () where the outputs are not classes."""
        return ()

    def num_outputs(self, label_names: Sequence[str]) -> int:
        """K of the head."""
        return len(label_names)

    def featurize(self, tokenizer: Tokenizer, data: Any, model_task: ModelTask) -> Any:
        """Make rows for the model; with labels where the data has them."""
        raise NotImplementedError

    # --- training

    def num_labelled(self, labels: np.ndarray) -> int:
        """The number of labels that the loss of a batch is a mean over."""
        return labels.size

    def baseline_loss(self, features: Any) -> float | None:
        """The loss of a model that knows how frequent each answer is, and nothing else."""
        raise NotImplementedError

    # --- outputs to answers

    def first_thresholds(self, train: Any) -> dict[str, Any]:
        """The thresholds before any are tuned, by the training data; {}: none."""
        return {}

    def tune(
        self, outputs: np.ndarray, features: Any, data: Any, model_task: ModelTask
    ) -> dict[str, Any]:
        """The thresholds that are best on labelled data by the task's main metric; {}: none."""
        return {}

    def answers(self, outputs: np.ndarray, features: Any, data: Any, model_task: ModelTask) -> Any:
        """The answers that the outputs stand for. `data` may be without labels."""
        raise NotImplementedError

    def measure(self, answers: Any, data: Any, model_task: ModelTask) -> dict[str, float]:
        """The task's metrics, the main one first; all are fractions (0.91, not 91)."""
        raise NotImplementedError

    def notes(self, answers: Any, data: Any, model_task: ModelTask) -> dict[str, str]:
        """The metrics of `measure` that are 0, or partly, for want of examples, with the reason."""
        raise NotImplementedError

    def constant_prediction(self, answers: Any, data: Any) -> str | None:
        """The one answer that everything gets although it should not: a sign of collapse."""
        raise NotImplementedError

    def to_records(self, answers: Any, data: Any, model_task: ModelTask) -> Records:
        """An example each, for `dev_scores.json`, which reports and `compare` read."""
        raise NotImplementedError

    # --- answers to files

    def check_output(self, data: Any, out: Path, model_task: ModelTask) -> None:
        """Refuse, before answering, a file that `write_answers` could not write."""
        raise NotImplementedError

    def write_answers(self, out: Path, answers: Any, data: Any, model_task: ModelTask) -> None:
        """Write the answers to what `read_input` read."""
        raise NotImplementedError


def read_data(
    task_type: TaskType,
    task: Task,
    data: Path,
    dev: Path | None = None,
    columns: Mapping[str, str | None] | None = None,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Read the training set and the dev sets by name; the third are their files, for run.json.

    Without a dev file a tenth of the training set is split off. `columns`: those that are named.

    Errors: ValueError when `dev` is a folder, but for that of one split; those of `check_columns`
    and of `TaskType.read`.
    """
    dev = dev and (single_file(dev) or dev)
    if dev and dev.is_dir():
        raise ValueError(f"`dev={str(dev)!r}`: a folder: name the file in it")
    train_file = task_type.find_file(task, data, "train")
    assert train_file is not None
    found = {split: task_type.find_file(task, data, split) for split in task.dev_splits}
    files = {"dev": dev} if dev else {name: path for name, path in found.items() if path}
    check_columns(task_type, task, [train_file, *files.values()], columns or {})
    train = task_type.read(train_file, task)
    names = task_type.label_names(train)
    sets = {name: task_type.read(path, task, names) for name, path in files.items()}
    if not sets:
        train, sets["dev"] = task_type.split_dev(train, DEV_RATIO, DEV_SEED)
    read = {"train": train_file, **files}
    described = {
        "data": str(train_file),
        "dev": str(next(iter(files.values()), f"{DEV_RATIO:.0%} of train")),
        "skip_unlabelled": task.skip_unlabelled,
        "data_sha256": {name: digest(path) for name, path in read.items()},
    }
    return train, sets, described


def check_columns(
    task_type: TaskType, task: Task, files: Sequence[Path], columns: Mapping[str, str | None]
) -> None:
    """Refuse columns that are named (not None) where no file has any. Errors: ValueError."""
    given = {name: column for name, column in columns.items() if column is not None}
    if given and not any(task_type.is_table(file, task) for file in files):
        raise no_column(files[0], *next(iter(given.items())))


def balanced_weights(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """A weight a class that makes every class count alike, float32 [K].

    Classes int [N]: N / (K count), scikit-learn's "balanced"; their mean over the examples is 1.
    Label sets bool [N, K]: examples without over examples with a label. A class without an example
    counts 1, and a label that every example has.

    >>> balanced_weights(np.array([0, 0, 0, 0, 0, 0, 1, 1]), 2).tolist()[1]
    2.0
    """
    if labels.ndim == 2:
        have = labels.sum(axis=0)
        lack = len(labels) - have
        weights = np.where((have > 0) & (lack > 0), lack / np.maximum(have, 1), 1.0)
    else:
        have = np.bincount(labels, minlength=num_classes)
        weights = np.where(have, len(labels) / (num_classes * np.maximum(have, 1)), 1.0)
    return weights.astype(np.float32)
