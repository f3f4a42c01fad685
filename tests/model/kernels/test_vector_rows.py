"""Softmax, LayerNorm and products in vectors of 16, beside NumPy and PyTorch in float64."""

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
    normalize_row,
    scalar_product,
    softmax_row,
)


@njit
def softmaxed(row, length, scale):
    softmax_row(address(row, 0), length, scale)


@njit
def normalized(row, norm, eps):
    size = len(row)
    normalize_row(address(row, 0), address(norm, 0), address(norm, size), size, eps)


@njit
def product_of(a, b):
    return scalar_product(address(a, 0), address(b, 0), len(a))


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


@pytest.mark.parametrize("size", [32, 96, 1024])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_layer_norm(size, mean):
    random = np.random.default_rng(size)
    row = random.normal(mean, 3, size).astype(np.float32)
    norm = random.normal(size=(2, size)).astype(np.float32)
    x = torch.tensor(row, dtype=torch.float64)
    weight, bias = torch.tensor(norm, dtype=torch.float64)
    expected = torch.nn.functional.layer_norm(x, (size,), weight, bias, eps=1e-12)
    normalized(row, norm, np.float32(1e-12))
    # a mean of 100 is known to 4e-6 in float32, on numbers that spread by 3
    np.testing.assert_allclose(row, expected, atol=2e-5 if mean else 3e-6)


@pytest.mark.parametrize("size", [32, 96, 1024])
def test_scalar_product(size):
    a, b = np.random.default_rng(size).normal(size=(2, size)).astype(np.float32)
    expected = a.astype(np.float64) @ b
    assert abs(product_of(a, b) - expected) < 1e-6 * np.abs(a * b).sum()


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
