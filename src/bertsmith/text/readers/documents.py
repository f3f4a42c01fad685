"""A sample of a corpus that costs little: the beginning of every file, in equal shares.

Documents out of files, in bounded memory: txt, jsonl, csv, tsv, parquet, and folders of them.

A file or folder is local or behind a URL (s3://bucket/books), which is read as a stream.

In a text file a line is a paragraph (or a sentence, in the format of google-research/bert's
`sample_text.txt`) and a blank line ends a document. In the other formats a row is a document and
the lines of its text are its paragraphs. All but parquet may be compressed (.gz, .xz, .zst).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from bertsmith.text.readers.files import (
    COMPRESSIONS,
    MAX_LINE,
    MAX_ROW,
    RemoteFile,
    is_url,
    raw_lines,
    read_lines,
    remote_files,
    storage_errors,
    too_long,
)
from bertsmith.text.tokenizer.files import is_vocabulary

LINE_KINDS = (".txt", ".jsonl", ".csv", ".tsv")
KNOWN = f"{', '.join(LINE_KINDS)} (each also with {', '.join(COMPRESSIONS)}) and .parquet"

MAX_DOCUMENT, MAX_LINES = 4_000_000, 1 << 17  # characters and lines handed out at once
PARQUET_ROWS = 256  # rows held at once


class Document(NamedTuple):
    """A run of text that belongs together."""

    source: str  # file
    line: int  # first line (of a parquet file: row), counted from 1
    lines: list[str]  # paragraphs or sentences; none is empty


def read_documents(
    inputs: Sequence[Path | str | RemoteFile], *, text_column: str = "text"
) -> Iterator[Document]:
    """Yield the documents of files and folders in order, one at a time.

    A document of more than 4 million characters or 131,072 lines comes as several, so that a book
    without a blank line needs no more memory than another. `text_column` is the field or column
    that holds the text of a jsonl, csv, tsv or parquet row.

    Errors: ValueError that names file, line and remedy for an unknown type, text that is not
    UTF-8, a binary or damaged file, a paragraph of more than a million characters, a row without
    the text column. No document at all is for the caller to judge: see `no_text`.
    """
    for path in input_files(inputs):
        source = str(path)
        if file_kind(path) == ".txt":
            yield from _documents(source, read_lines(path))
            continue
        for number, text in _read_rows(path, text_column):
            yield from _documents(source, _paragraphs(path, number, text))


def no_text(inputs: Sequence[Path | str]) -> ValueError:
    """The error for inputs that hold no document."""
    names = ", ".join(str(path) for path in inputs)
    return ValueError(f"{names}: no text in it: give files with lines that are not blank")


def input_fingerprint(inputs: Sequence[Path | str]) -> list[dict[str, Any]]:
    """What a restarted job compares: each file's path, size in bytes and time of change in ns.

    Instead of the time stands what the storage tells of a file behind a URL, its ETag or the like.
    """
    files = []
    for path in input_files(inputs):
        remote = isinstance(path, RemoteFile)
        changed = path.fingerprint() if remote else path.stat().st_mtime_ns
        files.append({"path": str(path), "bytes": input_size(path), "changed": changed})
    return files


def input_size(path: Path | RemoteFile) -> int:
    """Bytes of a file, as it is stored."""
    return path.size() if isinstance(path, RemoteFile) else path.stat().st_size


def input_files(inputs: Sequence[Path | str | RemoteFile]) -> list[Path | RemoteFile]:
    """The files behind the inputs; a folder stands for its files of known types, sorted by path.

    Hidden files, unknown types and the vocabulary of a tokenizer in a folder are passed over.

    Errors: ValueError for an absent input, a named file of unknown type, a folder without text.
    """
    files: list[Path | RemoteFile] = []
    for name in inputs:
        if isinstance(name, RemoteFile):
            files.append(name)
            continue
        found, is_folder = remote_files(str(name)) if is_url(name) else _local_files(Path(name))
        known = [file for file in found if file_kind(file)]
        if is_folder:
            names = set(map(str, found))
            known = [file for file in known if not is_vocabulary(str(file), names)]
        if is_folder and not known:
            raise ValueError(f"{name}: no text files in this folder: known are {KNOWN}")
        if not is_folder and not known:
            raise ValueError(f"{name}: unknown file type '{found[0].suffix}': known are {KNOWN}")
        files.extend(known)
    return files


def _local_files(path: Path) -> tuple[Sequence[Path], bool]:
    """The files of a path, sorted, hidden ones left out, and whether it is a folder."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path], False
    return sorted(_files_below(path), key=lambda file: file.relative_to(path).parts), True


def _files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and those within it, hidden ones left out.

    Links to folders are followed when the folders themselves are done, each once: what lies in the
    tree has its own name, and a link to where it lies ends.
    Errors: OSError for a folder that cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    places = [folder]
    for place in places:  # which grows by the links
        for here, folders, files in os.walk(place, onerror=_raise):
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            # a disk's own folder, which only its administrator can read, has the last name
            folders[:] = sorted(n for n in folders if n[0] != "." and n != "lost+found")
            places += [link for name in folders if (link := Path(here, name)).is_symlink()]
            visible = (Path(here, name) for name in files if not name.startswith("."))
            yield from (file for file in visible if file.is_file())


def _raise(error: OSError) -> None:
    raise error


def file_kind(path: Path | RemoteFile) -> str | None:
    """The type of a file by its name, compression apart; None when unknown.

    >>> file_kind(Path("a/news.jsonl.gz")), file_kind(Path("b.parquet")), file_kind(Path("c.pdf"))
    ('.jsonl', '.parquet', None)
    """
    if path.name.lower().endswith(".parquet"):
        return ".parquet"
    return next((kind for kind in LINE_KINDS if unpacked_name(path).endswith(kind)), None)


def unpacked_name(path: Path | RemoteFile) -> str:
    """The name of a file without that of its compression, in small letters.

    >>> unpacked_name(Path("squad/Dev.JSON.zst"))
    'dev.json'
    """
    name = path.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name


def _documents(source: str, numbered: Iterable[tuple[int, str]]) -> Iterator[Document]:
    """Gather lines to documents; an empty line, or the limit of size, ends one."""
    first, lines, size = 1, [], 0
    for number, line in numbered:
        if lines and (not line or size + len(line) > MAX_DOCUMENT or len(lines) == MAX_LINES):
            yield Document(source, first, lines)
            lines, size = [], 0
        if line:
            first = first if lines else number
            lines.append(line)
            size += len(line)
    if lines:
        yield Document(source, first, lines)


def _paragraphs(path: Path | RemoteFile, number: int, text: str) -> Iterator[tuple[int, str]]:
    """The lines of a row's text that are not blank, each with the row's number."""
    for line in text.splitlines():
        if len(line) > MAX_LINE:
            raise too_long(path, number, MAX_LINE)
        if line := line.strip():
            yield number, line


# --- rows: (number, text); a row whose text is null is passed over ---


def _read_rows(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, str]]:
    kind = file_kind(path)
    if kind == ".jsonl":
        return _read_jsonl(path, column)
    if kind == ".parquet":
        return _read_parquet(path, column)
    return _read_table(path, column, "\t" if kind == ".tsv" else ",")


def _read_jsonl(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, str]]:
    for number, line in read_lines(path, MAX_ROW):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error.msg})") from error
        except RecursionError:
            raise ValueError(f"{path}:{number}: JSON nested too deeply") from None
        if not isinstance(row, dict):
            raise ValueError(f'{path}:{number}: expected an object such as {{"{column}": "..."}}')
        if column not in row:
            raise _no_column(f"{path}:{number}", column, row)
        text = row[column]
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number}: '{column}' is {text!r:.40}: expected a string")
        if "\\ud" in line.lower():  # half a surrogate pair could not be written again
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield number, text


def _read_table(path: Path | RemoteFile, column: str, separator: str) -> Iterator[tuple[int, str]]:
    index = None
    for number, row in _tab_rows(path) if separator == "\t" else _csv_rows(path):
        if index is None:
            if column not in row:
                raise _no_column(f"{path}:1", column, row)
            index = row.index(column)
        elif len(row) > index:
            yield number, row[index]
        elif row:
            raise ValueError(f"{path}:{number}: {len(row)} cells, '{column}' is number {index + 1}")


def _tab_rows(path: Path | RemoteFile) -> Iterator[tuple[int, list[str]]]:
    """A line is a row, and quotes are plain characters, as in GLUE."""
    for number, line in raw_lines(path, MAX_ROW):
        yield number, line.split("\t") if line else []


def _csv_rows(path: Path | RemoteFile) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of their first line; quotes as in RFC 4180."""
    csv.field_size_limit(MAX_ROW)  # a setting of the whole process; its default is 131,072
    rows = csv.reader((line + "\n" for _, line in raw_lines(path, MAX_ROW)), strict=True)
    started = 1
    try:
        for row in rows:
            yield started, row
            started = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}:{started}: not valid csv ({error}): is a quote left open?"
        ) from error


def _read_parquet(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, str]]:
    import pyarrow

    remote = isinstance(path, RemoteFile)
    try:
        with storage_errors(str(path)) if remote else nullcontext():
            for number, text in enumerate(_parquet_cells(path, column), 1):
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise ValueError(
                        f"{path}: row {number}: '{column}' is {text!r:.40}: expected a string"
                    )
                yield number, text
    except (pyarrow.ArrowException, OSError) as error:
        # Of a damaged page Arrow says so with an OSError that has no number; memory may run out.
        is_page = type(error) is OSError and error.errno is None and not remote
        is_arrows = isinstance(error, pyarrow.ArrowException) and not isinstance(error, MemoryError)
        if not (is_page or is_arrows):
            raise
        what = str(error).partition("\n")[0]
        raise ValueError(
            f"{path}: damaged parquet file, or of a kind unknown to pyarrow ({what}): "
            "copy it again, or write it anew"
        ) from error


def _parquet_cells(path: Path | RemoteFile, column: str) -> Iterator[Any]:
    import pyarrow.parquet

    source = path.open() if isinstance(path, RemoteFile) else path
    with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as file:
        if column not in file.schema_arrow.names:
            raise _no_column(str(path), column, file.schema_arrow.names)
        first = 1
        for batch in file.iter_batches(PARQUET_ROWS, columns=[column]):
            cells = batch.column(0)
            try:
                yield from cells.to_pylist()
            except UnicodeDecodeError:  # one by one, to name the row
                for number, cell in enumerate(cells, first):
                    _check_unicode(path, number, cell)
            first += len(batch)


def _check_unicode(path: Path | RemoteFile, number: int, cell: Any) -> None:
    try:
        cell.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: row {number}: not UTF-8 ({error}): write the file anew with text that is"
        ) from error


def _no_column(where: str, column: str, found: Iterable[str]) -> ValueError:
    names = ", ".join(map(str, found)) or "none"
    return ValueError(
        f"{where}: no column '{column}' (found: {names}): name the one with the text "
        "with --text-column"
    )


SAMPLE = 1_000_000  # characters
MAX_FILES = 1_000  # opened for it; of more, so many at equal distances


def sample_lines(
    inputs: Sequence[Path | str], *, text_column: str = "text", characters: int = SAMPLE
) -> list[str]:
    """Lines from the beginning of each file, together at most `characters`; the last is cut.

    A file shorter than its share is taken whole, and what it leaves over is not made up for. What
    only stands late in a file is not seen: a compressed file cannot be entered in its middle.

    Errors: those of `read_documents`.
    """
    files = input_files(inputs)
    files = files[:: -(-len(files) // MAX_FILES)]
    lines = []
    for path in files:
        left = characters // len(files)
        for document in read_documents([path], text_column=text_column):
            for line in document.lines:
                lines.append(line[:left])
                left -= len(lines[-1])
                if left == 0:
                    break
            if left == 0:
                break
    return lines
