"""Our LSTM against PyTorch's, forward and backward."""

import pytest
import torch
from torch import nn

from bertsmith.model.lstm import LSTM


def pair(size=5, hidden=6):
    torch_lstm = nn.LSTM(size, hidden)
    with torch.no_grad():
        torch_lstm.bias_hh_l0.zero_()
    ours = LSTM(size, hidden)
    ours.inputs.weight.data.copy_(torch_lstm.weight_ih_l0)
    ours.inputs.bias.data.copy_(torch_lstm.bias_ih_l0)
    ours.state.weight.data.copy_(torch_lstm.weight_hh_l0)
    return ours, torch_lstm


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_states_and_gradients_are_those_of_pytorch(steps):
    torch.manual_seed(steps)
    ours, other = pair()
    x = torch.randn(steps, 3, 5)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    weights = torch.randn(steps, 3, 6)
    given, wanted = ours(inputs[0]), other(inputs[1])[0]
    torch.testing.assert_close(given, wanted)
    (given * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(ours.inputs.weight.grad, other.weight_ih_l0.grad)
    torch.testing.assert_close(ours.inputs.bias.grad, other.bias_ih_l0.grad)
    torch.testing.assert_close(ours.state.weight.grad, other.weight_hh_l0.grad)


def test_gradients_by_differences():
    lstm = LSTM(3, 2).double()
    # cells are float32 inside: differences of 1e-3 are seen through its rounding
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lstm, x, eps=1e-2, atol=1e-3, rtol=1e-2, nondet_tol=0)


def test_bf16_is_near_float32():
    torch.manual_seed(1)
    ours, _ = pair(32, 32)
    x = torch.randn(12, 4, 32)
    wanted = ours(x)
    wanted.square().sum().backward()
    exact = ours.state.weight.grad.clone()
    ours.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        given = ours(x)
    given.float().square().sum().backward()
    # bf16 keeps 8 bits, states are below 1; the gradient is a sum of 48 products
    torch.testing.assert_close(given.float(), wanted, atol=0.02, rtol=0)
    assert (ours.state.weight.grad - exact).norm() < 0.03 * exact.norm()
