"""The end of a step: the replicas' gradients are summed and clipped, and the weights moved.

By PyTorch's operators, or, for bf16 copies and AdamW or Muon, in two or three passes of kernels.
With two replicas in bf16 PyTorch's operators move 76 bytes a weight (casts 24, sum 12, norm and
clipping 12, AdamW 28); the kernel of AdamW moves 34 (norm 4), in blocks that stay in the core's
cache, and makes the bf16 copy on the way. Between Muon's two kernels are its matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bertsmith.model.kernels.elementwise import flat
from bertsmith.model.kernels.numbers import load, store, vectorized
from bertsmith.training.optimizers import (
    MOMENTUM,
    Muon,
    first_state,
    muon_factors,
    orthogonalized,
)
from bertsmith.training.ranks import full_tensor
from bertsmith.training.replicas import Replicas, Trained

BLOCK = 2048  # gradients that are summed before they are used
CHUNK = 1 << 19  # numbers that one core moves at a time
NO_COPY = np.zeros(0, np.uint16)
NO_FACTORS = np.zeros(9, np.float32)
MUON_MOMENTUM = np.float32(MOMENTUM)  # for kernels
TINY = 1e-6  # added to the norm by which clipping divides, as in PyTorch


def make_update(optimizer: Optimizer, replicas: Replicas, clip: float) -> Update:
    """The fused update where it can be used."""
    can_fuse = replicas.has_copies and isinstance(optimizer, AdamW | Muon)
    return (FusedUpdate if can_fuse else Update)(optimizer, replicas, clip)


class Update:
    """A step's update by PyTorch's operators: any optimizer, any device. All cores share Muon's."""

    def __init__(self, optimizer: Optimizer, replicas: Replicas, clip: float) -> None:
        self.optimizer, self.replicas, self.clip = optimizer, replicas, clip

    def norm(self) -> Tensor | float:
        """Sum the gradients and clip them; returns their norm before clipping."""
        self.replicas.add_ranks()
        self.replicas.gather()
        return full_tensor(nn.utils.clip_grad_norm_(self.replicas.weights, self.clip))

    def move(self) -> None:
        """Move the weights, after `norm`."""
        if isinstance(self.optimizer, Muon) and not self.replicas.weights[0].is_cuda:
            self.replicas.each(lambda move: move(), self.optimizer.moves())
        else:
            self.optimizer.step()
        self.replicas.refresh_copies()
        self.zero_grad()

    def load(self) -> None:
        """Compile the kernels without moving anything."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.replicas.zero_grad()


class FusedUpdate(Update):
    """The same update of AdamW, PaperAdam or Muon on a CPU, equal up to rounding.

    Each core takes a chunk of a weight at a time, or one of Muon's matrices; which core takes which
    changes no number.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, clip: float) -> None:
        super().__init__(optimizer, replicas, clip)
        self._products = getattr(optimizer, "products", None) or torch.float32
        self._moved: dict[Tensor, tuple[Any, ...]] = {}
        """By the weight: it, its moments or momentum, and its bf16 copy, for the kernels."""

    def norm(self) -> float:
        self.replicas.add_ranks()
        self._trained = self.replicas.trained()
        self._gradients = [tuple(map(flat, part.gradients)) for part in self._trained]
        squares = [
            partial(sum_of_squares, gradients, *chunk)
            for part, gradients in zip(self._trained, self._gradients, strict=True)
            for chunk in _chunks(part)
        ]
        norm = math.sqrt(sum(self._by_all(squares)))
        self._clipping = np.float32(min(1.0, self.clip / (norm + TINY)))
        return norm

    def move(self) -> None:
        groups = self._groups()
        if new := [part for part in self._trained if part.weight not in self._moved]:
            arrays = [partial(self._arrays, part, groups[id(part.weight)]) for part in new]
            weights = [part.weight for part in new]
            self._moved.update(zip(weights, self._by_all(arrays), strict=True))
        matrices, others = [], []
        for part, gradients in zip(self._trained, self._gradients, strict=True):
            weight, group = part.weight, groups[id(part.weight)]
            arrays = self._moved[weight]
            if _is_matrix(group):
                matrices.append(partial(self._move_matrix, weight.shape, gradients, arrays, group))
            else:
                arrays = *arrays, self._factors(weight, group)
                chunks = _chunks(part)
                others += [partial(adamw_chunk, gradients, *chunk, *arrays) for chunk in chunks]
        self._by_all([*matrices, *others])  # the longest parts first
        self.zero_grad()

    def zero_grad(self) -> None:
        self._trained, self._gradients = [], []  # or their memory would last through the next pass
        super().zero_grad()

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The group of each weight, by its id."""
        return {id(w): group for group in self.optimizer.param_groups for w in group["params"]}

    def _by_all(self, parts: list[Callable[[], Any]]) -> list[Any]:
        """Call each, in whichever core is free next."""
        return self.replicas.each(lambda part: part(), parts)

    def _move_matrix(
        self, shape: torch.Size, gradients: Any, arrays: Any, group: dict[str, Any]
    ) -> None:
        weight, momentum, narrow = arrays
        ahead = torch.empty(shape, dtype=self._products)
        momentum_ahead(gradients, self._clipping, momentum, flat(ahead))
        direction = orthogonalized(ahead).contiguous()
        factors = map(np.float32, muon_factors(shape, group))
        move_along(flat(direction), *factors, weight, narrow)

    def load(self) -> None:
        self.replicas.add_ranks()
        groups = self._groups()
        for part in self.replicas.trained():
            gradients, weight = tuple(map(flat, part.gradients)), flat(part.weight)
            sum_of_squares(gradients, 0, 0)  # empty chunks
            group, narrow = groups[id(part.weight)], _flat_copy(part)
            if _is_matrix(group):
                ahead = flat(torch.empty(0, dtype=self._products))
                momentum_ahead(gradients, NO_FACTORS[0], weight[:0], ahead)
                move_along(ahead, *NO_FACTORS[:2], weight[:0], narrow[:0])
            else:
                adamw_chunk(gradients, 0, 0, weight, (weight, weight), narrow, NO_FACTORS)

    def _arrays(self, part: Trained, group: dict[str, Any]) -> tuple[Any, ...]:
        state = self.optimizer.state[part.weight]
        if _is_matrix(group):
            if not state:
                state["momentum"] = torch.zeros_like(part.weight)
            moments = flat(state["momentum"])
        else:
            if not state:
                state.update(first_state(part.weight, 0.0))
            moments = flat(state["exp_avg"]), flat(state["exp_avg_sq"])
        return flat(part.weight), moments, _flat_copy(part)

    def _factors(self, weight: Tensor, group: dict[str, Any]) -> np.ndarray:
        """Count the weight's step; its factors for the kernel."""
        state = self.optimizer.state[weight]
        state["step"] += 1
        step, rate, (beta1, beta2) = state["step"].item(), group["lr"], group["betas"]
        decay, root = 1 - rate * group["weight_decay"], 1 / math.sqrt(1 - beta2**step)
        of_moments = beta1, 1 - beta1, beta2, 1 - beta2
        of_weights = decay, rate / (1 - beta1**step), root, group["eps"]
        return np.array([self._clipping, *of_moments, *of_weights], np.float32)


def _is_matrix(group: dict[str, Any]) -> bool:
    """True for weights that Muon moves."""
    return group.get("orthogonal", False)


def _chunks(part: Trained) -> list[tuple[int, int]]:
    numbers = part.weight.numel()
    return [(start, min(start + CHUNK, numbers)) for start in range(0, numbers, CHUNK)]


def _flat_copy(part: Trained) -> np.ndarray:
    return NO_COPY if part.copy is None else flat(part.copy)


# In the kernels below gradients are a tuple of flat arrays, all float32 or all bf16, of which the
# sum is meant.


@vectorized
def add_block(gradients, start, total):
    """total = the sum of the gradients from `start` on."""
    first = gradients[0][start : start + len(total)]
    for place in range(len(total)):
        total[place] = load(first[place])
    for number in range(1, len(gradients)):
        other = gradients[number][start : start + len(total)]
        for place in range(len(total)):
            total[place] += load(other[place])


@vectorized
def sum_of_squares(gradients, start, stop):
    """The sum of the squares of elements start..stop of the added gradients."""
    sums = np.empty(BLOCK, np.float32)
    whole = 0.0
    for begin in range(start, stop, BLOCK):
        block = sums[: min(BLOCK, stop - begin)]
        add_block(gradients, begin, block)
        part = np.float32(0)
        for place in range(len(block)):
            part += block[place] * block[place]
        whole += part
    return whole


@vectorized
def adamw_chunk(gradients, start, stop, weight, moments, copy, factors):
    """Move the elements start..stop of a weight (float32), its moments and its bf16 copy.

    With g = clip x the added gradients, and m and v the moments:

        m = beta1 m + rest1 g;  v = beta2 v + rest2 g^2
        w = decay w - size m / (root sqrt(v) + eps)

    The factors are float32, in the order below. A copy of length 0 is none.
    """
    first, second = moments
    clip, beta1, rest1, beta2, rest2 = factors[0], factors[1], factors[2], factors[3], factors[4]
    decay, size, root, eps = factors[5], factors[6], factors[7], factors[8]
    sums = np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        block = sums[: end - begin]
        add_block(gradients, begin, block)
        w, m, v = weight[begin:end], first[begin:end], second[begin:end]
        for place in range(len(block)):
            g = block[place] * clip
            m[place] = beta1 * m[place] + rest1 * g
            v[place] = beta2 * v[place] + rest2 * (g * g)
            # np.divide: the plain sign looks for zeros, one by one
            step = np.divide(size * m[place], root * np.sqrt(v[place]) + eps)
            w[place] = decay * w[place] - step
        if len(copy):
            narrow = copy[begin:end]
            for place in range(len(block)):
                narrow[place] = store(w[place], narrow[place])


@vectorized
def momentum_ahead(gradients, clip, momentum, ahead):
    """With g = clip x the added gradients: m = 0.95 m + g; ahead = g + 0.95 m. See `Muon`."""
    sums = np.empty(BLOCK, np.float32)
    for begin in range(0, len(momentum), BLOCK):
        block = sums[: min(BLOCK, len(momentum) - begin)]
        add_block(gradients, begin, block)
        m, target = momentum[begin : begin + len(block)], ahead[begin : begin + len(block)]
        for place in range(len(block)):
            g = block[place] * clip
            m[place] = MUON_MOMENTUM * m[place] + g
            target[place] = store(g + MUON_MOMENTUM * m[place], target[place])


@vectorized
def move_along(direction, decay, size, weight, copy):
    """Set a weight to decay w - size x direction, and its bf16 copy, if it has one."""
    for place in range(len(weight)):
        weight[place] = decay * weight[place] - size * load(direction[place])
    for place in range(len(copy)):
        copy[place] = store(weight[place], copy[place])
