"""The files that `predict` writes: the rows of the input, each with a model's answer after it.

Rows are kept as the bytes of parts while they are answered; of the parts the file is made.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from bertsmith.base.files import atomic_file
from bertsmith.text.readers.tables import column_types

if TYPE_CHECKING:
    import pyarrow

DIGITS = 4  # of a probability that is written

Row = Mapping[str, Any]


class Format:
    """A kind of file. `own` are the columns of the input, `names` those of the answer.

    Halves of surrogate pairs, which UTF-8 lacks, are written as their escape.
    """

    is_nested = False
    """True: cells may be lists and mappings."""
    takes_columns = False
    """True: later rows may have columns that the first do not have."""
    excluded = ""
    """Characters that no cell can have."""

    def __init__(self, own: Sequence[str], names: Sequence[str], source: str) -> None:
        self.own, self.names, self.source = own, names, source

    def part(self, rows: Sequence[Row]) -> bytes:
        """Full rows as they are kept; here the lines of the file."""
        raise NotImplementedError

    def write(self, file: BinaryIO, parts: Iterable[bytes]) -> None:
        """Write the file of all parts."""
        file.writelines(parts)


class _Csv(Format):
    def part(self, rows: Sequence[Row]) -> bytes:
        # else a carriage return alone, which ends a line for readers, would not be quoted
        returns = any("\r" in str(value) for row in rows for value in row.values())
        return self._lines(rows, quoting=csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL)

    def write(self, file: BinaryIO, parts: Iterable[bytes]) -> None:
        file.write(self.part([{name: name for name in (*self.own, *self.names)}]))
        super().write(file, parts)

    def _lines(self, rows: Sequence[Row], **style: Any) -> bytes:
        text, columns = io.StringIO(newline=""), [*self.own, *self.names]
        lines = ({name: _as_text(cell) for name, cell in row.items()} for row in rows)
        csv.DictWriter(text, columns, lineterminator="\n", **style).writerows(lines)
        return _utf8(text.getvalue())


class _Tsv(_Csv):
    excluded = "\t\r\n"

    def part(self, rows: Sequence[Row]) -> bytes:
        return self._lines(rows, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)


class _Jsonl(Format):
    is_nested = takes_columns = True

    def part(self, rows: Sequence[Row]) -> bytes:
        encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
        return _utf8("".join(f"{encode(row)}\n" for row in rows))


class _Text(Format):
    """The answers alone, a line each."""

    takes_columns = True

    def part(self, rows: Sequence[Row]) -> bytes:
        answers = (re.sub("[\r\n]+", " ", str(row[self.names[0]])) for row in rows)
        return _utf8("".join(f"{answer}\n" for answer in answers))


class _Parquet(Format):
    """A row group a part. Columns have the types of a parquet or arrow input, else are strings."""

    is_nested = True

    @functools.cached_property
    def types(self) -> dict[str, pyarrow.DataType]:
        return column_types(Path(self.source))

    def part(self, rows: Sequence[Row]) -> bytes:
        import pyarrow

        columns = {}
        for name in (*self.own, *self.names):
            cells = [row.get(name) for row in rows]
            if name in self.names:
                cells = [_writable(cell) for cell in cells]
                kind = _answer_type(cells)
            elif (kind := self.types.get(name)) is None:
                kind, cells = pyarrow.string(), [_writable(_as_text(cell)) for cell in cells]
            try:
                columns[name] = _array(cells, kind)
            except pyarrow.ArrowException as error:
                fault = f"column '{name}' is not {kind} in all rows ({error})"
                raise ValueError(f"{self.source}: {fault}: end `out` in .jsonl") from error
        batch, box = pyarrow.record_batch(columns), io.BytesIO()
        with pyarrow.ipc.new_stream(box, batch.schema) as stream:
            stream.write_batch(batch)
        return box.getvalue()

    def write(self, file: BinaryIO, parts: Iterable[bytes]) -> None:
        from pyarrow import ipc, parquet

        tables = (ipc.open_stream(part).read_all() for part in parts)
        first = next(tables)
        with parquet.ParquetWriter(file, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table)


def _answer_type(cells: Sequence[Any]) -> pyarrow.DataType:
    """Text, number, list of texts, or a struct of numbers; a part may have no answer, or no text in
    its lists."""
    import pyarrow

    first = next((cell for cell in cells if cell is not None), None)
    if isinstance(first, list):
        return pyarrow.list_(pyarrow.string())
    if isinstance(first, dict):  # of options, whose names may differ
        names = dict.fromkeys(name for cell in cells for name in cell or ())
        return pyarrow.struct([(name, pyarrow.float64()) for name in names])
    return pyarrow.scalar(first).type


def _array(cells: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """An array of the type; timestamps with nanoseconds come as text."""
    import pyarrow

    if pyarrow.types.is_timestamp(kind) and any(isinstance(cell, str) for cell in cells):
        texts = [None if cell is None else str(cell) for cell in cells]
        return pyarrow.array(texts, pyarrow.string()).cast(kind)
    return pyarrow.array(cells, kind)


def _as_text(cell: Any) -> str | None:
    """None stays; lists, mappings, true and false are JSON."""
    if isinstance(cell, list | dict | bool):
        return json.dumps(cell, ensure_ascii=False, default=str)
    return cell if cell is None else str(cell)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _writable(cell: Any) -> Any:
    """A cell whose texts, and those of its lists and mappings, are UTF-8."""
    if isinstance(cell, list):
        return [_writable(part) for part in cell]
    if isinstance(cell, dict):
        return {_writable(name): part for name, part in cell.items()}
    return _utf8(cell).decode() if isinstance(cell, str) else cell


FORMATS: dict[str, type[Format]] = {
    ".csv": _Csv,
    ".tsv": _Tsv,
    ".jsonl": _Jsonl,
    ".parquet": _Parquet,
    ".txt": _Text,
}


def format_of(out: Path) -> type[Format]:
    """The format of a file by its ending. Errors: ValueError for an unknown one."""
    if out.suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"{out}: cannot write '{out.suffix}': end `out` in {known}")
    return FORMATS[out.suffix]


def answer_columns(label: str, more: Sequence[str]) -> list[str]:
    """The columns of an answer, which is named as the labels it was learned from.

    >>> answer_columns("stars", ["probability"]), answer_columns("option", ["option"])
    (['stars', 'probability'], ['predicted_option', 'option'])
    """
    return [f"predicted_{label}" if label in more else label, *more]


def rounded(value: Any) -> Any:
    """A probability to 4 digits, or a mapping of them; anything else stays.

    >>> rounded(0.123456), rounded({"good": 0.99996}), rounded("good")
    (0.1235, {'good': 1.0}, 'good')
    """
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value


def answer_names(rows: Sequence[Row], columns: Sequence[str], out: Path) -> dict[str, str]:
    """The names of the answer's columns, after a check that the rows can be written to `out`.

    >>> answer_names([{"text": "good", "label": "1"}], ["label", "score"], Path("answers.csv"))
    {'label': 'predicted_label', 'score': 'score'}

    Errors: ValueError for an unknown ending, rows with both names, a row or a name that a .tsv
    cannot hold.
    """
    taken = {name for row in rows for name in row}
    names = {}
    for name in columns:
        names[name] = f"predicted_{name}" if name in taken else name
        if names[name] in taken:
            raise ValueError(f"the input has columns '{name}' and '{names[name]}': rename one")
    check_cells(out, rows)
    check_cells(out, [{name: ""} for name in names.values()], "column of the answer")
    return names


def check_cells(
    out: Path, rows: Iterable[Row], noun: str = "row", numbers: Iterable[int] | None = None
) -> None:
    """Errors: ValueError for the first row that the format cannot hold; `noun` names it there."""
    if not (excluded := format_of(out).excluded):
        return
    for number, row in zip(itertools.count(1) if numbers is None else numbers, rows, strict=False):
        for name, value in row.items():
            if any(mark in f"{name}{value}" for mark in excluded):
                raise ValueError(
                    f"{noun} {number}: '{name}' holds a tab or a line break, which a {out.suffix} "
                    "cannot: end `out` in .csv or .jsonl"
                )


class AnswerTable:
    """Rows, each with its answer after it, as one of the FORMATS.

    The first rows, of the file `source`, decide the names of the columns. A list in an answer is
    joined by the separator where the format is not nested.

    Errors: ValueError as `answer_names`.
    """

    def __init__(
        self,
        first: Sequence[Row],
        columns: Sequence[str],
        out: Path,
        source: str,
        separator: str = ",",
    ) -> None:
        self.columns, self._out, self._source = columns, out, source
        self._separator = separator
        self._names = answer_names(first, columns, out)
        self._own = dict.fromkeys(name for row in first for name in row)
        self.format = format_of(out)(list(self._own), list(self._names.values()), source)

    def check(self, rows: Sequence[Row], lines: Sequence[int]) -> None:
        """Errors: ValueError with file and line for a later row that does not fit the first."""
        for row, line in zip(rows, lines, strict=True):
            if row.keys() <= self._own.keys():
                continue
            where = f"{self._source}:{line}"
            if taken := ", ".join(sorted(row.keys() & set(self._names.values()))):
                raise ValueError(f"{where}: '{taken}' is a column of the answer: rename it")
            if not self.format.takes_columns:
                name = next(name for name in row if name not in self._own)
                raise ValueError(
                    f"{where}: column '{name}' is not in the first rows, whose columns the"
                    f" {self._out.suffix} has: end `out` in .jsonl"
                )
        check_cells(self._out, rows, f"{self._source}: line", lines)

    def part(self, rows: Sequence[Row], answers: Sequence[Row]) -> bytes:
        """These rows as they are kept; `answers` have the columns, some at the end apart."""
        return self.format.part(
            [
                {**row, **{self._names[name]: self._cell(cell) for name, cell in answer.items()}}
                for row, answer in zip(rows, answers, strict=True)
            ]
        )

    def write(self, parts: Iterable[bytes]) -> None:
        """Write the file, which is then complete or as it was."""
        with atomic_file(self._out) as temporary, temporary.open("wb") as file:
            self.format.write(file, parts)

    def _cell(self, value: Any) -> Any:
        if isinstance(value, list) and not self.format.is_nested:
            return self._separator.join(map(str, value))
        return {str(k): v for k, v in value.items()} if isinstance(value, dict) else value


def write_rows(rows: Sequence[Row], answers: Sequence[Row], out: Path, source: str) -> None:
    """Write all of an `AnswerTable`."""
    table = AnswerTable(rows, list(answers[0]), out, source)
    table.write([table.part(rows, answers)])
