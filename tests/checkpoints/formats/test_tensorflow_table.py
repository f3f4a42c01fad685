"""The index's format: tables that leveldb's rules allow, and what is refused."""

import random

import numpy as np
import pyarrow as pa
import pytest

from bertsmith.checkpoints.formats.crc32c import crc32c
from bertsmith.checkpoints.formats.tensorflow_table import (
    Cursor,
    read_table,
    table_bytes,
    unpack_snappy,
    varint,
)

from ...tiny import write
from .crafted import block, checked, packed, place, table


@pytest.mark.parametrize(
    ("data", "checksum"),  # RFC 3720, B.4, and the check value of every catalogue of CRCs
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_checksum_of_known_bytes(data, checksum):
    assert crc32c(data) == checksum
    shifted = np.frombuffer(b"x" + data, np.uint8)[1:]  # begins at an odd address
    assert crc32c(shifted) == checksum


@pytest.fixture
def read(tmp_path):
    """What a table of these bytes holds."""

    def read(data):
        found = read_table(write(tmp_path / "table.index", data))
        return [(key, value.rest()) for key, value in found]

    return read


def test_a_table_of_many_blocks_is_read_as_written(read):
    items = [(b"key%07d" % k, bytes([k % 256]) * (k % 90)) for k in range(12_000)]
    data = table_bytes(items)
    assert data.count(b"key00") > 2  # of the index: more than one block of 256 KiB
    assert read(data) == items
    assert read(table_bytes([])) == []


ITEMS = [(b"", b"first"), (b"abc", b"1"), (2, b"d", b"2"), (b"b", b"")]
READ = [(b"", b"first"), (b"abc", b"1"), (b"abd", b"2"), (b"b", b"")]


@pytest.mark.parametrize(
    "data",
    [
        table(checked(block(ITEMS))),
        table(packed(block(ITEMS))),
        table(checked(block(ITEMS[:2])), packed(block([(b"abd", b"2"), ITEMS[3]]))),
        table(checked(block(ITEMS)), checked(block([]))),
        table(checked(block(ITEMS, starts=()))),
    ],
)
def test_tables_made_by_hand(read, data):
    assert read(data) == READ


GOOD = checked(block(ITEMS))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "without the magic number"),
        (table(GOOD)[:-1], "without the magic number"),
        (table(GOOD)[-40:], "without the magic number"),
        (table(bytes([GOOD[0] ^ 1]) + GOOD[1:]), "at byte 0: the 32 bytes from here do not have"),
        (table(checked(block(ITEMS), 2)), "at byte 0: a block packed by method 2"),
        (table(checked(b"\0\0\0")), "at byte 0: a block of 3 bytes with 0 starts"),
        (table(checked(block(ITEMS, starts=[0])[:-4] + b"\xff" * 4)), "with 4294967295 starts"),
        (table(checked(block([(b"a", b""), (2, b"b", b"")]))), "at byte 7: 2 bytes of a key of 1"),
        (table(checked(block([(b"b", b""), (b"a", b"")]))), "b'a' does not come after b'b'"),
        (table(checked(block([(b"a", b""), (b"a", b"")]))), "b'a' does not come after b'a'"),
        (table(GOOD, GOOD), "b'' does not come after b'b'"),
        (table(checked(b"\0\xff\xff\xff\xff\xff" + bytes(4))), "a number of more than 32 bits"),
        (table(checked(b"\0\5\1ab" + bytes(4))), "at byte 3: 5 bytes are said to follow, 2 do"),
        (table(checked(b"\0" + bytes(4))), "it ends within a number"),
        (table(checked(b"\x80" * 10 + b"\0" + bytes(4))), "a number of more than 10 bytes"),
        (
            table(GOOD, index=checked(block([(b"a", place(0, GOOD)), (b"b", place(0, GOOD))]))),
            "the block at 0 begins before the one before it ends",
        ),
        (
            table(GOOD, index=checked(block([(b"a", varint(2**63) + varint(2**63))]))),
            "a block of 9223372036854775808 bytes at 9223372036854775808",
        ),
        (table(GOOD, index=checked(block([(b"a", b"\xff" * 10)]))), "more than 64 bits"),
        (
            table(checked(varint(40_000_000) + bytes(20), 1)),
            "at byte 4: a packed block that is said to hold 40000000 bytes, which it cannot",
        ),
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused_with_the_place(read, data, fault):
    with pytest.raises(ValueError, match=r"table\.index: .*copy or download") as caught:
        read(data)
    assert fault in str(caught.value)


def test_keys_that_grow_by_a_byte_each_are_refused_before_they_fill_the_memory(read):
    """A table of 1 MB could have 250,000 keys that take 31 GB together."""
    items = [(k, b"a", b"") for k in range(60_000)]
    with pytest.raises(ValueError, match="take many times the room of the file"):
        read(table(checked(block(items))))
    empty = checked(block([]))
    places = [(k, b"a", place(k * len(empty), empty)) for k in range(3_000)]
    with pytest.raises(ValueError, match="take many times the room of the file"):
        read(table(*[empty] * 3_000, index=checked(block(places))))


def test_an_index_larger_than_any_is_not_read(read):
    with pytest.raises(ValueError, match="an index of 1048577 bytes"):
        read(bytes((1 << 20) + 1))
    half = [packed(block([(key, bytes(600_000))])) for key in (b"a", b"b")]
    assert len(read(table(half[0]))) == 1
    with pytest.raises(ValueError, match="a packed block of 600.* makes more than 1048576"):
        read(table(*half))


def snappy(data):
    return unpack_snappy(Cursor("table", data, 0, len(data)), 1 << 20)


def test_snappy_gives_what_its_own_library_packed():
    draws = random.Random(1)
    for size in (0, 1, 59, 60, 61, 300, 70_000):
        some = bytes(draws.choices(b"abc", k=size // 2)) + draws.randbytes(size - size // 2)
        for data in (some, some * 3, b"a" * size):
            assert snappy(pa.compress(data, codec="snappy", asbytes=True)) == data
    assert snappy(b"\x07\x00a\x17\x01\x00\x00\x00") == b"a" * 7  # a copy with four bytes


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x05\x00a\x01\x02", "that snappy cannot unpack"),
        (b"\x05\x00a\x01\x00", "that snappy cannot unpack"),
        (b"\x02\x00a\x01\x01", "that snappy cannot unpack"),
        (b"\x01\x04ab", "that snappy cannot unpack"),
        (b"\x05\x00a", "that snappy cannot unpack"),
        (b"\x05\x08a", "that snappy cannot unpack"),
        (b"\x05\xfc\xff\xff\xff\xff", "that snappy cannot unpack"),
        (b"\xff\xff\xff\xff\x0f" + b"a" * 99, "said to hold 4294967295 bytes"),
        (b"\xff\xff\xff\xff\xff\x0f", "a number of more than 32 bits"),
    ],
)
def test_damaged_snappy_is_refused(data, fault):
    with pytest.raises(ValueError, match=fault):
        snappy(data)
