"""Tensors for compiled kernels, and keyed dropout.

A dropout mask is a function of a key: nothing is stored, and any thread draws the same. PyTorch
draws on a CPU element by element, which costs as much as the matrix products around it, and from
one generator, where two threads would take turns by chance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.model.kernels.numbers import hash32, load, store, vectorized


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


def flat(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor's memory as an array of one dimension for a kernel; bf16 as its bits.

    NumPy does the reshaping: each operator of PyTorch lets go of Python's lock, and in a short step
    the workers then wait for it.
    """
    assert tensor.is_contiguous()
    is_bf16 = tensor.dtype == torch.bfloat16
    return (tensor.view(torch.uint16) if is_bf16 else tensor.detach()).numpy().reshape(-1)


def rows(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor as a matrix [rows, last dimension]; memory is shared."""
    return flat(tensor).reshape(-1, tensor.shape[-1])


def vector(tensor: Tensor) -> np.ndarray:
    """A copy of a weight: PyTorch cannot free memory that NumPy has seen, and sharding must."""
    return flat(tensor.clone())


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


class Kernel(torch.autograd.Function):
    """A function with compiled gradients, which PyTorch cannot differentiate: it is refused."""

    def __init_subclass__(cls) -> None:
        compiled = cls.backward

        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if torch.is_grad_enabled():  # only with `create_graph=True`
                raise NotImplementedError(
                    "`create_graph=True`: compiled kernels have no gradients of second order:"
                    " compute the model's outputs in `without_kernels()`"
                )
            return compiled(ctx, *gradients)

        cls.backward = staticmethod(backward)


class _Dropout(Kernel):
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
