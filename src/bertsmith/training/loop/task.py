"""Terms of the loop: it trains a `Task`, batch by batch, from a `State` on, by `LoopSettings`.

`Training` holds these with the machine and the log, for the loop, a step and a trial alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from bertsmith.base.terminal import ignore
from bertsmith.corpus.examples.stream import Position
from bertsmith.training.engine import Engine
from bertsmith.training.loop.log import NoLog, RunLog
from bertsmith.training.loop.schedule import Budget, learning_rate
from bertsmith.training.ranks import Ranks

EVALUATION_SHARE = 0.03  # of a budget in minutes, at most
EVALUATED_ROW = 0.5  # time to evaluate a row, as a fraction of training on it (at tiny)


class Due(NamedTuple):
    line: bool
    checkpoint: bool
    evaluation: bool


@dataclass
class Training:
    """One training under way."""

    task: Task
    optimizer: Optimizer
    state: TrainingState
    settings: LoopSettings
    engine: Engine
    log: RunLog = field(default_factory=NoLog)
    save: Callable[[TrainingState], object] = ignore
    """Writes a checkpoint of the state, perhaps in a thread of its own."""
    on_log: Callable[[float, dict[str, float]], object] = ignore
    """Gets the used fraction of the budget and the figures, with each line of the log."""
    before_step: Callable[[], object] = ignore
    """Raises what `save` met since it returned."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last line of the log."""

    def __post_init__(self) -> None:
        self._saved_step = self.state.step or -1  # a state with steps comes from a checkpoint

    def done(self) -> float:
        """Used fraction of the budget, 0 to 1."""
        state = self.state
        return self.settings.budget.progress(state.step, state.tokens, state.seconds)

    def amount(self) -> float:
        state = self.state
        return self.settings.budget.amount(state.step, state.tokens, state.seconds)

    def due(self, before: float) -> Due:
        """Work that the last step, which began at `before` of the budget, has made due."""
        step, settings, after = self.state.step, self.settings, self.done()
        times = settings.num_evals
        return Due(
            line=step % settings.log_every == 0,
            checkpoint=step % settings.checkpoint_every == 0 or step in settings.keep_steps,
            # the caller evaluates the end, on more text
            evaluation=after < 1.0 and _whole(before * times) < _whole(after * times),
        )

    def save_state(self) -> None:
        if self.state.step != self._saved_step:
            self.save(self.state)
            self._saved_step = self.state.step


def _whole(share: float) -> int:
    """The whole part; 29 / 100 * 100, in floating point below 29, has 29."""
    return math.floor(round(share, 9))


class Task(Protocol):
    """Pre-training or fine-tuning, as the loop sees it. Threads call `batch` and `loss`."""

    @property
    def model(self) -> nn.Module: ...

    # the batch at a position and the position after it: a pure function
    def batch(self, position: Position) -> tuple[StepBatch, Position]: ...

    # the position after the batch at `position`, without making that batch
    def advance(self, position: Position) -> Position: ...

    # (loss to differentiate, sums for the log) of a replica of the model
    def loss(
        self, model: Any, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]: ...

    # figures for the log from the sums of some steps
    def metrics(self, window: dict[str, float]) -> dict[str, float]: ...

    # floating-point operations of a step
    def flops(self, batch: StepBatch) -> float: ...

    # held-out figures; empty without held-out data; may raise `Stopped`
    def evaluate(self) -> dict[str, float]: ...


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
        """The same batch in memory that is copied to the device without waiting."""
        return replace(self, micro_batches=[engine.staged(micro) for micro in self.micro_batches])

    def over(self, ranks: Ranks) -> StepBatch:
        """This rank's rows with the counts and tokens of all ranks."""
        totals = ranks.all_reduce({**self.counts, "tokens": self.tokens})
        counts = {name: int(totals[name]) for name in self.counts}
        return replace(self, counts=counts, tokens=int(totals["tokens"]))


@dataclass
class TrainingState:
    """The progress of a run: with weights and optimizer all that a resume needs."""

    step: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    evaluating: float = 0.0
    """Seconds of evaluations in a budget in minutes; `seconds` includes them."""
    phase: int = 1
    """`position` is one in this phase's data."""
    evaluation_due: bool = False
    """The evaluation after the last step was put off by a stop request."""
    since_log: dict[str, float] = field(default_factory=dict)
    """Sums since the last line of the log."""

    def count(self, batch: StepBatch, following: Position, sums: dict[str, Any]) -> None:
        """Count a step on this batch; `following` is the position after it."""
        for name, value in sums.items():
            self.since_log[name] = self.since_log.get(name, 0.0) + value
        self.step += 1
        self.position = following
        self.tokens += batch.tokens
        self.flops += sums["flops"]


def in_words(figures: Mapping[str, float]) -> str:
    """
    >>> in_words({"spearman": 0.81237, "pearson": 0.8})
    'spearman 0.8124, pearson 0.8000'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


@dataclass(frozen=True)
class LoopSettings:
    """Budget, learning rate, and what happens when."""

    budget: Budget
    learning_rate: float
    schedule: str
    warmup_ratio: float
    max_grad_norm: float
    seed: int
    log_every: int = 10
    checkpoint_every: int = 1000
    num_evals: int = 10
    """Evaluations over the whole budget, the end included; fewer in a budget in minutes, where they
    would take more than `EVALUATION_SHARE` of it."""
    evaluation_steps: float = 0.0
    """Guessed cost of an evaluation in steps, until one was timed."""
    num_workers: int = 1
    peak: float = 0.0
    """Measured operations a second of this machine; 0: unknown."""
    label: str = "training"
    describe: Callable[[Mapping[str, float]], str] = in_words
    """Formats the figures of an evaluation for its line."""
    until: float = 1.0
    """The fraction of the budget at which `train` returns; the rate follows the whole budget."""
    keep_steps: tuple[int, ...] = ()
    """Steps with a checkpoint besides every `checkpoint_every`-th."""
    deadline: float = math.inf
    """The `time.monotonic` after which `train` stops, as for a signal."""

    @classmethod
    def of(cls, settings: Any, **own: Any) -> LoopSettings:
        """`own`, and what the dataclass `settings` calls by the same names."""
        shared = {each.name for each in fields(cls)} & {each.name for each in fields(settings)}
        return cls(**{name: getattr(settings, name) for name in shared} | own)

    def rate_at(self, done: float) -> float:
        """The learning rate of a step that begins at `done` of the budget."""
        return learning_rate(done, self.learning_rate, self.warmup_ratio, self.schedule)
