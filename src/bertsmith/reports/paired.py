"""Two runs on one dev set: is the difference more than luck? A paired bootstrap over examples.

The same examples are drawn for both runs, with replacement, many times (Efron and Tibshirani 1993;
for such tasks Berg-Kirkpatrick et al. 2012). Reads run directories only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.reports.resampled_metrics import Score, metrics_of
from bertsmith.reports.runs import Run, is_number, read_run
from bertsmith.reports.seeds import FEWEST_SEEDS, LESS_IS_BETTER, welch_interval

BLOCK = 1 << 22  # weights held at once, 32 MB
# What of an example of dev_scores.json says which one it is, not how it was answered.
IDENTITY = ("id", "text", "pair", "options", "words", "question", "answers", "label")


def compare(folders: Sequence[Path], num_resamples: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """The figures of both runs, second minus first, and how sure the difference is.

    {"task", "examples", "resamples", "seed", "main_metric",
     "metrics": {name: {"first", "second", "difference", "interval": [low, high], "p"}},
     "better", "equal", "worse": examples that the second run answers better, ...,
     "seeds": {name: {"first", "second": means, "difference", "interval": [low, high] or None}}}

    An interval is of 95%; p is two-sided: twice the share of resamples in which the difference is
    not on its side of 0. "seeds" is about other seeds instead of other examples, by Welch's t, and
    is empty where a run has a single one; where one has two there is no interval.

    Errors: ValueError for another task or dev set, no answers on a dev set, or fewer than 100
    resamples.
    """
    if num_resamples < 100:
        raise ValueError(f"resamples = {num_resamples}: an interval needs at least 100")
    runs = [_read(folder) for folder in folders]
    _check_same(folders, runs)
    (first, first_goodness), (second, goodness) = (metrics_of(run.dev) for run in runs)
    names = _common_metrics(runs, first.keys() & second.keys())
    if not names:
        raise ValueError(f"{folders[0]}: none of its metrics is known here")
    better, worse = int((goodness > first_goodness).sum()), int((goodness < first_goodness).sum())
    return {
        "task": runs[0].dev["task"],
        "examples": len(goodness),
        "resamples": num_resamples,
        "seed": seed,
        "main_metric": names[0],
        "metrics": paired_bootstrap(
            {name: (first[name], second[name]) for name in names},
            len(goodness),
            num_resamples,
            seed,
        ),
        "better": better,
        "equal": len(goodness) - better - worse,
        "worse": worse,
        "seeds": _over_seeds(runs, names),
    }


def paired_bootstrap(
    metrics: Mapping[str, tuple[Score, Score]], num_examples: int, num_resamples: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Figures, difference, interval and p of each metric, see `compare`."""
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in metrics}
    for weights in _resamples(num_examples, num_resamples, seed):
        for name, (first, second) in metrics.items():
            drawn[name].append(second(weights) - first(weights))
    ones, figures = np.ones((1, num_examples)), {}
    for name, (first, second) in metrics.items():
        differences = np.concatenate(drawn[name])
        values = float(first(ones)[0]), float(second(ones)[0])
        low, high = np.quantile(differences, (0.025, 0.975))
        # the dev set itself is one more resample, so that p is never 0
        tails = (1 + (differences <= 0).sum(), 1 + (differences >= 0).sum())
        figures[name] = {
            "first": values[0],
            "second": values[1],
            "difference": values[1] - values[0],
            "interval": [float(low), float(high)],
            "p": min(1.0, float(2 * min(tails) / (num_resamples + 1))),
        }
        if name in LESS_IS_BETTER:
            figures[name]["less_is_better"] = True
    return figures


def _resamples(num_examples: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each example is drawn, float64 [R, N], in blocks of resamples."""
    generator = np.random.default_rng(seed)
    rows = max(1, BLOCK // num_examples)
    for begin in range(0, num_resamples, rows):
        count = min(rows, num_resamples - begin)
        places = generator.integers(num_examples, size=(count, num_examples))
        places += np.arange(count)[:, None] * num_examples
        counts = np.bincount(places.ravel(), minlength=count * num_examples)
        yield counts.reshape(count, num_examples).astype(np.float64)


def _read(folder: Path) -> Run:
    run = read_run(folder)
    if not run.dev.get("examples"):
        raise ValueError(
            f"{folder}/dev_scores.json is missing or empty: only fine-tuning runs with answers on "
            "a dev set can be compared"
        )
    return run


def _is_same(one: Any, other: Any) -> bool:
    """Of scores five decimals are compared: earlier versions wrote no more.

    >>> _is_same(199.99, 199.99001), _is_same(1.0, 1.1), _is_same("yes", "yes")
    (True, False, True)
    """
    if is_number(one) and is_number(other):
        return abs(one - other) < 1e-5 * max(1.0, abs(one))
    return one == other


def _check_same(folders: Sequence[Path], runs: Sequence[Run]) -> None:
    """Errors: ValueError that says what is not the same in the two runs."""
    one, other = (run.dev for run in runs)
    names = f"{folders[0]} and {folders[1]}"
    for what in ("task", "kind"):
        if one.get(what) != other.get(what):
            raise ValueError(f"{names}: different tasks, {one.get(what)} and {other.get(what)}")
    if one.get("labels") != other.get("labels"):
        raise ValueError(f"{names}: different classes, or in another order")
    settings = [run.description.get("settings") or {} for run in runs]
    hashes = [(part.get("data_sha256") or {}).get("dev") for part in settings]
    examples = one["examples"], other["examples"]
    if None not in hashes and hashes[0] != hashes[1]:
        raise ValueError(f"{names}: different dev files, by their SHA-256 in run.json")
    if len(examples[0]) != len(examples[1]):
        counts = " and ".join(f"{len(part):,}" for part in examples)
        raise ValueError(f"{names}: different dev sets, of {counts} examples")
    for number, pair in enumerate(zip(*examples, strict=True), start=1):
        if not all(_is_same(*(example.get(name) for example in pair)) for name in IDENTITY):
            raise ValueError(f"{names}: different dev sets, first at example {number:,}")


def _common_metrics(runs: Sequence[Run], known: set[str]) -> list[str]:
    """The metrics of both results, the main one first."""
    main = runs[0].result.get("main_metric")
    both = [name for name in runs[0].result.get("metrics", {}) if name in known]
    both = [name for name in both if name in runs[1].result.get("metrics", {})]
    return sorted(both, key=lambda name: name != main)


def _over_seeds(runs: Sequence[Run], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        sides = [
            [
                seed[name]
                for seed in run.result.get("seeds", {}).values()
                if is_number(seed.get(name))
            ]
            for run in runs
        ]
        if (fewest := min(map(len, sides))) < 2:
            continue
        first, second = (sum(side) / len(side) for side in sides)
        found[name] = {
            "first": first,
            "second": second,
            "difference": second - first,
            "interval": list(welch_interval(*sides)) if fewest >= FEWEST_SEEDS else None,
        }
    return found
