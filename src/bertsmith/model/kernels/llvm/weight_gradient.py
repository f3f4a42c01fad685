"""The gradient of a linear layer's weight as a product of int8, by AVX-512 VNNI.

It is a sum over tokens, some of which have numbers a hundred times as large as others: with one
scale a column they would round the others to nothing. So every PART tokens have scales of their
own, and their exact sums are scaled and added in float32 while they are in registers. A gradient
is then off by 1.2% of its norm, with one scale for 2,048 tokens by 2.0% (docs/design/lab.md).

Letters: N tokens, O outputs, I inputs of the layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import rows
from bertsmith.model.kernels.llvm.blocks import (
    ADDRESS,
    COLUMNS,
    FLOAT,
    LINE,
    ROWS,
    address,
    cpu_features,
    emitted,
    int64,
    vector_block,
    zeros,
)
from bertsmith.model.kernels.llvm.vector_rows import INTEGERS, VECTOR, fma, round_block, spread
from bertsmith.model.kernels.numbers import (
    LARGEST_BYTE,
    MAGNITUDE,
    ROUND,
    SMALLEST,
    bits_to_float,
    float_to_bits,
    load,
    vectorized,
)

PART = 128
PANEL = 128  # inputs of which a product's operand stays in the second cache
ROUND_BITS = ROUND.view(np.int32)
UNSIGNED = np.int32(128)  # added to a byte from -127 to 127


@emitted
def add_token_block(context, a, a_step, b, b_step, groups, scales, starts, c):
    """c[32, 32] += a^T[32, T] b[T, 32] of bytes, T tokens in groups of 4; AVX-512 VNNI.

    Steps are bytes from a group to the next; in it the bytes of a row of c (b: a column) are side
    by side, those of a unsigned. Sums begin at `starts` int32 [32], and are multiplied by two
    `scales` float32 [32], of the rows and of the columns; c is float32.
    """

    def code(context, builder, signature, arguments):
        a, a_step, b, b_step, groups, scales, starts, c = arguments
        of_rows, of_columns = (builder.extract_value(scales, n) for n in range(2))

        def some(array: Any, number: Any, kind: Any) -> Any:
            place = builder.gep(array, [builder.mul(number, int64(4))])
            return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)

        def start(builder: Any, column: int) -> Any:
            return some(starts, int64(column), INTEGERS)

        def finish(builder: Any, sums: Any, row: Any, column: int) -> Any:
            scale = spread(builder, some(of_rows, row, FLOAT))
            scale = builder.fmul(scale, some(of_columns, int64(column), VECTOR))
            place = builder.add(builder.mul(row, int64(COLUMNS)), int64(column))
            return fma(builder, builder.sitofp(sums, VECTOR), scale, some(c, place, VECTOR))

        make = vector_block(types.uint8, start, finish)
        rows, step = int64(ROWS), int64(4 * COLUMNS)
        make(builder, a, int64(4), b, b_step, c, step, groups, rows, a_step)
        return context.get_dummy_value()

    wide, two = types.int64, types.UniTuple(ADDRESS, 2)
    return types.void(ADDRESS, wide, ADDRESS, wide, wide, two, ADDRESS, ADDRESS), code


@vectorized
def whole(number):
    """The nearest whole number of a float32 below 2^21, as an int32; of what is not finite any."""
    return np.int32(float_to_bits(number + ROUND) - ROUND_BITS)


@vectorized
def pack_tokens(matrix, shift, packed, scales, sums):
    """A matrix [N, C] in bytes for sums over its rows, four rows of a column in a word.

    Of PART rows each column has a scale: `scales` float32 [N / PART, C]. `shift` is added to each
    byte; packed int32 [N / 4, C or more], with zeros, shifted like all, behind the last row. `sums`
    int32, as `scales`, are those of the bytes without `shift`.
    """
    tokens, columns = matrix.shape
    factors, tops = np.empty(columns, np.float32), np.empty(columns, np.int32)
    zeros_after = np.zeros(columns, matrix.dtype)
    for part in range(len(scales)):
        scale, total = scales[part], sums[part]
        first, last = part * PART, min(tokens, (part + 1) * PART)
        tops[:], total[:] = 0, 0
        for row in range(first, last):
            line = matrix[row]
            for column in range(columns):  # as integers, see `largest`
                tops[column] = max(tops[column], float_to_bits(load(line[column])) & MAGNITUDE)
        for column in range(columns):
            top = bits_to_float(tops[column])
            top = SMALLEST if top < SMALLEST else top  # not a number stays so
            factors[column] = LARGEST_BYTE / top
            scale[column] = top / LARGEST_BYTE
        for row in range(first, last, 4):
            target, one = packed[row // 4], matrix[row]
            two = matrix[row + 1] if row + 1 < last else zeros_after
            three = matrix[row + 2] if row + 2 < last else zeros_after
            four = matrix[row + 3] if row + 3 < last else zeros_after
            for column in range(columns):
                factor = factors[column]
                a, b = whole(load(one[column]) * factor), whole(load(two[column]) * factor)
                c, d = whole(load(three[column]) * factor), whole(load(four[column]) * factor)
                total[column] += np.int32(a + b + c + d)
                low = (a + shift & 255) | (b + shift & 255) << 8
                high = (c + shift & 255) << 16 | (d + shift & 255) << 24
                target[column] = np.int32(low | high)


@compiled
def multiply_tokens(gradient, x, starts, product):
    """product [O, I] = gradient^T x of bytes and their scales, see `pack_tokens`.

    The gradient's bytes are shifted by UNSIGNED; `starts` are the sums of x times -UNSIGNED.
    """
    (left, left_scales), (right, right_scales) = gradient, x
    lefts, rights = product.shape
    left_width, right_width = left.shape[1], right.shape[1]
    total = zeros(ROWS, COLUMNS, left_scales)
    for panel in range(0, rights, PANEL):
        for row in range(0, lefts, ROWS):
            for column in range(panel, min(panel + PANEL, rights), COLUMNS):
                total[:] = 0
                for part in range(len(starts)):
                    first = part * PART // 4
                    scales = (
                        address(left_scales, part * lefts + row),
                        address(right_scales, part * rights + column),
                    )
                    add_token_block(
                        *(address(left, first * left_width + row), 4 * left_width),
                        *(address(right, first * right_width + column), 4 * right_width),
                        *(min(PART // 4, len(left) - first), scales),
                        *(address(starts, part * rights + column), address(total, 0)),
                    )
                target = address(product, row * rights + column)
                round_block(address(total, 0), ROWS, product, target, 2 * rights)


def int8_weight_gradient(gradient_NO: Tensor, x_NI: Tensor) -> Tensor:
    """gradient^T @ x, bf16 [O, I]; of sizes that are no multiples of 32 a product of bf16."""
    shape = gradient_NO.shape[1], x_NI.shape[1]
    if "avx512vnni" not in cpu_features() or any(size % COLUMNS for size in shape):
        return gradient_NO.t() @ x_NI
    left, left_scales, _ = _packed(gradient_NO, UNSIGNED)
    right, right_scales, sums = _packed(x_NI, np.int32(0))
    product = torch.empty(shape, dtype=torch.bfloat16)
    multiply_tokens((left, left_scales), (right, right_scales), -UNSIGNED * sums, rows(product))
    return product


def _packed(matrix_NC: Tensor, shift: np.int32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, columns = matrix_NC.shape
    # rows a power of two apart would fall on each other in the cache
    packed = np.empty((-(-tokens // 4), columns + LINE // 4), np.int32)
    scales = np.empty((-(-tokens // PART), columns), np.float32)
    sums = np.empty(scales.shape, np.int32)
    pack_tokens(rows(matrix_NC), shift, packed, scales, sums)
    return packed, scales, sums
