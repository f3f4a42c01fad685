"""Training in epochs: their batches, and `fit`, which takes a task from its first step to its last.

Fine-tuning, sentence vectors and the feature-based tagger all train through `fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch.optim import Optimizer

from bertsmith.base.terminal import ignore
from bertsmith.corpus.examples.stream import Position
from bertsmith.tasks.features import SORTED_TOGETHER, training_batches
from bertsmith.training.engine import Engine
from bertsmith.training.loop.log import RunLog
from bertsmith.training.loop.loop import Stopped, train, write_evaluation
from bertsmith.training.loop.task import LoopSettings, Task, Training, TrainingState


class Epochs:
    """Batches of each epoch; a position's index counts batches."""

    def __init__(self, batches: Callable[[int], list[np.ndarray]]) -> None:
        """`batches`: number of an epoch -> its batches, as many in each."""
        self.epoch = functools.lru_cache(maxsize=2)(batches)
        self.per_epoch = len(self.epoch(0))

    def __getitem__(self, position: Position) -> np.ndarray:
        """The indices of a batch's examples, int64 [B]."""
        return self.epoch(position.epoch)[position.index]

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)


class Batches(Epochs):
    """Batches of so many examples, a function of the seed."""

    def __init__(
        self, lengths: np.ndarray, size: int, seed: int, together: int = SORTED_TOGETHER
    ) -> None:
        """`lengths` int64 [N] of the examples; `together`: batches that are sorted by length."""
        super().__init__(lambda number: training_batches(lengths, size, seed, number, together))


class EarlyStop(Exception):
    """Raised by a task's `evaluate` when dev has stopped getting better; has the last figures."""

    def __init__(self, reason: str, figures: dict[str, float]) -> None:
        super().__init__(reason)
        self.figures = figures


def fit(
    task: Task,
    optimizer: Optimizer,
    settings: LoopSettings,
    engine: Engine,
    folder: Path,
    state: TrainingState | None = None,
    save: Callable[[TrainingState], object] = ignore,
) -> dict[str, float]:
    """Train to the end of the budget, or until dev stops getting better: the last dev figures.

    The log is written to `folder`; that of a resumed `state` continues there. `save` writes
    checkpoints.

    Errors: KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step that is
    not finite.
    """
    state = state or TrainingState()
    with RunLog(folder, state.step or None) as log:

        def save_behind_log(state: TrainingState) -> None:
            log.sync()  # a resume from this checkpoint counts on the lines before it
            save(state)

        run = Training(task, optimizer, state, settings, engine, log, save_behind_log)
        try:
            if not train(run):
                raise Stopped
            figures = task.evaluate()
            write_evaluation(run, figures)
        except Stopped:
            save_behind_log(state)  # `train` did, but not for a stop in the evaluation after it
            log.message(f"stopped by a signal at step {state.step}")
            raise
        except EarlyStop as stop:
            figures = stop.figures
            write_evaluation(run, figures)
            log.message(f"stopped early: {stop}")
    return figures
