"""One optimizer step: gradients of all micro-batches on all ranks, looked at, clipped, applied.

A step whose loss or gradient is not finite must not move the weights, nor may one after it.

On a CPU the loop looks at both numbers before it moves the weights. Asked after every step, a GPU
would stand still until the next one is sent to it; there a flag decides on the device itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bertsmith.base.files import fault_point
from bertsmith.model.kernels.elementwise import seed_dropout
from bertsmith.training.engine import Engine
from bertsmith.training.loop.update import update_of
from bertsmith.training.replicas import Replicas

if TYPE_CHECKING:
    from bertsmith.training.loop.task import LoopSettings, State, StepBatch, Task


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


def optimizer_step(
    task: Task,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    rate: float,
    settings: LoopSettings,
    engine: Engine,
    state: State,
    replicas: Replicas,
    guard: StepGuard | None = None,
) -> dict[str, Any]:
    """One step; its sums over all ranks for the log.

    With a `guard` some of them are still on the device.
    """
    sums = step_gradients(task, batch, settings.seed, engine, state, replicas, guard is not None)
    total = sums["loss"]
    fault_point("step-gradients")
    update = update_of(optimizer, replicas, settings.clip)
    with replicas.updating():
        norm: Any = update.norm()
        if guard:
            guard.watch(optimizer, state, total, norm)
        else:
            norm = _number(norm)
            if not (math.isfinite(total) and math.isfinite(norm)):
                update.forget()
                raise not_finite(state, total, norm)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("rate_scale", 1.0)
        update.move()
    fault_point("step-weights")
    found = {"operations": task.operations(batch), "tokens": float(batch.tokens)}
    return {**found, **sums, "gradient_norm": norm, "steps": 1.0}


def step_gradients(
    task: Task,
    batch: StepBatch,
    seed: int,
    engine: Engine,
    state: State,
    replicas: Replicas,
    on_device: bool = False,
) -> dict[str, Any]:
    """The passes of a step, which leave the replicas their gradients; the sums over all ranks.

    `seed` is the run's. With `on_device` the sums of a device stay there, for nobody to wait.
    """
    # of dropout: a function of seed, step and the micro-batch's number among all ranks'
    seed = step_seed(seed, state.step) + batch.first
    torch.manual_seed(seed)
    last = len(batch.micro_batches) - 1

    def gradients(
        model: nn.Module, micro: dict[str, np.ndarray], number: int
    ) -> tuple[Any, dict[str, Any]]:
        model.train()
        seed_dropout(seed + number)
        with replicas.passing(last=number == last) as computed:
            with engine.autocast():
                loss, parts = computed(task.loss, model, micro, batch.counts)
            loss.backward()
        number_of = _copied if on_device else _number
        return number_of(loss), {name: number_of(value) for name, value in parts.items()}

    sums: dict[str, Any] = {"loss": 0.0}
    for loss, parts in replicas.map(gradients, batch.micro_batches):
        for name, value in {"loss": loss, **parts}.items():
            sums[name] = sums.get(name, 0.0) + value
    return engine.ranks.total(sums)


def first_passes(
    task: Task,
    optimizer: torch.optim.Optimizer,
    settings: LoopSettings,
    engine: Engine,
    state: State,
    replicas: Replicas,
) -> None:
    """The next step but for the update, for what it compiles and reserves; nothing else is left."""
    batch, _ = task.batch(state.position)
    staged = [engine.staged(micro) for micro in batch.micro_batches]
    batch = replace(batch, micro_batches=staged).over(engine.ranks)
    step_gradients(task, batch, settings.seed, engine, state, replicas, on_device=True)
    update_of(optimizer, replicas, settings.clip).load()
    replicas.forget()


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's dropout: different for every (seed, step), the same on every resume.

    >>> step_seed(1, 0) != step_seed(0, 1)
    True
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _number(value: Tensor | float) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _copied(value: Tensor | float) -> Tensor | float:
    # a graph of the device writes its next results into the same memory
    return value.detach().clone() if isinstance(value, Tensor) else value
