"""The text of a run: one token store, or several mixed by weights.

    ["books=0.7", "news=0.3"]

The store of each row is drawn by (seed, number of the row), and each store is read in its own
shuffled order. The position holds where it stands in each store: to resume takes no time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.rng import KEY_SOURCES, KEY_STREAMS, derived, seed_key, uniform
from bertsmith.corpus.examples.settings import ExampleSettings
from bertsmith.corpus.examples.stream import Position, PretrainingStream
from bertsmith.corpus.store.store import Split, TokenStore, check_capacity
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import Vocabulary

Sources = str | Path | Sequence[str | Path]


class MixedSplit(NamedTuple):
    """The same side of several stores."""

    splits: tuple[Split, ...]
    weights: tuple[float, ...]  # of the rows; together 1

    @property
    def num_documents(self) -> int:
        """The smallest number of documents in any store: none may be without."""
        return min(split.num_documents for split in self.splits)


class Mixture:
    """Stores with weights, in the place of a `TokenStore`; a ValueError if tokenizers differ."""

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float]) -> None:
        self.stores = tuple(stores)
        self.weights = tuple(weight / sum(weights) for weight in weights)
        first = stores[0]
        for store in stores[1:]:
            if store.tokenizer_fingerprint != first.tokenizer_fingerprint:
                raise ValueError(
                    f"{store.folder} and {first.folder} were built with different tokenizers "
                    f"({store.tokenizer_fingerprint[:12]}, {first.tokenizer_fingerprint[:12]}): "
                    "build both with `bertsmith corpus ... --vocab` and the same vocabulary"
                )
        self.folder = " ".join(  # weights in full: the words of a command that opens the same
            f"{store.folder}={repr(float(weight)).removesuffix('.0')}"
            for store, weight in zip(stores, weights, strict=True)
        )
        self.train = MixedSplit(tuple(store.train for store in stores), self.weights)
        self.held_out = MixedSplit(tuple(store.held_out for store in stores), self.weights)
        content = [[store.fingerprint for store in stores], list(self.weights)]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        stores = [store.fingerprint for store in self.stores]
        return {"path": self.folder, "fingerprint": self.fingerprint, "stores": stores}

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stores[0].tokenizer

    @cached_property
    def unigram_counts(self) -> np.ndarray:
        """int64 [V]: the count of each piece in as many tokens, drawn by the weights."""
        counts = [store.unigram_counts for store in self.stores]
        total = sum(int(part.sum()) for part in counts)
        drawn = [
            s * total * part / part.sum() for s, part in zip(self.weights, counts, strict=True)
        ]
        return np.rint(np.sum(drawn, axis=0)).astype(np.int64)


Corpus = TokenStore | Mixture


def open_corpus(sources: Sources, recorded: Mapping[str, Any] | None = None) -> Corpus:
    """Open the store, or the mixture: a path or URL, or several as STORE=WEIGHT.

    `recorded` is what a run's `record()` was: stores that have grown since are opened as they were.

    Errors: ValueError for a weight that is missing or not above 0, a store named twice, stores of
    different tokenizers, and those of `TokenStore.open`.
    """
    words = [sources] if isinstance(sources, str | Path) else list(sources)
    named = [parse_source(word) for word in words]
    recorded = recorded or {}
    known = recorded.get("stores") or [recorded.get("fingerprint")]
    known = [*known, *[None] * len(named)][: len(named)]  # a resume refuses other stores
    if len(named) == 1:
        return TokenStore.open(named[0][0], known[0])
    stores, weights = [], []
    for (source, weight), fingerprint in zip(named, known, strict=True):
        if weight is None:
            raise ValueError(f"{source}: several stores need weights: A=0.7 B=0.3")
        if [other for other, _ in named].count(source) > 1:
            raise ValueError(f"{source}: named twice: give a store once, with its whole weight")
        stores.append((source, fingerprint))
        weights.append(weight)
    return Mixture([TokenStore.open(*store) for store in stores], weights)


def parse_source(word: str | Path) -> tuple[str | Path, float | None]:
    """A store's path or URL, and its weight where one is given. A folder of that name is a path.

    >>> parse_source("books=0.7"), parse_source("lang=en/store"), parse_source("s3://b/store=2")
    (('books', 0.7), ('lang=en/store', None), ('s3://b/store', 2.0))
    """
    source, equals, text = str(word).rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        return word, None
    if not equals or Path(word).is_dir():
        return word, None
    if not 0 < weight < math.inf:
        raise ValueError(f"{word}: the weight must be above 0, and finite")
    return source, weight


def open_stream(
    split: Split | MixedSplit, vocabulary: Vocabulary, settings: ExampleSettings, seed: int
) -> Stream:
    if isinstance(split, Split):
        return PretrainingStream(split, vocabulary, settings, seed)
    return MixtureStream(split, vocabulary, settings, seed)


class MixtureStream:
    """`PretrainingStream` of several stores; methods and errors as there."""

    def __init__(
        self, split: MixedSplit, vocabulary: Vocabulary, settings: ExampleSettings, seed: int
    ) -> None:
        self.split, self.settings = split, settings
        check_capacity(split.splits)
        self._key = derived(seed_key(seed), KEY_SOURCES)
        self._cumulative_weights = np.cumsum(split.weights)
        self._shape = settings.max_length, settings.num_predictions, vocabulary.pad_id
        streams_key = derived(seed_key(seed), KEY_STREAMS)
        self.streams = tuple(
            PretrainingStream(part, vocabulary, settings, int(derived(streams_key, number)))
            for number, part in enumerate(split.splits)
        )

    def examples_in_epoch(self, epoch: int) -> int:
        """Rows after which the store that is used up first begins again, on average."""
        counts = [stream.examples_in_epoch(epoch) for stream in self.streams]
        return int(min(c / s for c, s in zip(counts, self.split.weights, strict=True)))

    def advance(self, position: Position, size: int) -> Position:
        return self._after(position, self._source_ids(position, size))

    def positions(self, position: Position, size: int) -> list[Position]:
        return [self.advance(position, row) for row in range(size)]

    def batch(self, position: Position, size: int) -> tuple[PretrainingBatch, Position]:
        source_ids = self._source_ids(position, size)
        batch = PretrainingBatch.empty(size, *self._shape)
        parts = zip(self.streams, self._parts(position), strict=True)
        for number, (stream, start) in enumerate(parts):
            rows = np.flatnonzero(source_ids == number)
            if len(rows):
                part, _ = stream.batch(start, len(rows))
                for name, values in vars(batch).items():
                    values[rows] = vars(part)[name]
        return batch, self._after(position, source_ids)

    def _parts(self, position: Position) -> tuple[Position, ...]:
        return position.parts or (Position(),) * len(self.streams)

    def _source_ids(self, position: Position, size: int) -> np.ndarray:
        return draw_source_ids(position.index, size, self._cumulative_weights, self._key)

    def _after(self, position: Position, source_ids: np.ndarray) -> Position:
        counts = np.bincount(source_ids, minlength=len(self.streams)).tolist()
        parts = tuple(
            stream.advance(part, count)
            for stream, part, count in zip(self.streams, self._parts(position), counts, strict=True)
        )
        epoch = max(part.epoch for part in parts)  # of the store that is repeated most
        return Position(epoch, position.index + len(source_ids), parts=parts)


@compiled
def draw_source_ids(first, count, shares_so_far, key):
    """int64 [count]: the store of examples first, first + 1, ...; shares_so_far: float64 [N]."""
    source_ids = np.empty(count, np.int64)
    for k in range(count):
        share, store = uniform(key, first + k), 0
        while store < len(shares_so_far) - 1 and share >= shares_so_far[store]:
            store += 1
        source_ids[k] = store
    return source_ids


Stream = PretrainingStream | MixtureStream
