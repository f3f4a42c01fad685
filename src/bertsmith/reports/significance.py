"""Two runs on one dev set: is the difference more than luck? A paired bootstrap over examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.base.settings import checked
from bertsmith.reports.finetuning import FEWEST_SEEDS, seed_values, welch_interval
from bertsmith.reports.runs import Run, read_run
from bertsmith.tasks.bootstrap import dev_metrics, paired_bootstrap

# Keys of an example of dev_scores.json that identify it; the others hold the answer.
IDENTITY = ("id", "text", "pair", "options", "words", "question", "answers", "label")
SEED = 0


@checked()
def compare(first: str | Path, second: str | Path, resamples: int = 10_000) -> dict[str, Any]:
    """The figures of two fine-tuning runs, second minus first, and how sure the difference is.

        bertsmith.compare("runs/mrpc-base", "runs/mrpc-mine")["metrics"]["f1"]["p"]

    As `bertsmith compare --json` prints them:
    {"task", "examples", "resamples", "seed", "main_metric",
     "metrics": {name: {"first", "second", "difference", "interval": [low, high], "p"}},
     "better", "equal", "worse": examples that the second run answers better, ...,
     "seeds": {name: {"first", "second": means, "difference", "interval": [low, high] or None}}}

    "metrics" are as `paired_bootstrap` has them: intervals of 95%, of dev examples drawn anew
    `resamples` times. "seeds" compares seeds instead of examples, by Welch's t; it is empty where a
    run has a single one, and of two seeds there is no interval.

    Errors: ValueError for another task or dev set, no answers on a dev set, or fewer than 100
    resamples.
    """
    if resamples < 100:
        raise ValueError(f"`resamples={resamples}`: an interval needs at least 100")
    folders = Path(first), Path(second)
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if not run.dev.get("examples"):
            raise ValueError(
                f"{folder}/dev_scores.json is missing or empty: only fine-tuning runs with answers "
                "on a dev set can be compared"
            )
    _check_same(folders, runs)
    (ours, our_goodness), (theirs, goodness) = (dev_metrics(run.dev) for run in runs)
    results = [run.result.get("metrics", {}) for run in runs]
    names = [name for name in results[0] if name in results[1] and name in ours and name in theirs]
    names.sort(key=lambda name: name != runs[0].result.get("main_metric"))  # that first
    if not names:
        raise ValueError(f"{folders[0]}: none of its metrics is known here")
    pairs = {name: (ours[name], theirs[name]) for name in names}
    better, worse = int((goodness > our_goodness).sum()), int((goodness < our_goodness).sum())
    return {
        "task": runs[0].dev["task"],
        "examples": len(goodness),
        "resamples": resamples,
        "seed": SEED,
        "main_metric": names[0],
        "metrics": paired_bootstrap(pairs, len(goodness), resamples, SEED),
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
