"""One vector a text: the last hidden states of its tokens, pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.encoder import Encoder, ModelConfig
from bertsmith.tasks.features import Features
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.cores import computed, row_batches
from bertsmith.training.engine import Engine

Pool = Literal["mean", "cls", "max"]


def pooled(hidden_BSH: Tensor, lengths_B: Tensor, pool: Pool, skip: int = 0) -> Tensor:
    """[B, S, H] -> [B, H]: the mean over the tokens of each row ([CLS] and [SEP] among them, as in
    Reimers and Gurevych 2019, arXiv 1908.10084; padding is left out), the largest of their values,
    or the vector at [CLS]. The first `skip` tokens are left out; the next one is then for [CLS].
    """
    if pool == "cls":
        return hidden_BSH[:, skip]
    columns = torch.arange(hidden_BSH.shape[1], device=hidden_BSH.device)
    is_token_BS1 = ((columns >= skip) & (columns < lengths_B[:, None]))[:, :, None]
    if pool == "max":
        return hidden_BSH.masked_fill(~is_token_BS1, -torch.inf).amax(dim=1)
    return hidden_BSH.masked_fill(~is_token_BS1, 0.0).sum(dim=1) / (lengths_B - skip)[:, None]


def check_pool(pool: Pool, config: ModelConfig) -> None:
    """Errors: ValueError for a vector that would be the same of all texts."""
    if pool == "cls" and config.causal:
        raise ValueError(
            "--pool cls: in a left-to-right model [CLS] sees nothing of the text: use --pool mean"
        )


def text_features(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> Features:
    """[CLS] text [SEP] of each text; longer ones keep their head."""
    rows = tokenizer.rows(texts, max_length=max_length, offsets=False)
    return Features(rows.ids, rows.token_types, rows.boundaries, None, max_length, rows.num_cut)


def sentence_vectors(
    encoder: Encoder,
    features: Features,
    engine: Engine,
    pool: Pool = "mean",
    on_batch: Callable[[int], None] | None = None,
    skip: int = 0,
) -> np.ndarray:
    """Vectors float32 [R, H] of R rows in their order, see `pooled`; dropout is off.

    Rows are computed in batches of like length. `on_batch` is told how many rows were in each.
    """
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
        if on_batch:
            on_batch(len(rows))
    encoder.train(training)
    return vectors


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The cosine of each row of one with the same row of the other: [N, H], [N, H] -> [N].

    A vector of length 0 has the cosine 0 with every other.

    >>> cosines(np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[6.0, 8.0], [0.0, 2.0]]))
    array([1., 0.])
    """
    return (unit_length(left) * unit_length(right)).sum(axis=1)


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """The vectors [N, H] divided by their lengths; those of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)
