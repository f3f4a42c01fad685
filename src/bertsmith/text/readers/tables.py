"""Rows of csv, tsv, txt, jsonl, parquet and arrow files, each with the line on which it starts.

`stream_texts` streams a column of a file of any size, local or behind a URL: documents of a corpus.
`stream_rows` streams rows with all their columns; `read_columns` holds the columns of a labelled
file: examples of a task. All cut lines with `split_rows` and `json_values`. CoNLL columns are no
table: see `conll_cells`.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from bertsmith.base.files import nearby
from bertsmith.base.settings import nearest
from bertsmith.text.readers.columnar import (
    columnar_batches,
    columnar_names,
    columnar_rows,
    columnar_types,
    columnar_values,
    no_text_column,
    stream_parquet,
)
from bertsmith.text.readers.files import (
    COMPRESSIONS,
    MAX_ROW,
    RemoteFile,
    file_kind,
    raw_lines,
    read_lines,
    whole_lines,
)

COLUMNAR_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt", *COLUMNAR_SUFFIXES)  # .txt is read as .tsv (MRPC)
MAX_LISTED = 200  # characters of column names in a message
SEPARATORS = {";": "';'", "\t": "tabs", ",": "commas", "|": "'|'"}  # and their names in messages
DOCUMENT_MARK = "-DOCSTART-"  # of CoNLL-2003, at times without the other columns
_BLANKS = re.compile(" +")
_QUOTING = (
    "put texts that hold the separator or line breaks in double quotes in a .csv"
    " (a .tsv is read without quoting), or use .jsonl"
)


def split_rows(
    path: Path | RemoteFile, lines: Iterable[str], quoted: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its first line, cells) of each row; a blank line has no cells.

    Cells of `quoted` rows, those of a csv (RFC 4180), may hold line breaks; in a tsv quotes are
    plain characters, as in GLUE. Lines come with their line ends.

    Errors: ValueError with file, line and hint for quotes that do not match.
    """
    if not quoted:
        for number, line in enumerate(lines, start=1):
            text = line.rstrip("\r\n")
            yield number, text.split("\t") if text else []
        return
    csv.field_size_limit(MAX_ROW)  # of the whole process; the default is 131,072
    lines = iter(lines)
    first = next(lines, "")
    rows, started = csv.reader(chain([first] if first else [], lines), strict=True), 1
    try:
        for row in rows:
            yield started, row
            started = rows.line_num + 1
    except csv.Error as error:
        hint = _QUOTING
        if started == 1:
            hint = _separator_hint(lambda mark: mark != "," and f'"{mark}' in first) or _QUOTING
        raise ValueError(f"{path}:{started}: broken row ({error}): {hint}") from error


def _separator_hint(is_mark: Callable[[str], bool]) -> str:
    """A question about the separator for which `is_mark` is true; empty for none."""
    for mark, called in SEPARATORS.items():
        if is_mark(mark):
            return f"are {called} its separators? a .csv has commas, a .tsv or .txt tabs"
    return ""


def json_values(
    path: Path | RemoteFile,
    numbered: Iterable[tuple[int, str]],
    make_object: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each line of JSON that is not blank.

    Errors: ValueError with file and line for what is not JSON or is nested too deeply.
    """
    decode = json.JSONDecoder(object_pairs_hook=make_object).decode
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            value = decode(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error.msg})") from error
        except RecursionError:
            raise ValueError(f"{path}:{number}: JSON nested too deeply") from None
        except ValueError as error:  # of `make_object`
            raise ValueError(f"{path}:{number}: {error}") from error
        yield number, value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; by itself the json module would keep the last of two values."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{doubled}' is there twice: keep one")
    return mapping


def conll_cells(line: str) -> list[str]:
    """Cut a line of CoNLL columns at tabs, or without tabs at blanks (but not unbreakable ones).

    >>> conll_cells("New York\\tB-LOC"), conll_cells("10\\u00a0000 O")
    (['New York', 'B-LOC'], ['10\\xa0000', 'O'])
    """
    return line.split("\t") if "\t" in line else _BLANKS.split(line.strip(" "))


def stream_texts(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the rows of a jsonl, csv, tsv or parquet file, in bounded memory.

    Lines of a parquet file are its rows. Rows whose text is null are skipped.

    Errors: ValueError that names file, line and hint for a damaged file, a row without the column
    and a text that is no string; those of `raw_lines`.
    """
    kind = file_kind(path)
    cells = {".jsonl": _json_cells, ".parquet": stream_parquet}.get(str(kind), _table_cells)
    for number, text in cells(path, column):
        if isinstance(text, str):
            yield number, text
        elif text is not None:
            where = f"{path}: row {number}" if kind == ".parquet" else f"{path}:{number}"
            raise ValueError(f"{where}: '{column}' is {text!r:.40}: expected a string")


def _json_cells(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, Any]]:
    for number, row in json_values(path, read_lines(path, MAX_ROW), _unique_names):
        if not isinstance(row, dict):
            raise ValueError(f'{path}:{number}: expected an object such as {{"{column}": "..."}}')
        if column not in row:
            raise no_text_column(f"{path}:{number}", column, row)
        text = row[column]
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError:  # half a surrogate pair could not be written again
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield number, text


def _table_cells(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, str]]:
    is_csv = file_kind(path) == ".csv"
    # a text of a tsv cannot hold a line feed, but a carriage return
    texts = (f"{text}\n" for _, text in raw_lines(path, MAX_ROW))
    lines = returned_lines(path) if is_csv else texts
    header, index = list[str](), 0
    for number, row in split_rows(path, lines, quoted=is_csv):
        if not header and row:
            [index] = _find(str(path), row, {column: "`text_column`"}, column not in row)
            header = row
        elif row and (len(row) <= index or any(row[len(header) :])):
            fault = f"{len(row)} cells, but the header has {len(header)}"
            raise ValueError(f"{path}:{number}: {fault}: {_QUOTING}")
        elif row:
            yield number, row[index]


def read_columns(
    path: Path,
    wanted: Mapping[str, str],
    header: Sequence[str] = (),
    leave_out_broken: bool = False,
    optional: Sequence[str] = (),
) -> tuple[dict[str, list[Any]], list[int]]:
    """Read the `wanted` columns (name -> who asks for it, such as "`label`") of one file.

    Returns ({name: N values}, N lines): 1-based lines on which rows start, or numbers of rows in
    parquet and arrow. Blank lines are skipped; a `*` in the name of a parquet or arrow file stands
    for its parts, in order; numbers of a Hugging Face ClassLabel become names.

    header            names the columns of a file whose first row has none of the wanted (CoLA)
    leave_out_broken  skip rows of a csv or tsv that do not fit the header or lack a wanted cell,
                      with a warning, instead of refusing them (QQP)
    optional          the wanted that a row of a jsonl may lack; it then has None there

    Errors: ValueError, one line, for a missing or empty file, an unknown suffix, text that is
    not UTF-8, a missing or doubled column, and a row that does not fit the header.
    """
    files, kind = _found(path), table_format(path)
    if kind in COLUMNAR_SUFFIXES:
        for file in files:
            _find(file, columnar_names(file), wanted)
        columns, count = columnar_values(files, list(wanted))
        lines = list(range(1, count + 1))
    else:
        rows: list[tuple[int, list[Any]]] = []
        if kind == ".jsonl":
            needed = {name: role for name, role in wanted.items() if name not in optional}
            for line, row in _json_objects(path):
                _find(f"{path}:{line}", list(row), needed)
                rows.append((line, [row.get(name) for name in wanted]))
        else:
            table = _table_rows(path, wanted, header, leave_out_broken)
            _, names = next(table, (0, []))
            indices = [names.index(name) for name in wanted if names]
            rows += ((line, [row[index] for index in indices]) for line, row in table)
        lines = [line for line, _ in rows]
        columns = {name: [row[k] for _, row in rows] for k, name in enumerate(wanted)}
    if not lines:
        raise ValueError(f"{path}: no examples in this file")
    return columns, lines


def stream_rows(
    path: Path, wanted: Mapping[str, str], header: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row with all its columns) of one file, in bounded memory; see `read_columns`.

    Columns of no use here that share a name are left out, with a warning. Errors: as
    `read_columns`, when the row is reached.
    """
    files, kind, number = _found(path), table_format(path), 0
    if kind == ".jsonl":
        for number, row in _json_objects(path):
            _find(f"{path}:{number}", list(row), wanted)
            yield number, row
    elif kind in COLUMNAR_SUFFIXES:
        for file in files:
            names = columnar_names(file)
            _find(file, names, wanted)
            for _, columns in columnar_batches(file, _unshared(path, names)):
                for row in zip(*columns.values(), strict=True):
                    number += 1
                    yield number, dict(zip(columns, row, strict=True))
    else:
        table = _table_rows(path, wanted, header, leave_out_broken=False)
        _, names = next(table, (0, []))
        kept = _unshared(path, names)
        indices = [names.index(name) for name in kept]
        for number, row in table:
            yield number, {name: row[k] for name, k in zip(kept, indices, strict=True)}
    if not number:
        raise ValueError(f"{path}: no examples in this file")


def _unshared(path: Path, names: Sequence[str]) -> list[str]:
    counts = Counter(names)
    if shared := ", ".join(repr(name) for name, count in counts.items() if count > 1):
        print(
            f"warning: {path}: the columns that share a name ({shared}) are left out: rename them",
            file=sys.stderr,
        )
    return [name for name, count in counts.items() if count == 1]


def count_rows(path: Path) -> int | None:
    """About the number of rows of a file, by its line breaks; None where that is slow to tell."""
    if file_suffix(path) in COLUMNAR_SUFFIXES:
        counts = [columnar_rows(file) for file in parts(path)]
        return None if None in counts else sum(count or 0 for count in counts)
    if path.suffix.lower() in COMPRESSIONS or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _found(path: Path) -> list[Path]:
    if files := parts(path):
        return files
    raise ValueError(f"{path}: no such file{nearby(path)}")


def column_names(path: Path) -> list[str]:
    """Columns of a file; of a .jsonl those of its first row. Errors: as `read_columns`."""
    kind = table_format(path)
    if kind in COLUMNAR_SUFFIXES:
        return columnar_names(parts(path)[0])
    if kind == ".jsonl":
        return next((list(row) for _, row in _json_objects(path)), [])
    return next((row for _, row in _raw_rows(path)), [])


def column_types(path: Path) -> dict[str, Any]:
    """pyarrow's types of the columns of parquet and arrow files; {} for files of text."""
    is_typed = file_suffix(path) in COLUMNAR_SUFFIXES
    return columnar_types(parts(path)[0]) if is_typed else {}


def file_suffix(path: Path | RemoteFile) -> str | None:
    """The one of SUFFIXES by which a file is read, before .gz, .bz2, .xz or .zst; None for another.

    >>> [file_suffix(Path(name)) for name in ("train.tsv.xz", "DEV.CSV", "a.conll.gz")]
    ['.tsv', '.csv', None]
    """
    return ".arrow" if path.suffix.lower() == ".arrow" else file_kind(path)


def table_format(path: Path | RemoteFile) -> str:
    """`file_suffix` a file of rows. Errors: ValueError for None."""
    if suffix := file_suffix(path):
        return suffix
    raise ValueError(f"{path}: cannot read '{path.suffix}': use one of {', '.join(SUFFIXES)}")


def parts(path: Path) -> list[Path]:
    """The files that a path means: itself, or all that a `*` in its name stands for, in order."""
    if path.is_file():
        return [path]
    found = path.parent.glob(path.name) if "*" in path.name else []
    return sorted(file for file in found if file.is_file())


def digest(path: Path) -> str:
    """SHA-256 of the bytes of all `parts` of a path, one after the other."""
    whole = hashlib.sha256()
    for part in parts(path):
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: whole)
    return whole.hexdigest()


def known_digest(path: Path) -> str:
    """`digest` of one file, which is read once a process unless its size or time changes."""
    found = path.stat()
    return _digest_of(path, found.st_size, found.st_mtime_ns)


@functools.cache
def _digest_of(path: Path, size: int, changed: int) -> str:
    return digest(path)


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in json_values(path, raw_lines(path, MAX_ROW), _unique_names):
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{line}: expected a JSON object, one a line")
        yield line, row


def _table_rows(
    path: Path, wanted: Mapping[str, str], header: Sequence[str], leave_out_broken: bool
) -> Iterator[tuple[int, list[str]]]:
    """The names of the columns, then (line, cells) of each row."""
    names: Sequence[str] = ()
    indices: list[int] = []
    left_out = []
    for line, row in _raw_rows(path):
        if not names:
            is_named = not header or not set(wanted).isdisjoint(row)
            names = row if is_named else header
            indices = _find(path, names, wanted, is_foreign=set(wanted).isdisjoint(names))
            yield 0, list(names)
            if is_named:
                continue
        fits = len(row) == len(names)
        if leave_out_broken and not (fits and all(row[index].strip() for index in indices)):
            left_out.append(line)
            continue
        if not fits:
            fault = f"{len(row)} cells, but the header has {len(names)}"
            raise ValueError(f"{path}:{line}: {fault}: {_QUOTING}")
        yield line, row
    if left_out:
        found = f"{len(left_out):,} broken rows are left out, the first in line {left_out[0]}"
        print(f"warning: {path}: {found}", file=sys.stderr)


def _raw_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not blank, the header among them, with its first line."""
    rows = split_rows(path, returned_lines(path), table_format(path) == ".csv")
    return (row for row in rows if row[1])


def returned_lines(path: Path | RemoteFile) -> Iterator[str]:
    """Lines with their ends, which a lone carriage return is, too."""
    for _, line in whole_lines(path, MAX_ROW):
        if "\r" in line.removesuffix("\r\n"):
            yield from io.StringIO(line, newline="")
        else:
            yield line


def _find(
    where: Path | str, header: Sequence[str], wanted: Mapping[str, str], is_foreign: bool = False
) -> list[int]:
    """Indices of the wanted columns; `is_foreign`: the first line of a table has none of them."""
    for name, role in wanted.items():
        if header.count(name) > 1:
            raise ValueError(f"{where}: column '{name}' ({role}) is there twice: rename one")
        if name not in header:
            found = shorten(", ".join(header), MAX_LISTED, placeholder=" ...")
            hint = _header_hint(name, header, is_foreign)
            raise ValueError(f"{where}: no column '{name}' for {role}: {hint} (columns: {found})")
    return [header.index(name) for name in wanted]


def _header_hint(name: str, header: Sequence[str], is_foreign: bool) -> str:
    hint = _separator_hint(lambda mark: name in header[0].split(mark)) if is_foreign else ""
    if hint and len(header) == 1:
        return f"its header is one cell: {hint}"
    near = nearest(name, header)
    if near.startswith("did you mean"):
        return near
    return "name one of its own" + ", or is the header line missing?" * is_foreign
