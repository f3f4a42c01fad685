"""Repeated documents: planted ones are found, others are not, against exact set arithmetic."""

import re
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.corpus import dedup as duplicates
from bertsmith.corpus.build.batches import BatchReader
from bertsmith.corpus.dedup import DuplicateFinder, ngram_hashes, sign, word_hashes
from bertsmith.text.readers.documents import read_documents

from ..tiny import write

TEXTS = st.lists(st.text("aBc1é \n.,-猫かไ", max_size=30), max_size=5)
WORD = re.compile("[a-z1é]+|[猫かไ]")  # of this alphabet, lower-cased
BOOKS = Path(__file__).parents[3] / "shared/data/corpus"


@pytest.fixture
def find(tmp_path):
    """texts -> [(document, of, similarity)], by way of a file."""
    pytest.importorskip("rensa", reason="the extra dedup is not installed")

    def find(texts, near=True, workers=1, characters=2000, staying=0):
        path = write(tmp_path / "texts.txt", "\n\n".join(texts))
        with ExitStack() as stack:
            finder = DuplicateFinder(stack, tmp_path, near)
            batches = BatchReader([path], "text", characters=characters)
            signed = sign(batches, finder, workers)
            assert sum(len(one.exact) for _, one in signed) == len(texts)
            finder.num_staying = staying
            found = finder.repetitions(duplicates.SIMILARITY)
            return [tuple(one) for one in found], list(finder.entries(found))

    return find


def words(dice, count):
    return [f"word{number}" for number in dice.integers(0, 3000, count)]


def edited(dice, text, share=0.05):
    found = text.split(" ")
    for place in dice.choice(len(found), max(1, round(share * len(found))), replace=False):
        found[place] = f"other{dice.integers(0, 3000)}"
    return " ".join(found)


def jaccard(first, second):
    """The similarity of the sets of three-word runs."""
    sets = [set(zip(*(t.split()[k:] for k in range(3)), strict=False)) for t in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_planted_duplicates_are_found_and_no_others(find):
    dice = np.random.default_rng(0)
    texts = [" ".join(words(dice, int(dice.integers(40, 400)))) for _ in range(200)]
    copied = dice.choice(200, 40, replace=False).tolist()
    texts += [texts[k] for k in copied] + [edited(dice, texts[k]) for k in copied]
    found, entries = find(texts)
    by_document = {document: (of, similarity) for document, of, similarity in found}
    assert min(by_document) >= 200  # the first copy stays
    for place, k in enumerate(copied):
        assert by_document[200 + place] == (k, 1.0)
    near = [by_document.get(240 + place, (-1, 0))[0] == k for place, k in enumerate(copied)]
    assert sum(near) >= 0.95 * 40
    assert [one["reason"] for one in entries[:40]] == ["duplicate"] * 40
    assert entries[0]["document"] == 200 and entries[0]["line"] == 401
    assert entries[0]["of"]["line"] == 2 * copied[0] + 1


def test_the_estimate_is_close_to_the_exact_similarity(find):
    dice = np.random.default_rng(1)
    base = " ".join(words(dice, 2000))
    texts = [base, *(edited(dice, base, share) for share in (0.01, 0.03, 0.05))]
    found, _ = find(texts)
    assert [document for document, _, _ in found] == [1, 2, 3]
    for document, of, similarity in found:
        # four standard errors of 128 values
        assert abs(similarity - jaccard(texts[of], texts[document])) < 4 * 0.5 / np.sqrt(128)


@pytest.fixture
def alike():
    """Three texts: the second like the first, the third like the second alone."""
    dice = np.random.default_rng(2)
    first = words(dice, 1000)
    second = [*first[:820], *words(dice, 180)]
    third = [*second[180:], *words(dice, 180)]
    texts = [" ".join(one) for one in (first, second, third)]
    assert jaccard(*texts[:2]) > 0.68 < jaccard(*texts[1:])
    assert jaccard(texts[0], texts[2]) < 0.48  # three standard errors below the bound
    return texts


def test_a_document_is_left_out_only_for_one_that_stays(find, alike):
    assert [one[:2] for one in find(alike)[0]] == [(1, 0)]
    # an equal copy of what is left out is left out for the same one
    assert [one[:2] for one in find([*alike, alike[1]])[0]] == [(1, 0), (3, 0)]


def test_what_is_only_compared_with_stays_and_counts_as_staying(find, alike):
    texts = [alike[k] for k in (0, 1, 0, 2, 0)]
    assert [one[:2] for one in find(texts)[0]] == [(1, 0), (2, 0), (4, 0)]
    assert [one[:2] for one in find(texts, staying=3)[0]] == [(3, 1), (4, 0)]
    assert find(texts, staying=5)[0] == []


def test_signs_and_case_do_not_matter_but_wordless_documents_differ(find):
    found, entries = find(["A b, c d!", "a B c D", "***", "---", "***", "..."])
    assert [one[:2] for one in found] == [(1, 0), (4, 2)]
    assert [one["reason"] for one in entries] == ["near duplicate", "duplicate"]


def test_equal_ones_alone_need_no_package(find, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    dice = np.random.default_rng(3)
    text = " ".join(words(dice, 100))
    assert find([text, edited(dice, text), text], near=False)[0] == [(2, 0, 1.0)]
    with pytest.raises(ModuleNotFoundError, match="rensa"):
        duplicates.Signer(True)


def test_two_workers_find_what_one_does(find):
    dice = np.random.default_rng(4)
    texts = [" ".join(words(dice, 60)) for _ in range(60)]
    texts += [edited(dice, text) for text in texts[:20]] + texts[:5]
    assert find(texts, workers=2) == find(texts)


def test_no_document_at_all(tmp_path):
    with ExitStack() as stack:
        assert DuplicateFinder(stack, tmp_path, True).repetitions() == []


@pytest.mark.parametrize("similarity", [0.49, 1.01, float("nan")])
def test_impossible_similarities_are_named(similarity):
    with pytest.raises(ValueError, match=f"`similarity={similarity}`: expected"):
        duplicates.check_similarity(similarity)


@pytest.mark.slow
@pytest.mark.skipif(not BOOKS.is_dir(), reason="the books are not on this machine")
def test_the_books_have_none_and_planted_ones_are_found(find):
    books = sorted(BOOKS.glob("books-*.txt.xz"))
    texts = ["\n".join(document.lines) for document in read_documents(books)]
    dice = np.random.default_rng(5)
    chosen = dice.choice(len(texts), 500, replace=False).tolist()
    near = [edited(dice, texts[k].replace("\n", " ")) for k in chosen]
    found, _ = find([*texts, *near, *(texts[k] for k in chosen[:100])], characters=1 << 20)
    like = {document: of for document, of, _ in found}
    assert min(like) >= len(texts)  # no false ones
    first_near, first_exact = len(texts), len(texts) + len(near)
    right = sum(like.get(first_near + place) == k for place, k in enumerate(chosen))
    assert right >= 0.95 * len(chosen)
    assert all(like[first_exact + place] == k for place, k in enumerate(islice(chosen, 100)))


# --- hashes of words and runs ---


def same(hashes, values):
    """True if hashes are equal exactly where the values are."""
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
    hashes, starts = ngram_hashes(*word_hashes(texts), size)
    runs = []
    for text in texts:
        words = WORD.findall(text.lower())
        count = max(len(words) - size + 1, min(len(words), 1))
        runs.append([tuple(words[k : k + size]) for k in range(count)])
    assert np.diff(starts).tolist() == [len(one) for one in runs]
    assert same(hashes, sum(runs, []))


@pytest.mark.parametrize("texts", [[], [""], ["...", "?"]])
def test_texts_without_words_have_no_runs(texts):
    hashes, starts = ngram_hashes(*word_hashes(texts), 3)
    assert len(hashes) == 0 and starts.tolist() == [0] * (len(texts) + 1)


def test_a_lone_surrogate_and_a_letter_that_grows_are_taken():
    # "İ".lower() is two characters, the second a mark: the texts behind it must not shift
    hashes, starts = word_hashes(["\ud800 İ", "b"])
    assert starts.tolist() == [0, 1, 2]
    assert hashes[1] == word_hashes(["b"])[0][0]
