"""A checkpoint of TensorFlow's V2 format: named tensors in shards, and an index of them.

Format and rules: tensorflow/tensorflow core/util/tensor_bundle/tensor_bundle.cc and
core/protobuf/tensor_bundle.proto; keys of slices: core/util/saved_tensor_slice_util.cc and
core/lib/strings/ordered_code.cc. A variable that TensorFlow kept in parts has an entry that lists
its slices, and an entry a slice.

Opening reads the index alone. It refuses entries whose bytes overlap or lie outside of their shard,
so that reading all tensors reads no byte twice, and sizes that are not those of the shapes, so that
nothing is allocated which the files do not hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bertsmith.base.files import atomic_file
from bertsmith.checkpoints.formats.crc32c import masked_crc32c
from bertsmith.checkpoints.formats.tensorflow_table import Cursor, read_table, table_bytes, varint

INDEX, IS_SHARD = ".index", re.compile(r"\.data-\d{5}-of-\d{5}$")  # ends of files' names
DTYPES = {  # of types.proto
    1: "f4", 2: "f8", 3: "i4", 4: "u1", 5: "i2", 6: "i1", 8: "c8", 9: "i8", 10: "?", 14: "u2",
    17: "u2", 18: "c16", 19: "f2", 22: "u4", 23: "u8",
}  # fmt: skip
ByteOrder = Literal["<", ">"]
BFLOAT16 = 14  # the upper half of a float32; read as such
NUMBERS = {np.dtype(kind): number for number, kind in DTYPES.items() if number != BFLOAT16}
BYTE_ORDERS: tuple[ByteOrder, ByteOrder] = ("<", ">")  # of the header's endianness 0 and 1
OLDEST_READER = 1  # the version of the format that is read here
MOST_DIMENSIONS, MOST_BYTES = 64, 2**62  # of an array in NumPy, also of an empty one
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # kinds of fields in protocol buffers


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a tensor, or which slices it is made of: (start, length) a dimension."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[tuple[tuple[int, int], ...], ...]
    cursor: Cursor  # the place in the index, for errors


class Bundle:
    """The tensors of a checkpoint by name.

    Errors: ValueError that names file and byte; OSError for files that cannot be read.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix, self.index = prefix, prefix.with_name(prefix.name + INDEX)
        table = read_table(self.index)
        key, header = next(table, (None, None))
        if key != b"" or header is None:
            raise ValueError(f"{self.index}: no header, so not the index of a checkpoint")
        self.byte_order: ByteOrder
        self.num_shards, self.byte_order = _header(header)
        self._entries = {key: _entry(value) for key, value in table}
        self._check_places()
        self.names = [
            _text(key, at.cursor) for key, at in self._entries.items() if key[:1] != b"\0"
        ]
        for name in self.names:
            self._slices(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name.encode()].shape

    def shards(self) -> list[Path]:
        """The files with the tensors, of those that hold any."""
        return [self._shard(number) for number in sorted({e.shard for e in self._stored()})]

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory of its own, in this machine's byte order; bfloat16 becomes float32.

        Errors: ValueError for another checksum, strings, slices that do not make it up.
        """
        entry, slices = self._entries[name.encode()], self._slices(name)
        if not entry.slices:
            return self._read(name, entry)
        whole = np.empty(entry.shape, _dtype(entry, name))
        filled = np.zeros(entry.shape, bool)
        for ranges, part in slices.items():
            place = tuple(slice(start, start + length) for start, length in ranges)
            whole[place], filled[place] = self._read(name, part), True
        if not filled.all():
            raise entry.cursor.fault(f"the slices of '{name}' do not cover it")
        return whole

    def _read(self, name: str, entry: Entry) -> np.ndarray:
        dtype, shard = _dtype(entry, name), self._shard(entry.shard)
        data = np.fromfile(shard, np.uint8, entry.size, offset=entry.offset)
        if len(data) != entry.size or masked_crc32c(data) != entry.checksum:
            raise ValueError(
                f"{shard}: damaged: the {entry.size} bytes of '{name}' from byte {entry.offset} on "
                "do not have their checksum: copy or download the checkpoint again"
            )
        stored = np.dtype(DTYPES[entry.dtype])
        values = data.view(stored.newbyteorder(self.byte_order)).astype(stored, copy=False)
        if entry.dtype == BFLOAT16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(dtype, copy=False).reshape(entry.shape)

    def _shard(self, number: int) -> Path:
        name = f"{self.prefix.name}.data-{number:05d}-of-{self.num_shards:05d}"
        return self.prefix.with_name(name)

    def _stored(self) -> Iterator[Entry]:
        return (entry for entry in self._entries.values() if not entry.slices)

    def _check_places(self) -> None:
        """Refuse bytes outside of a shard, bytes of two tensors, and sizes that do not fit."""
        sizes: dict[int, int] = {}
        passed = shard = 0
        for entry in sorted(self._stored(), key=lambda entry: (entry.shard, entry.offset)):
            if not 0 <= entry.shard < self.num_shards:
                fault = f"shard {entry.shard} of {self.num_shards}"
                raise entry.cursor.fault(fault)
            if entry.shard not in sizes:
                file = self._shard(entry.shard)
                if not file.is_file():
                    raise ValueError(f"{file}: missing, though {self.index.name} names it")
                sizes[entry.shard] = file.stat().st_size
            passed = passed if entry.shard == shard else 0
            shard, end = entry.shard, entry.offset + entry.size
            if min(entry.offset, entry.size) < 0 or end > sizes[shard]:
                raise entry.cursor.fault(
                    f"{entry.size} bytes from {entry.offset} on, but {self._shard(shard).name} has "
                    f"{sizes[shard]}"
                )
            if entry.size and entry.offset < passed:
                raise entry.cursor.fault(
                    f"a tensor at {entry.offset} of {self._shard(shard).name} begins before another"
                    f" ends, at {passed}"
                )
            passed = max(passed, end)
            if entry.dtype in DTYPES:
                wanted = math.prod(entry.shape) * np.dtype(DTYPES[entry.dtype]).itemsize
                if entry.size != wanted:
                    fault = f"{entry.size} bytes for a tensor of shape {list(entry.shape)}"
                    raise entry.cursor.fault(fault)

    def _slices(self, name: str) -> dict[tuple[tuple[int, int], ...], Entry]:
        """(Start, length) a dimension -> entry of that slice; {} for a tensor stored whole.

        Together they have as many elements as the tensor, each of which is in the files.
        """
        entry, parts = self._entries[name.encode()], {}
        for extents in entry.slices:
            if len(extents) != len(entry.shape):
                raise entry.cursor.fault(f"a slice of {len(extents)} dimensions of '{name}'")
            sizes = zip(extents, entry.shape, strict=True)
            ranges = [(start, size if length < 0 else length) for (start, length), size in sizes]
            part = self._entries.get(slice_key(name, extents))
            if part is None or part.dtype != entry.dtype or part.slices:
                raise entry.cursor.fault(f"no slice {list(extents)} of '{name}'")
            fits = [
                0 <= start <= start + length <= size
                for (start, length), size in zip(ranges, entry.shape, strict=True)
            ]
            if not all(fits) or part.shape != tuple(length for _, length in ranges):
                raise part.cursor.fault(f"slice {list(extents)} of '{name}' has another shape")
            parts[tuple(ranges)] = part
        held = sum(math.prod(part.shape) for part in parts.values())
        if entry.slices and held != math.prod(entry.shape):
            raise entry.cursor.fault(f"the slices of '{name}' do not cover it")
        return parts


def write_bundle(prefix: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint in one shard, each file atomically, the index last.

    Errors: OSError with the path.
    """
    data, offset = prefix.with_name(f"{prefix.name}.data-00000-of-00001"), 0
    header = _field(1, VARINT, varint(1)) + _field(3, LENGTH, _field(1, VARINT, varint(1)))
    items = [(b"", header)]
    with atomic_file(data) as temporary, temporary.open("wb") as file:
        for name in sorted(tensors, key=str.encode):
            tensor = np.ascontiguousarray(tensors[name])
            number = NUMBERS[np.dtype(tensor.dtype.type)]
            flat = tensor.reshape(-1).astype(tensor.dtype.newbyteorder("<"), copy=False)
            flat.tofile(file)
            checksum = masked_crc32c(flat.view(np.uint8))
            dimensions = (_field(2, LENGTH, _number(1, size)) for size in np.shape(tensors[name]))
            value = _number(1, number) + _field(2, LENGTH, b"".join(dimensions))
            value += _number(4, offset) + _number(5, flat.nbytes)
            value += _field(6, FIXED32, checksum.to_bytes(4, "little"))
            items.append((name.encode(), value))
            offset += flat.nbytes
    with atomic_file(prefix.with_name(prefix.name + INDEX)) as temporary:
        temporary.write_bytes(table_bytes(items))


def slice_key(name: str, extents: tuple[tuple[int, int], ...]) -> bytes:
    """The key of a slice: 0, the name, the rank, each start and length, in TensorFlow's codes.

    >>> slice_key("part", ((4, 4), (0, -1)))
    b'\\x00part\\x00\\x01\\x01\\x02\\x84\\x84\\x80\\x7f'
    """
    escaped = name.encode().replace(b"\xff", b"\xff\0").replace(b"\0", b"\0\xff")
    rank = len(extents).to_bytes(1, "big").lstrip(b"\0")
    numbers = b"".join(_signed_code(number) for extent in extents for number in extent)
    return b"\0" + escaped + b"\0\1" + bytes([len(rank)]) + rank + numbers


def _signed_code(value: int) -> bytes:
    """A number as ordered bytes: one leading bit a byte, the sign, then the number itself."""
    length = (value if value >= 0 else ~value).bit_length() // 7 + 1
    header = ((1 << length) - 1) << (7 * length)  # `length` ones on top
    return ((value % (1 << 8 * length)) ^ header).to_bytes(length, "big")


def _field(number: int, kind: int, content: bytes) -> bytes:
    size = varint(len(content)) if kind == LENGTH else b""
    return varint(number << 3 | kind) + size + content


def _number(field: int, value: int) -> bytes:
    return _field(field, VARINT, varint(value)) if value else b""  # as proto3: a zero is absent


def _fields(message: Cursor) -> Iterator[tuple[int, int, Cursor]]:
    """(Number, value, content) of the fields: content is empty but for strings and messages."""
    while message:
        tag = message.varint()
        number, kind, nothing = tag >> 3, tag & 7, message.part(0)
        if kind == VARINT:
            value = message.varint()
            yield number, value - (value >> 63 << 64), nothing
        elif kind == LENGTH:
            yield number, 0, message.part(message.varint())
        elif kind in (FIXED32, FIXED64):
            yield number, message.fixed(4 if kind == FIXED32 else 8), nothing
        else:
            raise message.fault(f"a field of kind {kind}")


def _header(message: Cursor) -> tuple[int, ByteOrder]:
    """Number of shards and byte order."""
    shards = endianness = least = 0
    for number, value, content in _fields(message):
        if number == 1:
            shards = value
        elif number == 2:
            endianness = value
        elif number == 3:
            least = max((value for field, value, _ in _fields(content) if field == 2), default=0)
    if endianness not in (0, 1):
        raise message.fault(f"byte order {endianness}")
    if least > OLDEST_READER:
        raise message.fault(f"a format of version {least}, newer than {OLDEST_READER}")
    return shards, BYTE_ORDERS[endianness]


def _entry(message: Cursor) -> Entry:
    at = message.part(0)
    numbers, shape, slices = dict.fromkeys((1, 3, 4, 5, 6), 0), [], []
    for number, value, content in _fields(message):
        if number == 2:
            shape = [_first(part, 1) for field, _, part in _fields(content) if field == 2]
        elif number == 7:
            extents = (part for field, _, part in _fields(content) if field == 1)
            slices.append(tuple(_extent(part) for part in extents))
        elif number in numbers:
            numbers[number] = value
    most = MOST_BYTES // np.dtype("c16").itemsize
    if (
        len(shape) > MOST_DIMENSIONS
        or min(shape, default=0) < 0
        or math.prod(max(size, 1) for size in shape) > most
    ):
        raise at.fault(f"shape {shape[:MOST_DIMENSIONS]}, which no array has")
    dtype, shard, offset, size, checksum = numbers.values()
    return Entry(dtype, tuple(shape), shard, offset, size, checksum, tuple(slices), at)


def _first(message: Cursor, wanted: int) -> int:
    return next((value for number, value, _ in _fields(message) if number == wanted), 0)


def _extent(message: Cursor) -> tuple[int, int]:
    """Start and length of a slice in one dimension; all of it is (0, -1)."""
    found = {number: value for number, value, _ in _fields(message)}
    return found.get(1, 0), found.get(2, -1)


def _text(key: bytes, at: Cursor) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise at.fault(f"name {key[:80]!r} is not UTF-8") from error


def _dtype(entry: Entry, name: str) -> np.dtype:
    if entry.dtype not in DTYPES:
        raise entry.cursor.fault(f"'{name}' holds no numbers (dtype {entry.dtype})")
    return np.dtype(np.float32 if entry.dtype == BFLOAT16 else DTYPES[entry.dtype])
