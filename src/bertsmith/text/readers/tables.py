"""Columns out of csv, tsv, txt, jsonl, parquet and arrow files, with the line of every row.

Parquet and Arrow files, as the Hugging Face `datasets` library writes them, by pyarrow alone.

A ClassLabel column holds numbers; their names are in the schema of the file (key "huggingface") or
in the dataset_info.json beside it.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from bertsmith.base.files import read_json
from bertsmith.base.settings import nearest
from bertsmith.text.readers.documents import file_kind

if TYPE_CHECKING:
    import pyarrow

NO_LABEL = -1  # how `datasets` marks a test example whose label is kept


def read_tables(files: Sequence[Path], names: list[str]) -> tuple[dict[str, list[Any]], int]:
    """The columns `names` of the parts of a table, one part after the other, and its row count.

    Numbers of a ClassLabel, alone or in a list, become their names, and -1 becomes None.

    Errors: ValueError that names a file that cannot be read or a number without a name.
    """
    columns: dict[str, list[Any]] = {name: [] for name in names}
    count = 0
    for file in files:
        table = _read_table(file, names)
        for name in names:
            values = table.column(name).to_pylist()
            classes = class_names(file, name)
            if classes is not None:
                values = [_named(value, classes, f"{file}: column '{name}'") for value in values]
            columns[name] += values
        count += table.num_rows
    return columns, count


def column_names_of(file: Path) -> list[str]:
    """The columns of one file. Errors: ValueError when it cannot be read."""
    return list(_schema(file).names)


def class_names(file: Path, column: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel column, or of a column of lists of them; None = it is no such.

    Errors: ValueError when the file's own description of its columns is damaged.
    """
    stored = (_schema(file).metadata or {}).get(b"huggingface")
    beside = file.parent / "dataset_info.json"
    if stored is not None:
        try:
            features = json.loads(stored)["info"]["features"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: damaged 'huggingface' entry in its schema") from error
    elif beside.is_file():
        described = read_json(beside)
        features = described.get("features") if isinstance(described, dict) else None
    else:
        return None
    return _names_in(features.get(column)) if isinstance(features, dict) else None


def _names_in(feature: Any) -> tuple[str, ...] | None:
    """Of {"_type": "ClassLabel", "names": [...]}, also inside a list or a {"feature": ...}."""
    if isinstance(feature, list) and feature:
        return _names_in(feature[0])
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
        return tuple(map(str, feature["names"]))
    return _names_in(feature.get("feature"))


def _named(value: Any, names: tuple[str, ...], where: str) -> Any:
    if isinstance(value, list):
        return [_named(one, names, where) for one in value]
    if value is None or value == NO_LABEL:
        return None
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise ValueError(f"{where}: label {value!r}, but its classes are 0 to {len(names) - 1}")
    return names[value]


def _schema(file: Path) -> pyarrow.Schema:
    from pyarrow import parquet

    with _readable(file):
        return parquet.read_schema(file) if _is_parquet(file) else _arrow(file).schema


def _read_table(file: Path, names: list[str]) -> pyarrow.Table:
    from pyarrow import parquet

    with _readable(file):
        if _is_parquet(file):
            with parquet.ParquetFile(file) as opened:
                return opened.read(columns=names)
        return _arrow(file).read_all().select(names)


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def _arrow(file: Path) -> Any:
    """A reader of either Arrow format: a stream (what `save_to_disk` writes) or a file."""
    import pyarrow

    source = pyarrow.memory_map(str(file))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a readable {file.suffix[1:]} file ({error})") from error


COLUMNAR_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt", *COLUMNAR_SUFFIXES)  # .txt is read as .tsv (MRPC)
MAX_LISTED = 200  # characters of column names in a message
SEPARATORS = {";": "';'", "\t": "tabs", ",": "commas", "|": "'|'"}  # and how people call them


def _unpack_zstandard(data: bytes) -> bytes:
    import pyarrow

    return pyarrow.input_stream(pyarrow.py_buffer(data), compression="zstd").read()


# text files may end in these too
DECOMPRESS = {".gz": gzip.decompress, ".xz": lzma.decompress, ".zst": _unpack_zstandard}


def read_columns(
    path: Path,
    wanted: Mapping[str, str],
    header: Sequence[str] = (),
    leave_out_broken: bool = False,
) -> tuple[dict[str, list[Any]], list[int]]:
    """Read the `wanted` columns (name -> who asks for it, e.g. "--label") of one file.

    Returns ({name: N values}, N lines); a line is the 1-based line on which a row starts (in
    parquet and arrow, the number of the row). In .csv files a cell may be quoted and hold line
    breaks; in .tsv and .txt files quotes are ordinary characters, as in GLUE. Blank lines are
    skipped. `header` names the columns of a file whose first row holds none of the wanted names
    (CoLA). `leave_out_broken` passes over rows of a csv or tsv that do not fit the header or have
    nothing in a wanted cell, with a warning, instead of refusing them (QQP). A `*` in the name of
    a parquet or arrow file stands for its parts, read one after the other; numbers of a Hugging
    Face ClassLabel become its names.

    Errors: ValueError, one line, for a missing or empty file, an unknown suffix, text that is
    not UTF-8, a missing or doubled column, and a row that does not fit the header.
    """
    files = parts(path)
    if not files:
        raise ValueError(f"{path}: no such file")
    kind = format_of(path)
    if kind in COLUMNAR_SUFFIXES:
        for file in files:
            _find(file, column_names_of(file), wanted)
        columns, count = read_tables(files, list(wanted))
        lines = list(range(1, count + 1))
    else:
        rows = (
            _json_rows(path, wanted)
            if kind == ".jsonl"
            else _csv_rows(path, wanted, header, leave_out_broken)
        )
        lines, values = [], []
        for line, row in rows:
            lines.append(line)
            values.append(row)
        columns = {name: [row[k] for row in values] for k, name in enumerate(wanted)}
    if not lines:
        raise ValueError(f"{path}: no examples in this file")
    return columns, lines


def suffix_of(path: Path) -> str | None:
    """The one of SUFFIXES that says how a file is read, that before .gz, .xz or .zst where text is
    packed; None: none of them, as of files in CoNLL columns. Capital letters are as small ones.

    >>> suffix_of(Path("train.tsv.xz")), suffix_of(Path("DEV.CSV")), suffix_of(Path("a.conll.gz"))
    ('.tsv', '.csv', None)
    """
    return ".arrow" if path.suffix.lower() == ".arrow" else file_kind(path)


def format_of(path: Path) -> str:
    """`suffix_of` a file of rows. Errors: ValueError when it has none."""
    suffix = suffix_of(path)
    if suffix is None:
        known = ", ".join(SUFFIXES)
        raise ValueError(f"{path}: cannot read '{path.suffix}': use one of {known}")
    return suffix


def parts(path: Path) -> list[Path]:
    """The files that a path means: itself, or all that a `*` in its name stands for, in order."""
    if path.is_file() or "*" not in path.name:
        return [path] if path.is_file() else []
    return sorted(file for file in path.parent.glob(path.name) if file.is_file())


def digest(path: Path) -> str:
    """SHA-256 of the bytes of a file, or of all `parts` of a path, one after the other."""
    whole = hashlib.sha256()
    for part in parts(path):
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                whole.update(block)
    return whole.hexdigest()


def column_names(path: Path) -> list[str]:
    """The columns of a file; of a .jsonl those of its first row. Errors: as `read_columns`."""
    kind = format_of(path)
    if kind in COLUMNAR_SUFFIXES:
        return column_names_of(parts(path)[0])
    if kind == ".jsonl":
        return next((list(row) for _, row in _json_objects(path)), [])
    return next((row for _, row in _raw_rows(path)), [])


def read_text(path: Path) -> str:
    """The text of a file, unpacked where it is compressed.

    Errors: ValueError for a damaged packed file; those of `decode_text`.
    """
    data, packed = path.read_bytes(), path.suffix.lower()
    if packed in DECOMPRESS:
        try:
            data = DECOMPRESS[packed](data)
        except (lzma.LZMAError, zlib.error, OSError, EOFError) as error:
            raise ValueError(f"{path}: damaged '{packed}' file ({error})") from error
    return decode_text(data, str(path))


def decode_text(data: bytes, source: str) -> str:
    """The text that bytes are, without a byte order mark.

    Errors: ValueError, with the source's name and the line, for what is not UTF-8 or holds a NUL
    byte.
    """
    data = data.removeprefix(codecs.BOM_UTF8)  # the MRPC files begin with it
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source}:{line}: not UTF-8 text: convert it to UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{source}:{line}: a NUL byte: this is not text")
    return text


def _near_name(name: str, header: Sequence[str]) -> str:
    hint = nearest(name, header)
    return hint if hint.startswith("did you mean") else "name one of its own"


def _near_header(name: str, header: Sequence[str]) -> str:
    """What may be wrong with the first line of a csv or tsv that has no wanted name."""
    if len(header) == 1:
        for separator, called in SEPARATORS.items():
            if name in header[0].split(separator):
                return f"its header is one cell: {_separator_hint(called)}"
    near = _near_name(name, header)
    return near if near.endswith("?") else f"{near}, or is the header line missing?"


def _find(
    where: Path | str,
    header: Sequence[str],
    wanted: Mapping[str, str],
    remedy: Callable[[str, Sequence[str]], str] = _near_name,
) -> list[int]:
    for name, asker in wanted.items():
        if header.count(name) > 1:
            raise ValueError(f"{where}: column '{name}' ({asker}) is there twice: rename one")
        if name not in header:
            found = shorten(", ".join(header), MAX_LISTED, placeholder=" ...")
            near = remedy(name, header)
            raise ValueError(f"{where}: no column '{name}' for {asker}: {near} (columns: {found})")
    return [header.index(name) for name in wanted]


def _csv_rows(
    path: Path, wanted: Mapping[str, str], header: Sequence[str], leave_out_broken: bool
) -> Iterator[tuple[int, list[str]]]:
    names: Sequence[str] = ()
    places: list[int] = []
    left_out = []
    for line, row in _raw_rows(path):
        if not names:
            is_named = not header or not set(wanted).isdisjoint(row)
            names = row if is_named else header
            is_foreign = set(wanted).isdisjoint(names)
            places = _find(path, names, wanted, _near_header if is_foreign else _near_name)
            if is_named:
                continue
        fits = len(row) == len(names)
        if leave_out_broken and not (fits and all(row[place].strip() for place in places)):
            left_out.append(line)
            continue
        if not fits:
            raise ValueError(
                f"{path}:{line}: {len(row)} cells, but the header has {len(names)}: {_HINT}"
            )
        yield line, [row[place] for place in places]
    if left_out:
        print(
            f"warning: {path}: {len(left_out):,} broken rows are left out, the first in line"
            f" {left_out[0]}",
            file=sys.stderr,
        )


def _raw_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not blank with the line it starts on, the header among them."""
    quoted, text = format_of(path) == ".csv", read_text(path)
    # By itself the csv module refuses a cell over 131,072 characters, which a document may have.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter="," if quoted else "\t",
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=True,
    )
    line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            hint = _quoted_hint(text) if line == 1 and quoted else _HINT
            raise ValueError(f"{path}:{line}: broken row ({error}): {hint}") from error
        if row is None:
            return
        if row:
            yield line, row
        line = reader.line_num + 1


def _quoted_hint(text: str) -> str:
    """What to do about the first line of a .csv that is broken: quoted cells may be parted by
    something else than commas.

    >>> _quoted_hint('"text";"label"')
    "are ';' its separators? a .csv has commas, a .tsv or .txt tabs"
    """
    first = text.split("\n", 1)[0]
    for separator, called in SEPARATORS.items():
        if separator != "," and f'"{separator}' in first:
            return _separator_hint(called)
    return _HINT


def _separator_hint(called: str) -> str:
    return f"are {called} its separators? a .csv has commas, a .tsv or .txt tabs"


_HINT = (
    "put texts that hold the separator or line breaks in double quotes in a .csv"
    " (a .tsv is read without quoting), or use .jsonl"
)


def _json_rows(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[int, list[Any]]]:
    for line, row in _json_objects(path):
        _find(f"{path}:{line}", list(row), wanted)
        yield line, [row[name] for name in wanted]


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text, object_pairs_hook=_mapping)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{line}: not valid JSON ({error.msg})") from error
        except _Doubled as doubled:
            raise ValueError(f"{path}:{line}: '{doubled}' is there twice: keep one") from doubled
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{line}: expected a JSON object, one a line")
        yield line, row


class _Doubled(Exception):
    """A name that a JSON object has twice."""


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; by itself the json module would keep the last of two values."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Doubled(next(name for name in names if names.count(name) > 1))
    return mapping
