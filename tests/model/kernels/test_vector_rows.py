"""Softmax and the end of a product in vectors of 16, beside NumPy in float64."""

import numpy as np
import pytest
import torch
from numba import njit

from bertsmith.model.kernels.blocks import address
from bertsmith.model.kernels.vector_rows import (
    GELU,
    GELU_TANH,
    PLAIN,
    RESIDUAL,
    finish,
    softmax_row,
)


@njit
def softmaxed(row, length, scale):
    softmax_row(address(row, 0), length, scale)


@njit
def finished(sums, scale, low, columns, target, ending):
    vectors = address(columns, 0), address(columns, 32), address(columns, 64)
    own, place = address(sums, 0), address(target, 0)
    if ending == PLAIN:
        finish(sums, own, scale, low, vectors, place, PLAIN)
    elif ending == GELU:
        finish(sums, own, scale, low, vectors, place, GELU)
    elif ending == GELU_TANH:
        finish(sums, own, scale, low, vectors, place, GELU_TANH)
    else:
        finish(sums, own, scale, low, vectors, place, RESIDUAL)


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 33, 512])
@pytest.mark.parametrize("scale", [0.125, 4.0])
def test_softmax_of_any_length(length, scale):
    random = np.random.default_rng(length)
    row = random.normal(size=-(-length // 16) * 16).astype(np.float32) * 10
    row[length:] = 1e4  # what lies behind does not count
    expected = np.exp(scale * (row[:length].astype(np.float64) - row[:length].max()))
    softmaxed(row, length, np.float32(scale))
    # the exponential is right to 4e-6
    np.testing.assert_allclose(row[:length], expected / expected.sum(), rtol=2e-5, atol=1e-30)
    assert not row[length:].any()


@pytest.mark.parametrize("kind", [np.int32, np.float32])
@pytest.mark.parametrize("ending", [PLAIN, GELU, GELU_TANH, RESIDUAL])
@pytest.mark.parametrize("seed", range(5))
def test_sums_become_numbers(kind, ending, seed):
    random = np.random.default_rng(seed)
    sums = random.integers(-9000, 9000, (1, 32)).astype(kind)
    columns = random.normal(size=(3, 32)).astype(np.float32)
    target = random.normal(size=32).astype(np.float32)
    scale, low = np.float32(1e-3), np.float32(-0.4)
    value = sums[0] * (float(scale) * columns[0]) + float(low) * columns[1] + columns[2]
    expected = {
        PLAIN: lambda: value,
        GELU: lambda: torch.nn.functional.gelu(torch.tensor(value)).numpy(),
        GELU_TANH: lambda: torch.nn.functional.gelu(
            torch.tensor(value), approximate="tanh"
        ).numpy(),
        RESIDUAL: lambda: target + value,
    }[ending]()
    finished(sums, scale, low, columns, target, ending)
    # of integers GELU is a shorter polynomial, far below a step of 8 bits
    short = kind == np.int32 and ending in (GELU, GELU_TANH)
    np.testing.assert_allclose(target, expected, atol=4e-5 if short else 1e-5)
