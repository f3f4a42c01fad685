"""Fill the [MASK] of a sentence: the likeliest pieces at each mask, with their probabilities.

Examples:
    bertsmith fill "The [MASK] sat on the mat." --model runs/books
    bertsmith fill "[MASK] is the capital of [MASK]." --model bert-base-uncased --top 3 --json

MODEL is a run directory, a local Hugging Face folder or the name of a model on the hub.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

BAR = 24  # characters of a bar that stands for probability 1


@dataclass
class Fill:
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """The sentence, with one or more [MASK]."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    top: int = 5
    """How many pieces to show for each mask."""
    json: bool = False
    """Print one JSON object: {"text", "predictions": [[{"token", "probability"}]]}."""


def run(settings: Fill) -> None:
    from bertsmith.inference.predictor import load

    predictions = load(settings.model).fill(settings.text, settings.top)
    if settings.json:
        rows = [[{k: row[k] for k in ("token", "probability")} for row in m] for m in predictions]
        print(json.dumps({"text": settings.text, "predictions": rows}, ensure_ascii=False))
    elif sys.stdout.isatty():
        show(settings.text, predictions)
    else:
        print(settings.text)
        for number, mask in enumerate(predictions, start=1):
            if len(predictions) > 1:
                print(f"[MASK] {number}")
            for row in mask:
                print(f"  {row['probability']:.4f}  {row['token']}")


def show(text: str, predictions: list[list[dict[str, Any]]]) -> None:
    """The same for people at a terminal: bars, and the sentence with the likeliest pieces in it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    line = Text()
    parts = text.split("[MASK]")
    for part, mask in zip(parts, predictions, strict=False):
        line.append(part).append(mask[0]["token"], style="bold green")
    console.print(line.append(parts[-1]))
    for number, mask in enumerate(predictions, start=1):
        table = Table(box=None, show_header=False, padding=(0, 1))
        if len(predictions) > 1:
            console.print(Text(f"\n[MASK] {number}", style="bold"))
        for row in mask:
            bar = "█" * max(1, round(BAR * row["probability"]))
            table.add_row(Text(row["token"]), f"{row['probability']:.1%}", Text(bar, style="green"))
        console.print(table)
