"""Texts, and words of texts, out of the files that people have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bertsmith.tasks.rows import column_names, parts, read_columns, suffix_of
from bertsmith.tasks.tables import no_columns, text_lines
from bertsmith.tasks.tagging_files import (
    DOCUMENT,
    TABLES,
    Sentences,
    has_columns,
    read_sentences,
    sentences_of,
)

COLUMN, TOKENS = "text", "tokens"


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


def read_words(path: Path, column: str | None = None) -> tuple[Sentences, np.ndarray]:
    """The words of every text of a file, and how many each text has: int64 [N].

    .txt, .csv, .tsv: texts, whose words blanks part; a .txt all of whose lines end in a tag is
    CoNLL columns
    .jsonl, .parquet, .arrow: {"tokens": ["Ann", "sings"]} a row; texts or such lists in `column`,
    and in the "text" of a .parquet without "tokens"
    any other suffix: CoNLL columns, the word first, an empty line after a sentence

    The sentences leave texts without a word out; the counts, which are 0 there, do not.

    Errors: ValueError, one line with file and line, as `read_texts` and `read_sentences`.
    """
    suffix = suffix_of(path)
    if suffix == ".txt" and _are_columns(list(text_lines(str(path), COLUMN))):
        suffix = None
    if suffix is None and column is not None:
        raise ValueError(f"--text {column}: {path} is read as CoNLL columns, the word first")
    if suffix is None or (suffix in TABLES and _holds_lists(path, column)):
        name = column or TOKENS
        sentences = read_sentences(path, need_tags=False, columns=(name, ""))
        if suffix is None:
            return sentences, np.diff(sentences.boundaries)
        rows, _ = read_columns(path, {name: "--text"})  # there are no sentences of empty lists
        return sentences, np.array([len(words) for words in rows[name]])
    texts, lines = read_texts(path, column)
    counts = np.array([len(text.split()) for text in texts])
    sentences = sentences_of(texts, "plain", str(path))
    return replace(sentences, lines=np.repeat(lines, counts)), counts


def _are_columns(lines: list[str]) -> bool:
    """Whether lines of text are CoNLL columns: as many cells in each, the last of them a tag.

    A single line never is: a text may end in "Vitamin B".
    """
    rows = [line.split() for line in lines if line.strip() and not line.startswith(DOCUMENT)]
    return len(rows) > 1 and len(set(map(len, rows))) == 1 and has_columns(lines, ("O",))


def _holds_lists(path: Path, column: str | None) -> bool:
    """Whether the column of a table has lists of words, and not texts."""
    if column is None:  # a .parquet may have "text" in its place
        is_parquet = suffix_of(path) == ".parquet"
        return not is_parquet or any(TOKENS in column_names(part) for part in parts(path))
    columns, _ = read_columns(path, {column: "--text"})
    return isinstance(columns[column][0], list)
