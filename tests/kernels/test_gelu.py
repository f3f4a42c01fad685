import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bertsmith.model.kernels.elementwise import vectorised, without_kernels
from bertsmith.model.kernels.fused_layers import curves, half_plus_odd, linear_gelu

# Norm of the error over the norm of the float64 result. float32: its rounding and the polynomial's
# 3e-6. bf16: 2^-9 a rounding, of the product, of the result and of its gradient.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
R, H, W = 5, 24, 37  # rows, hidden size, width: no multiples of a vector register


@vectorised
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


def layers(dtype):
    torch.manual_seed(1)
    linear = nn.Linear(H, W)
    nn.init.normal_(linear.bias)
    x, gradient = 2 * torch.randn(2, R, H), torch.randn(2, W, R).transpose(1, 2)
    return linear.to(dtype), x.to(dtype), gradient.to(dtype)


def run(function, linear, x, gradient):
    x = x.detach().clone().requires_grad_()
    linear.zero_grad()
    result = function(linear, x)
    result.backward(gradient)
    return [result.detach(), x.grad, linear.weight.grad, linear.bias.grad]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_forward_and_backward_equal_float64(dtype, approximate):
    linear, x, gradient = layers(dtype)
    found = run(lambda own, x: linear_gelu(own, x, approximate), linear, x, gradient)
    assert all(part.dtype == dtype for part in found)
    wide = nn.Linear(H, W).double()
    wide.load_state_dict(linear.state_dict())
    expected = run(
        lambda own, x: F.gelu(own(x), approximate=approximate), wide, x.double(), gradient.double()
    )
    for actual, value in zip(found, expected, strict=True):
        assert (actual.double() - value).norm() < TOLERANCE[dtype] * value.norm()


def test_what_is_no_number_stays_so_both_ways():
    linear, x, gradient = layers(torch.float32)
    x[1, 2, 3] = math.nan
    found = run(lambda own, x: linear_gelu(own, x, "none"), linear, x, gradient)
    assert found[0][1, 2].isnan().all() and found[0].isnan().sum() == W
    assert found[1][1, 2].isnan().all() and found[3].isnan().all()


def test_pytorch_computes_where_no_gradient_is_wanted_or_no_kernel_is():
    linear, x, _ = layers(torch.float32)
    plain = F.gelu(linear(x))
    with torch.no_grad():
        assert torch.equal(linear_gelu(linear, x, "none"), plain)
    with without_kernels():
        assert torch.equal(linear_gelu(linear, x, "none"), plain)
    bare = nn.Linear(H, W, bias=False)
    assert torch.equal(linear_gelu(bare, x, "none"), F.gelu(bare(x)))
    assert not torch.equal(linear_gelu(linear, x, "none"), plain)
