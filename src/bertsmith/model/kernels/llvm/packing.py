"""Right operands of bf16 products, packed as `block` and `add_block` of blocks.py read them.

Of a matrix [K, C] the inputs of 32 columns follow one another in pairs, a pair as a uint32:
[C / 32, K / 2, 32]. It may lie in memory with its rows or with its columns as lines, among others
of a longer line: a head's keys and values among those of all heads.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.llvm.blocks import (
    ADDRESS,
    COLUMNS,
    INTEGERS,
    LANES,
    WORD,
    address,
    emitted,
    int64,
    load_row,
    transpose_words,
    zeros,
)
from bertsmith.model.kernels.llvm.vector_rows import HALVES

WORDS = np.zeros(1, np.uint32)  # for `zeros`
PAIR = 4 * COLUMNS  # bytes of a pair of inputs of 32 columns


@compiled
def wide(length):
    """The length rounded up to a multiple of 32."""
    return (length + COLUMNS - 1) // COLUMNS * COLUMNS


@compiled
def packed_rows(rows, columns):
    """Room for `pack_rows`; the panels are no power of two apart, which a cache would mind."""
    pairs = rows // 2 + 1
    return zeros(columns // COLUMNS * pairs, COLUMNS, WORDS).reshape(
        (columns // COLUMNS, pairs, COLUMNS)
    )


@compiled
def pack_columns(x, first, count, column, few, packed):
    """Rows first..first + count of x, from `column` on, as columns: [C / 32, K / 2, 32].

    C is the count rounded up to a multiple of 32; behind the last are zeros. `few` bf16 [at least
    16, K] to work in.
    """
    size, inputs = x.shape[1], few.shape[1]
    for c in range(0, wide(count), LANES):
        whole = c + LANES <= count
        if not whole:
            few[:] = 0
            for r in range(count - c):
                few[r] = x[first + c + r, column : column + inputs]
        panel = c // COLUMNS * (inputs // 2) * COLUMNS + c % COLUMNS
        for k in range(0, inputs, 2 * LANES):
            target = address(packed, panel + k * LANES)
            if whole:
                source = address(x, (first + c) * size + column + k)
                transpose_words(source, 2 * size, target, PAIR)
            else:
                transpose_words(address(few, k), 2 * inputs, target, PAIR)


@emitted(types.void, ADDRESS, ADDRESS, WORD, ADDRESS, WORD)
def pair_rows(builder, upper, lower, columns, target, panel_step):
    """Two rows of numbers of bf16 as pairs: 32 columns after another, `panel_step` bytes apart."""
    sixteen = ir.Constant(INTEGERS, [16] * LANES)
    with cgutils.for_range(builder, builder.sdiv(columns, int64(COLUMNS))) as loop:
        place = builder.gep(target, [builder.mul(loop.index, panel_step)])
        for half in (0, 1):
            chunk = builder.add(builder.mul(loop.index, int64(2)), int64(half))
            first, second = (
                builder.zext(load_row(builder, row, int64(2 * LANES), chunk, HALVES), INTEGERS)
                for row in (upper, lower)
            )
            pairs = builder.or_(first, builder.shl(second, sixteen))
            own = builder.gep(place, [int64(4 * LANES * half)])
            builder.store(pairs, builder.bitcast(own, INTEGERS.as_pointer()), align=1)


@compiled
def pack_rows(x, first, count, column, nothing, packed, at):
    """Rows first..first + count of x, from `column` on, as inputs, from pair `at` on.

    `packed` [C / 32, at least (count + 1) / 2, 32]; `nothing` bf16 [1, at least C]: zeros, behind
    an odd number of rows.
    """
    size, panels, pairs = x.shape[1], packed.shape[0], packed.shape[1]
    for k in range((count + 1) // 2):
        upper = address(x, (first + 2 * k) * size + column)
        lower = address(x, (first + 2 * k + 1) * size + column)
        if 2 * k + 1 == count:
            lower = address(nothing, 0)
        target = address(packed, (at + k) * COLUMNS)
        pair_rows(upper, lower, panels * COLUMNS, target, PAIR * pairs)
