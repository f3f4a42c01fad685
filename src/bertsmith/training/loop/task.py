"""What the loop trains: a task, batch by batch, within settings, from a state on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from bertsmith.corpus.examples.stream import Position
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.ranks import Ranks

EVALUATION_SHARE = 0.03  # of a budget in minutes
EVALUATED_ROW = 0.5  # of a row's part of a step: what measuring it takes (at tiny)


@dataclass
class StepBatch:
    """What one optimizer step reads."""

    micro_batches: list[dict[str, np.ndarray]]
    """Computed one by one, on several cores side by side."""
    counts: dict[str, int]
    """Global counts by which the summed losses are divided, e.g. masked positions."""
    tokens: int
    first: int = 0
    """The number of the first micro-batch among those of all ranks."""

    def over(self, ranks: Ranks) -> StepBatch:
        """The same of a batch of which each rank has its share: counts and tokens of all."""
        totals = ranks.total({**self.counts, "tokens": self.tokens})
        counts = {name: int(totals[name]) for name in self.counts}
        return replace(self, counts=counts, tokens=int(totals["tokens"]))


@dataclass
class State:
    """Where a run stands; together with weights and optimizer all that a resume needs."""

    step: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))
    tokens: int = 0
    seconds: float = 0.0
    evaluating: float = 0.0
    """Seconds that evaluations took in a budget in minutes; `seconds` has them too."""
    phase: int = 1
    """Of a run whose batches change on the way; `position` is that in its phase's data."""
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
        self, model: Any, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """(loss to differentiate, sums for the log) of a replica of the model; from threads."""
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


def in_words(figures: Mapping[str, float]) -> str:
    """
    >>> in_words({"spearman": 0.81237, "pearson": 0.8})
    'spearman 0.8124, pearson 0.8000'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


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
    """How many times the task is evaluated over the whole budget, the end included; in a budget in
    minutes fewer times where they would take more than `EVALUATION_SHARE` of it."""
    evaluation_steps: float = 0.0
    """An evaluation takes about as long as so many steps: a guess, until one was timed."""
    loader_workers: int = 1
    peak: float = 0.0
    """The machine's measured operations a second; 0: unknown."""
    label: str = "training"
    told: Callable[[Mapping[str, float]], str] = in_words
    """Put the figures of an evaluation into words, for its line."""
    until: float = 1.0
    """The share of the budget at which `train` returns; the rate goes by the whole budget."""
    keep_at: tuple[int, ...] = ()
    """Steps with a checkpoint besides every `checkpoint_every`-th."""
    deadline: float = math.inf
    """The `time.monotonic` at which `train` ends after the step, as when a signal asks for it."""
