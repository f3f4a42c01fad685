"""A file in blocks of 1 MiB, each with a checksum: written, mapped into memory, verified."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bertsmith.files import atomic_file
from bertsmith.text.remote import storage_errors

BLOCK = 1 << 20  # bytes under one checksum


def num_blocks(num_bytes: int) -> int:
    """How many checksums a file of `num_bytes` has.

    >>> num_blocks(0), num_blocks(1 << 20), num_blocks((1 << 20) + 1)
    (0, 1, 2)
    """
    return -(-num_bytes // BLOCK)


class Content(NamedTuple):
    """What a file must hold."""

    num_bytes: int
    checksums: np.ndarray  # uint32 [blocks], CRC-32 of each


class BlockSums:
    """The checksums of the blocks of a file that comes in pieces of any size."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._filled = self._checksum = 0  # of the last, unfinished block
        self.num_bytes = 0

    def add(self, content: memoryview) -> None:
        self.num_bytes += len(content)
        while content:
            piece, content = content[: BLOCK - self._filled], content[BLOCK - self._filled :]
            self._checksum = zlib.crc32(piece, self._checksum)
            self._filled += len(piece)
            if self._filled == BLOCK:
                self._finished.append(self._checksum)
                self._filled = self._checksum = 0

    def checksums(self) -> list[int]:
        """CRC-32 of every block so far, an unfinished last one included."""
        return self._finished + [self._checksum] * (self._filled > 0)


class BlockWriter:
    """A file written in pieces, under a temporary name, with the checksums of its blocks."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self._file = stack.enter_context(stack.enter_context(atomic_file(path)).open("wb"))
        self._sums = BlockSums()

    def write(self, values: np.ndarray) -> None:
        content = memoryview(values.tobytes())
        self._file.write(content)
        self._sums.add(content)

    def checksums(self) -> list[int]:
        """CRC-32 of every block so far, an unfinished last one included."""
        return self._sums.checksums()


def check_size(name: str, found: int, expected: int, remedy: str) -> None:
    """Errors: ValueError that names the file when the sizes differ."""
    if found != expected:
        raise ValueError(
            f"{name}: {found:,} bytes where the manifest says {expected:,} "
            f"(truncated or replaced); {remedy}"
        )


def check_block(name: str, number: int, found: int, written: int, remedy: str) -> None:
    """Errors: ValueError that names file and block when the checksums differ."""
    if found != written:
        raise ValueError(
            f"{name}: block {number} (1 MiB from byte {number * BLOCK:,}) is damaged: "
            f"CRC-32 {found:08x}, written as {written:08x}; {remedy}"
        )


def blocks_of(source: BinaryIO, name: str) -> Iterator[bytes]:
    """A file in pieces of a block. Errors: OSError that names it."""
    while True:
        with storage_errors(name):
            block = source.read(BLOCK)
        if not block:
            return
        yield block


def checked_blocks(source: BinaryIO, content: Content, name: str, remedy: str) -> Iterator[bytes]:
    """The blocks of a file, each after it was found sound.

    Errors: ValueError that names the file, and the block where one is damaged; OSError.
    """
    size = 0
    for number, block in enumerate(blocks_of(source, name)):
        size += len(block)
        if size != min((number + 1) * BLOCK, content.num_bytes):
            break
        check_block(name, number, zlib.crc32(block), int(content.checksums[number]), remedy)
        yield block
    check_size(name, size, content.num_bytes, remedy)


class CheckedFile:
    """A memory-mapped array [count] whose blocks are verified when they are first read.

    Errors: ValueError that names the file and the `remedy`: at opening when its size differs from
    `content`, at reading when a block differs from its checksum.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype, content: Content, remedy: str) -> None:
        self.name, self._remedy, self._checksums = file.name, remedy, content.checksums
        check_size(self.name, file.seek(0, 2), content.num_bytes, remedy)
        self._map: Any = b""
        if content.num_bytes:  # an empty file cannot be mapped
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._map)
        self._array = np.frombuffer(self._bytes, dtype)
        # Two threads may verify the same block at once: they come to the same answer.
        self._verified = np.zeros(len(content.checksums), bool)

    def __len__(self) -> int:
        return len(self._array)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items start:stop as a read-only view, after their blocks were found sound."""
        size = self._array.itemsize
        for block in range(start * size // BLOCK, num_blocks(stop * size)):
            if not self._verified[block]:
                self._verify(block)
        return self._array[start:stop]

    def verified(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The whole array, of which starts[k]:stops[k] were found sound and may be read."""
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.read(start, stop)
        return self._array

    def _verify(self, block: int) -> None:
        found = zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK])
        check_block(self.name, block, found, int(self._checksums[block]), self._remedy)
        self._verified[block] = True
