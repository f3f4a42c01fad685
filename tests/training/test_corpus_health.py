"""Corpus warnings, against counts made from the texts of the pairs."""

import numpy as np
import pytest

from bertsmith.corpus.examples.stream import ExampleSettings
from bertsmith.training.pretraining.diagnostics import corpus_health, duplicate_shares, label_noise

from ..corpus.made import ascending, make_store, read_pairs, stream_of

ALL = 1 << 20


def open_stream(store, length, **settings):
    return stream_of(store, ExampleSettings(length, **settings), seed=1)


def test_duplicate_sentences_and_tokens_by_hand(tmp_path):
    documents = [[[1, 2], [3]], [[1, 2], [4, 5, 6]], [[3], [3]]]
    store = make_store(tmp_path / "one", documents)
    many = make_store(tmp_path / "many", documents * 20, shard_tokens=60)
    assert len(many.train.shards) > 1
    for found, sentences, tokens in (
        (duplicate_shares(store.train), 3 / 6, 4 / 10),
        (duplicate_shares(many.train), 117 / 120, 194 / 200),
        (duplicate_shares(store.train, max_tokens=6), 1 / 3, 2 / 5),
    ):
        expected = {"duplicate_sentences": sentences, "duplicate_tokens": tokens}
        assert found == pytest.approx(expected)


def test_equal_sentences_of_other_tokens_are_not_duplicates(tmp_path):
    documents = [[[word, other] for other in range(50)] for word in range(40)]
    assert duplicate_shares(make_store(tmp_path, documents).train)["duplicate_sentences"] == 0


def test_seams_are_counted_as_the_texts_show_them(tmp_path):
    store = make_store(tmp_path, ascending([[5] * 9] * 50))
    stream = open_stream(store, 24)
    pairs = read_pairs(stream.epoch(0), 21)
    following = [(a, b) for a, b, label in pairs if not label]
    cut = np.mean([b[0] != a[-1] + 1 for a, b in following])
    noise = label_noise(stream, ALL)
    assert noise["nsp_cut_seam"] == pytest.approx(cut) and cut > 0.2
    assert noise["nsp_label_noise"] == pytest.approx(cut * len(following) / len(pairs))
    assert label_noise(stream, 1).keys() == noise.keys()
    clean = label_noise(open_stream(store, 24, nsp_sampling="clean"), ALL)
    assert set(clean.values()) == {0.0}


@pytest.mark.parametrize("sampling", ["paper", "clean"])
def test_a_random_b_like_the_true_one_is_counted(tmp_path, sampling):
    documents = [[[10 * d + s, 10 * d + s] for s in range(4)] for d in range(3)] * 2  # each twice
    store = make_store(tmp_path, documents)
    stream = open_stream(store, 10, nsp_sampling=sampling)  # rows that a document fills
    shares, expected = [], []
    for epoch in range(60):
        random = [(a, b) for a, b, label in read_pairs(stream.epoch(epoch), 7) if label]
        # Word 10 d + s is followed by the next one, but for the document's last, 10 d + 3.
        like = [b[0] == a[-1] + 1 and a[-1] % 10 < 3 for a, b in random]
        expected.append(np.mean(like) if like else 0.0)
        shares.append(label_noise(stream, ALL, epoch)["nsp_true_next"])
    np.testing.assert_allclose(shares, expected)
    assert (np.mean(shares) > 0.02) == (sampling == "paper")


@pytest.mark.parametrize("sampling", ["paper", "clean"])
def test_a_random_b_of_the_own_document_is_counted(tmp_path, sampling):
    # Two documents: ten draws of ten are the pair's own in one case of 1,024.
    documents = [[[word] for word in range(1500)], [[word] for word in range(2000, 3500)]]
    stream = open_stream(make_store(tmp_path, documents), 7, nsp_sampling=sampling)
    shares, count = [], 0
    for epoch in range(24):
        shares.append(label_noise(stream, ALL, epoch)["nsp_own_document"])
        pairs = stream.epoch(epoch)
        count += (pairs.segments(np.arange(len(pairs)))["label"] == 1).sum()
    assert count > 10_000
    if sampling == "clean":
        assert np.mean(shares) == 0
    else:  # about 12 to be seen: four standard errors
        assert abs(np.mean(shares) - 2**-10) < 4 * np.sqrt(2**-10 / count)


def test_health_says_what_the_objective_has(tmp_path):
    store = make_store(tmp_path, [[[1, 2], [3]], [[4, 5, 6]]])
    text = {"duplicate_sentences", "duplicate_tokens"}
    labels = {"nsp_own_document", "nsp_true_next", "nsp_cut_seam", "nsp_label_noise"}
    assert corpus_health(open_stream(store, 24)).keys() == text | labels
    for objective in ("mlm", "mlm+sop", "ltr"):
        assert corpus_health(open_stream(store, 24, objective=objective)).keys() == text
