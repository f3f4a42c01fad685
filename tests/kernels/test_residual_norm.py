import math

import pytest
import torch
from torch import nn

from bertsmith.model.kernels.elementwise import Dropout, seed_dropout, without_kernels
from bertsmith.model.kernels.fused_layers import residual_norm

# Norm of the error over the norm of the float64 result. float32: its rounding, sums over a row.
# bf16: 2^-9 a rounding, of the product, of the kept sum, of the result and of its gradients.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
R, H, F = 6, 37, 50  # rows, hidden size (no multiple of a vector register), width of the branch


def pieces(dtype, rate=0.0):
    torch.manual_seed(1)
    linear, norm = nn.Linear(F, H), nn.LayerNorm(H, eps=1e-12)
    for vector in (linear.bias, norm.weight, norm.bias):
        nn.init.normal_(vector)
    x, y, gradient = torch.randn(2, R, H), torch.randn(2, R, F), torch.randn(2, H, R)
    tensors = [part.to(dtype) for part in (x, y, gradient.transpose(1, 2))]
    return linear.to(dtype), norm, Dropout(rate), tensors


def run(function, linear, norm, dropout, tensors):
    x, y = (part.detach().clone().requires_grad_() for part in tensors[:2])
    linear.zero_grad()
    norm.zero_grad()
    seed_dropout(5)
    result = function(x, linear, y, dropout, norm)
    result.backward(tensors[2])
    weights = *linear.parameters(), *norm.parameters()
    return [result.detach(), x.grad, y.grad, *(weight.grad for weight in weights)]


def plain(x, linear, y, dropout, norm):
    return norm(x + dropout(linear(y)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_forward_and_backward_equal_float64(dtype):
    linear, norm, dropout, tensors = pieces(dtype)
    found = run(residual_norm, linear, norm, dropout, tensors)
    assert [part.dtype for part in found] == [dtype] * 5 + [torch.float32] * 2
    wide, wide_norm = nn.Linear(F, H).double(), nn.LayerNorm(H, eps=1e-12).double()
    wide.load_state_dict(linear.state_dict())
    wide_norm.load_state_dict(norm.state_dict())
    expected = run(plain, wide, wide_norm, dropout, [part.double() for part in tensors])
    for actual, value in zip(found, expected, strict=True):
        assert (actual.double() - value).norm() < TOLERANCE[dtype] * value.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dropout_is_that_of_the_layer(dtype):
    """The same seed drops the same elements, scales the others alike, forward and backward."""
    linear, norm, dropout, tensors = pieces(dtype, rate=0.25)
    found = run(residual_norm, linear, norm, dropout, tensors)
    wide, wide_norm = nn.Linear(F, H), nn.LayerNorm(H, eps=1e-12)
    wide.load_state_dict(linear.state_dict())
    wide_norm.load_state_dict(norm.state_dict())
    expected = run(plain, wide, wide_norm, dropout, [part.float() for part in tensors])
    for actual, value in zip(found, expected, strict=True):
        assert (actual.float() - value).norm() < TOLERANCE[dtype] * value.norm()
    without = run(residual_norm, linear, norm, Dropout(0.0), tensors)
    assert not torch.allclose(found[0], without[0])
    dropout.eval()
    assert torch.equal(run(residual_norm, linear, norm, dropout, tensors)[0], without[0])


def test_what_is_no_number_stays_so_both_ways():
    linear, norm, dropout, tensors = pieces(torch.float32)
    tensors[1][0, 1, 2] = math.nan
    found = run(residual_norm, linear, norm, dropout, tensors)
    assert found[0][0, 1].isnan().all() and found[0].isnan().sum() == H
    assert found[1][0, 1].isnan().all() and found[4].isnan().all()


def test_a_wider_residual_becomes_what_autocast_multiplies_in():
    linear, norm, dropout, (x, y, _) = pieces(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert residual_norm(x, linear, y, dropout, norm).dtype == torch.bfloat16


def test_pytorch_computes_where_no_gradient_is_wanted_or_no_kernel_is():
    linear, norm, dropout, (x, y, _) = pieces(torch.float32)
    expected = plain(x, linear, y, dropout, norm)
    with torch.no_grad():
        assert torch.equal(residual_norm(x, linear, y, dropout, norm), expected)
    with without_kernels():
        assert torch.equal(residual_norm(x, linear, y, dropout, norm), expected)
    assert not torch.equal(residual_norm(x, linear, y, dropout, norm), expected)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_modules_that_somebody_waits_for_are_called(rate):
    """The kernel's dropout is theirs, so that a replay drops what the step did."""
    linear, norm, dropout, tensors = pieces(torch.float32, rate)
    found = run(residual_norm, linear, norm, dropout, tensors)
    called = []
    for module in (linear, dropout, norm):
        handle = module.register_forward_hook(lambda *given: called.append(given[0]))
        again = run(residual_norm, linear, norm, dropout, tensors)
        handle.remove()
        for actual, value in zip(again, found, strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)
    assert called == [linear, dropout, norm]
