"""Masked positions: exact counts, the 80/10/10 mixture, whole words, spans."""

import numpy as np
import pytest

from bertsmith.corpus.examples import masking as masks
from bertsmith.corpus.examples.masking import MaskRules, predictions_per_length, span_length
from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.rng import fold_in, seed_key

from ..made import CLS, MASK, SEP

VOCABULARY = 30_522
NEVER, ABOVE = np.zeros(VOCABULARY, bool), np.arange(VOCABULARY) >= 20_000  # continues a word


def mask(
    ids, rate=0.15, masking="token", continuation=NEVER, seed=0, maximum=None, shares=(0.8, 0.1)
):
    """(masked ids, positions, labels, weights) of full rows with [CLS] and [SEP] in place.

    Whatever the rules, labels are the tokens that stood there, none of them special, and all other
    tokens stay.
    """
    rows, length = ids.shape
    maximum = maximum or round(length * rate)
    key = seed_key(seed)
    keys = np.array([fold_in(key, row) for row in range(rows)], np.uint64)
    masked, lengths = ids.copy(), np.full(rows, length, np.int32)
    positions, labels = np.zeros((2, rows, maximum), np.int32)
    predictions = positions, labels, np.zeros((rows, maximum), np.float32)
    counts = predictions_per_length(length, rate, maximum)
    kind = masks.MASKINGS[masking]
    continuation = continuation.view()
    continuation.flags.writeable = False  # as a vocabulary's: compiled once for both
    rules = MaskRules(counts, continuation, kind, shares[0], sum(shares), MASK, CLS, SEP)
    masks.mask_rows(masked, lengths, keys, rules, predictions)
    kept, chosen = predictions[2] == 1, chosen_of(ids, *predictions)
    assert (labels == np.take_along_axis(ids, positions, 1))[kept].all()
    assert not np.isin(ids[chosen], (CLS, SEP)).any() and (masked == ids)[~chosen].all()
    return masked, *predictions


def chosen_of(ids, positions, _, weights):
    """Where the tokens of rows are to be predicted."""
    chosen = np.zeros(ids.shape, bool)
    np.put_along_axis(chosen, positions, weights == 1, 1)
    return chosen


def rows_of_ids(rows, length, seed=0):
    ids = np.random.default_rng(seed).integers(5, VOCABULARY, (rows, length), dtype=np.int32)
    ids[:, 0], ids[:, -1], ids[:, length // 2] = CLS, SEP, SEP
    return ids


@pytest.mark.parametrize(("length", "expected"), [(128, 19), (512, 77)])
def test_full_rows_mask_exactly_the_paper_s_count(length, expected):
    _, positions, _, weights = mask(rows_of_ids(500, length))
    assert weights.shape == (500, expected) and (weights == 1).all()
    assert (np.diff(positions) > 0).all()


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
    ids = rows_of_ids(2000, 128, seed=2)
    ids[:, 65] = 10  # B begins with a word of its own
    chosen = chosen_of(ids, *mask(ids, masking="word", continuation=ABOVE)[1:])
    assert chosen.sum(1).max() == 19 and chosen.sum(1).min() >= 15
    joins = ABOVE[ids[:, 1:]] & ~np.isin(ids[:, :-1], (CLS, SEP))
    assert (chosen[:, 1:] == chosen[:, :-1])[joins].all()


def test_a_set_that_would_exceed_the_count_is_skipped():
    words = [10, 20_001, 20_002, 20_003, 11, 20_004, 12]  # words of 4, 2 and 1 pieces
    ids = np.array([[CLS, *words, SEP]] * 300, np.int32)
    _, positions, _, weights = mask(ids, 0.22, "word", ABOVE, maximum=2)
    found = {tuple(row[kept == 1].tolist()) for row, kept in zip(positions, weights, strict=True)}
    assert found == {(5, 6), (7,)}


@pytest.mark.parametrize("masking", ["word", "span"])
def test_a_row_in_which_no_word_fits_has_one_prediction(masking):
    ids = np.array([[CLS, 10, 20_001, SEP, 11, 20_002, 20_003, SEP]] * 300, np.int32)
    _, positions, _, weights = mask(ids, masking=masking, continuation=ABOVE)
    assert (weights == 1).all() and set(positions[:, 0].tolist()) == {1, 2, 4, 5, 6}


def test_a_continuation_after_the_separator_joins_the_word_before_it():
    # So does Google's create_masked_lm_predictions: it looks at the candidate before, not the row.
    ids = np.array([[CLS, 10, 11, SEP, 20_001, SEP]] * 100, np.int32)
    _, positions, _, weights = mask(ids, 0.34, "word", ABOVE, maximum=2)
    assert (weights[:, 0] == 1).all()
    both = positions[weights[:, 1] == 1]
    assert {tuple(row) for row in both.tolist()} == {(2, 4)}


def words_of_pieces(rows, length, seed):
    """Rows of words of one to four pieces, and which ids continue a word (half of them do)."""
    ids = rows_of_ids(rows, length, seed)
    ids[:, 1] = ids[:, length // 2 + 1] = 10  # each segment begins with a word of its own
    ids[:, 4:-1:4] = np.where(ids[:, 4:-1:4] == SEP, SEP, 11)
    return ids, np.arange(VOCABULARY) >= 15_000


@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.5, 0.2), (1.0, 0.0)])
@pytest.mark.parametrize("rate", [0.15, 0.25, 0.3, 0.4])
@pytest.mark.parametrize("masking", ["token", "word", "span"])
def test_count_and_mixture_of_every_masking_and_rate(masking, rate, shares):
    ids, continuation = words_of_pieces(1200, 128, seed=3)
    masked, positions, labels, weights = mask(ids, rate, masking, continuation, 4, shares=shares)
    # Words of one piece are left to fill the last slots, so every row is full.
    assert (weights == 1).all() and weights.shape[1] == round(128 * rate)
    assert (np.diff(positions) > 0).all()
    found = np.take_along_axis(masked, positions, 1)
    is_mask, is_kept = found == MASK, found == labels
    mixture = [is_mask.mean(), is_kept.mean()]
    # 1200 x 19 draws at least; a span of up to ten words is one draw, so its error is larger:
    # four standard errors of a share of 0.5 over 22,800 / 5 draws.
    tolerance = 0.03 if masking == "span" else 0.0133
    np.testing.assert_allclose(mixture, shares, atol=tolerance)


def test_span_lengths_are_the_paper_s():
    # Section 3.1: l ~ Geo(0.2), at most 10, mean 3.8.
    shares = (np.arange(100_000) + 0.5) / 100_000
    counts = np.bincount([span_length(share) for share in shares], minlength=11) / 100_000
    geometric = 0.8 ** np.arange(10) * 0.2
    np.testing.assert_allclose(counts[1:], geometric / geometric.sum(), atol=2e-5)
    assert round(counts @ np.arange(11), 1) == 3.8


def test_spans_are_runs_of_whole_words_that_share_one_fate():
    ids, continuation = words_of_pieces(600, 128, seed=5)
    masked, *predictions = mask(ids, 0.15, "span", continuation, seed=6)
    chosen = chosen_of(ids, *predictions)
    joins = continuation[ids[:, 1:]] & ~np.isin(ids[:, :-1], (CLS, SEP))
    assert (chosen[:, 1:] == chosen[:, :-1])[joins].all()
    # Tokens: 19 singles would make some 16 runs a row of 128; spans make three to five.
    runs = (np.diff(chosen.astype(int), axis=1) == 1).sum(1)
    assert 2 < runs.mean() < 6
    # Neighbours that are both chosen mostly share a draw; apart they would agree in 0.68 of cases.
    both = chosen[:, 1:] & chosen[:, :-1]
    agree = (masked[:, 1:] == MASK) == (masked[:, :-1] == MASK)
    assert agree[both].mean() > 0.95


def test_a_span_ends_at_a_special_token_and_at_the_count():
    ids = np.array([[CLS, 10, 11, SEP, 12, 13, 14, SEP]] * 2000, np.int32)
    assert (mask(ids, 0.5, "span", shares=(1.0, 0.0))[3].sum(1) == 4).all()
    # One draw a span: with shares of one half each, a segment's tokens may differ only between
    # spans, and a span never reaches over the separator.
    _, positions, _, _ = mask(ids, 0.25, "span", shares=(0.5, 0.5))
    pairs = {tuple(row) for row in positions.tolist()}
    assert (2, 4) in pairs  # two spans of one word
    across = positions.tolist().count([2, 4]) / len(ids)
    within = sum(row in ([1, 2], [4, 5], [5, 6]) for row in positions.tolist()) / len(ids)
    assert across < 0.15 and within > 0.6


def test_the_words_of_rows_are_those_before_masking():
    """[CLS] 9 [SEP] 9 8 [SEP] and [CLS] 7 [SEP] [PAD] ..., with 9 and 7 masked."""
    batch = PretrainingBatch.empty(2, 6, 2, pad_id=0)
    batch.input_ids[:] = [[2, 4, 3, 9, 8, 3], [2, 4, 3, 0, 0, 0]]
    batch.lengths[:] = 6, 3
    batch.masked_positions[:, 0], batch.masked_labels[:, 0] = 1, (9, 7)
    batch.masked_weights[:, 0] = 1.0
    assert batch.words(-1).tolist() == [[-1, 9, -1, 9, 8, -1], [-1, 7, -1, -1, -1, -1]]
    assert batch.input_ids[0, 1] == 4  # a copy
