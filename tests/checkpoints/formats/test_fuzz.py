"""Damaged index files: each is read or refused with a ValueError, in bounded memory."""

import random
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bertsmith.checkpoints.formats.tensorflow_bundle import Bundle
from bertsmith.checkpoints.formats.tensorflow_table import Cursor, varint

from .crafted import HEADER as header
from .crafted import block, checked, entry, packed, table, write_crafted

GOLDEN = Path(__file__).parent / "golden"
SPARE = 16 << 10  # bytes: files of 300 bytes are among the damaged ones
NUMBERS = [2**k + d for k in (0, 7, 14, 31, 32, 62, 63, 64) for d in (-1, 0, 1)]


def entries_of(index):
    """The one block of entries in a file of TensorFlow's: the next one begins five bytes on."""
    footer = Cursor(index, index.read_bytes(), index.stat().st_size - 48, index.stat().st_size)
    return index.read_bytes()[: footer.varint() - 5]


def damaged(content, draws):
    """Bytes changed, put in, taken out, moved; numbers put in that are at a limit."""
    content = bytearray(content)
    for _ in range(draws.choice((1, 1, 1, 2, 5, 20))):
        at, end = draws.randrange(len(content) + 1), draws.randrange(1, 9)
        kind = draws.randrange(6)
        if kind == 0 and at < len(content):
            content[at] = draws.randrange(256)
        elif kind == 1 and at < len(content):
            content[at] ^= 1 << draws.randrange(8)
        elif kind == 2:
            content[at:at] = draws.randbytes(end)
        elif kind == 3:
            del content[at : at + end]
        elif kind == 4:
            content[at : at + end] = varint(draws.choice(NUMBERS))
        else:
            source = draws.randrange(len(content) + 1)
            content[at : at + end] = content[source : source + end * 8]
    return bytes(content)


def damaged_index(good, draws):
    """A damaged file; mostly with the right checksums, which would hide the rest."""
    kind = draws.randrange(8)
    if kind == 0:
        return damaged(good["whole"], draws)
    if kind == 1:
        return good["whole"][: draws.randrange(len(good["whole"]))]
    if kind == 2:
        return table(checked(damaged(packed(good["block"])[:-5], draws), 1))
    if kind == 3:
        return table(packed(damaged(good["block"], draws)))
    if kind == 4:
        places = damaged(good["places"], draws)
        return table(checked(good["block"]), index=checked(places))
    return table(checked(damaged(good["block"], draws)))


def read_all(prefix):
    bundle = Bundle(prefix)
    return sum(bundle.read(name).nbytes for name in bundle.names)


def peak_of(prefix):
    """(Bytes of memory at most, what was wrong) of reading a checkpoint whole."""
    tracemalloc.reset_peak()
    before, fault = tracemalloc.get_traced_memory()[0], ""
    try:
        read_all(prefix)
    except ValueError as error:
        fault = str(error)
    return tracemalloc.get_traced_memory()[1] - before, fault


@pytest.fixture(params=["various", "shards", "classifier/bert_model.ckpt"])
def good(request, tmp_path):
    """An undamaged checkpoint: its files, their parts, and the memory that reading it takes."""
    for file in GOLDEN.glob(f"{request.param}.*"):
        shutil.copy(file, tmp_path)
    prefix = tmp_path / Path(request.param).name
    index = prefix.with_name(f"{prefix.name}.index")
    content, whole = entries_of(index), index.read_bytes()
    places = block([(b"z", varint(0) + varint(len(content)))])
    data = sum(file.stat().st_size for file in Bundle(prefix).shards())
    good = {"prefix": prefix, "index": index, "whole": whole, "data": data}
    tracemalloc.start()
    peak = max(peak_of(prefix)[0] for _ in range(2))
    yield good | {"block": content, "places": places, "peak": peak}
    tracemalloc.stop()


@pytest.mark.parametrize("count", [150, pytest.param(34_000, marks=pytest.mark.slow)])
def test_damaged_index_files(good, count):
    draws, refused, most = random.Random(count), 0, 0
    for _ in range(count):
        index = damaged_index(good, draws)
        good["index"].write_bytes(index)
        peak, fault = peak_of(good["prefix"])
        refused += bool(fault)
        assert not fault or str(good["prefix"]) in fault, fault
        # the undamaged one takes objects of Python's, a damaged one an exception besides
        allowed = good["peak"] + 2 * (len(index) + good["data"]) + SPARE
        if peak > allowed:  # a table of Python's own grew, as that of interned names does at times
            peak, _ = peak_of(good["prefix"])
        most = max(most, peak - good["peak"])
        assert peak <= allowed, index
    assert refused > count / 2
    print(f"{count}: {refused} refused, {most} bytes more than the undamaged file's at most")


def test_a_tensor_named_a_thousand_times_is_read_once(tmp_path):
    """An index of 60 KB that has a shard of 1 MB summed a thousand times: 1 GB of checksums."""
    data = np.ones(250_000, "<f4").tobytes()
    one = entry([250_000], 0, data)
    items = [(b"%04d" % k, one) for k in range(1_000)]
    with pytest.raises(ValueError, match=r"damaged at byte \d+: a tensor at 0 of .* before"):
        Bundle(write_crafted(tmp_path / "x", items, data))


def test_a_header_of_many_shards_looks_for_none_of_them(tmp_path):
    many = header.replace(b"\x08\x01", b"\x08" + varint(2**31 - 1), 1)
    assert Bundle(write_crafted(tmp_path / "x", [], b"", many)).names == []
