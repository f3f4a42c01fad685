"""How probable a label must be to be the answer, chosen on labelled data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def check_two_classes(label_names: Sequence[str]) -> None:
    """Errors: ValueError where more than one threshold would be needed to choose a class."""
    if len(label_names) != 2:
        raise ValueError(
            f"--tune-thresholds: for two classes or several labels, but there are"
            f" {len(label_names)} classes: leave it out, or use --class-weights balanced"
        )


def best_thresholds(probabilities: np.ndarray, truth: np.ndarray, metric: str) -> list[float]:
    """For each of K labels the threshold that is best on [N, K] probabilities and bool truth.

    Best by F1 of the label, or by the share of right decisions where the metric is the accuracy.

    >>> best_thresholds(np.array([[0.25], [0.5], [0.7]]), np.array([[0], [1], [1]]) > 0, "micro_f1")
    [0.375]
    """
    of_label = "accuracy" if metric == "accuracy" else "f1"
    return [
        label_threshold(column, right, of_label)
        for column, right in zip(probabilities.T, truth.T, strict=True)
    ]


def label_threshold(probability: np.ndarray, truth: np.ndarray, metric: str) -> float:
    """The threshold of one label with the best "accuracy", "f1", "macro_f1" (the mean of F1 with
    and without the label) or "matthews" on probabilities [N] and bool truth [N].

    In the middle between two probabilities; of equal ones the nearest to 0.5. 0.5 for a label that
    all examples have, or none.
    """
    if truth.all() or not truth.any():
        return 0.5
    order = np.argsort(-probability, kind="stable")
    hits = np.append(0, np.cumsum(truth[order]))
    # above all is a little more than 1, so that "never" is there too where the model is certain
    edges = np.concatenate([[1 + 1e-9], probability[order].astype(np.float64), [0.0]])
    between = edges[:-1] > edges[1:]  # equal probabilities go together
    middle = (edges[:-1] + edges[1:]) / 2
    score = _scores(hits, int(truth.sum()), metric)
    best = np.flatnonzero(between & (score == score[between].max()))
    # the line that leaves the answers as they are at 0.5, where that is as good
    return float(middle[best[np.abs(middle[best] - 0.5).argmin()]])


def _scores(hits: np.ndarray, positives: int, metric: str) -> np.ndarray:
    """The metric, up to a factor and a constant, where the k most probable of N examples get the
    label and hits[k] of its `positives` are among them, float64 [N + 1] for k = 0 to N."""
    size, given = len(hits) - 1, np.arange(len(hits))
    f1 = 2 * hits / (given + positives)
    if metric == "accuracy":
        return 2.0 * hits - given  # right minus wrong
    if metric == "f1":
        return f1
    if metric == "macro_f1":
        negatives, left = size - positives, size - given
        return f1 + 2 * (negatives - given + hits) / (left + negatives)
    assert metric == "matthews", metric
    spread = np.sqrt(given * (size - given))
    above = hits * float(size) - given * positives
    return np.divide(above, spread, out=np.zeros(len(hits)), where=spread > 0)
