"""What a fine-tuning run may set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FinetuneSettings:
    """All that decides what a fine-tuning run computes, but for data and seed."""

    epochs: int = 3
    batch: int = 32
    """Examples in a step."""
    rate: float = 5e-5
    """Peak learning rate."""
    schedule: Literal["linear", "paper"] = "linear"
    """linear: up to the peak, down to 0; paper: google-research/bert's, dropping after warm-up."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises."""
    optimizer: Literal["adamw", "paper-adam"] = "adamw"
    """adamw: with bias correction, stable on small sets; paper-adam: without."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global norm of the gradient."""
    dropout: float = 0.1
    """Dropout on hidden outputs and the pooled vector."""
    attention_dropout: float = 0.1
    max_length: int = 128
    """Tokens of an example; longer ones are cut."""
    device: str = "auto"
    precision: str = "auto"
    """float32, bf16, or auto: bf16 where the hardware multiplies it."""
    threads: int | None = None
    """Default: PyTorch's own number, at most one a core."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0, and finite")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay = {self.weight_decay}: must not be negative")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup = {self.warmup}: must be in [0, 1)")
