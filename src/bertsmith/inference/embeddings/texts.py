"""A vector a text: token rows of the texts, a pooled vector a row, then a vector a text.

The steps stand apart: `text_rows` needs a tokenizer alone, `sentence_vectors` whatever computes the
last hidden states, and `finished` only the vectors of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.inference.embeddings.pooling import PoolingSettings, apply_dense
from bertsmith.inference.engines.runner import ENCODER, Runner
from bertsmith.tasks.features import Features, gather_spans
from bertsmith.tasks.vectors import check_pool, check_prompt, text_features, unit_length
from bertsmith.text.tokenizer.rows import Encoded, concatenated_ranges, make_rows
from bertsmith.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertsmith.inference.engines.processor import Processor


def embed(
    model: Runner,
    texts: Sequence[str],
    pooling: PoolingSettings,
    on_batch: OnBatch = ignore,
    processor: Processor | None = None,
) -> Embedded:
    """The vectors of N texts.

    Errors: ValueError for a length that the model does not have or that the prompt fills, more
    dimensions than there are, and as `check_pool`.
    """
    check_pool(pooling.pool, model.config.causal)
    size = pooling.size(model.config.hidden_size)
    if not texts:
        return Embedded(np.empty((0, size), np.float32), 0, np.empty(0, np.int64))
    rows = text_rows(model.tokenizer, texts, pooling, model.config.max_positions)
    on_rows = on_batch if rows.texts is None else ignore  # several rows may be a text
    vectors = model.vectors(rows.features, pooling.pool, rows.skip, on_rows, processor)
    vectors = finished(vectors, rows, pooling)
    tokens = rows.features.lengths
    if rows.texts is not None:
        on_batch(len(texts))
        tokens = np.bincount(rows.texts, tokens).astype(np.int64)
    return Embedded(vectors, rows.features.num_truncated, tokens)


class Embedded(NamedTuple):
    """The vectors of N texts."""

    vectors: np.ndarray
    """float32 [N, D]."""
    cut: int
    """Texts that were cut to the length."""
    tokens: np.ndarray
    """Of each text, as they were read, [CLS] and [SEP] among them; int64 [N]."""


def cut_note(cut: int, count: int) -> str:
    """The line on texts that `embed` cut.

    >>> cut_note(1, 2000)
    '1 of 2,000 texts were cut: windows read all of them'
    """
    return f"{cut:,} of {count:,} texts were cut: windows read all of them"


@dataclass(frozen=True)
class TextRows:
    """Rows [CLS] text [SEP], one a text; with windows one or more."""

    features: Features
    skip: int
    """Tokens at the start of each row that are not pooled."""
    texts: np.ndarray | None = None
    """With windows: the number of each row's text, int64 [R], rising from 0."""


def text_rows(
    tokenizer: Tokenizer, texts: Sequence[str], pooling: PoolingSettings, positions: int
) -> TextRows:
    """The rows that a model with so many positions reads. Errors: ValueError as `embed`."""
    tokenizer, max_length, prompt_ids, skip = prompted(tokenizer, pooling, positions)
    whole = [pooling.prompt + text for text in texts]
    if pooling.long_texts == "cut":
        return TextRows(text_features(tokenizer, whole, max_length), skip)
    encoded = tokenizer.encode_batch(whole, offsets=False)
    windows, numbers = split_windows(encoded, prompt_ids, max_length - 2)
    rows = make_rows(windows, None, tokenizer.vocabulary, max_length=max_length)
    features = Features(rows.ids, rows.token_types, rows.boundaries, None, max_length, 0)
    return TextRows(features, skip, numbers)


def prompted(
    tokenizer: Tokenizer, pooling: PoolingSettings, positions: int
) -> tuple[Tokenizer, int, np.ndarray, int]:
    """(Tokenizer, tokens of a row, ids of the prompt, tokens at a row's start that are not pooled).

    Errors: ValueError for a length that a model of so many positions does not have, and a prompt
    that leaves no room for a text.
    """
    max_length = positions if pooling.max_length is None else pooling.max_length
    if not 3 <= max_length <= positions:
        raise ValueError(f"`max_length={max_length}`: the model reads 3 to {positions} tokens")
    if pooling.lowercase and not tokenizer.normalization.lowercase:
        lower = replace(tokenizer.normalization, lowercase=True)
        tokenizer = Tokenizer(tokenizer.vocabulary, lower)
    prompt = pooling.prompt
    prompt_ids = tokenizer.encode_batch([prompt], offsets=False).ids
    check_prompt(prompt, len(prompt_ids), max_length)
    skip = 0 if pooling.pools_prompt or not prompt else 1 + len(prompt_ids)
    return tokenizer, max_length, prompt_ids, skip


def split_windows(
    encoded: Encoded, prompt_ids: np.ndarray, room: int
) -> tuple[Encoded, np.ndarray]:
    """(Windows of at most `room` tokens, the number of each one's text).

    A text that does not fit is parted into as few windows as can be, of equal length but for a
    token; its prompt, the first tokens, stands before each of them.

    >>> text = Encoded(np.arange(10, 17), np.empty((0, 2)), np.empty(0), np.array([0, 7]))
    >>> windows, numbers = split_windows(text, np.array([10]), 4)
    >>> windows.ids.tolist(), windows.boundaries.tolist()
    ([10, 11, 12, 13, 10, 14, 15, 16], [0, 4, 8])
    """
    size, lengths = len(prompt_ids), np.diff(encoded.boundaries)
    body = lengths - size
    counts = np.where(lengths <= room, 1, -(-body // (room - size)))
    texts = np.repeat(np.arange(len(lengths)), counts)
    window = concatenated_ranges(np.zeros(len(counts), np.int64), counts)  # within its text
    begins = size + body[texts] * window // counts[texts]
    ends = size + body[texts] * (window + 1) // counts[texts]
    begins[window == 0] = 0  # with the prompt
    behind = replace(encoded, ids=np.append(encoded.ids, prompt_ids))
    prompts = np.full(len(texts), len(encoded.ids)), np.where(window > 0, size, 0)
    bodies = encoded.boundaries[texts] + begins, ends - begins
    starts, sizes = (np.stack(both, axis=1) for both in zip(prompts, bodies, strict=True))
    return gather_spans(behind, starts, sizes), texts


def finished(vectors: np.ndarray, rows: TextRows, pooling: PoolingSettings) -> np.ndarray:
    """Pooled vectors of rows [R, H] -> vectors of texts float32 [N, D].

    Windows weigh as many tokens as they have, so that the mean is that of all of them.
    """
    if rows.texts is not None:
        tokens = (rows.features.lengths - rows.skip).astype(np.float32)[:, None]
        starts = np.flatnonzero(np.diff(rows.texts, prepend=-1))
        if pooling.pool == "max":
            vectors = np.maximum.reduceat(vectors, starts)
        else:
            is_sqrt = pooling.pool == "mean_sqrt_len"
            sums = np.add.reduceat(vectors * (np.sqrt(tokens) if is_sqrt else tokens), starts)
            total = np.add.reduceat(tokens, starts)
            vectors = sums / (np.sqrt(total) if is_sqrt else total)
    for layer in pooling.dense:
        vectors = apply_dense(layer, vectors)
    vectors = vectors[:, : pooling.dimensions]
    return np.ascontiguousarray(unit_length(vectors) if pooling.normalize else vectors)


def resolve(model: Runner, texts: Sequence[str], pooling: PoolingSettings) -> None:
    """`Runner.resolve` by the vectors of some of the texts."""

    def vectors(processor: Processor, rows: np.ndarray) -> np.ndarray:
        return embed(model, [texts[int(k)] for k in rows], pooling, processor=processor).vectors

    model.resolve(len(texts), vectors, ENCODER)
