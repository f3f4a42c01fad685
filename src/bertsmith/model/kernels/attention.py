"""Attention for training on a CPU, and over rows with padding on a GPU.

On a CPU: batched products with a compiled softmax between them. The backward pass of PyTorch's
fused CPU attention takes 10 times as long at BERT's lengths, and dropout leaves its fast path. Here
the probabilities are kept, negative where they were dropped: the backward pass draws nothing.

On a GPU: variable-length FlashAttention; a mask would send PyTorch to a slower kernel. A row is cut
into two pieces, its real tokens and its padding, each of which attends to itself alone: no row is
moved, and all shapes stay static.

Letters as in model/encoder.py; N = B x A matrices, one for each head of each row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.model.kernels.elementwise import Kernel, has_kernels, next_key, rows, threshold
from bertsmith.model.kernels.numbers import exp, hash32, largest, load, store, vectorized

EXCLUDED = np.float32(-1e30)  # added to a score that may not be seen; its exponential is 0
NO_MASK = np.zeros((0, 0, 0), np.bool_)


def queries_keys_values(*parts: Tensor) -> list[Tensor]:
    """The three, [..., H], of one tensor [..., 3 H], of queries and one [..., 2 H], or of three."""
    size = parts[-1].shape[-1] // (4 - len(parts))
    return [each for part in parts for each in part.split(size, dim=-1)]


def attention(
    q_BAQD: Tensor,
    k_BASD: Tensor,
    v_BASD: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    pieces: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with dropped probabilities, [B, A, Q, D].

    mask: bool [1 or B, 1, 1 or Q, S], True = seen; `causal` is for Q = S without a mask. Every
    query must see a key. `pieces` of `row_pieces` take a mask's place, for Q = S without causal or
    dropout. Compiled kernels where a CPU needs the gradient, else PyTorch's own attention.
    """
    if pieces is not None:
        return attention_in_pieces(q_BAQD, k_BASD, v_BASD, pieces)
    trained = torch.is_grad_enabled() and q_BAQD.requires_grad
    if not (has_kernels(q_BAQD) and (trained or dropout)):
        return F.scaled_dot_product_attention(
            q_BAQD, k_BASD, v_BASD, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
    if causal:
        length = q_BAQD.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    return _Attention.apply(q_BAQD, k_BASD, v_BASD, mask, dropout)


def has_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """True where PyTorch's FlashAttention runs: bf16 (so Ampere or newer), heads of 8n <= 256."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and dtype == torch.bfloat16 and head_size % 8 == 0 and head_size <= 256


def row_pieces(lengths_B: Tensor, length: int) -> Tensor:
    """int32 [2B + 1]: where the pieces of rows of `length` tokens begin, rows end to end.

    >>> row_pieces(torch.tensor([3, 4]), 4).tolist()
    [0, 3, 4, 8, 8]
    """
    rows = len(lengths_B)
    starts_B = torch.arange(0, rows * length, length, device=lengths_B.device)
    pieces = torch.stack((starts_B, starts_B + lengths_B), dim=1).flatten()
    return F.pad(pieces, (0, 1), value=rows * length).to(torch.int32)


def attention_in_pieces(q_BASD: Tensor, k_BASD: Tensor, v_BASD: Tensor, pieces: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each piece, [B, A, S, D]."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds; for a GPU alone

    batch, length = q_BASD.shape[0], q_BASD.shape[2]
    q_TAD, k_TAD, v_TAD = (x.transpose(1, 2).flatten(0, 1) for x in (q_BASD, k_BASD, v_BASD))
    context_TAD = varlen_attn(q_TAD, k_TAD, v_TAD, pieces, pieces, length, length)
    assert isinstance(context_TAD, Tensor)
    return context_TAD.unflatten(0, (batch, length)).transpose(1, 2)


class _Attention(Kernel):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float
    ) -> Tensor:
        batch, heads, queries, size = q.shape
        q_NQD, k_NSD, v_NSD = (x.reshape(batch * heads, *x.shape[2:]) for x in (q, k, v))
        p_NQS = torch.bmm(q_NQD, k_NSD.transpose(1, 2))
        ctx.shape, ctx.factor, ctx.scale = q.shape, 1 / (1 - rate), 1 / math.sqrt(size)
        allowed = NO_MASK if mask is None else mask[:, 0].numpy()
        key = np.uint32(next_key() if rate else 0)
        scale, limit = np.float32(ctx.scale), threshold(rate)
        softmax_rows(rows(p_NQS), scale, allowed, heads, queries, limit, key)
        ctx.dropped = rate > 0
        ctx.save_for_backward(q_NQD, k_NSD, v_NSD, p_NQS)
        context_NQD = torch.bmm(kept_probabilities(ctx, p_NQS), v_NSD)
        return context_NQD.view(batch, heads, queries, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q_NQD, k_NSD, v_NSD, p_NQS = ctx.saved_tensors
        gradient_NQD = gradients[0].reshape(q_NQD.shape)
        v_gradient = torch.bmm(kept_probabilities(ctx, p_NQS).transpose(1, 2), gradient_NQD)
        s_NQS = torch.bmm(gradient_NQD, v_NSD.transpose(1, 2))
        scale, factor = np.float32(ctx.scale), np.float32(ctx.factor)
        softmax_gradient_rows(rows(s_NQS), rows(p_NQS), scale, factor)
        q_gradient = torch.bmm(s_NQS, k_NSD).view(ctx.shape)
        k_gradient = torch.bmm(s_NQS.transpose(1, 2), q_NQD)
        k_gradient, v_gradient = (x.unflatten(0, ctx.shape[:2]) for x in (k_gradient, v_gradient))
        return q_gradient, k_gradient, v_gradient, None, None


def kept_probabilities(ctx: Any, p_NQS: Tensor) -> Tensor:
    """The probabilities that were not dropped, times `ctx.factor`, where `ctx.dropped`."""
    if not ctx.dropped:
        return p_NQS
    kept = torch.empty_like(p_NQS)
    kept_rows(rows(p_NQS), rows(kept), np.float32(ctx.factor))
    return kept


@vectorized
def softmax_rows(scores, scale, mask, heads, queries, limit, key):
    """Scores [N x Q, S] to probabilities in place, negative where dropped (drawn below `limit`).

    mask: bool [1 or B, 1 or Q, S], True = seen, or [0, 0, 0] for no mask.
    """
    columns = scores.shape[1]
    exponentials = np.empty(columns, np.float32)
    for row in range(len(scores)):
        line = scores[row]
        if len(mask):
            seen = mask[(row // (heads * queries)) % mask.shape[0], (row % queries) % mask.shape[1]]
            for column in range(columns):
                score = load(line[column]) * scale
                exponentials[column] = score if seen[column] else score + EXCLUDED
        else:
            for column in range(columns):
                exponentials[column] = load(line[column]) * scale
        top = largest(exponentials)
        total = np.float32(0)
        for column in range(columns):
            exponentials[column] = exp(exponentials[column] - top)
            total += exponentials[column]
        inverse = np.float32(1) / total
        if limit == 0:
            for column in range(columns):
                line[column] = store(exponentials[column] * inverse, line[column])
        else:
            row_key = hash32(np.uint32(row) ^ key)
            for column in range(columns):
                dropped = hash32(np.uint32(np.uint32(column) + row_key)) < limit
                probability = exponentials[column] * inverse
                line[column] = store(-probability if dropped else probability, line[column])


@vectorized
def kept_rows(probabilities, target, factor):
    """target = probabilities x factor; 0 where dropped."""
    for row in range(len(probabilities)):
        for column in range(probabilities.shape[1]):
            probability = load(probabilities[row, column])
            # not a number stays so
            kept = np.float32(0) if probability <= 0 else probability * factor
            target[row, column] = store(kept, probabilities[row, column])


@vectorized
def softmax_gradient_rows(gradient, probabilities, scale, factor):
    """Gradient by the kept probabilities [N x Q, S] to gradient by the unscaled scores, in place.

    With p the softmax and d the gradient by p (0 where dropped): p (d - sum of p d) scale.
    """
    columns = gradient.shape[1]
    p, products = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for row in range(len(gradient)):
        total = np.float32(0)
        for column in range(columns):
            probability = load(probabilities[row, column])
            kept = load(gradient[row, column]) * probability * factor
            p[column] = abs(probability)
            products[column] = kept if probability > 0 else np.float32(0)
        for column in range(columns):  # alone, see `vectorized`
            total += products[column]
        for column in range(columns):
            value = (products[column] - p[column] * total) * scale
            gradient[row, column] = store(value, gradient[row, column])
