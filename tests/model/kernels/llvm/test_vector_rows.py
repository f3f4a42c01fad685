"""Softmax, LayerNorm and products in vectors of 16, beside NumPy and PyTorch in float64."""

import numpy as np
import pytest
import torch
from numba import njit

from bertsmith.model.kernels.llvm import blocks, vector_rows
from bertsmith.model.kernels.llvm.blocks import (
    address,
    cpu_features,
    packed,
)
from bertsmith.model.kernels.llvm.unpadded_encoder import group
from bertsmith.model.kernels.llvm.vector_rows import (
    GELU,
    GELU_TANH,
    PLAIN,
    RESIDUAL,
    exponential_row,
    linear_block,
    normalize_row,
    quantize_row,
    scalar_product,
    scale_row,
)

from ..harness import stored_block

HAS_BF16 = [{}, *[{"avx512bf16"}] * ("avx512bf16" in cpu_features())]  # without, and with it


def softmaxed(row, length, scale, target):
    factor = exponential_row(address(row, 0), length, scale, target, address(target, 0))
    if target.itemsize == 4:
        scale_row(address(target, 0), len(target), factor)
    return factor


def quantized(row, target):
    return quantize_row((row, target), address(row, 0), None, address(target, 0), len(row))


@njit
def normalized(row, norm, eps):
    size = len(row)
    normalize_row(address(row, 0), address(norm, 0), address(norm, size), size, eps)


@njit
def product_of(a, b):
    return scalar_product(address(a, 0), address(b, 0), len(a))


def linear(rows, weight, sums, ranges, columns, target, ending, count):
    groups, step = rows.shape[1] // group(rows), 32 * group(rows) * weight.itemsize
    likes, row_bytes = (rows, target), rows.shape[1] * rows.itemsize
    a, b = (address(rows, 0), row_bytes), (address(weight, 0), step)
    shape, own = (groups, count), (address(ranges, 0), address(ranges, ranges.shape[1]))
    vectors = address(columns, 0), address(columns, 32), address(columns, 64)
    place, total = (address(target, 0), target.shape[1] * target.itemsize), address(sums, 0)
    if ending == PLAIN:
        linear_block(likes, a, b, total, shape, own, vectors, place, PLAIN)
    elif ending == GELU:
        linear_block(likes, a, b, total, shape, own, vectors, place, GELU)
    elif ending == GELU_TANH:
        linear_block(likes, a, b, total, shape, own, vectors, place, GELU_TANH)
    else:
        linear_block(likes, a, b, total, shape, own, vectors, place, RESIDUAL)


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


@pytest.mark.parametrize("ending", [PLAIN, GELU, GELU_TANH, RESIDUAL])
@pytest.mark.parametrize("count", [1, 7, 8, 32])
@pytest.mark.parametrize("path", ["uint8", "int16", "float32", "tiles"])
def test_a_block_of_a_linear_layer(monkeypatch, path, count, ending):
    dtype = np.dtype("uint8" if path == "tiles" else path)
    needs = {"uint8": "avx512vnni", "int16": "avx2"}.get(dtype.name)
    if needs and needs not in cpu_features():
        pytest.skip(f"this processor has no {needs}")
    if path == "tiles":  # that they store their sums is all that is different
        monkeypatch.setattr(blocks, "in_tiles", lambda dtype: True)
        monkeypatch.setattr(blocks, "_tile_block", stored_block)
    random = np.random.default_rng(count)
    rows, weight = random.integers(0, 256, (32, 96)), random.integers(-127, 128, (32, 96))
    columns = random.normal(size=(3, 32)).astype(np.float32)
    ranges = random.normal(size=(2, 32)).astype(np.float32) * np.float32([[1e-5], [0.4]])
    target = random.normal(size=(32, 64)).astype(np.float32)
    value = (rows @ weight.T) * (ranges[0][:, None].astype(float) * columns[0])
    value += ranges[1][:, None].astype(float) * columns[1] + columns[2]
    expected = target.copy()
    expected[:count, :32] = {
        PLAIN: lambda: value,
        GELU: lambda: torch.nn.functional.gelu(torch.tensor(value)).numpy(),
        GELU_TANH: lambda: torch.nn.functional.gelu(
            torch.tensor(value), approximate="tanh"
        ).numpy(),
        RESIDUAL: lambda: target[:, :32] + value,
    }[ending]()[:count]
    packing = packed(weight.astype(dtype if path == "float32" else np.int8), dtype)
    sums = np.empty((32, 32), np.float32 if path == "float32" else np.int32)
    njit(linear)(rows.astype(dtype), packing, sums, ranges, columns, target, ending, count)
    # of integers GELU is a shorter polynomial, far below a step of 8 bits
    short = path != "float32" and ending in (GELU, GELU_TANH)
    np.testing.assert_allclose(target, expected, atol=4e-5 if short else 1e-5)


def quantized_bf16(row, factors, target):
    likes, place = (row, target), address(target, 0)
    if len(factors):
        return quantize_row(likes, address(row, 0), address(factors, 0), place, len(row))
    return quantize_row(likes, address(row, 0), None, place, len(row))


@pytest.mark.parametrize("count", [0, 96])
def test_a_row_of_bf16_is_quantized_with_its_factors(count):
    random = np.random.default_rng(count)
    row, target = torch.from_numpy(random.normal(size=96)).bfloat16(), np.empty(96, np.uint8)
    factors = random.normal(size=count).astype(np.float32)
    quantize, row[7] = njit(quantized_bf16), 0
    scale, low = quantize(row.view(torch.uint16).numpy(), factors, target)
    wide = row.float().numpy() * (factors if count else 1)
    assert np.abs(scale * target + low - wide).max() <= scale * 0.501
    assert scale == pytest.approx(np.ptp(wide) / 253)
    assert abs(scale * target[7] + low) < 1e-5 * scale  # 0 is a level
    for bad in (np.nan, np.inf, -np.inf):
        row[5] = bad
        assert not np.isfinite(quantize(row.view(torch.uint16).numpy(), factors, target)[0])
