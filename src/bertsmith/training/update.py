"""The end of a step: the replicas' gradients are added and clipped, and the weights moved.

By PyTorch's operators, which read and write all weights again and again, or, where the replicas
have bf16 copies and the optimizer is AdamW, in two passes of a compiled kernel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bertsmith.kernels.adamw import NO_COPY, adamw_stretch, sum_of_squares
from bertsmith.training.optimizers import first_state
from bertsmith.training.ranks import whole
from bertsmith.training.replicas import Replicas, Trained

STRETCH = 1 << 19  # numbers that one core moves at a time
NO_FACTORS = np.zeros(9, np.float32)
TINY = 1e-6  # added to the norm by which clipping divides, as in PyTorch


class Update:
    """One step's, by PyTorch's operators: any optimizer, any device."""

    def __init__(self, optimizer: Optimizer, replicas: Replicas, clip: float) -> None:
        self.optimizer, self.replicas, self.clip = optimizer, replicas, clip

    def norm(self) -> Tensor | float:
        """The norm of the added gradients, before they are clipped to `clip`."""
        self.replicas.add_ranks()
        self.replicas.gather()
        return whole(nn.utils.clip_grad_norm_(self.replicas.weights, self.clip))

    def move(self) -> None:
        """Move the weights. `norm` comes before it."""
        self.optimizer.step()
        self.replicas.renew_copies()
        self.forget()

    def load(self) -> None:
        """Have what `norm` and `move` run compiled, and move nothing."""

    def forget(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()
        self.replicas.forget()


class FusedUpdate(Update):
    """One step's of AdamW or PaperAdam on a CPU; the same numbers up to rounding.

    A core has a stretch of a weight at a time. Which core has which changes no number.
    """

    def norm(self) -> float:
        self.replicas.add_ranks()
        self._trained = self.replicas.trained()
        self._gradients = [tuple(map(_flat, part.gradients)) for part in self._trained]
        self._stretches = [
            (number, start, min(start + STRETCH, part.weight.numel()))
            for number, part in enumerate(self._trained)
            for start in range(0, part.weight.numel(), STRETCH)
        ]

        def squares(stretch: tuple[int, int, int]) -> float:
            number, start, stop = stretch
            return sum_of_squares(self._gradients[number], start, stop)

        self._norm = math.sqrt(sum(self.replicas.each(squares, self._stretches)))
        return self._norm

    def move(self) -> None:
        groups = {id(w): group for group in self.optimizer.param_groups for w in group["params"]}

        def prepare(part: Trained) -> tuple[np.ndarray, ...]:
            return self._moved(part, groups[id(part.weight)])

        moved = self.replicas.each(prepare, self._trained)

        def move(stretch: tuple[int, int, int]) -> None:
            number, start, stop = stretch
            adamw_stretch(self._gradients[number], start, stop, *moved[number])

        self.replicas.each(move, self._stretches)
        self.forget()

    def load(self) -> None:
        """By stretches without a number."""
        self.replicas.add_ranks()
        for part in self.replicas.trained():
            gradients, weight = tuple(map(_flat, part.gradients)), _flat(part.weight)
            sum_of_squares(gradients, 0, 0)
            moments = weight, weight
            adamw_stretch(gradients, 0, 0, weight, *moments, _flat_copy(part), NO_FACTORS)

    def _moved(self, part: Trained, group: dict[str, Any]) -> tuple[np.ndarray, ...]:
        """A weight, its moments, its copy, and the factors of this step."""
        state = self.optimizer.state[part.weight]
        if not state:
            state.update(first_state(part.weight, 0.0))
        state["step"] += 1
        step, rate, (beta1, beta2) = state["step"].item(), group["lr"], group["betas"]
        factors = [
            min(1.0, self.clip / (self._norm + TINY)),
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - rate * group["weight_decay"],
            rate / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            group["eps"],
        ]
        return (
            _flat(part.weight),
            _flat(state["exp_avg"]),
            _flat(state["exp_avg_sq"]),
            _flat_copy(part),
            np.array(factors, np.float32),
        )


def update_of(optimizer: Optimizer, replicas: Replicas, clip: float) -> Update:
    """The faster of the two that fits."""
    fits = replicas.has_copies and isinstance(optimizer, AdamW)
    return (FusedUpdate if fits else Update)(optimizer, replicas, clip)


def _flat_copy(part: Trained) -> np.ndarray:
    return NO_COPY if part.copy is None else _flat(part.copy)


def _flat(tensor: Tensor) -> np.ndarray:
    """A tensor's own memory; bf16 as its bits."""
    assert tensor.is_contiguous()
    flat = tensor.detach().view(-1)
    return flat.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else flat.numpy()
