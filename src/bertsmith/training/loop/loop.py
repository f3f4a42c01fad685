"""The training loop: every kind of training in this package runs through `train`.

A step: take the batch at the state's position, sum the gradients of its micro-batches (each loss
is a sum divided by the whole batch's count), check that they are finite, clip, move the weights.
What differs between pre-training and fine-tuning is in the `Task`.

Why a loop should end before its budget: SIGTERM, Ctrl-C or a time limit.

Batches in order, made ahead by threads, so that no step waits for its data.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from bertsmith.base.processes import keep_freed_memory
from bertsmith.base.terminal import Progress
from bertsmith.corpus.examples.stream import Position
from bertsmith.training.engine import Engine
from bertsmith.training.loop.log import RunLog, progress_notes
from bertsmith.training.loop.schedule import Budget, learning_rate
from bertsmith.training.loop.step import StepGuard, first_passes, optimizer_step
from bertsmith.training.loop.task import EVALUATION_SHARE, LoopSettings, State, StepBatch, Task
from bertsmith.training.ranks import Ranks, whole
from bertsmith.training.replicas import Replicas


class StopWish:
    """What a loop looks at between two steps: true once it should end."""

    def __init__(self, deadline: float) -> None:
        self.reason = ""
        self._deadline = deadline

    def __bool__(self) -> bool:
        if not self.reason and time.monotonic() >= self._deadline:
            self.reason = "the time limit"
        return bool(self.reason)


@contextmanager
def stop_signals(deadline: float = math.inf) -> Iterator[StopWish]:
    """SIGTERM and SIGINT make the yielded wish true instead of ending the process; a second one
    ends it, under torchrun a second SIGINT alone. The wish comes true as well at the `deadline`, a
    time of `time.monotonic`, which no change of the clock moves.

    Outside the main thread, where Python allows no handlers, signals are left as they are.
    """
    wish = StopWish(deadline)

    def note(number: int, frame: FrameType | None) -> None:
        if wish.reason.startswith("SIG"):
            if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                return  # torchrun passes on what a scheduler has sent to all processes
            raise KeyboardInterrupt
        wish.reason = signal.Signals(number).name

    previous: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, note)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield wish
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def prefetch(
    task: Task, engine: Engine, position: Position, workers: int
) -> Iterator[Iterator[tuple[StepBatch, Position]]]:
    """(batch, next position) from `position` on; how many threads changes nothing but the time.

    A batch is this rank's share, with the counts of all ranks. For a GPU the threads also put the
    arrays where its copies make nobody wait.
    """
    waiting: deque[Future[tuple[StepBatch, Position]]] = deque()

    def made(position: Position) -> tuple[StepBatch, Position]:
        batch, following = task.batch(position)
        batch.micro_batches = [engine.staged(micro) for micro in batch.micro_batches]
        return batch, following

    def batches(pool: ThreadPoolExecutor) -> Iterator[tuple[StepBatch, Position]]:
        ahead = position
        while True:
            while len(waiting) < workers + 1:
                waiting.append(pool.submit(made, ahead))
                ahead = task.advance(ahead)
            batch, following = waiting.popleft().result()
            yield batch.over(engine.ranks), following

    with ThreadPoolExecutor(workers, thread_name_prefix="loader") as pool:
        yield batches(pool)
        for future in waiting:
            future.cancel()


def train(
    task: Task,
    optimizer: torch.optim.Optimizer,
    state: State,
    settings: LoopSettings,
    engine: Engine,
    log: RunLog,
    save: Callable[[State], None],
    watch: Callable[[float, dict[str, float]], object] = lambda done, figures: None,
    check: Callable[[], object] = lambda: None,
) -> bool:
    """Train until the budget is used; True then, False when a signal or the deadline came before.

    In both cases, and when a step is not finite but the weights are, `save` has had the state.
    `watch` is told the share of the budget that is used and the figures of every line of the log.
    `check` is called before every step, to raise what `save` met since it returned.

    Errors: FloatingPointError for a loss or gradient that is not finite; the weights are as before
    that step and the message names the batch.
    """
    keep_freed_memory()
    engine.prepare(task.model)
    saved = state.step if state.step else -1  # a resumed state is that of a checkpoint
    guard = StepGuard.where_it_fits(engine.device, optimizer)
    with (
        stop_signals(settings.deadline) as stop,
        prefetch(task, engine, state.position, settings.loader_workers) as batches,
        Replicas(task.model, engine) as replicas,
        _begun(task, optimizer, state, settings, engine, replicas) as bar,
    ):
        started = time.monotonic() - state.seconds
        _, stopping = _agreed(engine.ranks, started, stop)
        evaluation = 0.0  # seconds of the last
        try:
            while (done := _done(state, settings.budget)) < settings.until and not stopping:
                check()
                rate = learning_rate(done, settings.rate, settings.warmup, settings.schedule)
                batch, position = next(batches)
                sums = optimizer_step(
                    task, optimizer, batch, rate, settings, engine, state, replicas, guard
                )
                _count(state, sums, batch, position)
                if guard and any(_due(state, settings, done)):
                    guard.settle(state)  # before the clock is read
                seconds, stopping = _agreed(engine.ranks, started, stop)
                _time(state, seconds)
                due = _due(state, settings, done)
                if due.line:
                    watch(done, _write_line(task, state, settings, rate, log, bar))
                if due.evaluation and _has_time(state, settings, evaluation):
                    evaluated(task.evaluate(), state, settings, log)
                    seconds, stopping = _agreed(engine.ranks, started, stop)
                    evaluation = _time_evaluation(state, settings, seconds)
                bar.update(done=_amount(state, settings.budget))
                if due.checkpoint:
                    save(state)
                    saved = state.step
            if guard:
                guard.settle(state)
        except FloatingPointError:
            if state.step != saved and _finite(task.model):
                save(state)
            raise
        if state.step != saved:
            save(state)
        # a wish to stop that came with the last step of a phase holds for the phases behind it
        _, stopping = _agreed(engine.ranks, started, stop)
    return done >= settings.until and (not stopping or done >= 1.0)


def evaluated(
    figures: Mapping[str, float], state: State, settings: LoopSettings, log: RunLog
) -> None:
    """Log the held-out figures of the weights after the state's step, and print them."""
    log.evaluate(state.step, **figures)
    if figures:
        told = f"{settings.label}, step {state.step:,}: {settings.told(figures)}"
        print(told, file=sys.stderr, flush=True)


def _begun(
    task: Task,
    optimizer: torch.optim.Optimizer,
    state: State,
    settings: LoopSettings,
    engine: Engine,
    replicas: Replicas,
) -> Progress:
    """The bar of a training that begins now.

    Before it the first passes compile, where there is something to train: they are not of the
    budget's minutes, else warm-up, a share of these, would be over before the second step.
    """
    budget = settings.budget
    is_left = _done(state, budget) < settings.until
    if is_left and budget.minutes is not None:
        first_passes(task, optimizer, settings, engine, state, replicas)
    return Progress(settings.label, _total(budget), start=_amount(state, budget))


def _finite(model: nn.Module) -> bool:
    """Weights that a step sent to infinity must not take a good checkpoint's place."""
    return all([bool(whole(weight).isfinite().all()) for weight in model.parameters()])


def _count(state: State, sums: dict[str, Any], batch: StepBatch, position: Position) -> None:
    for name, value in sums.items():
        state.window[name] = state.window.get(name, 0.0) + value
    state.step += 1
    state.position = position
    state.tokens += batch.tokens


def _time(state: State, seconds: float) -> None:
    state.window["seconds"] = state.window.get("seconds", 0.0) + seconds - state.seconds
    state.seconds = seconds


class _Due(NamedTuple):
    """What happens between this step and the next."""

    line: bool
    checkpoint: bool
    evaluation: bool


def _due(state: State, settings: LoopSettings, before: float) -> _Due:
    after = _done(state, settings.budget)
    return _Due(
        line=state.step % settings.log_every == 0,
        checkpoint=state.step % settings.checkpoint_every == 0 or state.step in settings.keep_at,
        evaluation=_evaluation_due(before, after, settings.evaluations),
    )


def _write_line(
    task: Task, state: State, settings: LoopSettings, rate: float, log: RunLog, bar: Progress
) -> dict[str, float]:
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
    bar.update(notes=progress_notes(state.step, figures))
    state.window = {}
    return figures


def _done(state: State, budget: Budget) -> float:
    return budget.progress(state.step, state.tokens, state.seconds)


def _agreed(ranks: Ranks, started: float, stop: StopWish) -> tuple[float, bool]:
    """The seconds by rank 0's clock, and whether any rank is to stop: the same on all ranks."""
    seconds = time.monotonic() - started if ranks.rank == 0 else 0.0
    totals = ranks.total({"seconds": seconds, "stop": float(bool(stop))})
    return totals["seconds"], totals["stop"] > 0


def _evaluation_due(before: float, after: float, evaluations: int) -> bool:
    # the end is left to the caller, who measures on more text there
    return after < 1.0 and math.floor(before * evaluations) < math.floor(after * evaluations)


def _has_time(state: State, settings: LoopSettings, last: float) -> bool:
    """Tell if one more evaluation keeps them all to their share of a budget in minutes.

    Other budgets have time for all. `last`: the seconds of the one before; 0: there was none.
    """
    guess = max(last, settings.evaluation_steps * state.seconds / state.step)
    spent = state.evaluating + guess
    return settings.budget.minutes is None or spent <= EVALUATION_SHARE * state.seconds


def _time_evaluation(state: State, settings: LoopSettings, seconds: float) -> float:
    """Move the clock behind an evaluation; the seconds that it took."""
    took, state.seconds = seconds - state.seconds, seconds
    if settings.budget.minutes is not None:
        state.evaluating += took
    return took


def _total(budget: Budget) -> float:
    if budget.minutes is not None:
        return budget.minutes * 60
    total = budget.steps if budget.steps is not None else budget.tokens
    assert total is not None
    return total


def _amount(state: State, budget: Budget) -> float:
    if budget.steps is not None:
        return state.step
    return state.tokens if budget.tokens is not None else state.seconds
