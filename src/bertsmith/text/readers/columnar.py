"""Parquet and Arrow files, as the Hugging Face `datasets` library writes them, by pyarrow alone.

A ClassLabel column holds numbers; their names are in the file's schema (key "huggingface") or in
the dataset_info.json beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.base.files import read_json
from bertsmith.text.readers.files import RemoteFile, storage_errors

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 256  # of a stream
NO_LABEL = -1  # how `datasets` marks a test example without label


def stream_parquet(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, value) of a column's rows, in bounded memory.

    Errors: ValueError for a damaged file, a missing or doubled column, and text that is not UTF-8.
    """
    remote = isinstance(path, RemoteFile)
    with _damage_named(path), storage_errors(str(path)) if remote else nullcontext():
        yield from _parquet_column(path, column)


@contextmanager
def _damage_named(path: Path | RemoteFile) -> Iterator[None]:
    """Turn what pyarrow says of a damaged file into a ValueError that names it."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow reports a damaged page as an OSError without a number; memory may run out.
        is_page = type(error) is OSError and error.errno is None and isinstance(path, Path)
        is_arrows = isinstance(error, pyarrow.ArrowException) and not isinstance(error, MemoryError)
        if not (is_page or is_arrows):
            raise
        fault = f"damaged {path.suffix[1:]} file, or of a kind unknown to pyarrow"
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: {fault} ({reason}): copy it again, or write it anew") from error


def _parquet_column(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet

    source, number = path.open() if isinstance(path, RemoteFile) else path, 0
    with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise no_text_column(str(path), column, names)
        if names.count(column) > 1:
            raise ValueError(f"{path}: column '{column}' is there twice: rename one")
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
            for cell in batch.column(0):
                number += 1
                try:
                    yield number, cell.as_py()
                except UnicodeDecodeError as error:
                    where = f"{path}: row {number}: not UTF-8"
                    raise ValueError(f"{where} ({error}): write the file anew") from error
                except (ValueError, OverflowError):  # a time that Python cannot hold
                    yield number, cell


def no_text_column(where: str, column: str, found: Iterable[str]) -> ValueError:
    """The error for a missing column of a corpus."""
    fault = f"no column '{column}' (found: {', '.join(map(str, found)) or 'none'})"
    hint = f"name the one with the text with `text_column`, or rename it '{column}'"
    return ValueError(f"{where}: {fault}: {hint}")


def columnar_values(files: Sequence[Path], names: list[str]) -> tuple[dict[str, list[Any]], int]:
    """Read columns of a table's parts, one after the other; the columns and the number of rows.

    Errors: as `columnar_batches`.
    """
    columns: dict[str, list[Any]] = {name: [] for name in names}
    count = 0
    for file in files:
        for number, batch in columnar_batches(file, names):
            for name, values in batch.items():
                columns[name] += values
            count += number
    return columns, count


def columnar_batches(file: Path, names: list[str]) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield (number of rows, their columns) of some rows of a file after the other.

    Numbers of a ClassLabel, alone or in a list, become their names, -1 becomes None; timestamps of
    which one has nanoseconds, which Python's lack, become text. Errors: ValueError that names a
    file that cannot be read, a column that Python cannot hold or a number without a name.
    """
    classes = {name: class_names(file, name) for name in names}
    with _opened(file) as opened:
        for batch in _record_batches(opened, names):
            columns = {}
            for name in names:
                named, where = classes[name], f"{file}: column '{name}'"
                values = _values(batch.column(name), where)
                if named is not None:
                    values = [_named(value, named, where) for value in values]
                columns[name] = values
            yield batch.num_rows, columns


def _values(column: pyarrow.Array, where: str) -> list[Any]:
    import pyarrow

    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error}): write the file anew") from error
    except (ValueError, OverflowError) as error:
        if isinstance(error, ValueError) and not pyarrow.types.is_nested(column.type):
            return column.cast(pyarrow.string()).to_pylist()
        reason = str(error).partition(". ")[0]
        fault = f"{column.type} that Python cannot hold ({reason})"
        raise ValueError(f"{where}: {fault}: write the column as text") from error


def _record_batches(opened: Any, names: list[str]) -> Iterator[pyarrow.RecordBatch]:
    """The rows of what `_opened` gives, ROWS_AT_ONCE at most."""
    if hasattr(opened, "iter_batches"):  # parquet
        yield from opened.iter_batches(ROWS_AT_ONCE, columns=names)
        return
    count = getattr(opened, "num_record_batches", None)  # a stream of Arrow's does not know it
    for batch in opened if count is None else map(opened.get_batch, range(count)):
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield batch.slice(start, ROWS_AT_ONCE)


def columnar_rows(file: Path) -> int | None:
    """The number of rows of one file; None where its format does not tell."""
    with _opened(file) as opened:
        return opened.metadata.num_rows if _is_parquet(file) else None


def columnar_names(file: Path) -> list[str]:
    """The columns of one file. Errors: ValueError when it cannot be read."""
    return list(_schema(file).names)


def columnar_types(file: Path) -> dict[str, pyarrow.DataType]:
    """The types of one file's columns as `columnar_batches` gives them: classes are strings."""
    import pyarrow

    types = {}
    for field in _schema(file):
        types[field.name] = field.type
        if class_names(file, field.name):
            is_list = pyarrow.types.is_nested(field.type)
            types[field.name] = pyarrow.list_(pyarrow.string()) if is_list else pyarrow.string()
    return types


def class_names(file: Path, column: str) -> tuple[str, ...] | None:
    """Names of a ClassLabel column, or of a column of lists of them; None for any other.

    Errors: ValueError for a damaged description in the file.
    """
    features, beside = None, file.parent / "dataset_info.json"
    if (stored := (_schema(file).metadata or {}).get(b"huggingface")) is not None:
        try:
            features = json.loads(stored)["info"]["features"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: damaged 'huggingface' entry in its schema") from error
    elif beside.is_file():
        described = read_json(beside)
        features = described.get("features") if isinstance(described, dict) else None
    return _names_in(features.get(column)) if isinstance(features, dict) else None


def _names_in(feature: Any) -> tuple[str, ...] | None:
    """Names in {"_type": "ClassLabel", "names": [...]}, a list of it or a {"feature": ...}."""
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
    with _opened(file) as opened:
        return opened.schema_arrow if _is_parquet(file) else opened.schema


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A ParquetFile, or a reader of Arrow's stream (of `save_to_disk`) or file format."""
    import pyarrow
    from pyarrow import parquet

    with _damage_named(file):
        if _is_parquet(file):
            with parquet.ParquetFile(file) as opened:
                yield opened
            return
        source = pyarrow.memory_map(str(file))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        yield pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
