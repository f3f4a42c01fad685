"""Figures of the cells, the tests of each claim, and a verdict on it.

A difference is sure where two tests agree: a paired bootstrap over the dev examples, in which each
side is the mean of its seeds, and a paired t over the seeds. Figures without answers, of taggers
over features, have the second alone; perplexities, of one pre-training each, have none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from bertsmith.base.files import read_json
from bertsmith.checkpoints.run_folder import RESULT_FILE, STATE_FILE, RunFolder
from bertsmith.experiments.paper.experiment import Claim, Column, Experiment, Variant
from bertsmith.experiments.paper.work import Work, resolved
from bertsmith.tasks.bootstrap import Score, dev_metrics, paired_bootstrap
from bertsmith.training.finetuning.run import SCORES_FILE
from bertsmith.training.pretraining.objectives import token_name

RESAMPLES = 2000
SURE = 0.05


def result_of(experiment: Experiment, work: Work) -> dict[str, Any]:
    """All that the page says, as plain values; every cell is done."""
    rows = {variant.name: row_of(experiment, work, variant) for variant in experiment.variants}
    pairs = [(claim.better, claim.worse) for claim in experiment.claims]
    if experiment.tests == "all":
        pairs += [
            (first.name, second.name)
            for first, second in combinations(experiment.variants, 2)
            if first.group == second.group
        ]
    tests = [
        {
            "rows": (first, second),
            "columns": {
                column: difference(experiment, work, rows, (first, second), Column(column))
                for column in rows[first]["figures"]
                if column in rows[second]["figures"]
            },
        }
        for first, second in dict.fromkeys(pairs)
    ]
    return {
        "title": experiment.title,
        "scale": work.scale_name,
        "rows": rows,
        "tests": tests,
        "claims": [verdict(claim, tests) for claim in experiment.claims],
    }


def row_of(experiment: Experiment, work: Work, variant: Variant) -> dict[str, Any]:
    """A variant's figures by column, and what it cost."""
    row: dict[str, Any] = {"title": variant.title, "group": variant.group, "figures": {}}
    if not variant.model:
        made = spent(work, variant)
        known = ("steps", "tokens", "flops", "seconds", "held_out")
        row["pretraining"] = {name: made[name] for name in known if name in made}
        row["size"] = work.pretrain_settings(variant).get("size", "tiny")
    for column in experiment.columns_of(variant):
        if column.is_perplexity and not work.result(variant).get("held_out"):
            short = "the text is too short to hold some out: give more"
            print(f"{variant.title}: no perplexity: {short}", file=sys.stderr)
            continue
        row["figures"][column.name] = figure(work, variant, column)
    return row


def spent(work: Work, variant: Variant) -> dict[str, Any]:
    """The cost of its pre-training up to where it is measured; {}: that checkpoint was removed."""
    if variant.at == 1:
        return work.result(variant)
    state, step = work.start(variant)[0] / STATE_FILE, work.start(variant)[1]["step"]
    return {**read_json(state)["loop"], "steps": step} if state.exists() else {}


def figure(work: Work, variant: Variant, column: Column) -> dict[str, Any]:
    """A metric of each seed, its mean and spread; tasks' as fractions."""
    paper = variant.paper.get(column.name)
    if column.is_perplexity:
        objective = resolved(work.pretrain_settings(variant))["objective"]
        loss = work.result(variant)["held_out"][f"{token_name(objective)}_loss"]
        return {"seeds": {}, "mean": float(np.exp(loss)), "std": None, "paper": paper}
    seeds: dict[str, float] = {}
    facts: dict[str, Any] = {}
    for seed in range(1, work.scale.seeds + 1):
        folder = work.measurement(variant, column, seed).folder(work.root)
        result = read_json(folder / RESULT_FILE)
        if column.is_features:
            seeds[str(seed)] = result["rows"][variant.features]["seeds"][str(seed)]["dev"]
            continue
        seeds[str(seed)] = result["metrics"][column.metric]
        facts = {name: result[name] for name in ("flops", "dev_examples")}
        facts["parameters"] = RunFolder(folder).settings()["parameters"]
    values = list(seeds.values())
    std = stdev(values) if len(values) > 1 else None
    return {"seeds": seeds, "mean": mean(values), "std": std, "paper": paper, **facts}


def difference(
    experiment: Experiment,
    work: Work,
    rows: Mapping[str, Any],
    names: tuple[str, str],
    column: Column,
) -> dict[str, Any]:
    """The gain of the first over the second, and its tests."""
    first, second = (rows[name]["figures"][column.name] for name in names)
    sign = -1 if column.is_perplexity else 1
    found: dict[str, Any] = {"difference": sign * (first["mean"] - second["mean"])}
    if column.is_perplexity:
        return found
    found["p_seeds"] = paired_p([*first["seeds"].values()], [*second["seeds"].values()])
    if not column.is_features:
        sides = [score_of(work, experiment.variant(name), column) for name in reversed(names)]
        tested = paired_bootstrap(
            {column.metric: (sides[0], sides[1])}, first["dev_examples"], RESAMPLES, 0
        )[column.metric]
        found |= {"interval": tested["interval"], "p_examples": tested["p"]}
    p_values = [found[name] for name in ("p_seeds", "p_examples") if name in found]
    found["is_sure"] = all(p is not None and p < SURE for p in p_values)
    return found


def score_of(work: Work, variant: Variant, column: Column) -> Score:
    """The mean of the seeds' metric, of all resamples of the dev examples."""
    scores = []
    for seed in range(1, work.scale.seeds + 1):
        folder: Path = work.measurement(variant, column, seed).folder(work.root)
        scores.append(dev_metrics(read_json(folder / SCORES_FILE))[0][column.metric])
    return lambda weights: np.mean([score(weights) for score in scores], axis=0)


def paired_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Two-sided p of Student's paired t; None of fewer than three pairs.

    >>> round(paired_p([1.0, 2.0, 3.0], [0.0, 1.5, 1.0]), 3)
    0.118
    """
    if len(first) < 3:
        return None
    from scipy import stats  # of the extra `train`

    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(set(differences)) == 1:  # t is infinite, or 0 / 0
        return 0.0 if differences[0] else 1.0
    found: Any = stats.ttest_1samp(differences, 0)
    return float(found.pvalue)


def verdict(claim: Claim, tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The claim with a word for each of its columns."""
    pair = claim.better, claim.worse
    found = next(test["columns"] for test in tests if test["rows"] == pair)
    wanted = [column for column in claim.columns or found if column in found]
    words = {column: held(found[column]) for column in wanted}
    return {"better": claim.better, "worse": claim.worse, "source": claim.source, "words": words}


def held(found: Mapping[str, Any]) -> str:
    """
    >>> held({"difference": -0.021, "is_sure": True}), held({"difference": 0.5})
    ('does not hold: the contrary, by 2.1 points', 'holds, by 0.50; of one pre-training each')
    """
    if "is_sure" not in found:
        word, size = "holds" if found["difference"] > 0 else "does not hold", found["difference"]
        return f"{word}, by {abs(size):.2f}; of one pre-training each"
    points = 100 * found["difference"]
    if not found["is_sure"]:
        return f"not sure ({points:+.1f} points)"
    if points > 0:
        return f"holds, by {points:.1f} points"
    return f"does not hold: the contrary, by {-points:.1f} points"
