"""A budget in steps, tokens or minutes, and a learning rate that follows it from start to end."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The length of a training: exactly one of the three."""

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        if len(given) != 1:
            raise ValueError(
                "give exactly one of `steps`, `tokens` and `minutes`"
                + (f" (got {', '.join(f'`{name}`' for name in given)})" if given else "")
            )
        name, amount = next(iter(given.items()))
        if not 0 < amount < math.inf:  # also refuses nan
            raise ValueError(f"`{name}={amount}`: must be above 0, and finite")

    @property
    def total(self) -> float:
        """The whole budget in its own unit, minutes in seconds."""
        if self.minutes is not None:
            return 60 * self.minutes
        total = self.tokens if self.steps is None else self.steps
        assert total is not None
        return total

    def amount(self, steps: int, tokens: int, seconds: float) -> float:
        """Used part of `total` after so many steps, tokens and seconds."""
        if self.steps is not None:
            return steps
        return seconds if self.tokens is None else tokens

    def progress(self, steps: int, tokens: int, seconds: float) -> float:
        """Used fraction of the budget, 0 to 1.

        >>> Budget(minutes=2).progress(steps=10, tokens=1000, seconds=30.0)
        0.25
        """
        return min(1.0, self.amount(steps, tokens, seconds) / self.total)


def learning_rate(progress: float, peak: float, warmup: float, kind: str) -> float:
    """The learning rate of a step that starts at `progress` (0 to 1) of the budget.

    It rises from 0 in the first fraction `warmup`. Then it falls to 0, "linear" or as half a
    "cosine" (Loshchilov and Hutter 2017, arXiv 1608.03983), or as the inverse square root of the
    progress ("inverse-sqrt", Vaswani et al. 2017, section 5.3), or is "constant". "paper" is
    google-research/bert optimization.py: it decays from the start on, with a drop after warm-up.

    >>> [round(learning_rate(p, 1.0, 0.2, "linear"), 3) for p in (0.0, 0.1, 0.2, 0.6, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> [round(learning_rate(p, 1.0, 0.2, "cosine"), 3) for p in (0.1, 0.2, 0.4, 0.6, 1.0)]
    [0.5, 1.0, 0.854, 0.5, 0.0]
    >>> [round(learning_rate(p, 1.0, 0.2, "paper"), 3) for p in (0.1, 0.19, 0.2, 0.6)]
    [0.5, 0.95, 0.8, 0.4]
    >>> [round(learning_rate(p, 1.0, 0.2, "inverse-sqrt"), 3) for p in (0.1, 0.2, 0.8, 1.0)]
    [0.5, 1.0, 0.5, 0.447]
    """
    if progress < warmup:
        return peak * progress / warmup
    left = (1.0 - progress) / (1.0 - warmup)
    if kind == "constant":
        return peak
    if kind == "cosine":
        return peak * 0.5 * (1.0 - math.cos(math.pi * left))
    if kind == "inverse-sqrt":
        return peak * math.sqrt(warmup / progress) if warmup else peak
    if kind == "paper":
        return peak * (1.0 - progress)
    assert kind == "linear", kind
    return peak * left


def default_rate(hidden_size: int) -> float:
    """Peak learning rate: 0.256 / H, at most 2e-3.

    1 / H as Yang et al. 2022 (arXiv 2203.03466) find for hidden matrices; the constant is ours
    (docs/how-to/pretrain.md): mini learns well at 1e-3, small only at 5e-4.

    >>> [default_rate(hidden_size) for hidden_size in (64, 128, 256, 512)]
    [0.002, 0.002, 0.001, 0.0005]
    """
    return min(2e-3, 0.256 / hidden_size)


def warmup_share(budget: Budget, warmup: float, warmup_steps: int | None = None) -> float:
    """The fraction of the budget in which the learning rate rises: `warmup_steps`, or `warmup`.

    Errors: ValueError for `warmup_steps` without a longer budget in steps.

    >>> warmup_share(Budget(steps=1_000_000), 0.05, warmup_steps=10_000)
    0.01
    """
    if warmup_steps is None:
        return warmup
    if budget.steps is None:
        raise ValueError(
            f"`warmup_steps={warmup_steps}`: needs a budget in `steps`; with `tokens` or `minutes` "
            "give `warmup_ratio`, a share of the budget"
        )
    if not 0 <= warmup_steps < budget.steps:
        raise ValueError(
            f"`warmup_steps={warmup_steps}`: must be at least 0 and less than the budget of "
            f"{budget.steps} steps; raise `steps`, or give `warmup_ratio`, a share of the budget"
        )
    return warmup_steps / budget.steps
