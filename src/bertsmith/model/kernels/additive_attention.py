"""The steps of a GRU that attends to a source at every one of them (Bahdanau et al. 2015).

With s the state before a step, keys k_j and values h_j of the source's positions:
e_j = v . tanh(W s + k_j), a = softmax(e) over the real positions, c = sum_j a_j h_j
and a step of the GRU (recurrence.py) whose inputs have C c added.

Scores, softmax and sum are one compiled pass over the real positions of a row. The gradient
computes the hyperbolic tangents again: to keep those of all steps would take T x B x S x A numbers.

Letters: T steps, B rows, S positions of the source, H size of the state, G 3 H, A size of the keys,
E size of the values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.model.kernels.elementwise import Kernel, has_kernels, rows, vector
from bertsmith.model.kernels.numbers import ONE, exp, largest, load, store, tanh, vectorized
from bertsmith.model.kernels.recurrence import GRUTape, gru_step, over_steps


class Source(NamedTuple):
    """The source that is attended to."""

    keys_BSA: Tensor
    values_BSE: Tensor
    lengths_B: Tensor  # int64: real positions of each row


class Weights(NamedTuple):
    """The numbers of a step, in float32."""

    query_AH: Tensor  # W
    score_A: Tensor  # v
    context_GE: Tensor  # C
    gates_2HH: Tensor
    new_HH: Tensor
    bias_H: Tensor | None  # as in `gru_steps`


def attending_gru_steps(
    x_TBG: Tensor, h_BH: Tensor, source: Source, weights: Weights
) -> tuple[Tensor, Tensor, Tensor]:
    """States [T + 1, B, H] from `h_BH` on, contexts c [T, B, E], and a [T, B, S], no gradient."""
    if has_kernels(x_TBG):
        return _AttendingGRUSteps.apply(x_TBG, h_BH, *source, *weights)
    contexts, shares, states = [], [], [h_BH]
    for x_BG in x_TBG:
        context_BE, share_BS = attend(states[-1], source, weights)
        x_BG = x_BG + F.linear(context_BE, weights.context_GE)
        states.append(gru_step(x_BG, *weights[3:], states[-1]))
        contexts.append(context_BE)
        shares.append(share_BS.detach())
    return torch.stack(states), torch.stack(contexts), torch.stack(shares)


def attend(h_BH: Tensor, source: Source, weights: Weights) -> tuple[Tensor, Tensor]:
    """c [B, E] and a [B, S] of one step, by PyTorch's operators."""
    query_BA = F.linear(h_BH, weights.query_AH)
    scores_BS = (query_BA[:, None] + source.keys_BSA).tanh() @ weights.score_A
    positions_S = torch.arange(scores_BS.shape[1], device=scores_BS.device)
    is_padding_BS = positions_S >= source.lengths_B[:, None]
    share_BS = scores_BS.masked_fill(is_padding_BS, -torch.inf).softmax(dim=1)
    return (share_BS[:, None].to(source.values_BSE.dtype) @ source.values_BSE)[:, 0], share_BS


class _AttendingGRUSteps(Kernel):
    @staticmethod
    def forward(ctx: Any, x_TBG: Tensor, h_BH: Tensor, *parts: Any) -> tuple[Tensor, ...]:
        source, weights = Source(*parts[:3]), Weights(*parts[3:])
        dtype, (steps, count, _) = x_TBG.dtype, x_TBG.shape
        keys, values = (part.to(dtype).contiguous() for part in source[:2])
        query, context_t = weights.query_AH.to(dtype), weights.context_GE.to(dtype).t()
        queries = x_TBG.new_empty(steps, count, keys.shape[2])
        contexts = x_TBG.new_empty(steps, count, values.shape[2])
        shares = torch.empty(steps, count, keys.shape[1])
        tape = GRUTape.begin(x_TBG, *weights[3:], h_BH)
        read = rows(keys), rows(values), vector(weights.score_A), source.lengths_B.numpy()
        for step, x_BG in enumerate(x_TBG):
            torch.mm(tape.states[step], query.t(), out=queries[step])
            attend_rows(rows(queries[step]), *read, *map(rows, (shares[step], contexts[step])))
            tape.forward(step, torch.addmm(x_BG, contexts[step], context_t))
        ctx.save_for_backward(*source, *weights, keys, values, queries, contexts, shares, *tape)
        ctx.mark_non_differentiable(shares)
        return tape.states, contexts, shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        source, weights = Source(*ctx.saved_tensors[:3]), Weights(*ctx.saved_tensors[3:9])
        keys, values, queries, contexts, shares = ctx.saved_tensors[9:14]
        tape = GRUTape(*ctx.saved_tensors[14:])
        query, context = weights.query_AH.to(keys.dtype), weights.context_GE.to(keys.dtype)
        read = rows(keys), rows(values), vector(weights.score_A), source.lengths_B.numpy()
        d_x_TBG, d_operands_TBH = tape.gradients()
        d_contexts, d_queries = torch.empty_like(contexts), torch.empty_like(queries)
        d_keys = torch.zeros_like(keys, dtype=torch.float32)
        d_score = torch.zeros_like(weights.score_A, dtype=torch.float32)
        by_states, by_contexts = gradients[:2]
        d_h_BH = by_states[-1]
        for step in reversed(range(len(d_x_TBG))):
            d_before_BH = tape.backward(step, d_h_BH, d_x_TBG, d_operands_TBH)
            torch.addmm(by_contexts[step], d_x_TBG[step], context, out=d_contexts[step])
            given = rows(d_contexts[step]), rows(queries[step]), *read, rows(shares[step])
            sums = rows(d_queries[step]), rows(d_keys), rows(d_score)[0]
            attend_gradient_rows(*given, *sums)
            d_h_BH = d_before_BH.addmm_(d_queries[step], query).add_(by_states[step])
        # [B, S, T] @ [B, T, E]
        d_values = shares.permute(1, 2, 0).to(values.dtype) @ d_contexts.transpose(0, 1)
        return (
            d_x_TBG,
            d_h_BH,
            d_keys.to(source.keys_BSA.dtype),
            d_values.to(source.values_BSE.dtype),
            None,
            over_steps(d_queries, tape.states[:-1]),
            d_score,
            over_steps(d_x_TBG, contexts),
            *tape.weight_gradients(d_x_TBG, d_operands_TBH),
        )


@vectorized
def attend_rows(queries, keys, values, score, lengths, shares, contexts):
    """Queries [B, A], keys [B x S, A], values [B x S, E] -> a [B, S] and c [B, E]."""
    positions = shares.shape[1]
    context = np.empty(contexts.shape[1], np.float32)
    for row in range(len(queries)):
        query, share, count = queries[row], shares[row], lengths[row]
        for position in range(count):
            key, total = keys[row * positions + position], np.float32(0)
            for column in range(len(query)):
                total += score[column] * tanh(load(query[column]) + load(key[column]))
            share[position] = total
        top, total = largest(share[:count]), np.float32(0)
        for position in range(count):
            share[position] = exp(share[position] - top)
            total += share[position]
        context[:], share[count:] = np.float32(0), np.float32(0)
        for position in range(count):
            share[position] /= total
            value, part = values[row * positions + position], share[position]
            for column in range(len(context)):
                context[column] += part * load(value[column])
        for column in range(len(context)):
            contexts[row, column] = store(context[column], contexts[row, column])


@vectorized
def attend_gradient_rows(
    d_contexts, queries, keys, values, score, lengths, shares, d_queries, d_keys, d_score
):
    """The gradient by c -> by queries; those by keys and by `score` are added to."""
    positions, size = shares.shape[1], queries.shape[1]
    d_share = np.empty(positions, np.float32)
    d_query, bent = np.empty(size, np.float32), np.empty(size, np.float32)
    for row in range(len(queries)):
        query, d_context, share, count = queries[row], d_contexts[row], shares[row], lengths[row]
        mean = np.float32(0)
        for position in range(count):
            value, total = values[row * positions + position], np.float32(0)
            for column in range(len(value)):
                total += load(d_context[column]) * load(value[column])
            d_share[position] = total
            mean += share[position] * total
        d_query[:] = np.float32(0)
        for position in range(count):
            place = row * positions + position
            key, d_key = keys[place], d_keys[place]
            d = share[position] * (d_share[position] - mean)
            for column in range(size):
                bent[column] = tanh(load(query[column]) + load(key[column]))
            for column in range(size):
                d_score[column] += d * bent[column]
            for column in range(size):
                bent[column] = d * score[column] * (ONE - bent[column] * bent[column])
            for column in range(size):
                d_key[column] += bent[column]
                d_query[column] += bent[column]
        for column in range(size):
            d_queries[row, column] = store(d_query[column], d_queries[row, column])
