"""Sizes by name: the paper's (Table 6, section 3) and the 24 small models of Turc et al. 2019."""

from __future__ import annotations

import re

SIZES = {  # name: (layers, hidden size); head size is 64, intermediate size 4 H (gated: 8/3 H)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


def layers_and_hidden(size: str) -> tuple[int, int]:
    """The shape of a named size ("base") or of layers x hidden size ("6x384").

    Errors: ValueError for an unknown size; it lists the known ones.

    >>> layers_and_hidden("base"), layers_and_hidden("6x384")
    ((12, 768), (6, 384))
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
    return layers, hidden
