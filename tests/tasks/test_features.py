import numpy as np
import pytest

from bertsmith.tasks.examples import Examples
from bertsmith.tasks.features import featurise, token_budget_batches, training_batches
from bertsmith.tasks.task import Layout
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

PAD, _, CLS, SEP, _ = range(5)
LETTERS = Tokenizer(Vocabulary([*SPECIAL, *"abcdefgh"]))  # a..h are 5..12


def of(texts, pairs=None, labels=None) -> Examples:
    return Examples(texts, pairs, labels, ("0", "1"), "mem", list(range(1, len(texts) + 1)))


def test_single_texts_by_hand():
    features = featurise(LETTERS, of(["a b", "c d e f g h", "h"]), Layout(max_length=6))
    rows = np.split(features.ids, features.boundaries[1:-1])
    assert [row.tolist() for row in rows] == [
        [CLS, 5, 6, SEP],
        [CLS, 7, 8, 9, 10, SEP],  # the head stays
        [CLS, 12, SEP],
    ]
    assert not features.token_types.any()
    assert features.num_truncated == 1
    assert (features.ids.dtype, features.boundaries.dtype) == (np.int32, np.int64)


def test_pairs_by_hand():
    features = featurise(
        LETTERS, of(["a b", "a"], ["c", "c d e f g"], np.array([1, 0])), Layout(max_length=7)
    )
    rows = np.split(features.ids, features.boundaries[1:-1])
    types = np.split(features.token_types, features.boundaries[1:-1])
    assert rows[0].tolist() == [CLS, 5, 6, SEP, 7, SEP]
    assert types[0].tolist() == [0, 0, 0, 0, 1, 1]
    assert rows[1].tolist() == [CLS, 5, SEP, 7, 8, 9, SEP]  # the longer text is cut
    assert types[1].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert features.labels.tolist() == [1, 0]
    assert features.unit_lengths.tolist() == [6, 7]
    outputs = np.ones((2, 3))
    assert features.pooled(outputs, "vote") is outputs  # a row an example

    input_ids, token_types, lengths = features.padded(np.array([1, 0]), pad_id=PAD, multiple=4)
    assert input_ids.shape == (2, 7)  # not 8: never above max_length
    assert input_ids.tolist() == [rows[1].tolist(), [*rows[0].tolist(), PAD]]
    assert token_types.tolist() == [types[1].tolist(), [*types[0].tolist(), 0]]
    assert lengths.tolist() == [7, 6]
    batch = features.batch(np.array([1, 0]), PAD)
    assert batch["ids"].tolist() == input_ids.tolist()
    assert batch["types"].tolist() == token_types.tolist()
    assert (batch["lengths"].tolist(), batch["labels"].tolist()) == ([7, 6], [0, 1])


def test_padding_is_rounded_up():
    features = featurise(LETTERS, of(["a b c", "a"]), Layout(max_length=64))
    assert features.padded(np.array([0, 1]), PAD)[0].shape == (2, 8)


def test_some_rows_by_themselves():
    features = featurise(LETTERS, of(["a b", "c d e", "a", "b"], pairs=[*"cdef"]), Layout(8))
    some = features.of_rows(np.array([3, 0]))
    both = some.padded(np.array([0, 1]), PAD), features.padded(np.array([3, 0]), PAD)
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(some) == 2


def test_too_short_a_length():
    with pytest.raises(ValueError, match="max_length = 4 is too short: at least 5"):
        featurise(LETTERS, of(["a"], ["b"]), Layout(max_length=4))
    with pytest.raises(ValueError, match="max_length = -1 is too short: at least 3"):
        featurise(LETTERS, of(["a"]), Layout(max_length=-1))


def test_training_batches_cover_once_are_random_and_save_padding():
    lengths = np.random.default_rng(0).integers(3, 60, 5003)
    batches = training_batches(lengths, 32, seed=1, epoch=2)
    assert sorted(np.concatenate(batches).tolist()) == list(range(5003))
    assert sorted(map(len, batches)) == [5003 % 32] + [32] * (5003 // 32)
    again = training_batches(lengths, 32, seed=1, epoch=2)
    assert all(np.array_equal(x, y) for x, y in zip(batches, again, strict=True))
    for seed, epoch in ((1, 3), (2, 2)):
        assert not np.array_equal(batches[0], training_batches(lengths, 32, seed, epoch)[0])
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padded < 1.05 * lengths.sum()  # unsorted batches: 1.8
    means = [lengths[batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3  # short ones are not first


def test_token_budget():
    lengths = np.random.default_rng(0).integers(3, 60, 500)
    batches = token_budget_batches(lengths, 512)
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    assert all(len(batch) * lengths[batch].max() <= 512 for batch in batches)
    assert [len(batch) for batch in token_budget_batches(np.array([5, 900]), 512)] == [1, 1]
