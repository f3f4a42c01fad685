"""The metrics of several seeds: each, their mean and spread, and what was begun again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bertsmith.reports import html
from bertsmith.reports.runs import is_number, spread

FEWEST_SEEDS = 3  # of a spread or an interval: of two it is 13 times as wide as their distance
LESS_IS_BETTER = ("mse", "loss")
SHARES = ("accuracy", "f1", "precision", "recall", "exact_match")


def seed_table(seeds: Mapping[str, Mapping[str, Any]], best_seed: Any = None) -> str:
    """A row a seed, then mean, standard deviation, interval, lowest and highest of each metric.

    Fewer than FEWEST_SEEDS have neither deviation nor interval.
    """
    names = list(dict.fromkeys(name for metrics in seeds.values() for name in metrics))
    names = [name for name in names if all(is_number(seed.get(name)) for seed in seeds.values())]
    if not names:
        return ""
    columns = {name: [seed[name] for seed in seeds.values()] for name in names}
    rows = [
        [html.text(seed) + (" (kept)" if str(best_seed) == seed and len(seeds) > 1 else "")]
        + [metric(name, metrics[name]) for name in names]
        for seed, metrics in seeds.items()
    ]
    if len(seeds) == 1:
        return html.table(["seed", *names], rows)
    summaries: dict[str, Callable[[Sequence[float]], tuple[float, ...]]] = {
        "mean": lambda values: spread(values)[:1],
        "standard deviation": lambda values: spread(values)[1:],
        "95% interval of the mean": student_interval,
        "lowest": lambda values: (min(values),),
        "highest": lambda values: (max(values),),
    }
    if len(seeds) < FEWEST_SEEDS:
        summaries = {"mean": summaries["mean"]}
    summary = [
        [word]
        + [" to ".join(metric(name, value) for value in figure(columns[name])) for name in names]
        for word, figure in summaries.items()
    ]
    return html.table(["seed", *names], rows + summary, total=len(summary))


def restart_table(restarts: Sequence[Mapping[str, Any]], seeds: Mapping[str, Any]) -> str:
    """How many trainings collapsed, and what each of them gave; `seeds` are those that count."""
    if not restarts:
        return ""
    kept = [str(row["seed"]) for row in restarts if str(row["seed"]) in seeds]
    total = len(seeds) + len(restarts) - len(kept)
    note = (
        f"{len(restarts)} of {total} trainings collapsed. Such a training is made again with "
        "another seed, and is not in the figures above"
    )
    note += f", but for seed {', '.join(kept)}, the last that was tried." if kept else "."
    rows = [
        [html.text(row.get(name)) for name in ("seed", "instead_of", "reason")] for row in restarts
    ]
    table = html.table(["collapsed seed", "in the place of", "what was seen"], rows, left=3)
    return f'<p class="note">{html.text(note)}</p>{table}'


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean by Student's t, for two values or more.

    >>> [round(end, 3) for end in student_interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    from scipy import stats  # of the extra `train`, as matplotlib

    mean, deviation = spread(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of mean(second) - mean(first), whose variances may differ (Welch 1947).

    >>> [round(end, 3) for end in welch_interval([1.0, 2.0, 3.0], [4.0, 6.0])]
    [-2.977, 8.977]
    """
    from scipy import stats

    parts = [(spread(values)[1] ** 2 / len(values), len(values) - 1) for values in (first, second)]
    squared = sum(part for part, _ in parts)
    difference = spread(second)[0] - spread(first)[0]
    if squared == 0:
        return difference, difference
    freedom = squared**2 / sum(part**2 / count for part, count in parts)
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(squared)
    return difference - half, difference + half


def mean_and_spread(name: str, values: Sequence[float]) -> tuple[str, str]:
    """The mean of a metric over seeds, and the standard deviation where they are enough.

    >>> mean_and_spread("accuracy", [0.8, 0.9]), mean_and_spread("accuracy", [0.8, 0.9, 0.85])
    (('85.0%', ''), ('85.0%', ' ± 5.0%'))
    """
    mean, deviation = spread(values)
    behind = f" ± {metric(name, deviation)}" if len(values) >= FEWEST_SEEDS else ""
    return metric(name, mean), behind


def metric(name: str, value: Any) -> str:
    """Losses and correlations as numbers, shares of one in percent.

    >>> metric("accuracy", 0.8123), metric("loss", 0.51), metric("pearson", 0.9137)
    ('81.2%', '0.51', '0.914')
    """
    if is_share(name) or not is_number(value):
        return html.percent(value)
    return f"{value:.3g}"


def is_share(name: str) -> bool:
    """Whether the metric of that name is a share of one."""
    return any(word in name.lower() for word in SHARES)
