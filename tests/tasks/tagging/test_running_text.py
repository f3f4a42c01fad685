"""Running text as sentences for a tagger: its words, against CoNLL's own, and its entities."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from bertsmith.tasks.tagging.running_text import given_sentences, running_text, word_spans
from bertsmith.tasks.tagging.schemes import located_entities
from bertsmith.tasks.tagging.sentences import tagged_rows

from ..made import DATA, needs

SURE = np.array([1.0, 0.5, 0.75, 1.0, 1.0])


def test_running_text_has_words_and_their_places():
    sentences = running_text(["Ann, ran.", "", " Bob"], "IOB2", "-")
    assert sentences.words == ["Ann", ",", "ran", ".", "Bob"] and sentences.tags is None
    assert sentences.boundaries.tolist() == [0, 4, 5] and sentences.rows.tolist() == [0, 2]
    assert sentences.lines.tolist() == [1, 1, 1, 1, 3] and sentences.num_rows == 3
    assert sentences.spans.tolist() == [[0, 3], [3, 4], [5, 8], [8, 9], [1, 4]]
    last = sentences.select([1])
    assert last.spans.tolist() == [[1, 4]] and last.texts[last.rows[0]] == " Bob"
    with pytest.raises(ValueError, match="-: no words in this file"):
        running_text(["", " "], "IOB2", "-")


def test_rows_of_running_text_have_entities():
    sentences = running_text(["New York, Ann", "", "Bob"], "IOB2", "-")
    tags = ["B-LOC", "I-LOC", "O", "B-PER", "B-PER"]
    rows = tagged_rows(sentences, tags, SURE)
    assert rows[0] == {
        "tokens": ["New", "York", ",", "Ann"],
        "tags": ["B-LOC", "I-LOC", "O", "B-PER"],
        "probabilities": [1.0, 0.5, 0.75, 1.0],
        "entities": [
            {"text": "New York", "start": 0, "end": 8, "label": "LOC", "score": 0.75},
            {"text": "Ann", "start": 10, "end": 13, "label": "PER", "score": 1.0},
        ],
    }
    assert rows[1] == {"tokens": [], "tags": [], "probabilities": [], "entities": []}
    assert rows[2]["entities"][0]["text"] == "Bob"
    split = replace(sentences, texts=None, spans=None)  # words of a table
    for row in tagged_rows(split, tags, SURE):
        assert set(row) == {"tokens", "tags", "probabilities"}


def test_plain_tags_are_an_entity_a_word():
    spans = np.array([[0, 1], [2, 3]])
    (entity,) = located_entities("a b", spans, ["O", "PER"], SURE, "plain")
    assert entity == {"text": "b", "start": 2, "end": 3, "label": "PER", "score": 0.5}


def test_probabilities_have_four_digits_as_other_answers_do():
    (row,) = tagged_rows(running_text(["Ann"], "IOB2", "-"), ["B-PER"], np.array([0.123456]))
    assert row["probabilities"] == [0.1235] and row["entities"][0]["score"] == 0.1235


def test_what_people_hand_over():
    assert given_sentences("Ann ran.", "IOB2").words == ["Ann", "ran", "."]
    assert given_sentences(np.array(["Ann ran.", "Bob"]), "IOB2").num_rows == 2
    split = given_sentences([("Ann", "ran."), [], np.array(["New York"])], "IOB2")
    assert split.words == ["Ann", "ran.", "New York"] and split.rows.tolist() == [0, 2]
    assert split.texts == ["Ann ran.", "", "New York"]
    assert split.spans.tolist() == [[0, 3], [4, 8], [0, 8]]
    assert given_sentences([], "IOB2").num_rows == 0
    assert given_sentences(["", " "], "IOB2").words == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "text: expected a text"),
        (["Ann", ["ran"]], r"text\[1\] is list"),
        ([["Ann"], "ran"], r"text\[1\] is a text, but text\[0\] is not"),
        ([["Ann"], ["ran", 3]], r"text\[1\]\[1\] is int 3"),
        ([None], r"text\[0\]: expected a text .* not None"),
    ],
)
def test_what_is_neither_texts_nor_words_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        given_sentences(given, "IOB2")


# --- words of running text ---


def words(text):
    return [text[begin:end] for begin, end in word_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Rome, Paris.", "Rome , Paris ."),
        ('He said: "Go (now)!"', 'He said : " Go ( now ) ! "'),
        ("in the U.S. at 9 a.m. today", "in the U.S. at 9 a.m. today"),
        ("a U.S.-led force", "a U.S.-led force"),
        ("J. K. Rowling and Mr. Smith of Acme Corp. said", None),
        ("It was Plan B.", "It was Plan B ."),
        ("They don't, he CAN'T; it's we'll I'd", "They do n't , he CA N'T ; it 's we 'll I 'd"),
        ("O'Neil's and O\u2019Neil\u2019s", "O'Neil 's and O\u2019Neil \u2019s"),
        ("AT&T, a well-known ex-S&P firm", "AT&T , a well-known ex-S&P firm"),
        ("3.5 1,000 1/2 9:30 6-3 .500 +44 20-month", None),
        ("3.5%, $10 and US$ 5.", "3.5 % , $ 10 and US$ 5 ."),
        ("and/or", "and / or"),
        ("1. Rome won 2.", "1. Rome won 2 ."),
        ("so... -- well", "so ... -- well"),
        ("see https://a.b/c?d=e, ann.lee@x.org.", "see https://a.b/c?d=e , ann.lee@x.org ."),
        ("“Café” — naïve…", "“ Café ” — naïve …"),
        ("\u6771\u4eac\u3067\u3059\u3002", "\u6771 \u4eac \u3067\u3059 \u3002"),
        ("\u0928\u092e\u0938\u094d\u0924\u0947 x", "\u0928\u092e\u0938\u094d\u0924\u0947 x"),
        ("a\u00a0b\tc\u3000d", "a b c d"),
        # words that are parted already stay
        ("He does n't like Rome , said Mr. O'Neil 's U.S. team ( 3.5 % ) .", None),
        ("", ""),
        (" \n", ""),
    ],
)
def test_words(text, expected):
    assert words(text) == (text if expected is None else expected).split()


def test_spans_are_places_in_the_text_as_it_was_given():
    text = "  \u201cRome\u201d,  he said. "
    assert word_spans(text)[:3] == [(2, 3), (3, 7), (7, 8)]
    assert "".join(words(text)) == "".join(text.split())


TO_THE_LEFT = set(""". , ; : ! ? ) ] % ' 's 'S 're 'm 've 'll 'd n't N'T ... /""".split())  # noqa: SIM905


def sentences(path):
    text = path.read_text(encoding="utf-8").splitlines()
    rows = [line for line in text if not line.startswith("-DOCSTART-")]
    for has_words, group in groupby(rows, lambda line: bool(line.strip())):
        if has_words:
            yield [line.split()[0] for line in group]


def running(sentence):
    """(text as people write it, where the words stand in it)."""
    text, spans, is_glued, is_quoted = "", [], True, False
    for word in sentence:
        is_glued |= word in TO_THE_LEFT or (word == '"' and is_quoted)
        text += "" if is_glued else " "
        spans.append((len(text), len(text) + len(word)))
        text += word
        is_glued = word in ("(", "[", "$", "/") or (word == '"' and not is_quoted)
        is_quoted ^= word == '"'
    return text, spans


@needs("conll2003")
@pytest.mark.parametrize("name", ["eng.testa", "eng.testb"])
def test_the_words_of_conll_come_back_out_of_running_text(name):
    """testa 99.93%, testb 99.74%; blanks alone give 76%."""
    wanted = found = both = 0
    for sentence in sentences(DATA / "conll2003" / name):
        text, spans = running(sentence)
        given = word_spans(text)
        wanted, found = wanted + len(spans), found + len(given)
        both += len(set(spans) & set(given))
    assert both / wanted > 0.997 and both / found > 0.997
