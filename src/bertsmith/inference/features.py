"""Vectors of words out of an encoder's layers, for models that read them (paper section 5.3).

They are written to a folder, which is read without being loaded:

vectors.npy     float16 [R, ...]: a row a word, or a piece; memory-mapped
boundaries.npy  int64 [N + 1]: text k has the rows boundaries[k]:boundaries[k + 1]
word_ids.npy    int32 [R], where a row is a piece: the number of its word in the text
words.jsonl     the words of each text, a list a line
index.json      where all this came from; written last
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertsmith.base import VERSION
from bertsmith.base.files import atomic_folder, read_json, write_json
from bertsmith.base.settings import check_bounds
from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.engines.runner import ENCODER, Runner
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.features import Features
from bertsmith.tasks.tagging.features import featurize_sentences
from bertsmith.tasks.tagging.running_text import given_sentences
from bertsmith.tasks.tagging.sentences import Sentences
from bertsmith.tasks.task import EncodingSettings
from bertsmith.tasks.vectors import float16_file
from bertsmith.text.tokenizer.rows import concatenated_ranges

FORMAT = 1
INDEX, VECTORS, BOUNDARIES = "index.json", "vectors.npy", "boundaries.npy"
WORD_IDS, WORDS = "word_ids.npy", "words.jsonl"
Pool = Literal["none", "sum", "concatenate"]
Align = Literal["first", "mean", "pieces"]
BATCH_TOKENS = 4096  # of which every layer's states are held


@dataclass(frozen=True)
class Extraction:
    """The vectors of a word to take out of a model.

    Errors: ValueError as `parse_layers`, for another pool or alignment, and for a row longer than
    the model's positions.
    """

    config: ModelConfig
    layers: str = "last"
    pool: Pool = "concatenate"
    """The way from layers to one vector; none: each by itself, [W, layers, H]."""
    align: Align = "first"
    """A row a word: of its first piece (the paper's), a GPT's last, which has seen the others; the
    mean of its pieces; or a row a piece."""
    max_length: int | None = None
    """Tokens of a row, of which a longer sentence has several. None: at most 512."""
    document_context: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.encoding.max_length > self.config.max_positions:
            positions = self.config.max_positions
            raise ValueError(
                f"`max_length={self.max_length}`: the model knows {positions} positions"
            )
        _ = self.numbers  # refuse other layers now

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """The layers, from 0."""
        return parse_layers(self.layers, self.config.num_layers)

    @property
    def encoding(self) -> EncodingSettings:
        """The encoding of the model's rows."""
        most = min(512, self.config.max_positions)
        length = most if self.max_length is None else self.max_length
        return EncodingSettings(max_length=length, document_context=self.document_context)

    @property
    def vector_shape(self) -> tuple[int, ...]:
        layers, size = len(self.numbers), self.config.hidden_size
        shapes = {"none": (layers, size), "sum": (size,), "concatenate": (layers * size,)}
        return shapes[self.pool]


def word_vectors(
    model: Runner,
    sentences: Sentences,
    counts: np.ndarray,
    extraction: Extraction,
    allocate: Callable[[tuple[int, ...]], np.ndarray],
    on_batch: OnBatch = ignore,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The vectors of the words of N texts, which have `counts` [N] words each.

    `allocate` gives the array [R, ...] that is filled, in float32 or float16. Returns it,
    boundaries int64 [N + 1] and, where a row is a piece, the number of its word, int32 [R].

    Of a word that is longer than a row the first pieces are read; a line on stderr says so.

    Errors: ValueError for a value that does not fit float16.
    """
    tokenizer, align, pool = model.tokenizer, extraction.align, extraction.pool
    features = featurize_sentences(tokenizer, sentences, None, extraction.encoding)
    if note := features.long_note(extraction.encoding):
        model.note(note)
    sizes = np.ones(len(sentences.words), np.int64)  # tokens taken of a word, [W]
    if align != "first":
        encoded = tokenizer.encode_batch(sentences.words, offsets=False)
        # a word without a piece is [UNK]
        sizes = np.diff(encoded.boundaries).clip(1, extraction.encoding.max_length - 2)
    first = features.by_word(np.arange(len(features.ids)))  # the token of each word's first piece
    if tokenizer.vocabulary.left_to_right:  # of its last, which has seen the others
        first = first - (sizes - 1)
    positions = concatenated_ranges(first, sizes)  # [P], in the order of the words and of the rows
    words = np.repeat(np.arange(len(sizes)), sizes)  # [P]
    rows_per_word = np.ones_like(sizes) if align == "mean" else sizes
    edges = np.concatenate([[0], np.cumsum(counts)])  # in words
    boundaries = np.concatenate([[0], np.cumsum(rows_per_word)])[edges]
    _resolve(model, features, extraction.numbers)
    vectors = allocate((int(boundaries[-1]), *extraction.vector_shape))
    largest = np.finfo(vectors.dtype).max
    for taken, states in model.states_at(features, positions, extraction.numbers, on_batch):
        combine = np.concatenate if pool == "concatenate" else np.stack
        rows, block = taken, combine(states, axis=1)  # [P, H] or [P, layers, H]
        if pool == "sum":
            block = block.sum(axis=1)
        if align == "mean":
            starts = np.flatnonzero(np.diff(words[taken], prepend=-1))
            rows = words[taken[starts]]
            block = np.add.reduceat(block, starts, axis=0)
            block /= sizes[rows].reshape(-1, *[1] * (block.ndim - 1))
        if (worst := np.abs(block).max()) > largest:
            raise ValueError(f"a value of {worst:g} does not fit float16: take other layers")
        vectors[rows] = block
    if align != "pieces":
        return vectors, boundaries, None
    word_ids = words - np.repeat(edges[:-1], np.diff(boundaries))
    return vectors, boundaries, word_ids.astype(np.int32)


def _resolve(model: Runner, features: Features, layers: Sequence[int]) -> None:
    """By the states of all tokens of some rows."""

    def states(processor: Processor, rows: np.ndarray) -> np.ndarray:
        sample = features.of_rows(rows)
        positions = np.arange(len(sample.ids))
        found = list(model.states_at(sample, positions, layers, processor=processor))
        order = np.argsort(np.concatenate([taken for taken, _ in found]))
        return np.concatenate([np.concatenate(batch, axis=1) for _, batch in found])[order]

    model.resolve(len(features), states, ENCODER, layers)


def text_vectors(
    model: Runner, texts: Sequence[Sequence[str]], extraction: Extraction
) -> list[np.ndarray]:
    """The vectors [W, ...] of each text, a list of W words, in float32."""
    sentences = given_sentences(texts, "plain")
    counts = np.zeros(len(texts), np.int64)
    counts[sentences.rows] = np.diff(sentences.boundaries)
    if not counts.any():
        empty = np.empty((0, *extraction.vector_shape), np.float32)
        return [empty for _ in texts]
    vectors, boundaries, _ = word_vectors(
        model, sentences, counts, extraction, lambda shape: np.empty(shape, np.float32)
    )
    return np.split(vectors, boundaries[1:-1])


def extract_features(
    model: Runner,
    sentences: Sentences,
    counts: np.ndarray,
    extraction: Extraction,
    out: Path,
    on_batch: OnBatch = ignore,
) -> None:
    """Write the vectors of all words to the folder `out`, which `open_features` opens.

    `sentences` and `counts` are those of `read_words`. In memory are the texts and one batch's
    vectors. `out` is whole or absent; one that is there is replaced.

    Errors: ValueError as `word_vectors`; OSError when the disk is full.
    """
    with atomic_folder(out) as folder:
        file = functools.partial(float16_file, folder / VECTORS)
        vectors, boundaries, word_ids = word_vectors(
            model, sentences, counts, extraction, file, on_batch
        )
        vectors.flush()  # type: ignore[attr-defined]
        np.save(folder / BOUNDARIES, boundaries)
        if word_ids is not None:
            np.save(folder / WORD_IDS, word_ids)
        with (folder / WORDS).open("w", encoding="utf-8", newline="") as lines:
            edges = np.concatenate([[0], np.cumsum(counts)])
            for begin, end in itertools.pairwise(edges):
                lines.write(json.dumps(sentences.words[begin:end]) + "\n")
        index = {
            "format": FORMAT,
            "bertsmith": VERSION,
            "model": str(model.folder),
            "source": sentences.source,
            "layers": list(extraction.numbers),
            "pool": extraction.pool,
            "align": extraction.align,
            "max_length": extraction.encoding.max_length,
            "document_context": extraction.encoding.document_context,
            "texts": len(counts),
            "words": len(sentences.words),
            "rows": len(vectors),
        }
        write_json(folder / INDEX, index)


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Layers as users write them: 0 is the embeddings' output, num_layers (or -1) the last.

    >>> parse_layers("last", 12), parse_layers("-4..-1", 12), parse_layers("0,6,-1", 12)
    ((12,), (9, 10, 11, 12), (0, 6, 12))
    >>> parse_layers("all", 2)
    (0, 1, 2)

    Errors: ValueError for anything else, a layer that the model does not have or named twice.
    """
    named = {"last": str(num_layers), "all": f"0..{num_layers}"}
    layers: list[int] = []
    for part in named.get(text, text).split(","):
        span = re.fullmatch(r"(-?\d+)(?:\.\.(-?\d+))?", part.strip())
        if not span:
            raise ValueError(f"`layers={text!r}`: write last, all, -1, -4..-1 or 0,6,12")
        ends = [int(end) for end in span.groups() if end is not None]
        for end in ends:
            if not -num_layers - 1 <= end <= num_layers:
                raise ValueError(
                    f"`layers={text!r}`: the model has the layers 0 (embeddings) to {num_layers}, "
                    f"from behind -1 to {-num_layers - 1}, but no {end}"
                )
        first, last = (end % (num_layers + 1) for end in (ends[0], ends[-1]))
        layers += range(first, last + 1)
        if first > last:
            raise ValueError(f"`layers={text!r}`: {part} begins behind its end")
    if len(set(layers)) < len(layers):
        raise ValueError(f"`layers={text!r}`: a layer is named twice")
    return tuple(layers)


@dataclass(frozen=True, eq=False)
class WordVectors:
    """The vectors of N texts; those of text k are `[k]`, read from the disk when they are used."""

    folder: Path
    vectors: np.ndarray  # float16 [R, H], [R, layers * H] or, each layer by itself, [R, layers, H]
    boundaries: np.ndarray  # int64 [N + 1]
    word_ids: np.ndarray | None  # int32 [R] where a row is a piece; None where it is a word
    description: dict[str, Any]  # index.json: model, layers, pool, align, source, ...

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __getitem__(self, k: int) -> np.ndarray:
        """The rows of text k, as a view. Errors: IndexError."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"text {k} of {len(self)}")
        return self.vectors[self.boundaries[k % len(self)] : self.boundaries[k % len(self) + 1]]

    @functools.cached_property
    def words(self) -> list[list[str]]:
        """The words of each text; row by row those of `vectors`, unless a row is a piece."""
        with (self.folder / WORDS).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def open_features(folder: Path | str) -> WordVectors:
    """Open what `bertsmith features` wrote; at once, however large it is.

    Errors: ValueError that names the folder or file that is not one of features, or damaged.
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder}: no {INDEX}, so not a folder of `bertsmith features`")
    description = read_json(folder / INDEX)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{folder / INDEX}: not of format {FORMAT}, which this bertsmith reads")
    vectors, boundaries = _load(folder / VECTORS), _load(folder / BOUNDARIES)
    word_ids = _load(folder / WORD_IDS) if description["align"] == "pieces" else None
    if boundaries[-1] != len(vectors) or (word_ids is not None and len(word_ids) != len(vectors)):
        raise ValueError(f"{folder}: its files do not fit one another: extract the features again")
    return WordVectors(folder, vectors, boundaries, word_ids, description)


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:  # cut short, or no such file at all
        raise ValueError(f"{path}: damaged ({error}): extract the features again") from error
