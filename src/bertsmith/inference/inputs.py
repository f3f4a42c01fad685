"""Texts out of the files that people have."""

from __future__ import annotations

from pathlib import Path

from bertsmith.tasks.rows import read_columns, suffix_of
from bertsmith.tasks.tables import no_columns, text_lines

COLUMN = "text"


def read_texts(source: str | Path, column: str | None = None) -> tuple[list[str], list[int]]:
    """All texts of a file and the lines they stand on: a .txt, and "-" for standard input, has a
    text a line, the others a row.

    A blank line is a text too, so that vector k is that of line k. `column` None: "text".

    Errors: ValueError, one line with file and line, for no file, no text in it, another suffix, a
    missing column, a text that is none.
    """
    path = Path(source)
    if is_text(source):
        if column is not None:
            raise no_columns(source, column)
        texts = [line.strip() for line in text_lines(str(source), COLUMN)]
        if not any(texts):
            raise ValueError(f"{source}: no text in it")
        return texts, list(range(1, len(texts) + 1))
    column = column or COLUMN
    columns, lines = read_columns(path, {column: "--text"})
    for value, line in zip(columns[column], lines, strict=True):
        if not isinstance(value, str):
            raise ValueError(f"{path}:{line}: column '{column}' holds {value!r:.60}, not a text")
    return columns[column], lines


def is_text(source: str | Path) -> bool:
    """Whether an input has a text a line, and no columns: a .txt, and "-" for standard input."""
    return source == "-" or suffix_of(Path(source)) == ".txt"
