"""What fine-tuning, evaluation and prediction ask of a kind of task; `kinds.py` has the table.

A kind knows its files, its rows, the head on the encoder, the loss, and what the head's outputs
mean. No other code of these branches on the kind of a task; what a flag, a teacher or a section of
a report is for are tables by the kinds' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from bertsmith.finetuning.losses import Objective
from bertsmith.model.heads import TaskModel
from bertsmith.tasks.features import Features
from bertsmith.tasks.layout import Layout
from bertsmith.tasks.table import Task
from bertsmith.text.wordpiece import Tokenizer


@dataclass(frozen=True)
class Purpose:
    """What a model was fine-tuned for; stored with it."""

    task: Task
    label_names: tuple[str, ...]
    """The classes in the order of the outputs; () where the outputs are not classes."""
    layout: Layout
    decision: dict[str, Any] = field(default_factory=dict)
    """What was tuned on dev besides the weights, such as {"null_threshold": -1.5}; a kind's own."""


class Kind(Protocol):
    """One object a kind, without state.

    `data` is the kind's own class of examples (`Examples`, `ChoiceExamples`, `Sentences`,
    `Questions`), `features` what its `featurise` makes of them, `outputs` the head's outputs in
    float32: [R, K] for R rows, or [T, K] for the T tokens of all rows. `answers` is the kind's own,
    in the order of the data.
    """

    @property
    def name(self) -> str: ...

    @property
    def head(self) -> type[TaskModel]: ...

    @property
    def default_length(self) -> int:
        """`max_length` where the user names none."""
        ...

    @property
    def default_batch(self) -> int:
        """Units in a step where the user names no number."""
        ...

    @property
    def problem_type(self) -> str | None:
        """What transformers calls it where one head serves several kinds."""
        ...

    @property
    def has_scores(self) -> bool:
        """Whether the labels are numbers of any scale."""
        ...

    @property
    def always_tuned(self) -> bool:
        """Whether `tune` is part of every evaluation, or a wish of the user."""
        ...

    def find_file(self, task: Task, data: Path, split: str) -> Path | None:
        """The file of a split behind --data, as `tasks.reading.find_file`."""
        ...

    def is_labelled(self, path: Path, task: Task) -> bool:
        """True for a file that may have labels, as `tasks.reading.is_labelled`."""
        ...

    def read(
        self,
        path: Path,
        task: Task,
        label_names: Sequence[str] | None = None,
    ) -> Any:
        """A file's examples. `label_names` of the training set or model; None: training set."""
        ...

    def read_input(self, source: str, purpose: Purpose) -> Any:
        """What `predict` is to answer: data without labels, from a file or "-"."""
        ...

    def split_dev(self, data: Any, share: float, seed: int) -> tuple[Any, Any]:
        """(train, dev) where there is no dev file."""
        ...

    def summarise(self, train: Any, dev: Any) -> str:
        """What to print before training."""
        ...

    def label_names(self, data: Any) -> tuple[str, ...]:
        """The classes of a training set; () where the outputs are not classes."""
        ...

    def num_outputs(self, label_names: Sequence[str]) -> int:
        """K of the head."""
        ...

    def featurise(
        self, tokenizer: Tokenizer, data: Any, layout: Layout, label_names: Sequence[str]
    ) -> Features:
        """Rows for the model; with labels where the data has them."""
        ...

    def num_labelled(self, labels: np.ndarray) -> int:
        """How many labels the loss of a batch is a mean over."""
        ...

    def loss(
        self, outputs: Tensor, batch: dict[str, Tensor], objective: Objective
    ) -> tuple[Tensor, Tensor | None]:
        """(Loss summed over the labels, how many are right or None) of `Features.batch`."""
        ...

    def chance_loss(self, features: Any) -> float | None:
        """The loss of a model that knows how frequent each answer is, and nothing else."""
        ...

    def tune(
        self, outputs: np.ndarray, features: Any, data: Any, purpose: Purpose
    ) -> dict[str, Any]:
        """The decision that is best on labelled data by the task's main metric; {}: none."""
        ...

    def answers(self, outputs: np.ndarray, features: Any, data: Any, purpose: Purpose) -> Any:
        """What the outputs mean. `data` may be without labels."""
        ...

    def measure(self, answers: Any, data: Any, purpose: Purpose) -> dict[str, float]:
        """The task's metrics, the main one first; all are shares (0.91, not 91)."""
        ...

    def undefined(self, answers: Any, data: Any, purpose: Purpose) -> dict[str, str]:
        """The metrics that have no value here and are 0 in `measure`, each with the reason."""
        ...

    def constant(self, answers: Any, data: Any) -> str | None:
        """The one answer that is given to everything, where nothing else is; for collapse."""
        ...

    def records(self, answers: Any, data: Any, purpose: Purpose) -> list[dict[str, Any]]:
        """An example each, for `dev_scores.json`: what reports and `compare` read."""
        ...

    def check_output(self, data: Any, out: Path, purpose: Purpose) -> None:
        """Refuse, before answering, a file that `write_answers` could not write."""
        ...

    def write_answers(self, out: Path, answers: Any, data: Any, purpose: Purpose) -> None:
        """Write the answers to what `read_input` read."""
        ...
