"""Documents out of the inputs, in pieces and batches that are always cut at the same places.

    inputs -> files -> pieces, files of 64 MiB together -> documents, but those excluded
        -> batches of 1 M characters, or of 65,536 lines where lines are very short

A batch lies in one piece, so that pieces can be read by different machines, and a restarted build
reads again no more than the piece it was in; its result does not depend on the cuts.

`corpus dedup` and `corpus contamination` write lists of documents to exclude, lines of JSON:

    {"format": 1, "made_by": "corpus dedup", "settings": {...}, "inputs": [{"path": ...}, ...]}
    {"source": "a.txt", "document": 12, "line": 345, "reason": "duplicate", "of": {...}}

A document is named by its file and its number in it, from 0. A list of changed files is refused.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.files import atomic_file, json_object
from bertsmith.text.readers.documents import (
    Document,
    input_files,
    input_fingerprint,
    input_size,
    read_documents,
)
from bertsmith.text.readers.files import RemoteFile, is_url

BATCH = 1 << 20  # characters given to a worker at a time
BATCH_LINES = 1 << 16  # a line takes 60 bytes of memory, and 300 as a sentence, however short
PIECE = 64 << 20  # bytes of files, as they lie on the disk
FORMAT = 1  # of lists
NONE = np.zeros(0, np.int64)
Numbered = tuple[int, Document]  # a document with its number in its file, from 0
Position = tuple[int, int]  # of a batch: its piece, its number there


class Batch(NamedTuple):
    """Consecutive documents."""

    piece: int
    number: int  # in the piece, from 0
    documents: list[Numbered]

    def texts(self) -> list[str]:
        return ["\n".join(document.lines) for _, document in self.documents]


@dataclass(frozen=True, eq=False)
class BatchReader:
    """Reads the batches of the inputs, from batch `first` on."""

    inputs: Sequence[Path | str]
    text_column: str
    excluded: Mapping[str, np.ndarray] = field(default_factory=dict)
    """As `read_lists` gives them."""
    characters: int = BATCH
    first: Position = (0, 0)
    workers: int = 1
    """Processes that parse the markup of dumps."""

    @cached_property
    def pieces(self) -> list[list[Path | RemoteFile]]:
        """Consecutive files of at least `PIECE` bytes together; a file is never cut."""
        pieces: list[list[Path | RemoteFile]] = []
        size = PIECE
        for file in input_files(self.inputs):
            if size >= PIECE:
                pieces.append([])
                size = 0
            pieces[-1].append(file)
            size += input_size(file)
        return pieces

    def __iter__(self) -> Iterator[Batch]:
        for piece in range(self.first[0], len(self.pieces)):
            yield from self.read_piece(piece)

    def read_piece(self, piece: int) -> Iterator[Batch]:
        """Yield the batches of one piece, from `first` on."""
        numbered = chain.from_iterable(map(self._read_file, self.pieces[piece]))
        for number, documents in enumerate(in_batches(numbered, self.characters)):
            if (piece, number) >= self.first:
                yield Batch(piece, number, documents)

    def _read_file(self, file: Path | RemoteFile) -> Iterator[Numbered]:
        excluded = set(self.excluded.get(str(file), NONE).tolist())
        documents = read_documents([file], text_column=self.text_column, workers=self.workers)
        for number, document in enumerate(documents):
            if number not in excluded:
                yield number, document


def in_batches(documents: Iterable[Numbered], characters: int = BATCH) -> Iterator[list[Numbered]]:
    """Group documents until they reach `characters` or `BATCH_LINES`; the last may have fewer."""
    batch, size, num_lines = [], 0, 0
    for numbered in documents:
        batch.append(numbered)
        size += sum(map(len, numbered[1].lines))
        num_lines += len(numbered[1].lines)
        if size >= characters or num_lines >= BATCH_LINES:
            yield batch
            batch, size, num_lines = [], 0, 0
    if batch:
        yield batch


# --- lists of documents to exclude ---


def write_list(
    path: Path,
    made_by: str,
    settings: dict[str, Any],
    inputs: list[dict[str, Any]],
    entries: Iterable[dict[str, Any]],
) -> None:
    """Write a list; `unique_inputs` gave the inputs, before they were read."""
    head = {"format": FORMAT, "made_by": made_by, "settings": settings, "inputs": inputs}
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for line in chain([head], entries):
            # ASCII, since a name may hold lone surrogates, which only \udc80 can write
            file.write(json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n")


def read_lists(
    lists: Sequence[Path], inputs: Sequence[Path | str], text_column: str = "text"
) -> dict[str, np.ndarray]:
    """Read the lists, together: file -> sorted numbers of its excluded documents, int64.

    Errors: ValueError for what is no such list, was made of another column, or of files that are
    not among the inputs or have changed since; those of `unique_inputs`.
    """
    if not lists:
        return {}
    current = {file["path"]: file for file in unique_inputs(inputs)}
    numbers: dict[str, array[int]] = defaultdict(lambda: array("q"))  # 8 bytes each
    for path in lists:
        for source, number in _entries(path, current, text_column):
            numbers[source].append(number)
    return {source: np.unique(np.array(found)) for source, found in numbers.items()}


def unique_inputs(inputs: Sequence[Path | str]) -> list[dict[str, Any]]:
    """The fingerprint of the inputs. Errors: ValueError for a file given twice, by any path."""
    files = input_fingerprint(inputs)
    seen: dict[str, str] = {}
    for path in (file["path"] for file in files):
        real = path if is_url(path) else os.path.realpath(path)
        if real in seen:
            other = f" (also as {seen[real]})" * (seen[real] != path)
            raise ValueError(f"{path}: given twice{other}: name each file once")
        seen[real] = path
    return files


def _entries(
    path: Path, current: dict[str, dict[str, Any]], text_column: str
) -> Iterator[tuple[str, int]]:
    """Yield (file, number) of the documents of a list; `current` describes the inputs by path."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file: make it with corpus dedup or corpus contamination")
    checked = set()
    with path.open(encoding="utf-8", errors="replace") as file:
        head = _json_line(
            path, 1, file.readline(), {"format": int, "settings": dict, "inputs": list}
        )
        if head["format"] != FORMAT:
            raise ValueError(f"{path}: not a list of format {FORMAT}: make it again")
        if (column := head["settings"].get("text_column", "text")) != text_column:
            raise ValueError(  # rows without a text have no number
                f"{path}: numbers the texts of column '{column}', not of '{text_column}': "
                f"make it with `text_column={text_column!r}`"
            )
        listed = {
            one["path"]: one for one in head["inputs"] if isinstance(one, dict) and "path" in one
        }
        for number, line in enumerate(file, 2):
            entry = _json_line(path, number, line, {"source": str, "document": int})
            for source in _named(entry, listed):
                if source in checked:
                    continue
                if source not in current:
                    raise ValueError(
                        f"{path}:{number}: names {source}, which is not among the inputs: "
                        "give the inputs it was made of, by the same names"
                    )
                if listed.get(source) != current[source]:
                    raise ValueError(
                        f"{path}: {source} has changed since the list was made: make it again"
                    )
                checked.add(source)
            yield entry["source"], entry["document"]


def _named(entry: dict[str, Any], listed: Container[str]) -> Iterator[str]:
    """The file of a document, and that of the copy which stays in its place.

    Of --against the latter is older text, which is not `listed`: it need not be an input.
    """
    yield entry["source"]
    of = entry.get("of")
    if isinstance(of, dict) and isinstance(of.get("source"), str) and of["source"] in listed:
        yield of["source"]


def _json_line(path: Path, number: int, line: str, types: dict[str, type]) -> dict[str, Any]:
    found = json_object(line) or {}
    if all(isinstance(found.get(name), kind) for name, kind in types.items()):
        return found
    raise ValueError(
        f"{path}:{number}: damaged, or not a list of documents to leave out: "
        "make it again with corpus dedup or corpus contamination"
    )
