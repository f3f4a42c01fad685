"""Both fused ends of a layer beside float64: GELU, and the residual's LayerNorm."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.kernels.elementwise import Dropout, without_kernels
from bertsmith.model.kernels.fused_layers import linear_gelu, residual_norm
from bertsmith.model.kernels.numbers import curves, half_plus_odd, vectorized

from .harness import assert_as_float64, assert_near, run, run_in

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


class Case(NamedTuple):
    """A kernel and PyTorch's operators, both functions of the modules and the inputs."""

    kernel: Callable
    plain: Callable
    inputs: list[Tensor]
    above: Tensor
    modules: list[nn.Module]

    def run(self):
        return run(self.kernel, self.inputs, self.above, *self.modules)


def gelu(dtype, approximate="none"):
    torch.manual_seed(1)
    linear = nn.Linear(H, W)
    nn.init.normal_(linear.bias)
    x, above = 2 * torch.randn(2, R, H), torch.randn(2, W, R).transpose(1, 2)
    return Case(
        lambda linear, x: linear_gelu(linear, x, approximate),
        lambda linear, x: F.gelu(linear(x), approximate=approximate),
        [x.to(dtype)],
        above.to(dtype),
        [linear.to(dtype)],
    )


def norm(dtype, rate=0.0):
    torch.manual_seed(1)
    linear, norm = nn.Linear(50, W), nn.LayerNorm(W, eps=1e-12)
    for vector in (linear.bias, norm.weight, norm.bias):
        nn.init.normal_(vector)
    x, y, above = torch.randn(2, 6, W), torch.randn(2, 6, 50), torch.randn(2, W, 6)
    return Case(
        lambda linear, norm, dropout, x, y: residual_norm(x, linear, y, dropout, norm),
        lambda linear, norm, dropout, x, y: norm(x + dropout(linear(y))),
        [x.to(dtype), y.to(dtype)],
        above.to(dtype).transpose(1, 2),
        [linear.to(dtype), norm, Dropout(rate)],
    )


gelu_tanh = functools.partial(gelu, approximate="tanh")
KERNELS = pytest.mark.parametrize("kernel", [gelu, norm], ids=["gelu", "norm"])
# Norm of the error over the norm of the float64 result. float32: its rounding, sums over a row and
# (GELU) the polynomial's 3e-6. bf16: 2^-9 a rounding, of the product, of the result and of its
# gradient.
BF16 = 1e-2


@pytest.mark.parametrize(
    ("kernel", "float32"),
    [(gelu, 5e-6), (gelu_tanh, 5e-6), (norm, 2e-6)],
    ids=["gelu", "gelu_tanh", "norm"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_equal_float64(kernel, float32, dtype):
    case, limit = kernel(dtype), float32 if dtype == torch.float32 else BF16
    found = assert_as_float64(limit, *case[:4], *case.modules)
    norms = [torch.float32] * 2 * (kernel is norm)
    assert [part.dtype for part in found] == [dtype] * (len(found) - len(norms)) + norms


@KERNELS
def test_what_is_no_number_stays_so_both_ways(kernel):
    case = kernel(torch.float32)
    case.inputs[-1][0, 1, 2] = math.nan
    result, by_first, *others = case.run()
    assert result[0, 1].isnan().all() and result.isnan().sum() == W
    assert by_first[0, 1].isnan().all()
    by_bias = others[len(case.inputs)]
    assert by_bias.shape == (W,) and by_bias.isnan().all()


@KERNELS
def test_pytorch_computes_where_no_gradient_is_wanted_or_no_kernel_is(kernel):
    case = kernel(torch.float32)
    given = *case.modules, *case.inputs
    expected = case.plain(*given)
    for context in (torch.no_grad(), without_kernels()):
        with context:
            assert torch.equal(case.kernel(*given), expected)
    assert not torch.equal(case.kernel(*given), expected)


def test_pytorch_computes_gelu_of_a_layer_without_bias():
    bare, x = nn.Linear(H, W, bias=False), torch.randn(2, R, H)
    assert torch.equal(linear_gelu(bare, x, "none"), F.gelu(bare(x)))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, BF16)])
def test_the_norms_dropout_is_that_of_the_layer(dtype, limit):
    """The same seed drops the same elements, scales the others alike, forward and backward."""
    case, without = norm(dtype, rate=0.25), norm(dtype).run()[0]
    found = case.run()
    assert_near(found, run_in(torch.float32, *case[1:4], *case.modules), limit)
    assert not torch.allclose(found[0], without)
    case.modules[-1].eval()
    assert torch.equal(case.run()[0], without)


def test_a_wider_residual_becomes_what_autocast_multiplies_in():
    case = norm(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert case.kernel(*case.modules, *case.inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_modules_that_somebody_waits_for_are_called(rate):
    """The kernel's dropout is theirs, so that a replay drops what the step did."""
    case = norm(torch.float32, rate)
    found, called = case.run(), []
    for module in case.modules:
        handle = module.register_forward_hook(lambda *given: called.append(given[0]))
        again = case.run()
        handle.remove()
        for actual, value in zip(again, found, strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)
    assert called == case.modules


def test_gradients_of_second_order_are_refused_and_had_without_kernels():
    linear, x = nn.Linear(H, W), torch.randn(R, H, requires_grad=True)

    def penalty(values):
        (gradient,) = torch.autograd.grad(values.sum(), x, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(NotImplementedError, match="no gradients of second order: compute the mod"):
        penalty(linear_gelu(linear, x, "none"))
    with without_kernels():
        found = linear_gelu(linear, x, "none")
    parts = penalty(found), penalty(F.gelu(linear(x)))
    (of_found,), (expected,) = (torch.autograd.grad(part, x) for part in parts)
    assert expected.any() and torch.equal(of_found, expected)
