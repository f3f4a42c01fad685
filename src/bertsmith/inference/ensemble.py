"""A fine-tuned model measured on labelled examples; several that answer together, by the mean of
their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.metrics import confusion
from bertsmith.training.finetuning.task_types.base import ModelTask
from bertsmith.training.finetuning.task_types.texts import LabelType


def evaluate_on(
    predictor: Predictor, data: Any, on_batch: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Score the model by the metrics of its task on labelled data.

    Returns {"metrics": {name: number}, "undefined": {name: reason} of those that have no value and
    are 0, "examples": N} and, where the answers are classes, "labels": [names] and "confusion":
    counts [true class][predicted class]. `on_batch` is told how many rows were done.
    """
    task_type, model_task = predictor.task_type, predictor.model_task
    answers = predictor.predict(data, on_batch)
    records = task_type.records(answers, data, model_task)
    return {
        "metrics": task_type.measure(answers, data, model_task),
        "undefined": task_type.undefined(answers, data, model_task),
        "examples": len(data),
        "labels": list(model_task.label_names),
        **confusion(records, model_task.label_names),
    }


def common_model_task(first: Predictor, others: Sequence[Predictor]) -> ModelTask:
    """The task that runs answer together: the mean of what each tuned on dev (thresholds).

    Errors: ValueError for runs whose outputs cannot be averaged: another task type, other columns
    of texts, classes, vocabulary or layout, other things tuned.
    """
    for other in others:
        for name, ours, theirs in (
            ("kind of task", first.task_type.name, other.task_type.name),
            ("classes", first.model_task.label_names, other.model_task.label_names),
            ("layout (max_length, stride, ...)", first.model_task.layout, other.model_task.layout),
            ("vocabulary or casing", first.tokenizer.fingerprint, other.tokenizer.fingerprint),
            ("tuned decision", first.model_task.decision.keys(), other.model_task.decision.keys()),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{other.folder}: has another {name} than {first.folder}: an ensemble needs "
                    "runs of one task, trained alike"
                )
        _check_columns(first, other)
    model_tasks = [predictor.model_task for predictor in (first, *others)]
    decision: dict[str, Any] = {
        name: np.mean([model_task.decision[name] for model_task in model_tasks], axis=0).tolist()
        for name in first.model_task.decision
    }
    return replace(first.model_task, decision=decision)


def _check_columns(first: Predictor, other: Predictor) -> None:
    """Refuse runs that were trained on other texts of a row. Questions and words are the same
    thing whatever their columns are called, and need none in most files.
    """
    if not isinstance(first.task_type, LabelType):
        return
    for flag, ours, theirs in (
        ("--text", first.model_task.task.text, other.model_task.task.text),
        ("--text-pair", first.model_task.task.text_pair, other.model_task.task.text_pair),
    ):
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            pairs, single = (first, other) if theirs is None else (other, first)
            raise ValueError(
                f"{single.folder}: reads no second text, but {pairs.folder} reads that of"
                f" '{ours or theirs}': an ensemble needs runs of one task, trained alike"
            )
        raise ValueError(
            f"{other.folder}: reads the column '{theirs}', but {first.folder} '{ours}': where both"
            f" hold the same texts, name that of the input with {flag}"
        )
