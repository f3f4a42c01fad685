"""Sizes by name: the paper's (Table 6, section 3) and the 24 small models of Turc et al. 2019."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from bertsmith.model.encoder import ModelConfig

SIZES = {  # name: (layers, hidden size); head size is 64, intermediate size 4 H (gated: 8/3 H)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


def config_for(size: str, vocab_size: int, **changes: Any) -> ModelConfig:
    """The configuration of a named size ("base") or of layers x hidden size ("6x384").

    With `gated` the intermediate size is 8/3 H, rounded to a multiple of 64, in place of 4 H: three
    matrices of that size have about as many parameters as two of 4 H (Shazeer 2020, section 3).

    Errors: ValueError for an unknown size; it lists the known ones.

    >>> config_for("mini", 8000).num_heads
    4
    >>> config_for("6x384", 30522).intermediate_size
    1536
    >>> config_for("base", 30522, gated=True).intermediate_size
    2048
    """
    shape = re.fullmatch(r"(\d+)x(\d+)", size)
    if shape:
        layers, hidden = int(shape[1]), int(shape[2])
    elif size in SIZES:
        layers, hidden = SIZES[size]
    else:
        raise ValueError(
            f"unknown size '{size}': known are {', '.join(SIZES)} and LAYERSxHIDDEN such as 6x384"
        )
    if hidden % 64 or not hidden or not layers:
        raise ValueError(f"size '{size}': layers must be positive, hidden size a multiple of 64")
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        intermediate_size=64 * round(hidden / 24) if changes.get("gated") else 4 * hidden,
    )
    return replace(config, **changes)
