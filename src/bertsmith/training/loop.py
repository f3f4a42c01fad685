"""The training loop: every kind of training in this package runs through `train`.

A step: take the batch at the state's position, sum the gradients of its micro-batches (each loss
is a sum divided by the whole batch's count), check that they are finite, clip, move the weights.
What differs between pre-training and fine-tuning is in the `Task`.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.corpus.stream import Position
from bertsmith.progress import Progress
from bertsmith.training.engine import Engine, keep_freed_memory
from bertsmith.training.run_log import RunLog
from bertsmith.training.schedule import Budget, learning_rate


@dataclass
class StepBatch:
    """What one optimizer step reads."""

    micro_batches: list[dict[str, np.ndarray]]
    counts: dict[str, int]
    """Global counts by which the summed losses are divided, e.g. masked positions."""
    tokens: int


@dataclass
class State:
    """Where a run stands; together with weights and optimizer all that a resume needs."""

    step: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))
    tokens: int = 0
    seconds: float = 0.0
    window: dict[str, float] = field(default_factory=dict)
    """Sums since the last line of the log."""


class Task(Protocol):
    """What the loop asks of pre-training and of fine-tuning."""

    @property
    def model(self) -> nn.Module: ...

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        """The batch at a position, and the next position: a pure function, called from threads."""
        ...

    def advance(self, position: Position) -> Position:
        """The position after the batch at `position`, without making it."""
        ...

    def loss(
        self, micro: dict[str, np.ndarray], counts: dict[str, int], measure: bool
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss to differentiate, sums for the log); with `measure` also the costlier sums."""
        ...

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        """The log's figures from the sums of some steps."""
        ...

    def operations(self, batch: StepBatch) -> float:
        """Floating-point operations of one step."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Held-out figures; empty when there is nothing to measure on."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """How to move through the budget."""

    budget: Budget
    rate: float
    schedule: str
    warmup: float
    clip: float
    seed: int
    log_every: int = 10
    checkpoint_every: int = 1000
    evaluations: int = 10
    """How many times the task is evaluated over the whole budget, the end included."""
    loader_workers: int = 1
    peak: float = 0.0
    """The machine's measured operations a second; 0: unknown."""
    label: str = "training"


def train(
    task: Task,
    optimizer: torch.optim.Optimizer,
    state: State,
    settings: LoopSettings,
    engine: Engine,
    log: RunLog,
    save: Callable[[State], None],
) -> bool:
    """Train until the budget is used; True then, False when a signal asked to stop before.

    In both cases, and when a step is not finite, the state has been saved.

    Errors: FloatingPointError for a loss or gradient that is not finite; the weights are as before
    that step and the message names the batch.
    """
    keep_freed_memory()
    task.model.train()
    started = time.monotonic() - state.seconds
    saved = state.step if state.step else -1  # a resumed state is that of a checkpoint
    with (
        stop_signals() as stop,
        _prefetch(task, state.position, settings.loader_workers) as batches,
        Progress(
            settings.label, *_total(settings.budget), start=_amount(state, settings.budget)
        ) as bar,
    ):
        while (done := _done(state, settings.budget)) < 1.0 and not stop:
            rate = learning_rate(done, settings.rate, settings.warmup, settings.schedule)
            batch, position = next(batches)
            measure = (state.step + 1) % settings.log_every == 0
            try:
                sums = optimizer_step(
                    task, optimizer, batch, rate, settings, engine, state, measure
                )
            except FloatingPointError:
                if state.step != saved:
                    save(state)
                raise
            for name, value in sums.items():
                state.window[name] = state.window.get(name, 0.0) + value
            state.step += 1
            state.position = position
            state.tokens += batch.tokens
            step_seconds, state.seconds = _elapsed(state, started)
            state.window["seconds"] = state.window.get("seconds", 0.0) + step_seconds
            if measure:
                _write_line(task, state, settings, rate, log, bar)
            bar.update(done=_amount(state, settings.budget))
            if _evaluation_due(done, _done(state, settings.budget), settings.evaluations):
                log.evaluate(state.step, **task.evaluate())
                task.model.train()
                state.seconds = time.monotonic() - started
            if state.step % settings.checkpoint_every == 0:
                save(state)
                saved = state.step
        if state.step != saved:
            save(state)
    return done >= 1.0


def optimizer_step(
    task: Task,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    rate: float,
    settings: LoopSettings,
    engine: Engine,
    state: State,
    measure: bool,
) -> dict[str, float]:
    torch.manual_seed(step_seed(settings.seed, state.step))  # dropout: a function of seed and step
    sums: dict[str, float] = {"operations": task.operations(batch), "tokens": float(batch.tokens)}
    total = 0.0
    for micro in batch.micro_batches:
        with engine.autocast():
            loss, parts = task.loss(micro, batch.counts, measure)
        loss.backward()
        total += loss.item()
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value
    norm = nn.utils.clip_grad_norm_(task.model.parameters(), settings.clip).item()
    if not (math.isfinite(total) and math.isfinite(norm)):
        optimizer.zero_grad()
        raise FloatingPointError(
            f"step {state.step}: loss {total}, gradient norm {norm}; the weights were not moved. "
            f"The batch is the one at epoch {state.position.epoch}, index {state.position.index}; "
            "a lower --rate or --precision float32 may help, in pre-training also on --resume"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return {**sums, "loss": total, "gradient_norm": norm, "steps": 1.0}


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's dropout: different for every (seed, step), the same on every resume.

    >>> step_seed(1, 0) != step_seed(0, 1)
    True
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _write_line(
    task: Task, state: State, settings: LoopSettings, rate: float, log: RunLog, bar: Progress
) -> None:
    window = state.window
    seconds = window["seconds"]
    figures: dict[str, float] = {
        "epoch": state.position.epoch,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "loss": window["loss"] / window["steps"],
        **task.figures(window),
        "gradient_norm": window["gradient_norm"] / window["steps"],
        "rate": rate,
        "tokens_per_second": window["tokens"] / seconds,
    }
    if settings.peak:
        figures["peak_share"] = window["operations"] / seconds / settings.peak
    log.train(state.step, **figures)
    share = f" · {figures['peak_share']:.0%} of peak" if settings.peak else ""
    bar.update(
        note=f"step {state.step:,} · loss {figures['loss']:.3f} · "
        f"{figures['tokens_per_second']:,.0f} tokens/s{share}"
    )
    state.window = {}


def _done(state: State, budget: Budget) -> float:
    return budget.progress(state.step, state.tokens, state.seconds)


def _elapsed(state: State, started: float) -> tuple[float, float]:
    now = time.monotonic() - started
    return now - state.seconds, now


def _evaluation_due(before: float, after: float, evaluations: int) -> bool:
    # the end is left to the caller, who measures on more text there
    return after < 1.0 and math.floor(before * evaluations) < math.floor(after * evaluations)


def _total(budget: Budget) -> tuple[float, str]:
    if budget.steps is not None:
        return budget.steps, "steps"
    if budget.tokens is not None:
        return budget.tokens, "tokens"
    assert budget.minutes is not None
    return budget.minutes * 60, "s"


def _amount(state: State, budget: Budget) -> float:
    if budget.steps is not None:
        return state.step
    return state.tokens if budget.tokens is not None else state.seconds


@contextmanager
def _prefetch(
    task: Task, position: Position, workers: int
) -> Iterator[Iterator[tuple[StepBatch, Position]]]:
    """Batches in order, made ahead by threads; how many threads changes nothing but the time."""
    waiting: deque[Future[tuple[StepBatch, Position]]] = deque()

    def batches(pool: ThreadPoolExecutor) -> Iterator[tuple[StepBatch, Position]]:
        ahead = position
        while True:
            while len(waiting) < workers + 1:
                waiting.append(pool.submit(task.batch, ahead))
                ahead = task.advance(ahead)
            yield waiting.popleft().result()

    with ThreadPoolExecutor(workers, thread_name_prefix="loader") as pool:
        yield batches(pool)
        for future in waiting:
            future.cancel()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT fill the yielded list instead of ending the process; a second one ends it.

    Outside the main thread, where Python allows no handlers, signals are left as they are.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, note)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
