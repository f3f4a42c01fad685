"""Vectors that stand in .npy files, or in memory, read in blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from bertsmith.base.files import named_errors

BLOCK_BYTES = 4 << 20  # that a worker reads at once
RANGES = ".ranges.npy"  # end of the name of what `bertsmith embed` scaled vectors to int8 by

Block = tuple[int, int, Callable[[np.ndarray], np.ndarray]]
"""Its first row, the number of its rows, what gives them (float32 memory for them is lent)."""


class VectorFile(NamedTuple):
    """A .npy of vectors by its header."""

    path: Path
    rows: int
    size: int
    kind: np.dtype
    offset: int
    """First byte of the numbers."""

    @classmethod
    def open(cls, path: Path) -> VectorFile:
        """Errors: ValueError for a file that is no float [N, D], or truncated."""
        if not path.is_file():
            raise ValueError(f"{path}: no .npy file there")
        with path.open("rb") as file:
            try:
                is_old = np.lib.format.read_magic(file) == (1, 0)
                formats = np.lib.format
                read = formats.read_array_header_1_0 if is_old else formats.read_array_header_2_0
                shape, is_fortran, kind = read(file)
            except ValueError as error:
                raise ValueError(f"{path}: not a .npy file ({error})") from error
            offset, end = file.tell(), file.seek(0, os.SEEK_END)
        if kind not in (np.float32, np.float16) or len(shape) != 2 or is_fortran or 0 in shape:
            order = " in Fortran order" if is_fortran else ""
            raise ValueError(
                f"{path}: {kind} {list(shape)}{order}: search reads float32 or float16 [N, D] in C"
                " order (np.ascontiguousarray), as `bertsmith embed` writes without --quantize"
            )
        if end - offset != shape[0] * shape[1] * kind.itemsize:
            raise ValueError(f"{path}: not as long as its header says: write it again")
        return cls(path, *shape, kind, offset)

    def read(self, file: BinaryIO, span: slice, memory: np.ndarray) -> np.ndarray:
        """Some of the vectors, of several threads at once, too; float32 ones lie in `memory`.

        Errors: OSError; ValueError for a file that became shorter.
        """
        is_wide = self.kind == memory.dtype
        block = memory if is_wide else np.empty(memory.shape, self.kind)
        left = block.reshape(-1).view(np.uint8).data
        place = self.offset + span.start * self.size * self.kind.itemsize
        with named_errors(self.path):
            while left and (done := os.preadv(file.fileno(), [left], place)):
                left, place = left[done:], place + done
        if left:
            raise ValueError(f"{self.path}: it became shorter while it was read")
        return block


class StoredVectors:
    """The vectors of a .npy file, or of all in a folder but ranges, in the order of their names.

    Errors: ValueError for no such file, those of `VectorFile.open`, and unequal sizes.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        paths = [path]
        if path.is_dir():
            paths = sorted(each for each in path.glob("*.npy") if not each.name.endswith(RANGES))
        if not paths:
            raise ValueError(f"{path}: no .npy file in this folder")
        self.files = [VectorFile.open(each) for each in paths]
        for file in self.files:
            if file.size != self.files[0].size:
                raise ValueError(
                    f"{file.path}: vectors of {file.size} numbers, but those of {paths[0]} have"
                    f" {self.files[0].size}"
                )
        self._ends = np.cumsum([file.rows for file in self.files])
        self.shape = int(self._ends[-1]), self.files[0].size

    def place(self, row: int) -> tuple[Path, int]:
        """The file that has a row, and its number there."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        file = self.files[number]
        return file.path, int(row - self._ends[number] + file.rows)

    def blocks(self, opened: ExitStack) -> Iterator[Block]:
        for end, stored in zip(self._ends.tolist(), self.files, strict=True):
            file = opened.enter_context(stored.path.open("rb", buffering=0))
            for span in _spans(stored.rows, self.shape[1]):
                first = end - stored.rows + span.start
                yield first, span.stop - span.start, partial(stored.read, file, span)


class HeldVectors:
    """Vectors [N, D] in memory, in blocks as `StoredVectors`."""

    def __init__(self, vectors: np.ndarray) -> None:
        if vectors.ndim != 2 or vectors.dtype.kind != "f" or not vectors.size:
            raise ValueError(
                f"vectors of {vectors.dtype} {list(vectors.shape)}: expected floats [N, D]"
            )
        self.vectors, self.shape = vectors, vectors.shape

    def place(self, row: int) -> tuple[str, int]:
        return "vectors", row

    def blocks(self, opened: ExitStack) -> Iterator[Block]:
        for span in _spans(*self.shape):
            yield span.start, span.stop - span.start, lambda _, span=span: self.vectors[span]


def read_queries(path: Path) -> np.ndarray:
    """The vectors of a .npy [Q, D]. Errors: ValueError as `VectorFile.open`."""
    VectorFile.open(path)
    return np.load(path)


def rows_at_once(size: int) -> int:
    """The number of vectors of that size in a block."""
    return max(1, BLOCK_BYTES // (4 * size))


def _spans(count: int, size: int) -> Iterator[slice]:
    step = rows_at_once(size)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
