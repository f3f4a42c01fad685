"""Attention over rows without padding against the formula in float64."""

import math

import numpy as np
import pytest
import torch

from bertsmith.model.kernels.elementwise import seed_dropout
from bertsmith.model.kernels.unpadded import RowAttention, has_row_attention

from ..harness import assert_is_share, assert_near

pytestmark = pytest.mark.skipif(
    not has_row_attention(torch.bfloat16, 32), reason="this processor's vectors multiply no bf16"
)


def formula(parts, lengths, queries, heads, kept=None, seen=None):
    """softmax(q k^T / sqrt(D)) v of each row; `kept`: factors of its probabilities [A, Q, L].

    `seen` [P]: how many keys a query sees; None: all of its row.
    """
    sizes, found = (queries, lengths, lengths), []
    by_row = (part.split(own.tolist()) for part, own in zip(parts, sizes, strict=True))
    for row, three in enumerate(zip(*by_row, strict=True)):
        q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in three)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        if seen is not None:
            own = torch.from_numpy(seen).split(queries.tolist())[row]
            scores = scores.masked_fill(torch.arange(k.shape[1]) >= own[:, None], -torch.inf)
        p = scores.softmax(dim=2)
        p = p if kept is None else p * kept[row]
        found.append((p @ v).transpose(0, 1).flatten(1))
    return torch.cat(found)


def given(lengths, queries, size):
    """q, k, v in bf16, and the gradient of the context."""
    generator = torch.Generator().manual_seed(int(lengths.sum()))
    counts = queries.sum(), lengths.sum(), lengths.sum(), queries.sum()
    return [torch.randn(int(n), size, generator=generator).bfloat16() for n in counts]


def outcome(function, parts, above):
    """The context, and the gradients by the parts."""
    leaves = [part.clone().requires_grad_() for part in parts]
    context = function(*leaves)
    context.backward(above.to(context.dtype))
    return [context.detach(), *(leaf.grad for leaf in leaves)]


def of_parts(lengths, queries, heads, rate=0.0, seen=None):
    """Attention of q, k and v; keys and values in one tensor."""
    how = lengths, queries, np.repeat(lengths, queries) if seen is None else seen, heads, rate
    return lambda q, *kv: RowAttention.apply(q, torch.cat(kv, dim=1), *how)


def of_one(lengths, heads, rate=0.0):
    """Attention of q, k and v in one tensor."""
    how = lengths, lengths, np.repeat(lengths, lengths), heads, rate
    return lambda *qkv: RowAttention.apply(torch.cat(qkv, dim=1), *how)


CASES = [
    ([1], [1], 1, 32),
    ([7, 33, 1, 40, 32], [7, 33, 1, 40, 32], 2, 32),  # odd ones, and a whole block
    ([64, 95, 130], [64, 95, 130], 3, 64),
    ([5, 64, 100], [2, 9, 33], 2, 96),  # fewer queries than keys
    ([5, 7, 40], [0, 3, 0], 1, 32),  # of some rows none is read
]


@pytest.mark.parametrize(("lengths", "queries", "heads", "head"), CASES, ids=str)
def test_context_and_gradients_are_those_of_the_formula(lengths, queries, heads, head):
    lengths, queries = np.array(lengths), np.array(queries)
    *parts, above = given(lengths, queries, heads * head)
    found = outcome(of_parts(lengths, queries, heads), parts, above)
    exact = [part.double() for part in parts]
    wanted = outcome(lambda *qkv: formula(qkv, lengths, queries, heads), exact, above)
    if lengths.max() == 1:  # one key has the probability 1 whatever the scores: no gradient
        found, wanted = (one[::3] for one in (found, wanted))
    assert_near(found, wanted, 5e-3)  # numbers of 8 bits; 0.002 to 0.003 was seen


@pytest.mark.parametrize(("lengths", "queries", "heads", "head"), CASES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_may_see_the_first_keys_alone(lengths, queries, heads, head, causal):
    """As many as stand before it where each key has a query, else any number in any order."""
    lengths, queries = np.array(lengths), np.array(queries)
    pairs = list(zip(lengths.tolist(), queries.tolist(), strict=True))
    draw = np.random.default_rng(0).integers
    seen = np.concatenate(
        [np.arange(q) + 1 if causal and q == k else draw(1, k, q, endpoint=True) for k, q in pairs]
    )
    *parts, above = given(lengths, queries, heads * head)
    found = outcome(of_parts(lengths, queries, heads, seen=seen), parts, above)
    exact = [part.double() for part in parts]
    wanted = outcome(lambda *qkv: formula(qkv, lengths, queries, heads, seen=seen), exact, above)
    if lengths.max() == 1:
        found, wanted = (one[::3] for one in (found, wanted))
    assert_near(found, wanted, 5e-3)


def test_one_tensor_of_all_three_is_the_same():
    lengths = np.array([7, 40])
    *parts, above = given(lengths, lengths, 64)
    apart, whole = (
        outcome(how, parts, above) for how in (of_parts(lengths, lengths, 2), of_one(lengths, 2))
    )
    for found, wanted in zip(whole, apart, strict=True):
        assert torch.equal(found, wanted)


def test_a_row_is_the_same_in_any_company():
    lengths = np.array([21, 40, 9])
    *parts, above = given(lengths, lengths, 64)
    found = outcome(of_one(lengths, 2), parts, above)
    own = [part[21:61] for part in parts]
    wanted = outcome(of_one(np.array([40]), 2), own, above[21:61])
    for among, alone in zip(found, wanted, strict=True):
        assert torch.equal(among[21:61], alone)


@pytest.mark.parametrize(("queries", "head"), [([50, 71], 32), ([9, 33], 96)], ids=str)
def test_dropout_leaves_probabilities_out_and_scales_the_others(queries, head):
    """Those that were left out are negative in what is saved: the formula is given the same."""
    lengths, queries, heads, rate = np.array([50, 71]), np.array(queries), 2, 0.3
    *parts, above = given(lengths, queries, heads * head)
    attention = of_parts(lengths, queries, heads, rate)
    seed_dropout(7)
    found = outcome(attention, parts, above)
    seed_dropout(7)
    saved = attention(*(part.requires_grad_() for part in parts)).grad_fn.saved_tensors[0]
    kept, place = [], 0
    for count, length, width in zip(queries, lengths, (64, 96), strict=True):
        own = saved[place : place + heads * count * width].view(heads, count, width)
        kept.append((own[:, :, :length] > 0) / (1 - rate))
        place += own.numel()
        assert_is_share(kept[-1] == 0, rate)
    exact = [part.detach().double() for part in parts]
    wanted = outcome(lambda *qkv: formula(qkv, lengths, queries, heads, kept), exact, above)
    assert_near(found, wanted, 5e-3)
    assert not torch.equal(found[0], attention(*parts))  # the next mask is another
