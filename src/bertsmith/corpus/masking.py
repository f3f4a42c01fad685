"""Masked positions of a batch (paper section 3.1; `create_masked_lm_predictions` of Google's
`create_pretraining_data.py`), drawn anew for every example of every epoch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.draws import between, derive, uniform

DERIVE_CHOICE, DERIVE_REPLACEMENT = 1, 2  # keys under the example's; 0 is pairs.py's


class MaskRules(NamedTuple):
    """What holds for all rows. The rest of `mask_share + keep_share` is replaced at random."""

    continuation: np.ndarray  # bool [V], pieces that continue a word
    whole_word: bool
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
        chosen = _choose(ids, lengths[row], counts[row], derive(keys[row], DERIVE_CHOICE), rules)
        key = derive(keys[row], DERIVE_REPLACEMENT)
        slot = 0
        for position in range(lengths[row]):
            if not chosen[position]:
                continue
            positions[row, slot] = position
            labels[row, slot] = ids[position]
            weights[row, slot] = 1.0
            slot += 1
            share = uniform(key, 2 * position)
            if share < rules.mask_share:
                ids[position] = rules.mask_id
            elif share >= rules.mask_share + rules.keep_share:
                ids[position] = between(key, 2 * position + 1, 0, len(rules.continuation) - 1)


@compiled
def _choose(ids, length, count, key, rules):
    """bool [length]: true at `count` positions (fewer when no set of a size that fits is left).

    Positions are chosen in sets: single tokens, or whole words. As in the original a continuation
    joins the set before it, wherever that is: a B that begins within a word goes with A's last.
    """
    candidates = np.empty(length, np.int32)
    starts = np.empty(length + 1, np.int32)  # set k is candidates[starts[k]:starts[k + 1]]
    num_candidates = num_sets = 0
    for position in range(length):
        token = ids[position]
        if token == rules.cls_id or token == rules.sep_id:
            continue
        if not (rules.whole_word and num_sets > 0 and rules.continuation[token]):
            starts[num_sets] = num_candidates
            num_sets += 1
        candidates[num_candidates] = position
        num_candidates += 1
    starts[num_sets] = num_candidates

    chosen = np.zeros(length, np.bool_)
    order = np.arange(num_sets)
    num_chosen = 0
    for k in range(num_sets):  # shuffle only as far as sets are needed
        if num_chosen == count:
            break
        other = between(key, k, k, num_sets - 1)
        order[k], order[other] = order[other], order[k]
        begin, end = starts[order[k]], starts[order[k] + 1]
        if num_chosen + end - begin > count:
            continue
        for candidate in candidates[begin:end]:
            chosen[candidate] = True
        num_chosen += end - begin
    return chosen
