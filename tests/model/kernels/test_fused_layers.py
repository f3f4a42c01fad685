"""Both fused ends of a layer beside float64: GELU, and the residual's LayerNorm."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bertsmith.model.kernels.elementwise import Dropout, vectorized, without_kernels
from bertsmith.model.kernels.fused_layers import (
    curves,
    half_plus_odd,
    linear_gelu,
    residual_norm,
)

from .harness import assert_near, run

# Norm of the error over the norm of the float64 result. float32: its rounding, sums over a row and
# the polynomial's 3e-6. bf16: 2^-9 a rounding, of the product, of the result and of its gradient.
GELU = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
NORM = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
R, H, W = 5, 24, 37  # rows, hidden size, width: no multiples of a vector register


@vectorized
def curve_of(places, curve, values):
    for place in range(len(places)):
        values[place] = half_plus_odd(places[place], curve)


def exact(z, approximate):
    """(GELU(z) / z, GELU'(z)) by float64's own functions; the derivative by a difference."""

    def share(z):
        if approximate == "none":
            return 0.5 * math.erfc(-z / math.sqrt(2))
        return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    step = 1e-5
    above, below = (z + step) * share(z + step), (z - step) * share(z - step)
    return share(z), (above - below) / (2 * step)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_curves_are_those_of_gelu_and_its_derivative(approximate):
    places = np.linspace(-12, 12, 4001).astype(np.float32)
    expected = np.array([exact(float(z), approximate) for z in places]).T
    for curve, values, limit in zip(curves(approximate), expected, (3e-7, 3e-6), strict=True):
        found = np.empty_like(places)
        curve_of(places, curve, found)
        assert np.abs(found - values).max() < limit


def wide(*modules, dtype=torch.float64):
    return [copy.deepcopy(module).to(dtype) for module in modules]


def linear_and_rows(dtype):
    torch.manual_seed(1)
    linear = nn.Linear(H, W)
    nn.init.normal_(linear.bias)
    x, gradient = 2 * torch.randn(2, R, H), torch.randn(2, W, R).transpose(1, 2)
    return linear.to(dtype), x.to(dtype), gradient.to(dtype)


def through_gelu(function, linear, x, gradient):
    return run(lambda x: function(linear, x), [x], gradient, linear)


@pytest.mark.parametrize("dtype", GELU)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_forward_and_backward_equal_float64(dtype, approximate):
    linear, x, gradient = linear_and_rows(dtype)
    found = through_gelu(lambda own, x: linear_gelu(own, x, approximate), linear, x, gradient)
    assert all(part.dtype == dtype for part in found)
    expected = through_gelu(
        lambda own, x: F.gelu(own(x), approximate=approximate), *wide(linear), x.double(), gradient
    )
    assert_near(found, expected, GELU[dtype])


def test_gelu_of_what_is_no_number_stays_so_both_ways():
    linear, x, gradient = linear_and_rows(torch.float32)
    x[1, 2, 3] = math.nan
    found = through_gelu(lambda own, x: linear_gelu(own, x, "none"), linear, x, gradient)
    assert found[0][1, 2].isnan().all() and found[0].isnan().sum() == W
    assert found[1][1, 2].isnan().all() and found[3].isnan().all()


def test_pytorch_computes_gelu_where_no_gradient_is_wanted_or_no_kernel_is():
    linear, x, _ = linear_and_rows(torch.float32)
    plain = F.gelu(linear(x))
    with torch.no_grad():
        assert torch.equal(linear_gelu(linear, x, "none"), plain)
    with without_kernels():
        assert torch.equal(linear_gelu(linear, x, "none"), plain)
    bare = nn.Linear(H, W, bias=False)
    assert torch.equal(linear_gelu(bare, x, "none"), F.gelu(bare(x)))
    assert not torch.equal(linear_gelu(linear, x, "none"), plain)


def pieces(dtype, rate=0.0):
    """(linear of a branch, norm, dropout, [rows x, branch y, gradient above])."""
    torch.manual_seed(1)
    linear, norm = nn.Linear(50, W), nn.LayerNorm(W, eps=1e-12)
    for vector in (linear.bias, norm.weight, norm.bias):
        nn.init.normal_(vector)
    x, y, gradient = torch.randn(2, 6, W), torch.randn(2, 6, 50), torch.randn(2, W, 6)
    tensors = [part.to(dtype) for part in (x, y, gradient.transpose(1, 2))]
    return linear.to(dtype), norm, Dropout(rate), tensors


def through_norm(function, linear, norm, dropout, tensors):
    *inputs, above = tensors
    return run(lambda x, y: function(x, linear, y, dropout, norm), inputs, above, linear, norm)


def plain_norm(x, linear, y, dropout, norm):
    return norm(x + dropout(linear(y)))


@pytest.mark.parametrize("dtype", NORM)
def test_the_norm_forward_and_backward_equals_float64(dtype):
    linear, norm, dropout, tensors = pieces(dtype)
    found = through_norm(residual_norm, linear, norm, dropout, tensors)
    assert [part.dtype for part in found] == [dtype] * 5 + [torch.float32] * 2
    doubles = [part.double() for part in tensors]
    expected = through_norm(plain_norm, *wide(linear, norm), dropout, doubles)
    assert_near(found, expected, NORM[dtype])


@pytest.mark.parametrize("dtype", NORM)
def test_the_norms_dropout_is_that_of_the_layer(dtype):
    """The same seed drops the same elements, scales the others alike, forward and backward."""
    linear, norm, dropout, tensors = pieces(dtype, rate=0.25)
    found = through_norm(residual_norm, linear, norm, dropout, tensors)
    floats = [part.float() for part in tensors]
    expected = through_norm(plain_norm, *wide(linear, norm, dtype=torch.float32), dropout, floats)
    assert_near(found, expected, NORM[dtype])
    without = through_norm(residual_norm, linear, norm, Dropout(0.0), tensors)
    assert not torch.allclose(found[0], without[0])
    dropout.eval()
    assert torch.equal(through_norm(residual_norm, linear, norm, dropout, tensors)[0], without[0])


def test_the_norm_of_what_is_no_number_stays_so_both_ways():
    linear, norm, dropout, tensors = pieces(torch.float32)
    tensors[1][0, 1, 2] = math.nan
    found = through_norm(residual_norm, linear, norm, dropout, tensors)
    assert found[0][0, 1].isnan().all() and found[0].isnan().sum() == W
    assert found[1][0, 1].isnan().all() and found[4].isnan().all()


def test_a_wider_residual_becomes_what_autocast_multiplies_in():
    linear, norm, dropout, (x, y, _) = pieces(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert residual_norm(x, linear, y, dropout, norm).dtype == torch.bfloat16


def test_pytorch_computes_the_norm_where_no_gradient_is_wanted_or_no_kernel_is():
    linear, norm, dropout, (x, y, _) = pieces(torch.float32)
    expected = plain_norm(x, linear, y, dropout, norm)
    with torch.no_grad():
        assert torch.equal(residual_norm(x, linear, y, dropout, norm), expected)
    with without_kernels():
        assert torch.equal(residual_norm(x, linear, y, dropout, norm), expected)
    assert not torch.equal(residual_norm(x, linear, y, dropout, norm), expected)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_modules_that_somebody_waits_for_are_called(rate):
    """The kernel's dropout is theirs, so that a replay drops what the step did."""
    linear, norm, dropout, tensors = pieces(torch.float32, rate)
    found = through_norm(residual_norm, linear, norm, dropout, tensors)
    called = []
    for module in (linear, dropout, norm):
        handle = module.register_forward_hook(lambda *given: called.append(given[0]))
        again = through_norm(residual_norm, linear, norm, dropout, tensors)
        handle.remove()
        for actual, value in zip(again, found, strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)
    assert called == [linear, dropout, norm]
