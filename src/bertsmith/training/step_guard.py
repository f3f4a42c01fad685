"""A step whose loss or gradient is not finite must not move the weights, nor may one after it.

On a CPU the loop looks at both numbers before it moves the weights. Asked after every step, a GPU
would stand still until the next one is sent to it; there a flag decides on the device itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

if TYPE_CHECKING:
    from bertsmith.training.task import State


def not_finite(state: State, loss: float, norm: float) -> FloatingPointError:
    """What to raise for the step at `state`."""
    return FloatingPointError(
        f"step {state.step}: loss {loss}, gradient norm {norm}; the weights were not moved. "
        f"The batch is the one at {state.position}; "
        "a lower --rate or --precision float32 may help, in pre-training also on --resume"
    )


class StepGuard:
    """Steps of a GPU that nobody waits for.

    Each step puts its verdict into a flag on the device. The fused optimizer reads the flag there
    (as it does for a scaler of gradients) and leaves weights, moments and counts alone once it
    is 1; it stays 1. `settle` then finds the first bad step and puts the state back before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stopped = torch.zeros((), device=device)
        self._steps: list[tuple[State, Tensor, Tensor, Tensor]] = []

    @classmethod
    def where_it_fits(cls, device: torch.device, optimizer: Optimizer) -> StepGuard | None:
        """A guard on a GPU with an optimizer that heeds the flag."""
        heeds = isinstance(optimizer, AdamW) and bool(optimizer.defaults["fused"])
        return cls(device) if device.type == "cuda" and heeds else None

    def watch(self, optimizer: Any, state: State, loss: Tensor, norm: Tensor) -> None:
        """Let the optimizer's next step move the weights only if all steps so far were finite."""
        finite = loss.isfinite() & norm.isfinite()
        self._stopped = torch.where(finite, self._stopped, 1.0)
        optimizer.found_inf = self._stopped
        self._steps.append((_copy(state), loss, norm, self._stopped))

    def settle(self, state: State) -> None:
        """Wait for the device and turn the sums of the state's window into numbers.

        Errors: FloatingPointError for the first step that was not finite; the state is then as
        before it, like the weights.
        """
        steps, self._steps = self._steps, []
        bad = bool(self._stopped.item())
        if bad:
            before, loss, norm, _ = next(step for step in steps if step[3].item())
            vars(state).update(vars(before))
        state.window = {name: float(value) for name, value in state.window.items()}
        if bad:
            raise not_finite(state, loss.item(), norm.item())


def _copy(state: State) -> State:
    return replace(state, window=dict(state.window))
