"""One optimizer step: gradients of all micro-batches on all ranks, checked, clipped, applied.

A step whose loss or gradient is not finite must not move the weights, nor may one after it. A CPU
reads both numbers before the weights move; reading them would stall a GPU, so there a flag on the
device decides.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bertsmith.base.files import fault_point
from bertsmith.model.kernels.elementwise import seed_dropout
from bertsmith.training.loop.task import StepBatch, Training, TrainingState
from bertsmith.training.loop.update import Update, make_update
from bertsmith.training.replicas import Replicas

LOWER_RATE = "lower `learning_rate` or use `precision='float32'`"


class Stepper(AbstractContextManager["Stepper"]):
    """The steps of one training, computed by `replicas` of its model, by default its own."""

    def __init__(self, run: Training, replicas: Replicas | None = None) -> None:
        self.run = run
        self.replicas = replicas or Replicas(run.task.model, run.engine)
        self._guard = NonFiniteGuard.where_it_fits(run.engine.device, run.optimizer)

    def step(self, batch: StepBatch, rate: float) -> dict[str, Any]:
        """Move the weights once; returns sums over all ranks for the log.

        On a GPU some sums stay on the device until `synchronize`, which then raises the error too.
        Errors: FloatingPointError for a loss or gradient that is not finite.
        """
        run = self.run
        sums = self.gradients(batch)
        fault_point("step-gradients")
        update = self._update
        with self.replicas.updating():
            norm: Any = update.norm()
            if self._guard:
                self._guard.record(run, sums["loss"], norm)
            else:
                norm = _number(norm)
                if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
                    update.zero_grad()
                    raise not_finite(run.state, sums["loss"], norm)
            for group in run.optimizer.param_groups:
                group["lr"] = rate * group.get("rate_scale", 1.0)
            update.move()
        fault_point("step-weights")
        found = {"flops": run.task.flops(batch), "tokens": float(batch.tokens)}
        return {**found, **sums, "grad_norm": norm, "steps": 1.0}

    def gradients(self, batch: StepBatch) -> dict[str, Any]:
        """Forward and backward passes; the replicas keep the gradients, the sums are returned."""
        task, engine = self.run.task, self.run.engine
        # dropout is a function of seed, step and the micro-batch's number among all ranks'
        seed = step_seed(self.run.settings.seed, self.run.state.step) + batch.first
        torch.manual_seed(seed)
        last = len(batch.micro_batches) - 1
        as_sum = _copied if self._guard else _number

        def passes(
            model: nn.Module, micro: dict[str, np.ndarray], number: int
        ) -> dict[str, Tensor | float]:
            model.train()
            seed_dropout(seed + number)
            with self.replicas.synced(last=number == last) as forward:
                with engine.autocast():
                    loss, parts = forward(task.loss, model, micro, batch.counts)
                loss.backward()
            return {name: as_sum(value) for name, value in {"loss": loss, **parts}.items()}

        sums: dict[str, Any] = {"loss": 0.0}
        for found in self.replicas.map(passes, batch.micro_batches):
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        return engine.ranks.all_reduce(sums)

    def first_passes(self) -> None:
        """Take the next step without its update: it compiles and reserves what all steps use."""
        run = self.run
        batch, _ = run.task.batch(run.state.position)
        self.gradients(batch.staged(run.engine).over(run.engine.ranks))
        self._update.load()
        self.replicas.zero_grad()

    def synchronize(self) -> None:
        """Wait for a GPU and turn the sums since the last log line into numbers.

        Errors: FloatingPointError for the first step that was not finite; state and weights are
        then as before it.
        """
        if self._guard:
            self._guard.check(self.run.state)

    @cached_property
    def _update(self) -> Update:
        return make_update(self.run.optimizer, self.replicas, self.run.settings.max_grad_norm)

    def __exit__(self, *error: object) -> None:
        self.replicas.close()


class NonFiniteGuard:
    """Stops the weights on a GPU at the first bad step, although nobody waits for the steps.

    Each step writes its verdict into a flag on the device, which stays 1 from the first bad step
    on. The fused optimizer reads it (as a gradient scaler's) and then leaves weights, moments and
    counts alone. `check` finds the first bad step and puts the state back before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stopped = torch.zeros((), device=device)
        self._steps: list[tuple[TrainingState, Tensor, Tensor, Tensor]] = []

    @classmethod
    def where_it_fits(cls, device: torch.device, optimizer: Optimizer) -> NonFiniteGuard | None:
        """A guard on a GPU with an optimizer that obeys the flag."""
        heeds = isinstance(optimizer, AdamW) and bool(optimizer.defaults["fused"])
        return cls(device) if device.type == "cuda" and heeds else None

    def record(self, run: Training, loss: Tensor, norm: Tensor) -> None:
        """Let the next step move the weights only if all steps so far were finite."""
        finite = loss.isfinite() & norm.isfinite()
        self._stopped = torch.where(finite, self._stopped, 1.0)
        run.optimizer.found_inf = self._stopped  # pyright: ignore[reportAttributeAccessIssue]
        before = replace(run.state, since_log=dict(run.state.since_log))
        self._steps.append((before, loss, norm, self._stopped))

    def check(self, state: TrainingState) -> None:
        steps, self._steps = self._steps, []
        bad = None
        if self._stopped.item():
            bad = next(step for step in steps if step[3].item())
            vars(state).update(vars(bad[0]))
        state.since_log = {name: float(value) for name, value in state.since_log.items()}
        if bad:
            raise not_finite(state, bad[1].item(), bad[2].item())


def not_finite(state: TrainingState, loss: float, norm: float) -> FloatingPointError:
    return FloatingPointError(
        f"step {state.step}: loss {loss}, gradient norm {norm}; the weights were not moved. "
        f"The batch is the one at {state.position}: {LOWER_RATE}"
    )


def without_hint(error: FloatingPointError) -> str:
    """The fault alone, for a line that users of the library and of commands read."""
    return str(error).removesuffix(f": {LOWER_RATE}")


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's dropout: another for every (seed, step), the same on every resume.

    >>> step_seed(1, 0) != step_seed(0, 1)
    True
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _number(value: Tensor | float) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _copied(value: Tensor | float) -> Tensor | float:
    # a CUDA graph writes its next results into the same memory
    return value.detach().clone() if isinstance(value, Tensor) else value
