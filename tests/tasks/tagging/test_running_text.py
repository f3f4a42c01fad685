"""Running text and lists of words as sentences for a tagger, and the entities found in them."""

from dataclasses import replace

import numpy as np
import pytest

from bertsmith.tasks.tagging.running_text import given_sentences, running_text
from bertsmith.tasks.tagging.schemes import located_entities
from bertsmith.tasks.tagging.sentences import tagged_rows

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
    assert [set(row) for row in tagged_rows(split, tags, SURE)] == [
        {"tokens", "tags", "probabilities"}
    ] * 3


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
        (None, "texts: expected a text"),
        (["Ann", ["ran"]], r"texts\[1\] is list"),
        ([["Ann"], "ran"], r"texts\[1\] is a text, but texts\[0\] is not"),
        ([["Ann"], ["ran", 3]], r"texts\[1\]\[1\] is int 3"),
        ([None], r"texts\[0\]: expected a text .* not None"),
    ],
)
def test_what_is_neither_texts_nor_words_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        given_sentences(given, "IOB2")
