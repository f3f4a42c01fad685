"""Blocks of a product are NumPy's, exactly in integers, by every instruction this machine has."""

import numpy as np
import pytest
from numba import njit

from bertsmith.model.kernels.llvm import blocks
from bertsmith.model.kernels.llvm.blocks import (
    GROUP,
    address,
    begin,
    block,
    cpu_features,
    end,
    packed,
    transpose_words,
)

NEEDS = [
    ("uint8", "avx512vnni"),
    ("int8", "amx-int8"),
    ("int16", "avx2"),
    ("uint16", "avx512bf16"),
    ("uint16", "amx-bf16"),
    ("float32", None),
]


def multiplied(like, rows, weight, sums, groups, count):
    begin(like)
    steps = rows.shape[1] * rows.itemsize, len(weight) // groups * weight.itemsize
    block(
        *(like, address(rows, 0), steps[0], address(weight, 0), steps[1]),
        *(address(sums, 0), 4 * 32, groups, count),
    )
    end(like)


@pytest.mark.parametrize(("name", "needs"), NEEDS)
def test_a_block_is_numpys_product(monkeypatch, name, needs):
    if needs not in (None, *cpu_features()):
        pytest.skip(f"this processor has no {needs}")
    if needs == "amx-int8":
        assert blocks.integer_dtype() == np.int8  # asks Linux for the tiles
    if needs == "amx-bf16":
        assert blocks.has_bf16_blocks() and blocks.in_tiles("uint16")
    if needs == "avx512bf16":
        monkeypatch.setattr(blocks, "_has_bf16_tiles", lambda: False)
    multiply = njit(multiplied)  # compiled here, for this instruction
    for count in (1, 8, 17, 32):
        check(multiply, np.dtype(name), count)


def test_tiles_want_64_inputs_else_vnni_multiplies(monkeypatch):
    monkeypatch.setattr(blocks, "_amx_allowed", lambda: True)
    monkeypatch.setattr(blocks, "cpu_features", lambda: {"amx-int8", "avx512vnni", "avx2"})
    chosen = blocks.integer_dtype.__wrapped__
    assert chosen() == chosen(64, 384) == np.int8 and chosen(64, 96) == np.uint8
    monkeypatch.setattr(blocks, "cpu_features", lambda: {"avx2"})
    assert chosen(64) == np.int16
    monkeypatch.setattr(blocks, "cpu_features", lambda: set())
    assert chosen(64) is None


def check(multiply, dtype, count):
    inputs, name = 192, dtype.name
    random = np.random.default_rng(count)
    rows = random.integers(0, 256, (32, inputs))
    rows[0], rows[-1] = 255, 0  # the extremes, which must not saturate
    weight = random.integers(-128, 128, (32, inputs))
    weight[0], weight[1] = 127, -128
    if name == "uint16":  # bf16 holds whole numbers up to 256
        x, w = (bf16(numbers) for numbers in (rows, weight))
    else:
        x = rows.astype(np.uint8 if name == "int8" else dtype).view(dtype)
        w = weight.astype(dtype if name == "float32" else np.int8)
    w = packed(w, dtype)
    sums = np.full((32, 32), -7, np.float32 if name in ("float32", "uint16") else np.int32)
    multiply(np.zeros(1, dtype), x, w, sums, inputs // GROUP[name], count)
    assert (sums[:count] == (rows @ weight.T)[:count]).all()  # below 2^24: exact in float32


def bf16(numbers):
    """The bits of numbers that need no rounding."""
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@njit
def transposed(source, target):
    steps = source.shape[1] * 4, target.shape[1] * 4
    transpose_words(address(source, 0), steps[0], address(target, 0), steps[1])


def test_a_square_of_words_is_transposed():
    source = np.arange(20 * 24, dtype=np.int32).reshape(20, 24)
    target = np.full((17, 18), -1, np.int32)
    transposed(source, target)
    assert (target[:16, :16] == source[:16, :16].T).all()
    assert (target[16:] == -1).all() and (target[:, 16:] == -1).all()
