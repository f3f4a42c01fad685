"""IBM model 1 against EM by hand, and against the algorithm as textbooks have it."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from bertsmith.experiments.lineage.pairs import Pairs
from bertsmith.experiments.lineage.word_for_word import NULL, WordForWord

from ...tiny import write

BOOKS = Pairs(["das Haus", "das Buch", "ein Buch"], ["the house", "the book", "a book"], "books")
LONG = Pairs(
    ["das rote Haus.", "das das Buch", "ein rotes Buch!", "Haus, Buch"],
    ["the red house.", "the the book", "a red book!", "house, book and more"],
    "long",
)


def by_the_book(pairs, iterations):
    """p(e | f) as {f: {e: p}}, one count after the other."""
    split = [
        ([NULL, *f.split()], e.split()) for f, e in zip(pairs.source, pairs.target, strict=True)
    ]
    table = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(iterations):
        counts = defaultdict(Counter)
        for source, target in split:
            for e in target:
                total = sum(table[f][e] for f in source)
                for f in source:
                    counts[f][e] += table[f][e] / total
        table = {f: {e: c / sum(row.values()) for e, c in row.items()} for f, row in counts.items()}
    return table


def test_two_steps_of_em_by_hand():
    # First each e is shared equally by its f: of `das` `the` has 1/3 + 1/3, `house` and `book` 1/3.
    one = WordForWord.train(BOOKS, 1).table
    assert one["das"] == pytest.approx({"the": 1 / 2, "house": 1 / 4, "book": 1 / 4})
    assert one["Haus"] == pytest.approx({"the": 1 / 2, "house": 1 / 2})
    assert one[NULL] == pytest.approx({"the": 1 / 3, "book": 1 / 3, "house": 1 / 6, "a": 1 / 6})
    # Then `das` gets of `the` 1/2 of 4/3, and 1/2 of 13/12; of `house` 1/4 of 11/12; of `book` 1/4
    # of 13/12: 87/104, 3/11 and 3/13.
    two = WordForWord.train(BOOKS, 2).table
    assert two["das"]["the"] == pytest.approx(319 / 511)


@pytest.mark.parametrize("iterations", [1, 3, 8])
def test_em_is_that_of_the_book(iterations):
    spaced = Pairs(*([t.replace(".", " ￭.").replace("!", " ￭!").replace(",", " ￭,") for t in side]
                     for side in (LONG.source, LONG.target)), "spaced")  # fmt: skip
    expected = by_the_book(spaced, iterations)
    found = WordForWord.train(LONG, iterations).table
    assert found.keys() == expected.keys()
    for f, row in expected.items():
        # 1e-4: what is less is not kept; float32 is exact to 1e-7
        assert found[f] == pytest.approx({e: p for e, p in row.items() if p >= 1e-4})


def test_words_are_translated_one_by_one_and_unknown_ones_copied():
    model = WordForWord.train(BOOKS, 20)
    assert model.translate(["das Buch", "ein Schiff"]) == ["the book", "a Schiff"]
    assert model.translate([]) == []
    assert WordForWord.train(LONG, 20).translate(["das Haus."]) == ["the house."]


def test_a_model_is_one_file_without_pickles(tmp_path):
    model = WordForWord.train(LONG, 5)
    model.save(tmp_path / "model.npz")
    again = WordForWord.open(tmp_path / "model.npz")
    assert again.table == model.table
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_another_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="text.npz: not a word-for-word model"):
        WordForWord.open(write(tmp_path / "text.npz", "words"))
    np.savez(tmp_path / "other.npz", source_words=np.zeros(2))
    with pytest.raises(ValueError, match="other.npz: not a word-for-word model"):
        WordForWord.open(tmp_path / "other.npz")
    np.savez(tmp_path / "objects.npz", source_words=np.array([{}], object))
    with pytest.raises(ValueError, match="objects.npz: not a word-for-word model"):
        WordForWord.open(tmp_path / "objects.npz")
