"""Scores of a classifier, by scikit-learn (the extra `train`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from bertsmith.config import nearest


def compute_metrics(
    names: Sequence[str], predicted: np.ndarray, labels: np.ndarray, num_labels: int
) -> dict[str, float]:
    """Score predicted classes int [N] against the true ones int [N].

    accuracy   the share that is right
    f1         F1 of class 1, for two classes (MRPC in GLUE: class "1" = paraphrase)
    macro_f1   mean over all classes of their F1; a class nobody has or predicts counts 0
    matthews   Matthews correlation, -1 to 1; 0 for a constant answer

    >>> compute_metrics(["accuracy"], np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1]), 2)
    {'accuracy': 0.75}

    Errors: ValueError for an unknown name, for f1 with other than two classes;
    ModuleNotFoundError that names the extra when scikit-learn is absent.
    """
    for name in names:
        if name not in METRICS:
            raise ValueError(f"unknown metric '{name}': {nearest(name, METRICS)}")
        if name == "f1" and num_labels != 2:
            raise ValueError(f"f1 is for two classes, not {num_labels}: use macro_f1")
    scores = _sklearn_metrics()
    return {name: float(METRICS[name](scores, labels, predicted, num_labels)) for name in names}


def confusion_matrix(predicted: np.ndarray, labels: np.ndarray, num_labels: int) -> np.ndarray:
    """Counts int64 [true class, predicted class].

    >>> confusion_matrix(np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1]), 2).tolist()
    [[1, 1], [0, 2]]
    """
    matrix = _sklearn_metrics().confusion_matrix(labels, predicted, labels=range(num_labels))
    return matrix.astype(np.int64)


METRICS: dict[str, Callable[[ModuleType, np.ndarray, np.ndarray, int], float]] = {
    "accuracy": lambda scores, true, guess, _: scores.accuracy_score(true, guess),
    "f1": lambda scores, true, guess, _: scores.f1_score(true, guess, zero_division=0),
    "macro_f1": lambda scores, true, guess, num_labels: scores.f1_score(
        true, guess, labels=range(num_labels), average="macro", zero_division=0
    ),
    "matthews": lambda scores, true, guess, _: scores.matthews_corrcoef(true, guess),
}


def _sklearn_metrics() -> ModuleType:
    try:
        from sklearn import metrics
    except ModuleNotFoundError as error:
        message = "metrics need scikit-learn: pip install 'bertsmith[train]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return metrics
