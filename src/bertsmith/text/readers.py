"""Documents out of files, in bounded memory: txt, jsonl, csv, tsv, parquet, and folders of them.

A file or folder is local or behind a URL (s3://bucket/books), which is read as a stream.

In a text file a line is a paragraph (or a sentence, in the format of google-research/bert's
`sample_text.txt`) and a blank line ends a document. In the other formats a row is a document and
the lines of its text are its paragraphs. All but parquet may be compressed (.gz, .xz, .zst).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from bertsmith.text.remote import RemoteFile, is_url, remote_files, storage_errors
from bertsmith.text.tokenizer_files import is_vocabulary

LINE_KINDS = (".txt", ".jsonl", ".csv", ".tsv")
COMPRESSIONS = (".gz", ".xz", ".zst")
OPENERS = {".gz": gzip.open, ".xz": lzma.open}
KNOWN = f"{', '.join(LINE_KINDS)} (each also with {', '.join(COMPRESSIONS)}) and .parquet"

MAX_LINE = 1_000_000  # characters of a paragraph
MAX_ROW = 16_000_000  # characters of a row of a jsonl, csv or tsv file
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
    found = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    return sorted(found, key=lambda file: file.relative_to(path).parts), True


def file_kind(path: Path | RemoteFile) -> str | None:
    """The type of a file by its name, compression apart; None when unknown.

    >>> file_kind(Path("a/news.jsonl.gz")), file_kind(Path("b.parquet")), file_kind(Path("c.pdf"))
    ('.jsonl', '.parquet', None)
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        return ".parquet"
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return next((kind for kind in LINE_KINDS if name.endswith(kind)), None)


def read_lines(path: Path | RemoteFile, limit: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without white space at its ends) of a UTF-8 text file.

    A byte order mark and CRLF are taken off. At most `limit` characters are ever held.

    Errors: ValueError that names file and line, see `read_documents`.
    """
    for number, line in _raw_lines(path, limit):
        yield number, line.strip()


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
            raise _too_long(path, number, MAX_LINE)
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
    """Rows of csv (quotes as in RFC 4180) or tsv (quotes are plain characters, as in GLUE)."""
    csv.field_size_limit(MAX_ROW)  # a setting of the whole process; its default is 131,072
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    lines = (line + "\n" for _, line in _raw_lines(path, MAX_ROW))
    rows = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
    index, started = None, 1
    try:
        for row in rows:
            if index is None:
                if column not in row:
                    raise _no_column(f"{path}:1", column, row)
                index = row.index(column)
            elif len(row) > index:
                yield started, row[index]
            elif row:
                raise ValueError(
                    f"{path}:{started}: {len(row)} cells, '{column}' is number {index + 1}"
                )
            started = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}:{started}: not valid csv ({error}): is a quote left open?"
        ) from error


def _read_parquet(path: Path | RemoteFile, column: str) -> Iterator[tuple[int, str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = path.open() if isinstance(path, RemoteFile) else path
        with pyarrow.parquet.ParquetFile(source, pre_buffer=False) as file:
            if column not in file.schema_arrow.names:
                raise _no_column(str(path), column, file.schema_arrow.names)
            first = 1
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column]):
                for number, text in enumerate(batch.column(0).to_pylist(), first):
                    if text is None:
                        continue
                    if not isinstance(text, str):
                        raise ValueError(
                            f"{path}: row {number}: '{column}' is {text!r:.40}: expected a string"
                        )
                    yield number, text
                first += len(batch)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: damaged parquet file ({str(error).splitlines()[0]})") from error


def _no_column(where: str, column: str, found: Iterable[str]) -> ValueError:
    names = ", ".join(map(str, found)) or "none"
    return ValueError(
        f"{where}: no column '{column}' (found: {names}): name the one with the text "
        "with --text-column"
    )


# --- lines ---


def _raw_lines(path: Path | RemoteFile, limit: int) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without its line end."""
    number, offset = 0, 0
    remote = isinstance(path, RemoteFile)
    with storage_errors(str(path)) if remote else nullcontext(), _open(path) as stream:
        while raw := _read_line(stream, path, number + 1, limit):
            number += 1
            if b"\0" in raw:
                raise _binary(path, number)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                if b"\0" in raw + stream.peek(4096):
                    raise _binary(path, number) from error
                raise ValueError(
                    f"{path}:{number}: not UTF-8 (byte 0x{raw[error.start]:02x} at offset "
                    f"{offset + error.start}): convert it with iconv -f LATIN1 -t UTF-8"
                ) from error
            offset += len(raw)
            yield number, (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r\n")


def _read_line(
    stream: io.BufferedReader, path: Path | RemoteFile, number: int, limit: int
) -> bytes:
    """The next line with its line end, b"" at the end of the file; never much over the limit."""
    try:
        line = stream.readline(limit + 1)
        while len(line) > limit and not line.endswith(b"\n"):
            # A character takes up to four bytes: count characters before refusing.
            if len(line.decode("utf-8", "ignore")) > limit:
                raise _binary(path, number) if b"\0" in line else _too_long(path, number, limit)
            more = stream.readline(limit + 1)
            if not more:
                break
            line += more
        return line
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, number, error) from error
    except OSError as error:
        if error.errno is None:  # not the machine's: gzip and pyarrow say so of damaged contents
            raise _damaged(path, number, error) from error
        raise


def _open(path: Path | RemoteFile) -> io.BufferedReader:
    compression = path.suffix.lower()
    file: Any = path.open() if isinstance(path, RemoteFile) else str(path)
    if compression == ".zst":
        import pyarrow

        # The zstandard package ends a truncated file in silence; Arrow reports it.
        file = pyarrow.input_stream(file, compression="zstd")
    elif compression in OPENERS:
        file = OPENERS[compression](file, "rb")
    elif isinstance(path, Path):
        file = path.open("rb")
    return io.BufferedReader(file, 1 << 18)  # type: ignore[arg-type]


def _damaged(path: Path | RemoteFile, number: int, error: Exception) -> ValueError:
    return ValueError(f"{path}:{number}: damaged {path.suffix} file ({error}): copy it again")


def _binary(path: Path | RemoteFile, number: int) -> ValueError:
    return ValueError(
        f"{path}:{number}: NUL byte, looks like a binary file: leave it out "
        "(UTF-16 text: convert it with iconv -f UTF-16 -t UTF-8)"
    )


def _too_long(path: Path | RemoteFile, number: int, limit: int) -> ValueError:
    remedy = "put line breaks between paragraphs" if limit == MAX_LINE else "divide the row"
    return ValueError(f"{path}:{number}: line of more than {limit:,} characters: {remedy}")
