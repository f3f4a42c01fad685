"""What a pre-training recipe may set: dataclass <- TOML <- flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bertsmith.training.schedule import Budget

COUNTS = (
    "batch", "micro_batch", "evaluations", "held_out_rows", "checkpoint_every", "keep",
    "log_every", "loader_workers",
)  # fmt: skip
BUDGETS = ("steps", "tokens", "minutes")  # a run has exactly one of them


@dataclass(frozen=True)
class PretrainSettings:
    """All that decides what a pre-training run computes. The defaults suit minutes to hours."""

    size: str = "tiny"
    """tiny, mini, small, medium, base, large, or LAYERSxHIDDEN such as 6x384."""
    objective: Literal["mlm+nsp"] = "mlm+nsp"
    """What is predicted."""
    length: int = 128
    """Tokens in a row."""
    batch: int = 32
    """Rows in a step."""
    micro_batch: int | None = None
    """Rows computed at once; the gradients of a step's micro-batches are summed. Default: batch."""
    steps: int | None = None
    """Budget in optimizer steps."""
    tokens: int | None = None
    """Budget in tokens read."""
    minutes: float | None = None
    """Budget in minutes of this machine."""
    rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["linear", "paper"] = "linear"
    """linear: up to the peak, down to 0; paper: google-research/bert's, dropping after warm-up."""
    warmup: float = 0.05
    """Share of the budget in which the rate rises."""
    optimizer: Literal["adamw", "paper-adam"] = "adamw"
    """adamw: with bias correction; paper-adam: without."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global norm of the gradient."""
    dropout: float = 0.0
    """Dropout on hidden outputs; the paper has 0.1."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities; the paper has 0.1."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    start: Literal["local", "paper"] = "local"
    """local: heads look at their neighbours from the first step; paper: all weights at random."""
    initializer_range: float | None = None
    """Standard deviation of the initial weights. Default: 1 / sqrt(3 H), 0.02 at base size."""
    mask_rate: float = 0.15
    """Share of the tokens to predict."""
    short_rate: float = 0.1
    """Share of document passes with shorter rows."""
    whole_word: bool = False
    """Mask all pieces of a word or none."""
    seed: int = 12345
    device: str = "auto"
    precision: str = "auto"
    """float32, bf16, or auto: bf16 where the hardware multiplies it."""
    threads: int | None = None
    """Default: PyTorch's own number, at most one a core."""
    evaluations: int = 10
    """Held-out measurements over the budget."""
    held_out_rows: int = 512
    """Rows of a held-out measurement during the run; the last one reads four times as many."""
    checkpoint_every: int = 1000
    """Steps between two checkpoints."""
    keep: int = 2
    """Newest checkpoints kept."""
    log_every: int = 10
    """Steps between two lines of the log."""
    loader_workers: int = 1
    """Threads that make batches; changes nothing but the time."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("rate", "clip", "initializer_range"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be above 0, and finite")
        for name in ("seed", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("warmup", "mask_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be in [0, 1)")
        if self.length < 8:
            raise ValueError(f"length = {self.length}: a pair of sentences needs at least 8 tokens")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(
                f"batch = {self.batch} is not a multiple of micro_batch = {self.micro_batch}"
            )

    def budget(self) -> Budget:
        return Budget(self.steps, self.tokens, self.minutes)
