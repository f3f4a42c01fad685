"""A fine-tuned model measured on labelled examples; several that answer together, by the mean of
their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.metrics import confusion
from bertsmith.training.finetuning.task_types.base import Purpose
from bertsmith.training.finetuning.task_types.texts import LabelType


def evaluate_on(
    predictor: Predictor, data: Any, on_batch: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Score the model by the metrics of its task on labelled data.

    Returns {"metrics": {name: number}, "undefined": {name: reason} of those that have no value and
    are 0, "examples": N} and, where the answers are classes, "labels": [names] and "confusion":
    counts [true class][predicted class]. `on_batch` is told how many rows were done.
    """
    kind, purpose = predictor.kind, predictor.purpose
    answers = predictor.predict(data, on_batch)
    records = kind.records(answers, data, purpose)
    return {
        "metrics": kind.measure(answers, data, purpose),
        "undefined": kind.undefined(answers, data, purpose),
        "examples": len(data),
        "labels": list(purpose.label_names),
        **confusion(records, purpose.label_names),
    }


def common_purpose(first: Predictor, others: Sequence[Predictor]) -> Purpose:
    """The task that runs answer together: the mean of what each tuned on dev (thresholds).

    Errors: ValueError for runs whose outputs cannot be averaged: another task type, other columns
    of texts, classes, vocabulary or layout, other things tuned.
    """
    for other in others:
        for name, ours, theirs in (
            ("kind of task", first.kind.name, other.kind.name),
            ("classes", first.purpose.label_names, other.purpose.label_names),
            ("layout (max_length, stride, ...)", first.purpose.layout, other.purpose.layout),
            ("vocabulary or casing", first.tokenizer.fingerprint, other.tokenizer.fingerprint),
            ("tuned decision", first.purpose.decision.keys(), other.purpose.decision.keys()),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{other.folder}: has another {name} than {first.folder}: an ensemble needs "
                    "runs of one task, trained alike"
                )
        _check_columns(first, other)
    purposes = [predictor.purpose for predictor in (first, *others)]
    decision: dict[str, Any] = {
        name: np.mean([purpose.decision[name] for purpose in purposes], axis=0).tolist()
        for name in first.purpose.decision
    }
    return replace(first.purpose, decision=decision)


def _check_columns(first: Predictor, other: Predictor) -> None:
    """Refuse runs that were trained on other texts of a row. Questions and words are the same
    thing whatever their columns are called, and need none in most files.
    """
    if not isinstance(first.kind, LabelType):
        return
    for flag, ours, theirs in (
        ("--text", first.purpose.task.text, other.purpose.task.text),
        ("--text-pair", first.purpose.task.text_pair, other.purpose.task.text_pair),
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
