"""A model that reads longer rows: more rows of the position embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.checkpoints.copies import copy_similarity_training, whole_tokenizer
from bertsmith.checkpoints.folder import (
    beyond_transformers,
    folder_tensors,
    kind_of,
    load_model,
)
from bertsmith.checkpoints.model_config import (
    CONFIG_FILE,
    config_entries,
    read_config,
    read_stored_config,
)
from bertsmith.checkpoints.names import REDUNDANT
from bertsmith.checkpoints.tensors import WEIGHTS, read_tensors, write_tensors
from bertsmith.files import atomic_folder, write_json

POSITION_EMBEDDING = "bert.embeddings.position_embeddings.weight"


def extend_positions(
    source: Path, destination: Path, positions: int, generator: torch.Generator
) -> int:
    """Write the model of folder `source` with `positions` positions to `destination`.

    Returns how many it had. All else, whatever heads the folder has, is written as it is, under
    today's names; for the new rows see `longer_table`.

    Errors: ValueError as `load_model` and `Tokenizer.from_pretrained`, and when the model has as
    many positions already; OSError from the disk.
    """
    tokenizer = whole_tokenizer(source)
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
    tensors[POSITION_EMBEDDING] = longer_table(tensors[POSITION_EMBEDDING], positions, generator)
    with atomic_folder(destination) as temporary:
        copy_similarity_training(source, temporary)
        tokenizer.save(temporary, positions)
        own = bool(beyond_transformers(config, kind))
        entries = config_entries(replace(config, max_positions=positions), own)
        write_json(temporary / CONFIG_FILE, read_stored_config(source) | entries)
        write_tensors(temporary / WEIGHTS, tensors)
        assert load_model(temporary, kind).missing == missing
    return config.max_positions


def longer_table(table: Tensor, positions: int, generator: torch.Generator) -> Tensor:
    """A position embedding [P, H] with new rows below the old ones: [positions, H].

    The new ones are drawn with the mean and spread of the old rows in each column. Copies of the
    old rows, the start of Longformer (Beltagy et al. 2020, arXiv 2004.05150, section 5), do well
    where attention has a window; a BERT confuses each token with its twin P places away, and loses
    what it knew of the first P too (docs/long-texts.md has the figures).

    >>> table = torch.tensor([[1.0], [3.0]])
    >>> longer_table(table, 4, torch.Generator().manual_seed(1)).shape
    torch.Size([4, 1])
    """
    known = table.float()
    new = torch.randn(positions - len(table), table.shape[1], generator=generator)
    new = known.mean(0) + known.std(0, correction=0) * new
    return torch.cat([table, new.to(table.dtype)])
