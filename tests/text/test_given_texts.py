"""One string is one text; lists, arrays and Series are texts; the rest is refused by name."""

import numpy as np
import pytest

from bertsmith.text.tokenizer.tokenizer import texts_of


class Series:
    """A stand-in for a column of pandas: no Sequence, but it has values, an order and an index."""

    ndim = 1

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, label):
        raise KeyError(label)  # labels that do not begin at 0


class Table(Series):
    """A stand-in for pandas' DataFrame, which iterates over the names of its columns."""

    ndim = 2


@pytest.mark.parametrize(
    "given",
    [
        ["one", "two"],
        ("one", "two"),
        np.array(["one", "two"]),
        np.array(["one", "two"], object),
        Series(["one", "two"]),
        (text for text in ("one", "two")),
        {1: "one", 2: "two"}.values(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_all_that_has_an_order_is_texts(given):
    assert texts_of(given) == ["one", "two"]


def test_a_column_of_pandas():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": ["one", "two", "three"]}, index=[7, 8, 9])
    assert texts_of(table["text"][1:]) == ["two", "three"]
    with pytest.raises(ValueError, match="not DataFrame"):
        texts_of(table)
    with pytest.raises(ValueError, match=r"texts\[1\] is (None|float nan): expected a text"):
        texts_of(pandas.Series(["one", None]))


def test_one_string_is_one_text():
    assert texts_of("a text") == texts_of(np.str_("a text")) == ["a text"]
    assert texts_of("") == [""] and texts_of([]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"texts: expected a text \(str\) or a list, array or Series of texts, not None"),
        (3, "expected .* not int 3"),
        (b"bytes", "not bytes b'bytes'"),
        ({"a": 1}, "not dict {'a': 1}"),
        ({"a", "b"}, "not set"),
        (Table(["text"]), "not Table"),
        (np.array([["a", "b"]]), "not ndarray"),
        (np.array("a"), "not ndarray"),
        (["a", None], r"^texts\[1\] is None: expected a text \(str\)$"),
        (["a", "b", float("nan")], r"texts\[2\] is float nan"),
        (np.array([b"a"]), r"texts\[0\] is bytes_ "),
        ([["a"]], r"texts\[0\] is list \['a'\]"),
    ],
)
def test_anything_else_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        texts_of(given)


def test_messages_call_it_as_the_caller_does():
    with pytest.raises(ValueError, match=r"pairs\[0\] is int 1"):
        texts_of([1], "pairs")
