"""Documents out of the inputs, in pieces and batches that are always cut at the same places.

    inputs -> files -> pieces, files of 64 MiB together -> documents, but those left out
        -> batches of 1 M characters, or of 65,536 lines where lines are very short

A batch lies in one piece, so that pieces can be read by different machines, and a restarted job
reads again no more than the piece it was in; what is made of the batches does not depend on it.

`corpus dedup` and `corpus contamination` write lists of documents to leave out, lines of JSON:

    {"format": 1, "made_by": "corpus dedup", "settings": {...}, "inputs": [{"path": ...}, ...]}
    {"source": "a.txt", "document": 12, "line": 345, "reason": "duplicate", "of": {...}}

A document is named by its file and its number in it, from 0; the line is for the reader. The files
are described as they were when the list was made, and a list of changed files is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.files import atomic_file
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


class Batch(NamedTuple):
    """Consecutive documents."""

    piece: int
    number: int  # in the piece, from 0
    documents: list[Numbered]


@dataclass(frozen=True)
class ExclusionList:
    """Documents to leave out."""

    numbers: dict[str, np.ndarray]
    """File -> sorted numbers of its documents, int64: 8 bytes a document left out."""
    fingerprints: list[str]
    """SHA-256 of each list, for a restarted build to compare."""

    def without(self, documents: Iterable[Numbered]) -> Iterator[Numbered]:
        """Numbered documents of whole files but those left out."""
        numbers: Iterator[int] = iter(())
        next_out = -1
        for number, document in documents:
            if number == 0:
                numbers = iter(self.numbers.get(document.source, NONE).tolist())
                next_out = next(numbers, -1)
            if number == next_out:
                next_out = next(numbers, -1)
            else:
                yield number, document


NOTHING = ExclusionList({}, [])


def all_batches(
    inputs: Sequence[Path | str],
    text_column: str,
    excluded: ExclusionList = NOTHING,
    characters: int = BATCH,
    first: tuple[int, int] = (0, 0),
) -> Iterator[Batch]:
    """The batches of all pieces, from batch `first` (piece, number) on."""
    for piece, files in enumerate(cut_into_pieces(inputs)):
        if piece < first[0]:
            continue
        batches = batches_of_piece(files, text_column, excluded, characters)
        for number, documents in enumerate(batches):
            if (piece, number) >= first:
                yield Batch(piece, number, documents)


def cut_into_pieces(inputs: Sequence[Path | str]) -> list[list[Path | RemoteFile]]:
    """Consecutive files of at least `PIECE` bytes together; a file is never cut."""
    pieces: list[list[Path | RemoteFile]] = []
    size = PIECE
    for file in input_files(inputs):
        if size >= PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(file)
        size += input_size(file)
    return pieces


def batches_of_piece(
    piece: Sequence[Path | RemoteFile],
    text_column: str,
    excluded: ExclusionList = NOTHING,
    characters: int = BATCH,
) -> Iterator[list[Numbered]]:
    """The documents of a piece but those left out, in batches."""
    numbered = (
        one for file in piece for one in enumerate(read_documents([file], text_column=text_column))
    )
    return in_batches(excluded.without(numbered), characters)


def in_batches(documents: Iterable[Numbered], characters: int = BATCH) -> Iterator[list[Numbered]]:
    """Consecutive documents of `characters` or `BATCH_LINES` together, or a little more; the last
    may be less."""
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


# --- lists of documents to leave out ---


def write_list(
    path: Path,
    made_by: str,
    settings: dict[str, Any],
    inputs: list[dict[str, Any]],
    entries: Iterable[dict[str, Any]],
) -> None:
    """Write a list; each entry has at least source, document, line and reason.

    inputs: as `unique_inputs` described them before they were read.
    """
    head = {"format": FORMAT, "made_by": made_by, "settings": settings, "inputs": inputs}
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for line in chain([head], entries):
            # Lone surrogates, which a name may hold, cannot be written but as \udc80.
            file.write(json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n")


def read_lists(lists: Sequence[Path], inputs: Sequence[Path | str]) -> ExclusionList:
    """The lists together, checked against the inputs.

    Errors: ValueError that names the list (and the line) when it is no such list, or was made of
    files that are not among the inputs or have changed since; and when a file is given twice.
    """
    if not lists:
        return NOTHING
    now = {file["path"]: file for file in unique_inputs(inputs)}
    numbers: dict[str, array[int]] = defaultdict(lambda: array("q"))
    fingerprints = []
    for path in lists:
        for source, number in _entries(path, now):
            numbers[source].append(number)
        with path.open("rb") as file:
            fingerprints.append(hashlib.file_digest(file, "sha256").hexdigest())
    arrays = {source: np.unique(np.array(found)) for source, found in numbers.items()}
    return ExclusionList(arrays, fingerprints)


def unique_inputs(inputs: Sequence[Path | str]) -> list[dict[str, Any]]:
    """The fingerprint of the inputs, of which none may be given twice, by whatever path.

    Errors: ValueError; a document of a file that is read twice would have no name of its own, and
    its text would count twice.
    """
    files = input_fingerprint(inputs)
    seen: dict[str, str] = {}
    for path in (file["path"] for file in files):
        real = path if is_url(path) else os.path.realpath(path)
        if real in seen:
            other = f" (also as {seen[real]})" * (seen[real] != path)
            raise ValueError(f"{path}: given twice{other}: name each file once")
        seen[real] = path
    return files


def _entries(path: Path, now: dict[str, dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """(File, number) of every document of a list; `now` describes the inputs by path."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file: make it with corpus dedup or corpus contamination")
    checked = set()
    with path.open(encoding="utf-8", errors="replace") as file:
        head = _object(path, 1, file.readline(), {"format": int, "inputs": list})
        if head["format"] != FORMAT:
            raise ValueError(f"{path}: not a list of format {FORMAT}: make it again")
        then = {
            one["path"]: one for one in head["inputs"] if isinstance(one, dict) and "path" in one
        }
        for line_number, line in enumerate(file, 2):
            entry = _object(path, line_number, line, {"source": str, "document": int})
            source = entry["source"]
            if source not in checked:
                if source not in now:
                    raise ValueError(
                        f"{path}:{line_number}: names {source}, which is not among the inputs: "
                        "give the inputs it was made of, by the same names"
                    )
                if then.get(source) != now[source]:
                    raise ValueError(
                        f"{path}: {source} has changed since the list was made: make it again"
                    )
                checked.add(source)
            yield source, entry["document"]


def _object(path: Path, number: int, line: str, types: dict[str, type]) -> dict[str, Any]:
    with suppress(json.JSONDecodeError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and all(
            isinstance(found.get(key), kind) for key, kind in types.items()
        ):
            return found
    raise ValueError(
        f"{path}:{number}: damaged, or not a list of documents to leave out: "
        "make it again with corpus dedup or corpus contamination"
    )
