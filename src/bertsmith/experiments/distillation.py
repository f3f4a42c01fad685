"""Distillation: a larger fine-tuned model answers the training texts, a smaller one learns that.

As Turc et al. 2019 (arXiv 1908.08962): the student's loss is the cross-entropy with the teacher's
distribution, on the task's texts or on many more without labels (transfer data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.labels import listed
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
    """A fine-tuned model whose outputs a student learns; it has its own vocabulary and encoding."""

    predictor: Predictor
    model_task: ModelTask
    """The student's task and classes."""

    @classmethod
    def open(cls, folder: Path, task: Task, label_names: Sequence[str], engine: Engine) -> Teacher:
        """Open the teacher of a task with these classes.

        Errors: ValueError for a task of tokens, a model that was not fine-tuned or for another task
        type, with other classes, or for pairs where the task has single texts.
        """
        if task.task_type not in TAUGHT:
            raise ValueError(
                f"`teacher={str(folder)!r}`: a model of kind '{task.task_type}' cannot be taught:"
                f" its outputs are of tokens, not of texts; for {', '.join(TAUGHT)}"
            )
        # int8 and float8 are for training's products
        precision = "float32" if engine.precision == "float32" else "bf16"
        processor = Processor(str(engine.device), precision, engine.threads)
        predictor = Predictor(folder, processor)
        own = predictor.model_task
        of_texts = isinstance(TASK_TYPES[task.task_type], TextType)
        trouble = None
        if own.task.task_type != task.task_type:
            trouble = (
                f"fine-tuned for '{own.task.task_type}', but the task is of kind"
                f" '{task.task_type}': name a run of that"
            )
        elif set(own.label_names) != set(label_names):
            trouble = (
                f"it knows the labels {listed(sorted(own.label_names))}, but the training file has"
                f" {listed(sorted(label_names))}: name a teacher of the same labels"
            )
        elif of_texts and (own.task.text_pair is None) != (task.text_pair is None):
            read, has = ("single texts", "pairs") if task.text_pair else ("pairs", "single texts")
            trouble = f"it reads {read}, but the task has {has}"
        if trouble:
            raise ValueError(f"`teacher={str(folder)!r}`: {trouble}")
        predictor.model(predictor.task_kind)  # a head that does not fit is refused now
        return cls(predictor, ModelTask(task, tuple(label_names), own.encoding))

    def outputs(self, data: Any) -> np.ndarray:
        """Logits or scores of N examples in the student's order of classes, float32 [N, K], or of
        the n options of a choice, [N, n]. Windows are pooled as the teacher does.
        """
        predictor, own = self.predictor, self.predictor.model_task
        task_type = predictor.task_type
        rows = task_type.featurize(predictor.tokenizer, data, self.model_task)
        with Progress("teacher", total=len(rows), unit="rows") as progress:
            row_outputs = predictor.outputs(rows, progress.update)
        pooled = rows.pooled(row_outputs, own.encoding.pool, TAUGHT[task_type.name])
        outputs = pooled.reshape(len(data), -1)
        if not own.label_names:
            return own.scores(outputs)
        return outputs[:, [own.label_names.index(name) for name in self.model_task.label_names]]

    def teach(self, train: Any, source: Path | None = None) -> tuple[Any, np.ndarray]:
        """(Training data, the teacher's outputs for it [N, K]) for `Trainer.prepare`.

        `source` is a file of transfer data, texts without labels (.txt: a text a line), which are
        added to the training data with the teacher's answers as labels; blank ones are left out.

        Errors: ValueError for a file that cannot be read, has nothing but blank texts or another
        number of options.
        """
        if source is None:
            return train, self.outputs(train)
        transfer = self._transfer(source)  # before the answers to all of train
        outputs, more = self.outputs(train), self.outputs(transfer)
        if more.shape[1] != outputs.shape[1]:
            raise ValueError(
                f"{source}: {more.shape[1]} options, but the training file has {outputs.shape[1]}:"
                " give both the same number"
            )
        answers = {"i": more.argmax(axis=1), "f": more[:, 0], "b": more > 0}
        labels = np.concatenate([train.labels, answers[train.labels.dtype.kind]])
        lists = {  # whatever the class of examples, its lists have an entry an example
            field.name: [*values, *getattr(transfer, field.name)]
            for field in fields(train)
            if isinstance(values := getattr(train, field.name), list)
        }
        return replace(train, **lists, labels=labels), np.concatenate([outputs, more])

    def _transfer(self, source: Path) -> Any:
        transfer = self.predictor.task_type.read_input(str(source), self.model_task)
        if not isinstance(transfer, Examples):  # choices with a blank text were refused
            return transfer
        sides = [side for side in (transfer.texts, transfer.pairs) if side is not None]
        rows = enumerate(zip(*sides, strict=True))
        kept = [k for k, texts in rows if all(map(str.strip, texts))]
        if not kept:
            raise ValueError(f"{source}: no text in it")
        return transfer.select(kept)
