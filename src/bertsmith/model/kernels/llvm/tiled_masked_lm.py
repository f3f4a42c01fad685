"""The masked-LM loss with its gradient on a CPU that multiplies bf16 in tiles (AMX).

Logits, the largest matrix of a small model's step, never leave the second cache: they are computed
twice, 256 pieces of the vocabulary at a time. The first time gives every position the sum of its
exponentials. The second time they become their own gradient, which is multiplied at once with the
table and with the hidden states. PyTorch's three products with all logits take 1.2 to 2.6 times as
long (docs/design/lab.md).

A tile's rows are lines of the cache, 32 numbers of bf16. A left operand may lie as it is, a right
one is packed (packing.py); see `add_block` in blocks.py.

Letters: N masked positions (padded to a multiple of 32), V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import Kernel, rows, vector
from bertsmith.model.kernels.llvm.blocks import (
    ADDRESS,
    COLUMNS,
    INTEGERS,
    LANES,
    LINE,
    ROWS,
    WORD,
    add_block,
    address,
    begin,
    emitted,
    end,
    in_tiles,
    int64,
    load_row,
    store_transposed,
    zeros,
)
from bertsmith.model.kernels.llvm.packing import (
    PAIR,
    WORDS,
    pack_columns,
    pack_rows,
    packed_rows,
)
from bertsmith.model.kernels.llvm.vector_rows import (
    HALVES,
    add_powers,
    in_powers,
    powers_row,
    round_block,
)
from bertsmith.model.kernels.numbers import LOG2_E, load, store

PIECES = 256  # of the vocabulary at once
LOGITS = 1 << 17  # of so many the float32 stay in the second cache
LOWEST, LARGEST = np.float32(-1e30), np.float32(100)  # of exponents of two
LN_2 = math.log(2)


def has_tiled_loss(hidden_NH: Tensor) -> bool:
    """True for bf16 on a CPU that multiplies it in tiles, and for whole tiles."""
    fits = hidden_NH.dtype == torch.bfloat16 and hidden_NH.shape[1] % COLUMNS == 0
    here = hidden_NH.device.type == "cpu" and in_tiles("uint16")
    return fits and here and len(hidden_NH) > 0


class TiledMaskedLMLoss(Kernel):
    """`masked_lm_loss` of bf16 hidden states. A table that is not bf16 is copied."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        hidden_NH, table_VH, bias_V, labels_N, weights_N = given
        count, size = hidden_NH.shape
        hidden = torch.zeros(-(-count // ROWS) * ROWS, size, dtype=torch.bfloat16)
        hidden[:count] = hidden_NH
        table, labels = table_VH.bfloat16().contiguous(), labels_N.numpy()
        assert labels.min() >= 0 and labels.max() < len(table)  # the loops look at no bounds
        found = sums_of_exponentials(rows(hidden), rows(table), vector(bias_V), labels)
        ctx.logs, ctx.own, _ = found
        ctx.count, ctx.table_type = count, table_VH.dtype
        ctx.save_for_backward(hidden, table, bias_V, labels_N, weights_N)
        logs, own, tops = (line[:count].astype(np.float64) for line in found)
        loss, correct = LN_2 * (weights_N.numpy() @ (logs - own)), (own == tops).sum()
        ctx.mark_non_differentiable(number := torch.tensor(correct))
        return torch.tensor(loss, dtype=torch.float32), number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, table, bias_V, labels_N, weights_N = ctx.saved_tensors
        by_hidden, by_table = torch.zeros(hidden.shape), torch.empty_like(table)
        by_bias, weights = torch.empty(len(table)), np.zeros(len(hidden), np.float32)
        weights[: ctx.count] = weights_N * gradients[0]
        masked_lm_gradients(
            *(rows(hidden), rows(table), vector(bias_V), labels_N.numpy()),
            *(weights, ctx.logs, ctx.own),
            (by_hidden.numpy(), rows(by_table), by_bias.numpy()),
        )
        by_hidden = by_hidden[: ctx.count].bfloat16()
        return by_hidden, by_table.to(ctx.table_type), by_bias.to(bias_V.dtype), None, None


@emitted(types.void, ADDRESS, WORD, ADDRESS, WORD)
def transpose_numbers(builder, source, source_step, target, target_step):
    """32 rows of 16 numbers of bf16, rows for columns: 16 rows of 32."""
    vectors, sixteen = [], ir.Constant(INTEGERS, [16] * LANES)
    for k in range(LANES):
        upper, lower = (
            builder.zext(load_row(builder, source, source_step, int64(row), HALVES), INTEGERS)
            for row in (2 * k, 2 * k + 1)
        )
        vectors.append(builder.or_(upper, builder.shl(lower, sixteen)))
    store_transposed(builder, vectors, target, target_step)


@compiled
def pieces_at_once(positions):
    """Pieces whose logits at so many positions stay in the cache, a multiple of 32."""
    return max(ROWS, min(PIECES, LOGITS // positions // ROWS * ROWS))


@compiled
def _logits(table, first, count, tail, packed, logits):
    """logits float32 [P, N] of the pieces first..first + count; `tail` [32, H] to work in."""
    size, positions = table.shape[1], logits.shape[1]
    for v in range(0, count, ROWS):
        a = address(table, (first + v) * size)
        if v + ROWS > count:  # tiles read 32 rows
            tail[:] = 0
            for r in range(count - v):
                tail[r] = table[first + v + r]
            a = address(tail, 0)
        for n in range(0, positions, COLUMNS):
            b, c = address(packed, n * (size // 2)), address(logits, v * positions + n)
            a_steps = 2 * size, LINE
            add_block(a, a_steps, b, PAIR, c, 4 * positions, size // 32, True)


@compiled
def sums_of_exponentials(hidden, table, bias, labels):
    """(log2 of each position's sum of exponentials, its label's logit, its largest): float32 [N].

    Of hidden [N, H] and table [V, H], bf16; all in units of log 2. A sum is taken relative to the
    position's largest logit among the first pieces; where a later one is too far above for float32,
    again relative to that.
    """
    (positions, size), pieces, part = hidden.shape, len(table), pieces_at_once(len(hidden))
    own, by_piece = np.zeros(positions, np.float32), np.argsort(labels)
    starts, totals = np.full(positions, LOWEST), np.zeros(positions, np.float32)
    tops, shifts = np.empty(positions, np.float32), np.zeros(part, np.float32)
    by_columns = zeros(positions // COLUMNS * (size // 2), COLUMNS, WORDS)
    logits, tail = zeros(part, positions, shifts), zeros(ROWS, size, hidden)
    pack_columns(hidden, 0, positions, 0, tail, by_columns)
    begin(hidden)
    for attempt in range(3):
        tops[:], totals[:] = LOWEST, 0
        place, last = 0, pieces if attempt else 1  # first it is the largest that is looked for
        for first in range(0, last, part):
            count = min(part, pieces - first)
            _logits(table, first, count, tail, by_columns, logits)
            for v in range(count):
                shifts[v] = load(bias[first + v]) * LOG2_E
            while place < len(labels) and labels[by_piece[place]] < first + count:
                n = by_piece[place]
                v = labels[n] - first
                own[n] = in_powers(logits[v, n], shifts[v])
                place += 1
            for n in range(0, positions, LANES):
                add_powers(
                    *(address(logits, n), 4 * positions, address(shifts, 0), count),
                    *(address(starts, n), address(tops, n), address(totals, n)),
                )
        if attempt and (tops - starts).max() < LARGEST:
            break
        starts[:] = tops
    end(hidden)
    return np.log2(totals) + starts, own, tops


@compiled
def masked_lm_gradients(hidden, table, bias, labels, weights, logs, own, gradients):
    """Write the gradients of the summed loss: by hidden, float32, by table, bf16, and by bias.

    `weights` float32 [N] are 0 behind the positions that have labels.
    """
    hidden_gradient, table_gradient, bias_gradient = gradients
    (positions, size), pieces, part = hidden.shape, len(table), pieces_at_once(len(hidden))
    blocks = part // ROWS
    by_columns = zeros(positions // COLUMNS * (size // 2), COLUMNS, WORDS)
    by_rows = packed_rows(positions, size)
    logits, tail = zeros(part, positions, logs), zeros(ROWS, size, hidden)
    nothing = zeros(1, size, hidden)
    pack_columns(hidden, 0, positions, 0, tail, by_columns)
    pack_rows(hidden, 0, positions, 0, nothing, by_rows, 0)
    softmax, sums = zeros(part, positions, hidden), zeros(ROWS, COLUMNS, logs)
    turned = zeros(positions * blocks, 32, hidden)  # [N / 32, blocks, 32, 32]
    packed = packed_rows(part, size)
    place, by_piece = 0, np.argsort(labels)
    begin(hidden)
    for first in range(0, pieces, part):
        count = min(part, pieces - first)
        _logits(table, first, count, tail, by_columns, logits)
        for v in range(count):
            row, target = address(logits, v * positions), address(softmax, v * positions)
            bias_gradient[first + v] = powers_row(
                *(row, load(bias[first + v]) * LOG2_E, address(logs, 0), address(weights, 0)),
                *(softmax, target, positions),
            )
        softmax[count:] = 0
        while place < len(labels) and labels[by_piece[place]] < first + count:
            n = by_piece[place]
            v = labels[n] - first
            share = (np.float32(2) ** (own[n] - logs[n]) - np.float32(1)) * weights[n]
            softmax[v, n] = store(share, softmax[v, n])
            bias_gradient[labels[n]] -= weights[n]
            place += 1
        # by the table: softmax [P, N] hidden [N, H]
        for v in range(0, count, ROWS):
            a, c = address(softmax, v * positions), address(sums, 0)
            a_steps, steps = (2 * positions, LINE), positions // 32
            for h in range(0, size, COLUMNS):
                b = address(by_rows, h // COLUMNS * by_rows.shape[1] * COLUMNS)
                add_block(a, a_steps, b, PAIR, c, PAIR, steps, True)
                target = address(table_gradient, (first + v) * size + h)
                round_block(c, min(ROWS, count - v), table_gradient, target, 2 * size)
        # by the hidden states: softmax^T [N, P] table [P, H]
        pack_rows(table, first, count, 0, nothing, packed, 0)
        packed[:, (count + 1) // 2 :] = 0
        for block in range(blocks):
            for n in range(0, positions, LANES):
                source = address(softmax, block * ROWS * positions + n)
                target = ((n // ROWS * blocks + block) * ROWS + n % ROWS) * 32
                transpose_numbers(source, 2 * positions, address(turned, target), LINE)
        for h in range(0, size, COLUMNS):
            b = address(packed, h // COLUMNS * packed.shape[1] * COLUMNS)
            for n in range(0, positions, ROWS):
                a, c = address(turned, n * part), address(hidden_gradient, n * size + h)
                a_steps = LINE, ROWS * LINE
                add_block(a, a_steps, b, PAIR, c, 4 * size, blocks, first == 0)
    end(hidden)
