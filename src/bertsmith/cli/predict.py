"""Label new text with a fine-tuned model.

Examples:
    bertsmith predict runs/reviews new.csv --out labelled.csv
    bertsmith predict runs/reviews tickets.txt --out labelled.jsonl
    cat tickets.txt | bertsmith predict runs/reviews - --out labelled.tsv

The rows of the input are written again, in their order, with the columns "label" and "probability"
behind their own ("predicted_label" where the input has a "label"); a .jsonl gets the probabilities
of all labels as well.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass
class Predict:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory of a fine-tuning, or another folder or hub name of a classifier."""
    input: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INPUT")]
    """csv, tsv, jsonl or parquet with the columns used in training; txt (a text a line); or -."""
    out: Path
    """File to write: .csv, .tsv or .jsonl."""
    text: str | None = None
    """Column with the text, when it has another name than in training."""
    text_pair: str | None = None
    """Column with the second text, for a model of pairs."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 is quicker on machines that multiply it, and a little less exact."""


def run(settings: Predict) -> None:
    from bertsmith.inference.evaluate import task_of
    from bertsmith.inference.predictor import load
    from bertsmith.inference.tables import answer_names, read_rows, write_rows
    from bertsmith.progress import Progress

    if settings.out.resolve() == Path(settings.input).resolve():
        raise ValueError(f"--out {settings.out} is the input itself: name another file")
    predictor = load(settings.run, device=settings.device, precision=settings.precision)
    task = task_of(predictor.folder, text=settings.text, text_pair=settings.text_pair)
    rows = read_rows(settings.input, task)
    names = answer_names(rows, settings.out)
    pairs = None if task.text_pair is None else [row[task.text_pair] for row in rows]
    features = predictor.features([row[task.text] for row in rows], pairs)
    with Progress("predict", total=len(rows), unit="texts") as progress:
        answers = predictor.answers(predictor.scores(features, progress.update))
    write_rows(rows, answers, names, settings.out)
    if features.num_truncated:
        print(
            f"{features.num_truncated:,} of {len(rows):,} texts were cut to "
            f"{features.max_length} tokens, the length of training",
            file=sys.stderr,
        )
    print(f"{len(rows):,} rows written to {settings.out}")
