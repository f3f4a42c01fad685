"""Compare two fine-tuning runs on the same dev set: how large is the difference, and is it luck?

Examples:
    bertsmith compare runs/mrpc-base runs/mrpc-mine
    bertsmith compare runs/a runs/b --resamples 100000 --seed 1 --json

A paired bootstrap: dev examples are drawn with replacement, the same ones for both runs. A
difference is second run minus first. Where both have several seeds, their means are compared too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass
class Compare:
    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory of finetune."""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Another one, of the same task and dev set."""
    resamples: int = 10_000
    """How often the dev set is drawn anew."""
    seed: int = 0
    """Of the draws."""
    json: bool = False
    """Print one JSON object: {"metrics": {name: {"first", "second", "difference", ...}}, ...}."""


def run(settings: Compare) -> None:
    from bertsmith.reports.paired import compare

    result = compare([settings.first, settings.second], settings.resamples, settings.seed)
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """A table of metrics, the count of examples, and a table of means over seeds."""
    width = max(len("mean over seeds"), *map(len, result["metrics"])) + 2
    head = f"{'first':>9} {'second':>9} {'difference':>11}  {'95% interval':<20}"
    examples = f"{result['examples']:,} dev examples"
    print(f"{result['task']}, {examples}, {result['resamples']:,} resamples\n")
    print(f"{'':<{width}}{head} p")
    for name, figure in result["metrics"].items():
        less = "  (less is better)" if figure.get("less_is_better") else ""
        print(f"{name:<{width}}{_figures(figure)} {figure['p']:.4f}{less}")
    counts = "{better:,} examples better, {equal:,} alike, {worse:,} worse"
    print(f"\nthe second run answers {counts.format(**result)}")
    if result["seeds"]:
        print(f"\n{'mean over seeds':<{width}}{head.rstrip()}")
        for name, figure in result["seeds"].items():
            print(f"{name:<{width}}{_figures(figure)}".rstrip())


def _figures(figure: dict[str, Any]) -> str:
    low, high = figure["interval"]
    interval = f"{low:+.4f} to {high:+.4f}"
    return (
        f"{figure['first']:>9.4f} {figure['second']:>9.4f} {figure['difference']:>+11.4f}"
        f"  {interval:<20}"
    )
