"""The gradient of a linear layer's weight as a product of int8, by AVX-512 VNNI or AMX.

It is a sum over tokens, some of which have numbers a hundred times as large as others: with one
scale a column they would round the others to nothing. So every PART tokens have scales of their
own, and their exact sums are scaled and added in float32 as soon as they are there. A gradient is
then off by 1.2% of its norm, with one scale for 2,048 tokens by 2.0% (docs/design/lab.md).

Letters: N tokens, O outputs, I inputs of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from bertsmith.base.jit import compiled
from bertsmith.base.processes import share
from bertsmith.model.kernels.elementwise import rows
from bertsmith.model.kernels.llvm.blocks import (
    ADDRESS,
    ANY,
    COLUMNS,
    FLOAT,
    INTEGERS,
    LANES,
    LINE,
    ROWS,
    TWO,
    WORD,
    address,
    begin,
    emitted,
    end,
    finished_block,
    int64,
    integer_dtype,
    load_row,
    transpose_words,
    zeros,
)
from bertsmith.model.kernels.llvm.vector_rows import VECTOR, fma, round_block, spread
from bertsmith.model.kernels.numbers import (
    LARGEST_BYTE,
    MAGNITUDE,
    SMALLEST,
    bits_to_float,
    float_to_bits,
    load,
    whole,
)

PART = 128
PANEL = 128  # inputs of which a product's operand stays in the second cache
GROUPS = PART // 4  # words of a column's tokens of a part
LEAST_SHARE = 1 << 25  # products of two bytes: a smaller part of a matmul no idle thread takes
UNSIGNED = np.int32(128)  # added to a byte from -127 to 127


@emitted(types.void, ANY, ADDRESS, WORD, ADDRESS, WORD, WORD, TWO, ADDRESS, ADDRESS, ADDRESS)
def add_token_block(builder, dtype, a, a_step, b, b_step, groups, scales, starts, sums, c):
    """c[32, 32] += a[32, T] b[T, 32] of bytes, T tokens in groups of 4; c is float32.

    The first argument is an array of the dtype of a as `block` takes it; steps are as there, `sums`
    as of `finished_block`. To the sums `starts` int32 [32] is added, and they are multiplied by two
    `scales` float32 [32], of the rows and of the columns.
    """
    (of_rows, of_columns), four = scales, int64(4)

    def finish(builder: Any, sums: Any, first: Any, column: int) -> None:
        columns = [int64(column + LANES * n) for n in range(len(sums[0]))]
        shifts = [load_row(builder, starts, four, where, INTEGERS) for where in columns]
        factors = [load_row(builder, of_columns, four, where, VECTOR) for where in columns]
        for r, row in enumerate(sums):
            number = builder.add(first, int64(r))
            of_row = spread(builder, load_row(builder, of_rows, four, number, FLOAT))
            line = builder.gep(c, [builder.mul(number, int64(4 * COLUMNS))])
            for where, shift, factor, value in zip(columns, shifts, factors, row, strict=True):
                value = builder.sitofp(builder.add(value, shift), VECTOR)
                scale = builder.fmul(of_row, factor)
                place = builder.gep(line, [builder.mul(where, four)])
                place = builder.bitcast(place, VECTOR.as_pointer())
                total = fma(builder, value, scale, builder.load(place, align=1))
                builder.store(total, place, align=1)

    make = finished_block(dtype, finish)
    make(builder, a, a_step, b, b_step, sums, groups, int64(ROWS))


@compiled
def pack_part(matrix, shift, packed, scale, sums):
    """At most PART rows of a matrix [N, C] in bytes for sums over them, four of a column in a word.

    A column's `scale` float32 [C] makes its largest byte 127. `shift` is added to each; packed
    int32 [C / 32, PART / 4, 32], with zeros, shifted like all, for the rows that are lacking.
    `sums` int32 [C] are those of the bytes without `shift`.
    """
    rows, columns = matrix.shape
    factors, tops = np.empty(columns, np.float32), np.zeros(columns, np.int32)
    zeros_after = np.zeros(columns, matrix.dtype)
    for row in range(rows):
        line = matrix[row]
        for column in range(columns):  # as integers, see `largest`
            tops[column] = max(tops[column], float_to_bits(load(line[column])) & MAGNITUDE)
    for column in range(columns):
        top = bits_to_float(tops[column])
        top = SMALLEST if top < SMALLEST else top  # not a number stays so
        factors[column] = LARGEST_BYTE / top
        scale[column] = top / LARGEST_BYTE
    sums[:] = 0
    for group in range(packed.shape[1]):
        row = 4 * group
        one = matrix[row] if row < rows else zeros_after
        two = matrix[row + 1] if row + 1 < rows else zeros_after
        three = matrix[row + 2] if row + 2 < rows else zeros_after
        four = matrix[row + 3] if row + 3 < rows else zeros_after
        for panel in range(columns // COLUMNS):
            target = packed[panel, group]
            for n in range(COLUMNS):
                column = panel * COLUMNS + n
                factor = factors[column]
                a, b = whole(load(one[column]) * factor), whole(load(two[column]) * factor)
                c, d = whole(load(three[column]) * factor), whole(load(four[column]) * factor)
                sums[column] += np.int32(a + b + c + d)
                low = (a + shift & 255) | (b + shift & 255) << 8
                high = (c + shift & 255) << 16 | (d + shift & 255) << 24
                target[n] = np.int32(low | high)


@compiled
def pack_tokens(gradient, left, left_scales, x, right, right_scales, starts):
    """Both operands of `multiply_tokens`, PART tokens after another.

    left int32 [N / PART, O, PART / 4], right [N / PART, I / 32, PART / 4, 32], see `pack_part`;
    their scales float32 [N / PART, O] and [.., I]; starts int32 [N / PART, I].
    """
    outputs, groups = left.shape[1:]
    words = np.empty((outputs // COLUMNS, groups, COLUMNS), np.int32)
    sums = np.empty(outputs, np.int32)  # nobody asks for these
    for part in range(len(left)):
        tokens = slice(part * PART, (part + 1) * PART)
        pack_part(gradient[tokens], UNSIGNED, words, left_scales[part], sums)
        for row in range(0, outputs, LANES):
            for group in range(0, groups, LANES):
                panel = row // COLUMNS * groups * COLUMNS
                source = address(words, panel + group * COLUMNS + row % COLUMNS)
                target = address(left, (part * outputs + row) * groups + group)
                transpose_words(source, 4 * COLUMNS, target, 4 * groups)
        pack_part(x[tokens], np.int32(0), right[part], right_scales[part], starts[part])
        for column in range(x.shape[1]):
            starts[part, column] *= -UNSIGNED


@compiled
def multiply_tokens(like, gradient, x, starts, last, product, part_rows):
    """product [O, I] = gradient^T x of bytes and their scales, see `pack_tokens`.

    Only rows of it from part_rows[0] to part_rows[1] are computed, whole blocks of 32.
    The gradient's bytes are shifted by UNSIGNED and lie as [N / PART, O, PART / 4] words; `starts`
    are the sums of x times -UNSIGNED. `last`: words of a row of the last part that hold tokens.
    `like` is an array of the dtype that `block` takes.
    """
    (left, left_scales), (right, right_scales) = gradient, x
    lefts, rights = product.shape
    parts, _, groups, _ = right.shape
    total, sums = zeros(ROWS, COLUMNS, left_scales), zeros(ROWS, COLUMNS, starts)
    begin(like)
    for panel in range(0, rights, PANEL):
        for row in range(part_rows[0], part_rows[1], ROWS):
            for column in range(panel, min(panel + PANEL, rights), COLUMNS):
                total[:] = 0
                for part in range(parts):
                    scales = (
                        address(left_scales, part * lefts + row),
                        address(right_scales, part * rights + column),
                    )
                    start = address(starts, part * rights + column)
                    used = last if part == parts - 1 else groups
                    add_token_block(
                        *(like, address(left, (part * lefts + row) * groups), 4 * groups),
                        *(address(right, (part * rights + column) * groups), 4 * COLUMNS),
                        *(used, scales, start, address(sums, 0), address(total, 0)),
                    )
                target = address(product, row * rights + column)
                round_block(address(total, 0), ROWS, product, target, 2 * rights)
    end(like)


def like_rows(inputs: int) -> np.ndarray:
    """An array of the dtype of quantized rows of so many inputs, int8 or uint8."""
    dtype = integer_dtype(inputs)
    assert dtype in (np.int8, np.uint8), dtype  # not AVX2's
    return np.zeros(1, dtype)


def share_rows(work: Callable[[int, int], None], rows: int, products: int) -> None:
    """Do work(start, stop) of a matmul's rows, `products` each, of which idle threads take parts.

    >>> share_rows(lambda start, stop: print(start, stop), 100, 1)
    0 100
    """
    parts = max(1, rows * products // LEAST_SHARE)
    share(work, rows, -(-rows // parts // ROWS) * ROWS)


def last_words(tokens: int, dtype: np.dtype) -> int:
    """Words of the last part of so many tokens, as whole tiles (int8) or instructions take them.

    >>> [last_words(tokens, np.dtype(np.uint8)) for tokens in (1, 5, PART, PART + 64)]
    [1, 2, 32, 16]
    >>> [last_words(tokens, np.dtype(np.int8)) for tokens in (1, 64, 65, PART + 5)]
    [16, 16, 32, 16]
    """
    at_once = LINE if dtype == np.int8 else 4  # tokens
    rest = (tokens - 1) % PART + 1
    return -(-rest // at_once) * at_once // 4


def int8_weight_gradient(gradient_NO: Tensor, x_NI: Tensor) -> Tensor:
    """gradient^T @ x, bf16 [O, I], both sizes multiples of 64."""
    (tokens, outputs), inputs = gradient_NO.shape, x_NI.shape[1]
    parts = -(-tokens // PART)
    assert outputs % LINE == 0 and inputs % LINE == 0, (outputs, inputs)
    # of PyTorch's memory, which begins with a line of the cache, for AMX
    shapes = (parts, outputs, GROUPS), (parts, inputs // COLUMNS, GROUPS, COLUMNS)
    left, right = (torch.empty(shape, dtype=torch.int32).numpy() for shape in shapes)
    left_scales, right_scales = (np.empty((parts, c), np.float32) for c in (outputs, inputs))
    starts = np.empty((parts, inputs), np.int32)
    pack_tokens(rows(gradient_NO), left, left_scales, rows(x_NI), right, right_scales, starts)
    product = torch.empty((outputs, inputs), dtype=torch.bfloat16)
    like = like_rows(PART)
    last = last_words(tokens, like.dtype)
    operands = like, (left, left_scales), (right, right_scales)

    def multiply(start: int, stop: int) -> None:
        multiply_tokens(*operands, starts, last, rows(product), (start, stop))

    share_rows(multiply, outputs, tokens * inputs)
    return product
