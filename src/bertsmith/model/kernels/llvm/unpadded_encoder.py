"""The encoder in compiled loops over texts without padding: one call a core. No torch.

Each row of hidden states is quantized by its own range, x = scale q + low, q from 0 to 255, and
each column of a weight by its own, w = column_scale r, r from -127 to 127, so that

    x w + bias = scale column_scale (q r) + (low sum(w) + bias)

with q r summed exactly in integers. Bias, GELU and residual follow in the same pass over a block
of 32 x 32, LayerNorm and the next row's range when some rows are complete. In float32 and bf16 the
same loops run with scale 1 and low 0.
`Linear` and `product` are those of training in int8, too (`quantized_linear.py`).
A text's answer depends on that text alone: the same bits in any company, and in every process,
as nothing here lets LLVM choose the order of a sum.

Letters: T tokens of all texts, Q rows that are read, H hidden size, F intermediate size, D head
size, N columns, V pieces, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.llvm.blocks import (
    COLUMNS,
    GROUP,
    ROWS,
    address,
    begin,
    block,
    end,
    in_tiles,
    meet,
    packed,
    zeros,
)
from bertsmith.model.kernels.llvm.vector_rows import (
    GELU,
    GELU_TANH,
    PLAIN,
    RESIDUAL,
    exponential_row,
    linear_block,
    normalize_row,
    quantize_row,
    scalar_product,
    scale_row,
)
from bertsmith.model.kernels.numbers import by_type

FLOATS = "float32", "uint16"  # the latter bf16's bits
LEVELS = np.float32(127)  # of a weight, on either side of 0


class Linear(NamedTuple):
    """A matrix a layer, all N columns of all L layers."""

    weight: np.ndarray  # [L, N K], see `packed`
    scale: np.ndarray  # float32 [L, N]: 1 in floats
    total: np.ndarray  # float32 [L, N]: of a column's weights, as quantized; 0 in floats
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
    key_value: np.ndarray  # [B, T, 2 H], of all, float32 or bf16; B 2 as some may be a layer ahead
    arrived: np.ndarray  # int64 [1], of all, 0 at first
    threads: int


@by_type
def group(rows):
    """Inputs of a column that an instruction takes at once."""
    number = GROUP[rows.dtype.name]
    return lambda rows: number


@by_type
def sums_like(rows):
    """An array of the dtype that sums of such rows' products have."""
    number = np.float32 if rows.dtype.name in FLOATS else np.int32
    return lambda rows: np.empty(1, number)


@by_type
def is_quantized(rows):
    """True for rows of whole numbers, whose range is known when they are complete."""
    answer = rows.dtype.name not in FLOATS
    return lambda rows: answer


@by_type
def rows_at_once(rows):
    """Rows that go through a feed-forward layer together: AMX is faster than caches give weights.

    Two matrices of BERT-base in int8 are 4.7 MB, more than a core's own cache.
    """
    number = 4 * ROWS if in_tiles(rows.dtype) else ROWS
    return lambda rows: number


@by_type
def hidden_rows(line, rows):
    """The target of GELU's numbers: `line`, to be quantized, or the rows themselves."""
    if rows.dtype.name in FLOATS:
        return lambda line, rows: rows
    return lambda line, rows: line


@partial(by_type, inline="never")
def pack_values(values, key_value, first, length, column):
    """Lay a head's values out for `block`: [T / G, D] units of G numbers, as uint32."""
    if key_value.dtype.name == "float32":

        def copied(values, key_value, first, length, column):
            units, head = key_value.view(np.uint32), values.shape[1]
            for j in range(length):
                source = units[first + j]
                for d in range(head):
                    values[np.uint64(j), np.uint64(d)] = source[np.uint64(column) + np.uint64(d)]

        return copied

    def paired(values, key_value, first, length, column):
        head = values.shape[1]
        for j in range(0, length, 2):
            upper = key_value[first + j]
            lower = key_value[first + min(j + 1, length - 1)]
            keep = np.uint32(0xFFFF if j + 1 < length else 0)
            for d in range(head):
                place = np.uint64(column) + np.uint64(d)
                low, high = np.uint32(upper[place]), np.uint32(lower[place]) & keep
                values[np.uint64(j // 2), np.uint64(d)] = low | (high << np.uint32(16))
        whole = (length + 1) // 2
        for j in range(whole, (whole + 15) // 16 * 16):
            values[j] = 0

    return paired


@compiled
def normalize(line, norm, eps):
    """LayerNorm of one row, in place; `norm` [2, H]."""
    size = len(line)
    normalize_row(address(line, 0), address(norm, 0), address(norm, size), size, eps)


@compiled
def quantize(line, rows, number):
    """Write a line's q as a row of `rows`; its (scale, low)."""
    start = address(rows, number * rows.shape[1])
    return quantize_row((line, rows), address(line, 0), None, start, len(line))


@compiled
def round_rows(lines, rows):
    """Write float32 lines [N, K] as rows of bf16."""
    for number in range(len(lines)):
        quantize(lines[number], rows, number)


@compiled
def product(rows, ranges, first, count, linear, layer, ending, target, start, sums):
    """`count` rows from `first` on times a layer's matrix, into `target` from `start` on.

    `ranges` [2, T]: scale and low of each row. `sums`: int32 or float32 [32, 32], to work in. Each
    32 columns of the matrix are read once; they stay in the cache for all rows.
    """
    weight, inputs, columns = linear.weight[layer], rows.shape[1], linear.bias.shape[1]
    groups, likes = inputs // group(rows), (rows, target)
    step, row_bytes = COLUMNS * group(rows) * weight.itemsize, inputs * rows.itemsize
    target_bytes = columns * target.itemsize
    for n in range(0, columns, COLUMNS):
        b, column = (address(weight, n * inputs), step), layer * columns + n
        scale, total = address(linear.scale, column), address(linear.total, column)
        vectors = scale, total, address(linear.bias, column)
        for row in range(0, count, ROWS):
            number, c = first + row, address(sums, 0)
            a, shape = (address(rows, number * inputs), row_bytes), (groups, min(ROWS, count - row))
            own = address(ranges, number), address(ranges, ranges.shape[1] + number)
            place = address(target, (start + row) * columns + n), target_bytes
            if ending == GELU:
                linear_block(likes, a, b, c, shape, own, vectors, place, GELU)
            elif ending == RESIDUAL:
                linear_block(likes, a, b, c, shape, own, vectors, place, RESIDUAL)
            elif ending == GELU_TANH:
                linear_block(likes, a, b, c, shape, own, vectors, place, GELU_TANH)
            else:
                linear_block(likes, a, b, c, shape, own, vectors, place, PLAIN)


@compiled
def attention(query, reads, key_value, starts, heads, context):
    """softmax(q k^T / sqrt(D)) v of each text: context float32 [Q, H] of queries [Q, H].

    Text t has the queries reads[t]:reads[t + 1], the keys and values starts[t]:starts[t + 1];
    queries, keys and values are float32 or bf16. Up to 15 rows behind a text's own are written as
    well, before those of the next text: there must be so many rows more than are wanted.
    """
    size, of_unit = query.shape[1], group(query)
    head = size // heads
    scale, half = np.float32(1 / math.sqrt(head)), head // of_unit
    longest = 0
    for text in range(len(starts) - 1):
        longest = max(longest, starts[text + 1] - starts[text])
    width = (longest + COLUMNS - 1) // COLUMNS * COLUMNS
    units = key_value.view(np.uint32)  # of G numbers: [T, 2 H / G]
    keys, values = zeros(half, width, units), zeros(width // of_unit, head, units)
    scores, exponentials = zeros(ROWS, width, context), zeros(ROWS, width, query)
    factors = np.empty(ROWS, np.float32)
    item, whole = query.itemsize, 1 if of_unit == 1 else COLUMNS  # AMX reads 32 numbers at once
    for text in range(len(starts) - 1):
        first, length = starts[text], starts[text + 1] - starts[text]
        if reads[text] == reads[text + 1]:
            continue
        for column in range(0, size, head):
            for j in range(length):
                source, place = units[first + j], np.uint64(column // of_unit)
                for d in range(half):  # not signed: Numba would look for negative numbers
                    keys[np.uint64(d), np.uint64(j)] = source[place + np.uint64(d)]
            pack_values(values, key_value, first, length, size + column)
            for start in range(reads[text], reads[text + 1], ROWS):
                count = min(ROWS, reads[text + 1] - start)
                a, p = address(query, start * size + column), address(exponentials, 0)
                for n in range(0, length, COLUMNS):
                    b, c = address(keys, n), address(scores, n)
                    block(query, a, item * size, b, 4 * width, c, 4 * width, half, count)
                for r in range(count):
                    row, target = address(scores, r * width), address(exponentials, r * width)
                    factors[r] = exponential_row(row, length, scale, exponentials, target)
                groups = (length + whole - 1) // whole * whole // of_unit
                for d in range(0, head, COLUMNS):
                    b, c = address(values, d), address(context, start * size + column + d)
                    block(query, p, item * width, b, 4 * head, c, 4 * size, groups, count)
                for r in range(count):
                    scale_row(address(context, (start + r) * size + column), head, factors[r])


@compiled
def encode(ids, types, starts, rows, reads, weights, heads, eps, gelu, like, states, share):
    """Last hidden states, float32 [Q, H], of the tokens `rows` (ascending) of this thread's share.

    Text t is ids[starts[t]:starts[t + 1]], of which rows[reads[t]:reads[t + 1]] are read, counted
    from the first token of the share. `like` is an array of the dtype of rows as they are
    multiplied. `states` [L, T, H], if not empty, is given the hidden states before each layer.
    """
    begun, tokens = share.first, share.last - share.first
    size, wide = weights.tokens.shape[1], weights.intermediate.bias.shape[1]
    padded = (tokens + ROWS - 1) // ROWS * ROWS
    x, xq = np.empty((padded, size), np.float32), zeros(padded, size, like)
    at_once = min(padded, rows_at_once(like))
    ranges, few = np.zeros((2, padded), np.float32), np.zeros((2, at_once), np.float32)
    few[0] = 1
    # more rows, as `block` reads and writes some behind the last one
    query = zeros(padded + ROWS, size, share.key_value)
    context = zeros(padded + ROWS, size, x)
    line, lineq = np.empty((at_once, wide), np.float32), zeros(at_once, wide, like)
    sums = zeros(ROWS, COLUMNS, sums_like(like))
    begin(like)
    begin(share.key_value)
    own = np.minimum(np.maximum(starts, begun), share.last) - begun
    for text in range(len(starts) - 1):
        for number in range(own[text], own[text + 1]):
            token = begun + number
            piece, place = weights.tokens[ids[token]], weights.positions[token - starts[text]]
            segment, row = weights.segments[types[token]], x[number]
            for column in range(size):
                row[column] = piece[column] + segment[column] + place[column]
            normalize(row, weights.norm, eps)
            ranges[0, number], ranges[1, number] = quantize(row, xq, number)
    queries = tokens
    for layer in range(len(weights.output_norm)):
        if len(states):
            states[layer, begun : share.last] = x[:tokens]
        key_value = share.key_value[layer % len(share.key_value)]
        product(xq, ranges, 0, tokens, weights.key_value, layer, PLAIN, key_value, begun, sums)
        owners = own
        if layer == len(weights.output_norm) - 1 and len(rows) < tokens:
            queries, owners = len(rows), reads
            for row in range(queries):
                x[row], xq[row], ranges[:, row] = x[rows[row]], xq[rows[row]], ranges[:, rows[row]]
        product(xq, ranges, 0, queries, weights.query, layer, PLAIN, query, 0, sums)
        if share.threads > 1:
            meet(address(share.arrived, 0), share.threads * (layer + 1))
        attention(query, owners, key_value, starts, heads, context)
        for first in range(0, queries, at_once):
            count = min(at_once, queries - first)
            for r in range(first, first + count):
                ranges[0, r], ranges[1, r] = quantize(context[r], xq, r)
            product(
                xq, ranges, first, count, weights.attention_output, layer, RESIDUAL, x, first, sums
            )
            for r in range(first, first + count):
                normalize(x[r], weights.attention_norm[layer], eps)
                ranges[0, r], ranges[1, r] = quantize(x[r], xq, r)
            hidden = hidden_rows(line, lineq)
            product(xq, ranges, first, count, weights.intermediate, layer, gelu, hidden, 0, sums)
            if is_quantized(like):
                for r in range(count):
                    few[0, r], few[1, r] = quantize(line[r], lineq, r)
            product(lineq, few, 0, count, weights.output, layer, RESIDUAL, x, first, sums)
            for r in range(first, first + count):
                normalize(x[r], weights.output_norm[layer], eps)
                ranges[0, r], ranges[1, r] = quantize(x[r], xq, r)
    end(share.key_value)
    end(like)
    return x[:queries]


@compiled
def dense(x, linear, ending, outputs):
    """outputs [R, N] = x [R, K] W^T + bias in float32, R a multiple of 32; see `product`."""
    ranges, sums = np.ones((2, len(x)), np.float32), np.empty((ROWS, COLUMNS), np.float32)
    product(x, ranges, 0, len(x), linear, 0, ending, outputs, 0, sums)


@compiled
def token_logits(x, tokens, bias, logits):
    """logits [R, V] = x [R, H] tokens^T + bias, each row by itself; the table is read once."""
    for piece in range(len(tokens)):
        row = tokens[piece]
        for r in range(len(x)):
            total = scalar_product(address(x[r], 0), address(row, 0), len(row))
            logits[r, piece] = total + bias[piece]


def stacked(layers: Iterable[tuple[np.ndarray, np.ndarray]], count: int, dtype: np.dtype) -> Linear:
    """The (weight [N, K], bias [N]) of each of `count` layers, rounded and packed for such rows."""
    found: list[np.ndarray] = []
    for layer, (weight, bias) in enumerate(layers):
        scale, total, matrix = np.ones(len(weight), np.float32), np.zeros(len(weight)), weight
        if dtype == np.uint16:
            matrix = np.empty(weight.shape, dtype)
            round_rows(np.ascontiguousarray(weight, np.float32), matrix)
        elif dtype != np.float32:
            scale = np.maximum(np.abs(weight).max(axis=1), 1e-20) / LEVELS
            matrix = np.rint(weight / scale[:, None]).astype(np.int8)
            total = matrix.sum(axis=1) * scale
        own = packed(matrix, dtype), scale, total.astype(np.float32), bias
        found = found or [
            zeros(count, array.size, array).reshape(count, *array.shape) for array in own
        ]
        for array, values in zip(found, own, strict=True):
            array[layer] = values
    return Linear(*found)
