"""The training loop: pre-training and fine-tuning run through `train`, and differ in their `Task`.

A step (step.py) sums the gradients of the micro-batches, whose losses are sums divided by the whole
batch's count, checks that they are finite, clips them and moves the weights.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import accumulate, repeat
from types import FrameType
from typing import Any

from torch import nn

from bertsmith.base.processes import in_order, keep_freed_memory
from bertsmith.base.terminal import Progress
from bertsmith.corpus.examples.stream import Position
from bertsmith.training.loop.log import progress_notes
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import EVALUATION_SHARE, StepBatch, Training
from bertsmith.training.ranks import full_tensor


class Stopped(KeyboardInterrupt):
    """Raised by a task's `evaluate` on a stop request: the evaluation is put off."""


def train(run: Training) -> bool:
    """Train until the budget is used: True; False if a signal or the deadline stopped it.

    The state is saved in both cases, and when a step fails but the weights are finite.

    Errors: FloatingPointError that names the batch whose loss or gradient is not finite; the
    weights are as before that step.
    """
    state, settings, task = run.state, run.settings, run.task
    keep_freed_memory()
    run.engine.prepare(task.model)
    with (
        stop_signals(settings.deadline) as stop,
        closing(prefetch(run)) as batches,
        Stepper(run) as stepper,
        begin(run, stepper) as bar,
    ):
        clock = Clock(run, stop)
        try:
            if state.evaluation_due:
                evaluate(run, clock)
            while (done := run.done()) < settings.until and not clock.stopping:
                run.before_step()
                rate = settings.rate_at(done)
                batch, following = next(batches)
                state.count(batch, following, stepper.step(batch, rate))
                if any(run.due(done)):
                    stepper.synchronize()  # before the clock is read
                clock.count_step()
                due = run.due(done)  # again: a budget in minutes has moved on
                if due.line:
                    run.on_log(done, write_line(run, rate, bar))
                if due.evaluation and clock.has_time_to_evaluate():
                    evaluate(run, clock)
                bar.update(done=run.amount())
                if due.checkpoint:
                    run.save_state()
            stepper.synchronize()
        except FloatingPointError:
            if has_finite_weights(task.model):
                run.save_state()
            raise
        run.save_state()
        clock.read()  # a stop request during a phase's last step also stops the next phase
    return done >= settings.until and (not clock.stopping or done >= 1.0)


def begin(run: Training, stepper: Stepper) -> Progress:
    """Start the progress bar, after the passes of a first step in a budget in minutes.

    They compile, and warm-up, a fraction of the minutes, would be over before the second step.
    """
    budget = run.settings.budget
    if budget.minutes is not None and run.done() < run.settings.until:
        stepper.first_passes()
    return Progress(run.settings.label, budget.total, start=run.amount())


class Clock:
    """Rank 0's seconds of training and any rank's request to stop, the same on all ranks."""

    def __init__(self, run: Training, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._started = time.monotonic() - run.state.seconds
        self.last_evaluation = 0.0  # seconds
        self.read()

    def read(self) -> float:
        """The seconds now; `stopping` becomes true if any rank is to stop."""
        ranks = self._run.engine.ranks
        seconds = time.monotonic() - self._started if ranks.rank == 0 else 0.0
        totals = ranks.all_reduce({"seconds": seconds, "stop": float(bool(self._stop))})
        self.stopping = totals["stop"] > 0
        return totals["seconds"]

    def count_step(self) -> None:
        """Count the time since the last reading as a step's."""
        state, seconds = self._run.state, self.read()
        state.since_log["seconds"] = state.since_log.get("seconds", 0.0) + seconds - state.seconds
        state.seconds = seconds

    def count_evaluation(self) -> None:
        """Count it as an evaluation's, without effect on tokens a second."""
        state, seconds = self._run.state, self.read()
        self.last_evaluation, state.seconds = seconds - state.seconds, seconds
        if self._run.settings.budget.minutes is not None:
            state.evaluating += self.last_evaluation

    def has_time_to_evaluate(self) -> bool:
        """True if one more evaluation keeps to `EVALUATION_SHARE` of a budget in minutes."""
        state, settings = self._run.state, self._run.settings
        guess = settings.evaluation_steps * state.seconds / state.step
        spent = state.evaluating + max(self.last_evaluation, guess)
        return settings.budget.minutes is None or spent <= EVALUATION_SHARE * state.seconds


def evaluate(run: Training, clock: Clock) -> None:
    """Evaluate the current weights, unless a stop request puts it off until the run goes on."""
    run.state.evaluation_due = True
    if clock.stopping:
        return
    try:
        figures = run.task.evaluate()
    except Stopped:
        clock.read()
        return
    run.state.evaluation_due = False
    write_evaluation(run, figures)
    clock.count_evaluation()


def write_line(run: Training, rate: float, bar: Progress) -> dict[str, float]:
    """Log the figures since the last line and show them next to the bar."""
    state, window = run.state, run.state.since_log
    seconds, steps = window["seconds"], window["steps"]
    figures: dict[str, float] = {
        "epoch": state.position.epoch,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "loss": window["loss"] / steps,
        **run.task.metrics(window),
        "grad_norm": window["grad_norm"] / steps,
        "learning_rate": rate,
        "tokens_per_second": window["tokens"] / seconds,
    }
    if peak := run.settings.peak:
        figures["mfu"] = window["flops"] / seconds / peak
    run.log.train(state.step, **figures)
    bar.update(notes=progress_notes(state.step, figures))
    state.since_log, run.metrics = {}, figures
    return figures


def write_evaluation(run: Training, figures: Mapping[str, float]) -> None:
    """Log and print held-out figures of the current weights."""
    step, settings = run.state.step, run.settings
    run.log.evaluate(step, **figures)
    if figures:
        words = settings.describe(figures)
        print(f"{settings.label}, step {step:,}: {words}", file=sys.stderr, flush=True)


def has_finite_weights(model: nn.Module) -> bool:
    """True if all weights are finite; others must not replace a good checkpoint. For all ranks."""
    return all([bool(full_tensor(weight).isfinite().all()) for weight in model.parameters()])


def prefetch(run: Training) -> Generator[tuple[StepBatch, Position]]:
    """(this rank's batch with the counts of all ranks, next position), made ahead by threads.

    The number of threads changes nothing but the time.
    """
    task, engine, workers = run.task, run.engine, run.settings.num_workers

    def make(position: Position) -> tuple[StepBatch, Position]:
        batch, following = task.batch(position)
        return batch.staged(engine), following

    positions = accumulate(repeat(run.state.position), lambda at, _: task.advance(at))
    pool = ThreadPoolExecutor(workers, "loader")
    try:
        for batch, following in in_order(pool, make, positions, workers + 1):
            yield batch.over(engine.ranks), following
    finally:
        pool.shutdown(cancel_futures=True)


class StopRequest:
    """A stop request, and the handler of signals that makes it; the loop checks it between steps.

    A second signal ends the process, under torchrun a second SIGINT only.
    """

    def __init__(self, deadline: float) -> None:
        self.reason = ""
        self._deadline = deadline

    def __bool__(self) -> bool:
        if not self.reason and time.monotonic() >= self._deadline:
            self.reason = "the time limit"
        return bool(self.reason)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.reason.startswith("SIG"):
            if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                return  # torchrun repeats the signal that a scheduler has sent to all processes
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:  # by a system call: a print may be what it interrupts
            os.write(2, b"\nstopping when all is saved; Ctrl-C again ends at once\n")


@contextmanager
def stop_signals(deadline: float = math.inf) -> Iterator[StopRequest]:
    """Let SIGTERM, SIGINT and the `deadline` (of `time.monotonic`) make the yielded request true.

    Inside another one the request is that one's. Outside the main thread signals are left alone:
    Python allows no handlers there.
    """
    if isinstance(outer := signal.getsignal(signal.SIGTERM), StopRequest):
        yield outer
        return
    request = StopRequest(deadline)
    previous: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, request)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
