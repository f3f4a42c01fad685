"""Sentence pairs against plain procedures on lists, and cases worked by hand."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from bertsmith.corpus.examples.rng import between, derived, uniform
from bertsmith.corpus.examples.stream import ExampleSettings

from ..made import ascending, epoch_key, pairs_of, stream_of


class OurDraws:
    """The draws that the pairs of an epoch are made with, by the names of the procedure."""

    def __init__(self, epoch_key):
        self.documents = derived(epoch_key, 1)

    def start(self, document, example):
        self.document = derived(self.documents, document)
        self.example = derived(self.document, example)
        self.tries = self.drops = 0

    def is_short(self, rate):
        return uniform(self.document, 0) < rate

    def short_length(self, high):
        return between(self.document, 1, 2, high)

    def a_end(self, high):
        return between(self.example, 0, 1, high)

    def coin(self):
        return uniform(self.example, 1) < 0.5

    def other(self, high):
        self.tries += 1
        return between(self.example, 2 + self.tries, 0, high)

    def first_sentence(self, high):
        return between(self.example, 2, 0, high)

    def front(self):
        self.drops += 1
        return uniform(derived(self.example, 0), self.drops - 1) < 0.5


def python_draws(seed):
    """The same from Python's generator: one stream, as in Google's code."""
    dice = random.Random(seed)
    return SimpleNamespace(
        start=lambda document, example: None,
        is_short=lambda rate: dice.random() < rate,
        short_length=lambda high: dice.randint(2, high),
        a_end=lambda high: dice.randint(1, high),
        other=lambda high: dice.randint(0, high),
        first_sentence=lambda high: dice.randint(0, high),
        coin=lambda: dice.random() < 0.5,
        front=lambda: dice.random() < 0.5,
    )


def pairs_of_document(documents, number, max_tokens, short_rate, draws):
    """Section 3, steps 3 and 4, on lists: yields (A, B, B is random)."""
    draws.start(number, 0)
    target = draws.short_length(max_tokens) if draws.is_short(short_rate) else max_tokens
    document, chunk, i, example = documents[number], [], 0, 0
    while i < len(document):
        chunk.append(document[i])
        if i == len(document) - 1 or sum(map(len, chunk)) >= target:
            draws.start(number, example)
            a_end = draws.a_end(len(chunk) - 1) if len(chunk) > 1 else 1
            a = sum(chunk[:a_end], [])
            is_random = len(chunk) == 1 or draws.coin()
            if is_random:
                for _ in range(10):
                    other = draws.other(len(documents) - 1)
                    if other != number:
                        break
                b = []
                for sentence in documents[other][draws.first_sentence(len(documents[other]) - 1) :]:
                    b = b + sentence
                    if len(b) >= target - len(a):
                        break
                i -= len(chunk) - a_end
            else:
                b = sum(chunk[a_end:], [])
            while len(a) + len(b) > max_tokens:
                longer = a if len(a) > len(b) else b
                longer.pop(0 if draws.front() else -1)
            yield a, b, is_random
            chunk, example = [], example + 1
        i += 1


def all_pairs(documents, *settings):
    numbers = range(len(documents))
    return [pair for k in numbers for pair in pairs_of_document(documents, k, *settings)]


def random_documents(seed, count):
    """Every word of the corpus is another one."""
    dice = random.Random(seed)
    sizes = 1, 2, 3, 5, 8, 20
    lengths = [[dice.choice(sizes) for _ in range(dice.randint(1, 12))] for _ in range(count)]
    return ascending(lengths)


def document_of(documents):
    """The number of each word's document."""
    return {word: k for k, one in enumerate(documents) for sentence in one for word in sentence}


def test_three_documents_worked_out_by_hand(make_store):
    documents = [
        [[0, 1, 2, 3], [10, 11, 12], [20, 21, 22, 23, 24], [30, 31]],
        [[100, 101, 102, 103, 104, 105], [110, 111]],
        [list(range(200, 212)), [220, 221, 222], [230]],
    ]
    # The draws of seed 1, epoch 0, rounded to two places:
    #   document 0  pair 0  a_end .69  coin .14  other .35  start .05  front .69 .88 .71
    #               pair 1  a_end .66  coin .63
    #   document 1  pair 0  a_end .06  coin .95
    #   document 2  pair 0                       other .40  start .22
    #                       front .40 .73 .14 .58 .90 .69 .82 .94
    #               pair 1  a_end .96  coin .15  other .47  start .27  front .76
    #               pair 2                       other .47  start .56
    expected = [
        # 4+3+5 tokens reach 10; A = two sentences (.69), 7 tokens; random (.14); document 1 (.35)
        # from its first sentence (.05): 7+6, so A, B (a tie) and A lose their last token each.
        ([0, 1, 2, 3, 10], [100, 101, 102, 103, 104], True),
        # The third sentence was put back; with the fourth the document ends; B follows (.63).
        ([20, 21, 22, 23, 24], [30, 31], False),
        ([100, 101, 102, 103, 104, 105], [110, 111], False),
        # One sentence fills the row, so B is random; A loses front, back, front, back, back, back
        # until it is 6 against 6, then B (a tie) and A lose their last.
        ([202, 203, 204, 205, 206], [100, 101, 102, 103, 104], True),
        # 3+1 tokens, random: seven wanted, 6+2 taken, the last one of B dropped.
        ([220, 221, 222], [100, 101, 102, 103, 104, 105, 110], True),
        # The sentence put back is alone: random, from the second sentence on.
        ([230], [110, 111], True),
    ]
    store = make_store(documents)
    assert pairs_of(store, 10, 0.0, epoch_key(1)) == expected


@pytest.mark.parametrize("shard_tokens", [1 << 20, 800])
@pytest.mark.parametrize(("max_tokens", "short_rate"), [(2, 0.5), (13, 0.0), (13, 0.5), (125, 0.1)])
def test_pairs_are_those_of_the_procedure(make_store, shard_tokens, max_tokens, short_rate):
    documents = random_documents(11, 80)
    store = make_store(documents, shard_tokens)
    assert len(store.train.shards) == 1 or shard_tokens == 800
    for epoch in range(3):
        key = epoch_key(7, epoch)
        expected = all_pairs(documents, max_tokens, short_rate, OurDraws(key))
        assert pairs_of(store, max_tokens, short_rate, key) == expected


def test_distribution_is_that_of_a_plain_generator(make_store):
    documents = random_documents(3, 60)
    store = make_store(documents)
    ours, plain = [], []
    for number in range(150):
        ours += pairs_of(store, 30, 0.1, epoch_key(0, number))
        plain += all_pairs(documents, 30, 0.1, python_draws(number))

    def summary(pairs):
        lengths = np.array([(len(a), len(b), is_random) for a, b, is_random in pairs], float)
        return np.array([len(pairs) / 150, *lengths.mean(0), *lengths.std(0)])

    assert len(ours) > 20_000
    np.testing.assert_allclose(summary(ours), summary(plain), rtol=0.02)


def test_segments_are_runs_of_one_document_each(make_store):
    documents = random_documents(5, 60)
    owner = document_of(documents)
    store = make_store(documents, shard_tokens=500)
    for a, b, is_random in pairs_of(store, 40, 0.1, epoch_key(2)):
        assert a and b and len(a) + len(b) <= 40
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[-1] + 1))
            assert len({owner[word] for word in segment}) == 1
        if not is_random:
            assert owner[a[0]] == owner[b[0]] and a[0] < b[0]


def test_one_very_long_document_is_reached_by_the_pair_index(make_store):
    documents = [[[word] for word in range(3000)], [[3500, 3501]]]
    key = epoch_key(4)
    expected = all_pairs(documents, 4, 0.0, OurDraws(key))
    assert len(expected) > 1000
    assert pairs_of(make_store(documents), 4, 0.0, key) == expected


# --- sentence order (ALBERT), and pairs without the original's noise ---


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
    assert pairs_of(make_store(documents), 10, 0.0, epoch_key(1), random_b=False) == expected


def order_pairs(documents, max_tokens, short_rate, key):
    """The same procedure told plainly, on lists."""
    for number, document in enumerate(documents):
        document_key = derived(key, 1, number)
        target = max_tokens
        if uniform(document_key, 0) < short_rate:
            target = between(document_key, 1, 2, max_tokens)
        rest, example = list(document), 0
        while sum(map(len, rest)) >= 2:
            draws, chunk = derived(document_key, example), []
            while rest and sum(map(len, chunk)) < target:
                chunk.append(rest.pop(0))
            text = sum(chunk, [])
            if len(chunk) == 1:
                cut = between(draws, 0, 1, len(text) - 1)
            else:
                cut = len(sum(chunk[: between(draws, 0, 1, len(chunk) - 1)], []))
            swapped = uniform(draws, 1) < 0.5
            first, second = (text[cut:], text[:cut]) if swapped else (text[:cut], text[cut:])
            coins, drops = derived(draws, 0), 0
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
        found = pairs_of(store, max_tokens, short_rate, key, random_b=False)
        assert found == list(order_pairs(documents, max_tokens, short_rate, key))
        if max_tokens == 13:
            assert 0.4 < np.mean([label for _, _, label in found]) < 0.6


def test_documents_of_one_token_have_no_order(make_store):
    settings = ExampleSettings(24, objective="mlm+sop")
    stream = stream_of(make_store([[[1]], [[2]]]), settings)
    with pytest.raises(ValueError, match=r"no document of the train split can be cut.*longer doc"):
        stream.examples_in_epoch(0)


def clean_walk(documents, max_tokens, short_rate, epoch_key, random_b=True):
    """(the last word of A, the last of the chunk, its tokens, is B random?) of the clean pairs."""
    for number, document in enumerate(documents):
        draws = OurDraws(epoch_key)
        draws.start(number, 0)
        target = draws.short_length(max_tokens) if draws.is_short(short_rate) else max_tokens
        start = example = 0
        while sum(map(len, document[start:])) >= (1 if random_b else 2):
            draws.start(number, example)
            begin = start
            while begin > 0 and sum(map(len, document[begin:])) < target:
                begin -= 1
            chunk = []
            for sentence in document[begin:]:
                if sum(map(len, chunk)) >= target <= sum(map(len, document[begin + 1 :])):
                    break
                chunk.append(sentence)
            num_a = draws.a_end(len(chunk) - 1) if len(chunk) > 1 else 1
            is_random = random_b and (len(chunk) == 1 or draws.coin())
            yield chunk[num_a - 1][-1], chunk[-1][-1], sum(map(len, chunk)), is_random
            start = max(begin + num_a, start + 1) if is_random else begin + len(chunk)
            example += 1


@pytest.mark.parametrize("shard_tokens", [1 << 20, 800])
@pytest.mark.parametrize("short_rate", [0.0, 0.2])
def test_clean_pairs_keep_the_seam_and_fill_the_row(make_store, shard_tokens, short_rate):
    documents = random_documents(11, 60)
    owner = document_of(documents)
    begins = {sentence[0] for document in documents for sentence in document}
    store, short = make_store(documents, shard_tokens), []
    for epoch in range(10):
        key = epoch_key(3, epoch)
        clean = pairs_of(store, 13, short_rate, key, clean=True)
        walk = list(clean_walk(documents, 13, short_rate, key))
        for (a, b, label), (a_last, last, tokens, is_random) in zip(clean, walk, strict=True):
            assert label == is_random and a[-1] == a_last and b[0] in begins
            assert a and b and len(a) + len(b) <= 13 and (len(a) <= 7 or len(b) <= 6)
            if is_random:
                assert owner[b[0]] != owner[a[0]]
            else:
                assert b[0] == a[-1] + 1 and len(a) + len(b) == min(tokens, 13)
                assert b[-1] == last or tokens > 13
            if len(a) + len(b) < 13 and short_rate == 0.0:
                assert sum(map(len, documents[owner[a[0]]])) < 13
                short.append(is_random)
        read = {word for a, b, is_random in clean for word in a + ([] if is_random else b)}
        assert all(read & set(sum(document, [])) for document in documents)
    assert short_rate > 0.0 or 0.35 < np.mean(short) < 0.65  # the length does not tell the label


def test_clean_order_drops_the_outer_ends(make_store):
    documents = random_documents(5, 40)
    pairs = pairs_of(make_store(documents), 13, 0.0, epoch_key(2), random_b=False, clean=True)
    walk = list(clean_walk(documents, 13, 0.0, epoch_key(2), random_b=False))
    for (a, b, swapped), (_, last, tokens, _) in zip(pairs, walk, strict=True):
        assert len(a) + len(b) == min(tokens, 13)
        assert tokens > 13 or (a if swapped else b)[-1] == last
    kept = [(a, b) for a, b, swapped in pairs if not swapped]
    assert len(kept) > 20 and all(a[-1] + 1 == b[0] for a, b in kept)
    # Swapped ones lose theirs by place in the row too, so that the cuts do not tell the label.
    assert any(b[-1] + 1 != a[0] for a, b, swapped in pairs if swapped)


def test_clean_gives_up_where_all_sentences_are_equal(make_store):
    pairs = pairs_of(make_store([[[1, 2]] * 20] * 2), 6, 0.0, epoch_key(0), clean=True)
    assert {tuple(b[:2]) for _, b, is_random in pairs if is_random} == {(1, 2)}
