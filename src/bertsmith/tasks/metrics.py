"""Scores of answers, by scikit-learn and scipy (the extra `train`), and the thresholds that are
best by them: how probable a label must be to be the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from bertsmith.base.settings import nearest
from bertsmith.tasks.labels import listed

SHARE, CORRELATION = (0.0, 1.0), (-1.0, 1.0)  # least and most value of a metric


@dataclass(frozen=True)
class Metric:
    """`score` takes the true and the given answers and K.

    None: these are no arrays, see `squad/answers.py` and `tagging/schemes.py`.
    """

    kinds: tuple[str, ...]  # names of task types
    score: Callable[[np.ndarray, np.ndarray, int], float] | None = None
    undefined: Callable[[np.ndarray, np.ndarray], str | None] = lambda true, guess: None
    less_is_better: bool = False
    bounds: tuple[float, float] = SHARE

    @property
    def is_share(self) -> bool:
        """True for fractions, which are shown in percent."""
        return self.bounds == SHARE


def check_metrics(names: Sequence[str], task_type: str, num_labels: int) -> None:
    """Refuse, before training, a metric that does not exist or does not fit the task.

    Errors: ValueError that names the nearest metric of the task type.
    """
    fitting = [name for name, metric in METRICS.items() if task_type in metric.kinds]
    for name in names:
        if name not in METRICS:
            raise ValueError(f"unknown metric '{name}': {nearest(name, fitting)}")
        if name not in fitting:
            raise ValueError(
                f"metric '{name}' is not for {task_type}: use one of {', '.join(fitting)}"
            )
        if name == "f1" and num_labels != 2:
            raise ValueError(f"f1 is for two classes, not {num_labels}: use macro_f1")


def compute_metrics(
    names: Sequence[str], predicted: np.ndarray, labels: np.ndarray, num_labels: int
) -> dict[str, float]:
    """Score answers against the truth; both are int [N] classes, float [N] scores or bool [N, K].

    accuracy   the fraction that is correct; of several labels, of texts with all correct
    f1         F1 of class 1, for two classes (MRPC in GLUE: class "1" = paraphrase)
    macro_f1   mean over all classes of their F1; a class without an example counts 0
    micro_f1   F1 of all (text, label) decisions together

    Where a metric has no value it is 0, see `metric_notes`.

    >>> compute_metrics(["accuracy"], np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1]), 2)
    {'accuracy': 0.75}

    Errors: ValueError as `check_metrics` and for answers that are not finite; ModuleNotFoundError
    that names the extra when scikit-learn, which all but accuracy need, is absent.
    """
    task_type = {"i": "classify", "f": "regress", "b": "multilabel"}[labels.dtype.kind]
    check_metrics(names, task_type, num_labels)
    if task_type == "regress":
        labels, predicted = labels.astype(np.float64), predicted.astype(np.float64)
        if not np.isfinite(predicted).all():
            raise ValueError("the model's answers are not finite numbers: lower `learning_rate`")
    values = {}
    for name in names:
        metric = METRICS[name]
        assert metric.score is not None
        is_undefined = metric.undefined(labels, predicted)
        values[name] = 0.0 if is_undefined else float(metric.score(labels, predicted, num_labels))
    return values


def metric_notes(
    names: Sequence[str],
    predicted: np.ndarray,
    labels: np.ndarray,
    label_names: Sequence[str] = (),
) -> dict[str, str]:
    """Metrics that have no value here and count 0, or of which a class does, each with the reason.

    >>> metric_notes(["pearson", "mse"], np.array([2.0, 2.0]), np.array([1.0, 3.0]))
    {'pearson': 'no value, counts 0: every answer is 2'}
    >>> metric_notes(["macro_f1"], np.array([0, 0]), np.array([0, 1]), "abc")
    {'macro_f1': 'counts 0 for each class without an example: c'}
    """
    shown = labels, predicted
    if label_names and labels.ndim == 1:  # else a class called "2" would be told as 1
        shown = tuple(np.array(list(label_names))[numbers] for numbers in shown)
    reasons = {name: METRICS[name].undefined(*shown) for name in names}
    notes = {name: f"no value, counts 0: {reason}" for name, reason in reasons.items() if reason}
    has = labels if labels.ndim == 2 else labels[:, None] == np.arange(len(label_names))
    absent = [label_names[k] for k in np.flatnonzero(~np.any(has, axis=0)).tolist()]
    if "macro_f1" in names and absent:
        notes["macro_f1"] = f"counts 0 for each class without an example: {listed(absent)}"
    return notes


def standard_error(share: float, count: int) -> float:
    """The standard error of a share of `count` independent cases; different seeds come on top.

    >>> round(standard_error(0.57, 277), 3), round(standard_error(0.66, 67_000), 4)
    (0.03, 0.0018)
    """
    return math.sqrt(share * (1 - share) / count)


def _one_value(true: np.ndarray, guess: np.ndarray) -> str | None:
    for values, what in ((true, "label"), (guess, "answer")):
        if (values == values[0]).all():
            value = values[0] if isinstance(values[0], str) else f"{values[0]:g}"
            return f"every {what} is {value}"
    return None


def _scikit_learn() -> ModuleType:
    """scikit-learn's metrics; to load them takes longer than to answer some texts."""
    try:
        from sklearn import metrics
    except ModuleNotFoundError as error:
        message = "metrics need scikit-learn: pip install 'bertsmith[train]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return metrics


def _accuracy(true: np.ndarray, guess: np.ndarray, _: int) -> float:
    return (true == guess).reshape(len(true), -1).all(axis=1).mean()


def _macro_f1(true: np.ndarray, guess: np.ndarray, num_labels: int) -> float:
    scores = _scikit_learn()
    if true.ndim == 2:  # scikit-learn would read a single column as two classes
        columns = zip(true.T, guess.T, strict=True)
        return float(np.mean([scores.f1_score(*column, zero_division=0) for column in columns]))
    return scores.f1_score(true, guess, labels=range(num_labels), average="macro", zero_division=0)


def _correlation(name: str) -> Callable[..., float]:
    def correlation(true: np.ndarray, guess: np.ndarray, _: int) -> float:
        _scikit_learn()  # with which scipy comes
        from scipy import stats

        return getattr(stats, name)(true, guess).statistic

    return correlation


def _sklearn(name: str, **settings: Any) -> Callable[..., float]:
    return lambda true, guess, _: getattr(_scikit_learn(), name)(true, guess, **settings)


CLASSES, SCORES, SETS = ("classify", "choice"), ("regress",), ("multilabel",)
METRICS: dict[str, Metric] = {
    "accuracy": Metric(CLASSES + SETS, _accuracy),
    # of two classes; options are no classes
    "f1": Metric(("classify",), _sklearn("f1_score", zero_division=0)),
    "macro_f1": Metric(CLASSES + SETS, _macro_f1),
    "micro_f1": Metric(
        SETS, lambda a, b, _: _scikit_learn().f1_score(a.ravel(), b.ravel(), zero_division=0)
    ),
    "matthews": Metric(
        CLASSES, _sklearn("matthews_corrcoef"), undefined=_one_value, bounds=CORRELATION
    ),
    "pearson": Metric(SCORES, _correlation("pearsonr"), undefined=_one_value, bounds=CORRELATION),
    "spearman": Metric(SCORES, _correlation("spearmanr"), undefined=_one_value, bounds=CORRELATION),
    "mse": Metric(
        SCORES, _sklearn("mean_squared_error"), less_is_better=True, bounds=(0.0, math.inf)
    ),
    "answer_f1": Metric(("answer",)),
    "exact_match": Metric(("answer",)),
    **{f"entity_{name}": Metric(("tag",)) for name in ("f1", "precision", "recall")},
    "tag_accuracy": Metric(("tag",)),
}


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis.

    >>> softmax(np.array([[1000.0, 1000.0]])).tolist()
    [[0.5, 0.5]]
    """
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities of single decisions; exact for large logits of either sign."""
    return np.exp(-np.logaddexp(0.0, -logits))


def confusion(records: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """{"confusion": counts [true class][predicted class]}, or {} where answers are not classes.

    >>> confusion([{"label": "b", "predicted": "a"}, {"label": "a", "predicted": "a"}], "ab")
    {'confusion': [[1, 0], [1, 0]]}
    """
    pairs: list[tuple[Any, Any]] = [(r.get("label"), r["predicted"]) for r in records]
    if not names or not all(isinstance(name, str) for pair in pairs for name in pair):
        return {}
    indices = {name: index for index, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)), np.int64)
    for label, predicted in pairs:
        counts[indices[label], indices[predicted]] += 1
    return {"confusion": counts.tolist()}


def check_two_classes(label_names: Sequence[str]) -> None:
    """Errors: ValueError where more than one threshold would be needed to choose a class."""
    if len(label_names) != 2:
        raise ValueError(
            "`tune_thresholds`: for two classes or several labels, but there are"
            f" {len(label_names)} classes: leave it out, or use `class_weights='balanced'`"
        )


def best_thresholds(probabilities: np.ndarray, truth: np.ndarray, metric: str) -> list[float]:
    """For each of K labels the threshold that is best on [N, K] probabilities and bool truth.

    Best by the accuracy where that is the metric, else by F1 of the label.

    >>> best_thresholds(np.array([[0.25], [0.5], [0.7]]), np.array([[0], [1], [1]]) > 0, "micro_f1")
    [0.375]
    """
    of_label = "accuracy" if metric == "accuracy" else "f1"
    columns = zip(probabilities.T, truth.T, strict=True)
    return [label_threshold(probability, is_true, of_label) for probability, is_true in columns]


def label_threshold(probability: np.ndarray, truth: np.ndarray, metric: str) -> float:
    """The threshold of one label with the best "accuracy", "f1", "macro_f1" (the mean of F1 with
    and without the label) or "matthews" on probabilities [N] and bool truth [N].

    In the middle between two probabilities, of equally good ones the nearest to 0.5, which is also
    that of a label that all examples have, or none.
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
    """The metric, up to a factor and a constant, when the k most probable of N examples get the
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


def count_entropy(counts: np.ndarray) -> float:
    """Entropy in nats of what has these counts: the cross-entropy when only they are known.

    >>> round(count_entropy(np.array([2, 1, 1, 0])), 3)
    1.04
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
