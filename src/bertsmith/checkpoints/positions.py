"""A model that reads longer rows: more rows of the position embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.checkpoints.folder import folder_tensors, kind_of, load_model
from bertsmith.checkpoints.model_config import (
    CONFIG_FILE,
    config_entries,
    read_config,
    read_stored_config,
)
from bertsmith.checkpoints.names import REDUNDANT
from bertsmith.checkpoints.tensors import WEIGHTS, read_tensors, write_tensors
from bertsmith.files import atomic_folder, write_json
from bertsmith.text.wordpiece import Tokenizer

POSITION_EMBEDDING = "bert.embeddings.position_embeddings.weight"


def extend_positions(source: Path, destination: Path, positions: int) -> int:
    """Write the model of folder `source` with `positions` positions to `destination`.

    Returns how many it had. All else, whatever heads the folder has, is written as it is, under
    today's names; for the new rows see `longer_table`.

    Errors: ValueError as `load_model` and `Tokenizer.from_pretrained`, and when the model has as
    many positions already; OSError from the disk.
    """
    tokenizer = Tokenizer.from_pretrained(source)
    config = read_config(source)
    if positions <= config.max_positions:
        raise ValueError(
            f"{positions} positions: the model of {source} knows {config.max_positions} already:"
            " ask for more"
        )
    kind = kind_of(source)
    missing = load_model(source, kind).missing  # refuses what is damaged or of another kind
    stored = {n: where for n, where in folder_tensors(source).items() if n not in REDUNDANT}
    tensors = dict(zip(stored, read_tensors(stored.values()), strict=True))
    tensors[POSITION_EMBEDDING] = longer_table(tensors[POSITION_EMBEDDING], positions)
    with atomic_folder(destination) as temporary:
        tokenizer.save(temporary)
        entries = config_entries(replace(config, max_positions=positions))
        write_json(temporary / CONFIG_FILE, read_stored_config(source) | entries)
        write_tensors(temporary / WEIGHTS, tensors)
        assert load_model(temporary, kind).missing == missing
    return config.max_positions


def longer_table(table: Tensor, positions: int) -> Tensor:
    """The rows of a position embedding [P, H], again and again from the first: [positions, H].

    What a model has learned of positions is mostly how far two are apart; in a copy that is right
    but where two copies meet (Beltagy et al. 2020, arXiv 2004.05150, section 5).

    >>> longer_table(torch.tensor([[1.0], [2.0], [3.0]]), 5).flatten().tolist()
    [1.0, 2.0, 3.0, 1.0, 2.0]
    """
    return table[torch.arange(positions) % len(table)]
