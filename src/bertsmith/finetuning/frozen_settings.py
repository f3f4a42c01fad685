"""The rows of the paper's Table 7, and what a feature-based run may set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What the tagger reads of a word's L + 1 states (0: the embeddings)."""

    title: str  # as in the paper's table
    layers: slice
    mixed: bool  # a learned weighted sum; else side by side
    paper: float  # dev F1 of BERT-BASE


ROWS = {
    "embeddings": Row("Embeddings", slice(0, 1), False, 91.0),
    "second-to-last": Row("Second-to-Last Hidden", slice(-2, -1), False, 95.6),
    "last": Row("Last Hidden", slice(-1, None), False, 94.9),
    "sum-last-four": Row("Weighted Sum Last Four Hidden", slice(-4, None), True, 95.9),
    "concat-last-four": Row("Concat Last Four Hidden", slice(-4, None), False, 96.1),
    "sum-all": Row("Weighted Sum All Layers", slice(1, None), True, 95.5),
}
DEEPEST = 4  # hidden layers that a row needs


@dataclass(frozen=True)
class FrozenSettings:
    """What the paper leaves open about its tagger, and how much data it gets."""

    sentences: int = 3000
    """The first so many sentences of the training set; 0: all of them."""
    epochs: int = 10
    """An LSTM that begins at random weights needs more than fine-tuning does."""
    batch: int = 32
    """Sentences in a step."""
    rate: float = 2e-3
    """Peak learning rate; it falls to 0."""
    dropout: float = 0.3
    """On the input of each LSTM layer and on the output of the last."""
    hidden_size: int = 768
    """Of each direction of the LSTM; the paper's."""
    max_length: int = 256
    """Tokens of a row in which the encoder reads a sentence and what stands around it."""
    tagged_pieces: int = 128
    """A row reads neighbouring sentences up to so many tokens, half a row at most; 0: one."""
    document_context: bool = True
    """Fill each row with what stands around its sentences in the document."""
    device: str = "auto"
    precision: str = "auto"
    """float32, bf16, or auto: bf16 where the hardware multiplies it."""
    threads: int | None = None
    """Default: PyTorch's own number, at most one a core."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.sentences < 0:
            raise ValueError(f"sentences = {self.sentences}: must not be negative")
        if not self.rate > 0:
            raise ValueError(f"rate = {self.rate}: must be above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: must be in [0, 1)")
