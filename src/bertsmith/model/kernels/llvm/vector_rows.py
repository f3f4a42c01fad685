"""Rows of numbers in vectors of 16, written in LLVM's own code. No torch.

Softmax, LayerNorm, a scalar product, quantization, the end of a product of blocks; that with GELU
takes half as long as in a compiled loop over 32 numbers. Sums are taken in an order that is written
here: LLVM may be free to choose none, or the same function would give other bits in another place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from bertsmith.model.kernels.llvm.blocks import (
    ADDRESS,
    ANY,
    FLOAT,
    INT,
    INTEGERS,
    LANES,
    LITERAL,
    NUMBER,
    PAIR,
    SHORT,
    THREE,
    TWO,
    WORD,
    WORDS,
    cpu_features,
    declared,
    emitted,
    finished_block,
    int64,
    load_row,
)
from bertsmith.model.kernels.numbers import (
    EDGE,
    EXP_POWERS,
    LOG2_E,
    LOWEST,
    ROUND,
    SHORT_EDGE,
    curves,
    short_curve,
)

LEAST_RANGE, LEVELS = np.float32(1e-20), 255
VECTOR = ir.VectorType(FLOAT, LANES)
HALVES = ir.VectorType(SHORT, LANES)


def spread(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))


def spread_at(builder: Any, start: Any, number: Any) -> Any:
    """The float32 of that number behind an address, in every lane."""
    place = builder.gep(start, [builder.mul(number, int64(4))])
    return spread(builder, builder.load(builder.bitcast(place, FLOAT.as_pointer())))


def bf16_chunk(builder: Any, start: Any, chunk: Any) -> Any:
    """16 numbers of bf16 as float32."""
    halves = load_row(builder, start, int64(2 * LANES), chunk, HALVES)
    bits = builder.shl(builder.zext(halves, INTEGERS), ir.Constant(INTEGERS, [16] * LANES))
    return builder.bitcast(bits, VECTOR)


def _constants(number: Any) -> ir.Constant:
    return ir.Constant(VECTOR, [float(number)] * LANES)


def chunk_at(builder: Any, start: Any, chunk: Any) -> Any:
    """The address of the chunk of 16 numbers with that number."""
    own = builder.gep(start, [builder.mul(chunk, int64(4 * LANES))])
    return builder.bitcast(own, VECTOR.as_pointer())


def load_chunk(builder: Any, start: Any, chunk: Any) -> Any:
    """The chunk of 16 float32 with that number."""
    return builder.load(chunk_at(builder, start, chunk), align=1)


def store_chunk(builder: Any, value: Any, start: Any, chunk: Any, dtype: Any) -> None:
    """Store a chunk of 16 numbers; as uint16 rounded to the nearest even bf16."""
    if dtype == types.uint16 and "avx512bf16" in cpu_features():
        kind = ir.FunctionType(HALVES, [VECTOR])
        value = builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [value])
    elif dtype == types.uint16:
        bits, sixteen = builder.bitcast(value, INTEGERS), ir.Constant(INTEGERS, [16] * LANES)
        even = builder.and_(builder.lshr(bits, sixteen), ir.Constant(INTEGERS, [1] * LANES))
        bits = builder.add(bits, builder.add(even, ir.Constant(INTEGERS, [0x7FFF] * LANES)))
        value = builder.trunc(builder.lshr(bits, sixteen), HALVES)
    place = builder.gep(start, [builder.mul(chunk, int64(LANES * dtype.bitwidth // 8))])
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)


def fma(builder: Any, *numbers: Any) -> Any:
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(declared(builder.module, name, VECTOR, [VECTOR] * 3), numbers)


def polynomial(builder: Any, coefficients: Any, x: Any) -> Any:
    """`coefficients` have the lowest power first."""
    first, *others = reversed(coefficients)
    power = _constants(first)
    for coefficient in others:
        power = fma(builder, power, x, _constants(coefficient))
    return power


def _power_of_two(builder: Any, x: Any) -> Any:
    """2^x of 16 numbers below 127; up to -127 it is 0. Not a number stays so."""
    x = builder.select(builder.fcmp_ordered("<", x, _constants(LOWEST)), _constants(LOWEST), x)
    rounded = builder.fadd(x, _constants(ROUND))
    part = builder.fsub(x, builder.fsub(rounded, _constants(ROUND)))
    shift = ir.Constant(INTEGERS, [23] * LANES)
    shift = builder.shl(builder.bitcast(rounded, INTEGERS), shift)
    power = builder.bitcast(polynomial(builder, EXP_POWERS, part), INTEGERS)
    return builder.bitcast(builder.add(power, shift), VECTOR)


def _sum(builder: Any, start: Any, chunks: Any, add: Any) -> Any:
    """`add`(total, numbers, chunk's number) over all chunks; the total of 16, from 0."""
    total = cgutils.alloca_once_value(builder, _constants(0))
    with cgutils.for_range(builder, chunks) as loop:
        numbers = load_chunk(builder, start, loop.index)
        builder.store(add(builder.load(total), numbers, loop.index), total)
    return _lanes(builder, builder.load(total))


def larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _smaller(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


def _lanes(builder: Any, vector: Any, combine: Any = ir.IRBuilder.fadd) -> Any:
    """The sum, or another combination, of 16 numbers, by halves."""
    half = LANES // 2
    while half:
        undefined = ir.Constant(vector.type, ir.Undefined)
        parts = (
            builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(INT, half), own))
            for own in (list(range(half)), list(range(half, 2 * half)))
        )
        vector, half = combine(builder, *parts), half // 2
    return builder.extract_element(vector, ir.Constant(INT, 0))


@emitted(types.void, ADDRESS, ADDRESS, ADDRESS, WORD, NUMBER)
def normalize_row(builder, row, weight, bias, length, eps):
    """LayerNorm of `length` numbers at an address, a multiple of 16, in place."""
    chunks, count = builder.sdiv(length, int64(LANES)), builder.sitofp(length, FLOAT)
    total = _sum(builder, row, chunks, lambda total, x, _: builder.fadd(total, x))
    mean = spread(builder, builder.fdiv(total, count))

    def add_square(total: Any, x: Any, _: Any) -> Any:
        x = builder.fsub(x, mean)
        return fma(builder, x, x, total)

    variance = builder.fdiv(_sum(builder, row, chunks, add_square), count)
    root = declared(builder.module, "llvm.sqrt.f32", FLOAT, [FLOAT])
    deviation = builder.call(root, [builder.fadd(variance, eps)])
    scale = spread(builder, builder.fdiv(ir.Constant(FLOAT, 1), deviation))
    with cgutils.for_range(builder, chunks) as loop:
        place = chunk_at(builder, row, loop.index)
        x = builder.fmul(builder.fsub(builder.load(place, align=1), mean), scale)
        w, b = (load_chunk(builder, start, loop.index) for start in (weight, bias))
        builder.store(fma(builder, x, w, b), place, align=1)


@emitted(NUMBER, ADDRESS, ADDRESS, WORD)
def scalar_product(builder, a, b, length):
    """The sum of the products of `length` numbers at two addresses, a multiple of 32."""
    pairs = builder.sdiv(length, int64(2 * LANES))
    totals = [cgutils.alloca_once_value(builder, _constants(0)) for _ in "ab"]
    with cgutils.for_range(builder, pairs) as loop:
        for half, total in enumerate(totals):  # two sums, so that neither waits for the other
            chunk = builder.add(builder.mul(loop.index, int64(2)), int64(half))
            x, y = (load_chunk(builder, start, chunk) for start in (a, b))
            builder.store(fma(builder, x, y, builder.load(total)), total)
    return _lanes(builder, builder.fadd(*map(builder.load, totals)))


@emitted(NUMBER, ADDRESS, WORD, NUMBER, ANY, ADDRESS)
def exponential_row(builder, row, length, scale, dtype, target):
    """exp(scale (x - max x)) of `length` numbers at an address; 1 / their sum, of softmax.

    The target's dtype is that of an array; it may be the row. There must be room up to a multiple
    of 32 in both; what is there becomes 0.
    """
    last = builder.sdiv(builder.sub(length, int64(1)), int64(LANES))
    left = builder.trunc(builder.sub(length, builder.mul(last, int64(LANES))), INT)
    limit = spread(builder, builder.bitcast(left, FLOAT))
    lanes = ir.Constant(INTEGERS, list(range(LANES)))
    outside = builder.icmp_signed(">=", lanes, builder.bitcast(limit, INTEGERS))
    lowest, zero = _constants(-1e30), _constants(0)
    top = cgutils.alloca_once_value(builder, lowest)
    with cgutils.for_range(builder, last) as loop:
        numbers = load_chunk(builder, row, loop.index)
        builder.store(larger(builder, numbers, builder.load(top)), top)
    numbers = load_chunk(builder, row, last)
    numbers = builder.select(outside, lowest, numbers)
    numbers = larger(builder, numbers, builder.load(top))
    factor = builder.fmul(scale, ir.Constant(FLOAT, float(LOG2_E)))
    high = builder.fmul(_lanes(builder, numbers, larger), factor)
    factor, offset = spread(builder, factor), spread(builder, builder.fneg(high))
    total = cgutils.alloca_once_value(builder, zero)

    def exponential(chunk: Any) -> Any:
        x = load_chunk(builder, row, chunk)
        return _power_of_two(builder, fma(builder, x, factor, offset))

    def finish(power: Any, chunk: Any) -> None:
        store_chunk(builder, power, target, chunk, dtype)
        builder.store(builder.fadd(builder.load(total), power), total)

    with cgutils.for_range(builder, last) as loop:
        finish(exponential(loop.index), loop.index)
    power = builder.select(outside, zero, exponential(last))
    store_chunk(builder, zero, target, builder.or_(last, int64(1)), dtype)
    finish(power, last)
    return builder.fdiv(ir.Constant(FLOAT, 1), _lanes(builder, builder.load(total)))


@emitted(NUMBER, NUMBER, NUMBER)
def in_powers(builder, x, shift):
    """LOG2_E x + shift, rounded once: the exponent of two, as the columns below have it."""
    fma = declared(builder.module, "llvm.fma.f32", FLOAT, [FLOAT] * 3)
    return builder.call(fma, [x, ir.Constant(FLOAT, float(LOG2_E)), shift])


@emitted(types.void, ADDRESS, WORD, ADDRESS, WORD, ADDRESS, ADDRESS, ADDRESS)
def add_powers(builder, column, step, shifts, count, start, top, total):
    """top = max(top, x), total += 2^(x - start) of 16 columns, x = LOG2_E number + its row's shift.

    All but `step`, in bytes from row to row, and `count` of rows are addresses.
    """
    starts = builder.load(builder.bitcast(start, VECTOR.as_pointer()), align=1)
    places = [builder.bitcast(place, VECTOR.as_pointer()) for place in (top, total)]
    found = [cgutils.alloca_once_value(builder, builder.load(own, align=1)) for own in places]
    with cgutils.for_range(builder, count) as loop:
        row = builder.gep(column, [builder.mul(loop.index, step)])
        shift = spread_at(builder, shifts, loop.index)
        x = builder.load(builder.bitcast(row, VECTOR.as_pointer()), align=1)
        x = fma(builder, x, _constants(LOG2_E), shift)
        builder.store(larger(builder, x, builder.load(found[0])), found[0])
        power = _power_of_two(builder, builder.fsub(x, starts))
        builder.store(builder.fadd(builder.load(found[1]), power), found[1])
    for kept, place in zip(found, places, strict=True):
        builder.store(builder.load(kept), place, align=1)


@emitted(NUMBER, ADDRESS, NUMBER, ADDRESS, ADDRESS, ANY, ADDRESS, WORD)
def powers_row(builder, row, shift, tops, weights, dtype, target, length):
    """target = weights 2^(LOG2_E row + shift - tops), `length` numbers in sixteens; their sum.

    The target's dtype is that of an array.
    """
    shift = spread(builder, shift)
    total = cgutils.alloca_once_value(builder, _constants(0))
    with cgutils.for_range(builder, builder.sdiv(length, int64(LANES))) as loop:
        x = load_chunk(builder, row, loop.index)
        x = fma(builder, x, _constants(LOG2_E), shift)
        top, weight = (load_chunk(builder, start, loop.index) for start in (tops, weights))
        power = builder.fmul(_power_of_two(builder, builder.fsub(x, top)), weight)
        store_chunk(builder, power, target, loop.index, dtype)
        builder.store(builder.fadd(builder.load(total), power), total)
    return _lanes(builder, builder.load(total))


@emitted(types.void, ADDRESS, WORD, ANY, ADDRESS, WORD)
def round_block(builder, sums, count, dtype, target, step):
    """Store `count` rows of 32 sums, `step` bytes apart, in the dtype of an array."""
    with cgutils.for_range(builder, count) as loop:
        place = builder.gep(target, [builder.mul(loop.index, step)])
        for half in (0, 1):
            chunk = builder.add(builder.mul(loop.index, int64(2)), int64(half))
            numbers = load_chunk(builder, sums, chunk)
            store_chunk(builder, numbers, place, int64(half), dtype)


@emitted(types.void, ADDRESS, WORD, NUMBER)
def scale_row(builder, row, length, factor):
    """Multiply `length` numbers at an address, a multiple of 16, in place."""
    factor = spread(builder, factor)
    with cgutils.for_range(builder, builder.sdiv(length, int64(LANES))) as loop:
        place = chunk_at(builder, row, loop.index)
        builder.store(builder.fmul(builder.load(place, align=1), factor), place, align=1)


@emitted(types.UniTuple(NUMBER, 2), ANY, ADDRESS, ANY, ADDRESS, WORD)
def quantize_row(builder, dtypes, row, factors, target, length):
    """Write x = scale q + low as its q, whole numbers from 0 to 255; (scale, low).

    The first argument are the arrays of the row and of the target, for their dtypes; `length` is a
    multiple of 16. The row, float32 or bf16, is first multiplied by `factors`, an address, or None.
    In bf16 or float32 the target is given the numbers themselves, scale 1 and low 0. Of a row of
    bf16, in training, 0 is a level: a gradient has a few large numbers, and would else be off by
    the same in all others; the scale of one that is not finite is not finite.
    """
    source_like, target_like = dtypes
    chunks = builder.sdiv(length, int64(LANES))

    def read(chunk: Any) -> Any:
        of_row = bf16_chunk if source_like == types.uint16 else load_chunk
        numbers = of_row(builder, row, chunk)
        if factors is None:
            return numbers
        return builder.fmul(numbers, load_chunk(builder, factors, chunk))

    if target_like in (types.float32, types.uint16):
        with cgutils.for_range(builder, chunks) as loop:
            store_chunk(builder, read(loop.index), target, loop.index, target_like)
        return ir.Constant(FLOAT, 1), ir.Constant(FLOAT, 0)
    first, zero = read(int64(0)), _constants(0)
    extremes = {of: cgutils.alloca_once_value(builder, first) for of in (larger, _smaller)}
    unknown = cgutils.alloca_once_value(builder, zero)  # stays 0 but for what is not finite
    with cgutils.for_range(builder, chunks) as loop:
        numbers = read(loop.index)
        for of, extreme in extremes.items():
            builder.store(of(builder, numbers, builder.load(extreme)), extreme)
        if source_like == types.uint16:
            builder.store(fma(builder, numbers, zero, builder.load(unknown)), unknown)
    high, low = (_lanes(builder, builder.load(extreme), of) for of, extreme in extremes.items())
    span = builder.fsub(high, low)
    least = ir.Constant(FLOAT, float(LEAST_RANGE))
    span = builder.select(builder.fcmp_ordered(">", span, least), span, least)
    # where 0 is a level the lowest lies up to a level lower, with one more for its rounding
    levels = ir.Constant(FLOAT, LEVELS if source_like == types.float32 else LEVELS - 2)
    scale, factor = builder.fdiv(span, levels), builder.fdiv(levels, span)
    if source_like == types.uint16:
        up = declared(builder.module, "llvm.ceil.f32", FLOAT, [FLOAT])
        low = builder.fmul(
            scale, builder.fneg(builder.call(up, [builder.fdiv(builder.fneg(low), scale)]))
        )
    factor, bottom = spread(builder, factor), spread(builder, low)
    kind = ir.VectorType(ir.IntType(target_like.bitwidth), LANES)
    with cgutils.for_range(builder, chunks) as loop:
        level = builder.fmul(builder.fsub(read(loop.index), bottom), factor)
        bits = builder.bitcast(builder.fadd(level, _constants(ROUND)), INTEGERS)
        bits = builder.and_(bits, ir.Constant(INTEGERS, [LEVELS] * LANES))
        place = builder.mul(loop.index, int64(LANES * target_like.bitwidth // 8))
        place = builder.bitcast(builder.gep(target, [place]), kind.as_pointer())
        builder.store(builder.trunc(bits, kind), place, align=1)
    return builder.fadd(scale, _lanes(builder, builder.load(unknown))), low


def finished_rows(rows: Any, ranges: Any, vectors: Any, target: Any, ended: Any) -> Any:
    """Code for `finished_block`: value = sums (row_scale scale) + (row_low total + bias).

    `ended`(builder, values, line, chunk, row) is given a row's values in vectors of 16, its address
    in `target`, and the numbers of the first vector and of the row; the rest as in `linear_block`.
    """

    def finish(builder: Any, sums: Any, first: Any, column: int) -> None:
        line_0, step = target
        chunks = [int64(column // LANES + n) for n in range(len(sums[0]))]
        scales, totals, biases = (
            [load_chunk(builder, start, chunk) for chunk in chunks] for start in vectors
        )
        for r, own in enumerate(sums):
            row = builder.add(first, int64(r))
            with builder.if_then(builder.icmp_signed("<", row, rows), likely=True):
                row_scale, low = (spread_at(builder, start, row) for start in ranges)
                line = builder.gep(line_0, [builder.mul(row, step)])
                values = []
                for value, scale, total, bias in zip(own, scales, totals, biases, strict=True):
                    if value.type != VECTOR:
                        value = builder.sitofp(value, VECTOR)
                    offset = fma(builder, low, total, bias)
                    values.append(fma(builder, value, builder.fmul(row_scale, scale), offset))
                ended(builder, values, line, column // LANES, row)

    return finish


PLAIN, GELU, GELU_TANH, RESIDUAL = range(4)  # the end of a product


@emitted(types.void, ANY, PAIR, PAIR, ADDRESS, WORDS, TWO, THREE, PAIR, LITERAL)
def linear_block(builder, dtypes, a, b, sums, shape, ranges, vectors, target, ending):
    """32 columns of a linear layer for some rows, each finished as soon as its sums are there.

    value = sums (row_scale scale) + (row_low total + bias); PLAIN: target = value; GELU, GELU_TANH:
    target = GELU(value); RESIDUAL, in float32: target += value. The first argument are the arrays
    of the rows and of the target, `a`, `b` and `target` pairs of an address and a step, as those of
    `block`. `sums` is memory for `finished_block`, `shape` the groups and the rows, `ranges`
    addresses of the rows' scale and low, `vectors` of the columns' scale, total and bias.
    """
    (rows_like, target_like), (groups, rows) = dtypes, shape
    is_float = rows_like in (types.float32, types.uint16)

    def ended(builder: Any, values: Any, line: Any, first: int, row: Any) -> None:
        for n, value in enumerate(values):
            chunk = int64(first + n)
            if ending == RESIDUAL:
                value = builder.fadd(load_chunk(builder, line, chunk), value)
            elif ending != PLAIN:
                approximate = "none" if ending == GELU else "tanh"
                curve = curves(approximate)[0] if is_float else short_curve(approximate)
                value = _gelu(builder, value, curve, EDGE if is_float else SHORT_EDGE)
            store_chunk(builder, value, line, chunk, target_like)

    finish = finished_rows(rows, ranges, vectors, target, ended)
    finished_block(rows_like, finish)(builder, *a, *b, sums, groups, rows)


def _gelu(builder: Any, value: Any, curve: tuple[Any, ...], limit: Any) -> Any:
    """GELU of 16 numbers, by a polynomial up to a limit; see `half_plus_odd`."""
    edge = value
    for sign, signed in ((">", limit), ("<", -limit)):
        over = builder.fcmp_ordered(sign, edge, _constants(signed))
        edge = builder.select(over, _constants(signed), edge)
    spread = _constants(2 / limit**2)
    power = polynomial(
        builder, curve, fma(builder, builder.fmul(edge, edge), spread, _constants(-1))
    )
    return builder.fmul(value, fma(builder, power, edge, _constants(0.5)))
