"""Terms of the loop: it trains a `Task`, batch by batch, from a `State` on, by `LoopSettings`.

`Training` holds the three together with the machine and the log: the loop, a step and a trial
before a run are each given this one object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from bertsmith.corpus.examples.stream import Position
from bertsmith.training.engine import Engine
from bertsmith.training.loop.log import NoLog, RunLog
from bertsmith.training.loop.schedule import Budget, learning_rate
from bertsmith.training.ranks import Ranks

EVALUATION_SHARE = 0.03  # of a budget in minutes
EVALUATED_ROW = 0.5  # of a row's part of a step: what measuring it takes (at tiny)


def ignore(*given: object) -> None:
    """Do nothing."""


class Due(NamedTuple):
    """Work that falls due between two steps."""

    line: bool
    checkpoint: bool
    evaluation: bool


@dataclass
class Training:
    """One training under way."""

    task: Task
    optimizer: Optimizer
    state: State
    settings: LoopSettings
    engine: Engine
    log: RunLog = field(default_factory=NoLog)
    save: Callable[[State], object] = ignore
    """Writes a checkpoint of the state, perhaps in a thread of its own."""
    on_log: Callable[[float, dict[str, float]], object] = ignore
    """Gets the share of the budget that was used, and the figures of each line of the log."""
    before_step: Callable[[], object] = ignore
    """Raises what `save` met since it returned."""

    def __post_init__(self) -> None:
        # a state that has steps is that of a checkpoint
        self._saved_step = self.state.step or -1

    def done(self) -> float:
        """The share of the budget that is used, 0 to 1."""
        state = self.state
        return self.settings.budget.progress(state.step, state.tokens, state.seconds)

    def amount(self) -> float:
        """The used part of the budget, in its own unit."""
        state = self.state
        return self.settings.budget.amount(state.step, state.tokens, state.seconds)

    def due(self, before: float) -> Due:
        """Work that the last step, which began at `before` of the budget, has made due."""
        step, settings, after = self.state.step, self.settings, self.done()
        times = settings.evaluations
        return Due(
            line=step % settings.log_every == 0,
            checkpoint=step % settings.checkpoint_every == 0 or step in settings.keep_at,
            # the end is left to the caller, who measures on more text there
            evaluation=after < 1.0 and math.floor(before * times) < math.floor(after * times),
        )

    def save_state(self) -> None:
        """Save the state, unless it is saved already."""
        if self.state.step != self._saved_step:
            self.save(self.state)
            self._saved_step = self.state.step


class Task(Protocol):
    """Pre-training or fine-tuning, as the loop sees it."""

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


@dataclass
class StepBatch:
    """The rows of one optimizer step."""

    micro_batches: list[dict[str, np.ndarray]]
    """Computed one by one, on several cores side by side."""
    counts: dict[str, int]
    """Global counts by which the summed losses are divided, e.g. masked positions."""
    tokens: int
    first: int = 0
    """The number of the first micro-batch among those of all ranks."""

    def staged(self, engine: Engine) -> StepBatch:
        """The same batch, in memory from which a copy to the device makes nobody wait."""
        return replace(self, micro_batches=[engine.staged(micro) for micro in self.micro_batches])

    def over(self, ranks: Ranks) -> StepBatch:
        """This rank's share of a batch, with the counts and tokens of all ranks."""
        totals = ranks.total({**self.counts, "tokens": self.tokens})
        counts = {name: int(totals[name]) for name in self.counts}
        return replace(self, counts=counts, tokens=int(totals["tokens"]))


@dataclass
class State:
    """The progress of a run; together with weights and optimizer all that a resume needs."""

    step: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))
    tokens: int = 0
    seconds: float = 0.0
    evaluating: float = 0.0
    """Seconds that evaluations took in a budget in minutes; `seconds` has them too."""
    phase: int = 1
    """A run whose batches change on the way has several; `position` is that in its phase's data."""
    window: dict[str, float] = field(default_factory=dict)
    """Sums since the last line of the log."""

    def count(self, batch: StepBatch, following: Position, sums: dict[str, Any]) -> None:
        """Count a step on this batch, which the one at `following` comes after."""
        for name, value in sums.items():
            self.window[name] = self.window.get(name, 0.0) + value
        self.step += 1
        self.position = following
        self.tokens += batch.tokens


def in_words(figures: Mapping[str, float]) -> str:
    """
    >>> in_words({"spearman": 0.81237, "pearson": 0.8})
    'spearman 0.8124, pearson 0.8000'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


@dataclass(frozen=True)
class LoopSettings:
    """The way through the budget."""

    budget: Budget
    rate: float
    schedule: str
    warmup: float
    clip: float
    seed: int
    log_every: int = 10
    checkpoint_every: int = 1000
    evaluations: int = 10
    """Times that the task is evaluated over the whole budget, the end included; fewer in a budget
    in minutes, where they would take more than `EVALUATION_SHARE` of it."""
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

    def rate_at(self, done: float) -> float:
        """The learning rate of a step that begins at `done` of the budget."""
        return learning_rate(done, self.rate, self.warmup, self.schedule)
