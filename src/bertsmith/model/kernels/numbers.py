"""Arithmetic inside compiled loops: numbers in bf16, an exponential, GELU, a hash. No torch.

Arrays of bf16 are passed as uint16 (the upper half of a float32's bits), arrays of float32 as they
are; `load` and `store` hide the difference, so that a kernel is written once. All is written so
that LLVM turns the loops around it into vector instructions.

GELU(z) = z s(z). Both s - 1/2 and the derivative of GELU less 1/2 are odd functions of z, and
nearly constant beyond z = 5.5: a polynomial in z^2 makes each without exponential or division.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, Literal

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from bertsmith.base.jit import compiled

# A sum may be taken in any order; not-a-number stays. A loop that sums must write to no other array
# than it reads: where arrays might overlap LLVM keeps a second, scalar form of the loop, and which
# one runs, and so the order of the sum, would hang on where the arrays happen to lie.
vectorized = partial(compiled, fastmath={"contract", "reassoc", "nsz", "arcp"})

LOG2_E = np.float32(1.4426950408889634)
LOWEST = np.float32(-127.0)  # exponent of two whose power comes out as exactly 0
# 2^x on [-0.5, 0.5], relative error 2.3e-7: weighted least squares on Chebyshev nodes, 2^0 = 1
C0, C1, C2 = np.float32(1.0), np.float32(0.693146098), np.float32(0.24022106)
C3, C4, C5 = np.float32(0.0555162279), np.float32(0.00967814341), np.float32(0.00130556003)
EXP_POWERS = C0, C1, C2, C3, C4, C5
EDGE, DEGREE = np.float32(5.5), 15  # half_plus_odd has as many powers
SHORT_EDGE, SHORT_DEGREE = np.float32(4.5), 10  # of a curve for rows that are quantized
SPREAD = np.float32(2 / EDGE**2)  # z^2 in 0..EDGE^2 to -1..1
HALF, ONE = np.float32(0.5), np.float32(1)
ROUND = np.float32(3 << 22)  # added to a small number its last bits are the nearest whole number
ROUND_BITS = ROUND.view(np.int32)
MAGNITUDE = np.int32(0x7FFFFFFF)  # of a float32's bits all but the sign
LARGEST_BYTE = np.float32(127)
SMALLEST = np.float32(1e-30)  # taken for the largest element where all are zeros
INNER, CUBIC = math.sqrt(2 / math.pi), 0.044715  # of google-research/bert's approximation


def _bitcast(source: Any, target: Any) -> Any:
    def typed(context: Any, number: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), code

    return intrinsic(typed)


bits_to_float = _bitcast(types.int32, types.float32)
float_to_bits = _bitcast(types.float32, types.int32)


def by_type(choose: Any, inline: Literal["always", "never"] = "always") -> Any:
    """Make a function for compiled loops of one that chooses its body by its arguments' types."""

    @wraps(choose)
    def declared(*arguments: Any) -> Any:
        raise NotImplementedError

    overload(declared, inline=inline)(choose)
    return declared


@by_type
def load(value):
    """An array's element as a float32."""
    if value == types.uint16:
        return lambda value: bits_to_float(np.int32(value) << np.int32(16))
    return lambda value: value


@by_type
def store(value, like):
    """A float32 rounded, to nearest even, to an element of the array that `like` is from."""
    if like == types.uint16:

        def rounded(value, like):
            bits = float_to_bits(value)
            even = (bits >> np.int32(16)) & np.int32(1)
            return np.uint16((bits + np.int32(0x7FFF) + even) >> np.int32(16))

        return rounded
    return lambda value, like: value


@by_type
def exp(x):
    """e^x of a float32 x <= 0, relative error below 4e-6 down to e^-87; 0 for all below e^-88."""

    def approximated(x):
        scaled = x * LOG2_E
        scaled = LOWEST if scaled < LOWEST else scaled  # not a number stays so
        whole = np.floor(scaled + np.float32(0.5))
        f = scaled - whole
        power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
        return bits_to_float(float_to_bits(power) + (np.int32(whole) << np.int32(23)))

    return approximated


@vectorized
def whole(number):
    """The nearest whole number of a float32 below 2^21, as an int32; of what is not finite any."""
    return np.int32(float_to_bits(number + ROUND) - ROUND_BITS)


@vectorized
def sigmoid(x):
    """1 / (1 + e^-x) of a float32, off by at most 3e-7; not a number stays so."""
    power = exp(-abs(x))
    share = np.divide(ONE, ONE + power)  # without a test for zero
    return power * share if x < 0 else share


@vectorized
def tanh(x):
    """(1 - e^-2x) / (1 + e^-2x) of a float32, off by at most 5e-7; not a number stays so."""
    power = exp(np.float32(-2) * abs(x))
    size = np.divide(ONE - power, ONE + power)
    return -size if x < 0 else size


@vectorized
def largest(row):
    """The largest element of a row, as float32; not a number may count as anything."""
    # as integers, since LLVM does not vectorize a maximum of floats
    top = np.int32(-(2**31))
    for column in range(len(row)):
        bits = float_to_bits(load(row[column]))
        top = max(top, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return bits_to_float(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@vectorized
def hash32(word):
    """32 well-mixed bits of 32 bits (Wellons, "Prospecting for hash functions", 2018)."""
    # Numba's product of two uint32 is a uint64
    word = np.uint32((word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
    word = np.uint32((word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(word ^ (word >> np.uint32(16)))


def _exact(z: float) -> tuple[float, float]:
    """(s - 1/2, GELU' - 1/2) with s the normal distribution's cumulative probability."""
    odd = math.erf(z / math.sqrt(2)) / 2
    return odd, odd + z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _approximate(z: float) -> tuple[float, float]:
    """(s - 1/2, GELU' - 1/2) with s = (1 + tanh(u)) / 2."""
    tangent = math.tanh(INNER * (z + CUBIC * z**3))
    slope = (1 - tangent**2) * INNER * (1 + 3 * CUBIC * z * z)
    return tangent / 2, tangent / 2 + z / 2 * slope


def _polynomial(
    odd: Callable[[float], float], edge: np.float32 = EDGE, degree: int = DEGREE
) -> tuple[np.float32, ...]:
    """odd(z) / z as a polynomial in 2 (z / edge)^2 - 1, by interpolation, lowest power first."""
    chebyshev = np.polynomial.chebyshev
    nodes = chebyshev.chebpts1(degree + 1)
    quotients = [odd(z) / z for z in edge * np.sqrt((nodes + 1) / 2)]
    powers = chebyshev.cheb2poly(chebyshev.chebfit(nodes, quotients, degree))
    return tuple(powers.astype(np.float32))


@cache
def curves(approximate: str) -> tuple[tuple[np.float32, ...], ...]:
    """Polynomials for s and GELU', off by at most 3e-7 and 3e-6; see `half_plus_odd`."""
    functions = _exact if approximate == "none" else _approximate
    return _polynomial(lambda z: functions(z)[0]), _polynomial(lambda z: functions(z)[1])


@cache
def short_curve(approximate: str) -> tuple[np.float32, ...]:
    """A polynomial for s to SHORT_EDGE, which makes GELU off by at most 4e-5."""
    function = _exact if approximate == "none" else _approximate
    return _polynomial(lambda z: function(z)[0], SHORT_EDGE, SHORT_DEGREE)


@vectorized
def half_plus_odd(z, c):
    """1/2 + the odd function of z whose polynomial has the coefficients `c`."""
    z = EDGE if z > EDGE else z  # not a number stays so
    z = -EDGE if z < -EDGE else z
    x = SPREAD * (z * z) - ONE
    power = c[12] + x * (c[13] + x * (c[14] + x * c[15]))
    power = c[8] + x * (c[9] + x * (c[10] + x * (c[11] + x * power)))
    power = c[4] + x * (c[5] + x * (c[6] + x * (c[7] + x * power)))
    power = c[0] + x * (c[1] + x * (c[2] + x * (c[3] + x * power)))
    return HALF + z * power
