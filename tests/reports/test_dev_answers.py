"""The pages of each kind of task, made from a small dev_scores.json."""

import json
import re

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from bertsmith.reports.pages import write_report
from bertsmith.reports.span_answers import answer_kind
from bertsmith.reports.text_answers import class_figures


@pytest.fixture
def page(tmp_path):
    """(words, source) of a run's page; pictures are left out of the words."""

    def read(run):
        write_report([run], tmp_path / "page.html")
        source = (tmp_path / "page.html").read_text(encoding="utf-8")
        bare = re.sub("(?s)<(style|svg).*?</(style|svg)>", "", source)
        return " ".join(re.sub("<[^>]*>", " ", bare).split()), source

    return read


def answer(label, predicted, *probabilities, text="t"):
    shown = {"text": text, "label": label, "predicted": predicted}
    return {**shown, "probabilities": list(probabilities)}


def test_classes(tuned, page):
    found = [
        answer("no", "no", 0.9, 0.1, text="sure <b>"),
        answer("no", "yes", 0.05, 0.95, text="sure & wrong"),
        answer("yes", "yes", 0.6, 0.4, text="by a threshold"),  # answered at 40%
        {**answer("yes", "yes", 0.45, 0.55, text="left"), "pair": "right"},
    ]
    run = tuned("classify", found, labels=["no", "yes"], confusion=[[1, 1], [0, 2]])
    words, source = page(run)
    # confidences 0.9, 0.95, 0.4, 0.55: (2 * |0.5 - 0.925| + 0.6 + 0.45) / 4
    assert "Expected calibration error 47.5%" in words
    assert "On average 70.0% was claimed and 75.0% came true" in words
    assert "text true predicted sure sure &amp; wrong no yes 95.0% Least sure" in words
    assert "by a threshold yes yes 40.0% left ▸ right yes yes 55.0% sure &lt;b&gt; no" in words
    assert "<b>" not in re.sub("<div><b>", "", source)
    assert "no 2 100.0% 50.0% 66.7% yes 2 66.7% 100.0% 80.0%" in words
    assert "commit f00dfeed" in words
    assert "SHA-256 of the data train ab12 dev cd34" in words and "data_sha256" not in words


def test_a_metric_without_a_value_says_why(tuned, page):
    found = [answer("no", "no", 0.9, 0.1), answer("yes", "no", 0.7, 0.3)]
    shown = {"metrics": {"matthews": 0.0}, "undefined": {"matthews": "every answer is 0"}}
    words, _ = page(tuned("classify", found, labels=["no", "yes"], **shown))
    assert "matthews no value: every answer is 0" in words


def test_options(tuned, page):
    item = {**answer("1", "0", 0.8, 0.2), "options": ["it rained", "it <snowed>"]}
    words, _ = page(tuned("choice", [item, answer("0", "0", 0.7, 0.3, text="u")]))
    assert "t it &lt;snowed&gt; it rained 80.0% Least sure" in words
    assert "u 0 0 70.0%" in words
    assert "What is taken for what" not in words and "Calibration" in words


def test_options_of_one_text(tuned, page):
    item = {**answer("1", "0", 0.8, 0.2), "options": ["none", "none"]}
    words, _ = page(tuned("choice", [item]))
    assert "On average 80.0% was claimed and 0.0% came true" in words
    assert "Wrong, and sure of it text true predicted sure t none none 80.0%" in words


def test_label_sets(tuned, page):
    found = [
        answer(["a", "b"], ["a"], 0.9, 0.2, text="misses b"),
        answer([], ["b"], 0.45, 0.7, text="gives b"),
        answer(["a"], ["a"], 0.8, 0.1, text="right"),
        answer([], [], 0.0, 0.0, text="empty"),
    ]
    words, _ = page(tuned("multilabel", found, labels=["a", "b"]))
    assert "a 2 100.0% 100.0% 100.0% b 1 0.0% 0.0% 0.0%" in words
    assert "misses b a, b a 80.0% gives b – b 70.0% Least sure" in words
    assert "Least sure text true predicted sure right a a 80.0% empty – – 100.0%" in words
    assert "On average 39.4% was claimed and 37.5% came true" in words  # 3 of 8 decisions are yes


def test_scores(tuned, page):
    found = [
        {"text": f"x{k}", "label": float(k), "predicted": k + error}
        for k, error in enumerate((0.5, -0.5, 1.5))
    ]
    words, source = page(tuned("regress", found, metrics={"pearson": 0.9}))
    assert "+0.5 on average, with a standard deviation of 1." in words
    assert "text true score error x2 2 3.5 +1.5 x0 0 0.5 +0.5 x1 1 0.5 -0.5" in words
    assert source.count("<svg") >= 2


def test_many_scores_are_thinned(tuned, page):
    found = [{"text": "x", "label": k / 9999, "predicted": k / 9999} for k in range(10_000)]
    _, source = page(tuned("regress", found, metrics={"pearson": 1.0}))
    assert len(source) < 400_000


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
    words, _ = page(tuned("tag", found, metrics={"entity_f1": 0.8}))
    assert "LOC 1 0.0% 0.0% 0.0% PER 2 100.0% 100.0% 100.0% together 3 66.7% 66.7% 66.7%" in words
    assert "Ann saw New &lt;York&gt; New &lt;York&gt; (LOC) New (LOC)" in words
    assert "Bob" not in words[words.index("with most errors") : words.index("Least sure")]
    # 0.9 right twice, 0.7 and 0.6 right, 0.5 wrong: (2 * 0.1 + 0.3 + 0.4 + 0.5) / 5
    assert "Expected calibration error 28.0%" in words
    least = "&lt;York&gt; I-LOC O 50.0% Bob Bob B-PER B-PER 60.0%"  # the word, and its sentence
    assert f"sure Ann saw New &lt;York&gt; {least}" in words


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
    return {"question": "When?", "context": context, "answers": answers, "predicted": predicted} | (
        {"probability": 0.9, **more}
    )


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
    assert "Which &lt;year&gt;? 1066 1066 William 90.0%" in words
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


def test_class_figures_are_those_of_scikit_learn():
    generator = np.random.default_rng(1)
    truth, given = generator.integers(4, size=(2, 200))
    theirs = precision_recall_fscore_support(truth, given)
    for k in range(4):
        true, predicted = truth == k, given == k
        ours = class_figures(int((true & predicted).sum()), int(true.sum()), int(predicted.sum()))
        assert ours == pytest.approx([theirs[figure][k] for figure in range(3)])


@pytest.mark.parametrize(
    ("kind", "example", "message"),
    [
        ("clasify", {}, "unknown kind of task 'clasify': known: classify,"),
        ("classify", {"label": "a"}, "example 1 has no 'predicted'"),
        (
            "tag",
            {**dict.fromkeys(("label", "predicted", "words"), ["O"]), "probabilities": []},
            "example 1 has not one tag or probability a word",
        ),
        ("multilabel", answer([], [], 0.5), "example 1 has not one probability a label"),
    ],
)
def test_damaged_answers_are_named(tuned, page, kind, example, message):
    run = tuned(kind, [example])
    with pytest.raises(ValueError, match=f"dev_scores.json: {message}"):
        page(run)
    (run / "dev_scores.json").write_text(json.dumps({"kind": "tag", "examples": 1}))
    with pytest.raises(ValueError, match="holds no list of examples"):
        page(run)


@pytest.mark.parametrize("kind", ["classify", "choice", "multilabel", "regress", "tag", "answer"])
def test_no_examples_are_no_hindrance(tuned, page, kind):
    words, _ = page(tuned(kind, []))
    assert "Calibration" not in words


def test_collapsed_and_searched_runs(tuned, page):
    collapsed = [{"seed": 2, "instead_of": 2, "reason": "one answer"}]
    tried = [{"rate": 1e-4, "accuracy": 0.5}, {"rate": 1e-3, "accuracy": 0.25}]
    words, _ = page(tuned("classify", [], restarts=collapsed, sweep=tried))
    assert "1 of 2 trainings collapsed" in words
    assert "rate accuracy 0.0001 50.0% 0.001 25.0%" in words
