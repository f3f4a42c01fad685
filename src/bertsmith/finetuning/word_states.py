"""Hidden states of a frozen encoder at any tokens; those of words, computed once and kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from bertsmith.files import atomic_file, remove_leftovers
from bertsmith.model.encoder import Encoder
from bertsmith.tasks.features import Features
from bertsmith.tasks.tagging_features import TagFeatures
from bertsmith.text.sequences import concatenated_ranges
from bertsmith.training.cores import computed, row_batches
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

    Errors: ValueError for a state that does not fit float16; OSError when the disk is full.
    """
    if not path.exists():
        remove_leftovers(path.parent)  # they may be as large as the states
        with atomic_file(path) as temporary:
            _compute(encoder.eval(), features, temporary, engine, budget_tokens, on_batch)
    return np.load(path, mmap_mode="r")


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
    result = float16_file(path, shape)
    places = np.flatnonzero(features.word_numbers >= 0)
    words, layers = features.word_numbers[places], range(config.num_layers + 1)
    for taken, states in states_at(
        encoder, features, places, layers, engine, budget_tokens, on_batch
    ):
        for layer, states_NH in enumerate(states):
            narrow_NH = states_NH.half()
            if not narrow_NH.isfinite().all():
                raise ValueError(
                    f"layer {layer}: a state of {states_NH.abs().max():g} does not fit float16: "
                    "`bertsmith finetune ner --frozen` does not store them"
                )
            result[layer, words[taken]] = narrow_NH.cpu().numpy()
    result.flush()


def float16_file(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """A .npy to be written in place. Errors: OSError when the disk has no room for it."""
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    if hasattr(os, "posix_fallocate"):  # else a full disk would end the process without a word
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return vectors


def states_at(
    encoder: Encoder,
    features: Features,
    places: np.ndarray,
    layers: Sequence[int],
    engine: Engine,
    budget_tokens: int,
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[tuple[np.ndarray, list[Tensor]]]:
    """The hidden states at some of the T tokens of `features`, a batch of rows at a time.

    `places` int64 [P] are the tokens, in rising order. Yields (which of the places, int64 [N],
    their states float32 [N, H] in each of the layers).
    """
    begins = np.searchsorted(places, features.boundaries[:-1])
    counts = np.diff(np.append(begins, len(places)))

    def states_of(rows: np.ndarray) -> tuple[np.ndarray, list[Tensor]]:
        taken = concatenated_ranges(begins[rows], counts[rows])
        in_batch = np.repeat(np.arange(len(rows)), counts[rows])
        columns = places[taken] - features.boundaries[rows][in_batch]
        batch = features.padded(rows, encoder.config.pad_id)
        states = encoder(*map(engine.tensor, batch), all_layers=True)
        where = engine.tensor(in_batch), engine.tensor(columns)
        return taken, [states[layer][where].float() for layer in layers]

    batches = row_batches(engine, features.lengths, budget_tokens)
    for rows, found in zip(batches, computed(engine, states_of, batches), strict=True):
        yield found
        if on_batch:
            on_batch(len(rows))
