"""leveldb's sorted tables, the format of a checkpoint's index: keys in order, each with a value.

The format: google/leveldb doc/table_format.md, without filter blocks; TensorFlow's own code is in
openxla/xla, xla/tsl/lib/io/{format,block,table_builder}.cc. A table is blocks, then an index of
blocks, then a footer of 48 bytes. A block is entries, places to start from, the number of these, a
byte for its compression, a checksum.

Nothing that a file says is believed: blocks must follow one another, so that each byte is read
once; the file, its keys and unpacked blocks have bounds, so that memory has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from bertsmith.checkpoints.formats.crc32c import masked_crc32c

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER = 48  # bytes: two places of blocks, zeros, the magic number
TRAILER = 5  # bytes after a block: compression, checksum
PLAIN, SNAPPY = 0, 1
BLOCK_SIZE, RESTART_INTERVAL = 256 << 10, 16
MOST_BYTES = 1 << 20  # of an index, packed or not; BERT-LARGE's with its optimizer has 50 KB
MOST_KEYS = 16  # all keys together, over the size of the file: entries share what begins a key
MOST_SNAPPY = 64 / 3  # a copy of 64 bytes is stored in three


class Cursor:
    """A place in some bytes of a file, from which numbers are read; errors name the place."""

    __slots__ = ("block", "data", "end", "file", "place")

    def __init__(self, file: Path, data: bytes, start: int, end: int, block: int | None = None):
        self.file, self.data, self.place, self.end = file, data, start, end
        self.block = block  # where the block of unpacked bytes begins in the file

    def __bool__(self) -> bool:
        return self.place < self.end

    def fault(self, what: str) -> ValueError:
        offset = self.place if self.block is None else self.block
        where = f"{self.file}: damaged at byte {offset}"
        return ValueError(f"{where}: {what}: copy or download the checkpoint again")

    def part(self, size: int) -> Cursor:
        """A cursor of the next `size` bytes, which are passed."""
        if size > self.end - self.place:
            raise self.fault(f"{size} bytes are said to follow, {self.end - self.place} do")
        part = Cursor(self.file, self.data, self.place, self.place + size, self.block)
        self.place += size
        return part

    def bytes(self, size: int) -> bytes:
        return self.part(size).rest()

    def rest(self) -> bytes:
        return self.data[self.place : self.end]

    def fixed(self, size: int) -> int:
        return int.from_bytes(self.bytes(size), "little")

    def varint(self, bits: int = 64) -> int:
        """A number in bytes of seven bits, the lowest first."""
        value = shift = 0
        while True:
            if self.place >= self.end:
                raise self.fault("it ends within a number")
            byte = self.data[self.place]
            value |= (byte & 127) << shift
            if value >> bits:
                raise self.fault(f"a number of more than {bits} bits")
            self.place += 1
            if byte < 128:
                return value
            shift += 7
            if shift >= 70:
                raise self.fault("a number of more than 10 bytes")


def varint(value: int) -> bytes:
    """
    >>> varint(300)
    b'\\xac\\x02'
    """
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def read_table(file: Path) -> Iterator[tuple[bytes, Cursor]]:
    """The keys of a table in order, each with its value.

    Errors: ValueError with file and byte for damage or a table that no writer would make; OSError.
    """
    table, passed, last = _Table(file), 0, None
    for _, place in table.entries(table.index):
        offset, size = table.place(place)
        if offset < passed:
            raise place.fault(f"the block at {offset} begins before the one before it ends")
        passed = offset + size + TRAILER
        for key, value in table.entries(table.block(offset, size)):
            if last is not None and key <= last:
                raise value.fault(f"key {key[:80]!r} does not come after {last[:80]!r}")
            last = key
            yield key, value


class _Table:
    def __init__(self, file: Path) -> None:
        if (size := file.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{file}: an index of {size} bytes: none of a BERT has {MOST_BYTES}")
        self.file, self.data = file, file.read_bytes()
        self.end = len(self.data) - FOOTER  # of the blocks
        if self.end < 0 or not self.data.endswith(MAGIC):
            raise ValueError(
                f"{file}: no index of a TensorFlow checkpoint, or cut off: {len(self.data)} bytes "
                "without the magic number at the end: copy or download the checkpoint again"
            )
        self.keys_left, self.room = MOST_KEYS * len(self.data), MOST_BYTES
        footer = Cursor(file, self.data, self.end, len(self.data) - len(MAGIC))
        self.place(footer)  # of an index of filters, which TensorFlow has none of
        self.index = self.block(*self.place(footer))

    def place(self, cursor: Cursor) -> tuple[int, int]:
        """Offset and size of a block."""
        offset, size = cursor.varint(), cursor.varint()
        if offset + size + TRAILER > self.end:
            fault = f"a block of {size} bytes at {offset}, but the blocks end at {self.end}"
            raise cursor.fault(fault)
        return offset, size

    def block(self, offset: int, size: int) -> Cursor:
        """The entries of a block, unpacked."""
        stored = Cursor(self.file, self.data, offset, offset + size + TRAILER)
        body = stored.part(size)
        kind, checksum = stored.fixed(1), stored.fixed(4)
        if masked_crc32c(self.data[offset : offset + size + 1]) != checksum:
            raise body.fault(f"the {size} bytes from here do not have their checksum")
        if kind == SNAPPY:
            unpacked = unpack_snappy(body, self.room)
            self.room -= len(unpacked)
            body = Cursor(self.file, unpacked, 0, len(unpacked), offset)
        elif kind != PLAIN:
            raise body.fault(f"a block packed by method {kind}, which is unknown")
        starts = int.from_bytes(body.rest()[-4:], "little")
        if 4 * starts + 4 > body.end - body.place:
            raise body.fault(f"a block of {body.end - body.place} bytes with {starts} starts")
        body.end -= 4 * starts + 4
        return body

    def entries(self, block: Cursor) -> Iterator[tuple[bytes, Cursor]]:
        key = b""
        while block:
            shared, own, size = block.varint(32), block.varint(32), block.varint(32)
            if shared > len(key):
                raise block.fault(f"{shared} bytes of a key of {len(key)}")
            self.keys_left -= shared + own
            if self.keys_left < 0:
                raise block.fault("the keys take many times the room of the file")
            key = key[:shared] + block.bytes(own)
            yield key, block.part(size)


def unpack_snappy(packed: Cursor, most: int) -> bytes:
    """The bytes that snappy packed, at most so many.

    Errors: ValueError, before memory is taken for a false size.
    """
    import pyarrow

    whole = packed.rest()
    size = packed.varint(32)
    if size > MOST_SNAPPY * (packed.end - packed.place):
        raise packed.fault(f"a packed block that is said to hold {size} bytes, which it cannot")
    if size > most:
        raise packed.fault(f"a packed block of {size} bytes, which makes more than {MOST_BYTES}")
    try:
        return pyarrow.decompress(whole, size, codec="snappy", asbytes=True)
    except OSError as error:
        raise packed.fault("a packed block that snappy cannot unpack") from error


def table_bytes(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A table of keys, which must ascend, with their values; its blocks are not packed."""
    out, index, block = bytearray(), _Block(1), _Block(RESTART_INTERVAL)
    for key, value in items:
        assert not block.key or key > block.key, "keys must ascend"
        block.add(key, value)
        if len(block.data) >= BLOCK_SIZE:
            index.add(key, _append(out, block))
            block = _Block(RESTART_INTERVAL)
    if block.data:
        index.add(block.key, _append(out, block))
    places = _append(out, _Block(1)) + _append(out, index)
    return bytes(out) + places.ljust(FOOTER - len(MAGIC), b"\0") + MAGIC


class _Block:
    """A block under way: every so many entries a key is written whole."""

    def __init__(self, interval: int) -> None:
        self.interval, self.count, self.key = interval, 0, b""
        self.data, self.starts = bytearray(), [0]

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self.count and self.count % self.interval == 0:
            self.starts.append(len(self.data))
        elif self.count:
            limit = min(len(key), len(self.key))
            differing = (k for k in range(limit) if key[k] != self.key[k])
            shared = next(differing, limit)
        sizes = varint(shared) + varint(len(key) - shared) + varint(len(value))
        self.data += sizes + key[shared:] + value
        self.key, self.count = key, self.count + 1


def _append(out: bytearray, block: _Block) -> bytes:
    """Append a block to a table; its place, as the index has it."""
    offset = len(out)
    numbers = [*block.starts, len(block.starts)]
    out += block.data + b"".join(number.to_bytes(4, "little") for number in numbers)
    size = len(out) - offset
    out.append(PLAIN)
    out += masked_crc32c(bytes(out[offset:])).to_bytes(4, "little")
    return varint(offset) + varint(size)
