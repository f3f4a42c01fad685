"""The bootstrap over examples: how far a figure, or a difference of two runs, may be luck.

Examples are drawn with replacement, many times (Efron and Tibshirani 1993; for such tasks
Berg-Kirkpatrick et al. 2012); a paired bootstrap draws the same ones for both runs. R resamples of
N examples.

A metric maps weights, float64 [R, N], to float64 [R]: how often each resample has drawn each
example; a row of ones is the examples themselves. Most are made of sums over examples, which one
matrix product gives for all resamples; only ranks are found anew in each. Sizes: R resamples, N
examples, S sums, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.tasks.metrics import METRICS
from bertsmith.tasks.squad.answers import answer_scores
from bertsmith.tasks.tagging.schemes import entities, is_plain

Score = Callable[[np.ndarray], np.ndarray]  # [R, N] -> [R]
BLOCK = 1 << 22  # weights held at once, 32 MB


def bootstrap(score: Score, num_examples: int, num_resamples: int, seed: int) -> dict[str, Any]:
    """The figure of the examples, and an interval of 95% around it: {"score", "interval"}.

    >>> values = np.array([1.0, 0.0, 1.0, 1.0] * 25)
    >>> bootstrap(lambda weights: weights @ values / 100, 100, 1000, seed=0)
    {'score': 0.75, 'interval': [0.67, 0.84]}
    """
    drawn = [score(weights) for weights in _resamples(num_examples, num_resamples, seed)]
    figure = float(score(np.ones((1, num_examples)))[0])
    return {"score": figure, "interval": _interval(np.concatenate(drawn))}


def paired_bootstrap(
    metrics: Mapping[str, tuple[Score, Score]], num_examples: int, num_resamples: int, seed: int
) -> dict[str, dict[str, Any]]:
    """By metric: {"first", "second", "difference", "interval": [low, high], "p"}.

    The difference is second minus first, its interval of 95%; p is two-sided: twice the fraction of
    resamples in which the difference is not on its side of 0.
    """
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in metrics}
    for weights in _resamples(num_examples, num_resamples, seed):
        for name, (first, second) in metrics.items():
            drawn[name].append(second(weights) - first(weights))
    ones, figures = np.ones((1, num_examples)), {}
    for name, sides in metrics.items():
        differences = np.concatenate(drawn[name])
        first, second = (float(side(ones)[0]) for side in sides)
        # the sample itself is one more resample, so that p is never 0
        tails = (1 + (differences <= 0).sum(), 1 + (differences >= 0).sum())
        figures[name] = {
            "first": first,
            "second": second,
            "difference": second - first,
            "interval": _interval(differences),
            "p": min(1.0, float(2 * min(tails) / (num_resamples + 1))),
        }
        if name in METRICS and METRICS[name].less_is_better:
            figures[name]["less_is_better"] = True
    return figures


def _interval(drawn: np.ndarray) -> list[float]:
    return np.quantile(drawn, (0.025, 0.975)).tolist()


def _resamples(num_examples: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Draws of each example, float64 [R, N], in blocks of resamples."""
    generator = np.random.default_rng(seed)
    rows = max(1, BLOCK // num_examples)
    for begin in range(0, num_resamples, rows):
        count = min(rows, num_resamples - begin)
        chosen = generator.integers(num_examples, size=(count, num_examples))
        chosen += np.arange(count)[:, None] * num_examples
        counts = np.bincount(chosen.ravel(), minlength=count * num_examples)
        yield counts.reshape(count, num_examples).astype(np.float64)


# Metrics of all resamples at once


def dev_metrics(dev: Mapping[str, Any]) -> tuple[dict[str, Score], np.ndarray]:
    """The metrics of a run's dev_scores.json by name, and the goodness of each answer.

    The goodness, float64 [N], only tells which of two answers to one example is better.
    """
    examples, kind = dev["examples"], dev["kind"]
    if kind == "regress":
        table = np.array([(item["label"], item["predicted"]) for item in examples], np.float64)
        return _of_numbers(*table.T.copy())
    if kind == "tag":
        return _of_sentences(examples, is_plain(dev))
    if kind == "answer":
        return _of_questions(examples, dev["task"])
    # of a choice also the options that nobody named, which `evaluate` counts as 0
    options = [str(number) for number in range(len(examples[0].get("options", ())))]
    return _of_classes(*_decisions(examples, dev.get("labels") or options))


def _decisions(examples: Sequence[Mapping[str, Any]], labels: Sequence[Any]) -> list[np.ndarray]:
    """True and predicted classes or labels of each example; bool [N, K] each."""
    columns = [
        [value if isinstance(value, list) else [value] for value in (e[name] for e in examples)]
        for name in ("label", "predicted")
    ]
    found = sorted({name for column in columns for names in column for name in names}, key=str)
    known = list(dict.fromkeys([*labels, *found]))
    return [np.array([[name in own for name in known] for own in side], bool) for side in columns]


def _of_classes(truth: np.ndarray, given: np.ndarray) -> tuple[dict[str, Score], np.ndarray]:
    """Accuracy, F1 of class 1, macro and micro F1, Matthews correlation; bool [N, K] each."""
    counts = np.concatenate([truth & given, truth, given], axis=1)

    def of_counts(figure: Callable[..., np.ndarray]) -> Score:
        return _of_sums(counts, lambda sums: figure(*np.split(sums, 3, axis=1)))

    def f1(correct: np.ndarray, true: np.ndarray, given: np.ndarray) -> np.ndarray:
        return _ratio(2 * correct, true + given)

    def matthews(correct: np.ndarray, true: np.ndarray, given: np.ndarray) -> np.ndarray:
        total = true.sum(1)
        above = correct.sum(1) * total - (true * given).sum(1)
        below = (total**2 - (true**2).sum(1)) * (total**2 - (given**2).sum(1))
        return _ratio(above, np.sqrt(below))

    is_correct = (truth == given).all(axis=1).astype(np.float64)
    metrics = {
        "accuracy": lambda weights: weights @ is_correct / len(is_correct),
        "macro_f1": of_counts(lambda *parts: f1(*parts).mean(axis=1)),
        "micro_f1": of_counts(lambda *parts: f1(*(part.sum(1) for part in parts))),
        "matthews": of_counts(matthews),
    }
    if truth.shape[1] == 2:
        metrics["f1"] = of_counts(lambda *parts: f1(*parts)[:, 1])
    return metrics, (truth == given).sum(axis=1).astype(np.float64)


def _of_numbers(truth: np.ndarray, scores: np.ndarray) -> tuple[dict[str, Score], np.ndarray]:
    """Correlations and mean squared error; float64 [N] each."""
    a, b = _standardized(truth), _standardized(scores)
    moments = np.stack([a, b, a * a, b * b, a * b], axis=1)

    def pearson(sums: np.ndarray) -> np.ndarray:
        a, b, aa, bb, ab = sums.T / len(truth)
        return _correlation(ab - a * b, aa - a * a, bb - b * b)

    def spearman(weights: np.ndarray) -> np.ndarray:
        a, b = (_ranks(values, weights) - (len(truth) + 1) / 2 for values in (truth, scores))
        return _correlation(*((weights * x * y).sum(axis=1) for x, y in ((a, b), (a, a), (b, b))))

    errors = (scores - truth) ** 2
    metrics: dict[str, Score] = {
        "pearson": _of_sums(moments, pearson),
        "spearman": spearman,
        "mse": lambda weights: weights @ errors / len(errors),
    }
    return metrics, -errors


def _of_sentences(
    sentences: Sequence[Mapping[str, Any]], plain: bool
) -> tuple[dict[str, Score], np.ndarray]:
    """Precision, recall and F1 of entities, accuracy of words; sentences are what is drawn."""
    counts = []
    for sentence in sentences:
        tags = sentence["label"], sentence["predicted"]
        true, given = (entities(side, plain) for side in tags)
        same = sum(a == b for a, b in zip(*tags, strict=True))
        counts.append((len(true & given), len(true), len(given), same, len(tags[0])))
    correct, true, given, same, words = np.array(counts, np.float64).T
    metrics = {
        "entity_f1": _of_ratio(2 * correct, true + given),
        "entity_precision": _of_ratio(correct, given),
        "entity_recall": _of_ratio(correct, true),
        "tag_accuracy": _of_ratio(same, words),
    }
    # fewer wrong entities first, then more correct words
    return metrics, 2 * correct - true - given + same / (same.max() + 1)


def _of_questions(
    questions: Sequence[Mapping[str, Any]], task: str
) -> tuple[dict[str, Score], np.ndarray]:
    """Exact match and F1 of all questions, and of those with and without an answer."""
    has_answer = np.array([bool(question["answers"]) for question in questions])
    version = 1 if task == "squad1" and has_answer.all() else 2
    pairs = [answer_scores(one["answers"], one["predicted"], version) for one in questions]
    exact, f1 = np.array(pairs).T

    every = np.ones(len(questions), bool)
    metrics = {
        "answer_f1": _of_ratio(f1, every),
        "exact_match": _of_ratio(exact, every),
        "has_answer_f1": _of_ratio(f1 * has_answer, has_answer),
        "has_answer_exact_match": _of_ratio(exact * has_answer, has_answer),
        "no_answer_exact_match": _of_ratio(exact * ~has_answer, ~has_answer),
    }
    return metrics, f1


def _of_sums(table: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]) -> Score:
    """A metric: the `figure` of the sums [R, S] of a table [N, S] over the examples drawn."""
    table = table.astype(np.float64)
    return lambda weights: figure(weights @ table)


def _of_ratio(above: np.ndarray, below: np.ndarray) -> Score:
    """A metric: the sum of `above` [N] over the sum of `below` [N]."""
    return _of_sums(np.stack([above, below], axis=1), lambda sums: _ratio(*sums.T))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The quotient; 0 where nothing is below, as in the tasks' metrics."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def _standardized(values: np.ndarray) -> np.ndarray:
    """Shift to mean 0, else the squares would swallow the rest, and scale to deviation 1.

    >>> _standardized(np.array([1e-9, 3e-9])).round(6).tolist()
    [-1.0, 1.0]
    >>> _standardized(np.full(3, 0.1)).tolist()
    [0.0, 0.0, 0.0]
    """
    if np.ptp(values) == 0:  # the mean may be off by a rounding
        return np.zeros_like(values)
    return (values - values.mean()) / values.std()


def _correlation(ab: np.ndarray, aa: np.ndarray, bb: np.ndarray) -> np.ndarray:
    """The correlation from sums; 0 for a constant side, whose square is 0 but for rounding."""
    return np.where((aa > 1e-12) & (bb > 1e-12), _ratio(ab, np.sqrt(np.abs(aa * bb))), 0.0)


def _ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The rank of each example's value in each resample, ties sharing theirs; float64 [R, N].

    >>> _ranks(np.array([5.0, 7.0, 7.0]), np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0]])).tolist()
    [[1.0, 2.5, 2.5], [1.5, 3.0, 3.0]]
    """
    order = np.argsort(values, kind="stable")
    _, firsts, groups = np.unique(values, return_index=True, return_inverse=True)
    starts = np.searchsorted(values[order], values[firsts])
    counts = np.add.reduceat(weights[:, order], starts, axis=1)  # [R, distinct values]
    return (counts.cumsum(axis=1) - (counts - 1) / 2)[:, groups]
