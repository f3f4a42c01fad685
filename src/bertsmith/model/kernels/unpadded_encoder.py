"""The encoder in compiled loops over texts without padding: one call a core. No torch.

Each row of hidden states is quantized by its own range, x = scale q + low, q from 0 to 255, and
each column of a weight by its own, w = column_scale r, r from -127 to 127, so that

    x w + bias = scale column_scale (q r) + (low sum(w) + bias)

with q r summed exactly in integers. Bias, GELU, residual and LayerNorm follow in the same pass over
32 rows, and the next row's range with them. In float32 the same loops run with scale 1 and low 0.
A text's answer depends on that text alone: the same bits in any company, and in every process,
as nothing here lets LLVM choose the order of a sum.

Letters: T tokens of all texts, Q rows that are read, H hidden size, F intermediate size, D head
size, N columns, V pieces, L layers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.blocks import (
    COLUMNS,
    GROUP,
    ROWS,
    address,
    begin,
    block,
    end,
    meet,
)
from bertsmith.model.kernels.numbers import (
    bits_to_float,
    float_to_bits,
)
from bertsmith.model.kernels.vector_rows import (
    GELU,
    GELU_TANH,
    PLAIN,
    RESIDUAL,
    finish,
    normalize_row,
    scalar_product,
    softmax_row,
)

LEAST_RANGE = np.float32(1e-20)
LEVELS = np.float32(255)
ROUND = np.float32(1.5 * 2**23)  # added, the last bits of the sum are the nearest whole number
FLOATS = np.zeros(1, np.float32)


class Linear(NamedTuple):
    """A matrix a layer, all N columns of all L layers."""

    weight: np.ndarray  # [L, N K], see `packed`
    scale: np.ndarray  # float32 [L, N]: 1 in float32
    total: np.ndarray  # float32 [L, N]: of a column's weights, as quantized; 0 in float32
    bias: np.ndarray  # float32 [L, N]


class Weights(NamedTuple):
    """An encoder's weights; norms are [.., 2, H], weight and bias."""

    tokens: np.ndarray  # float32 [V, H]
    positions: np.ndarray  # float32 [S, H]
    segments: np.ndarray  # float32 [types, H]
    norm: np.ndarray  # float32 [2, H]
    query: Linear
    key_value: Linear
    attention_output: Linear
    attention_norm: np.ndarray  # float32 [L, 2, H]
    intermediate: Linear
    output: Linear
    output_norm: np.ndarray  # float32 [L, 2, H]


class Share(NamedTuple):
    """A thread's part of texts that several read together: their tokens first:last.

    The threads meet once a layer, when all keys and values are there.
    """

    first: int
    last: int
    key_value: np.ndarray  # float32 [B, T, 2 H], of all; B 2 if shared: some may be a layer ahead
    arrived: np.ndarray  # int64 [1], of all, 0 at first
    threads: int


def group(rows: Any) -> Any:
    """Inputs of a column that an instruction takes at once."""


@overload(group, inline="always")
def _group(rows):
    number = GROUP[rows.dtype.name]
    return lambda rows: number


def empty_sums(rows: Any) -> Any:
    """Room for a block of products of such rows."""


@overload(empty_sums, inline="always")
def _empty_sums(rows):
    number = np.float32 if rows.dtype.name == "float32" else np.int32
    return lambda rows: np.empty((ROWS, COLUMNS), number)


def quantize_row(line: Any, row: Any) -> Any:
    """Write a row's q; its (scale, low)."""


@overload(quantize_row)
def _quantize_row(line, row):
    if row.dtype.name == "float32":

        def copied(line, row):
            for column in range(len(line)):
                row[column] = line[column]
            return np.float32(1), np.float32(0)

        return copied

    def quantized(line, row):
        # as integers of the same order, since LLVM does not vectorize the extremes of floats
        top, low = np.int32(-(2**31)), np.int32(2**31 - 1)
        for column in range(len(line)):
            bits = float_to_bits(line[column])
            bits ^= (bits >> np.int32(31)) & np.int32(0x7FFFFFFF)
            top, low = max(top, bits), min(low, bits)
        high = bits_to_float(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least = bits_to_float(low ^ ((low >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        span = max(high - least, LEAST_RANGE)
        factor = LEVELS / span
        for column in range(len(line)):
            level = float_to_bits((line[column] - least) * factor + ROUND)
            row[column] = level & np.int32(255)
        return span / LEVELS, least

    return quantized


@compiled
def normalize(line, norm, eps):
    """LayerNorm of one row, in place; `norm` [2, H]."""
    size = len(line)
    normalize_row(address(line, 0), address(norm, 0), address(norm, size), size, eps)


@compiled
def product(rows, ranges, first, count, linear, layer, ending, target, start, sums):
    """`count` <= 32 rows from `first` on times a layer's matrix, into `target` from `start` on.

    `ranges` [2, T]: scale and low of each row. `sums`: int32 or float32 [32, 32], to work in.
    """
    weight, inputs, columns = linear.weight[layer], rows.shape[1], linear.bias.shape[1]
    groups = inputs // group(rows)
    step = COLUMNS * group(rows) * weight.itemsize
    a, row_bytes = address(rows, first * inputs), inputs * rows.itemsize
    for n in range(0, columns, COLUMNS):
        block(
            *(rows, a, row_bytes, address(weight, n * inputs), step),
            *(address(sums, 0), 4 * COLUMNS, groups, count),
        )
        column = layer * columns + n
        scale, total = address(linear.scale, column), address(linear.total, column)
        vectors = scale, total, address(linear.bias, column)
        for r in range(count):
            own, place = address(sums, r * COLUMNS), address(target, (start + r) * columns + n)
            row_scale, low = ranges[0, first + r], ranges[1, first + r]
            if ending == GELU:
                finish(sums, own, row_scale, low, vectors, place, GELU)
            elif ending == RESIDUAL:
                finish(sums, own, row_scale, low, vectors, place, RESIDUAL)
            elif ending == GELU_TANH:
                finish(sums, own, row_scale, low, vectors, place, GELU_TANH)
            else:
                finish(sums, own, row_scale, low, vectors, place, PLAIN)


@compiled
def attention(query, reads, key_value, starts, heads, context):
    """softmax(q k^T / sqrt(D)) v of each text: context [Q, H] of queries [Q, H].

    Text t has the queries reads[t]:reads[t + 1], the keys and values starts[t]:starts[t + 1]. Up to
    7 rows behind a text's own are written as well, before those of the next text: there must be so
    many rows more than are wanted.
    """
    size = query.shape[1]
    head = size // heads
    scale = np.float32(1 / math.sqrt(head))
    longest = 0
    for text in range(len(starts) - 1):
        longest = max(longest, starts[text + 1] - starts[text])
    width = (longest + COLUMNS - 1) // COLUMNS * COLUMNS
    keys = np.zeros((head, width), np.float32)
    scores = np.zeros((ROWS, width), np.float32)
    for text in range(len(starts) - 1):
        first, length = starts[text], starts[text + 1] - starts[text]
        if reads[text] == reads[text + 1]:
            continue
        for column in range(0, size, head):
            for j in range(length):
                source = key_value[first + j]
                for d in range(head):  # not signed: Numba would look for negative numbers
                    keys[np.uint64(d), np.uint64(j)] = source[np.uint64(column) + np.uint64(d)]
            for start in range(reads[text], reads[text + 1], ROWS):
                count = min(ROWS, reads[text + 1] - start)
                a, p = address(query, start * size + column), address(scores, 0)
                for n in range(0, length, COLUMNS):
                    b, c = address(keys, n), address(scores, n)
                    block(FLOATS, a, 4 * size, b, 4 * width, c, 4 * width, head, count)
                for r in range(count):
                    softmax_row(address(scores, r * width), length, scale)
                for d in range(column, column + head, COLUMNS):
                    v = address(key_value, first * 2 * size + size + d)
                    c = address(context, start * size + d)
                    block(FLOATS, p, 4 * width, v, 8 * size, c, 4 * size, length, count)


@compiled
def encode(ids, types, starts, rows, reads, weights, heads, eps, gelu, like, states, share):
    """Last hidden states, float32 [Q, H], of the tokens `rows` (ascending) of this thread's share.

    Text t is ids[starts[t]:starts[t + 1]], of which rows[reads[t]:reads[t + 1]] are read, counted
    from the first token of the share. `like` is an array of the dtype of quantized rows. `states`
    [L, T, H], if not empty, is given the hidden states before each layer.
    """
    begun, tokens = share.first, share.last - share.first
    size, wide = weights.tokens.shape[1], weights.intermediate.bias.shape[1]
    padded = (tokens + ROWS - 1) // ROWS * ROWS
    x, xq = np.empty((padded, size), np.float32), np.zeros((padded, size), like.dtype)
    ranges, few = np.zeros((2, padded), np.float32), np.zeros((2, ROWS), np.float32)
    # more rows, as `block` reads and writes up to 7 behind the last one
    query = np.zeros((padded + ROWS, size), np.float32)
    context = np.zeros((padded + ROWS, size), np.float32)
    line, lineq = np.empty((ROWS, wide), np.float32), np.empty((ROWS, wide), like.dtype)
    sums = empty_sums(like)
    begin(like)
    own = np.minimum(np.maximum(starts, begun), share.last) - begun
    for text in range(len(starts) - 1):
        for number in range(own[text], own[text + 1]):
            token = begun + number
            piece, place = weights.tokens[ids[token]], weights.positions[token - starts[text]]
            segment, row = weights.segments[types[token]], x[number]
            for column in range(size):
                row[column] = piece[column] + segment[column] + place[column]
            normalize(row, weights.norm, eps)
            ranges[0, number], ranges[1, number] = quantize_row(row, xq[number])
    queries = tokens
    for layer in range(len(weights.output_norm)):
        if len(states):
            states[layer, begun : share.last] = x[:tokens]
        key_value = share.key_value[layer % len(share.key_value)]
        for first in range(0, tokens, ROWS):
            count, linear = min(ROWS, tokens - first), weights.key_value
            product(xq, ranges, first, count, linear, layer, PLAIN, key_value, begun + first, sums)
        owners = own
        if layer == len(weights.output_norm) - 1 and len(rows) < tokens:
            queries, owners = len(rows), reads
            for row in range(queries):
                x[row], xq[row], ranges[:, row] = x[rows[row]], xq[rows[row]], ranges[:, rows[row]]
        for first in range(0, queries, ROWS):
            count = min(ROWS, queries - first)
            product(xq, ranges, first, count, weights.query, layer, PLAIN, query, first, sums)
        if share.threads > 1:
            meet(address(share.arrived, 0), share.threads * (layer + 1))
        attention(query, owners, key_value, starts, heads, context)
        for first in range(0, queries, ROWS):
            count = min(ROWS, queries - first)
            for r in range(first, first + count):
                ranges[0, r], ranges[1, r] = quantize_row(context[r], xq[r])
            product(
                xq, ranges, first, count, weights.attention_output, layer, RESIDUAL, x, first, sums
            )
            for r in range(first, first + count):
                normalize(x[r], weights.attention_norm[layer], eps)
                ranges[0, r], ranges[1, r] = quantize_row(x[r], xq[r])
            product(xq, ranges, first, count, weights.intermediate, layer, gelu, line, 0, sums)
            for r in range(count):
                few[0, r], few[1, r] = quantize_row(line[r], lineq[r])
            product(lineq, few, 0, count, weights.output, layer, RESIDUAL, x, first, sums)
            for r in range(first, first + count):
                normalize(x[r], weights.output_norm[layer], eps)
                ranges[0, r], ranges[1, r] = quantize_row(x[r], xq[r])
    end(like)
    return x[:queries]


@compiled
def dense(x, linear, ending, outputs):
    """outputs [R, N] = x [R, K] W^T + bias in float32, R a multiple of 32; see `product`."""
    ranges, sums = np.ones((2, len(x)), np.float32), np.empty((ROWS, COLUMNS), np.float32)
    for first in range(0, len(x), ROWS):
        product(x, ranges, first, ROWS, linear, 0, ending, outputs, first, sums)


@compiled
def token_logits(x, tokens, bias, logits):
    """logits [R, V] = x [R, H] tokens^T + bias, each row by itself; the table is read once."""
    for piece in range(len(tokens)):
        row = tokens[piece]
        for r in range(len(x)):
            total = scalar_product(address(x[r], 0), address(row, 0), len(row))
            logits[r, piece] = total + bias[piece]
