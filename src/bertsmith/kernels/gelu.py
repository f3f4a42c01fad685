"""GELU of a linear layer in two passes, one forward and one backward.

PyTorch adds the bias before the product, takes GELU after it and, on the way back, its gradient and
the bias' one after the other: four.

GELU(z) = z s(z). Both s - 1/2 and the derivative of GELU less 1/2 are odd functions of z, and
nearly constant beyond z = 5.5: a polynomial in z^2 makes each without exponential or division.

Letters: R rows, F width of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.kernels.linear import replaceable, without_bias
from bertsmith.kernels.numbers import (
    has_kernels,
    load,
    rows,
    store,
    vector,
    vectorised,
)

EDGE, DEGREE = np.float32(5.5), 15  # half_plus_odd has as many powers
SPREAD = np.float32(2 / EDGE**2)  # z^2 in 0..EDGE^2 to -1..1
HALF, ONE = np.float32(0.5), np.float32(1)
INNER, CUBIC = math.sqrt(2 / math.pi), 0.044715  # of google-research/bert's approximation


def _exact(z: float) -> tuple[float, float]:
    """(s - 1/2, GELU' - 1/2): s is the normal distribution's share below z."""
    share = math.erf(z / math.sqrt(2)) / 2
    return share, share + z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _approximate(z: float) -> tuple[float, float]:
    """As `_exact`, with s = (1 + tanh(u)) / 2."""
    tangent = math.tanh(INNER * (z + CUBIC * z**3))
    slope = (1 - tangent**2) * INNER * (1 + 3 * CUBIC * z * z)
    return tangent / 2, tangent / 2 + z / 2 * slope


def _polynomial(odd: Callable[[float], float]) -> tuple[np.float32, ...]:
    """Of odd(z) / z in 2 (z / EDGE)^2 - 1, by interpolation, lowest power first."""
    chebyshev = np.polynomial.chebyshev
    nodes = chebyshev.chebpts1(DEGREE + 1)
    quotients = [odd(z) / z for z in EDGE * np.sqrt((nodes + 1) / 2)]
    powers = chebyshev.cheb2poly(chebyshev.chebfit(nodes, quotients, DEGREE))
    return tuple(powers.astype(np.float32))


@cache
def curves(approximate: str) -> tuple[tuple[np.float32, ...], ...]:
    """Of s and GELU', off by at most 3e-7 and 3e-6; `approximate` is "none" or "tanh"."""
    functions = _exact if approximate == "none" else _approximate
    return _polynomial(lambda z: functions(z)[0]), _polynomial(lambda z: functions(z)[1])


@vectorised
def half_plus_odd(z, c):
    """1/2 + the odd function of z whose polynomial has the coefficients `c`."""
    z = EDGE if z > EDGE else z  # not a number stays so
    z = -EDGE if z < -EDGE else z
    x = SPREAD * (z * z) - ONE
    power = c[12] + x * (c[13] + x * (c[14] + x * c[15]))
    power = c[8] + x * (c[9] + x * (c[10] + x * (c[11] + x * power)))
    power = c[4] + x * (c[5] + x * (c[6] + x * (c[7] + x * power)))
    power = c[0] + x * (c[1] + x * (c[2] + x * (c[3] + x * power)))
    return HALF + z * power


@vectorised
def gelu_rows(inputs, bias, curve, outputs):
    """outputs = GELU(inputs + bias), matrices [R, F] and a vector [F]; `curve` makes s."""
    for row in range(len(inputs)):
        line, target = inputs[row], outputs[row]
        for column in range(len(bias)):
            z = load(line[column]) + load(bias[column])
            target[column] = store(z * half_plus_odd(z, curve), target[column])


@vectorised
def gelu_gradient_rows(gradient, inputs, bias, curve, outputs, bias_gradient):
    """outputs = the gradient by the inputs; its sum over the rows is added to `bias_gradient`."""
    for row in range(len(inputs)):
        line, above, target = inputs[row], gradient[row], outputs[row]
        for column in range(len(bias)):
            z = load(line[column]) + load(bias[column])
            value = load(above[column]) * half_plus_odd(z, curve)
            bias_gradient[column] += value
            target[column] = store(value, target[column])


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_F: Tensor, approximate: str) -> Tensor:
        ctx.approximate = approximate
        ctx.save_for_backward(x, bias_F)
        result = torch.empty_like(x)
        gelu_rows(rows(x), vector(bias_F), curves(approximate)[0], rows(result))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, bias_F = ctx.saved_tensors
        above, result = gradients[0].contiguous(), torch.empty_like(x)
        sums, curve = torch.zeros(len(bias_F)), curves(ctx.approximate)[1]
        gelu_gradient_rows(rows(above), rows(x), vector(bias_F), curve, rows(result), sums.numpy())
        return result, sums.to(bias_F.dtype), None


def linear_gelu(linear: nn.Linear, x: Tensor, approximate: str) -> Tensor:
    """GELU(linear(x)); `approximate` is "none" or "tanh", as PyTorch's.

    The compiled kernel where a CPU needs the gradient, else PyTorch's operators.
    """
    if not (torch.is_grad_enabled() and has_kernels(x) and replaceable(linear)):
        return F.gelu(linear(x), approximate=approximate)
    return _BiasGelu.apply(without_bias(linear, x), linear.bias, approximate)
