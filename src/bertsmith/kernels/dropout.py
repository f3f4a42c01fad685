"""Dropout whose mask is a function of a key: nothing is stored, and any thread draws the same.

PyTorch's own dropout on a CPU draws from one generator that all threads share, element by element,
which costs as much as the matrix products around it; and two threads would take turns by chance.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.kernels.numbers import has_kernels, hash32, load, rows, store, vectorised


class _Keys(threading.local):
    """The key of this thread's forward pass, and how many draws it has made."""

    key = 0
    count = 0


_keys = _Keys()


def seed_dropout(key: int, count: int = 0) -> None:
    """Begin a forward pass of this thread; the same key gives the same masks."""
    _keys.key, _keys.count = key % 2**32, count


def dropout_state() -> tuple[int, int]:
    """(key, count) of this thread, for `seed_dropout`."""
    return _keys.key, _keys.count


def next_key() -> int:
    """The key of the pass's next mask."""
    _keys.count += 1
    return int(hash32(np.uint32(_keys.key) ^ hash32(np.uint32(_keys.count))))


def threshold(rate: float) -> np.uint32:
    """An element is dropped where its 32 bits are below."""
    return np.uint32(int(rate * 2**32))


@vectorised
def drop_rows(source, target, factor, limit, key):
    """target = source x factor, or 0 where dropped; matrices of the same shape."""
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
