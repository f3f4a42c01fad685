"""Two runs on one dev set: is the difference more than luck? A paired bootstrap over examples.

`tasks/bootstrap.py` draws the examples; here are its metrics. Most are made of sums over examples,
which one matrix product gives for all resamples; only ranks are found anew in each. Sizes: R
resamples, N examples, S sums, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.reports.finetuning import FEWEST_SEEDS, seed_values, welch_interval
from bertsmith.reports.runs import Run, read_run
from bertsmith.reports.span_answers import entities, is_plain
from bertsmith.tasks.bootstrap import Score, paired_bootstrap
from bertsmith.tasks.squad.answers import answer_scores

# Keys of an example of dev_scores.json that identify it; the others hold the answer.
IDENTITY = ("id", "text", "pair", "options", "words", "question", "answers", "label")


def compare(folders: Sequence[Path], num_resamples: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """The figures of both runs, second minus first, and how sure the difference is.

    {"task", "examples", "resamples", "seed", "main_metric",
     "metrics": {name: {"first", "second", "difference", "interval": [low, high], "p"}},
     "better", "equal", "worse": examples that the second run answers better, ...,
     "seeds": {name: {"first", "second": means, "difference", "interval": [low, high] or None}}}

    "metrics" are as `paired_bootstrap` has them. "seeds" compares seeds instead of examples, by
    Welch's t; it is empty where a run has a single one, and of two seeds there is no interval.

    Errors: ValueError for another task or dev set, no answers on a dev set, or fewer than 100
    resamples.
    """
    if num_resamples < 100:
        raise ValueError(f"resamples = {num_resamples}: an interval needs at least 100")
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if not run.dev.get("examples"):
            raise ValueError(
                f"{folder}/dev_scores.json is missing or empty: only fine-tuning runs with answers "
                "on a dev set can be compared"
            )
    _check_same(folders, runs)
    (first, first_goodness), (second, goodness) = (dev_metrics(run.dev) for run in runs)
    results = [run.result.get("metrics", {}) for run in runs]
    names = [name for name in results[0] if name in results[1] and name in first and name in second]
    names.sort(key=lambda name: name != runs[0].result.get("main_metric"))  # that first
    if not names:
        raise ValueError(f"{folders[0]}: none of its metrics is known here")
    pairs = {name: (first[name], second[name]) for name in names}
    better, worse = int((goodness > first_goodness).sum()), int((goodness < first_goodness).sum())
    return {
        "task": runs[0].dev["task"],
        "examples": len(goodness),
        "resamples": num_resamples,
        "seed": seed,
        "main_metric": names[0],
        "metrics": paired_bootstrap(pairs, len(goodness), num_resamples, seed),
        "better": better,
        "equal": len(goodness) - better - worse,
        "worse": worse,
        "seeds": _over_seeds(runs, names),
    }


def _check_same(folders: Sequence[Path], runs: Sequence[Run]) -> None:
    """Errors: ValueError that says what is not the same in the two runs."""
    one, other = (run.dev for run in runs)
    names = f"{folders[0]} and {folders[1]}"
    for key in ("task", "kind"):
        if one.get(key) != other.get(key):
            raise ValueError(f"{names}: different tasks, {one.get(key)} and {other.get(key)}")
    if one.get("labels") != other.get("labels"):
        raise ValueError(f"{names}: different classes, or in another order")
    hashes = [(run.settings.get("data_sha256") or {}).get("dev") for run in runs]
    examples = one["examples"], other["examples"]
    if None not in hashes and hashes[0] != hashes[1]:
        raise ValueError(f"{names}: different dev files, by their SHA-256 in run.json")
    if len(examples[0]) != len(examples[1]):
        counts = " and ".join(f"{len(part):,}" for part in examples)
        raise ValueError(f"{names}: different dev sets, of {counts} examples")
    for number, (a, b) in enumerate(zip(*examples, strict=True), start=1):
        if any(a.get(key) != b.get(key) for key in IDENTITY):
            raise ValueError(f"{names}: different dev sets, first at example {number:,}")


def _over_seeds(runs: Sequence[Run], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        sides = [seed_values(run, name) for run in runs]
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
    return _of_classes(*_decisions(examples, dev.get("labels") or []))


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
