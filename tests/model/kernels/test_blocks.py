"""Blocks of a product are NumPy's, exactly in integers, by every instruction this machine has."""

import numpy as np
import pytest
from numba import njit

from bertsmith.model.kernels import blocks
from bertsmith.model.kernels.blocks import (
    GROUP,
    address,
    begin,
    block,
    cpu_features,
    end,
    packed,
)

NEEDS = {"uint8": "avx512vnni", "int8": "amx-int8", "int16": "avx2", "float32": None}


@njit
def multiplied(like, rows, weight, sums, groups, count):
    begin(like)
    steps = rows.shape[1] * rows.itemsize, len(weight) // groups * weight.itemsize
    block(
        *(like, address(rows, 0), steps[0], address(weight, 0), steps[1]),
        *(address(sums, 0), 4 * 32, groups, count),
    )
    end(like)


@pytest.mark.parametrize("count", [1, 8, 17, 32])
@pytest.mark.parametrize("name", NEEDS)
def test_a_block_is_numpys_product(name, count):
    if NEEDS[name] not in (None, *cpu_features()):
        pytest.skip(f"this processor has no {NEEDS[name]}")
    dtype, inputs = np.dtype(name), 192
    if name == "int8":
        assert blocks.integer_dtype() == np.int8  # asks Linux for the tiles
    random = np.random.default_rng(count)
    rows = random.integers(0, 256, (32, inputs))
    rows[0], rows[-1] = 255, 0  # the extremes, which must not saturate
    weight = random.integers(-128, 128, (32, inputs))
    weight[0], weight[1] = 127, -128
    kept = np.uint8 if name == "int8" else dtype
    x = rows.astype(kept).view(dtype)
    w = packed(weight.astype(dtype if name == "float32" else np.int8), dtype)
    sums = np.full((32, 32), -7, np.float32 if name == "float32" else np.int32)
    multiplied(np.zeros(1, dtype), x, w, sums, inputs // GROUP[name], count)
    assert (sums[:count] == (rows @ weight.T)[:count]).all()  # below 2^24: exact in float32
