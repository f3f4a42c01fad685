"""A weight's gradient of int8 is the product of bf16 as far as eight bits go."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.model.kernels.llvm import weight_gradient
from bertsmith.model.kernels.llvm.blocks import cpu_features
from bertsmith.model.kernels.llvm.weight_gradient import PART, int8_weight_gradient, pack_tokens
from bertsmith.model.kernels.quantized_linear import Int8Linear, has_int8

from ..harness import error, run

# A number is off by half a step, 1 / 254 of the largest of 128, and evenly so: 1 / 254 / sqrt(3).
# Of normal numbers that is 2.8 deviations: 0.64% of a deviation, twice, and 2^-9 of bf16: 0.9%.
PRODUCT = 0.012
TOKENS = [1, 3, PART - 1, PART, 2 * PART + 5]
multiplies = pytest.mark.skipif("avx512vnni" not in cpu_features(), reason="no int8 products")


def operands(tokens, outputs=64, inputs=160):
    torch.manual_seed(tokens)
    return torch.randn(tokens, outputs).bfloat16(), torch.randn(tokens, inputs).bfloat16()


def exact(gradient, x):
    return gradient.double().t() @ x.double()


@multiplies
@pytest.mark.parametrize("tokens", TOKENS)
def test_it_is_the_product_as_far_as_eight_bits_go(tokens):
    gradient, x = operands(tokens)
    found = int8_weight_gradient(gradient, x)
    assert found.dtype == torch.bfloat16 and found.shape == (64, 160)
    assert error(found, exact(gradient, x)) < PRODUCT


@multiplies
@pytest.mark.parametrize("tokens", TOKENS)
def test_of_whole_numbers_up_to_127_it_is_exact(tokens):
    random = np.random.default_rng(tokens)
    gradient, x = (
        torch.from_numpy(random.integers(-127, 128, (tokens, columns))).bfloat16()
        for columns in (32, 96)
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


def test_bytes_of_four_tokens_lie_in_a_word():
    matrix = torch.randn(PART + 6, 5).numpy()
    words, scales = np.zeros((PART // 4 + 2, 6), np.int32), np.empty((2, 5), np.float32)
    for shift in (0, 128):
        sums = np.empty((2, 5), np.int32)
        pack_tokens(matrix, np.int32(shift), words, scales, sums)
        numbers = words[:, :5].copy().view(np.uint8).reshape(-1, 5, 4).transpose(0, 2, 1)
        numbers = numbers.reshape(-1, 5).astype(int) - shift
        numbers = (numbers + 128) % 256 - 128
        assert not numbers[len(matrix) :].any()
        for part, some in enumerate((slice(PART), slice(PART, PART + 6))):
            assert scales[part] == pytest.approx(np.abs(matrix[some]).max(0) / 127)
            assert (sums[part] == numbers[some].sum(0)).all()
            assert np.abs(numbers[some] - matrix[some] / scales[part]).max() < 0.5 + 1e-3


@pytest.mark.parametrize(
    ("sizes", "features"), [((60, 64), None), ((64, 60), None), ((64, 64), ())]
)
def test_elsewhere_it_is_a_product_of_bf16(monkeypatch, sizes, features):
    if features is not None:
        monkeypatch.setattr(weight_gradient, "cpu_features", lambda: features)
    gradient, x = operands(50, *sizes)
    assert torch.equal(int8_weight_gradient(gradient, x), gradient.t() @ x)


@pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")
def test_a_layer_trains_with_it():
    torch.manual_seed(1)
    plain, ours = nn.Linear(64, 96), nn.Linear(64, 96).bfloat16()
    ours.load_state_dict(plain.state_dict())
    ours.__class__ = Int8Linear
    x, above = torch.randn(2, 50, 64), torch.randn(2, 50, 96)
    expected, found = (
        run(lambda layer, x: layer(x), [x.to(layer.weight.dtype)], above, layer)[2]
        for layer in (plain, ours)
    )
    assert 2**-9 < error(found, expected) < PRODUCT
