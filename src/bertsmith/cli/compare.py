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

SMALL = 1e-3  # figures below it have significant digits instead of decimals


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


def run_compare(settings: Compare) -> None:
    from bertsmith.reports.paired import compare

    result = compare([settings.first, settings.second], settings.resamples, settings.seed)
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """A table of metrics, the count of examples, and a table of means over seeds."""
    width = max(len("mean over seeds"), *map(len, result["metrics"])) + 2
    figures = [*result["metrics"].values(), *result["seeds"].values()]
    wide = max(20, *(len(_interval(figure)) for figure in figures))
    head = f"{'first':>9} {'second':>9} {'difference':>11}  {'95% interval':<{wide}}"
    examples = f"{result['examples']:,} dev examples"
    print(f"{result['task']}, {examples}, {result['resamples']:,} resamples\n")
    print(f"{'':<{width}}{head} p")
    for name, figure in result["metrics"].items():
        less = "  (less is better)" if figure.get("less_is_better") else ""
        print(f"{name:<{width}}{_figures(figure, wide)} {figure['p']:.4f}{less}")
    counts = "{better:,} examples better, {equal:,} alike, {worse:,} worse"
    print(f"\nthe second run answers {counts.format(**result)}")
    if result["seeds"]:
        print(f"\n{'mean over seeds':<{width}}{head.rstrip()}")
        for name, figure in result["seeds"].items():
            print(f"{name:<{width}}{_figures(figure, wide)}".rstrip())


def _figures(figure: dict[str, Any], wide: int) -> str:
    first, second = (f"{figure[name]:{_digits(figure[name])}}" for name in ("first", "second"))
    difference = f"{figure['difference']:+{_shared_digits(figure)}}"
    return f"{first:>9} {second:>9} {difference:>11}  {_interval(figure):<{wide}}"


def _interval(figure: dict[str, Any]) -> str:
    if figure["interval"] is None:
        return "2 seeds: no interval"
    digits = _shared_digits(figure)
    return " to ".join(f"{end:+{digits}}" for end in figure["interval"])


def _shared_digits(figure: dict[str, Any]) -> str:
    """Of differences: small ones of larger figures may be rounding alone."""
    return _digits(max(abs(figure["first"]), abs(figure["second"])))


def _digits(value: float) -> str:
    """Four decimals, which would show nothing of a small figure, such as an error of small scores.

    >>> _digits(0.5), _digits(-2e-7), _digits(0.0)
    ('.4f', '.4g', '.4f')
    """
    return ".4g" if 0 < abs(value) < SMALL else ".4f"
