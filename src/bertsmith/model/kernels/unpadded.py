"""Training on a CPU without padding: the real tokens of a batch as one row.

All layers but attention compute each position by itself, so padding is left out of what they get.
Where vectors multiply bf16, attention reads the tokens where they lie (`llvm/row_attention.py`).
Elsewhere it puts the rows into groups of about one length, unless they are causal. Moving them
costs some of what is gained: a mini trains on rows of 512 tokens, a quarter of them padding, 1.15
to 1.3 times as fast, on rows of 128 no faster (docs/design/lab.md).

Letters as in model/encoder.py; T real tokens and P queries of a batch, G rows of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.attention import (
    kept_probabilities,
    queries_keys_values,
    softmax_gradient_rows,
    softmax_rows,
)
from bertsmith.model.kernels.elementwise import Kernel, flat, has_kernels, next_key, rows, threshold
from bertsmith.model.kernels.llvm.blocks import COLUMNS, has_bf16_vectors
from bertsmith.model.kernels.llvm.row_attention import attend, attention_gradients

# of a batch in groups: with less padding, or in shorter rows, they cost as much as they save
LEAST_PADDING, LEAST_LENGTH = 0.1, 256
WIDTH = 32  # of which a group's rows are a multiple
SHAPES = 16  # of which numbers of tokens are a multiple where PyTorch multiplies them


class Places(NamedTuple):
    """The vectors of D numbers, one a token and head, of a group's rows: where they lie, int64."""

    among_all: np.ndarray  # of the tokens of all rows, [T, H]
    in_group: np.ndarray  # of [G * A, width, D]
    width: int  # of the longest row, rounded up


class Group(NamedTuple):
    """Rows of about as many tokens, among rows that lie one after another without padding."""

    lengths_G: np.ndarray
    tokens: Places
    queries: Places

    def spread(self, x_TH: Tensor, heads: int, places: Places) -> Tensor:
        """The group's tokens, or queries, of all [T, H]: [G * A, width, D], with 0 between."""
        shape = len(self.lengths_G) * heads, places.width, x_TH.shape[1] // heads
        wide = torch.zeros(shape, dtype=x_TH.dtype)
        x = x_TH.contiguous().view(-1, shape[2])
        copy_rows(words(x), places.among_all, words(wide), places.in_group)
        return wide

    def put(self, x: Tensor, target_TH: Tensor, places: Places) -> None:
        """Undo `spread`: write the group's tokens into those of all."""
        target = target_TH.view(-1, x.shape[2])
        copy_rows(words(x), places.in_group, words(target), places.among_all)


def words(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor's rows, of which only the memory counts, in words of 8 bytes."""
    return rows(tensor).view(np.uint64)


@compiled
def copy_rows(source, taken, target, written):
    """target[written] = source[taken], row by row."""
    for n in range(len(taken)):
        line, own = source[taken[n]], target[written[n]]
        for k in range(len(line)):
            own[k] = line[k]


def groups_of_rows(lengths_B: np.ndarray, queries_B: np.ndarray, heads: int) -> list[Group]:
    """Rows of so many tokens and queries in groups, each of one width, a multiple of WIDTH.

    As many widths as there may be lengths would have PyTorch write a program for each.

    >>> lengths = np.array([3, 40, 2])
    >>> short, long = groups_of_rows(lengths, lengths, heads=1)
    >>> short.tokens.width, long.tokens.width, short.lengths_G.tolist()
    (32, 64, [3, 2])
    >>> short.tokens.among_all.tolist(), short.tokens.in_group.tolist()
    ([0, 1, 2, 43, 44], [0, 1, 2, 32, 33])
    """
    widths_B, groups = -(-lengths_B // WIDTH) * WIDTH, []
    for width in np.unique(widths_B):
        chosen = np.flatnonzero(widths_B == width)
        tokens, queries = (_places(sizes, chosen, heads) for sizes in (lengths_B, queries_B))
        groups.append(Group(lengths_B[chosen], tokens, queries))
    return groups


def columns_of(sizes_B: np.ndarray) -> np.ndarray:
    """The columns of rows of so many tokens, one row after another, [T]."""
    return np.concatenate([np.arange(size) for size in sizes_B])


def _places(sizes_B: np.ndarray, chosen: np.ndarray, heads: int) -> Places:
    """Places of so many tokens of the chosen rows."""
    starts_B, sizes = sizes_B.cumsum() - sizes_B, sizes_B[chosen]
    width = int(-(-sizes.max() // WIDTH) * WIDTH)
    columns = columns_of(sizes)
    tokens = columns + np.repeat(starts_B[chosen], sizes)
    first = columns + np.repeat(np.arange(len(chosen)) * heads * width, sizes)
    head = np.arange(heads)
    among_all, in_group = tokens[:, None] * heads + head, first[:, None] + head * width
    return Places(among_all.ravel(), in_group.ravel(), width)


class GroupedAttention(Kernel):
    """Attention of rows without padding, queries [P, H], keys and values [T, H]: [P, H].

    The rows of a group are computed together, with zeros up to their width.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q_PH, k_TH, v_TH, groups, heads, rate = given
        ctx.factor, ctx.scale = 1 / (1 - rate), 1 / math.sqrt(q_PH.shape[1] // heads)
        ctx.groups, ctx.heads, ctx.dropped = groups, heads, rate > 0
        ctx.shapes = q_PH.shape, k_TH.shape
        context_PH, saved = torch.empty(q_PH.shape, dtype=q_PH.dtype), []
        for group in groups:
            q = group.spread(q_PH, heads, group.queries)
            k, v = (group.spread(x_TH, heads, group.tokens) for x_TH in (k_TH, v_TH))
            p = torch.bmm(q, k.transpose(1, 2))
            seen = np.arange(group.tokens.width) < group.lengths_G[:, None, None]
            key, queries = np.uint32(next_key() if rate else 0), group.queries.width
            scale, limit = np.float32(ctx.scale), threshold(rate)
            softmax_rows(rows(p), scale, seen, heads, queries, limit, key)
            group.put(torch.bmm(kept_probabilities(ctx, p), v), context_PH, group.queries)
            saved += [q, k, v, p]
        ctx.save_for_backward(*saved)
        return context_PH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (queries, tokens), heads, dtype = ctx.shapes, ctx.heads, gradients[0].dtype
        by_q, by_k, by_v = (torch.empty(shape, dtype=dtype) for shape in (queries, tokens, tokens))
        scale, factor = np.float32(ctx.scale), np.float32(ctx.factor)
        for number, group in enumerate(ctx.groups):
            q, k, v, p = ctx.saved_tensors[4 * number : 4 * number + 4]
            above = group.spread(gradients[0], heads, group.queries)
            group.put(
                torch.bmm(kept_probabilities(ctx, p).transpose(1, 2), above), by_v, group.tokens
            )
            s = torch.bmm(above, v.transpose(1, 2))
            softmax_gradient_rows(rows(s), rows(p), scale, factor)
            group.put(torch.bmm(s, k), by_q, group.queries)
            group.put(torch.bmm(s.transpose(1, 2), q), by_k, group.tokens)
        return by_q, by_k, by_v, None, None, None


def has_row_attention(dtype: torch.dtype | None, head_size: int) -> bool:
    """True where `RowAttention` computes: bf16, by vectors of a CPU, heads of 32 n numbers."""
    return dtype == torch.bfloat16 and head_size % COLUMNS == 0 and has_bf16_vectors()


class RowAttention(Kernel):
    """Attention of rows without padding, [P, H]; of `queries_keys_values` in one tensor or two.

    Row b has `lengths_B` of the keys and `queries_B` of the queries, in order; a query sees the
    first `seen_P` of its row's keys.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *parts, lengths_B, queries_B, seen_P, heads, rate = given
        parts = [part.contiguous() for part in parts]
        key = np.uint32(next_key() if rate else 0)
        dropout = threshold(rate), key, np.float32(1 / (1 - rate))
        reads, starts = (np.concatenate([[0], sizes.cumsum()]) for sizes in (queries_B, lengths_B))
        width_B = -(-lengths_B // COLUMNS) * COLUMNS
        room = int(heads * (queries_B * width_B).sum() + 8 * width_B.max())
        count, size = len(parts[0]), parts[-1].shape[1] // (4 - len(parts))
        context_PH = parts[0].new_empty(count, size)
        exponentials, factors_AP = parts[0].new_empty(room), torch.empty(heads, count)
        ctx.how = reads, starts, seen_P, heads, dropout
        made = flat(exponentials), rows(factors_AP), rows(context_PH)
        attend(rows(parts[0]), rows(parts[-1]), *ctx.how, *made)
        ctx.save_for_backward(exponentials, factors_AP, *parts)
        return context_PH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        exponentials, factors_AP, *parts = ctx.saved_tensors
        found = [torch.empty_like(part) for part in parts]
        given = (rows(x) for x in (gradients[0].contiguous(), parts[0], parts[-1]))
        made = flat(exponentials), rows(factors_AP), rows(found[0]), rows(found[-1])
        attention_gradients(*given, *ctx.how, *made)
        return *found, None, None, None, None, None


class _Taken(Kernel):
    """Some rows of a matrix, each once; the gradient of a plain index would be added up."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, places_T: Tensor) -> Tensor:
        ctx.save_for_backward(places_T)
        ctx.count = len(x_NH)
        return x_NH.index_select(0, places_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        d_TH, (places_T,) = gradients[0], ctx.saved_tensors
        return d_TH.new_zeros(ctx.count, d_TH.shape[1]).index_copy_(0, places_T, d_TH), None


@dataclass(frozen=True, eq=False)
class Unpadded:
    """Rows of a batch without their padding, as one row of all T real tokens, and its attention.

    Some padding may follow as a row of its own, of which nothing is read.
    """

    num_heads: int
    dropout: float
    lengths_B: np.ndarray
    queries_B: np.ndarray
    columns_P: np.ndarray | None  # of the queries, which see no later ones; None: they see all
    tokens_T: Tensor | None  # where they are in [B * S]; None: there is no padding
    by_rows: bool  # see `has_row_attention`

    @cached_property
    def seen_P(self) -> np.ndarray:
        """The number of tokens of its row that each query sees."""
        if self.columns_P is None:
            return np.repeat(self.lengths_B, self.queries_B)
        return self.columns_P + 1

    @cached_property
    def groups(self) -> list[Group]:
        return groups_of_rows(self.lengths_B, self.queries_B, self.num_heads)

    def flat(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [1, T, H]."""
        x_NH = x_BSH.flatten(0, 1)
        return (x_NH if self.tokens_T is None else _Taken.apply(x_NH, self.tokens_T))[None]

    def padded(self, x_1TH: Tensor, rows: int, length: int) -> Tensor:
        """[1, T, H] -> [B, S, H], with zeros for padding."""
        x_NH, real = x_1TH[0], self.lengths_B[:rows].sum()
        if self.tokens_T is not None:
            zeros_NH = x_1TH.new_zeros(rows * length, x_1TH.shape[2])
            x_NH = zeros_NH.index_copy(0, self.tokens_T[:real], x_NH[:real])
        return x_NH.unflatten(0, (rows, length))

    def places(self, positions_BQ: Tensor) -> Tensor:
        """Positions in rows, of real tokens, as those in the one row, [1, B * Q]."""
        starts_B = torch.from_numpy(self.lengths_B.cumsum() - self.lengths_B)[: len(positions_BQ)]
        return (positions_BQ + starts_B[:, None]).view(1, -1)

    def __call__(self, *parts: Tensor) -> Tensor:
        """[1, P, H], of parts as `queries_keys_values` has them."""
        matrices, heads = [part[0] for part in parts], self.num_heads
        if self.by_rows:
            sizes = self.lengths_B, self.queries_B, self.seen_P
            return RowAttention.apply(*matrices, *sizes, heads, self.dropout)[None]
        three = queries_keys_values(*matrices)
        return GroupedAttention.apply(*three, self.groups, heads, self.dropout)[None]

    def at(self, positions_BQ: Tensor, length: int) -> Unpadded:
        """The same for as many queries of each row."""
        queries_B = np.zeros_like(self.lengths_B)
        queries_B[: len(positions_BQ)] = positions_BQ.shape[1]
        columns_P = None if self.columns_P is None else positions_BQ.numpy().ravel()
        return replace(self, queries_B=queries_B, columns_P=columns_P)


def without_padding(
    x_BSH: Tensor,
    lengths_B: Tensor | None,
    num_heads: int,
    dropout: float,
    causal: bool,
    any_number: bool,
) -> Unpadded | None:
    """The rows without padding where a CPU trains and is faster so; else None.

    Every position sees all others of its row; if `causal`, those before it. `dropout` is that of
    attention. Int8 layers take `any_number` of tokens; else it is rounded up, as PyTorch writes a
    program for each number.
    """
    if not (torch.is_grad_enabled() and has_kernels(x_BSH) and x_BSH.requires_grad):
        return None
    (batch, length), head_size = x_BSH.shape[:2], x_BSH.shape[2] // num_heads
    by_rows = has_row_attention(x_BSH.dtype, head_size)
    lengths = np.full(batch, length) if lengths_B is None else lengths_B.numpy().astype(np.int64)
    if not (batch and lengths.all()):
        return None
    padding = 1 - lengths.sum() / (batch * length)
    by_groups = not causal and head_size % 4 == 0  # whose vectors are moved in whole words
    if not by_rows and (length < LEAST_LENGTH or padding < LEAST_PADDING or not by_groups):
        return None
    tokens = None
    if padding:
        is_real = np.arange(length) < lengths[:, None]
        places, fill = np.flatnonzero(is_real), np.flatnonzero(~is_real)
        fill = fill[: -len(places) % SHAPES if by_rows and not any_number else 0]
        if len(fill):
            places, lengths = np.append(places, fill), np.append(lengths, len(fill))
        tokens = torch.from_numpy(places)
    columns = columns_of(lengths) if causal else None
    return Unpadded(num_heads, dropout, lengths, lengths, columns, tokens, by_rows)
