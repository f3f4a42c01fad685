"""Pairs of sentence order (ALBERT), and next-sentence pairs without the original's noise."""

import numpy as np
import pytest

from bertsmith.corpus.examples.pairs import EpochPairs
from bertsmith.corpus.examples.rng import between, derive, seed_key, uniform
from bertsmith.corpus.examples.stream import ExampleSettings, PretrainingStream

FIRST_WORD = 5  # id of w0


def epoch_key(seed, epoch=0):
    return np.uint64(derive(seed_key(seed), epoch))


def made_pairs(store, max_tokens, short_rate, key, **rules):
    pairs = EpochPairs(store.train, max_tokens, short_rate, key, **rules)
    return [
        ((a - FIRST_WORD).tolist(), (b - FIRST_WORD).tolist(), label)
        for a, b, label, _ in (pairs[number] for number in range(len(pairs)))
    ]


def random_documents(seed, count):
    """Words are numbered through the text."""
    dice, words = np.random.default_rng(seed), iter(range(4000))
    return [
        [[next(words) for _ in range(n)] for n in dice.choice([1, 2, 3, 5, 8, 20], size)]
        for size in dice.integers(1, 12, count)
    ]


def test_sentence_order_of_three_documents_by_hand(make_store):
    documents = [
        [[0, 1, 2, 3], [10, 11, 12], [20, 21, 22, 23, 24], [30]],
        [[100, 101, 102, 103, 104, 105]],
        [[200, 201], [210]],
    ]
    # The draws of seed 1, epoch 0: document 0 cut .69, coin .14, front .69 .88;
    # document 1 cut .06, coin .95; document 2 coin .89.
    expected = [
        # 4+3+5 tokens reach 10; two sentences and one (.69), swapped (.14): 5+7 tokens, of which
        # the longer loses its last one twice. The sentence left, of one token, gives no pair.
        ([20, 21, 22, 23, 24], [0, 1, 2, 3, 10], True),
        ([100], [101, 102, 103, 104, 105], False),  # one sentence, cut behind token 1 of 1..5
        ([200, 201], [210], False),
    ]
    assert made_pairs(make_store(documents), 10, 0.0, epoch_key(1), random_b=False) == expected


def order_pairs(documents, max_tokens, short_rate, key):
    """The same procedure told plainly, on lists."""
    for number, document in enumerate(documents):
        document_key = np.uint64(derive(np.uint64(derive(key, 1)), number))
        target = max_tokens
        if uniform(document_key, 0) < short_rate:
            target = between(document_key, 1, 2, max_tokens)
        rest, example = list(document), 0
        while sum(map(len, rest)) >= 2:
            draws, chunk = np.uint64(derive(document_key, example)), []
            while rest and sum(map(len, chunk)) < target:
                chunk.append(rest.pop(0))
            text = sum(chunk, [])
            if len(chunk) == 1:
                cut = between(draws, 0, 1, len(text) - 1)
            else:
                cut = len(sum(chunk[: between(draws, 0, 1, len(chunk) - 1)], []))
            swapped = uniform(draws, 1) < 0.5
            first, second = (text[cut:], text[:cut]) if swapped else (text[:cut], text[cut:])
            coins, drops = np.uint64(derive(draws, 0)), 0
            while len(first) + len(second) > max_tokens:
                longer = first if len(first) > len(second) else second
                longer.pop(0 if uniform(coins, drops) < 0.5 else -1)
                drops += 1
            yield first, second, swapped
            example += 1


@pytest.mark.parametrize("shard_tokens", [1 << 20, 800])
@pytest.mark.parametrize(("max_tokens", "short_rate"), [(2, 0.5), (13, 0.5), (125, 0.1)])
def test_sentence_order_is_that_of_the_procedure(make_store, shard_tokens, max_tokens, short_rate):
    documents = random_documents(7, 60)
    store = make_store(documents, shard_tokens)
    for epoch in range(2):
        key = epoch_key(7, epoch)
        found = made_pairs(store, max_tokens, short_rate, key, random_b=False)
        assert found == list(order_pairs(documents, max_tokens, short_rate, key))
        if max_tokens == 13:
            assert 0.4 < np.mean([label for _, _, label in found]) < 0.6


def test_documents_of_one_token_have_no_order(make_store, tokenizer):
    settings = ExampleSettings(24, objective="mlm+sop")
    stream = PretrainingStream(make_store([[[1]], [[2]]]).train, tokenizer.vocabulary, settings, 0)
    with pytest.raises(ValueError, match=r"no document of the train split can be cut.*longer doc"):
        stream.examples_in_epoch(0)


@pytest.mark.parametrize("shard_tokens", [1 << 20, 800])
def test_clean_pairs_keep_the_walk_and_the_seam(make_store, shard_tokens):
    documents = random_documents(11, 60)
    document_of = {
        word: number
        for number, document in enumerate(documents)
        for sentence in document
        for word in sentence
    }
    begins = {sentence[0] for document in documents for sentence in document}
    store = make_store(documents, shard_tokens)
    paper = made_pairs(store, 13, 0.2, epoch_key(3))
    clean = made_pairs(store, 13, 0.2, epoch_key(3), clean=True)
    assert [label for *_, label in clean] == [label for *_, label in paper]
    cut = 0
    for (paper_a, paper_b, _), (a, b, is_random) in zip(paper, clean, strict=True):
        assert a and b and len(a) + len(b) <= 13 and (len(a) <= 7 or len(b) <= 6)
        assert b[0] in begins and (a[-1] + 1 in begins or a[-1] == max(document_of))
        if is_random:
            assert document_of[b[0]] != document_of[a[0]] == document_of[paper_a[0]]
        else:
            assert b[0] == a[-1] + 1
            assert (len(a), len(b)) == (len(paper_a), len(paper_b))
            cut += paper_b[0] != paper_a[-1] + 1
    assert cut > 20  # the original's seams, of the same pairs


def test_clean_order_drops_the_outer_ends(make_store):
    documents = random_documents(5, 40)
    pairs = made_pairs(make_store(documents), 13, 0.0, epoch_key(2), random_b=False, clean=True)
    kept = [(a, b) for a, b, swapped in pairs if not swapped]
    assert len(kept) > 20 and all(a[-1] + 1 == b[0] for a, b in kept)
    # Swapped ones lose theirs by place in the row too, so that the cuts do not tell the label.
    assert any(b[-1] + 1 != a[0] for a, b, swapped in pairs if swapped)


def test_clean_gives_up_where_all_sentences_are_equal(make_store):
    pairs = made_pairs(make_store([[[1, 2]] * 20] * 2), 6, 0.0, epoch_key(0), clean=True)
    assert {tuple(b[:2]) for _, b, is_random in pairs if is_random} == {(1, 2)}
