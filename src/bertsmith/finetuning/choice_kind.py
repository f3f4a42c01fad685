"""The kind of task that picks one of n options (SWAG, paper section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bertsmith.finetuning.kind import Purpose
from bertsmith.finetuning.losses import Objective, class_loss
from bertsmith.finetuning.sequence_kinds import Labelled, constant_class
from bertsmith.model.heads import OptionScorer
from bertsmith.tasks.choice import ChoiceExamples, ChoiceFeatures, featurise_choice, read_choices
from bertsmith.tasks.layout import Layout
from bertsmith.tasks.metrics import compute_metrics, softmax, undefined_metrics
from bertsmith.tasks.reading import find_file, is_labelled, split_dev
from bertsmith.tasks.summary import summarise
from bertsmith.tasks.table import Task
from bertsmith.tasks.tables import (
    answer_columns,
    answer_names,
    check_tsv,
    read_rows,
    rounded,
    write_rows,
)
from bertsmith.text.wordpiece import Tokenizer


class Choice:
    """Which of n options goes on from the text."""

    name = "choice"
    head = OptionScorer
    default_length = 128
    default_batch = 32
    problem_type = None
    has_scores = False
    always_tuned = False

    def find_file(self, task: Task, data: Path, split: str) -> Path | None:
        return find_file(task, data, split)

    def is_labelled(self, path: Path, task: Task) -> bool:
        return is_labelled(path, task)

    def read(
        self,
        path: Path,
        task: Task,
        label_names: Sequence[str] | None = None,
    ) -> ChoiceExamples:
        return read_choices(path, task)

    def read_input(self, source: str, purpose: Purpose) -> ChoiceExamples:
        """Rows with the columns of training."""
        if source == "-":
            raise ValueError("texts with their options are read from a file, not from '-'")
        rows = read_rows(source, purpose.task)
        return replace(read_choices(Path(source), purpose.task, need_labels=False), rows=rows)

    def split_dev(
        self, data: ChoiceExamples, share: float, seed: int
    ) -> tuple[ChoiceExamples, ChoiceExamples]:
        return split_dev(data, share, seed)

    def summarise(self, train: ChoiceExamples, dev: ChoiceExamples) -> str:
        return summarise(train, dev)

    def label_names(self, data: ChoiceExamples) -> tuple[str, ...]:
        return ()

    def num_outputs(self, label_names: Sequence[str]) -> int:
        return 1

    def featurise(
        self, tokenizer: Tokenizer, data: ChoiceExamples, layout: Layout, label_names: Sequence[str]
    ) -> ChoiceFeatures:
        return featurise_choice(tokenizer, data, layout)

    def num_labelled(self, labels: np.ndarray) -> int:
        return len(labels)

    def loss(
        self, outputs: Tensor, batch: dict[str, Tensor], objective: Objective
    ) -> tuple[Tensor, Tensor | None]:
        labels = batch["labels"]
        logits = outputs.view(len(labels), -1)  # [B * n, 1] -> [B, n]
        loss = class_loss(logits, labels, objective, batch.get("teacher"))
        return loss, (logits.argmax(1) == labels).sum()

    def chance_loss(self, features: ChoiceFeatures) -> float:
        return math.log(features.num_options)

    def tune(
        self, outputs: np.ndarray, features: ChoiceFeatures, data: ChoiceExamples, purpose: Purpose
    ) -> dict[str, Any]:
        return {}

    def answers(
        self, outputs: np.ndarray, features: ChoiceFeatures, data: ChoiceExamples, purpose: Purpose
    ) -> Labelled:
        logits = features.pooled(outputs, purpose.layout.pool).reshape(len(data), -1)
        probabilities = softmax(logits)
        return Labelled(probabilities.argmax(axis=1), probabilities)

    def measure(
        self, answers: Labelled, data: ChoiceExamples, purpose: Purpose
    ) -> dict[str, float]:
        assert data.labels is not None
        metrics, count = purpose.task.metrics, data.num_options
        return compute_metrics(metrics, answers.predicted, data.labels, count)

    def undefined(
        self, answers: Labelled, data: ChoiceExamples, purpose: Purpose
    ) -> dict[str, str]:
        assert data.labels is not None
        return undefined_metrics(purpose.task.metrics, answers.predicted, data.labels)

    def constant(self, answers: Labelled, data: ChoiceExamples) -> str | None:
        names = [f"option {k}" for k in range(data.num_options)]
        return constant_class(answers.predicted, data.labels, names)

    def records(
        self, answers: Labelled, data: ChoiceExamples, purpose: Purpose
    ) -> list[dict[str, Any]]:
        assert answers.probabilities is not None
        records = []
        for k, context in enumerate(data.contexts):
            record: dict[str, Any] = {"text": context, "options": data.options[k]}
            if data.labels is not None:
                record["label"] = str(data.labels[k])
            record["predicted"] = str(answers.predicted[k])
            record["probabilities"] = [round(float(p), 5) for p in answers.probabilities[k]]
            records.append(record)
        return records

    def check_output(self, data: ChoiceExamples, out: Path, purpose: Purpose) -> None:
        assert data.rows is not None
        answer_names(data.rows, _columns(out, purpose), out)
        if out.suffix == ".tsv":  # options of a list are written by themselves
            check_tsv([{f"option {k}": text for k, text in enumerate(row)} for row in data.options])

    def write_answers(
        self, out: Path, answers: Labelled, data: ChoiceExamples, purpose: Purpose
    ) -> None:
        """The rows again with the number of the option and its text behind them; in a .jsonl the
        probabilities of all options by their numbers."""
        assert data.rows is not None and answers.probabilities is not None
        columns, found = _columns(out, purpose), []
        for k, (choice, row) in enumerate(
            zip(answers.predicted, answers.probabilities.tolist(), strict=True)
        ):
            values = int(choice), data.options[k][choice], row[choice], dict(enumerate(row))
            found.append(dict(zip(columns, map(rounded, values), strict=False)))
        write_rows(data.rows, found, out)


def _columns(out: Path, purpose: Purpose) -> list[str]:
    more = ["option", "probability", *(["probabilities"] if out.suffix == ".jsonl" else [])]
    return answer_columns(purpose.task.label, more)
