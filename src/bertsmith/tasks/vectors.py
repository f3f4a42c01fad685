"""Vectors of texts beside the model: the rows they are read from, ways to pool, cosines, files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from bertsmith.tasks.features import Features
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.text.tokenizer.tokenizer import Tokenizer

Pool = Literal["mean", "cls", "max", "mean_sqrt_len"]


def check_pool(pool: Pool, causal: bool) -> None:
    """Refuse an unknown pool, and a vector that is the same for all texts. Errors: ValueError."""
    if pool not in get_args(Pool):
        raise ValueError(f"`pool={pool!r}`: known are {', '.join(get_args(Pool))}")
    if pool == "cls" and causal:
        raise ValueError(
            "`pool='cls'`: in a left-to-right model [CLS] sees nothing of the text: use"
            " `pool='mean'`"
        )


def check_prompt(prompt: str, tokens: int, max_length: int) -> None:
    """Refuse a prompt of so many tokens that leaves no room for a text. Errors: ValueError."""
    if tokens + 3 > max_length:  # [CLS], a token and [SEP]
        raise ValueError(
            f"`max_length={max_length}`: the prompt {prompt!r:.40} leaves no room for a text:"
            " shorten it, or raise the length"
        )


def text_features(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_length: int,
    pairs: Sequence[str] | None = None,
) -> Features:
    """[CLS] text [SEP] of each text, or of each pair of texts; longer ones keep their head."""
    rows = tokenizer.rows(texts, pairs, max_length=max_length, offsets=False)
    return Features(rows.ids, rows.token_types, rows.boundaries, None, max_length, rows.num_cut)


def pooled(states: np.ndarray, lengths: np.ndarray, pool: Pool, skip: int = 0) -> np.ndarray:
    """The states [T, H] of rows of these lengths, without the first `skip` tokens of each, pooled.

    Returns [R, H]; see `pooled` of hidden_states.py.

    >>> pooled(np.array([[1.0], [3.0], [8.0]]), np.array([2, 1]), "mean")
    array([[2.],
           [8.]])
    """
    begins = np.cumsum(lengths) - lengths + skip
    if pool == "cls":
        return states[begins]
    lengths = lengths - skip
    if skip:
        states = states[concatenated_ranges(begins, lengths)]
    starts = np.cumsum(lengths) - lengths
    if pool == "max":
        return np.maximum.reduceat(states, starts)
    count = lengths.astype(np.float32)[:, None]
    return np.add.reduceat(states, starts) / (count if pool == "mean" else np.sqrt(count))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """The logarithms of the softmax of each row, [N, K], in place of the scores."""
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def picked_log_probabilities(
    scores: np.ndarray, labels: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The log-probabilities of some columns of each row of scores [N, K], which are overwritten.

    Row n is asked for the next counts[n] of the `labels`.

    >>> scores = np.log(np.array([[1.0, 3.0], [2.0, 2.0]]))
    >>> np.exp(picked_log_probabilities(scores, np.array([1, 0, 0]), np.array([2, 1])))
    array([0.75, 0.25, 0.5 ])
    """
    return log_softmax(scores)[np.repeat(np.arange(len(counts)), counts), labels]


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Divide vectors [N, H] by their lengths; those of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The cosine of each row of one with the same row of the other: [N, H], [N, H] -> [N].

    A vector of length 0 has the cosine 0 with every other.

    >>> cosines(np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[6.0, 8.0], [0.0, 2.0]]))
    array([1., 0.])
    """
    return (unit_length(left) * unit_length(right)).sum(axis=1)


def float16_file(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """Make a .npy to be written in place. Errors: OSError when the disk has no room for it."""
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    if hasattr(os, "posix_fallocate"):  # else a full disk would end the process without a word
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return vectors
