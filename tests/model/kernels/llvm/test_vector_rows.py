"""Softmax, LayerNorm and products in vectors of 16, beside NumPy and PyTorch in float64."""

import numpy as np
import pytest
import torch
from numba import njit

from bertsmith.model.kernels.llvm import vector_rows
from bertsmith.model.kernels.llvm.blocks import address, cpu_features
from bertsmith.model.kernels.llvm.vector_rows import (
    GELU,
    GELU_TANH,
    PLAIN,
    RESIDUAL,
    exponential_row,
    finish,
    normalize_row,
    quantize_row,
    scalar_product,
    scale_row,
)

HAS_BF16 = [{}, *[{"avx512bf16"}] * ("avx512bf16" in cpu_features())]  # without, and with it


def softmaxed(row, length, scale, target):
    factor = exponential_row(address(row, 0), length, scale, target, address(target, 0))
    if target.itemsize == 4:
        scale_row(address(target, 0), len(target), factor)
    return factor


def quantized(row, target):
    return quantize_row(address(row, 0), target, address(target, 0), len(row))


@njit
def normalized(row, norm, eps):
    size = len(row)
    normalize_row(address(row, 0), address(norm, 0), address(norm, size), size, eps)


@njit
def product_of(a, b):
    return scalar_product(address(a, 0), address(b, 0), len(a))


@njit
def finished(sums, scale, low, columns, target, ending):
    likes = sums, target
    vectors = address(columns, 0), address(columns, 32), address(columns, 64)
    own, place = address(sums, 0), address(target, 0)
    if ending == PLAIN:
        finish(likes, own, scale, low, vectors, place, PLAIN)
    elif ending == GELU:
        finish(likes, own, scale, low, vectors, place, GELU)
    elif ending == GELU_TANH:
        finish(likes, own, scale, low, vectors, place, GELU_TANH)
    else:
        finish(likes, own, scale, low, vectors, place, RESIDUAL)


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 33, 512])
@pytest.mark.parametrize("scale", [0.125, 4.0])
def test_softmax_of_any_length(monkeypatch, length, scale):
    random = np.random.default_rng(length)
    row = random.normal(size=-(-length // 32) * 32).astype(np.float32) * 10
    row[length:] = 1e4  # what lies behind does not count
    expected = np.exp(scale * (row[:length].astype(np.float64) - row[:length].max()))
    expected /= expected.sum()
    for has_bf16 in HAS_BF16:
        monkeypatch.setattr(vector_rows, "cpu_features", lambda has=has_bf16: has)
        own, short = row.copy(), np.ones(len(row), np.uint16)
        factor = njit(softmaxed)(own.copy(), length, np.float32(scale), short)
        found = (short.astype(np.uint32) << 16).view(np.float32) * factor
        # bf16 has 8 bits
        np.testing.assert_allclose(found[:length], expected, rtol=2**-8, atol=1e-30)
        assert not short[length:].any()
    njit(softmaxed)(own, length, np.float32(scale), own)
    # the exponential is right to 4e-6
    np.testing.assert_allclose(own[:length], expected, rtol=2e-5, atol=1e-30)
    assert not own[length:].any()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_quantized_by_its_range(dtype, seed):
    row = np.random.default_rng(seed).normal(seed, 1 + seed, 96).astype(np.float32)
    target = np.zeros(96, dtype)
    scale, low = njit(quantized)(row, target)
    levels = target.view(np.uint8) if dtype == "int8" else target
    assert levels.min() == 0 and levels.max() == 255 and low == row.min()
    # half a step, and float32's rounding of the sum
    assert np.abs(scale * levels + low - row).max() <= scale * 0.501
    scale, low = njit(quantized)(np.full(32, 7, np.float32), target[:32])  # no range at all
    assert scale > 0 and low == 7 and not target[:32].any()


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_a_row_of_floats_is_rounded(monkeypatch, dtype):
    row = np.random.default_rng(0).normal(size=96).astype(np.float32)
    expected = torch.from_numpy(row)
    if dtype == "uint16":
        expected = expected.bfloat16()
    for has_bf16 in HAS_BF16:
        monkeypatch.setattr(vector_rows, "cpu_features", lambda has=has_bf16: has)
        target = np.zeros(96, dtype)
        assert njit(quantized)(row, target) == (1, 0)
        assert target.tobytes() == expected.view(torch.uint8).numpy().tobytes()


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
