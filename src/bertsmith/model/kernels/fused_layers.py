"""GELU(linear(x)) and LayerNorm(x + dropout(linear(y))), fused around the matrix product.

Each is one pass over the rows forward and one backward. Operator by operator `linear_gelu` takes
two each way (bias, GELU), `residual_norm` four (bias, dropout, sum, LayerNorm).

Letters: R rows, H hidden size, F width of the layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.kernels.elementwise import (
    Dropout,
    Kernel,
    has_kernels,
    next_key,
    rows,
    threshold,
    vector,
)
from bertsmith.model.kernels.numbers import curves, half_plus_odd, hash32, load, store, vectorized
from bertsmith.model.kernels.quantized_linear import Int8Linear, int8_matmul


def linear_gelu(linear: nn.Linear, x: Tensor, approximate: str) -> Tensor:
    """GELU(linear(x)), compiled where a CPU trains; `approximate` is PyTorch's "none" or "tanh"."""
    if not (torch.is_grad_enabled() and has_kernels(x) and replaceable(linear)):
        return F.gelu(linear(x), approximate=approximate)
    return _BiasGelu.apply(without_bias(linear, x), linear.bias, approximate)


def residual_norm(
    x: Tensor, linear: nn.Linear, y: Tensor, dropout: Dropout, norm: nn.LayerNorm
) -> Tensor:
    """norm(x + dropout(linear(y))), of x's shape, compiled where a CPU trains."""
    trained = torch.is_grad_enabled() and has_kernels(x)
    if not (trained and replaceable(linear, dropout, norm)):
        return norm(x + dropout(linear(y)))
    branch = without_bias(linear, y)
    x = x.to(branch.dtype).contiguous()
    rate = dropout.rate if dropout.training else 0.0
    return _ResidualNorm.apply(x, branch, linear.bias, norm.weight, norm.bias, norm.eps, rate)


def replaceable(linear: nn.Linear, *others: nn.Module) -> bool:
    """True if a fused kernel may replace these modules: of known type, no hooks (as --replay's)."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    hooked = any(getattr(module, name) for module in (linear, *others) for name in hooks)
    return type(linear) in (nn.Linear, Int8Linear) and linear.bias is not None and not hooked


def without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    """x @ weight^T, as this layer trains."""
    matmul = int8_matmul if isinstance(linear, Int8Linear) else F.linear
    return matmul(x, linear.weight)


class _BiasGelu(Kernel):
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


@vectorized
def gelu_rows(inputs, bias, curve, outputs):
    """outputs = GELU(inputs + bias), matrices [R, F] and a vector [F]; `curve` is that of s."""
    for row in range(len(inputs)):
        line, target = inputs[row], outputs[row]
        for column in range(len(bias)):
            z = load(line[column]) + load(bias[column])
            target[column] = store(z * half_plus_odd(z, curve), target[column])


@vectorized
def gelu_gradient_rows(gradient, inputs, bias, curve, outputs, bias_gradient):
    """outputs = the gradient by the inputs; its sum over the rows is added to `bias_gradient`."""
    for row in range(len(inputs)):
        line, above, target = inputs[row], gradient[row], outputs[row]
        for column in range(len(bias)):
            z = load(line[column]) + load(bias[column])
            value = load(above[column]) * half_plus_odd(z, curve)
            bias_gradient[column] += value
            target[column] = store(value, target[column])


class _ResidualNorm(Kernel):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, branch, bias_H, weight_H, shift_H, eps, rate = given
        key = np.uint32(next_key() if rate else 0)
        ctx.dropped = np.float32(1 / (1 - rate)), threshold(rate), key
        sums, result = torch.empty_like(x), torch.empty_like(x)
        moments = torch.empty(2, x.numel() // len(bias_H))  # means and scales
        vectors = vector(bias_H), vector(weight_H), vector(shift_H)
        outputs = rows(sums), rows(result), *moments.numpy()
        residual_norm_rows(rows(x), rows(branch), *vectors, np.float32(eps), *ctx.dropped, outputs)
        ctx.save_for_backward(sums, moments, bias_H, weight_H)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sums, moments, bias_H, weight_H = ctx.saved_tensors
        above, x_gradient = gradients[0].contiguous(), torch.empty_like(sums)
        branch_gradient = torch.empty_like(sums) if ctx.dropped[1] else x_gradient
        vectors = torch.zeros(3, len(bias_H))  # gradients by weight, shift and bias
        saved = rows(sums), *moments.numpy()
        outputs = rows(x_gradient), rows(branch_gradient), *vectors.numpy()
        residual_norm_gradient_rows(rows(above), saved, vector(weight_H), *ctx.dropped, outputs)
        by_weight, by_shift = vectors[:2].to(weight_H.dtype)
        by_bias = vectors[2].to(bias_H.dtype)
        return x_gradient, branch_gradient, by_bias, by_weight, by_shift, None, None


@vectorized
def residual_norm_rows(x, branch, bias, weight, shift, eps, factor, limit, key, outputs):
    """From matrices x and branch [R, H]: sums, results [R, H], means and scales [R].

    A row's sum is s = x + factor (branch + bias), the latter 0 where dropped (drawn below `limit`);
    its result (s - mean) scale weight + shift.
    """
    sums, results, means, scales = outputs
    columns = len(bias)
    line = np.empty(columns, np.float32)
    for row in range(len(x)):
        own, other = x[row], branch[row]
        if limit == 0:
            for column in range(columns):
                line[column] = load(own[column]) + (load(other[column]) + load(bias[column]))
        else:
            row_key = hash32(np.uint32(row) ^ key)
            for column in range(columns):
                kept = hash32(np.uint32(np.uint32(column) + row_key)) >= limit
                value = (load(other[column]) + load(bias[column])) * factor
                line[column] = load(own[column]) + (value if kept else np.float32(0))
        total = np.float32(0)
        for column in range(columns):
            total += line[column]
        mean = total / np.float32(columns)
        squares = np.float32(0)
        for column in range(columns):
            squares += (line[column] - mean) * (line[column] - mean)
        scale = np.float32(1) / np.sqrt(squares / np.float32(columns) + eps)
        means[row], scales[row] = mean, scale
        total_row, result = sums[row], results[row]
        for column in range(columns):
            value = (line[column] - mean) * scale * load(weight[column]) + load(shift[column])
            total_row[column] = store(line[column], total_row[column])
            result[column] = store(value, result[column])


@vectorized
def residual_norm_gradient_rows(gradient, saved, weight, factor, limit, key, outputs):
    """Write the gradients by x and branch [R, H]; add those by weight, shift and bias [H].

    Where nothing is dropped the branch's is that of x, and not written.
    """
    sums, means, scales = saved
    x_gradient, branch_gradient, weight_gradient, shift_gradient, bias_gradient = outputs
    columns = len(weight)
    normal, scaled = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for row in range(len(gradient)):
        above, total_row = gradient[row], sums[row]
        mean, scale = means[row], scales[row]
        for column in range(columns):
            value = load(above[column])
            normal[column] = (load(total_row[column]) - mean) * scale
            scaled[column] = value * load(weight[column])
            shift_gradient[column] += value
            weight_gradient[column] += value * normal[column]
        level, slope = np.float32(0), np.float32(0)
        for column in range(columns):
            level += scaled[column]
            slope += scaled[column] * normal[column]
        level, slope = level / np.float32(columns), slope / np.float32(columns)
        target = x_gradient[row]
        for column in range(columns):
            value = (scaled[column] - level - normal[column] * slope) * scale
            scaled[column] = value
            target[column] = store(value, target[column])
        if limit == 0:
            for column in range(columns):
                bias_gradient[column] += scaled[column]
        else:
            row_key, other = hash32(np.uint32(row) ^ key), branch_gradient[row]
            for column in range(columns):
                kept = hash32(np.uint32(np.uint32(column) + row_key)) >= limit
                value = scaled[column] * factor if kept else np.float32(0)
                bias_gradient[column] += value
                other[column] = store(value, other[column])
