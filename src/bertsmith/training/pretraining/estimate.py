"""Estimates before a run: memory, steps, tokens, hours (`pretrain --dry-run`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bertsmith.model.config import SIZES, ModelConfig, config_for, training_flops
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
    """Training speed on this machine, measured or guessed from its peak."""

    tokens_per_second: float
    measured: bool


@dataclass(frozen=True)
class SizeForBudget:
    """A model size and the tokens that it would read in a budget's time."""

    size: str
    parameters: int
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """Needs of a run of one length; a recipe of two lengths has two of these."""

    parameters: int
    shape: StepShape
    memory: Memory
    available: int | None
    """Free bytes; None: unknown."""
    speed: Speed
    flops_per_step: float
    padding: float
    """Fraction of padding in the rows; tokens are counted without it."""
    steps: int
    tokens: int
    hours: float
    """With evaluations on the way, without start, checkpoints and the last evaluation."""
    best: SizeForBudget
    """The size that the rule of thumb would take for the same hours."""

    @property
    def step_tokens(self) -> int:
        return round((1 - self.padding) * self.shape.batch_size * self.shape.length)

    @property
    def flops(self) -> float:
        return self.flops_per_step * self.steps

    @property
    def fits(self) -> bool:
        """True if the free memory is enough, or unknown."""
        return self.available is None or self.memory.peak <= self.available

    def mapping(self) -> dict[str, Any]:
        return {**asdict(self), "flops": self.flops, "rule": RULE, "fits": self.fits}

    def text(self) -> str:
        shape, memory, best = self.shape, self.memory, self.best
        parts = ", ".join(
            f"{name} {getattr(memory, name) / 1e9:.2f}"
            for name in ("weights", "gradients", "optimizer", "activations")
        )
        free = "" if self.available is None else f"; {self.available / 1e9:.2f} GB are free"
        if not self.fits:
            free += ": too little; take a smaller micro-batch, length or size, or add "
            free += "activation checkpointing"
        padding = f" and {self.padding:.0%} padding" if self.padding else ""
        at_once = shape.micro_batch_size
        cut = f", {at_once} at once" if at_once != shape.batch_size else ""
        how = "measured here" if self.speed.measured else "a guess from the machine's peak"
        ratio = best.tokens / best.parameters
        why = RULE if ratio >= TOKENS_PER_PARAMETER else f"the smallest; too short for {RULE}"
        return f"""\
model    {self.parameters:,} parameters
memory   {memory.peak / 1e9:.2f} GB at the fullest moment ({parts}){free}
step     {shape.batch_size} rows of {shape.length}{cut}: {self.step_tokens:,} tokens{padding}, \
{_short(self.flops_per_step)}FLOP
speed    {self.speed.tokens_per_second:,.0f} tokens/s, {how}
budget   {self.steps:,} steps, {self.tokens:,} tokens, {_short(self.flops)}FLOP, \
{duration(self.hours)}
advice   for {duration(self.hours)}: {best.size} ({best.parameters:,} parameters, \
{best.tokens:,} tokens, {ratio:.1f} a parameter): {why}"""


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

    `speed` counts the fraction `padding` of each row, a run does not. `available`: free bytes.
    `evaluated_rows`: held-out rows that are evaluated on the way.
    """
    operations = training_flops(
        config, shape.batch_size, shape.length, shape.predictions + 1, shape.predictions
    )
    step_seconds = shape.batch_size * shape.length / speed.tokens_per_second
    step_tokens = (1 - padding) * shape.batch_size * shape.length
    aside = EVALUATED_ROW * evaluated_rows / shape.batch_size * step_seconds
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
        flops_per_step=operations,
        padding=padding,
        steps=steps,
        tokens=round(steps * step_tokens),
        hours=(steps * step_seconds + aside) / 3600,
        best=best_size(config, shape, steps * operations, padding),
    )


def best_size(
    config: ModelConfig, shape: StepShape, operations: float, padding: float = 0.0
) -> SizeForBudget:
    """The named size that `RULE` takes for so many operations; the smallest if none can.

    All sizes are assumed to reach the same fraction of the machine's peak; small ones reach less.
    """
    kept = {name: x for name, x in vars(config).items() if name not in SIZE_FIELDS}
    found: list[SizeForBudget] = []
    for size in SIZES:
        other = config_for(size, config.vocab_size, **kept)
        row = training_flops(other, 1, shape.length, shape.predictions + 1, shape.predictions)
        tokens = int((1 - padding) * operations / row * shape.length)
        found.append(SizeForBudget(size, parameters(other), tokens))
    able = [one for one in found if one.tokens >= TOKENS_PER_PARAMETER * one.parameters]
    return max(able, key=lambda one: one.parameters, default=found[0])


def measure_speed(
    step: Callable[[], int], seconds: float = 5.0, clock: Callable[[], float] = time.perf_counter
) -> Speed:
    """Run real steps for about so many seconds; `step` returns how many tokens it read.

    The first step, which allocates and compiles, does not count.
    """
    step()
    started, tokens = clock(), step()
    while (passed := clock() - started) < seconds:
        tokens += step()
    return Speed(tokens / passed, measured=True)


def assumed_speed(config: ModelConfig, shape: StepShape, peak: float) -> Speed:
    """Guess from the machine's peak (operations a second)."""
    row = training_flops(config, 1, shape.length, shape.predictions + 1, shape.predictions)
    return Speed(ASSUMED_SHARE * peak / row * shape.length, measured=False)


def _short(number: float) -> str:
    """
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
