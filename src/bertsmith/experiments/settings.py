"""The settings of the quickstart and of the comparison, light enough for `--help`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bertsmith.base.settings import Count, Metavar, check_bounds, nearest
from bertsmith.training.settings import Machine


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


# nano: within three hours on two slow cores; mini: a night on eight, or a GPU
SCALES: dict[str, dict[str, Any]] = {
    "nano": {
        "size": "2x128",
        "vocab_size": 6000,
        "tokens": 4_000_000,
        "train_examples": 2000,
        "dev_examples": 1000,
    },
    "mini": {
        "size": "4x256",
        "vocab_size": 8000,
        "tokens": 50_000_000,
        "train_examples": 10_000,
        "dev_examples": 2000,
    },
}


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Machine):
    """All that decides a comparison of BERT with the systems before it (comparison.py)."""

    common = ("text", "data", "out", "scale", "tasks", "seeds")

    text: Annotated[list[Path], Metavar("FILE...")]
    """Files or folders of text that all systems are pre-trained on; capitals are kept."""
    data: Path
    """Folder with the tasks' folders: SST-2, MRPC, QNLI (perhaps in glue), conll2003, squad."""
    out: Path
    """Folder to write; the same command goes on in it."""
    scale: Literal["nano", "mini"] = "nano"
    """What the settings below are by default; nano: within three hours on two slow cores."""
    tasks: tuple[str, ...] = ("sst2", "mrpc", "qnli", "ner", "squad1")
    """More of them, and more seeds, may be asked for later."""
    systems: tuple[str, ...] = ("bert", "gpt", "elmo", "ltr", "ltr+rtl", "ltr+bilstm")
    seeds: str = "1,2,3"
    """Seeds of each fine-tuning; fewer than three cannot make an ordering sure."""
    size: str | None = None
    """BERT's, such as 2x128; the others get as many parameters."""
    vocab_size: Annotated[int | None, Count] = None
    """Pieces of the vocabulary."""
    tokens: Annotated[int | None, Count] = None
    """Tokens that BERT reads in pre-training."""
    batch_size: Annotated[int, Count] = 32
    """Rows in a step of pre-training."""
    max_length: int = 128
    """Tokens of a row, in pre-training and fine-tuning."""
    train_examples: Annotated[int | None, Count] = None
    """At most so many examples of a task to learn from, drawn once."""
    dev_examples: Annotated[int | None, Count] = None
    """At most so many to measure on."""
    epochs: Annotated[int, Count] = 3
    """Epochs of each fine-tuning."""
    workers: Annotated[int, Count] = 2
    """Processes that read and tokenize."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.scale not in SCALES:
            raise ValueError(f"`scale={self.scale!r}`: {nearest(self.scale, SCALES)}")

    def filled(self) -> ComparisonSettings:
        """With those of the scale where nothing else was asked for."""
        chosen = SCALES[self.scale]
        return replace(self, **{n: v for n, v in chosen.items() if getattr(self, n) is None})
