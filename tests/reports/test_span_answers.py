"""Answers of taggers and of question answering on a dev set."""

import pytest

from bertsmith.reports.span_answers import answer_kind


def test_tags(tuned, page):
    found = [
        {
            "words": ["Ann", "saw", "New", "<York>"],
            "label": ["B-PER", "O", "B-LOC", "I-LOC"],
            "predicted": ["B-PER", "O", "B-LOC", "O"],
            "probabilities": [0.9, 0.9, 0.7, 0.5],
        },
        {"words": ["Bob"], "label": ["B-PER"], "predicted": ["B-PER"], "probabilities": [0.6]},
    ]
    words, source = page(tuned("tag", found, metrics={"entity_f1": 0.8}))
    assert "LOC 1 0.0% 0.0% 0.0% PER 2 100.0% 100.0% 100.0% together 3 66.7% 66.7% 66.7%" in words
    assert "Ann saw New <York> New <York> (LOC) New (LOC)" in words
    assert "Bob" not in words[words.index("with most errors") : words.index("Least confident")]
    # 0.9 right twice, 0.7 and 0.6 right, 0.5 wrong: (2 * 0.1 + 0.3 + 0.4 + 0.5) / 5
    assert "Expected calibration error 28.0%" in words
    assert "confidence Ann saw New <York> I-LOC O 50.0% Bob B-PER B-PER 60.0%" in words
    tags = '<td><span class="word">I-LOC</span></td><td><span class="word">O</span></td>'
    assert f"Ann saw New <mark>&lt;York&gt;</mark></span></td>{tags}" in source  # in one line


def test_plain_tags_are_types(tuned, page):
    tags = {"label": ["NN", "VB"], "predicted": ["NN", "NN"], "probabilities": [0.9, 0.6]}
    found = [{"words": ["a", "b"], **tags}]
    words, _ = page(tuned("tag", found, labels=["NN", "VB"], metrics={"tag_accuracy": 0.5}))
    assert "NN 1 50.0% 100.0% 66.7% VB 1 – 0.0% 0.0%" in words
    tags = {"label": ["B", "I", "NN"], "predicted": ["B", "NN", "NN"]}
    found = [{"words": ["a", "b", "c"], **tags, "probabilities": [0.9, 0.6, 0.9]}]
    words, _ = page(tuned("tag", found, labels=["B", "I", "NN"], metrics={"tag_accuracy": 0.5}))
    assert "B 1 100.0% 100.0% 100.0% I 1 – 0.0% 0.0% NN 1 50.0% 100.0% 66.7%" in words


def question(predicted, answers, **more):
    context = "x" * 200 + "In 1066 <William> won." + "y" * 200
    asked = {"question": "When?", "context": context, "answers": answers, "probability": 0.9}
    return asked | {"predicted": predicted} | more


def test_half_a_character_is_a_question_mark(tuned, page):
    """A context cut out in the middle of an emoji, as JSON lines of one's own may hold it."""
    asked = [question("won", ["1066"], context="\ud83d 1066")]
    words, source = page(tuned("answer", asked, metrics={"answer_f1": 0}))
    assert "? 1066 When? 1066 won 90.0%" in words and "? <mark>1066</mark>" in source


def test_answers(tuned, page):
    found = [
        question("1066", ["1066", "In 1066"]),
        question("", []),
        question("1066 William", ["1066"], question="Which <year>?"),
        question("William", ["1066"], probability=0.8, context="of the year 1066"),
        question("won", ["1066"], context="cut off"),
        question("", ["1066"], probability=None),
        question("1066", []),
    ]
    words, source = page(tuned("answer", found, metrics={"answer_f1": 0.4}))
    assert "answer questions share right 1 14.3% rightly left without an answer 1 14.3%" in words
    assert "partial overlap with a right answer 1 14.3%" in words
    assert "no word of a right answer 2 28.6%" in words
    assert "left without an answer that the context has 1 14.3%" in words
    assert "answered though the context has no answer 1 14.3%" in words
    assert "…" + "x" * 117 + "In <mark>1066</mark> &lt;William&gt; won." + "y" * 105 + "…" in source
    assert "Which <year>? 1066 1066 William 90.0%" in words
    # two of five are right at 0.9, none at 0.8: (5 * 0.5 + 0.8) / 6; one has no probability
    assert "Expected calibration error 55.0%" in words
    errors = words[words.index("No word of a right answer") :]
    assert errors.index("cut off") < errors.index("of the year")  # the surest first
    assert "When? – 1066 90.0%" in words  # no right answer


@pytest.mark.parametrize(
    ("answers", "predicted", "kind"),
    [
        ([], "", "rightly left without an answer"),
        (["The Moon"], "moon", "right"),
        (["the"], "", "rightly left without an answer"),  # 2.0: an answer of no word is none
        ([""], "sun", "answer where null"),
        (["moon"], "sun", "no overlap"),
    ],
)
def test_kinds_of_answers(answers, predicted, kind):
    assert answer_kind(answers, predicted) == kind
