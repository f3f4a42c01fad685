"""Our own engine: a BERT in float32, bf16 or int8 on a CPU, without torch.

Its loops are those of `model/kernels/llvm/unpadded_encoder.py`, its letters too.

Weights are rounded and packed once. Texts are read in their order, without padding, a few hundred
tokens at once on each core. A text's answer is the same, bit for bit, alone or among others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Lock
from typing import NamedTuple

import numpy as np

from bertsmith.base.processes import in_order
from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.inference.engines.processor import PRECISIONS
from bertsmith.model.config import ModelConfig
from bertsmith.model.kernels.llvm.blocks import (
    COLUMNS,
    has_bf16_blocks,
    in_tiles,
    integer_dtype,
)
from bertsmith.model.kernels.llvm.unpadded_encoder import (
    ROWS,
    Linear,
    Share,
    Weights,
    dense,
    encode,
    normalize,
    stacked,
    token_logits,
)
from bertsmith.model.kernels.llvm.vector_rows import GELU, GELU_TANH, PLAIN
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import Pool, picked_log_probabilities, pooled

TOKENS_AT_ONCE = 384  # a core's; its numbers stay in the caches
TILED_TOKENS = 64  # that a core takes first: reading the weights takes as long
SHARING = Lock()
LINEAR, NORMS = ("attention_output", "intermediate", "output"), ("attention_norm", "output_norm")
HEADS = "pooler.dense", "classifier", "span", "mlm.dense"
Tensors = Mapping[str, np.ndarray]
"""A model's tensors by our names, float32."""


class MaskedLM(NamedTuple):
    """The parameters of a masked-LM head besides its dense layer and the token table."""

    norm: np.ndarray  # float32 [2, H]
    bias: np.ndarray  # float32 [V]


class Head(NamedTuple):
    """A linear layer in float32."""

    linear: Linear  # with columns of zeros up to a multiple of 32
    columns: int


def why_not(config: ModelConfig, precision: str) -> str | None:
    """The reason why this model or machine is beyond the engine; None: it can be read here."""
    if config.family != "bert":
        return f"a model of the family {config.family}"
    if config.pre_norm or config.gated or config.causal:
        return "its layers are not the paper's"
    if config.bilstm:
        return "an LSTM reads its states"
    sizes = (config.hidden_size, config.intermediate_size, config.hidden_size // config.num_heads)
    if any(size % COLUMNS for size in sizes):
        return f"its sizes are no multiples of {COLUMNS}"
    if precision == "int8" and integer_dtype() is None:
        return "this processor has no products of integers that are known here"
    if precision == "bf16" and not has_bf16_blocks():
        return "this processor has no products of bf16"
    return None


def row_dtype(config: ModelConfig, precision: str) -> np.dtype:
    """The dtype of rows as they are multiplied, which picks the instruction; see blocks.py."""
    if precision != "int8":
        return np.dtype(np.uint16 if precision == "bf16" else np.float32)
    dtype = integer_dtype(config.hidden_size, config.intermediate_size)
    assert dtype is not None
    return dtype


@dataclass(frozen=True)
class NativeModel:
    """An encoder, and the linear layers of its head."""

    config: ModelConfig
    weights: Weights
    dtype: np.dtype
    heads: Mapping[str, Head]
    """By our names, such as "pooler.dense"."""
    masked_lm: MaskedLM | None
    threads: int

    @classmethod
    def make(
        cls, tensors: Tensors, config: ModelConfig, precision: str, threads: int
    ) -> NativeModel:
        """Round and pack a model that `why_not` has nothing against."""
        dtype = row_dtype(config, precision)

        def named(name: str) -> Iterator[np.ndarray]:  # a layer at a time, which frees the last
            return (tensors[f"encoder.layers.{n}.{name}"] for n in range(config.num_layers))

        def norms(name: str) -> np.ndarray:
            pairs = zip(named(f"{name}.weight"), named(f"{name}.bias"), strict=True)
            return np.stack([np.stack(pair) for pair in pairs])

        def linear(name: str, rows: slice = slice(None)) -> Linear:
            matrices = zip(named(f"{name}.weight"), named(f"{name}.bias"), strict=True)
            layers = ((weight[rows], bias[rows]) for weight, bias in matrices)
            return stacked(layers, config.num_layers, dtype)

        own, size = "encoder.embeddings", config.hidden_size
        weights = Weights(
            tokens=tensors[f"{own}.token.weight"],
            positions=tensors[f"{own}.position.weight"],
            segments=tensors[f"{own}.segment.weight"],
            norm=np.stack([tensors[f"{own}.norm.weight"], tensors[f"{own}.norm.bias"]]),
            query=linear("qkv", slice(0, size)),
            key_value=linear("qkv", slice(size, None)),
            attention_output=linear("attention_output"),
            attention_norm=norms("attention_norm"),
            intermediate=linear("intermediate"),
            output=linear("output"),
            output_norm=norms("output_norm"),
        )
        heads = {
            module: head_linear(tensors[f"{module}.weight"], tensors[f"{module}.bias"])
            for module in HEADS
            if f"{module}.weight" in tensors
        }
        masked_lm = None
        if "mlm.bias" in tensors:
            norm = np.stack([tensors["mlm.norm.weight"], tensors["mlm.norm.bias"]])
            masked_lm = MaskedLM(norm, tensors["mlm.bias"])
        return cls(config, weights, dtype, heads, masked_lm, threads)

    def in_memory(self) -> NativeModel:
        """The same with tables and norms that are mapped from no file."""
        own, masked_lm = self.weights, self.masked_lm
        tables = {
            name: np.array(getattr(own, name)) for name in ("tokens", "positions", "segments")
        }
        if masked_lm is not None:
            masked_lm = MaskedLM(*map(np.array, masked_lm))
        return replace(self, weights=own._replace(**tables), masked_lm=masked_lm)

    def states(
        self,
        features: Features,
        rows: np.ndarray,
        reads: np.ndarray,
        all_layers: bool = False,
    ) -> np.ndarray:
        """Hidden states float32 [Q, H] of the tokens `rows`, Q in all, of all R texts.

        Of text r they are rows[reads[r]:reads[r + 1]], numbers of tokens in rising order.
        `all_layers` gives [L + 1, T, H], and reads all tokens. The model's threads share the
        tokens.

        Errors: ValueError for a row of more tokens than the model knows positions.
        """
        features.check_lengths(len(self.weights.positions))  # the loops look at no bounds
        assert features.ids.max(initial=0) < len(self.weights.tokens)
        assert features.token_types.max(initial=0) < len(self.weights.segments)
        layers, tokens = len(self.weights.output_norm), len(features.ids)
        shape = (layers, tokens, self.config.hidden_size) if all_layers else (0, 0, 0)
        states = np.empty(shape, np.float32)
        tiled = in_tiles(self.dtype)
        unit, least = (ROWS, TILED_TOKENS) if tiled else (8, 8)  # that `block` takes at once
        own = max(least, -(-tokens // (unit * self.threads)) * unit)
        firsts = range(0, tokens, own)
        shape = min(2, len(firsts)), tokens, 2 * self.config.hidden_size
        is_exact = self.dtype == np.float32 or not has_bf16_blocks()
        key_value = np.empty(shape, np.float32 if is_exact else np.uint16)
        shared = key_value, np.zeros(1, np.int64), len(firsts)

        def compute(first: int) -> np.ndarray:
            with freed(shared[1]):
                share = Share(first, min(first + own, tokens), *shared)
                begin, end = np.searchsorted(rows, share[:2])
                return encode(
                    features.ids,
                    features.token_types,
                    features.boundaries,
                    rows[begin:end] - first,
                    reads.clip(begin, end) - begin,
                    self.weights,
                    self.config.num_heads,
                    np.float32(self.config.layer_norm_eps),
                    self.gelu,
                    np.zeros(1, self.dtype),
                    states,
                    share,
                )

        if len(firsts) == 1:
            last = compute(0)
        else:
            # they wait for one another: of two calls at once each could get a part of the workers
            with SHARING, freed(shared[1]):
                others = [workers(self.threads).submit(compute, first) for first in firsts[1:]]
                parts = [compute(0), *(other.result() for other in others)]
            last = np.concatenate(parts)
        return np.concatenate([states, last[None]]) if all_layers else last

    @property
    def gelu(self) -> int:
        return GELU_TANH if self.config.activation == "gelu_tanh" else GELU

    def head(self, name: str, x: np.ndarray, ending: int = PLAIN) -> np.ndarray:
        """A linear layer's outputs, see `head_outputs`."""
        return head_outputs(self.heads[name], x, ending)

    def first_states(self, features: Features) -> np.ndarray:
        """At [CLS], float32 [R, H]."""
        return self.states(features, features.boundaries[:-1], np.arange(len(features) + 1))

    def token_states(self, features: Features) -> np.ndarray:
        """At every token, float32 [T, H]."""
        return self.states(features, np.arange(len(features.ids)), features.boundaries)

    def outputs(self, features: Features, on_batch: OnBatch = ignore) -> np.ndarray:
        """The head's: float32 [R, N], or [T, N] of a head over tokens."""
        return self.run(features, NativeModel._outputs, on_batch)

    def _outputs(self, features: Features) -> np.ndarray:
        if "span" in self.heads:
            return self.head("span", self.token_states(features))
        if "pooler.dense" in self.heads:
            pooled = np.tanh(self.head("pooler.dense", self.first_states(features)))
            return self.head("classifier", pooled)
        return self.head("classifier", self.token_states(features))

    def vectors(
        self, features: Features, pool: Pool, skip: int = 0, on_batch: OnBatch = ignore
    ) -> np.ndarray:
        """The tokens of each row but the first `skip`, pooled: float32 [R, H]."""

        def compute(model: NativeModel, rows: Features) -> np.ndarray:
            if pool == "cls":
                return model.states(rows, rows.boundaries[:-1] + skip, np.arange(len(rows) + 1))
            return pooled(model.token_states(rows), rows.lengths, pool, skip)

        return self.run(features, compute, on_batch)

    def piece_logits(
        self, features: Features, places: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(A row's number, the masked-LM head's outputs, float32 [P, V], at its places).

        `places` int64 are tokens, of all rows, in rising order.
        """
        edges, row = np.searchsorted(places, features.boundaries), 0

        def compute(model: NativeModel, part: slice) -> np.ndarray:
            return model._piece_logits(features, part, places, edges)

        for count, scores in self.map_ranges(features, compute):
            inside = edges[row + 1 : row + count] - edges[row]
            yield from enumerate(np.split(scores, inside), start=row)
            row += count

    def piece_log_probabilities(
        self, features: Features, places: np.ndarray, labels: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """The masked-LM head's log-probabilities of `labels`, float32, see `Runner`."""
        edges = np.searchsorted(places, features.boundaries)
        firsts = np.cumsum(counts) - counts

        def compute(model: NativeModel, part: slice) -> np.ndarray:
            scores = model._piece_logits(features, part, places, edges)
            own = counts[edges[part.start] : edges[part.stop]]
            first = firsts[edges[part.start]] if len(own) else 0
            return picked_log_probabilities(scores, labels[first : first + own.sum()], own)

        return np.concatenate([found for _, found in self.map_ranges(features, compute)])

    def _piece_logits(
        self, features: Features, part: slice, places: np.ndarray, edges: np.ndarray
    ) -> np.ndarray:
        """[P, V] at the places of some rows; those of row r are places[edges[r]:edges[r + 1]]."""
        assert self.masked_lm is not None
        reads = edges[part.start : part.stop + 1]
        own = places[reads[0] : reads[-1]] - features.boundaries[part.start]
        states = self.states(row_range(features, part), own, reads - reads[0])
        x = self.head("mlm.dense", states, self.gelu)
        for line in x:
            normalize(line, self.masked_lm.norm, np.float32(self.config.layer_norm_eps))
        scores = np.empty((len(x), self.config.vocab_size), np.float32)
        token_logits(x, self.weights.tokens, self.masked_lm.bias, scores)
        return scores

    def states_at(
        self,
        features: Features,
        places: np.ndarray,
        layers: Sequence[int],
        on_batch: OnBatch = ignore,
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """(Indices into `places`, states of these tokens float32 [N, H] in each of the layers).

        `places` int64 [P] are tokens in rising order; layer 0 is the embeddings.
        """

        def compute(model: NativeModel, rows: Features) -> np.ndarray:
            every = np.arange(len(rows.ids))
            return model.states(rows, every, rows.boundaries, all_layers=True)[list(layers)]

        token = 0
        for count, states in self.map(features, compute):
            first, last = np.searchsorted(places, [token, token + states.shape[1]])
            yield np.arange(first, last), list(states[:, places[first:last] - token])
            token += states.shape[1]
            on_batch(count)

    def run(
        self,
        features: Features,
        compute: Callable[[NativeModel, Features], np.ndarray],
        on_batch: OnBatch = ignore,
    ) -> np.ndarray:
        """All that `compute` makes of the rows."""
        found = []
        for count, outcome in self.map(features, compute):
            found.append(outcome)
            on_batch(count)
        return np.concatenate(found)

    def map(
        self, features: Features, compute: Callable[[NativeModel, Features], np.ndarray]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(Number of rows, what `compute` makes of them) for all rows in their order."""
        return self.map_ranges(
            features, lambda model, part: compute(model, row_range(features, part))
        )

    def map_ranges(
        self, features: Features, compute: Callable[[NativeModel, slice], np.ndarray]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """`map` where `compute` gets the numbers of the rows.

        Its first argument is the model with the threads that it may use: one beside other rows, all
        for a text that is alone.
        """
        share = -(-int(features.lengths.sum()) // self.threads)
        parts = row_ranges(features.lengths, min(TOKENS_AT_ONCE, share))
        if len(parts) == 1 or self.threads == 1:  # in the caller's thread: a server has several
            for part in parts:
                yield part.stop - part.start, compute(self, part)
            return
        alone, pool = replace(self, threads=1), workers(self.threads)
        outcomes = in_order(pool, partial(compute, alone), parts, 2 * self.threads)
        with closing(outcomes):
            for part, outcome in zip(parts, outcomes, strict=True):
                yield part.stop - part.start, outcome


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that stay: a new one's memory comes from the system anew, which takes 0.3 ms."""
    return ThreadPoolExecutor(threads, "bertsmith")


def begin_anew() -> None:
    """Forget the threads, which a child of a fork has not, and what they hold."""
    global SHARING
    workers.cache_clear()
    SHARING = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=begin_anew)


@contextmanager
def freed(arrived: np.ndarray) -> Iterator[None]:
    """Let nobody wait for a thread that failed, or could not be started; see `meet`."""
    try:
        yield
    except BaseException:
        arrived[0] = 1 << 62
        raise


def row_range(features: Features, part: slice) -> Features:
    """Some consecutive rows by themselves."""
    edges = features.boundaries[part.start : part.stop + 1]
    tokens = slice(edges[0], edges[-1])
    return replace(
        features,
        ids=features.ids[tokens],
        token_types=features.token_types[tokens],
        boundaries=edges - edges[0],
        labels=None,
    )


def row_ranges(lengths: np.ndarray, budget: int) -> list[slice]:
    """Consecutive rows of at most `budget` tokens together, or one longer row.

    >>> row_ranges(np.array([3, 4, 9, 1]), 8)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    ranges, first, total = [], 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > first and total + length > budget:
            ranges.append(slice(first, row))
            first, total = row, 0
        total += length
    return [*ranges, slice(first, len(lengths))] if len(lengths) else []


def head_linear(weight: np.ndarray, bias: np.ndarray) -> Head:
    """A layer of a head, packed."""
    more = -len(weight) % COLUMNS
    padded = np.pad(weight, ((0, more), (0, 0)))
    linear = stacked([(padded, np.pad(bias, (0, more)))], 1, np.dtype(np.float32))
    return Head(linear, len(weight))


def head_outputs(head: Head, x: np.ndarray, ending: int = PLAIN) -> np.ndarray:
    """A layer's outputs, float32 [R, N] of [R, H], each row's the same bits in any company;
    `ending` may be its GELU."""
    (linear, columns), rows = head, len(x)
    padded = np.zeros((-(-rows // ROWS) * ROWS, x.shape[1]), np.float32)
    padded[:rows] = x
    outputs = np.empty((len(padded), linear.bias.shape[1]), np.float32)
    dense(padded, linear, ending, outputs)
    return outputs[:rows, :columns]


def warm_up() -> dict[str, float]:
    """Run a small model in each precision of this machine: the seconds that each took.

    What was not compiled here before is compiled, and kept for all processes to come.

    Errors: AssertionError if one is far from float32, as by an instruction that does not work.
    """
    config = ModelConfig(100, COLUMNS * 2, 1, 2, COLUMNS * 2, max_positions=64)
    random, size = np.random.default_rng(0), config.hidden_size
    shapes = {
        **{f"encoder.embeddings.{name}.weight": (100, size) for name in ("token", "position")},
        "encoder.embeddings.segment.weight": (2, size),
        **{f"encoder.layers.0.{name}.weight": (size, size) for name in LINEAR},
        "encoder.layers.0.qkv.weight": (3 * size, size),
        "classifier.weight": (2, size),
    }
    tensors = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    for name in ("encoder.embeddings.norm", *(f"encoder.layers.0.{name}" for name in NORMS)):
        tensors[f"{name}.weight"] = np.ones(size, np.float32)
    for name in list(tensors):
        if not name.startswith("encoder.embeddings") or "norm" in name:
            bias = np.zeros(len(tensors[name]), np.float32)
            tensors[name.removesuffix("weight") + "bias"] = bias
    ids = random.integers(0, 100, 64).astype(np.int32)
    rows = Features(ids, np.zeros(64, np.int32), np.array([0, 24, 64]), None, 64, 0)
    seconds, states = {}, []
    for precision in PRECISIONS:
        if why_not(config, precision) is None:
            started = time.perf_counter()
            model = NativeModel.make(tensors, config, precision, 1)
            states.append(model.token_states(rows))
            model.outputs(rows)
            seconds[precision] = time.perf_counter() - started
            assert np.corrcoef(states[0].ravel(), states[-1].ravel())[0, 1] > 0.99, model.dtype
    return seconds
