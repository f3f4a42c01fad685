"""Masked positions: 15% of a row's tokens, drawn anew for every example of every epoch.

Of the chosen tokens 80% become [MASK], 10% a random piece, 10% stay (paper section 3.1,
`create_masked_lm_predictions` of Google's `create_pretraining_data.py`). They are chosen one by
one, as whole words, or as spans of words (SpanBERT, arXiv 1907.10529, section 3.1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.rng import KEY_CHOICE, KEY_REPLACEMENT, between, fold_in, uniform
from bertsmith.corpus.examples.settings import Masking

MASKINGS: dict[Masking, int] = {"token": 0, "word": 1, "span": 2}
TOKEN, SPAN = MASKINGS["token"], MASKINGS["span"]
SPAN_STOP, LONGEST_SPAN = 0.2, 10  # words: geometric, 3.8 on average


class MaskRules(NamedTuple):
    """Rules for all rows: a chosen token that draws less than `mask_replace_prob` becomes [MASK],
    one that draws `random_from` or more a random piece."""

    counts: np.ndarray  # int32 [S + 1], positions to mask of a row of each length
    continuation: np.ndarray  # bool [V], pieces that continue a word
    masking: int  # of `MASKINGS`
    mask_replace_prob: float
    random_from: float
    mask_id: int
    cls_id: int
    sep_id: int


def predictions_per_length(length: int, rate: float, maximum: int) -> np.ndarray:
    """int32 [length + 1]: positions to mask in a row of so many tokens, [CLS] and [SEP] counted.

    >>> counts = predictions_per_length(512, 0.15, 77)
    >>> counts[[3, 10, 30, 128, 512]].tolist()
    [1, 2, 4, 19, 77]
    """
    counts = [max(1, round(tokens * rate)) for tokens in range(length + 1)]
    return np.minimum(counts, maximum).astype(np.int32)


@compiled
def mask_rows(input_ids, lengths, keys, rules, predictions):
    """Choose positions of each row, put them into `predictions` (given as 0), replace their ids.

    input_ids: int32 [B, S], changed in place; lengths: int32 [B]; keys: uint64 [B], of the examples
    predictions: the masked positions, labels and weights of a `PretrainingBatch`
    """
    positions, labels, weights = predictions
    for row in range(len(lengths)):
        ids, length = input_ids[row], lengths[row]
        heads = choose(ids, length, rules.counts[length], fold_in(keys[row], KEY_CHOICE), rules)
        key = fold_in(keys[row], KEY_REPLACEMENT)
        slot = 0
        for position in range(length):
            if heads[position] < 0:
                continue
            positions[row, slot] = position
            labels[row, slot] = ids[position]
            weights[row, slot] = 1.0
            slot += 1
            share = uniform(key, 2 * heads[position])
            if share < rules.mask_replace_prob:  # 80%
                ids[position] = rules.mask_id
            elif share >= rules.random_from:  # 10%: any piece; 10%: the same
                ids[position] = between(key, 2 * position + 1, 0, len(rules.continuation) - 1)


@compiled
def choose(ids, length, count, key, rules):
    """Choose `count` positions of a row, or fewer when no set that fits is left: at least one,
    a token of a set where none fits.

    A set is a token or a whole word; a span is a number of sets from a random one on, up to a set
    that is taken or does not fit, or a special token.

    Returns int32 [length]: -1, or, at a chosen position, the one whose draw decides between
    [MASK], a random piece and the same: itself, or the first of its span.
    """
    positions, starts, num_sets = candidate_sets(ids, length, rules)
    heads = np.full(length, -1, np.int32)
    order = np.arange(num_sets)
    num_chosen = 0
    for k in range(num_sets):  # shuffle only as far as sets are needed
        if num_chosen == count:
            break
        other = between(key, k, k, num_sets - 1)
        order[k], order[other] = order[other], order[k]
        first = order[k]
        head = positions[starts[first]]
        words = span_length(uniform(key, length + k)) if rules.masking == SPAN else 1
        for number in range(first, min(first + words, num_sets)):
            start, stop = starts[number], starts[number + 1]
            is_apart = number > first and positions[start] != positions[start - 1] + 1
            if is_apart or heads[positions[start]] >= 0 or num_chosen + stop - start > count:
                break
            for position in positions[start:stop]:
                heads[position] = head if rules.masking == SPAN else position
            num_chosen += stop - start
    if num_chosen == 0 and num_sets > 0:
        position = positions[between(key, 2 * length, 0, starts[num_sets] - 1)]
        heads[position] = position
    return heads


@compiled
def candidate_sets(ids, length, rules):
    """(positions, starts, number of sets): set k is positions[starts[k]:starts[k + 1]].

    As in the original a B that begins within a word goes with A's last word.
    """
    positions = np.empty(length, np.int32)
    starts = np.empty(length + 1, np.int32)
    num_positions = num_sets = 0
    for position in range(length):
        token = ids[position]
        if token == rules.cls_id or token == rules.sep_id:
            continue
        joins = rules.masking != TOKEN and num_sets > 0 and rules.continuation[token]
        if not joins:
            starts[num_sets] = num_positions
            num_sets += 1
        positions[num_positions] = position
        num_positions += 1
    starts[num_sets] = num_positions
    return positions, starts, num_sets


@compiled
def span_length(share):
    """Words of a span: geometric with p = 0.2, up to 10, from a number uniform in [0, 1).

    >>> [span_length(share) for share in (0.0, 0.22, 0.23, 0.5, 0.99999)]
    [1, 1, 2, 3, 10]
    """
    go_on = 1.0 - SPAN_STOP
    return 1 + int(np.log(1.0 - share * (1.0 - go_on**LONGEST_SPAN)) / np.log(go_on))
