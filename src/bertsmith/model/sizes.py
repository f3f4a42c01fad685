"""The configuration of a size by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertsmith.model.encoder import ModelConfig
from bertsmith.model.size_names import layers_and_hidden


def config_for(size: str, vocab_size: int, **changes: Any) -> ModelConfig:
    """The configuration of a named size ("base") or of layers x hidden size ("6x384").

    With `gated` the intermediate size is 8/3 H, rounded to a multiple of 64, in place of 4 H: three
    matrices of that size have about as many parameters as two of 4 H (Shazeer 2020, section 3).

    Errors: ValueError as `layers_and_hidden`.

    >>> config_for("mini", 8000).num_heads
    4
    >>> config_for("6x384", 30522).intermediate_size
    1536
    >>> config_for("base", 30522, gated=True).intermediate_size
    2048
    """
    layers, hidden = layers_and_hidden(size)
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        intermediate_size=64 * round(hidden / 24) if changes.get("gated") else 4 * hidden,
    )
    return replace(config, **changes)
