"""Files in blocks of 1 MiB, each with a checksum: written, mapped into memory, verified.

The manifest of a token store names its shards and is sealed by a digest of itself. It is written
last and never changed: text that is appended comes with a manifest of its own, the next
*generation*, and the one before stays beside it under its number.

    manifest.json          the newest generation
    manifest-0001.json     the first one, where there is a second
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bertsmith.base.files import atomic_file, write_text
from bertsmith.text.readers.files import storage_errors

BLOCK = 1 << 20  # bytes under one checksum
FORMAT = 2  # of a manifest
MANIFEST = "manifest.json"
DIGEST = "sha256"
REBUILD = "remove the folder and build it again with `bertsmith corpus`"


def num_blocks(num_bytes: int) -> int:
    """
    >>> num_blocks(0), num_blocks(1 << 20), num_blocks((1 << 20) + 1)
    (0, 1, 2)
    """
    return -(-num_bytes // BLOCK)


def block_checksums(content: bytes) -> list[int]:
    """CRC-32 of every block of a small file."""
    return [zlib.crc32(content[k : k + BLOCK]) for k in range(0, len(content), BLOCK)]


class BlockWriter:
    """A file written in pieces, under a temporary name, with the checksums of its blocks."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self._file = stack.enter_context(stack.enter_context(atomic_file(path)).open("wb"))
        self._filled = BLOCK  # of the last block
        self.checksums: list[int] = []

    def write(self, values: np.ndarray) -> None:
        content = memoryview(values.tobytes())
        self._file.write(content)
        while content:
            if self._filled == BLOCK:
                self.checksums.append(0)
                self._filled = 0
            piece, content = content[: BLOCK - self._filled], content[BLOCK - self._filled :]
            self.checksums[-1] = zlib.crc32(piece, self.checksums[-1])
            self._filled += len(piece)


class Content(NamedTuple):
    """The size and the checksums that a file must have; faults are "" where it has them."""

    num_bytes: int
    checksums: np.ndarray  # uint32 [blocks], CRC-32 of each

    def size_fault(self, size: int, name: str, hint: str) -> str:
        if size == self.num_bytes:
            return ""
        return (
            f"{name}: {size:,} bytes where the manifest says {self.num_bytes:,} "
            f"(truncated or replaced); {hint}"
        )

    def block_fault(self, number: int, block: bytes | memoryview, name: str, hint: str) -> str:
        found, written = zlib.crc32(block), int(self.checksums[number])
        if found == written:
            return ""
        return (
            f"{name}: block {number} (1 MiB from byte {number * BLOCK:,}) is damaged: "
            f"CRC-32 {found:08x}, written as {written:08x}; {hint}"
        )


def scan_blocks(
    source: BinaryIO, content: Content, name: str, hint: str
) -> Iterator[tuple[bytes, str]]:
    """Yield the blocks of a file with their faults and, last, b"" with the fault of its size."""
    size = 0
    for number in count():
        with storage_errors(name):
            block = source.read(BLOCK)
        if not block:
            break
        size += len(block)
        is_complete = size == min((number + 1) * BLOCK, content.num_bytes)
        yield block, content.block_fault(number, block, name, hint) if is_complete else ""
    yield b"", content.size_fault(size, name, hint)


def checked_blocks(source: BinaryIO, content: Content, name: str, hint: str) -> Iterator[bytes]:
    """Yield the blocks of a file, each after it was found sound; a fault is a ValueError."""
    for block, fault in scan_blocks(source, content, name, hint):
        if fault:
            raise ValueError(fault)
        yield block


class CheckedFile:
    """A memory-mapped array [count] whose blocks are verified when they are first read.

    Errors: ValueError, at opening where the size differs from `content`, at reading where a block
    does.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype, content: Content, hint: str) -> None:
        self.name, self._hint, self._content = file.name, hint, content
        if fault := content.size_fault(file.seek(0, 2), self.name, hint):
            raise ValueError(fault)
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
        for number in range(start * size // BLOCK, num_blocks(stop * size)):
            if not self._verified[number]:
                block = self._bytes[number * BLOCK : (number + 1) * BLOCK]
                if fault := self._content.block_fault(number, block, self.name, self._hint):
                    raise ValueError(fault)
                self._verified[number] = True
        return self._array[start:stop]

    def verified(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The whole array, of which starts[k]:stops[k] were found sound and may be read."""
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.read(start, stop)
        return self._array


def earlier_manifest(generation: int) -> str:
    """
    >>> earlier_manifest(1)
    'manifest-0001.json'
    """
    return f"manifest-{generation:04d}.json"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with the format and the digest of both; the digest is the store's fingerprint.

    >>> manifest = sealed({"generation": 1})
    >>> manifest["format"], manifest == sealed(manifest), len(manifest["sha256"])
    (2, True, 64)
    """
    body = {"format": FORMAT, **{key: content[key] for key in content if key != DIGEST}}
    text = json.dumps(body, sort_keys=True)
    return {"format": FORMAT, DIGEST: hashlib.sha256(text.encode()).hexdigest()} | body


def manifest_text(manifest: dict[str, Any]) -> str:
    """The one way in which a manifest is written, so that no byte of it can change unseen."""
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a sealed manifest atomically."""
    assert manifest == sealed(manifest)
    write_text(path, manifest_text(manifest))


def read_manifest(content: bytes, name: str, hint: str = REBUILD) -> dict[str, Any]:
    """Read a manifest. Errors: ValueError for another format, or where any byte has changed."""
    try:
        manifest = json.loads(content)
    except ValueError as error:  # also what is not UTF-8
        raise ValueError(f"{name}: damaged, not valid JSON ({error}); {hint}") from error
    if not isinstance(manifest, dict) or "splits" not in manifest:
        # A checkpoint has a file of this name too: nobody shall be told to remove that.
        raise ValueError(
            f"{name}: damaged, or not of a token store: name one made by `bertsmith corpus`"
        )
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise ValueError(f"{name}: a token store of format {found!r}, not {FORMAT}; {hint}")
    if sealed(manifest) != manifest or manifest_text(manifest).encode() != content:
        raise ValueError(f"{name}: damaged: it is not what its {DIGEST} was made of; {hint}")
    return manifest
