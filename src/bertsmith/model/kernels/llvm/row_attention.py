"""Attention for training over rows without padding, where vectors multiply bf16.

Of one row and head the keys, or the values, are packed once; 32 queries at a time are multiplied,
and nothing is computed for padding, nor for blocks of keys that none of the queries sees. The
exponentials of the softmax, in bf16, are kept for the backward pass, negative where dropped, with
one over each query's sum.

The gradients by keys and values are products over queries. Their left operand would be a transpose
of L x L probabilities; so they are computed as their own transposes, whose left operand is one of
Q x D numbers.

Letters: T tokens, P queries of all rows, A heads, H hidden size, D = H / A; of one row and head L
keys, Q queries, W = L rounded up to a multiple of 32; of 32 queries V = the most keys that one of
them sees, rounded up likewise.
"""

from __future__ import annotations

import math

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.llvm.blocks import (
    COLUMNS,
    LANES,
    ROWS,
    address,
    block,
    transpose_words,
    zeros,
)
from bertsmith.model.kernels.llvm.packing import (
    PAIR,
    WORDS,
    pack_columns,
    pack_rows,
    packed_rows,
    wide,
)
from bertsmith.model.kernels.llvm.vector_rows import exponential_row
from bertsmith.model.kernels.numbers import hash32, load, store, vectorized

NUMBERS, HALVES = np.zeros(1, np.float32), np.zeros(1, np.uint16)  # for `zeros`
SIGN = np.uint16(0x8000)


@compiled
def head_rows(x, first, count, column, lines):
    """A head's rows first..first + count as the first of `lines` [32, D]."""
    head = lines.shape[1]
    for r in range(count):
        lines[r] = x[first + r, column : column + head]


@vectorized
def drop(exponentials, first, step, limit, key, kept):
    """Rows numbered first, first + step, ...: negative where dropped; `kept`: those are 0."""
    for r in range(len(exponentials)):
        line, row_key = exponentials[r], hash32(np.uint32(first + r * step) ^ key)
        for column in range(len(line)):
            dropped = hash32(np.uint32(np.uint32(column) + row_key)) < limit
            value = line[column]
            kept[r, column] = np.uint16(0) if dropped else value
            line[column] = value | SIGN if dropped else value


@vectorized
def scaled_rows(sums, factors, x, first, column):
    """Rows of sums times a factor each, as rows of a head from `first` on."""
    for r in range(len(factors)):
        line = x[first + r, column : column + sums.shape[1]]
        for d in range(sums.shape[1]):
            line[d] = store(sums[r, d] * factors[r], line[d])


@vectorized
def score_gradients(by_kept, exponentials, factors, factor, scale, by_scores):
    """Gradients [n, W] by the kept probabilities -> by the scores.

    With p = factors x exponentials and d the gradient by p (0 where dropped):
    p (d - sum of p d) scale.
    """
    columns = exponentials.shape[1]
    for r in range(len(exponentials)):
        line, gradient, total = exponentials[r], by_kept[r], np.float32(0)
        for column in range(columns):  # alone, see `vectorized`
            power = load(line[column])
            total += gradient[column] * power if power > 0 else np.float32(0)
        total *= factors[r] * factor
        for column in range(columns):
            power = load(line[column])
            d = gradient[column] * factor if power > 0 else np.float32(0)
            value = abs(power) * (factors[r] * scale) * (d - total)
            by_scores[r, column] = store(value, line[column])


@vectorized
def leave_out_dropped(exponentials, kept):
    """Rows of exponentials with 0 in place of the negative ones."""
    for r in range(len(exponentials)):
        for column in range(exponentials.shape[1]):
            value = exponentials[r, column]
            kept[r, column] = np.uint16(0) if value & SIGN else value


@compiled
def attend(q, kv, reads, starts, seen, heads, dropout, exponentials, factors, context):
    """softmax(q k^T / sqrt(D)) v, of bf16, into `context` [P, H].

    The first H columns of q are queries, the last 2 H of kv keys and values; both may be one array.
    Row t has the queries reads[t]:reads[t + 1], the keys and values starts[t]:starts[t + 1]. Of
    these a query sees the first seen[P]. `exponentials`: room for Q x W of each row and head, and
    8 x W of the longest more; of 32 queries it takes 32 x V. `factors` float32 [A, P]. `dropout`:
    limit, key, and the factor of what is kept; the limit 0 drops none.
    """
    size, (limit, key, kept_factor) = context.shape[1], dropout
    head, width = size // heads, wide(np.max(starts[1:] - starts[:-1]))
    scale = np.float32(1 / math.sqrt(head))
    keys, values = zeros(width * head // 2, 1, WORDS), packed_rows(width, head)
    lines, few = zeros(ROWS, head, HALVES), zeros(LANES, head, HALVES)
    nothing = zeros(1, head, HALVES)
    scores, sums = zeros(ROWS, width, NUMBERS), zeros(ROWS, head, NUMBERS)
    kept, panel, place = zeros(ROWS, width, HALVES), values.shape[1] * COLUMNS, 0
    for t in range(len(starts) - 1):
        first, length = starts[t], starts[t + 1] - starts[t]
        for number in range(heads):
            column, of_values = number * head, kv.shape[1] - size + number * head
            pack_columns(kv, first, length, of_values - size, few, keys)
            pack_rows(kv, first, length, of_values, nothing, values, 0)
            for start in range(reads[t], reads[t + 1], ROWS):
                count = min(ROWS, reads[t + 1] - start)
                most = np.max(seen[start : start + count])
                own, groups = wide(most), (most + 1) // 2
                head_rows(q, start, count, column, lines)
                a, step = address(lines, 0), 2 * head
                for n in range(0, own, COLUMNS):
                    b, c = address(keys, n * (head // 2)), address(scores, n)
                    block(lines, a, step, b, PAIR, c, 4 * width, head // 2, count)
                found = exponentials[place : place + count * own].reshape((count, own))
                for r in range(count):
                    row, target = address(scores, r * width), address(exponentials, place + r * own)
                    inverse = exponential_row(row, seen[start + r], scale, exponentials, target)
                    factors[number, start + r] = inverse
                    found[r, wide(seen[start + r]) :] = 0
                a, step = address(exponentials, place), 2 * own
                if limit:
                    drop(found, start * heads + number, heads, limit, key, kept)
                    a, step = address(kept, 0), 2 * width
                for d in range(0, head, COLUMNS):
                    b, c = address(values, d // COLUMNS * panel), address(sums, d)
                    block(lines, a, step, b, PAIR, c, 4 * head, groups, count)
                own_factors = factors[number, start : start + count] * kept_factor
                scaled_rows(sums, own_factors, context, start, column)
                place += count * own


@compiled
def attention_gradients(
    above, q, kv, reads, starts, seen, heads, dropout, exponentials, factors, by_q, by_kv
):
    """Gradients by q and kv, which may be one array, from that by the context; see `attend`."""
    size, (limit, _, kept_factor) = above.shape[1], dropout
    head, width = size // heads, wide(np.max(starts[1:] - starts[:-1]))
    room, scale = wide(np.max(reads[1:] - reads[:-1])), np.float32(1 / math.sqrt(head))
    values, keys = zeros(width * head // 2, 1, WORDS), packed_rows(width, head)
    by_contexts, queries = packed_rows(room, head), packed_rows(room, head)
    by_scores, kept = packed_rows(room, width), packed_rows(room, width)
    turned, panel = zeros(head, room // 2 + LANES, WORDS), keys.shape[1] * COLUMNS
    lines, few = zeros(ROWS, head, HALVES), zeros(LANES, head, HALVES)
    nothing = zeros(1, max(head, width), HALVES)
    gradients, sums = zeros(ROWS, width, NUMBERS), zeros(ROWS, head, NUMBERS)
    own_scores, own_kept = zeros(ROWS, width, HALVES), zeros(ROWS, width, HALVES)
    ones, place = np.ones(ROWS, np.float32), 0
    for t in range(len(starts) - 1):
        first, length = starts[t], starts[t + 1] - starts[t]
        pairs, panels = (reads[t + 1] - reads[t] + 1) // 2, wide(length) // COLUMNS
        for number in range(heads):
            column, of_values = number * head, kv.shape[1] - size + number * head
            of_keys = of_values - size
            pack_columns(kv, first, length, of_values, few, values)
            pack_rows(kv, first, length, of_keys, nothing, keys, 0)
            pack_rows(q, reads[t], reads[t + 1] - reads[t], column, nothing, queries, 0)
            for start in range(reads[t], reads[t + 1], ROWS):
                count, at = min(ROWS, reads[t + 1] - start), (start - reads[t]) // 2
                most = np.max(seen[start : start + count])
                own, groups = wide(most), (most + 1) // 2
                head_rows(above, start, count, column, lines)
                for n in range(0, own, COLUMNS):
                    b, c = address(values, n * (head // 2)), address(gradients, n)
                    a = address(lines, 0)
                    block(lines, a, 2 * head, b, PAIR, c, 4 * width, head // 2, count)
                found = exponentials[place : place + count * own].reshape((count, own))
                own_factors = factors[number, start : start + count]
                score_gradients(gradients, found, own_factors, kept_factor, scale, own_scores)
                for d in range(0, head, COLUMNS):
                    b, c = address(keys, d // COLUMNS * panel), address(sums, d)
                    a = address(own_scores, 0)
                    block(lines, a, 2 * width, b, PAIR, c, 4 * head, groups, count)
                scaled_rows(sums, ones[:count], by_q, start, column)
                scale_lines(lines, own_factors * kept_factor)
                pack_rows(lines, 0, count, 0, nothing, by_contexts, at)
                if limit:
                    leave_out_dropped(found, own_kept)
                    found = own_kept
                for packed, source in ((kept, found), (by_scores, own_scores)):
                    pack_rows(source, 0, count, 0, nothing, packed[: own // COLUMNS], at)
                    packed[own // COLUMNS : panels, at : at + (count + 1) // 2] = 0
                place += count * own
            row_seen = seen[reads[t] : reads[t + 1]]
            turn(by_contexts, pairs, turned)
            over_queries(lines, turned, row_seen, kept, by_kv, first, length, of_values)
            turn(queries, pairs, turned)
            over_queries(lines, turned, row_seen, by_scores, by_kv, first, length, of_keys)


@vectorized
def scale_lines(lines, factors):
    """Multiply each line by a factor, in place."""
    for r in range(len(factors)):
        for d in range(lines.shape[1]):
            lines[r, d] = store(load(lines[r, d]) * factors[r], lines[r, d])


@compiled
def turn(packed, count, turned):
    """`count` pairs of a head, uint32 [D / 32, N, 32], with rows for columns: [D, at least N]."""
    panels, pairs = packed.shape[0], packed.shape[1]
    for panel in range(panels):
        for n in range(0, count, LANES):
            for d in range(0, COLUMNS, LANES):
                source = address(packed, (panel * pairs + n) * COLUMNS + d)
                target = address(turned, (panel * COLUMNS + d) * turned.shape[1] + n)
                transpose_words(source, PAIR, target, 4 * turned.shape[1])


@compiled
def over_queries(like, turned, seen, packed, target, first, length, column):
    """turned [D, Q] times packed [Q, W], as a head's rows of L tokens; `seen` as in `attend`, [Q].

    The sum begins at the first 32 queries of which one sees the keys.
    """
    head, pairs, start = turned.shape[0], packed.shape[1], 0
    sums, lines = np.empty((head, COLUMNS), np.float32), np.empty((COLUMNS, head), np.float32)
    ones = np.ones(COLUMNS, np.float32)
    for n in range(0, length, COLUMNS):
        while start + ROWS < len(seen) and np.max(seen[start : start + ROWS]) <= n:
            start += ROWS
        a, b = address(turned, start // 2), address(packed, n * pairs + start // 2 * COLUMNS)
        count = (len(seen) - start + 1) // 2
        block(like, a, 4 * turned.shape[1], b, PAIR, address(sums, 0), PAIR, count, head)
        for d in range(0, head, LANES):
            for key in range(0, COLUMNS, LANES):
                source = address(sums, d * COLUMNS + key)
                transpose_words(source, PAIR, address(lines, key * head + d), 4 * head)
        scaled_rows(lines, ones[: min(COLUMNS, length - n)], target, first + n, column)
