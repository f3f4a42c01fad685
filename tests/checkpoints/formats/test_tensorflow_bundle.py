"""Checkpoints that TensorFlow wrote, ours, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from bertsmith.checkpoints.formats.tensorflow_bundle import Bundle, slice_key, write_bundle

from .crafted import block, checked, entry, message, shape, table, write_crafted
from .make_golden import SLICES, various

GOLDEN = Path(__file__).parent / "golden"
ONES = np.ones(4, "<f4").tobytes()
TWOS = (2 * np.ones(4, "<f4")).tobytes()


def same(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_every_type_and_slice_that_tensorflow_wrote():
    bundle, expected = Bundle(GOLDEN / "various"), various()
    assert SLICES.keys() <= expected.keys()
    assert sorted(bundle.names) == sorted([*expected, "bfloat16"])
    for name, values in expected.items():
        assert bundle.shape(name) == values.shape
        same(bundle.read(name), values)
    same(bundle.read("bfloat16"), np.float32([1.5, -2, 3.140625]))  # 3.14159 in eight bits


def test_a_checkpoint_of_two_shards():
    bundle = Bundle(GOLDEN / "shards")
    assert len(bundle.shards()) == 2
    for k in range(1, 8):
        same(bundle.read(f"name{k}"), np.full(k, k, np.float32))


def test_what_we_write_is_read_back(tmp_path):
    arrays = various() | {f"{k:03}/" + "long" * 90: np.float32(k) for k in range(999)}
    arrays |= {"turned": np.arange(6.0).reshape(2, 3).T, "big": np.arange(5, dtype=">i4")}
    write_bundle(tmp_path / "a.ckpt", arrays)
    bundle = Bundle(tmp_path / "a.ckpt")
    assert bundle.names == sorted(arrays)
    for name, values in arrays.items():
        same(bundle.read(name), values.astype(values.dtype.newbyteorder("=")))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.ckpt.data-00000-of-00001",
        "a.ckpt.index",
    ]


def test_big_endian_numbers_and_gaps(tmp_path):
    data = bytes(7) + np.float32([1, 2]).astype(">f4").tobytes() + bytes(5) + b"\0\3"
    items = [
        (b"a", entry([2], 7, data[7:15])),
        (b"b", entry([], 20, data[20:], dtype=5)),
        (b"c", entry([0, 3], 0, b"")),
    ]
    header = message(f1=1, f2=1, f3=message(f1=1))
    bundle = Bundle(write_crafted(tmp_path / "x", items, data, header))
    same(bundle.read("a"), np.float32([1, 2]))
    same(bundle.read("b"), np.int16(3))
    same(bundle.read("c"), np.zeros((0, 3), np.float32))


def test_unknown_fields_are_passed_over(tmp_path):
    more = message(f9=b"text", f10=7) + b"\x59" + bytes(8) + b"\x65" + bytes(4)
    items = [(b"a", entry([4], 0, ONES) + more)]
    same(Bundle(write_crafted(tmp_path / "x", items, ONES)).read("a"), np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("name", "extents", "key"),  # worked out by hand from ordered_code.cc
    [
        ("a\0\xff", ((0, 64),), b"\0a\0\xff\xc3\xbf\0\1\1\1\x80\xc0\x40"),
        ("", ((8192, 1),), b"\0\0\1\1\1\xe0\x20\0\x81"),
        ("s", (), b"\0s\0\1\0"),
    ],
)
def test_keys_of_slices(name, extents, key):
    assert slice_key(name, extents) == key


LAST = 2**63 - 16


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([entry([4], 32, ONES)], r"16 bytes from 32 on, but x\.data-00000-of-00001 has 32"),
        ([entry([4], LAST, ONES)], f"16 bytes from {LAST} on"),
        ([entry([4], 16, ONES, size=2**63 - 4)], "9223372036854775804 bytes from 16 on"),
        ([entry([4], -1, ONES)], "16 bytes from -1 on"),
        ([entry([4], 0, ONES, size=-16)], "-16 bytes from 0 on"),
        ([entry([4], 0, ONES), entry([4], 8, ONES)], "a tensor at 8 of x.* before another.* 16"),
        ([entry([4], 0, ONES), entry([4], 0, ONES)], "a tensor at 0 of x"),
        ([entry([3], 0, ONES)], r"16 bytes for a tensor of shape \[3\]"),
        ([entry([-4], 0, ONES)], r"shape \[-4\], which no array has"),
        ([entry([0, 2**62], 0, b"")], "which no array has"),
        ([entry([1] * 65, 0, ONES)], "which no array has"),
        ([entry([4], 0, ONES, f3=1)], "shard 1 of 1"),
        ([entry([4], 0, ONES, f3=-1)], "shard -1 of 1"),
        ([entry([4], 0, ONES) + b"\x03"], "a field of kind 3"),
        ([b"\x08"], "it ends within a number"),
        ([b"\x12\x05"], "5 bytes are said to follow, 0 do"),
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused_with_the_place(tmp_path, items, fault):
    named = [(bytes([97 + k]), value) for k, value in enumerate(items)]
    with pytest.raises(ValueError, match=r"x\.index: damaged at byte \d+: ") as caught:
        Bundle(write_crafted(tmp_path / "x", named, ONES + ONES))
    assert caught.match(fault)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (message(f1=1, f2=2), "byte order 2"),
        (message(f1=1, f3=message(f1=9, f2=2)), "a format of version 2, newer than 1"),
        (message(f3=message(f1=1)), "shard 0 of 0"),
        (message(f1=2**31 - 1), "x.data-00000-of-2147483647: missing, though x.index names it"),
    ],
)
def test_a_header_that_cannot_be(tmp_path, header, fault):
    with pytest.raises(ValueError, match=fault):
        Bundle(write_crafted(tmp_path / "x", [(b"a", entry([4], 0, ONES))], ONES, header))


def test_names_must_be_text_and_the_header_there(tmp_path):
    with pytest.raises(ValueError, match=r"name b'\\xff' is not UTF-8"):
        Bundle(write_crafted(tmp_path / "x", [(b"\xff", entry([4], 0, ONES))], ONES))
    headless = table(checked(block([(b"a", entry([4], 0, ONES))])))
    (tmp_path / "x.index").write_bytes(headless)
    with pytest.raises(ValueError, match="no header"):
        Bundle(tmp_path / "x")


def part(*extents):
    """A slice: (start, length) a dimension, None for all of it."""
    given = [message() if e is None else message(f1=e[0], f2=e[1]) for e in extents]
    return message(f1=given)


HALVES = (part((0, 4)), part((4, 4)))
KEYS = [slice_key("v", ((start, 4),)) for start in (0, 4)]
STORED = [(KEYS[0], entry([4], 0, ONES)), (KEYS[1], entry([4], 16, TWOS))]
WHOLE = {"f1": 1, "f2": shape(8)}


def test_slices_by_hand(tmp_path):
    items = [*STORED, (b"v", message(**WHOLE, f7=list(HALVES)))]
    bundle = Bundle(write_crafted(tmp_path / "x", items, ONES + TWOS))
    assert bundle.names == ["v"]
    same(bundle.read("v"), np.float32([1, 1, 1, 1, 2, 2, 2, 2]))


@pytest.mark.parametrize(
    ("stored", "whole", "fault"),
    [
        (STORED, message(**WHOLE, f7=[HALVES[0]]), "the slices of 'v' do not cover it"),
        (STORED, message(**WHOLE, f7=[HALVES[0]] * 2), "the slices of 'v' do not cover it"),
        (STORED[:1], message(**WHOLE, f7=list(HALVES)), r"no slice \[\(4, 4\)\] of 'v'"),
        (STORED, message(f1=2, f2=shape(8), f7=list(HALVES)), "no slice"),
        (STORED, message(f1=1, f2=shape(2**50), f7=list(HALVES)), "do not cover it"),
        (STORED, message(f1=1, f2=shape(7), f7=list(HALVES)), r"slice \[\(4, 4\)\] of 'v' has"),
        (STORED, message(f1=1, f2=shape(8, 1), f7=list(HALVES)), "a slice of 1 dimensions"),
        ([(KEYS[0], entry([2, 2], 0, ONES)), STORED[1]],
         message(**WHOLE, f7=list(HALVES)), "has another shape"),
    ],
)  # fmt: skip
def test_slices_that_do_not_make_up_a_tensor(tmp_path, stored, whole, fault):
    with pytest.raises(ValueError, match=fault):
        Bundle(write_crafted(tmp_path / "x", [*stored, (b"v", whole)], ONES + TWOS))


def test_slices_that_lie_over_one_another(tmp_path):
    """As many elements as the tensor has, but some of them twice."""
    second = slice_key("v", ((2, 4),))
    items = [STORED[0], (second, entry([4], 16, TWOS))]
    items.append((b"v", message(**WHOLE, f7=[HALVES[0], part((2, 4))])))
    bundle = Bundle(write_crafted(tmp_path / "x", items, ONES + TWOS))
    with pytest.raises(ValueError, match="the slices of 'v' do not cover it"):
        bundle.read("v")


def test_damaged_shards(tmp_path):
    prefix, shard = tmp_path / "x", tmp_path / "x.data-00000-of-00001"
    write_bundle(prefix, {"a": np.arange(4.0), "b": np.arange(5)})
    good = shard.read_bytes()
    shard.write_bytes(good[:40] + b"\xff" + good[41:])
    bundle = Bundle(prefix)
    same(bundle.read("a"), np.arange(4.0))
    with pytest.raises(ValueError, match="the 40 bytes of 'b' from byte 32 on do not have their"):
        bundle.read("b")
    shard.write_bytes(good[:40])
    with pytest.raises(ValueError, match="the 40 bytes of 'b' from byte 32 on"):  # cut off since
        bundle.read("b")
    with pytest.raises(ValueError, match="40 bytes from 32 on, but x.* has 40"):
        Bundle(prefix)
    shard.unlink()
    with pytest.raises(ValueError, match="x.data-00000-of-00001: missing"):
        Bundle(prefix)


def test_strings_are_listed_but_not_read(tmp_path):
    bundle = Bundle(write_crafted(tmp_path / "x", [(b"s", entry([1], 0, ONES, dtype=7))], ONES))
    assert bundle.names == ["s"]
    with pytest.raises(ValueError, match=r"'s' holds no numbers \(dtype 7\)"):
        bundle.read("s")
