"""Columns out of csv, tsv, txt, jsonl and parquet files, with the line of every row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from bertsmith.config import nearest

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".txt")  # .txt is read as .tsv (MRPC)
MAX_LISTED = 200  # characters of column names in a message


def read_columns(path: Path, wanted: Mapping[str, str]) -> tuple[dict[str, list[Any]], list[int]]:
    """Read the `wanted` columns (name -> who asks for it, e.g. "--label") of one file.

    Returns ({name: N values}, N lines); a line is the 1-based line on which a row starts (in
    parquet, the number of the row). In .csv files a cell may be quoted and hold line breaks;
    in .tsv and .txt files quotes are ordinary characters, as in GLUE. Blank lines are skipped.

    Errors: ValueError, one line, for a missing or empty file, an unknown suffix, text that is
    not UTF-8, a missing or doubled column, and a row that does not fit the header.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: cannot read '{path.suffix}': use one of {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        columns, lines = _read_parquet(path, wanted)
    else:
        rows = _json_rows(path, wanted) if path.suffix == ".jsonl" else _csv_rows(path, wanted)
        lines, values = [], []
        for line, row in rows:
            lines.append(line)
            values.append(row)
        columns = {name: [row[k] for row in values] for k, name in enumerate(wanted)}
    if not lines:
        raise ValueError(f"{path}: no examples in this file")
    return columns, lines


def _csv_rows(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[int, list[str]]]:
    quoted = path.suffix == ".csv"
    reader = csv.reader(
        io.StringIO(_read_text(path), newline=""),
        delimiter="," if quoted else "\t",
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=True,
    )
    header: list[str] = []
    places: list[int] = []
    first_line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}:{first_line}: broken row ({error}): {_HINT}") from error
        if row is None:
            return
        if not row:
            pass  # a blank line
        elif not header:
            header = row
            places = _find(path, header, wanted)
        elif len(row) != len(header):
            raise ValueError(
                f"{path}:{first_line}: {len(row)} cells, but the header has {len(header)}: {_HINT}"
            )
        else:
            yield first_line, [row[place] for place in places]
        first_line = reader.line_num + 1


_HINT = (
    "put texts that hold the separator or line breaks in double quotes in a .csv"
    " (a .tsv is read without quoting), or use .jsonl"
)


def _json_rows(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[int, list[Any]]]:
    for line, text in enumerate(_read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{line}: not valid JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{line}: expected a JSON object, one a line")
        _find(f"{path}:{line}", list(row), wanted)
        yield line, [row[name] for name in wanted]


def _read_parquet(path: Path, wanted: Mapping[str, str]) -> tuple[dict[str, list[Any]], list[int]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _find(path, file.schema_arrow.names, wanted)
            table = file.read(columns=list(wanted))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from error
    columns = {name: table.column(name).to_pylist() for name in wanted}
    return columns, list(range(1, table.num_rows + 1))


def _find(where: Path | str, header: list[str], wanted: Mapping[str, str]) -> list[int]:
    for name, asker in wanted.items():
        if header.count(name) > 1:
            raise ValueError(f"{where}: column '{name}' ({asker}) is there twice: rename one")
        if name not in header:
            hint = nearest(name, header)
            close = f"{hint} " if hint.startswith("did you mean") else "name one of its own "
            found = shorten(", ".join(header), MAX_LISTED, placeholder=" ...")
            raise ValueError(f"{where}: no column '{name}' for {asker}: {close}(columns: {found})")
    return [header.index(name) for name in wanted]


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # the MRPC files begin with a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text: convert the file to UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}:{line}: a NUL byte: this is not a text file")
    return text
