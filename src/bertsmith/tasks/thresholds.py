"""How probable a label must be to be the answer, chosen on labelled data."""

from __future__ import annotations

import numpy as np


def best_thresholds(probabilities: np.ndarray, truth: np.ndarray, metric: str) -> list[float]:
    """For each of K labels the threshold that is best on [N, K] probabilities and bool truth.

    Best by F1 of the label, or by the share of right decisions where the metric is an accuracy; in
    the middle between two probabilities. Of equal ones the nearest to 0.5. 0.5 for a label that all
    examples have, or none.

    >>> best_thresholds(np.array([[0.25], [0.5], [0.7]]), np.array([[0], [1], [1]]) > 0, "micro_f1")
    [0.375]
    """
    return [
        _best_threshold(column, right, "accuracy" in metric)
        for column, right in zip(probabilities.T, truth.T, strict=True)
    ]


def _best_threshold(probability: np.ndarray, truth: np.ndarray, by_accuracy: bool) -> float:
    if truth.all() or not truth.any():
        return 0.5
    order = np.argsort(-probability, kind="stable")
    hits = np.append(0, np.cumsum(truth[order]))
    given = np.arange(len(hits))  # answered with the label: the `given` most probable
    right_minus_wrong, f1 = 2 * hits - given, 2 * hits / (given + truth.sum())
    score = right_minus_wrong if by_accuracy else f1
    # above all is a little more than 1, so that "never" is there too where the model is certain
    edges = np.concatenate([[1 + 1e-9], probability[order].astype(np.float64), [0.0]])
    between = edges[:-1] > edges[1:]  # equal probabilities go together
    middle = (edges[:-1] + edges[1:]) / 2
    best = np.flatnonzero(between & (score == score[between].max()))
    # the line that leaves the answers as they are at 0.5, where that is as good
    return float(middle[best[np.abs(middle[best] - 0.5).argmin()]])
