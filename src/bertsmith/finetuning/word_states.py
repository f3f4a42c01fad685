"""Hidden states of a frozen encoder for every word, computed once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bertsmith.files import atomic_file
from bertsmith.model.encoder import Encoder
from bertsmith.tasks.features import token_budget_batches
from bertsmith.tasks.tagging_features import TagFeatures
from bertsmith.text.sequences import pad
from bertsmith.training.engine import Engine


def word_states(
    encoder: Encoder,
    features: TagFeatures,
    path: Path,
    engine: Engine,
    budget_tokens: int = 8192,
    on_batch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """The first piece of every word in all layers: float16 [L + 1, W, H], memory-mapped.

    Layer 0 is the output of the embeddings. A file that is there already is taken as it is: files
    appear whole or not at all. `on_batch` is told after each batch how many rows were in it.
    """
    if not path.exists():
        with atomic_file(path) as temporary:
            _compute(encoder.eval(), features, temporary, engine, budget_tokens, on_batch)
    return np.load(path, mmap_mode="r")


@torch.inference_mode()
def _compute(
    encoder: Encoder,
    features: TagFeatures,
    path: Path,
    engine: Engine,
    budget_tokens: int,
    on_batch: Callable[[int], None] | None,
) -> None:
    config = encoder.config
    shape = config.num_layers + 1, int(features.word_numbers.max()) + 1, config.hidden_size
    result = np.lib.format.open_memmap(path, "w+", np.float16, shape)
    for rows in token_budget_batches(features.lengths, budget_tokens):
        ids, types, lengths = features.padded(rows, config.pad_id)
        words = pad(features.word_numbers, features.boundaries, rows, ids.shape[1], -1)
        with engine.autocast():
            layers = encoder(
                engine.tensor(ids), engine.tensor(types), engine.tensor(lengths), all_layers=True
            )
        is_tagged = engine.tensor(words >= 0)
        for number, states_BSH in enumerate(layers):
            result[number, words[words >= 0]] = states_BSH[is_tagged].half().cpu().numpy()
        if on_batch:
            on_batch(len(rows))
    result.flush()
