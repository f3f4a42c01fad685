"""The masked-LM loss of training in int8: exact sums of int8 products, a gradient drawn by chance.

The loss's gradient by a logit is the piece's probability, less 1 for the label. Nearly all of the
30,522 probabilities of a position are tiny, yet two of the loss's three matmuls are spent on them.
Here each becomes a multiple of 1 / UNITS by stochastic rounding (Gupta et al. 2015, arXiv
1502.02551): up or down by chance, right on average. Some UNITS of a position are then not 0, and
the two matmuls become sums of few rows. The label's part is not drawn, nor the bias's gradient.

Of one position rounding adds at most 1 / UNITS of the variance that the labels, drawn from these
probabilities, give the table's gradient; by hidden states it adds that share of the mean square
row of the table. Of several positions a piece's probabilities are rounded together, by systematic
sampling (Madow and Madow 1944): their running sum begins at a number from 0 to 1 by chance, and a
position has a unit whenever the sum passes a whole one. So a batch's sum is off by less than one.

Logits are products of int8, as in the layers (`quantized_linear.py`); 32 pieces at a time become
powers of two, which are kept in bf16 until their sums are known. AVX-512 VNNI or AMX is needed.

Letters: N masked positions, V vocabulary, H hidden size, P panels of 32 pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import Kernel, rows, vector
from bertsmith.model.kernels.llvm.blocks import (
    ADDRESS,
    ANY,
    COLUMNS,
    INT,
    LANES,
    LINE,
    NUMBER,
    PAIR,
    ROWS,
    SHORT,
    THREE,
    TWO,
    WIDE,
    WORD,
    WORDS,
    address,
    begin,
    declared,
    emitted,
    end,
    finished_block,
    int64,
    zeros,
)
from bertsmith.model.kernels.llvm.tiled_masked_lm import LARGEST, LN_2, LOWEST
from bertsmith.model.kernels.llvm.vector_rows import (
    VECTOR,
    bf16_chunk,
    chunk_at,
    finished_rows,
    fma,
    larger,
    load_chunk,
    polynomial,
    quantize_row,
    spread,
    spread_at,
    store_chunk,
)
from bertsmith.model.kernels.llvm.weight_gradient import like_rows
from bertsmith.model.kernels.numbers import LOG2_E, hash32, load
from bertsmith.model.kernels.quantized_linear import pack_inputs, quantize_columns

UNITS = np.float32(256)
FIRST = 8  # panels whose largest logits the powers begin at
_NODES = np.polynomial.chebyshev.chebpts1(5) / 2 + 0.5
# 2^x on [0, 1], lowest power first
POWERS = tuple(np.polynomial.polynomial.polyfit(_NODES, 2**_NODES, 4).astype(np.float32))
AT_ONCE = 512  # positions whose probabilities are added up
STEP = np.float32(2**-24)  # between numbers from 0 to 1 by chance
ROUNDING = np.float32(1e-4)  # of an exponent of two
INT32 = np.zeros(1, np.int32)


def _power(builder: Any, x: Any) -> Any:
    """2^x of 16 numbers by AVX-512, relative error 4e-6. Not a number stays so."""
    one, two = (ir.FunctionType(VECTOR, [VECTOR] * n) for n in (1, 2))
    part = builder.call(ir.InlineAsm(one, "vreduceps $$1, $1, $0", "=v,v"), [x])  # x - floor(x)
    scale = ir.InlineAsm(two, "vscalefps $2, $1, $0", "=v,v,v")  # by 2^floor(x)
    return builder.call(scale, [polynomial(builder, POWERS, part), x])


@emitted(types.void, ANY, PAIR, PAIR, ADDRESS, WORDS, TWO, THREE, THREE, PAIR)
def powers_block(builder, dtypes, a, b, sums, shape, ranges, vectors, found, target):
    """32 columns of logits x, in units of log 2, for some rows: target = 2^(x - start) in bf16.

    `found` are addresses of the rows' starts, float32, and of 16 float32 a row each that keep the
    largest x and the sum of the powers; the other arguments are those of `linear_block`.
    """
    (rows_like, target_like), (groups, rows) = dtypes, shape
    starts, tops, totals = found

    def ended(builder: Any, values: Any, line: Any, first: int, row: Any) -> None:
        top, total = (chunk_at(builder, start, row) for start in (tops, totals))
        start = spread_at(builder, starts, row)
        highest, sums = builder.load(top, align=1), builder.load(total, align=1)
        for n, x in enumerate(values):
            highest = larger(builder, x, highest)
            power = _power(builder, builder.fsub(x, start))
            store_chunk(builder, power, line, int64(first + n), target_like)
            sums = builder.fadd(sums, power)
        builder.store(highest, top, align=1)
        builder.store(sums, total, align=1)

    finish = finished_rows(rows, ranges, vectors, target, ended)
    finished_block(rows_like, finish)(builder, *a, *b, sums, groups, rows)


@emitted(WORD, ADDRESS, WORD, TWO, TWO, THREE)
def draw_panel(builder, powers, count, factors, lines, found):
    """Draw the units of `count` positions of 32 pieces; how many positions have any.

    All others are addresses. A position's powers, bf16 [32], times its two `factors` are added to
    two `lines`, float32 [32]; it has as many units as whole numbers the first sum passes.
    `found` has room for all positions, and is given those that have any: their numbers, int64, bits
    that say of which pieces, uint32, and the units, float32 [32] each.
    """
    floor = declared(builder.module, f"llvm.floor.v{LANES}f32", VECTOR, [VECTOR])
    chunks = [chunk_at(builder, line, int64(half)) for line in lines for half in (0, 1)]
    state = [cgutils.alloca_once_value(builder, builder.load(own, align=1)) for own in chunks]
    used = cgutils.alloca_once_value(builder, int64(0))
    with cgutils.for_range(builder, count) as loop:
        line = builder.gep(powers, [builder.mul(loop.index, int64(2 * COLUMNS))])
        factor, weight = (spread_at(builder, start, loop.index) for start in factors)
        bits, own = ir.Constant(INT, 0), builder.load(used)
        for half in (0, 1):
            power, total = bf16_chunk(builder, line, int64(half)), builder.load(state[half])
            after = fma(builder, power, factor, total)
            builder.store(after, state[half])  # the next sum need not wait for the floors
            units = builder.fsub(builder.call(floor, [after]), builder.call(floor, [total]))
            chunk = builder.add(builder.mul(own, int64(2)), int64(half))
            builder.store(units, chunk_at(builder, found[2], chunk), align=1)
            shares = fma(builder, power, weight, builder.load(state[2 + half]))
            builder.store(shares, state[2 + half])
            some = builder.fcmp_unordered("!=", units, ir.Constant(VECTOR, [0.0] * LANES))
            some = builder.zext(builder.bitcast(some, SHORT), INT)
            bits = builder.or_(bits, builder.shl(some, ir.Constant(INT, LANES * half)))
        for place, value in zip(found[:2], (loop.index, bits), strict=True):
            place = builder.bitcast(place, value.type.as_pointer())
            builder.store(value, builder.gep(place, [own]))
        has_any = builder.icmp_unsigned("!=", bits, ir.Constant(INT, 0))
        builder.store(builder.add(own, builder.zext(has_any, WIDE)), used)
    for kept, chunk in zip(state, chunks, strict=True):
        builder.store(builder.load(kept), chunk, align=1)
    return builder.load(used)


@emitted(WORD, types.uint32)
def trailing_zeros(builder, bits):
    """The number of the lowest bit that is set."""
    count = declared(builder.module, "llvm.cttz.i32", INT, [INT, ir.IntType(1)])
    return builder.zext(builder.call(count, [bits, ir.Constant(ir.IntType(1), 1)]), WIDE)


@emitted(types.void, TWO, TWO, NUMBER, WORD)
def add_multiples(builder, one, two, factor, length):
    """target += factor x source for two pairs (target, source) of addresses of `length` float32."""
    factor = spread(builder, factor)
    with cgutils.for_range(builder, builder.sdiv(length, int64(LANES))) as loop:
        for target, source in (one, two):
            place = chunk_at(builder, target, loop.index)
            numbers = load_chunk(builder, source, loop.index)
            total = fma(builder, factor, numbers, builder.load(place, align=1))
            builder.store(total, place, align=1)


@compiled
def pack_panel(table, bias, first, panel, packed, vectors):
    """32 pieces of a table bf16 [V, H] for `powers_block`, which has logits in units of log 2.

    packed int32 [1, H / 4, 32] as `pack_weight` has it; `vectors` float32 [3, 32]: scale, total and
    bias. Behind the last piece are columns whose power is 0. `panel` int8 [32, H] is to work in.
    """
    here = min(COLUMNS, len(table) - first)
    quantize_columns(table[first : first + here], panel, vectors[0], vectors[1])
    pack_inputs(panel, packed, 0)
    for c in range(here):
        vectors[0, c] *= LOG2_E
        vectors[1, c] *= LOG2_E
        vectors[2, c] = load(bias[first + c]) * LOG2_E
    vectors[:2, here:], vectors[2, here:] = 0, LOWEST


@compiled
def own_logit(row, range_, column, packed, vectors):
    """A row's logit in one of 32 columns, but for its last bits as `powers_block` has it."""
    words, total = packed[0].view(np.int8), np.int32(0)
    for k in range(len(row)):
        total += np.int32(np.uint8(row[k])) * np.int32(words[k // 4, 4 * column + k % 4])
    scale, low = range_
    offset = low * vectors[1, column] + vectors[2, column]
    return np.float32(total) * (scale * vectors[0, column]) + offset


@compiled
def find_powers(hidden, like, table, bias, labels, powers, found):
    """Write powers of two of all logits, bf16 [P, N, 32], and `found`; the labels' logits [N].

    `found` are starts float32 [N], tops and totals [N, 16]. A position's start is its largest logit
    among the first pieces; where a later one is too far above for float32, all is done again with
    that. The largest of its tops is the largest of its logits, the sum of its totals that of
    2^(logit - start).
    """
    (count, size), (starts, tops, totals) = hidden.shape, found
    quantized, ranges = zeros(count + ROWS, size, like), np.empty((2, count), np.float32)
    sums, likes, own = zeros(ROWS, COLUMNS, INT32), (hidden, like), np.empty(count, np.float32)
    packed = zeros(size // 4, COLUMNS, INT32).reshape((1, size // 4, COLUMNS))
    panel, vectors = np.zeros((COLUMNS, size), np.int8), np.empty((3, COLUMNS), np.float32)
    by_piece = np.argsort(labels)
    for n in range(count):
        source, target = address(hidden, n * size), address(quantized, n * size)
        ranges[0, n], ranges[1, n] = quantize_row(likes, source, None, target, size)
    starts[:] = 0
    begin(like)
    for attempt in range(3):
        tops[:], totals[:], place = LOWEST, 0, 0
        for number in range(len(powers) if attempt else min(FIRST, len(powers))):
            first = number * COLUMNS
            pack_panel(table, bias, first, panel, packed, vectors)
            for n in range(0, count, ROWS):
                a, b = (address(quantized, n * size), size), (address(packed, 0), 4 * COLUMNS)
                shape, of_rows = (size // 4, min(ROWS, count - n)), address(ranges, n)
                scale, total = address(vectors, 0), address(vectors, COLUMNS)
                of_columns = scale, total, address(vectors, 2 * COLUMNS)
                own_total = address(totals, n * LANES)
                of_powers = address(starts, n), address(tops, n * LANES), own_total
                target = address(powers, (number * count + n) * COLUMNS), LINE
                powers_block(
                    *((like, powers), a, b, address(sums, 0), shape),
                    *((of_rows, address(ranges, count + n)), of_columns, of_powers, target),
                )
            while attempt and place < count and labels[by_piece[place]] < first + COLUMNS:
                n = by_piece[place]
                range_ = ranges[0, n], ranges[1, n]
                own[n] = own_logit(quantized[n], range_, labels[n] - first, packed, vectors)
                place += 1
        highest = np.float32(0)
        for n in range(count):
            highest = max(highest, tops[n].max() - starts[n])
        if attempt and highest < LARGEST:
            break
        for n in range(count):
            starts[n] = tops[n].max()
    end(like)
    return own


@compiled
def draw_gradients(powers, inverses, hidden, table, labels, weights, key, gradients):
    """Write the gradients by hidden float32 [N, H], table bf16 [V, H] and bias float32 [V].

    `inverses` float32 [N] are 1 over the sums of the powers, `weights` the gradients by each loss.
    `key` uint32 is that of the draw.
    """
    hidden_gradient, table_gradient, bias_gradient = gradients
    (count, size), pieces = hidden.shape, len(table)
    states, table_rows = np.empty((count, size), np.float32), np.empty((COLUMNS, size), np.float32)
    sums, lines = np.empty((COLUMNS, size), np.float32), np.empty((2, COLUMNS), np.float32)
    positions, bits = np.empty(AT_ONCE, np.int64), np.empty(AT_ONCE, np.uint32)
    units, factors = np.empty((AT_ONCE, COLUMNS), np.float32), np.empty((2, count), np.float32)
    factors[0], factors[1] = inverses * UNITS, inverses * weights
    by_piece, place = np.argsort(labels), 0
    hidden_gradient[:] = 0
    for n in range(count):
        for h in range(size):
            states[n, h] = load(hidden[n, h])
    for panel in range(len(powers)):
        first, here = panel * COLUMNS, min(COLUMNS, pieces - panel * COLUMNS)
        sums[:], lines[1] = 0, 0
        for c in range(here):
            lines[0, c] = np.float32(hash32(np.uint32(first + c) ^ key) >> np.uint32(8)) * STEP
            for h in range(size):
                table_rows[c, h] = load(table[first + c, h])
        for block in range(0, count, AT_ONCE):
            # Numba frees an array behind its last use: addresses are taken where they are needed
            of_positions = address(factors, block), address(factors, count + block)
            of_pieces = address(lines, 0), address(lines, COLUMNS)
            found = address(positions, 0), address(bits, 0), address(units, 0)
            start = address(powers, (panel * count + block) * COLUMNS)
            some, real = min(AT_ONCE, count - block), np.uint32(2**here - 1)
            for k in range(draw_panel(start, some, of_positions, of_pieces, found)):
                n, left = block + positions[k], bits[k] & real
                by_position = address(hidden_gradient, n * size)
                while left:
                    c = trailing_zeros(left)
                    left &= left - np.uint32(1)
                    factor = units[k, c] * (weights[n] / UNITS)
                    one = address(sums, c * size), address(states, n * size)
                    add_multiples(one, (by_position, address(table_rows, c * size)), factor, size)
            for c in range(here):  # a large sum would lose small probabilities
                lines[0, c] -= np.floor(lines[0, c])
        while place < count and labels[by_piece[place]] < first + here:
            n = by_piece[place]
            c, factor = labels[n] - first, -weights[n]
            one = address(sums, c * size), address(states, n * size)
            two = address(hidden_gradient, n * size), address(table_rows, c * size)
            add_multiples(one, two, factor, size)
            lines[1, c] += factor
            place += 1
        for c in range(here):
            bias_gradient[first + c] = lines[1, c]
            source, target = address(sums, c * size), address(table_gradient, (first + c) * size)
            quantize_row((sums, table_gradient), source, None, target, size)


class Int8MaskedLMLoss(Kernel):
    """`masked_lm_loss` with hidden states and table in bf16, to which others are rounded."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        hidden_NH, table_VH, bias_V, labels_N, weights_N, ctx.key = given
        hidden, table = (part.bfloat16().contiguous() for part in (hidden_NH, table_VH))
        (count, size), labels, weights = hidden.shape, labels_N.numpy(), weights_N.numpy()
        assert labels.min() >= 0 and labels.max() < len(table)  # the loops look at no bounds
        panels = -(-len(table) // COLUMNS)
        powers = torch.empty((panels, count, COLUMNS), dtype=torch.bfloat16)
        found = np.empty(count, np.float32), *np.empty((2, count, LANES), np.float32)
        operands = rows(hidden), like_rows(size), rows(table), vector(bias_V)
        own = find_powers(*operands, labels, _panels(powers), found)
        starts, tops, totals = found
        sums = totals.sum(1, dtype=np.float64)
        loss = LN_2 * (weights @ (np.log2(sums) + starts - own))
        correct = (own >= tops.max(1) - ROUNDING).sum()
        ctx.inverses, ctx.types = (1 / sums).astype(np.float32), [x.dtype for x in given[:3]]
        ctx.save_for_backward(powers, hidden, table, labels_N, weights_N)
        ctx.mark_non_differentiable(number := torch.tensor(correct))
        return torch.tensor(loss, dtype=torch.float32), number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        powers, hidden, table, labels_N, weights_N = ctx.saved_tensors
        by_hidden, by_bias = torch.empty(hidden.shape), torch.empty(len(table))
        by_table = torch.empty_like(table)
        draw_gradients(
            *(_panels(powers), ctx.inverses, rows(hidden), rows(table), labels_N.numpy()),
            *((weights_N * gradients[0]).numpy(), np.uint32(ctx.key)),
            (by_hidden.numpy(), rows(by_table), by_bias.numpy()),
        )
        found = zip((by_hidden, by_table, by_bias), ctx.types, strict=True)
        return *(gradient.to(dtype) for gradient, dtype in found), None, None, None


def _panels(powers: Tensor) -> np.ndarray:
    return powers.view(torch.uint16).numpy()
