"""The settings of the quickstart, light enough for `--help`."""

from dataclasses import dataclass
from typing import Annotated

from bertsmith.base.settings import Count, check_bounds


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings:
    minutes: float = 4.0
    """Minutes of pre-training."""
    size: str = "tiny"
    """tiny, mini, small, ... or LAYERSxHIDDEN."""
    vocab_size: int = 8000
    """Pieces of the vocabulary."""
    learning_rate: float = 2e-3
    """Peak learning rate of pre-training; larger sizes want less."""
    epochs: int = 5
    """Epochs of each fine-tuning."""
    seed: int = 12345
    workers: Annotated[int, Count] = 2
    """Processes that read and tokenize."""

    def __post_init__(self) -> None:
        check_bounds(self)
