"""Distillation: a larger fine-tuned model answers the training texts, a smaller one learns that.

In the manner of Turc et al. 2019 (arXiv 1908.08962): the student's loss is the cross-entropy with
the teacher's distribution, on the task's texts or on many more without labels (transfer data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import Task
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask
from bertsmith.training.finetuning.task_types.texts import TextType

# Task types that can be taught; True: their outputs are classes, one of which is right. Outputs of
# the other types are of tokens, and a teacher may cut texts into other tokens than its student.
TAUGHT = {"classify": True, "choice": True, "regress": False, "multilabel": False}


@dataclass(frozen=True)
class Teacher:
    """A fine-tuned model whose outputs a student learns; it has its own vocabulary and layout."""

    predictor: Predictor
    model_task: ModelTask
    """The student's task and classes."""

    @classmethod
    def open(cls, folder: Path, task: Task, label_names: Sequence[str], engine: Engine) -> Teacher:
        """The teacher for a task with these classes.

        Errors: ValueError for a task of tokens, a model that was not fine-tuned or for another task
        type, with other classes, or for pairs where the task has single texts.
        """
        if task.task_type not in TAUGHT:
            raise ValueError(
                f"--teacher: a model of kind '{task.task_type}' cannot be taught: its outputs are"
                f" of tokens, not of texts; for {', '.join(TAUGHT)}"
            )
        predictor = Predictor(folder, engine)
        own = predictor.model_task
        if own.task.task_type != task.task_type:
            raise ValueError(
                f"--teacher {folder}: fine-tuned for '{own.task.task_type}', but the task is of"
                f" kind '{task.task_type}': name a run of that"
            )
        if set(own.label_names) != set(label_names):
            raise ValueError(
                f"--teacher {folder}: it knows the labels {_listed(own.label_names)}, but the"
                f" training file has {_listed(label_names)}: name a teacher of the same labels"
            )
        of_texts = isinstance(TASK_TYPES[task.task_type], TextType)
        if of_texts and (own.task.text_pair is None) != (task.text_pair is None):
            one, other = ("single texts", "pairs") if task.text_pair else ("pairs", "single texts")
            raise ValueError(f"--teacher {folder}: it reads {one}, but the task has {other}")
        _ = predictor.task_model  # so that a head that does not fit is said now
        return cls(predictor, ModelTask(task, tuple(label_names), own.layout))

    def outputs(self, data: Any) -> np.ndarray:
        """Logits or scores of N examples in the student's order of classes, float32 [N, K], or of
        the n options of a choice, [N, n]. Windows are pooled as the teacher does.
        """
        predictor, own = self.predictor, self.predictor.model_task
        task_type, layout = predictor.task_type, own.layout
        rows = task_type.featurise(predictor.tokenizer, data, layout, self.model_task.label_names)
        with Progress("teacher", total=len(rows), unit="rows") as progress:
            of_rows = predictor.outputs(rows, progress.update)
        outputs = rows.pooled(of_rows, layout.pool, TAUGHT[task_type.name]).reshape(len(data), -1)
        if not own.label_names:
            return outputs
        return outputs[:, [own.label_names.index(name) for name in self.model_task.label_names]]

    def teach(self, train: Any, source: Path | None = None) -> tuple[Any, np.ndarray]:
        """(Training data, the teacher's outputs for it [N, K]) for `Job.prepare`.

        `source` is a file of transfer data, texts without labels (.txt: a text a line), which are
        added to the training data; blank ones are left out. As labels they get the teacher's
        answers.

        Errors: ValueError for a file that cannot be read, has nothing but blank texts or another
        number of options.
        """
        outputs = self.outputs(train)
        if source is None:
            return train, outputs
        transfer = _not_blank(self.predictor.task_type.read_input(str(source), self.model_task))
        more = self.outputs(transfer)
        if more.shape[1] != outputs.shape[1]:
            raise ValueError(
                f"{source}: {more.shape[1]} options, but the training file has {outputs.shape[1]}:"
                " give both the same number"
            )
        labels = {"i": more.argmax(axis=1), "f": more[:, 0], "b": more > 0}
        return (
            _appended(train, transfer, labels[train.labels.dtype.kind]),
            np.concatenate([outputs, more]),
        )


def _not_blank(transfer: Any) -> Any:
    """Without the texts, or pairs with one, that say nothing: an answer is written to each line of
    an input, but there is nothing to learn of them. (Choices with one were refused.)
    """
    if not isinstance(transfer, Examples):
        return transfer
    sides = [side for side in (transfer.texts, transfer.pairs) if side is not None]
    kept = [k for k, texts in enumerate(zip(*sides, strict=True)) if all(map(str.strip, texts))]
    if not kept:
        raise ValueError(f"{transfer.source}: no text in it")
    return transfer.select(kept)


def _appended(train: Any, more: Any, labels: np.ndarray) -> Any:
    """Examples of any class with others behind them: every list has an entry an example."""
    lists = {
        field.name: [*values, *getattr(more, field.name)]
        for field in fields(train)
        if isinstance(values := getattr(train, field.name), list)
    }
    return replace(train, **lists, labels=np.concatenate([train.labels, labels]))


def _listed(names: Sequence[str], most: int = 5) -> str:
    """Names for a message.

    >>> _listed(["b", "a"]), _listed("abcdefg")
    ('a, b', 'a, b, c, d, e ... (7)')
    """
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} ... ({len(names)})"
