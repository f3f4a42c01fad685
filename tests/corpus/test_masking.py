"""Masked positions: exact counts, the 80/10/10 mixture, whole words."""

import numpy as np
import pytest

from bertsmith.corpus.draws import derive, seed_key
from bertsmith.corpus.masking import MaskRules, mask_rows, predictions_per_length

CLS, SEP, MASK, VOCABULARY = 2, 3, 4, 30_522


def mask(ids, rate=0.15, whole_word=False, continuation=None, seed=0, maximum=None):
    """(masked ids, positions, labels, weights) of full rows with [CLS] and [SEP] in place."""
    rows, length = ids.shape
    if continuation is None:
        continuation = np.zeros(VOCABULARY, bool)
    maximum = maximum or round(length * rate)
    key = seed_key(seed)
    keys = np.array([derive(key, row) for row in range(rows)], np.uint64)
    lengths = np.full(rows, length, np.int32)
    counts = predictions_per_length(length, rate, maximum)[lengths]
    masked = ids.copy()
    positions, labels = np.zeros((2, rows, maximum), np.int32)
    weights = np.zeros((rows, maximum), np.float32)
    rules = MaskRules(continuation, whole_word, 0.8, 0.1, MASK, CLS, SEP)
    mask_rows(masked, lengths, counts, keys, rules, positions, labels, weights)
    return masked, positions, labels, weights


def rows_of_ids(rows, length, seed=0, middle=None):
    ids = np.random.default_rng(seed).integers(5, VOCABULARY, (rows, length), dtype=np.int32)
    ids[:, 0], ids[:, -1] = CLS, SEP
    ids[:, length // 2 if middle is None else middle] = SEP
    return ids


@pytest.mark.parametrize(("length", "expected"), [(128, 19), (512, 77)])
def test_full_rows_mask_exactly_the_paper_s_count(length, expected):
    ids = rows_of_ids(500, length)
    masked, positions, labels, weights = mask(ids)
    assert weights.shape == (500, expected) and (weights == 1).all()
    assert (np.diff(positions) > 0).all()
    assert (labels == np.take_along_axis(ids, positions, 1)).all()
    assert not np.isin(labels, (CLS, SEP)).any()
    untouched = np.ones_like(ids, bool)
    np.put_along_axis(untouched, positions, False, 1)
    assert (masked == ids)[untouched].all()


def test_counts_round_halves_to_even_and_stay_within_bounds():
    counts = predictions_per_length(128, 0.15, 15)
    assert counts[[5, 10, 30, 50, 90, 128]].tolist() == [1, 2, 4, 8, 14, 15]


def test_mixture_of_400_000_masked_positions():
    ids = rows_of_ids(21_100, 128)
    masked, positions, labels, _ = mask(ids, seed=1)
    found = np.take_along_axis(masked, positions, 1)
    assert found.size > 400_000
    is_mask, is_kept = found == MASK, found == labels
    shares = np.array([is_mask.mean(), is_kept.mean(), (~is_mask & ~is_kept).mean()])
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.005)
    # Replacements come from the whole vocabulary, evenly, special tokens included.
    replaced = found[~is_mask & ~is_kept]
    assert replaced.min() < 5 and replaced.max() > VOCABULARY - 10
    tenths = np.bincount(replaced * 10 // VOCABULARY, minlength=10) / len(replaced)
    np.testing.assert_allclose(tenths, 0.1, atol=0.01)
    # Every position but [CLS] and [SEP] is chosen equally often: 19 of 125.
    share_at = np.bincount(positions.ravel(), minlength=128) / len(ids)
    assert (share_at[[0, 64, 127]] == 0).all()
    np.testing.assert_allclose(np.delete(share_at, [0, 64, 127]), 19 / 125, atol=0.012)


def test_whole_words_are_masked_together_and_never_too_many():
    continuation = np.zeros(VOCABULARY, bool)
    continuation[20_000:] = True
    ids = rows_of_ids(2000, 128, seed=2)
    ids[:, 65] = 10  # B begins with a word of its own
    _, positions, labels, weights = mask(ids, whole_word=True, continuation=continuation)
    chosen = np.zeros(ids.shape, bool)
    for row, kept in enumerate(weights == 1):
        chosen[row, positions[row, kept]] = True
        assert (ids[row, positions[row, kept]] == labels[row, kept]).all()
    assert chosen.sum(1).max() == 19 and chosen.sum(1).min() >= 15
    special = np.isin(ids, (CLS, SEP))
    assert not (chosen & special).any()
    joins = continuation[ids[:, 1:]] & ~special[:, :-1]
    assert (chosen[:, 1:] == chosen[:, :-1])[joins].all()


def test_a_set_that_would_exceed_the_count_is_skipped():
    continuation = np.zeros(VOCABULARY, bool)
    continuation[20_000:] = True
    words = [10, 20_001, 20_002, 20_003, 11, 20_004, 12]  # words of 4, 2 and 1 pieces
    ids = np.array([[CLS, *words, SEP]] * 300, np.int32)
    _, positions, _, weights = mask(
        ids, rate=0.22, whole_word=True, continuation=continuation, maximum=2
    )
    found = {tuple(row[kept == 1].tolist()) for row, kept in zip(positions, weights, strict=True)}
    assert found == {(5, 6), (7,)}


def test_a_continuation_after_the_separator_joins_the_word_before_it():
    # So does Google's create_masked_lm_predictions: it looks at the candidate before, not the row.
    continuation = np.zeros(VOCABULARY, bool)
    continuation[20_000:] = True
    ids = np.array([[CLS, 10, 11, SEP, 20_001, SEP]] * 100, np.int32)
    _, positions, _, weights = mask(
        ids, rate=0.34, whole_word=True, continuation=continuation, maximum=2
    )
    assert (weights[:, 0] == 1).all()
    both = positions[weights[:, 1] == 1]
    assert {tuple(row) for row in both.tolist()} == {(2, 4)}
