"""A layer after its attention as one function each way, where few tokens train in int8.

In a pass of some hundred tokens Python and autograd take as long as matmuls, and the threads of
several cores wait for Python's lock. Six functions, three `Int8Linear`, a GELU and two
`residual_norm`, become one here, of the same kernels and with the same bits. Those that may take
liberties with floats (`vectorized`) are still called from Python: inlined into another function
LLVM would take others, and which version a process runs would depend on which it loaded first.
Here no idle core takes a part; longer matmuls, beyond `SHORT`, are left to the layer's own
functions, which share them.

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
    Kernel,
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
from bertsmith.model.kernels.llvm.blocks import COLUMNS
from bertsmith.model.kernels.llvm.unpadded_encoder import Linear
from bertsmith.model.kernels.llvm.weight_gradient import (
    GROUPS,
    PART,
    last_words,
    like_rows,
    multiply_tokens,
    pack_tokens,
)
from bertsmith.model.kernels.numbers import curves, load, store
from bertsmith.model.kernels.quantized_linear import Int8Linear, multiply_rows, pack_weight

SHORT = 1 << 29  # products of two bytes in a layer's widest matmul, up to which this is used


def after_attention(layer: Any, x: Tensor, context: Tensor) -> Tensor | None:
    """The output of a layer, [..., H] as x, from the context of its attention, or None.

    None where the layer's own functions must do it: for many tokens, without gradients, with hooks,
    for GeGLU, and unless all three linear layers are int8 with weights in bf16.
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
    if not all(replaceable(linear, dropout, *norms) for linear in linears):
        return None
    weights = [part for linear in linears for part in (linear.weight, linear.bias)]
    weights += [part for norm in norms for part in (norm.weight, norm.bias)]
    rate = dropout.rate if dropout.training else 0.0
    options = [norm.eps for norm in norms], rate, layer.approximate
    x, context = (part.to(torch.bfloat16).contiguous() for part in (x, context))
    return _AfterAttention.apply(x, context, options, *weights)


class _AfterAttention(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Tensor, options: Any, *weights: Tensor) -> Tensor:
        eps, rate, ctx.approximate = options
        eps, like = np.array(eps, np.float32), like_rows(PART)
        ctx.dropped = np.float32(1 / (1 - rate)), threshold(rate)
        ctx.keys = [np.uint32(next_key() if rate else 0) for _ in "ab"]
        size, wide = x.shape[-1], len(weights[2])
        tokens = x.numel() // size
        working, packings = (
            torch.empty(number, dtype=torch.int32)
            for number in (size * max(size, wide) // 4, size * (size + 2 * wide) // 4)
        )
        scales, moments = torch.empty(4 * size + 2 * wide), torch.empty(4, tokens)
        states = torch.empty(tokens * (3 * size + 2 * wide), dtype=torch.bfloat16)
        result, branch = torch.empty_like(x), np.empty((tokens, size), np.uint16)
        linears = _linears(packings, scales, size, wide)
        sums, hidden, inner, active, later = _states(states, size, wide)
        one, two, three = (rows(weight) for weight in weights[:6:2])
        biases, norms = [flat(bias) for bias in weights[1:6:2]], [flat(w) for w in weights[6:]]
        (a, b, c, d), by_inputs = moments.numpy(), working.numpy()

        multiply(rows(context), one, by_inputs, linears[0], like, branch)
        vectors, saved = (biases[0], *norms[:2]), (sums, hidden, a, b)
        residual_norm_rows(rows(x), branch, *vectors, eps[0], *ctx.dropped, ctx.keys[0], saved)
        multiply(hidden, two, by_inputs, linears[1], like, inner)
        gelu_rows(inner, biases[1], curves(ctx.approximate)[0], active)
        multiply(active, three, by_inputs, linears[2], like, branch)
        vectors, saved = (biases[2], *norms[2:]), (later, rows(result), c, d)
        residual_norm_rows(hidden, branch, *vectors, eps[1], *ctx.dropped, ctx.keys[1], saved)
        ctx.dtypes = [weight.dtype for weight in weights]
        kept = packings, scales, moments, states
        ctx.save_for_backward(context, *kept, weights[3], weights[6], weights[8])
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        context, packings, scales, moments, states, wide_bias, *norms = ctx.saved_tensors
        above, size, wide = gradients[0].contiguous(), context.shape[-1], len(wide_bias)
        tokens, like = context.numel() // size, like_rows(PART)
        last = last_words(tokens, like.dtype)
        sums, hidden, inner, active, later = _states(states, size, wide)
        linears = _linears(packings, scales, size, wide)
        a, b, c, d = moments.numpy()
        x_gradient, context_gradient = torch.empty_like(above), torch.empty_like(context)
        shapes = (size, size), (wide, size), (size, wide)
        by_weights = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        one, two, three = map(rows, by_weights)
        vectors = torch.zeros(6 * size + wide).split([size, wide, *[size] * 5])
        of_bias, of_wide_bias, of_last_bias, *of_norms = map(flat, vectors)
        parts = -(-tokens // PART)
        working = torch.empty(parts * (GROUPS + 2) * (size + max(size, wide)), dtype=torch.int32)
        working, below = working.numpy(), (rows(x_gradient), rows(context_gradient))
        # where nothing is dropped the branch's gradient is the sum's
        of_sum, other, more = np.empty((3, tokens, size), np.uint16)
        of_active, of_inner = np.empty((2, tokens, wide), np.uint16)

        branch = other if ctx.dropped[1] else of_sum
        found = of_sum, branch, *of_norms[2:], of_last_bias
        options, saved = (flat(norms[1]), *ctx.dropped, ctx.keys[1]), (later, c, d)
        residual_norm_gradient_rows(rows(above), saved, *options, found)
        multiply_back(branch, active, working, last, like, linears[2], (three, of_active))
        curve = curves(ctx.approximate)[1]
        gelu_gradient_rows(of_active, inner, flat(wide_bias), curve, of_inner, of_wide_bias)
        multiply_back(of_inner, hidden, working, last, like, linears[1], (two, more))
        add(of_sum, more)
        branch = other if ctx.dropped[1] else below[0]
        found = below[0], branch, *of_norms[:2], of_bias
        options, saved = (flat(norms[0]), *ctx.dropped, ctx.keys[0]), (sums, a, b)
        residual_norm_gradient_rows(more, saved, *options, found)
        multiply_back(branch, rows(context), working, last, like, linears[0], (one, below[1]))

        pairs = zip(by_weights, vectors[:3], strict=True)
        every = [part for pair in pairs for part in pair] + list(vectors[3:])
        every = (part.to(dtype) for part, dtype in zip(every, ctx.dtypes, strict=True))
        return x_gradient, context_gradient, None, *every


def _states(memory: Tensor, size: int, wide: int) -> tuple[np.ndarray, ...]:
    """The kept states, as bits of bf16.

    Sums before the first LayerNorm and its results [N, H], the wide layer's outputs and GELU of
    them [N, F], sums before the last LayerNorm [N, H].
    """
    numbers = flat(memory)
    tokens = len(numbers) // (3 * size + 2 * wide)
    narrow = numbers[: 3 * tokens * size].reshape(3, tokens, size)
    inner, active = numbers[3 * tokens * size :].reshape(2, tokens, wide)
    return narrow[0], narrow[1], inner, active, narrow[2]


def _linears(packings: Tensor, scales: Tensor, size: int, wide: int) -> list[tuple[Any, ...]]:
    """Each weight's [O, I] packing by outputs, scales [O], and sums of outputs [I]."""
    words, numbers, found = packings.numpy(), scales.numpy(), []
    for outputs, inputs in ((size, size), (wide, size), (size, wide)):
        count, both = outputs * inputs // 4, outputs + inputs
        packing = words[:count].reshape(inputs // COLUMNS, outputs // 4, COLUMNS)
        found.append((packing, numbers[:outputs], numbers[outputs:both]))
        words, numbers = words[count:], numbers[both:]
    return found


@compiled
def multiply(matrix, weight, working, linear, like, outputs):
    """outputs [N, O] = matrix [N, I] times a weight [O, I], all bf16, packed on the way.

    `working` is int32 with room for O I / 4, `linear` one of `_linears`, which are filled in.
    """
    (count, inputs), (by_outputs, scale, output_total) = weight.shape, linear
    by_inputs = working[: count * inputs // 4].reshape(count // COLUMNS, inputs // 4, COLUMNS)
    total = np.empty(count, np.float32)
    pack_weight(weight, scale, total, by_inputs, by_outputs, output_total)
    multiply_rows(matrix, None, as_linear(by_inputs, scale, total), like, outputs)


@compiled
def as_linear(packing, scale, total):
    """A packed weight without bias."""
    weight, one_layer = packing.reshape(-1).view(np.int8), (1, len(scale))
    vectors = scale.reshape(one_layer), total.reshape(one_layer)
    return Linear(
        weight.reshape(1, len(weight)), vectors[0], vectors[1], np.zeros(one_layer, np.float32)
    )


@compiled
def multiply_back(gradient, x, working, last, like, linear, outputs):
    """From a product's gradient [N, O] those by its weight [O, I] and by x [N, I], all bf16.

    `working` is int32 with room for N / 128, rounded up, times 34 (O + I); see `_Int8Linear`.
    """
    (by_outputs, scale, output_total), (product, below) = linear, outputs
    count, inputs = product.shape
    parts = (len(gradient) + PART - 1) // PART
    first, second = parts * count * GROUPS, parts * (count + inputs) * GROUPS
    left = working[:first].reshape(parts, count, GROUPS)
    right = working[first:second].reshape(parts, inputs // COLUMNS, GROUPS, COLUMNS)
    starts = working[second : second + parts * inputs].reshape(parts, inputs)
    floats = working[second + parts * inputs :].view(np.float32)
    left_scales = floats[: parts * count].reshape(parts, count)
    right_scales = floats[parts * count : parts * (count + inputs)].reshape(parts, inputs)
    pack_tokens(gradient, left, left_scales, x, right, right_scales, starts)
    both = (left, left_scales), (right, right_scales)
    multiply_tokens(like, both[0], both[1], starts, last, product, (0, count))
    ones = np.ones_like(output_total)
    multiply_rows(gradient, scale, as_linear(by_outputs, ones, output_total), like, below)


@compiled
def add(source, target):
    """target += source, matrices of bf16."""
    for row in range(len(target)):
        for column in range(target.shape[1]):
            value = load(source[row, column]) + load(target[row, column])
            target[row, column] = store(value, target[row, column])
