"""Answers of texts on a dev set: pages made from a small dev_scores.json, figures of each part."""

import json
import re

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_fscore_support

from bertsmith.reports.text_answers import (
    Bin,
    class_figures,
    expected_calibration_error,
    reliability,
)


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
    assert "text true predicted confidence sure & wrong no yes 95.0% Least confident" in words
    assert "by a threshold yes yes 40.0% left ▸ right yes yes 55.0% sure <b> no" in words
    assert "<b>" not in re.sub("<div><b>", "", source)
    assert "no 2 100.0% 50.0% 66.7% yes 2 66.7% 100.0% 80.0%" in words
    assert "commit f00dfeed" in words
    assert "SHA-256 of the data train ab12 dev cd34" in words and "data_sha256" not in words


def test_half_a_character_in_a_class_is_shown_as_a_question_mark(tuned, page):
    half = "half \ud83d"
    found = [answer("no", half, 0.05, 0.95), answer(half, half, 0.1, 0.9)]
    words, source = page(tuned("classify", found, labels=["no", half], confusion=[[0, 1], [0, 1]]))
    assert "half ? 1" in words
    assert "no predicted as half ?" in source


def test_a_metric_without_a_value_says_why(tuned, page):
    found = [answer("no", "no", 0.9, 0.1), answer("yes", "no", 0.7, 0.3)]
    shown = {
        "metrics": {"matthews": 0.0},
        "notes": {"matthews": "no value, counts 0: every answer is 0"},
    }
    words, _ = page(tuned("classify", found, labels=["no", "yes"], **shown))
    assert "matthews no value, counts 0: every answer is 0" in words


def test_options(tuned, page):
    item = {**answer("1", "0", 0.8, 0.2), "options": ["it rained", "it <snowed>"]}
    words, _ = page(tuned("choice", [item, answer("0", "0", 0.7, 0.3, text="u")]))
    assert "t it <snowed> it rained 80.0% Least confident" in words
    assert "u 0 0 70.0%" in words
    assert "Confusion matrix" not in words and "Calibration" in words


def test_options_of_one_text(tuned, page):
    item = {**answer("1", "0", 0.8, 0.2), "options": ["none", "none"]}
    words, _ = page(tuned("choice", [item]))
    assert "On average 80.0% was claimed and 0.0% came true" in words
    assert "Most confident errors text true predicted confidence t none none 80.0%" in words


def test_label_sets(tuned, page):
    found = [
        answer(["a", "b"], ["a"], 0.9, 0.2, text="misses b"),
        answer([], ["b"], 0.45, 0.7, text="gives b"),
        answer(["a"], ["a"], 0.8, 0.1, text="right"),
        answer([], [], 0.0, 0.0, text="empty"),
    ]
    words, _ = page(tuned("multilabel", found, labels=["a", "b"]))
    assert "a 2 100.0% 100.0% 100.0% b 1 0.0% 0.0% 0.0%" in words
    assert "misses b a, b a 80.0% gives b – b 70.0% Least confident" in words
    least = "Least confident text true predicted confidence right a a 80.0% empty – – 100.0%"
    assert least in words
    assert "On average 39.4% was claimed and 37.5% came true" in words  # 3 of 8 decisions are yes


def test_scores(tuned, page):
    sides = enumerate((0.5, -0.5, 1.5))
    found = [{"text": f"x{k}", "label": float(k), "predicted": k + error} for k, error in sides]
    words, source = page(tuned("regress", found, metrics={"pearson": 0.9}))
    assert "+0.5 on average, with a std of 1." in words
    assert "text true predicted error x2 2 3.5 +1.5 x0 0 0.5 +0.5 x1 1 0.5 -0.5" in words
    assert source.count("<svg") >= 2


def test_many_scores_are_thinned(tuned, page):
    found = [{"text": "x", "label": k / 9999, "predicted": k / 9999} for k in range(10_000)]
    _, source = page(tuned("regress", found, metrics={"pearson": 1.0}))
    assert len(source) < 400_000


def test_class_figures_are_those_of_scikit_learn():
    generator = np.random.default_rng(1)
    truth, given = generator.integers(4, size=(2, 200))
    theirs = precision_recall_fscore_support(truth, given)
    for k in range(4):
        true, predicted = truth == k, given == k
        ours = class_figures(int((true & predicted).sum()), int(true.sum()), int(predicted.sum()))
        assert ours == pytest.approx([theirs[figure][k] for figure in range(3)])


NO_PROBABILITY = {"label": ["O"], "predicted": ["O"], "words": ["O"], "probabilities": []}


@pytest.mark.parametrize(
    ("kind", "example", "message"),
    [
        ("clasify", {}, "unknown kind of task 'clasify': known: classify,"),
        ("classify", {"label": "a"}, "example 1 has no 'predicted'"),
        ("tag", NO_PROBABILITY, "example 1 has not one tag or probability a word"),
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
    tried = [{"learning_rate": 1e-4, "accuracy": 0.5}, {"learning_rate": 1e-3, "accuracy": 0.25}]
    words, _ = page(tuned("classify", [], restarts=collapsed, sweep=tried))
    assert "1 of 2 trainings collapsed" in words
    assert "rate accuracy 0.0001 50.0% 0.001 25.0%" in words


def test_bins_are_those_of_scikit_learn():
    generator = np.random.default_rng(5)
    confidences = generator.random(500)
    right = generator.random(500) < confidences**2
    bins = reliability(confidences.tolist(), right.tolist())
    shares, means = calibration_curve(right, confidences, n_bins=10, strategy="uniform")
    np.testing.assert_allclose([one.accuracy for one in bins], shares)
    np.testing.assert_allclose([one.confidence for one in bins], means)
    assert sum(one.size for one in bins) == 500


def test_error_by_hand():
    # nine sure answers of which six are right, one unsure and right
    bins = reliability([0.9] * 9 + [0.3], [True] * 6 + [False] * 3 + [True])
    assert [one.size for one in bins] == [1, 9]
    error = 0.9 * (0.9 - 6 / 9) + 0.1 * (1 - 0.3)
    assert expected_calibration_error(bins) == pytest.approx(error)


def test_the_ends_are_in_the_outer_bins():
    assert reliability([0.0, 1.0], [False, True]) == [Bin(1, 0.0, 0.0), Bin(1, 1.0, 1.0)]
    assert expected_calibration_error(reliability([0.0, 1.0], [False, True])) == 0
