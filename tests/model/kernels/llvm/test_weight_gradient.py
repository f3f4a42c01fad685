"""A weight's gradient of int8 is the product of bf16 as far as eight bits go."""

import math

import numpy as np
import pytest
import torch
from numba import njit
from torch import nn

from bertsmith.model.kernels.llvm import blocks, weight_gradient
from bertsmith.model.kernels.llvm.blocks import cpu_features
from bertsmith.model.kernels.llvm.weight_gradient import (
    PART,
    int8_weight_gradient,
    pack_part,
    pack_tokens,
)
from bertsmith.model.kernels.quantized_linear import Int8Linear, has_int8

from ..harness import error, run, stored_block

# A number is off by half a step, 1 / 254 of the largest of 128, and evenly so: 1 / 254 / sqrt(3).
# Of normal numbers that is 2.8 deviations: 0.64% of a deviation, twice, and 2^-9 of bf16: 0.9%.
PRODUCT = 0.012
TOKENS = [1, 3, PART - 1, PART, 2 * PART + 5]
multiplies = pytest.mark.skipif("avx512vnni" not in cpu_features(), reason="no int8 products")


def operands(tokens, outputs=64, inputs=192):
    torch.manual_seed(tokens)
    return torch.randn(tokens, outputs).bfloat16(), torch.randn(tokens, inputs).bfloat16()


def exact(gradient, x):
    return gradient.double().t() @ x.double()


@multiplies
@pytest.mark.parametrize("tokens", TOKENS)
def test_it_is_the_product_as_far_as_eight_bits_go(tokens):
    gradient, x = operands(tokens)
    found = int8_weight_gradient(gradient, x)
    assert found.dtype == torch.bfloat16 and found.shape == (64, 192)
    assert error(found, exact(gradient, x)) < PRODUCT


@multiplies
@pytest.mark.parametrize("tokens", TOKENS)
def test_of_whole_numbers_up_to_127_it_is_exact(tokens):
    random = np.random.default_rng(tokens)
    gradient, x = (
        torch.from_numpy(random.integers(-127, 128, (tokens, columns))).bfloat16()
        for columns in (64, 128)
    )
    for matrix in (gradient, x):
        matrix[::PART] = random.choice([-127, 127])  # so that every scale is 1
    assert torch.equal(int8_weight_gradient(gradient, x), exact(gradient, x).bfloat16())


@multiplies
def test_large_tokens_drown_no_others_but_those_beside_them():
    gradient, x = operands(4 * PART)
    gradient[:PART] *= 1000
    x[:PART] = 0  # the large ones add nothing
    assert error(int8_weight_gradient(gradient, x), exact(gradient, x)) < PRODUCT


@multiplies
def test_what_is_not_finite_stays_so():
    gradient, x = operands(2 * PART)
    gradient[3, 5], gradient[PART, 7], x[9, 11] = math.nan, -math.inf, math.inf
    found = int8_weight_gradient(gradient, x).isfinite()
    lost = torch.zeros(found.shape, dtype=torch.bool)
    lost[5], lost[7], lost[:, 11] = True, True, True
    assert torch.equal(~found, lost)


@pytest.mark.parametrize("tokens", [1, PART - 2, PART])
@pytest.mark.parametrize("shift", [0, 128])
def test_bytes_of_four_tokens_lie_in_a_word(tokens, shift):
    matrix = torch.randn(tokens, 64).numpy()
    words, scale = np.empty((2, PART // 4, 32), np.int32), np.empty(64, np.float32)
    sums = np.empty(64, np.int32)
    pack_part(matrix, np.int32(shift), words, scale, sums)
    numbers = bytes_of(words).transpose(1, 3, 0, 2).reshape(PART, 64) - shift
    numbers = (numbers + 128) % 256 - 128
    assert not numbers[tokens:].any() and (sums == numbers.sum(0)).all()
    assert scale == pytest.approx(np.abs(matrix).max(0) / 127)
    assert np.abs(numbers[:tokens] - matrix / scale).max() < 0.5 + 1e-3


def test_the_tokens_of_an_output_follow_one_another():
    tokens = 2 * PART - 3
    gradient, x = (matrix.float().numpy() for matrix in operands(tokens, 64, 128))
    left, right = np.empty((2, 64, PART // 4), np.int32), np.empty((2, 4, PART // 4, 32), np.int32)
    left_scales, right_scales = np.empty((2, 64), np.float32), np.empty((2, 128), np.float32)
    starts = np.empty((2, 128), np.int32)
    pack_tokens(gradient, left, left_scales, x, right, right_scales, starts)
    shifted = bytes_of(left).transpose(0, 2, 3, 1).reshape(2, PART, 64) - 128
    found = (shifted * left_scales[:, None]).reshape(-1, 64)[:tokens]
    assert np.abs(found - gradient).max() <= left_scales.max() * 0.501
    signed = bytes_of(right).transpose(0, 2, 4, 1, 3).reshape(2, PART, 128)
    signed = (signed + 128) % 256 - 128
    found = (signed * right_scales[:, None]).reshape(-1, 128)[:tokens]
    assert np.abs(found - x).max() <= right_scales.max() * 0.501
    assert (starts == -128 * signed.sum(1)).all()


def bytes_of(words):
    """The four bytes of each word, unsigned, in one more dimension."""
    return words.view(np.uint8).reshape(*words.shape, 4).astype(int)


@multiplies
def test_sums_of_tiles_go_through_memory(monkeypatch):
    gradient, x = operands(2 * PART + 5)
    expected = int8_weight_gradient(gradient, x)
    monkeypatch.setattr(blocks, "in_tiles", lambda dtype: True)
    monkeypatch.setattr(blocks, "_tile_block", stored_block)
    for name in ("begin", "end"):  # which would set the tiles up
        monkeypatch.setattr(weight_gradient, name, njit(lambda like: None))
    multiply = njit(weight_gradient.multiply_tokens.py_func)
    monkeypatch.setattr(weight_gradient, "multiply_tokens", multiply)
    assert torch.equal(int8_weight_gradient(gradient, x), expected)


@pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")
def test_a_layer_trains_with_it():
    torch.manual_seed(1)
    plain, ours = nn.Linear(64, 128), nn.Linear(64, 128).bfloat16()
    ours.load_state_dict(plain.state_dict())
    ours.__class__ = Int8Linear
    x, above = torch.randn(2, 50, 64), torch.randn(2, 50, 128)
    expected, found = (
        run(lambda layer, x: layer(x), [x.to(layer.weight.dtype)], above, layer)[2]
        for layer in (plain, ours)
    )
    assert 2**-9 < error(found, expected) < PRODUCT
