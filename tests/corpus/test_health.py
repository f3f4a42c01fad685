"""Corpus warnings, against counts made from the texts of the pairs."""

import numpy as np
import pytest

from bertsmith.corpus.examples.stream import ExampleSettings, PretrainingStream
from bertsmith.training.pretraining.diagnostics import corpus_health, duplicate_shares, label_noise

ALL = 1 << 20


def open_stream(store, tokenizer, length, **settings):
    return PretrainingStream(
        store.train, tokenizer.vocabulary, ExampleSettings(length, **settings), seed=1
    )


def test_duplicate_sentences_and_tokens_by_hand(make_store):
    documents = [[[1, 2], [3]], [[1, 2], [4, 5, 6]], [[3], [3]]]
    expected = pytest.approx({"duplicate_sentences": 3 / 6, "duplicate_tokens": 4 / 10})
    assert duplicate_shares(make_store(documents).train) == expected
    many = make_store(documents * 20, shard_tokens=60, name="many")
    assert len(many.train.shards) > 1
    expected = pytest.approx({"duplicate_sentences": 117 / 120, "duplicate_tokens": 194 / 200})
    assert duplicate_shares(many.train) == expected
    first = duplicate_shares(make_store(documents, name="first").train, max_tokens=6)
    assert first == pytest.approx({"duplicate_sentences": 1 / 3, "duplicate_tokens": 2 / 5})


def test_equal_sentences_of_other_tokens_are_not_duplicates(make_store):
    documents = [[[word, other] for other in range(50)] for word in range(40)]
    assert duplicate_shares(make_store(documents).train)["duplicate_sentences"] == 0


def test_seams_are_counted_as_the_texts_show_them(make_store, tokenizer, read_pairs):
    words = iter(range(4000))
    documents = [[[next(words) for _ in range(5)] for _ in range(9)] for _ in range(50)]
    stream = open_stream(make_store(documents), tokenizer, 24)
    pairs = read_pairs(stream.epoch(0), 21)
    following = [(a, b) for a, b, label in pairs if not label]
    cut = np.mean([b[0] != a[-1] + 1 for a, b in following])
    noise = label_noise(stream, ALL)
    assert noise["nsp_cut_seam"] == pytest.approx(cut) and cut > 0.2
    assert noise["nsp_label_noise"] == pytest.approx(cut * len(following) / len(pairs))
    assert label_noise(stream, 1).keys() == noise.keys()
    clean = label_noise(
        open_stream(make_store(documents, name="c"), tokenizer, 24, nsp_sampling="clean"), ALL
    )
    assert set(clean.values()) == {0.0}


def test_a_random_b_like_the_true_one_is_counted(make_store, tokenizer, read_pairs):
    documents = [[[10 * d + s, 10 * d + s] for s in range(4)] for d in range(3)] * 2  # each twice
    for pairs_rule in ("paper", "clean"):
        store = make_store(documents, name=pairs_rule)
        stream = open_stream(store, tokenizer, 128, nsp_sampling=pairs_rule, short_seq_prob=0.0)
        shares, expected = [], []
        for epoch in range(60):
            found = read_pairs(stream.epoch(epoch), 125)
            random = [(a, b) for a, b, label in found if label]
            # Word 10 d + s is followed by the next one, but for the document's last, 10 d + 3.
            like = [b[0] == a[-1] + 1 and a[-1] % 10 < 3 for a, b in random]
            expected.append(np.mean(like) if like else 0.0)
            shares.append(label_noise(stream, ALL, epoch)["nsp_true_next"])
        np.testing.assert_allclose(shares, expected)
        assert (np.mean(shares) > 0.02) == (pairs_rule == "paper")


def test_a_random_b_of_the_own_document_is_counted(make_store, tokenizer):
    # Two documents: ten draws of ten are the pair's own in one case of 1,024.
    documents = [[[word] for word in range(1500)], [[word] for word in range(2000, 3500)]]
    for pairs_rule in ("paper", "clean"):
        store = make_store(documents, name=pairs_rule)
        stream = open_stream(store, tokenizer, 7, nsp_sampling=pairs_rule)
        shares, count = [], 0
        for epoch in range(24):
            shares.append(label_noise(stream, ALL, epoch)["nsp_own_document"])
            pairs = stream.epoch(epoch)
            segments = pairs.segments(np.arange(len(pairs)))
            count += (segments["label"] == 1).sum()
        share = np.mean(shares)
        assert count > 10_000
        if pairs_rule == "clean":
            assert share == 0
        else:  # about 12 to be seen: four standard errors
            assert abs(share - 2**-10) < 4 * np.sqrt(2**-10 / count)


def test_health_says_what_the_objective_has(make_store, tokenizer):
    store = make_store([[[1, 2], [3]], [[4, 5, 6]]])
    text = {"duplicate_sentences", "duplicate_tokens"}
    labels = {"nsp_own_document", "nsp_true_next", "nsp_cut_seam", "nsp_label_noise"}
    assert corpus_health(open_stream(store, tokenizer, 24)).keys() == text | labels
    for objective in ("mlm", "mlm+sop", "ltr"):
        assert corpus_health(open_stream(store, tokenizer, 24, objective=objective)).keys() == text
