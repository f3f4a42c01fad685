"""Write any model that bertsmith opens as one clean Hugging Face folder, and prove it.

Examples:
    bertsmith convert runs/books models/books
    bertsmith convert google/bert_uncased_L-4_H-256_A-4 models/mini

Old tensor names, shards and half-precision weights become one float32 model.safetensors with
today's names. The result is opened again and its tensors are compared bit by bit with SRC's; what
SRC has no tensor for is not invented but left out, and listed, as is what has no place in DST.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class Convert:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Run directory, Hugging Face folder, or hub name."""
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Folder to write; it must be new or empty."""


def run_convert(settings: Convert) -> None:
    from bertsmith.checkpoints.convert import convert
    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.cli.outputs import check_new_folder

    destination = settings.destination
    check_new_folder(destination, "DST")
    converted = convert(open_model_folder(settings.source), destination)
    print(
        f"{destination}: {converted.architecture}, {converted.num_tensors} tensors, "
        f"{converted.num_parameters:,} parameters, opened again and found equal bit by bit"
    )
    for name in converted.missing:
        print(f"missing from {settings.source}, not written: {name}")
    for name in converted.unused:
        print(f"unused, not written: {name}")
