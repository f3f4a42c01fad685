"""Rows of numbers in vectors of 16, written in LLVM's own code. No torch.

Softmax, LayerNorm, a scalar product, the end of a product of blocks; that with GELU takes half as
long as in a compiled loop over 32 numbers. Sums are taken in an order that is written here: LLVM
may be free to choose none, or the same function would give other bits in another place.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, errors

from bertsmith.model.kernels.blocks import ADDRESS, FLOAT, INT, declared, emitted, int64
from bertsmith.model.kernels.numbers import (
    EDGE,
    EXP_POWERS,
    LOG2_E,
    LOWEST,
    SHORT_EDGE,
    curves,
    short_curve,
)

LANES = 16  # of the vectors below; narrower registers take several
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)


def _spread(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))


def _constants(number: Any) -> ir.Constant:
    return ir.Constant(VECTOR, [float(number)] * LANES)


def _place(builder: Any, start: Any, chunk: Any, like: Any = VECTOR) -> Any:
    """The address of the chunk of 16 numbers with that number."""
    own = builder.gep(start, [builder.mul(chunk, int64(4 * LANES))])
    return builder.bitcast(own, like.as_pointer())


def _fma(builder: Any, *numbers: Any) -> Any:
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(declared(builder.module, name, VECTOR, [VECTOR] * 3), numbers)


def _polynomial(builder: Any, coefficients: Any, x: Any) -> Any:
    """`coefficients` have the lowest power first."""
    first, *others = reversed(coefficients)
    power = _constants(first)
    for coefficient in others:
        power = _fma(builder, power, x, _constants(coefficient))
    return power


def _sum(builder: Any, start: Any, chunks: Any, add: Any) -> Any:
    """`add`(total, numbers, chunk's number) over all chunks; the total of 16, from 0."""
    total = cgutils.alloca_once_value(builder, _constants(0))
    builder.store(_constants(0), total)
    with cgutils.for_range(builder, chunks) as loop:
        numbers = builder.load(_place(builder, start, loop.index), align=1)
        builder.store(add(builder.load(total), numbers, loop.index), total)
    return _lanes(builder, builder.load(total))


def _lanes(builder: Any, vector: Any) -> Any:
    """The sum of 16 numbers, by halves."""
    half = LANES // 2
    while half:
        undefined = ir.Constant(vector.type, ir.Undefined)
        parts = (
            builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(INT, half), own))
            for own in (list(range(half)), list(range(half, 2 * half)))
        )
        vector, half = builder.fadd(*parts), half // 2
    return builder.extract_element(vector, ir.Constant(INT, 0))


@emitted
def normalize_row(context, row, weight, bias, length, eps):
    """LayerNorm of `length` numbers at an address, a multiple of 16, in place."""

    def code(context, builder, signature, arguments):
        row, weight, bias, length, eps = arguments
        chunks, count = builder.sdiv(length, int64(LANES)), builder.sitofp(length, FLOAT)
        total = _sum(builder, row, chunks, lambda total, x, _: builder.fadd(total, x))
        mean = _spread(builder, builder.fdiv(total, count))

        def add_square(total: Any, x: Any, _: Any) -> Any:
            x = builder.fsub(x, mean)
            return _fma(builder, x, x, total)

        variance = builder.fdiv(_sum(builder, row, chunks, add_square), count)
        root = declared(builder.module, "llvm.sqrt.f32", FLOAT, [FLOAT])
        deviation = builder.call(root, [builder.fadd(variance, eps)])
        scale = _spread(builder, builder.fdiv(ir.Constant(FLOAT, 1), deviation))
        with cgutils.for_range(builder, chunks) as loop:
            place = _place(builder, row, loop.index)
            x = builder.fmul(builder.fsub(builder.load(place, align=1), mean), scale)
            w, b = (
                builder.load(_place(builder, start, loop.index), align=1)
                for start in (weight, bias)
            )
            builder.store(_fma(builder, x, w, b), place, align=1)
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS, types.int64, types.float32), code


@emitted
def scalar_product(context, a, b, length):
    """The sum of the products of `length` numbers at two addresses, a multiple of 32."""

    def code(context, builder, signature, arguments):
        a, b, length = arguments
        pairs = builder.sdiv(length, int64(2 * LANES))
        totals = [cgutils.alloca_once_value(builder, _constants(0)) for _ in "ab"]
        for total in totals:
            builder.store(_constants(0), total)
        with cgutils.for_range(builder, pairs) as loop:
            for half, total in enumerate(totals):  # two sums, so that neither waits for the other
                chunk = builder.add(builder.mul(loop.index, int64(2)), int64(half))
                x, y = (builder.load(_place(builder, start, chunk), align=1) for start in (a, b))
                builder.store(_fma(builder, x, y, builder.load(total)), total)
        return _lanes(builder, builder.fadd(*map(builder.load, totals)))

    return types.float32(ADDRESS, ADDRESS, types.int64), code


@emitted
def softmax_row(context, row, length, scale):
    """softmax(scale x) of `length` numbers at an address, in place.

    There must be room up to a multiple of 16; what is there becomes 0.
    """

    def code(context, builder, signature, arguments):
        row, length, scale = arguments
        last = builder.sub(length, int64(1))
        chunks = builder.add(builder.sdiv(last, int64(LANES)), int64(1))
        lanes = ir.Constant(INTEGERS, list(range(LANES)))

        def outside(chunk: Any) -> Any:
            """The lanes behind the last number."""
            first = builder.trunc(builder.mul(chunk, int64(LANES)), INT)
            left = builder.bitcast(builder.sub(builder.trunc(length, INT), first), FLOAT)
            limit = builder.bitcast(_spread(builder, left), INTEGERS)
            return builder.icmp_signed(">=", lanes, limit)

        lowest, zero = _constants(-1e30), _constants(0)
        top = cgutils.alloca_once_value(builder, lowest)
        builder.store(lowest, top)
        with cgutils.for_range(builder, chunks) as loop:
            numbers = builder.load(_place(builder, row, loop.index), align=1)
            numbers = builder.select(outside(loop.index), lowest, numbers)
            best = builder.load(top)
            builder.store(
                builder.select(builder.fcmp_ordered(">", numbers, best), numbers, best), top
            )
        name = f"llvm.vector.reduce.fmax.v{LANES}f32"
        reduce = declared(builder.module, name, FLOAT, [VECTOR])
        high = _spread(builder, builder.call(reduce, [builder.load(top)]))
        factor = builder.fmul(_spread(builder, scale), _constants(LOG2_E))
        floor = declared(builder.module, f"llvm.floor.v{LANES}f32", VECTOR, [VECTOR])
        total = cgutils.alloca_once_value(builder, zero)
        builder.store(zero, total)
        with cgutils.for_range(builder, chunks) as loop:
            place = _place(builder, row, loop.index)
            x = builder.fmul(builder.fsub(builder.load(place, align=1), high), factor)
            x = builder.select(
                builder.fcmp_ordered("<", x, _constants(LOWEST)), _constants(LOWEST), x
            )
            whole = builder.call(floor, [builder.fadd(x, _constants(0.5))])
            power = _polynomial(builder, EXP_POWERS, builder.fsub(x, whole))
            shift = builder.shl(
                builder.fptosi(whole, INTEGERS), ir.Constant(INTEGERS, [23] * LANES)
            )
            power = builder.bitcast(builder.add(builder.bitcast(power, INTEGERS), shift), VECTOR)
            power = builder.select(outside(loop.index), zero, power)
            builder.store(power, place, align=1)
            builder.store(builder.fadd(builder.load(total), power), total)
        sum_ = _lanes(builder, builder.load(total))
        share = _spread(builder, builder.fdiv(ir.Constant(FLOAT, 1), sum_))
        with cgutils.for_range(builder, chunks) as loop:
            place = _place(builder, row, loop.index)
            builder.store(builder.fmul(builder.load(place, align=1), share), place, align=1)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.int64, types.float32), code


PLAIN, GELU, GELU_TANH, RESIDUAL = range(4)  # the end of a product


@emitted
def finish(context, like, sums, row_scale, row_low, vectors, target, ending):
    """32 sums of a row become numbers: value = sums (row_scale scale) + (row_low total + bias).

    `like` is the array of the sums; `vectors` are three addresses: scale, total and bias of the
    columns. PLAIN: target = value; GELU, GELU_TANH: target = GELU(value); RESIDUAL: target +=
    value.
    """
    if not isinstance(ending, types.IntegerLiteral):
        raise errors.RequireLiteralValue("ending")
    kind = ending.literal_value

    def code(context, builder, signature, arguments):
        _, sums, row_scale, row_low, vectors, target, _ = arguments
        scale, total, bias = (builder.extract_value(vectors, n) for n in range(3))
        spread_scale, spread_low = _spread(builder, row_scale), _spread(builder, row_low)
        is_float = signature.args[0].dtype == types.float32

        def load(place: Any, half: Any, like: Any = VECTOR) -> Any:
            return builder.load(_place(builder, place, half, like), align=1)

        for half in (int64(0), int64(1)):
            value = load(sums, half, VECTOR if is_float else INTEGERS)
            if not is_float:
                value = builder.sitofp(value, VECTOR)
            offset = _fma(builder, spread_low, load(total, half), load(bias, half))
            value = _fma(builder, value, builder.fmul(spread_scale, load(scale, half)), offset)
            if kind == RESIDUAL:
                value = builder.fadd(load(target, half), value)
            elif kind != PLAIN:
                approximate = "none" if kind == GELU else "tanh"
                if is_float:
                    value = _gelu(builder, value, curves(approximate)[0], EDGE)
                else:
                    value = _gelu(builder, value, short_curve(approximate), SHORT_EDGE)
            builder.store(value, _place(builder, target, half), align=1)
        return context.get_dummy_value()

    number, addresses = types.float32, types.UniTuple(ADDRESS, 3)
    return types.void(like, ADDRESS, number, number, addresses, ADDRESS, ending), code


def _gelu(builder: Any, value: Any, curve: tuple[Any, ...], limit: Any) -> Any:
    """GELU of 16 numbers, by a polynomial up to a limit; see `half_plus_odd`."""
    edge = value
    for sign, signed in ((">", limit), ("<", -limit)):
        over = builder.fcmp_ordered(sign, edge, _constants(signed))
        edge = builder.select(over, _constants(signed), edge)
    spread = _constants(2 / limit**2)
    power = _polynomial(
        builder, curve, _fma(builder, builder.fmul(edge, edge), spread, _constants(-1))
    )
    return builder.fmul(value, _fma(builder, power, edge, _constants(0.5)))
