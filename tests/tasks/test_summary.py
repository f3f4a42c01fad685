import numpy as np

from bertsmith.tasks.examples import Examples, label_conflicts, summarise


def of(texts, labels, names=("a", "b"), pairs=None) -> Examples:
    return Examples(texts, pairs, labels, names, "mem", list(range(2, len(texts) + 2)))


def test_classes_by_hand():
    train = of(["one two", "one two", "three", "a b c"], np.array([0, 0, 1, 1]))
    dev = of(["three", "new", " a b c"], np.array([1, 0, 0]))
    assert summarise(train, dev).splitlines() == [
        "train: 4 examples; a 50.0%, b 50.0%; words: median 2, 95% up to 3, longest 3",
        "dev:   3 examples; a 66.7%, b 33.3%; words: median 1, 95% up to 3, longest 3",
        "exact duplicates: 1 rows of train repeat an earlier one, 2 of dev are also in train",
    ]


def test_scores_and_sets_by_hand():
    scores = of(["a", "b", "c", "d", "e"], np.array([0, 1, 2, 3, 4.5], np.float32), ())
    assert summarise(scores, scores).startswith(
        "train: 5 examples; scores 0 to 4.5, mean 2.1, quartiles 1, 2, 3; words:"
    )
    sets = of(["a", "b", "c", "d"], np.array([[0, 1], [1, 1], [0, 0], [0, 1]], bool))
    assert summarise(sets, sets).startswith(
        "train: 4 examples; 1.00 labels a text, 1 without; b 75.0%, a 25.0%; words:"
    )


def test_the_same_text_with_two_labels():
    texts = ["x", "y", "x ", "x", "y"]
    assert label_conflicts(of(texts, np.array([0, 1, 0, 1, 1]))) == [[0, 3]]
    assert label_conflicts(of(texts, np.array([0.0, 1, 0, 0, 2], np.float32), ())) == [[1, 4]]
    sets = np.array([[0, 1], [1, 1], [1, 1], [1, 0], [1, 1]], bool)
    assert label_conflicts(of(texts, sets)) == [[0, 2, 3]]
    assert not label_conflicts(of(texts, np.array([0, 1, 0, 1, 1]), pairs=list("pqrst")))
    train = of(texts, np.array([0, 1, 0, 1, 1]))
    assert summarise(train, train).endswith(
        "\nlabel conflicts: 1 texts of train have two labels or more, the first in lines 2 and 5"
    )
