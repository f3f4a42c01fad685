"""The bootstrap over examples: how far a figure, or a difference of two runs, may be luck.

Examples are drawn with replacement, many times (Efron and Tibshirani 1993; for such tasks
Berg-Kirkpatrick et al. 2012); a paired bootstrap draws the same ones for both runs. R resamples of
N examples.

A metric maps weights, float64 [R, N], to float64 [R]: how often each resample has drawn each
example; a row of ones is the examples themselves. A metric made of sums over examples gets those of
all resamples by one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bertsmith.tasks.metrics import METRICS

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
    """Of each metric {"first", "second", "difference", "interval": [low, high], "p"}.

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
