"""A fine-tuned model measured on labelled examples; several that answer by their mean outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.metrics import confusion
from bertsmith.training.finetuning.task_types.base import ModelTask
from bertsmith.training.finetuning.task_types.texts import LabelType


def evaluate_on(predictor: Predictor, data: Any, on_batch: OnBatch = ignore) -> dict[str, Any]:
    """Score the model by the metrics of its task on labelled data.

    Returns {"metrics": {name: number}, "notes": {name: reason} of those that are 0, or partly, for
    want of examples, "examples": N} and, where the answers are classes, "labels": [names] and
    "confusion": counts [true class][predicted class].
    """
    task_type, model_task = predictor.task_type, predictor.model_task
    answers = predictor.predict(data, on_batch)
    records = task_type.to_records(answers, data, model_task)
    return {
        "metrics": task_type.measure(answers, data, model_task),
        "notes": task_type.notes(answers, data, model_task),
        "examples": len(data),
        "labels": list(model_task.label_names),
        **confusion(records, model_task.label_names),
    }


def common_model_task(first: Predictor, others: Sequence[Predictor]) -> ModelTask:
    """The task that runs answer together, with the mean of the thresholds that each tuned on dev.

    Errors: ValueError for runs whose outputs cannot be averaged: another task type, other columns
    of texts, classes, vocabulary or encoding, other things tuned.
    """
    task = first.model_task
    for other in others:
        theirs = other.model_task
        for name, one, another in (
            ("kind of task", first.task_type.name, other.task_type.name),
            ("set of classes", task.label_names, theirs.label_names),
            ("encoding (max_length, doc_stride, ...)", task.encoding, theirs.encoding),
            ("vocabulary or casing", first.tokenizer.fingerprint, other.tokenizer.fingerprint),
            ("set of tuned thresholds", task.thresholds.keys(), theirs.thresholds.keys()),
            ("activation of scores", task.score_activation, theirs.score_activation),
        ):
            if one != another:
                raise ValueError(
                    f"{other.folder}: has another {name} than {first.folder}: an ensemble needs "
                    "runs of one task, trained alike"
                )
        # questions and words are the same thing whatever their columns are called
        if isinstance(first.task_type, LabelType):
            _check_columns(first, other)
    thresholds = [task.thresholds, *(other.model_task.thresholds for other in others)]
    mean = {
        name: np.mean([of_model[name] for of_model in thresholds], axis=0).tolist()
        for name in task.thresholds
    }
    return replace(task, thresholds=mean)


def _check_columns(first: Predictor, other: Predictor) -> None:
    for name in ("text", "text_pair"):
        ours, theirs = (getattr(model.model_task.task, name) for model in (first, other))
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            pairs, single = (first, other) if theirs is None else (other, first)
            raise ValueError(
                f"{single.folder}: reads no second text, but {pairs.folder} reads that of"
                f" '{ours or theirs}': an ensemble needs runs of one task, trained alike"
            )
        raise ValueError(
            f"{other.folder}: reads the column '{theirs}', but {first.folder} '{ours}': if both"
            f" hold the same texts, name that of the input, such as `{name}={ours!r}`"
        )
