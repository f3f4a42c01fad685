"""Scores of a fine-tuned model on labelled examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.metrics import confusion


def evaluate_on(
    predictor: Predictor, data: Any, on_batch: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Score the model by the metrics of its task on labelled data of its kind.

    Returns {"metrics": {name: number}, "undefined": {name: reason} of those that have no value and
    are 0, "examples": N} and, where the answers are classes, "labels": [names] and "confusion":
    counts [true class][predicted class]. `on_batch` is told how many rows were done.
    """
    kind, purpose = predictor.kind, predictor.purpose
    answers = predictor.ask(data, on_batch).answers
    records = kind.records(answers, data, purpose)
    return {
        "metrics": kind.measure(answers, data, purpose),
        "undefined": kind.undefined(answers, data, purpose),
        "examples": len(data),
        "labels": list(purpose.label_names),
        **confusion(records, purpose.label_names),
    }
