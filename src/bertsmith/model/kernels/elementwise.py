"""Parts of compiled loops: numbers in bf16, an exponential, a hash, and keyed dropout.

Arrays of bf16 are passed as uint16 (the upper half of a float32's bits), arrays of float32 as they
are; `load` and `store` hide the difference, so that a kernel is written once. All is written so
that LLVM turns the loops around it into vector instructions.

A dropout mask is a function of a key: nothing is stored, and any thread draws the same. PyTorch
draws on a CPU element by element, which costs as much as the matrix products around it, and from
one generator, where two threads would take turns by chance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor, nn

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


class _Thread(threading.local):
    without_kernels = False
    key = 0  # of the forward pass's dropout
    count = 0  # of its masks so far


_thread = _Thread()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Compute with PyTorch's operators in this thread, for comparison."""
    before, _thread.without_kernels = _thread.without_kernels, True
    try:
        yield
    finally:
        _thread.without_kernels = before


def kernels_left_out() -> bool:
    """True inside `without_kernels`, but not in what `torch.compile` traces."""
    return not torch.compiler.is_compiling() and _thread.without_kernels


def has_kernels(tensor: Tensor) -> bool:
    """True where the compiled kernels compute: on a CPU, in float32 and bf16."""
    if torch.compiler.is_compiling() or kernels_left_out():  # torch.compile fuses by itself
        return False
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)


def rows(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor as a matrix [rows, last dimension] for a kernel; memory is shared."""
    assert tensor.is_contiguous()
    flat = tensor.detach().view(-1, tensor.shape[-1])
    return flat.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else flat.numpy()


def vector(tensor: Tensor) -> np.ndarray:
    """A copy of a weight for a kernel: NumPy would hold its memory, which sharding must free."""
    return rows(tensor.detach().clone())[0]


def _bitcast(source: Any, target: Any) -> Any:
    def typed(context: Any, number: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), code

    return intrinsic(typed)


bits_to_float = _bitcast(types.int32, types.float32)
float_to_bits = _bitcast(types.float32, types.int32)


def load(value: Any) -> Any:
    """An array's element as a float32."""


def store(value: Any, like: Any) -> Any:
    """A float32 rounded, to nearest even, to an element of the array that `like` is from."""


@overload(load, inline="always")
def _load(value):
    if value == types.uint16:
        return lambda value: bits_to_float(np.int32(value) << np.int32(16))
    return lambda value: value


@overload(store, inline="always")
def _store(value, like):
    if like == types.uint16:

        def rounded(value, like):
            bits = float_to_bits(value)
            even = (bits >> np.int32(16)) & np.int32(1)
            return np.uint16((bits + np.int32(0x7FFF) + even) >> np.int32(16))

        return rounded
    return lambda value, like: value


def exp(x: Any) -> Any:
    """e^x of a float32 x <= 0, relative error below 4e-6 down to e^-87; 0 for all below e^-88."""


@overload(exp, inline="always")
def _exp(x):
    def approximated(x):
        scaled = x * LOG2_E
        scaled = LOWEST if scaled < LOWEST else scaled  # not a number stays so
        whole = np.floor(scaled + np.float32(0.5))
        f = scaled - whole
        power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
        return bits_to_float(float_to_bits(power) + (np.int32(whole) << np.int32(23)))

    return approximated


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


def seed_dropout(key: int, count: int = 0) -> None:
    """Begin a forward pass of this thread; the same key gives the same masks."""
    _thread.key, _thread.count = key % 2**32, count


def dropout_state() -> tuple[int, int]:
    """(key, count) of this thread, for `seed_dropout`."""
    return _thread.key, _thread.count


def next_key() -> int:
    """The key of the pass's next mask."""
    _thread.count += 1
    return int(hash32(np.uint32(_thread.key) ^ hash32(np.uint32(_thread.count))))


def threshold(rate: float) -> np.uint32:
    """The limit below which an element's 32 bits drop it."""
    return np.uint32(int(rate * 2**32))


@vectorized
def drop_rows(source, target, factor, limit, key):
    """target = source x factor, or 0 where dropped."""
    for row in range(len(source)):
        row_key = hash32(np.uint32(row) ^ key)
        for column in range(source.shape[1]):
            kept = hash32(np.uint32(np.uint32(column) + row_key)) >= limit
            value = load(source[row, column]) * factor
            target[row, column] = store(value if kept else np.float32(0), source[row, column])


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int) -> Tensor:
        ctx.rate, ctx.key = rate, key
        return _dropped(x, rate, key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _dropped(gradients[0], ctx.rate, ctx.key), None, None


def _dropped(x: Tensor, rate: float, key: int) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    drop_rows(rows(x), rows(result), np.float32(1 / (1 - rate)), threshold(rate), np.uint32(key))
    return result


class Dropout(nn.Module):
    """x with each element 0 with probability `rate`, else divided by 1 - rate; x in evaluation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if not has_kernels(x):
            return nn.functional.dropout(x, self.rate)
        return _Dropout.apply(x, self.rate, next_key())
