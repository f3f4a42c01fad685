"""A layer after its attention as one function each way, where few tokens train in int8.

In a pass of some hundred tokens Python and autograd take as long as matmuls, and the threads of
several cores wait for Python's lock. Six functions, three `Int8Linear`, a GELU and two
`residual_norm`, become one here, of the same kernels: equal up to the rounding of their sums, which
LLVM may take in another order when it compiles them as one.

Letters: N tokens, H hidden size, F intermediate size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import (
    Dropout,
    flat,
    has_kernels,
    next_key,
    rows,
    threshold,
)
from bertsmith.model.kernels.fused_layers import (
    gelu_gradient_rows,
    gelu_rows,
    replaceable,
    residual_norm_gradient_rows,
    residual_norm_rows,
)
from bertsmith.model.kernels.llvm.blocks import COLUMNS, integer_dtype
from bertsmith.model.kernels.llvm.unpadded_encoder import Linear
from bertsmith.model.kernels.llvm.weight_gradient import (
    PART,
    last_words,
    multiply_tokens,
    pack_tokens,
)
from bertsmith.model.kernels.numbers import curves, load, store
from bertsmith.model.kernels.quantized_linear import Int8Linear, multiply_rows, pack_weight

SHORT = 1 << 29  # products of bytes in a layer's widest matmul, up to which this is used
GROUPS = PART // 4


def after_attention(layer: Any, x: Tensor, context: Tensor) -> Tensor | None:
    """The output of a layer, [..., H] as x, from the context of its attention, or None.

    None where the layer's own functions must do it: for many tokens, without gradients, without
    int8 or bf16 copies of the weights, with hooks, and for GeGLU.
    """
    if not (torch.is_grad_enabled() and has_kernels(x) and hasattr(layer, "intermediate")):
        return None
    linears = layer.attention_output, layer.intermediate, layer.output
    norms: tuple[nn.LayerNorm, ...] = layer.attention_norm, layer.output_norm
    are_int8 = all(
        type(linear) is Int8Linear and linear.weight.dtype == torch.bfloat16 for linear in linears
    )
    is_short = 0 < x.numel() * layer.intermediate.out_features < SHORT
    if not (are_int8 and is_short):
        return None
    dropout: Dropout = layer.dropout
    if not replaceable(*linears, dropout, *norms):
        return None
    weights = [part for linear in linears for part in (linear.weight, linear.bias)]
    weights += [part for norm in norms for part in (norm.weight, norm.bias)]
    rate = dropout.rate if dropout.training else 0.0
    options = norms[0].eps, rate, layer.approximate
    x, context = (part.to(torch.bfloat16).contiguous() for part in (x, context))
    return _AfterAttention.apply(x, context, options, *weights)


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Tensor, options: Any, *weights: Tensor) -> Tensor:
        eps, rate, ctx.approximate = options
        keys = [np.uint32(next_key() if rate else 0) for _ in "ab"]
        ctx.dropped = np.float32(1 / (1 - rate)), threshold(rate), *keys
        size, wide = x.shape[-1], len(weights[2])
        tokens = x.numel() // size
        working, packings = (
            torch.empty(number, dtype=torch.int32)
            for number in (size * wide // 4, size * (size + 2 * wide) // 4)
        )
        floats = torch.empty(4 * (size + tokens) + 2 * wide)
        states = torch.empty(tokens * (3 * size + 2 * wide), dtype=torch.bfloat16)
        result = torch.empty_like(x)
        kept = packings.numpy(), floats.numpy(), flat(states)
        one, *others = (rows(weight) for weight in weights[:6:2])
        biases, norms = tuple(map(flat, weights[1:6:2])), tuple(map(flat, weights[6:]))
        layer_forward(
            *(rows(x), rows(context), (one, *others), biases, norms, np.float32(eps)),
            *(ctx.dropped, curves(ctx.approximate)[0], _like(), working.numpy(), kept),
            rows(result),
        )
        ctx.save_for_backward(context, packings, floats, states, *weights)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        context, packings, floats, states, *weights = ctx.saved_tensors
        above, size, wide = gradients[0].contiguous(), context.shape[-1], len(weights[2])
        x_gradient, context_gradient = torch.empty_like(above), torch.empty_like(context)
        by_weights = [torch.empty_like(weight) for weight in weights[:6:2]]
        sizes = [len(weight) for weight in (*weights[1:6:2], *weights[6:])]
        vectors = torch.zeros(sum(sizes)).split(sizes)
        tokens = context.numel() // size
        parts = -(-tokens // PART)
        working = torch.empty(parts * (GROUPS + 2) * (size + max(size, wide)), dtype=torch.int32)
        like = _like()
        kept = packings.numpy(), floats.numpy(), flat(states)
        layer_backward(
            *(rows(above), rows(context), flat(weights[3]), (flat(weights[6]), flat(weights[8]))),
            *(ctx.dropped, curves(ctx.approximate)[1], like, last_words(tokens, like.dtype)),
            *(working.numpy(), kept, tuple(map(rows, by_weights)), tuple(map(flat, vectors))),
            (rows(x_gradient), rows(context_gradient)),
        )
        pairs = zip(by_weights, vectors[:3], strict=True)
        every = [part for pair in pairs for part in pair] + list(vectors[3:])
        every = (part.to(weight.dtype) for part, weight in zip(every, weights, strict=True))
        return x_gradient, context_gradient, None, *every


def _like() -> np.ndarray:
    """An array of the dtype of quantized rows."""
    dtype = integer_dtype(PART)
    assert dtype in (np.int8, np.uint8), dtype  # not AVX2's
    return np.zeros(1, dtype)


@compiled
def states_of(memory, tokens, size, wide):
    """Sums before a LayerNorm, its results, the wide layer's outputs, GELU of them, sums again."""
    sums = memory[: tokens * size].reshape(tokens, size)
    hidden = memory[tokens * size : 2 * tokens * size].reshape(tokens, size)
    later = memory[2 * tokens * size : 3 * tokens * size].reshape(tokens, size)
    both = memory[3 * tokens * size :].reshape(2, tokens, wide)
    return sums, hidden, both[0], both[1], later


@compiled
def packings_of(memory, size, wide):
    """A layer's three weights, packed by outputs, flat."""
    first, second = size * size // 4, size * (size + wide) // 4
    return memory[:first], memory[first:second], memory[second:]


@compiled
def scales_of(floats, size, wide):
    """(Scales, sums of outputs) of each weight, means and scales of both LayerNorms."""
    a, b, c = floats[:size], floats[size : 2 * size], floats[2 * size : 2 * size + wide]
    later = floats[2 * size + wide : 4 * size + 2 * wide]
    d, e, f = later[:size], later[size : 2 * size], later[2 * size :]
    return (a, b), (c, d), (e, f), floats[4 * size + 2 * wide :].reshape(4, -1)


@compiled
def multiply(matrix, weight, working, by_outputs, scales, like, outputs):
    """outputs = matrix times a weight [O, I], which is packed on the way."""
    (count, inputs), (scale, output_total) = weight.shape, scales
    by_inputs = working[: count * inputs // 4].reshape(count // COLUMNS, inputs // 4, COLUMNS)
    by_outputs = by_outputs.reshape(inputs // COLUMNS, count // 4, COLUMNS)
    total = np.empty(count, np.float32)
    pack_weight(weight, scale, total, by_inputs, by_outputs, output_total)
    multiply_rows(matrix, None, as_linear(by_inputs, scale, total), like, outputs)


@compiled
def as_linear(packing, scale, total):
    """A packed weight without bias."""
    weight, no_bias = packing.reshape(-1).view(np.int8), np.zeros((1, len(scale)), np.float32)
    one_layer = 1, len(scale)
    return Linear(
        weight.reshape(1, len(weight)), scale.reshape(one_layer), total.reshape(one_layer), no_bias
    )


@compiled
def multiply_back(gradient, by_outputs, scales, like, outputs):
    """outputs = gradient times a packed weight's transpose."""
    scale, output_total = scales
    ones = np.ones_like(output_total)
    multiply_rows(gradient, scale, as_linear(by_outputs, ones, output_total), like, outputs)


@compiled
def weight_gradient(gradient, x, working, last, like, product):
    """product = gradient^T x, see `int8_weight_gradient`."""
    outputs, inputs = product.shape
    parts = (len(gradient) + PART - 1) // PART
    first, second = parts * outputs * GROUPS, parts * (outputs + inputs) * GROUPS
    left = working[:first].reshape(parts, outputs, GROUPS)
    right = working[first:second].reshape(parts, inputs // COLUMNS, GROUPS, COLUMNS)
    starts = working[second : second + parts * inputs].reshape(parts, inputs)
    floats = working[second + parts * inputs :].view(np.float32)
    left_scales = floats[: parts * outputs].reshape(parts, outputs)
    right_scales = floats[parts * outputs : parts * (outputs + inputs)].reshape(parts, inputs)
    pack_tokens(gradient, left, left_scales, x, right, right_scales, starts)
    both = (left, left_scales), (right, right_scales)
    multiply_tokens(like, both[0], both[1], starts, last, product, (0, outputs))


@compiled
def layer_forward(
    x, context, weights, biases, norms, eps, dropped, curve, like, working, kept, result
):
    """Both sublayers' ends: see `residual_norm` and `linear_gelu` in fused_layers.py."""
    (tokens, size), wide = x.shape, len(biases[1])
    packings, scales = packings_of(kept[0], size, wide), scales_of(kept[1], size, wide)
    sums, hidden, inner, active, later = states_of(kept[2], tokens, size, wide)
    branch, moments = np.empty((tokens, size), np.uint16), scales[3]
    factor, limit, first_key, second_key = dropped
    multiply(context, weights[0], working, packings[0], scales[0], like, branch)
    saved = sums, hidden, moments[0], moments[1]
    vectors = biases[0], norms[0], norms[1]
    residual_norm_rows(
        x, branch, vectors[0], vectors[1], vectors[2], eps, factor, limit, first_key, saved
    )
    multiply(hidden, weights[1], working, packings[1], scales[1], like, inner)
    gelu_rows(inner, biases[1], curve, active)
    multiply(active, weights[2], working, packings[2], scales[2], like, branch)
    saved = later, result, moments[2], moments[3]
    residual_norm_rows(
        hidden, branch, biases[2], norms[2], norms[3], eps, factor, limit, second_key, saved
    )


@compiled
def layer_backward(
    above, context, bias, norms, dropped, curve, like, last, working, kept, products, vectors, below
):
    """Gradients: by the weights `products`, by x and context `below`, others added to `vectors`.

    Those are of the three biases, then of both LayerNorms' weights and shifts. `bias` is that of
    the wide layer, `norms` are the LayerNorms' weights.
    """
    (tokens, size), wide = context.shape, len(bias)
    packings, scales = packings_of(kept[0], size, wide), scales_of(kept[1], size, wide)
    sums, hidden, inner, active, later = states_of(kept[2], tokens, size, wide)
    moments, (factor, limit, first_key, second_key) = scales[3], dropped
    # where nothing is dropped the branch's gradient is the sum's
    of_sum, more = np.empty((tokens, size), np.uint16), np.empty((tokens, size), np.uint16)
    branch = np.empty((tokens, size), np.uint16) if limit else of_sum
    of_active, of_inner = np.empty((tokens, wide), np.uint16), np.empty((tokens, wide), np.uint16)
    saved = later, moments[2], moments[3]
    targets = of_sum, branch, vectors[5], vectors[6], vectors[2]
    residual_norm_gradient_rows(above, saved, norms[1], factor, limit, second_key, targets)
    weight_gradient(branch, active, working, last, like, products[2])
    multiply_back(branch, packings[2], scales[2], like, of_active)
    gelu_gradient_rows(of_active, inner, bias, curve, of_inner, vectors[1])
    weight_gradient(of_inner, hidden, working, last, like, products[1])
    multiply_back(of_inner, packings[1], scales[1], like, more)
    for row in range(tokens):
        for column in range(size):
            total = load(of_sum[row, column]) + load(more[row, column])
            more[row, column] = store(total, more[row, column])

    branch = of_sum if limit else below[0]
    saved = sums, moments[0], moments[1]
    targets = below[0], branch, vectors[3], vectors[4], vectors[0]
    residual_norm_gradient_rows(more, saved, norms[0], factor, limit, first_key, targets)
    weight_gradient(branch, context, working, last, like, products[0])
    multiply_back(branch, packings[0], scales[0], like, below[1])
