"""Hashes of words and runs, against Python's own regular expressions and sets."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.corpus.dedup import run_hashes, word_hashes

TEXTS = st.lists(st.text("aBc1é \n.,-猫かไ", max_size=30), max_size=5)
WORD = re.compile("[a-z1é]+|[猫かไ]")  # of this alphabet, lower-cased


def same(hashes, values):
    """Whether hashes are equal exactly where the values are."""
    assert len(hashes) == len(values)
    return all(
        (a == b) == (x == y)
        for a, x in zip(hashes, values, strict=True)
        for b, y in zip(hashes, values, strict=True)
    )


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_words_are_those_of_a_regular_expression(texts):
    hashes, starts = word_hashes(texts)
    words = [WORD.findall(text.lower()) for text in texts]
    assert np.diff(starts).tolist() == [len(one) for one in words]
    assert same(hashes, sum(words, []))


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(1, 4))
def test_runs_are_all_windows_and_a_short_text_is_one(texts, size):
    hashes, starts = run_hashes(*word_hashes(texts), size)
    runs = []
    for text in texts:
        words = WORD.findall(text.lower())
        count = max(len(words) - size + 1, min(len(words), 1))
        runs.append([tuple(words[k : k + size]) for k in range(count)])
    assert np.diff(starts).tolist() == [len(one) for one in runs]
    assert same(hashes, sum(runs, []))


@pytest.mark.parametrize("texts", [[], [""], ["...", "?"]])
def test_texts_without_words_have_no_runs(texts):
    hashes, starts = run_hashes(*word_hashes(texts), 3)
    assert len(hashes) == 0 and starts.tolist() == [0] * (len(texts) + 1)


def test_a_lone_surrogate_and_a_letter_that_grows_are_taken():
    # "İ".lower() is two characters, the second a mark: the texts behind it must not shift
    hashes, starts = word_hashes(["\ud800 İ", "b"])
    assert starts.tolist() == [0, 1, 2]
    assert hashes[1] == word_hashes(["b"])[0][0]
