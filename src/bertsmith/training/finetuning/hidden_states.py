"""A model at rest over rows: hidden states (kept on disk, or pooled to a vector), head outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.files import atomic_file, remove_leftovers
from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.model.directions import AnyEncoder
from bertsmith.model.heads import TaskModel
from bertsmith.tasks.features import Features
from bertsmith.tasks.tagging.features import TagFeatures
from bertsmith.tasks.vectors import Pool, float16_file
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.training.engine import Engine
from bertsmith.training.replicas import computed, row_batches


def word_states(
    encoder: AnyEncoder,
    features: TagFeatures,
    path: Path,
    engine: Engine,
    budget_tokens: int = 8192,
    on_batch: OnBatch = ignore,
) -> np.ndarray:
    """The first piece of every word in all layers: float16 [L + 1, W, H], memory-mapped.

    Layer 0 is the output of the embeddings. A file that is there already is complete, and is read.

    Errors: ValueError for a state that does not fit float16; OSError when the disk is full.
    """
    if path.exists():
        return np.load(path, mmap_mode="r")
    remove_leftovers(path.parent)  # they may be as large as the states
    layers = range(encoder.config.num_layers + 1)
    shape = len(layers), int(features.word_numbers.max()) + 1, encoder.config.hidden_size
    tokens = np.flatnonzero(features.word_numbers >= 0)
    words = features.word_numbers[tokens]
    with atomic_file(path) as temporary:
        result = float16_file(temporary, shape)
        for taken, states in states_at(
            encoder.eval(), features, tokens, layers, engine, budget_tokens, on_batch
        ):
            for layer, states_NH in enumerate(states):
                narrow_NH = states_NH.half()
                if not narrow_NH.isfinite().all():
                    raise ValueError(
                        f"layer {layer}: a state of {states_NH.abs().max():g} does not fit "
                        "float16: `bertsmith finetune ner --freeze-encoder` does not store them"
                    )
                result[layer, words[taken]] = narrow_NH.cpu().numpy()
        result.flush()
    return np.load(path, mmap_mode="r")


def states_at(
    encoder: AnyEncoder,
    features: Features,
    places: np.ndarray,
    layers: Sequence[int],
    engine: Engine,
    budget_tokens: int,
    on_batch: OnBatch = ignore,
) -> Iterator[tuple[np.ndarray, list[Tensor]]]:
    """The hidden states at some of the T tokens of `features`, a batch of rows at a time.

    `places` int64 [P] are the tokens, in rising order. Yields (indices into `places`, int64 [N],
    states of these tokens float32 [N, H] in each of the layers).
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
        on_batch(len(rows))


def pooled(hidden_BSH: Tensor, lengths_B: Tensor, pool: Pool, skip: int = 0) -> Tensor:
    """Pool the tokens of each row, [B, S, H] -> [B, H]: their mean ([CLS] and [SEP] among them, as
    in Reimers and Gurevych 2019, arXiv 1908.10084), the largest of their values, that at [CLS], or
    their sum over the root of their number.

    Padding and the first `skip` tokens are left out; the token after these stands for [CLS].
    """
    if pool == "cls":
        return hidden_BSH[:, skip]
    columns = torch.arange(hidden_BSH.shape[1], device=hidden_BSH.device)
    is_token_BS1 = ((columns >= skip) & (columns < lengths_B[:, None]))[:, :, None]
    if pool == "max":
        return hidden_BSH.masked_fill(~is_token_BS1, -torch.inf).amax(dim=1)
    counts_B1 = (lengths_B - skip)[:, None]
    divisors_B1 = counts_B1.sqrt() if pool == "mean_sqrt_len" else counts_B1
    return hidden_BSH.masked_fill(~is_token_BS1, 0.0).sum(dim=1) / divisors_B1


def sentence_vectors(
    encoder: AnyEncoder,
    features: Features,
    engine: Engine,
    pool: Pool = "mean",
    on_batch: OnBatch = ignore,
    skip: int = 0,
) -> np.ndarray:
    """Vectors float32 [R, H] of R rows in their order, see `pooled`, without dropout."""
    vectors = np.empty((len(features), encoder.config.hidden_size), np.float32)
    training = encoder.training
    encoder.eval()

    def vectors_of(rows: np.ndarray) -> np.ndarray:
        ids, types, lengths = map(engine.tensor, features.padded(rows, encoder.config.pad_id))
        hidden_BSH = encoder(ids, types, lengths)
        assert isinstance(hidden_BSH, Tensor)
        return pooled(hidden_BSH.float(), lengths, pool, skip).cpu().numpy()

    batches = row_batches(engine, features.lengths)
    for rows, found in zip(batches, computed(engine, vectors_of, batches), strict=True):
        vectors[rows] = found
        on_batch(len(rows))
    encoder.train(training)
    return vectors


def head_outputs(
    model: TaskModel, features: Features, engine: Engine, on_batch: OnBatch = ignore
) -> np.ndarray:
    """The head's outputs in the order of the rows, float32, without dropout.

    [R, K] where it gives K numbers a row, [T, K] where it gives them for every token.
    """
    outputs = np.empty((0, model.num_outputs), np.float32)
    training = model.training
    model.eval()

    def compute(rows: np.ndarray) -> np.ndarray:
        batch = map(engine.tensor, features.padded(rows, model.config.pad_id))
        return model(*batch).float().cpu().numpy()

    batches = row_batches(engine, -(-features.lengths // model.config.length_scale))
    for rows, found in zip(batches, computed(engine, compute, batches), strict=True):
        of_tokens = found.ndim == 3
        if not len(outputs):
            size = len(features.ids) if of_tokens else len(features)
            outputs = np.empty((size, model.num_outputs), np.float32)
        if of_tokens:
            lengths = features.lengths[rows]
            tokens = concatenated_ranges(features.boundaries[rows], lengths)
            outputs[tokens] = found[np.arange(found.shape[1]) < lengths[:, None]]
        else:
            outputs[rows] = found
        on_batch(len(rows))
    model.train(training)
    return outputs
