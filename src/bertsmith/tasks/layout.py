"""How texts become rows of a model; stored with it, so that it reads as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Layout:
    """Settings of `featurise` and its sisters; each kind of task reads those that it has."""

    max_length: int = 128
    """Tokens of a row, [CLS] and [SEP] among them."""
    long_texts: Literal["cut", "head-tail", "windows"] = "cut"
    """Texts that do not fit: keep the head; keep head and tail; read in several windows."""
    stride: int = 128
    """windows, answer: tokens from the start of a window to that of the next."""
    pool: Literal["mean", "max", "vote"] = "mean"
    """windows: how the scores of a text's windows become one."""
    max_question: int = 64
    """answer: tokens of a question; longer ones are cut."""
    max_answer: int = 30
    """answer: tokens of an answer at most."""
    document_context: bool = True
    """tag: fill each row with what stands around its sentence in the document."""
    tagged_pieces: int = 128
    """tag: a row tags neighbouring sentences up to so many pieces, half a row at most; 0: one."""

    def __post_init__(self) -> None:
        for name in ("stride", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")


def stored_layout(stored: Mapping[str, Any], default_length: int) -> Layout:
    """The layout among the entries that a model was saved with; what is absent is the default.

    >>> stored_layout({"max_length": 64, "task": "sst2"}, 128).max_length
    64
    """
    names = [field.name for field in fields(Layout) if field.name in stored]
    return Layout(**{"max_length": default_length, **{name: stored[name] for name in names}})
