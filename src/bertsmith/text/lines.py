"""Lines of UTF-8 text files, local or behind URLs, packed or not, in bounded memory."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bertsmith.text.remote import RemoteFile, storage_errors

COMPRESSIONS = (".gz", ".xz", ".zst")
OPENERS = {".gz": gzip.open, ".xz": lzma.open}

MAX_LINE = 1_000_000  # characters of a paragraph
MAX_ROW = 16_000_000  # characters of a row of a jsonl, csv or tsv file


def read_lines(path: Path | RemoteFile, limit: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without white space at its ends) of a UTF-8 text file.

    A byte order mark and CRLF are taken off. At most `limit` characters are ever held.

    Errors: ValueError that names file and line for what is no text or damaged, and for a line of
    more characters; OSError for trouble of the disk or the storage.
    """
    for number, line in raw_lines(path, limit):
        yield number, line.strip()


def raw_lines(path: Path | RemoteFile, limit: int) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without its line end). Errors: as `read_lines`."""
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
                raise _binary(path, number) if b"\0" in line else too_long(path, number, limit)
            more = stream.readline(limit + 1)
            if not more:
                break
            line += more
        return line
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, number, error) from error
    except OSError as error:
        # Arrow says so of damaged contents with an OSError that is of no other class. The rest are
        # of the disk or the storage (a TimeoutError, say): the file may well be whole.
        is_arrows = type(error) is OSError and path.suffix.lower() == ".zst"
        if isinstance(error, gzip.BadGzipFile) or (is_arrows and error.errno is None):
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


def too_long(path: Path | RemoteFile, number: int, limit: int) -> ValueError:
    """The error for a line of more than `limit` characters."""
    remedy = "put line breaks between paragraphs" if limit == MAX_LINE else "divide the row"
    return ValueError(f"{path}:{number}: line of more than {limit:,} characters: {remedy}")
