"""`tokenize`, `encode` and the call of a `Tokenizer`, against those of transformers."""

import re

import numpy as np
import pytest

from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

TEXTS = ["The cats sat.", "", "Zürich: 東京, naïve cafés!", "unaffable " * 20]
PAIRS = ["Who sat?", "A mat.", "", "It is so."]


@pytest.fixture(scope="module")
def ours(published_folder):
    return Tokenizer.from_pretrained(published_folder)


@pytest.fixture(scope="module")
def theirs(published_folder):
    transformers = pytest.importorskip("transformers")
    return transformers.BertTokenizerFast.from_pretrained(published_folder)


@pytest.fixture
def small():
    return Tokenizer(Vocabulary([*SPECIAL, "play", "##ing", "!"]))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_and_ids_are_those_of_transformers(ours, theirs, text):
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, "A mat.") == theirs.encode(text, "A mat.")
    cut = theirs.encode(text, "A mat.", max_length=9, truncation=True)
    assert len(ours.encode(text, "A mat.", max_length=9)) == len(cut)


@pytest.mark.parametrize("pairs", [None, PAIRS])
@pytest.mark.parametrize("padding", [False, True, "max_length"])
def test_a_call_gives_what_transformers_gives(ours, theirs, pairs, padding):
    length = 128 if padding == "max_length" else None
    expected = theirs(TEXTS, pairs, padding=padding, max_length=length, truncation=bool(length))
    assert ours(TEXTS, pairs, padding=padding, max_length=length) == dict(expected)
    one = theirs(TEXTS[0], pairs and pairs[0])
    assert ours(TEXTS[0], pairs and pairs[0]) == dict(one)


def test_a_call_gives_arrays(ours, theirs):
    found = ours(TEXTS, PAIRS, padding=True, return_tensors="np")
    expected = theirs(TEXTS, PAIRS, padding=True, return_tensors="np")
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    assert ours(TEXTS[0], return_tensors="np")["input_ids"].shape == (1, 6)


def test_known_ids(small):
    assert small.tokenize("playing!") == ["play", "##ing", "!"]
    assert small.encode("playing", "!") == [2, 5, 6, 3, 7, 3]
    assert small(["playing!", "!"], max_length=4) == {
        "input_ids": [[2, 5, 6, 3], [2, 7, 3]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1]],
    }
    assert small([]) == {"input_ids": [], "token_type_ids": [], "attention_mask": []}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("play", {"padding": "longest"}, "`padding='longest'`: True, False or 'max_length'"),
        ("play", {"padding": "max_length"}, "`padding='max_length'` needs `max_length`"),
        (["play", "play!"], {"return_tensors": "np"}, "one length: use `padding=True`"),
        ("play", {"return_tensors": "pt"}, "`return_tensors='pt'`: known is np"),
        (["play", None], {}, "text[1] is None"),
        (["play"], {"text_pair": ["!", "!"]}, "1 texts, but 2 second texts"),
    ],
)
def test_what_a_call_refuses(small, text, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        small(text, **settings)
