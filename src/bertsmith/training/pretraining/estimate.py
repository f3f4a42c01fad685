"""Before a run: what it needs and how long it takes (`pretrain --dry-run`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bertsmith.model.config import SIZES, ModelConfig, config_for, training_operations
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import EVALUATED_ROW, EVALUATION_SHARE
from bertsmith.training.memory import Memory, StepShape, parameters, step_memory

TOKENS_PER_PARAMETER = 20
RULE = (
    f"the largest size that reads {TOKENS_PER_PARAMETER} tokens a parameter, a rule of thumb found "
    "for left-to-right models (Hoffmann et al. 2022, arXiv 2203.15556)"
)
ASSUMED_SHARE = 0.4  # of the machine's peak, where no step was measured
SIZE_FIELDS = {"vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"}


@dataclass(frozen=True)
class Speed:
    """How fast a model trains on this machine."""

    tokens_per_second: float
    measured: bool
    """False: a guess from the machine's peak."""


@dataclass(frozen=True)
class SizeForBudget:
    """What the time of a budget would give a model of another size."""

    size: str
    parameters: int
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """What a run of one length needs; a recipe of two lengths has two of these."""

    parameters: int
    shape: StepShape
    memory: Memory
    available: int | None
    """Bytes of memory that are free; None: unknown."""
    speed: Speed
    operations_per_step: float
    padding: float
    """Share of the rows that no token fills; those below are without it, as a run counts them."""
    steps: int
    tokens: int
    hours: float
    """With the held-out figures on the way, without start, checkpoints and the last figures."""
    best: SizeForBudget
    """The size that the rule of thumb would take for the same hours."""

    @property
    def step_tokens(self) -> int:
        """On average."""
        return round((1 - self.padding) * self.shape.batch * self.shape.length)

    @property
    def operations(self) -> float:
        return self.operations_per_step * self.steps

    @property
    def fits(self) -> bool:
        """Whether the memory that is free is as much as it needs, or unknown."""
        return self.available is None or self.memory.peak <= self.available

    def mapping(self) -> dict[str, Any]:
        """For JSON; memory in bytes."""
        found = {**asdict(self), "operations": self.operations, "rule": RULE}
        return {**found, "fits": self.fits}

    def text(self) -> str:
        """A line each for model, memory, step, speed, budget and advice."""
        shape, memory, best = self.shape, self.memory, self.best
        parts = ", ".join(
            f"{name} {_gigabytes(getattr(memory, name))}"
            for name in ("weights", "gradients", "optimizer", "activations")
        )
        free = "" if self.available is None else f"; {_gigabytes(self.available)} GB are free"
        if not self.fits:
            free += ": too little; lower --micro-batch, --length or --size, or add "
            free += "--checkpoint-activations"
        padding = f" and {self.padding:.0%} padding" if self.padding else ""
        cut = "" if shape.micro_batch == shape.batch else f", {shape.micro_batch} at once"
        how = "measured here" if self.speed.measured else "a guess from the machine's peak"
        ratio = best.tokens / best.parameters
        why = RULE if ratio >= TOKENS_PER_PARAMETER else f"the smallest; too short for {RULE}"
        return "\n".join(
            (
                f"model    {self.parameters:,} parameters",
                f"memory   {_gigabytes(memory.peak)} GB at the fullest moment ({parts}){free}",
                f"step     {shape.batch} rows of {shape.length}{cut}: "
                f"{self.step_tokens:,} tokens{padding}, {_short(self.operations_per_step)}FLOP",
                f"speed    {self.speed.tokens_per_second:,.0f} tokens/s, {how}",
                f"budget   {self.steps:,} steps, {self.tokens:,} tokens, "
                f"{_short(self.operations)}FLOP, {duration(self.hours)}",
                f"advice   for {duration(self.hours)}: {best.size} ({best.parameters:,} "
                f"parameters, {best.tokens:,} tokens, {ratio:.1f} a parameter): {why}",
            )
        )


def estimate(
    config: ModelConfig,
    shape: StepShape,
    budget: Budget,
    speed: Speed,
    available: int | None,
    padding: float = 0.0,
    evaluated_rows: float = 0.0,
) -> Estimate:
    """Memory, operations and hours of training `config` for a budget at one length.

    `speed` is that of whole rows, of which the share `padding` is no tokens; a run counts tokens.
    `evaluated_rows` are measured on the way. `available` is memory.available_memory(), or what the
    GPU has free.
    """
    operations = training_operations(
        config, shape.batch, shape.length, shape.predictions + 1, shape.predictions
    )
    step_seconds = shape.batch * shape.length / speed.tokens_per_second
    step_tokens = (1 - padding) * shape.batch * shape.length
    aside = EVALUATED_ROW * evaluated_rows / shape.batch * step_seconds
    if budget.minutes is not None:
        aside = min(aside, EVALUATION_SHARE * 60 * budget.minutes)
        steps = max(1, math.floor((60 * budget.minutes - aside) / step_seconds))
    else:
        steps = budget.steps or math.ceil((budget.tokens or 0) / step_tokens)
    return Estimate(
        parameters=parameters(config),
        shape=shape,
        memory=step_memory(config, shape),
        available=available,
        speed=replace(speed, tokens_per_second=(1 - padding) * speed.tokens_per_second),
        operations_per_step=operations,
        padding=padding,
        steps=steps,
        tokens=round(steps * step_tokens),
        hours=(steps * step_seconds + aside) / 3600,
        best=best_size(config, shape, steps * operations, padding),
    )


def best_size(
    config: ModelConfig, shape: StepShape, operations: float, padding: float = 0.0
) -> SizeForBudget:
    """The named size that `RULE` takes for this many operations; the smallest if none can.

    Every size is taken to reach the same share of the machine's peak; small ones reach less.
    """
    kept = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in SIZE_FIELDS
    }
    found: list[SizeForBudget] = []
    for size in SIZES:
        other = config_for(size, config.vocab_size, **kept)
        row = training_operations(other, 1, shape.length, shape.predictions + 1, shape.predictions)
        tokens = int((1 - padding) * operations / row * shape.length)
        found.append(SizeForBudget(size, parameters(other), tokens))
    able = [one for one in found if one.tokens >= TOKENS_PER_PARAMETER * one.parameters]
    return max(able, key=lambda one: one.parameters) if able else found[0]


def measure_speed(
    step: Callable[[], int],
    seconds: float = 5.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Run real steps for about this long; `step` does one and returns how many tokens it read.

    The first step, which allocates and compiles, is left out.
    """
    step()
    started, tokens = clock(), step()
    while (passed := clock() - started) < seconds:
        tokens += step()
    return Speed(tokens / passed, measured=True)


def assumed_speed(config: ModelConfig, shape: StepShape, peak: float) -> Speed:
    """A guess from the machine's peak (operations a second, engine.measure_peak)."""
    row = training_operations(config, 1, shape.length, shape.predictions + 1, shape.predictions)
    return Speed(ASSUMED_SHARE * peak / row * shape.length, measured=False)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _short(number: float) -> str:
    """A number with three digits and the prefix of its unit.

    >>> _short(1_500_000), _short(2.25e15), _short(999)
    ('1.5 M', '2.25 P', '999 ')
    """
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z")
    thousands = min(int(math.log10(max(number, 1)) // 3), len(prefixes) - 1)
    return f"{number / 1000**thousands:.3g} {prefixes[thousands]}"


def duration(hours: float) -> str:
    """
    >>> duration(0.005), duration(0.5), duration(30), duration(2400)
    ('18 s', '30 minutes', '30.0 hours', '100 days')
    """
    if hours < 1 / 30:
        return f"{3600 * hours:.0f} s"
    if hours < 2:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:.1f} hours" if hours < 72 else f"{hours / 24:.0f} days"
