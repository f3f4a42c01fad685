"""Masked positions of a batch, drawn anew for every example of every epoch.

Tokens and words: paper section 3.1, `create_masked_lm_predictions` of Google's
`create_pretraining_data.py`. Spans: SpanBERT (arXiv 1907.10529, section 3.1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.corpus.examples.rng import between, derive, uniform
from bertsmith.corpus.examples.settings import Masking

DERIVE_CHOICE, DERIVE_REPLACEMENT = 1, 2  # keys under the example's; the others are walk.py's
MASKINGS: dict[Masking, int] = {"token": 0, "word": 1, "span": 2}
TOKEN, SPAN = MASKINGS["token"], MASKINGS["span"]
SPAN_STOP, LONGEST_SPAN = 0.2, 10  # words: geometric, 3.8 on average


class MaskRules(NamedTuple):
    """What holds for all rows. The rest of `mask_share + keep_share` is replaced at random."""

    continuation: np.ndarray  # bool [V], pieces that continue a word
    masking: int  # of `MASKINGS`
    mask_share: float
    keep_share: float
    mask_id: int
    cls_id: int
    sep_id: int


def predictions_per_length(length: int, rate: float, maximum: int) -> np.ndarray:
    """How many positions a row of 0..length tokens masks: int32 [length + 1].

    [CLS] and [SEP] count towards the length; halves are rounded to the even number.

    >>> counts = predictions_per_length(512, 0.15, 77)
    >>> counts[[3, 10, 30, 128, 512]].tolist()
    [1, 2, 4, 19, 77]
    """
    counts = [min(maximum, max(1, round(tokens * rate))) for tokens in range(length + 1)]
    return np.array(counts, np.int32)


@compiled
def mask_rows(input_ids, lengths, counts, keys, rules, positions, labels, weights):
    """Choose `counts[row]` positions of each row, put them into the outputs, replace their ids.

    input_ids: int32 [B, S], changed in place; lengths, counts: int32 [B]; keys: uint64 [B].
    positions, labels: int32 [B, P] and weights: float32 [B, P], given as zeros; positions ascend.
    """
    for row in range(len(lengths)):
        ids = input_ids[row]
        heads = _choose(ids, lengths[row], counts[row], derive(keys[row], DERIVE_CHOICE), rules)
        key = derive(keys[row], DERIVE_REPLACEMENT)
        slot = 0
        for position in range(lengths[row]):
            if heads[position] < 0:
                continue
            positions[row, slot] = position
            labels[row, slot] = ids[position]
            weights[row, slot] = 1.0
            slot += 1
            share = uniform(key, 2 * heads[position])
            if share < rules.mask_share:
                ids[position] = rules.mask_id
            elif share >= rules.mask_share + rules.keep_share:
                ids[position] = between(key, 2 * position + 1, 0, len(rules.continuation) - 1)


@compiled
def span_length(share):
    """Words of a span: geometric with p = 0.2, drawn again above 10.

    share: uniform in [0, 1), of which this is the inverse of the distribution function.

    >>> [span_length(share) for share in (0.0, 0.22, 0.23, 0.5, 0.99999)]
    [1, 1, 2, 3, 10]
    """
    go_on = 1.0 - SPAN_STOP
    return 1 + int(np.log(1.0 - share * (1.0 - go_on**LONGEST_SPAN)) / np.log(go_on))


@compiled
def _choose(ids, length, count, key, rules):
    """int32 [length]: -1, and at `count` positions (fewer when no set that fits is left) the
    position whose draw says what becomes of this one: itself, or the first of its span.

    Positions are chosen in sets: single tokens, or whole words. As in the original a continuation
    joins the set before it, wherever that is: a B that begins within a word goes with A's last.
    A span is a run of sets from a random one on, until its length, a set that is taken or does not
    fit, or a special token.
    """
    candidates, starts, num_sets = _sets(ids, length, rules)
    heads = np.full(length, -1, np.int32)
    order = np.arange(num_sets)
    num_chosen = 0
    for k in range(num_sets):  # shuffle only as far as sets are needed
        if num_chosen == count:
            break
        other = between(key, k, k, num_sets - 1)
        order[k], order[other] = order[other], order[k]
        first = order[k]
        head = candidates[starts[first]]
        words = span_length(uniform(key, length + k)) if rules.masking == SPAN else 1
        for number in range(first, min(first + words, num_sets)):
            begin, end = starts[number], starts[number + 1]
            is_apart = number > first and candidates[begin] != candidates[begin - 1] + 1
            if is_apart or heads[candidates[begin]] >= 0 or num_chosen + end - begin > count:
                break
            for place in range(begin, end):
                heads[candidates[place]] = head if rules.masking == SPAN else candidates[place]
            num_chosen += end - begin
    return heads


@compiled
def _sets(ids, length, rules):
    """(candidates, starts, number of sets): set k is candidates[starts[k]:starts[k + 1]]."""
    candidates = np.empty(length, np.int32)
    starts = np.empty(length + 1, np.int32)
    num_candidates = num_sets = 0
    for position in range(length):
        token = ids[position]
        if token == rules.cls_id or token == rules.sep_id:
            continue
        joins = rules.masking != TOKEN and num_sets > 0 and rules.continuation[token]
        if not joins:
            starts[num_sets] = num_candidates
            num_sets += 1
        candidates[num_candidates] = position
        num_candidates += 1
    starts[num_sets] = num_candidates
    return candidates, starts, num_sets
