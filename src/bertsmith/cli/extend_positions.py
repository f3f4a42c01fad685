"""Let a model read longer rows: more rows of its position embedding.

Examples:
    bertsmith extend-positions runs/books --positions 1024 --out models/books-1024

The new positions know nothing yet. Train on before you use them:

    bertsmith pretrain --corpus store --init models/books-1024 --length 1024 --out run --minutes 30
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class ExtendPositions:
    model: tyro.conf.Positional[str]
    """Model to extend: a run, a Hugging Face folder or hub name."""
    positions: int
    """Tokens of the longest row that the new model reads."""
    out: Path
    """Folder for the extended model; it must be new or empty."""
    seed: int = 1
    """Of the new rows, which are drawn with the mean and spread of the old ones."""


def run_extend_positions(settings: ExtendPositions) -> None:
    import torch

    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.checkpoints.positions import extend_positions
    from bertsmith.cli.outputs import check_new_folder

    out = settings.out
    check_new_folder(out)
    generator = torch.Generator().manual_seed(settings.seed)
    folder = open_model_folder(settings.model)
    before = extend_positions(folder, out, settings.positions, generator)
    print(
        f"{out}: {settings.positions:,} positions, {before:,} before; train it on with"
        f" `bertsmith pretrain --init {out} --length {settings.positions}` before you use it"
    )
