"""Documents out of the inputs, in pieces and batches that are always cut at the same places.

    inputs -> files -> pieces, files of 64 MiB together -> documents
        -> batches of 1 M characters, or of 65,536 lines where lines are very short

A batch lies in one piece, so that pieces can be read by different machines, and a restarted job
reads again no more than the piece it was in; what is made of the batches does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bertsmith.corpus.left_out import NOTHING, LeftOut
from bertsmith.text.readers import Document, input_files, input_size, read_documents
from bertsmith.text.remote import RemoteFile

BATCH = 1 << 20  # characters given to a worker at a time
BATCH_LINES = 1 << 16  # a line takes 60 bytes of memory, and 300 as a sentence, however short
PIECE = 64 << 20  # bytes of files, as they lie on the disk
Numbered = tuple[int, Document]  # a document with its number in its file, from 0


class Batch(NamedTuple):
    """Consecutive documents."""

    piece: int
    number: int  # in the piece, from 0
    documents: list[Numbered]


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
    left_out: LeftOut = NOTHING,
    characters: int = BATCH,
) -> Iterator[list[Numbered]]:
    """The documents of a piece but those left out, in batches."""
    numbered = (
        one for file in piece for one in enumerate(read_documents([file], text_column=text_column))
    )
    return in_batches(left_out.without(numbered), characters)


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


def all_batches(
    inputs: Sequence[Path | str],
    text_column: str,
    left_out: LeftOut = NOTHING,
    characters: int = BATCH,
    first: tuple[int, int] = (0, 0),
) -> Iterator[Batch]:
    """The batches of all pieces, from batch `first` (piece, number) on."""
    for piece, files in enumerate(cut_into_pieces(inputs)):
        if piece < first[0]:
            continue
        batches = batches_of_piece(files, text_column, left_out, characters)
        for number, documents in enumerate(batches):
            if (piece, number) >= first:
                yield Batch(piece, number, documents)
