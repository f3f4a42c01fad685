"""Documents out of files, in bounded memory: txt, jsonl, csv, tsv, parquet, dumps of Wikipedia.

Files and folders are local or behind a URL (s3://bucket/books), which is streamed. In a text file a
line is a paragraph (or a sentence, as in google-research/bert's `sample_text.txt`) and a blank line
ends a document; of a book of Project Gutenberg, see `_books`. In a dump of Wikipedia (.xml) an
article is a document. In the other formats a row is a document, the lines of its text are its
paragraphs. All but parquet may be compressed (.gz, .bz2, .xz, .zst).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bertsmith.base.files import nearby
from bertsmith.text.readers.files import (
    COMPRESSIONS,
    LINE_KINDS,
    MAX_LINE,
    RemoteFile,
    file_kind,
    is_url,
    read_lines,
    remote_files,
    too_long,
)
from bertsmith.text.readers.tables import stream_texts
from bertsmith.text.readers.wikipedia import read_articles
from bertsmith.text.tokenizer.files import is_vocabulary

KNOWN = f"{', '.join(LINE_KINDS)}, .xml (each also with {', '.join(COMPRESSIONS)}) and .parquet"

MAX_DOCUMENT, MAX_LINES = 4_000_000, 1 << 17  # characters and lines handed out at once
SAMPLE = 1_000_000  # characters
MAX_FILES = 1_000  # opened for a sample; of more, so many at equal distances
BOOK_STARTS = re.compile(r"\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG", re.IGNORECASE)
BOOK_ENDS = re.compile(r"\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG", re.IGNORECASE)
BOOK_HEAD, BOOK_WIDTH = 1_000, 1_000  # lines before the first mark, characters of each


class Document(NamedTuple):
    """Text that belongs together."""

    source: str  # file
    line: int  # first line (of a parquet file: row), counted from 1
    lines: list[str]  # paragraphs or sentences; none is empty


def read_documents(
    inputs: Path | str | Sequence[Path | str | RemoteFile],
    *,
    text_column: str = "text",
    workers: int = 1,
) -> Iterator[Document]:
    """Yield the documents of one or more files, folders or URLs in order, in bounded memory.

    A document of more than 4 million characters or 131,072 lines comes as several. `text_column`:
    field or column with the text of a jsonl, csv, tsv or parquet row. `workers`: processes that
    parse the markup of a dump of Wikipedia, this one among them; other files need one.

    Errors: ValueError that names file, line and hint for an unknown type, text that is not
    UTF-8, a binary, damaged or cut file, a paragraph of more than a million characters, a row
    without the text column; ModuleNotFoundError for a dump without mwparserfromhell. No document at
    all is no error: see `no_text`.
    """
    for path in input_files([inputs] if isinstance(inputs, str | Path) else inputs):
        kind = file_kind(path)
        if kind == ".txt":
            yield from _documents(path, _books(path, read_lines(path)))
            continue
        is_dump = kind == ".xml"
        texts = read_articles(path, workers) if is_dump else stream_texts(path, text_column)
        for number, text in texts:
            paragraphs = text.splitlines()
            if any(len(line) > MAX_LINE for line in paragraphs):
                raise too_long(path, number, MAX_LINE)
            lines = filter(None, map(str.strip, paragraphs))
            yield from _documents(path, ((number, line) for line in lines))


def sample_lines(inputs: Sequence[Path | str], *, text_column: str = "text") -> list[str]:
    """Lines from the beginning of every file (a compressed one cannot be entered in its middle).

    Each file gives up to its equal part of a million characters, the last line cut; of many files
    some are opened. Errors: those of `read_documents`.
    """
    files = input_files(inputs)
    files = files[:: -(-len(files) // MAX_FILES)]
    sample = []
    for path in files:
        left = SAMPLE // len(files)
        documents = read_documents([path], text_column=text_column)
        for line in (line for document in documents for line in document.lines):
            sample.append(line[:left])
            left -= len(sample[-1])
            if left == 0:
                break
    return sample


def no_text(inputs: Sequence[Path | str]) -> ValueError:
    """The error for inputs that hold no document."""
    names = ", ".join(str(path) for path in inputs)
    return ValueError(f"{names}: no text in it: give files with lines that are not blank")


def input_fingerprint(inputs: Sequence[Path | str]) -> list[dict[str, Any]]:
    """Path, bytes and time of change in ns (or the ETag) of each file, for a restart to compare."""
    files = []
    for path in input_files(inputs):
        remote = isinstance(path, RemoteFile)
        changed = path.fingerprint() if remote else path.stat().st_mtime_ns
        files.append({"path": str(path), "bytes": input_size(path), "changed": changed})
    return files


def input_size(path: Path | RemoteFile) -> int:
    """Bytes of a file as stored."""
    return path.size() if isinstance(path, RemoteFile) else path.stat().st_size


def input_files(inputs: Sequence[Path | str | RemoteFile]) -> list[Path | RemoteFile]:
    """List the files of the inputs; a folder gives its files of known types, sorted by path.

    Hidden files, unknown types and the vocabulary of a tokenizer in a folder are left out.

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
        if not known:
            unknown = "no text files in this folder"
            if not is_folder:
                unknown = f"unknown file type '{found[0].suffix}'"
            raise ValueError(f"{name}: {unknown}: known are {KNOWN}")
        files.extend(known)
    return files


def _local_files(path: Path) -> tuple[Sequence[Path], bool]:
    """Files of a path, sorted, without hidden ones; True if it is a folder."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder{nearby(path)}")
    if not path.is_dir():
        return [path], False
    return sorted(_files_below(path), key=lambda file: file.relative_to(path).parts), True


def _files_below(folder: Path) -> Iterator[Path]:
    """Files below a folder, without hidden ones; links to folders come last, each folder once."""

    def refuse(error: OSError) -> None:  # by itself os.walk skips what cannot be read
        raise error

    seen: set[tuple[int, int]] = set()
    roots = [folder]
    for root in roots:  # which grows by the links
        for here, folders, files in os.walk(root, onerror=refuse):
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            # lost+found is a disk's own folder, which only its administrator can read
            folders[:] = sorted(n for n in folders if n[0] != "." and n != "lost+found")
            roots += [link for name in folders if (link := Path(here, name)).is_symlink()]
            visible = (Path(here, name) for name in files if not name.startswith("."))
            yield from (file for file in visible if file.is_file())


def _books(path: Path | RemoteFile, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The lines of a text file; where it holds books of Project Gutenberg, their paragraphs.

    A mark in the head of the file tells. What is not between marks is the licence. Lines are broken
    at some 70 characters, so those up to a blank one are joined, and a book is a document: blank
    lines part its paragraphs. Several books may stand in a file one after the other.
    """
    head, is_book = [], False
    for number, line in lines:
        head.append((number, line))
        is_book = BOOK_STARTS.match(line) is not None
        if is_book or len(head) == BOOK_HEAD or len(line) > BOOK_WIDTH:
            break
    if not is_book:
        yield from chain(head, lines)
        return
    inside, first, words, size = False, 0, list[str](), 0
    for number, line in chain(head, lines, [(0, "")]):
        is_mark = BOOK_STARTS.match(line) or BOOK_ENDS.match(line)
        if words and (is_mark or not line):
            yield first, " ".join(words)
            words, size = [], 0
        if is_mark:
            inside = BOOK_STARTS.match(line) is not None
            yield number, ""
        elif inside and line:
            first = first if words else number
            words.append(line)
            size += len(line) + 1
            if size > MAX_LINE:
                raise too_long(path, first, MAX_LINE)


def _documents(path: Path | RemoteFile, numbered: Iterable[tuple[int, str]]) -> Iterator[Document]:
    """Gather lines into documents; an empty line or the limit of size ends one."""
    first, lines, size = 1, [], 0
    for number, line in chain(numbered, [(0, "")]):
        if lines and (not line or size + len(line) > MAX_DOCUMENT or len(lines) == MAX_LINES):
            yield Document(str(path), first, lines)
            lines, size = [], 0
        if line:
            first = first if lines else number
            lines.append(line)
            size += len(line)
