"""Parquet and Arrow files, as the Hugging Face `datasets` library writes them, by pyarrow alone.

A ClassLabel column holds numbers; their names are in the schema of the file (key "huggingface") or
in the dataset_info.json beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.files import read_json

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
