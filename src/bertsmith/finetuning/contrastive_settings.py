"""What a run that trains sentence vectors may set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ContrastiveSettings:
    """All that decides what a run computes, but for the data."""

    epochs: int = 1
    batch: int = 64
    """Pairs in a step."""
    group: int = 32
    """Pairs that are each other's negatives; a batch is one group or more, one a core."""
    scale: float = 20.0
    """What cosines are multiplied with before the softmax: 1 / temperature."""
    pool: Literal["mean", "cls"] = "mean"
    rate: float = 5e-5
    """Peak learning rate."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global norm of the gradient."""
    dropout: float = 0.1
    max_length: int = 128
    """Tokens of a text; longer ones are cut."""
    seed: int = 1
    device: str = "auto"
    precision: str = "auto"
    """float32, bf16, or auto: bf16 where the hardware multiplies it."""
    threads: int | None = None
    """Default: PyTorch's own number, at most one a core."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs}: must be at least 1")
        if self.group < 2 or self.batch < self.group or self.batch % self.group:
            raise ValueError(
                f"batch = {self.batch}, group = {self.group}: a group has 2 pairs or more, and a "
                "batch is one group or several of them"
            )
        for name in ("rate", "clip", "scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0, and finite")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay = {self.weight_decay}: must not be negative")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup = {self.warmup}: must be in [0, 1)")
