"""Fill the [MASK] of a sentence: the likeliest pieces at each mask, with their probabilities.

Examples:
    bertsmith fill "The [MASK] sat on the mat." --model runs/books
    bertsmith fill "[MASK] is the capital of [MASK]." --model bert-base-uncased --joint --json
    bertsmith fill "She brought me a [MASK] from Rome." --model bert-base-uncased --words 3
    bertsmith fill "The film was [MASK]." --model bert-base-uncased --candidates good,bad,so-so

By itself each [MASK] is one piece and knows nothing of what stands at the others. --joint fills
all together. --words K puts whole words of 1 to K pieces there. --candidates scores exactly these
words or phrases at the one [MASK]; one that the vocabulary cannot spell is refused.

MODEL is a run directory, a local Hugging Face folder or the name of a model on the hub.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
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
    """How many answers to show."""
    joint: bool = False
    """Fill several [MASK] together."""
    words: int | None = None
    """Put a whole word of at most so many pieces at each [MASK]."""
    candidates: str | None = None
    """Words or phrases to choose from, parted by commas; all are shown."""
    candidates_file: Path | None = None
    """File with a candidate a line."""
    json: bool = False
    """Print one JSON object: {"text", "predictions": [[{"token", "probability"}]]}; of --joint
    and --words {"text", "fillings": [...]}, of candidates {"text", "candidates": [...]}."""


def run_fill(settings: Fill) -> None:
    from bertsmith.inference.predictor import load

    given = ["joint"] if settings.joint else []
    others = ("words", "candidates", "candidates_file")
    given += [name for name in others if getattr(settings, name) is not None]
    if len(given) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags}: give one of them")
    if given:
        together(settings)
        return
    predictions = load(settings.model).fill(settings.text, settings.top)
    if settings.json:
        rows = [[{k: row[k] for k in ("token", "probability")} for row in m] for m in predictions]
        print(json.dumps({"text": settings.text, "predictions": rows}, ensure_ascii=False))
    elif sys.stdout.isatty():
        show_predictions(settings.text, predictions)
    else:
        print(settings.text)
        for number, mask in enumerate(predictions, start=1):
            if len(predictions) > 1:
                print(f"[MASK] {number}")
            for row in mask:
                print(f"  {row['probability']:.4f}  {row['token']}")


def together(settings: Fill) -> None:
    """Answers about all masks at once, or about given words."""
    from bertsmith.inference.fill_words import fill_candidates, fill_words
    from bertsmith.inference.predictor import load

    text, key = settings.text, "fillings"
    candidates = read_candidates(settings)
    filler = load(settings.model).filler
    if settings.joint:
        answers = filler.joint(text, settings.top)
        lines = [f"{row['probability']:.4f}  {' '.join(row['tokens'])}" for row in answers]
    elif settings.words is not None:
        answers = fill_words(filler, text, settings.words, settings.top)
        lines = [f"{row['score']:8.4f}  {', '.join(row['words'])}" for row in answers]
    else:
        answers, key = fill_candidates(filler, text, candidates), "candidates"
        lines = [f"{row['probability']:.4f}  {row['candidate']}" for row in answers]
    if settings.json:
        print(json.dumps({"text": text, key: answers}, ensure_ascii=False))
    else:
        print("\n  ".join([text, *lines]))


def read_candidates(settings: Fill) -> list[str]:
    """Errors: ValueError for a file that is not there."""
    from bertsmith.text.readers import read_lines

    if settings.candidates is not None:
        return [word.strip() for word in settings.candidates.split(",")]
    if settings.candidates_file is not None:
        return [line for _, line in read_lines(settings.candidates_file) if line]
    return []


def show_predictions(text: str, predictions: list[list[dict[str, Any]]]) -> None:
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
