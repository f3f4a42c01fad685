"""Groups of settings that all trainings share: each is declared once, and a block of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bertsmith.base.settings import Alias, Count, Fraction, NotNegative, Positive

AUTO_INT8 = "auto-int8"  # a precision that is chosen when a run starts
LEAST_GAIN = 0.1  # of the time, or int8's larger error is not worth it


@dataclass(frozen=True)
class Optimization:
    """Learning rate, decay and clipping."""

    learning_rate: Annotated[float | None, Positive, Alias("--lr")] = None
    """Peak learning rate."""
    warmup_ratio: Annotated[float, Fraction] = 0.1
    """Share of the steps in which the rate rises."""
    weight_decay: Annotated[float, NotNegative] = 0.01
    max_grad_norm: Annotated[float, Positive] = 1.0
    """Largest global norm of the gradient."""


@dataclass(frozen=True)
class Machine:
    """Device, precision and threads."""

    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: str = "auto"
    """float32, bf16, or auto: bf16 where the hardware multiplies it."""
    threads: Annotated[int | None, Count] = None
    """Default: PyTorch's own number, at most one a core."""
