"""Files of examples, as data sets and users have them."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ....tiny import write


def table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """A .csv or .tsv; no header where that is ()."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
        writer.writerows([header, *rows] if header else rows)
    return path


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    return write(path, map(json.dumps, rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Of a table, or of lines of JSON."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t"))


def squad(path: Path, rows: Iterable[tuple[str, str, str | None]], version: int = 1) -> Path:
    """SQuAD's JSON of (question, context, answer or None); the id is the row's number.

    Version 2 says whether a question has an answer.
    """
    paragraphs = []
    for number, (question, context, answer) in enumerate(rows):
        found = [] if answer is None else [{"text": answer, "answer_start": context.find(answer)}]
        asked = {"id": str(number), "question": question, "answers": found}
        if version == 2:
            asked["is_impossible"] = answer is None
        paragraphs.append({"context": context, "qas": [asked]})
    return write(path, json.dumps({"data": [{"paragraphs": paragraphs}]}))
