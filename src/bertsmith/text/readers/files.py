"""Text files, local or behind URLs, packed or not: their kind by name, their lines, their text.

`read_lines` and `raw_lines` stream a file of any size in bounded memory; `read_text` holds it. A
URL is of any storage that fsspec knows (s3://, gs://, az://, hf://, https://, ...); a name without
"://" is a local path.
"""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
UNPACKING = (EOFError, zlib.error, lzma.LZMAError, OSError)  # errors of it
LINE_KINDS = (".txt", ".jsonl", ".csv", ".tsv")
DUMP = re.compile(r"\.xml(-p\d+p\d+)?$")  # of Wikipedia; a part is named by its pages
STANDARD_INPUT = Path("standard input")  # this object itself, not a file of the name

MAX_LINE = 1_000_000  # characters of a paragraph
MAX_ROW = 16_000_000  # characters of a row of a jsonl, csv or tsv file

MARKS = ("etag", "last-modified", "mtime")  # of a version, in what a storage tells of a file

# Errors of the libraries behind fsspec that are no OSError: module -> names of the classes.
LIBRARY_ERRORS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "httpx": ("HTTPError",),  # of huggingface_hub, under one name or the other
    "httpx2": ("HTTPError",),
    "azure.core.exceptions": ("AzureError",),
}


def is_url(source: object) -> bool:
    """True for a URL, False for a path.

    >>> is_url("s3://bucket/store"), is_url("disk/store"), is_url(PurePosixPath("store"))
    (True, False, False)
    """
    return isinstance(source, str) and "://" in source


def without_password(text: str) -> str:
    """
    >>> without_password("postgresql://me:secret@host/studies")
    'postgresql://me:***@host/studies'
    >>> without_password("http://host:9000/books@2026/a.txt")  # a port
    'http://host:9000/books@2026/a.txt'
    """
    return re.sub(r"(://[^:/@\s]*):(?!\d+/)[^@\s]*@", r"\1:***@", text)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Errors: ValueError for a kind of URL that is unknown or whose package is missing; OSError.
    """
    try:
        from fsspec.core import url_to_fs

        with storage_errors(url):
            return url_to_fs(url)
    except ImportError as error:
        # fsspec says which package it wants; the extra brings fsspec and that of s3.
        in_extra = str(error.name).startswith("fsspec") or url.startswith(("s3://", "s3a://"))
        hint = ": pip install 'bertsmith[storage]'" * in_extra
        raise ValueError(f"{url}: {error}{hint}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Turn any trouble of a storage into an OSError of one line that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file", name) from error
    except PermissionError as error:
        what = "no permission: check the credentials and the rights of this user"
        raise PermissionError(errno.EACCES, what, name) from error
    except (OSError, *_library_errors()) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        text = " ".join(str(error).split())
        raise OSError(f"{name}: {type(error).__name__}: {text}") from error


def _library_errors() -> list[type[Exception]]:
    return [
        getattr(sys.modules[module], name)
        for module, names in LIBRARY_ERRORS.items()
        if module in sys.modules
        for name in names
    ]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a storage; `str` gives its URL, without a password. Errors: those of
    `storage_errors`."""

    url: str
    filesystem: Any
    path: str  # within the storage

    def __str__(self) -> str:
        return without_password(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    def open(self) -> BinaryIO:
        """Open a stream with read-ahead that can be entered anywhere, as parquet needs."""
        with storage_errors(str(self)):
            return self.filesystem.open(self.path, "rb")

    def size(self) -> int:
        """Bytes, or 0 where the storage does not tell."""
        with storage_errors(str(self)):
            return self.filesystem.size(self.path) or 0

    def fingerprint(self) -> str:
        """The storage's mark of a version: an ETag, a time.

        fsspec's own is of the URL alone over https, and elsewhere of all that the storage tells: of
        sftp and smb the time of the last reading, too.
        """
        with storage_errors(str(self)):
            told = {name.lower(): value for name, value in self.filesystem.info(self.path).items()}
            marks = [told[name] for name in MARKS if told.get(name)]
            return str(marks[0] if marks else self.filesystem.ukey(self.path))


def remote_files(url: str) -> tuple[list[RemoteFile], bool]:
    """List the files of a URL, sorted, without hidden ones; True if it is a folder.

    Errors: ValueError for an absent one; those of `file_system`.
    """
    system, path = file_system(url)
    with storage_errors(url):
        if system.isfile(path):
            return [RemoteFile(url, system, path)], False
        if not system.exists(path):
            raise ValueError(f"{url}: no such file or folder")
        found = sorted(system.find(path))
    return [
        RemoteFile(system.unstrip_protocol(one), system, one)
        for one in found
        if not any(part.startswith(".") for part in one.removeprefix(path).split("/"))
    ], True


def file_kind(path: Path | RemoteFile) -> str | None:
    """Type of a file by its name, compression apart; None when unknown.

    >>> file_kind(Path("a/news.jsonl.gz")), file_kind(Path("b.parquet")), file_kind(Path("c.pdf"))
    ('.jsonl', '.parquet', None)
    >>> file_kind(Path("enwiki-20251101-pages-articles1.xml-p1p41242.bz2"))
    '.xml'
    """
    if path.name.lower().endswith(".parquet"):
        return ".parquet"
    name = unpacked_name(path)
    if DUMP.search(name):
        return ".xml"
    return next((kind for kind in LINE_KINDS if name.endswith(kind)), None)


def unpacked_name(path: Path | RemoteFile) -> str:
    """Name of a file without that of its compression, in lower case.

    >>> unpacked_name(Path("squad/Dev.JSON.zst"))
    'dev.json'
    """
    name = path.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name


def read_lines(path: Path | RemoteFile, limit: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without white space at its ends) of a UTF-8 text file.

    A byte order mark is taken off.

    Errors: ValueError that names file and line for what is no text or damaged, and, before it is
    held, for a line of more than `limit` characters; OSError of the disk or the storage.
    """
    for number, line in raw_lines(path, limit):
        yield number, line.strip()


def raw_lines(path: Path | RemoteFile, limit: int) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without its line end). Errors: as `read_lines`."""
    return ((number, line.rstrip("\r\n")) for number, line in whole_lines(path, limit))


def whole_lines(path: Path | RemoteFile, limit: int) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line with its line end). Errors: as `read_lines`."""
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
                with suppress(*UNPACKING):  # a cut behind the line is not its fault
                    if b"\0" in stream.peek(4096):
                        raise _binary(path, number) from error
                where = f"byte 0x{raw[error.start]:02x} at offset {offset + error.start}"
                hint = "convert it with iconv -f CP1252 -t UTF-8 (Windows and Excel; also Latin 1)"
                raise ValueError(f"{path}:{number}: not UTF-8 ({where}): {hint}") from error
            offset += len(raw)
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def _read_line(
    stream: io.BufferedReader, path: Path | RemoteFile, number: int, limit: int
) -> bytes:
    """The next line with its line end, not much over the limit; b"" at the end of the file."""
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
    except UNPACKING as error:
        if not _is_damage(path, error):
            raise
        where = f"{path}:{number}"
        raise ValueError(f"{where}: damaged {path.suffix} file ({error}): copy it again") from error


def _is_damage(path: Path | RemoteFile, error: Exception) -> bool:
    """True for contents that cannot be unpacked, False for trouble of the disk or the storage."""
    # Arrow and bz2 report damage as an OSError that is of no other class.
    is_plain = type(error) is OSError and error.errno is None
    is_theirs = is_plain and path.suffix.lower() in (".zst", ".bz2")
    return not isinstance(error, OSError) or isinstance(error, gzip.BadGzipFile) or is_theirs


def _open(path: Path | RemoteFile) -> io.BufferedReader:
    compression = path.suffix.lower()
    file: Any = path.open() if isinstance(path, RemoteFile) else str(path)
    if compression == ".zst":
        import pyarrow

        # The zstandard package ends a truncated file in silence; Arrow reports it.
        file = pyarrow.input_stream(file, compression="zstd")
    elif compression in OPENERS:
        file = OPENERS[compression](file, "rb")
    elif path is STANDARD_INPUT:  # not sys.stdin: under LANG=C it lets bytes pass that are no UTF-8
        file = sys.stdin.buffer
    elif isinstance(path, Path):
        file = path.open("rb")
    return io.BufferedReader(file, 1 << 18)  # type: ignore[arg-type]


def _binary(path: Path | RemoteFile, number: int) -> ValueError:
    hint = "leave it out (UTF-16 text: convert it with iconv -f UTF-16 -t UTF-8)"
    return ValueError(f"{path}:{number}: NUL byte, looks like a binary file: {hint}")


def too_long(path: Path | RemoteFile, number: int, limit: int) -> ValueError:
    """The error for a line of more than `limit` characters."""
    hint = "put line breaks between paragraphs" if limit == MAX_LINE else "divide the row"
    return ValueError(f"{path}:{number}: line of more than {limit:,} characters: {hint}")


def read_blocks(path: Path | RemoteFile) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file. Errors: ValueError for damage; OSError."""
    remote = isinstance(path, RemoteFile)
    with storage_errors(str(path)) if remote else nullcontext(), _open(path) as stream:
        try:
            while block := stream.read(1 << 18):
                yield block
        except UNPACKING as error:
            if not _is_damage(path, error):
                raise
            what = f"damaged {path.suffix} file ({error})"
            raise ValueError(f"{path}: {what}: copy it again") from error


def read_text(path: Path) -> str:
    """Read the text of a file, packed or not. Errors: as `decode_text`; ValueError for damage."""
    return decode_text(b"".join(read_blocks(path)), str(path))


def decode_text(data: bytes, source: str) -> str:
    """Decode UTF-8, without a byte order mark.

    Errors: ValueError that names source and line for what is not UTF-8 or holds a NUL byte.
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
