"""LayerNorm(x + dropout(linear(y))), the end of each of the encoder's sublayers, in one pass.

Operator by operator that is four passes over the rows forward (bias, dropout, sum, LayerNorm) and
as many backward.

Letters: R rows, H hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.kernels.dropout import Dropout, next_key, threshold
from bertsmith.kernels.linear import replaceable, without_bias
from bertsmith.kernels.numbers import (
    has_kernels,
    hash32,
    load,
    rows,
    store,
    vector,
    vectorised,
)


@vectorised
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


@vectorised
def residual_norm_gradient_rows(gradient, saved, weight, factor, limit, key, outputs):
    """The way back: gradients by x and branch [R, H], added to those by weight, shift and bias [H].

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


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        bias_H: Tensor,
        weight_H: Tensor,
        shift_H: Tensor,
        eps: float,
        rate: float,
    ) -> Tensor:
        key = np.uint32(next_key() if rate else 0)
        ctx.dropped = np.float32(1 / (1 - rate)), threshold(rate), key
        sums, result = torch.empty_like(x), torch.empty_like(x)
        means, scales = torch.empty(2, x.numel() // len(bias_H)).unbind()
        residual_norm_rows(
            rows(x),
            rows(branch),
            vector(bias_H),
            vector(weight_H),
            vector(shift_H),
            np.float32(eps),
            *ctx.dropped,
            (rows(sums), rows(result), means.numpy(), scales.numpy()),
        )
        ctx.save_for_backward(sums, means, scales, bias_H, weight_H)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sums, means, scales, bias_H, weight_H = ctx.saved_tensors
        above, x_gradient = gradients[0].contiguous(), torch.empty_like(sums)
        branch_gradient = torch.empty_like(sums) if ctx.dropped[1] else x_gradient
        vectors = torch.zeros(3, len(bias_H))  # gradients by weight, shift and bias
        residual_norm_gradient_rows(
            rows(above),
            (rows(sums), means.numpy(), scales.numpy()),
            vector(weight_H),
            *ctx.dropped,
            (rows(x_gradient), rows(branch_gradient), *vectors.numpy()),
        )
        by_weight, by_shift = vectors[:2].to(weight_H.dtype)
        by_bias = vectors[2].to(bias_H.dtype)
        return x_gradient, branch_gradient, by_bias, by_weight, by_shift, None, None


def residual_norm(
    x: Tensor, linear: nn.Linear, y: Tensor, dropout: Dropout, norm: nn.LayerNorm
) -> Tensor:
    """norm(x + dropout(linear(y))), of x's shape.

    The compiled kernel where a CPU needs the gradient, else PyTorch's operators.
    """
    known = torch.is_grad_enabled() and has_kernels(x)
    if not (known and replaceable(linear, dropout, norm)):
        return norm(x + dropout(linear(y)))
    branch = without_bias(linear, y)
    rate = dropout.rate if dropout.training else 0.0
    return _ResidualNorm.apply(
        x.to(branch.dtype).contiguous(),
        branch,
        linear.bias,
        norm.weight,
        norm.bias,
        norm.eps,
        rate,
    )
