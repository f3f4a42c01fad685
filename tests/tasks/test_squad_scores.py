"""The scores against the scripts' rules, written here a second time by other means."""

import random as standard_random
import re
import unicodedata

import numpy as np
import pytest

from bertsmith.tasks.squad.answers import (
    Answer,
    Candidate,
    best_threshold,
    normalize_answer,
    question_scores,
    search_threshold,
    squad1_scores,
    squad2_scores,
)
from bertsmith.tasks.squad.questions import Question, Questions

ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def of(*answers: list[str]) -> Questions:
    """Questions with these right answers, ids "0", "1", ..."""
    found = [Question(str(k), "?", 0, right, None) for k, right in enumerate(answers)]
    found = [q._replace(span=(0, 1)) if q.answers else q for q in found]
    return Questions.of(found, ["x"], [0], "mem")


def words_of(text: str) -> list[str]:
    """Words that count: a second reading of the rules, without the regular expression of ours."""
    bare = "".join(c for c in text.lower() if c not in ASCII_PUNCTUATION)
    runs = re.findall(r"\w+|\W", bare)  # an article is a whole run of word characters
    return "".join(" " if run in {"a", "an", "the"} else run for run in runs).split()


def reference_f1(given: str, right: str, version: int) -> float:
    given_words, right_words = words_of(given), words_of(right)
    if version == 2 and not (given_words and right_words):
        return float(given_words == right_words)
    left, same = list(right_words), 0
    for word in given_words:
        if word in left:
            left.remove(word)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(given_words), same / len(right_words)
    return 2 * precision * recall / (precision + recall)


def reference_scores(given: str, answers: list[str], version: int) -> tuple[float, float]:
    if version == 2:
        answers = [answer for answer in answers if words_of(answer)] or [""]
    exact = max(float(words_of(given) == words_of(answer)) for answer in answers)
    return exact, max(reference_f1(given, answer, version) for answer in answers)


PARTS = [
    *("a", "an", "the", "The", "AN", "A", "them", "Anna", "theatre", "U.S.", "US", "1,000", "1000"),
    *("", " ", "\t", "\u00a0", "\u2003", "-", "--", ".", "!?", "'s", "\u2019s", "\u2013", "a-b"),
    *("caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9"), "\u0130", "\u00df", "x", "y", "z"),
    *("the-a", "_a_", "a_the", "\u4e2d\u6587", "\U0001f600", "$3", "3%"),
]


def random_text(random: standard_random.Random) -> str:
    joint = random.choice(["", " ", " ", "  "])
    return joint.join(random.choices(PARTS, k=random.randint(0, 6)))


@pytest.mark.parametrize("version", [1, 2])
def test_two_thousand_edge_cases(version):
    random = standard_random.Random(version)
    answers, given = [], {}
    for k in range(2000):
        right = [random_text(random) for _ in range(random.randint(version == 1, 4))]
        text = random_text(random)
        if right and random.random() < 0.5:  # something alike
            text = random.choice(["", "the ", "!", "x "]) + random.choice(right).swapcase()
        answers.append(right)
        given[str(k)] = text
    exact, f1, is_answered = question_scores(of(*answers), given, version)
    assert is_answered.all()
    expected = [reference_scores(given[str(k)], a, version) for k, a in enumerate(answers)]
    assert exact.tolist() == [e for e, _ in expected]
    # equal but for the order of the operations
    assert np.allclose(f1, [f for _, f in expected], rtol=1e-14, atol=0)
    for part in (exact, f1):
        assert 0.1 < part.mean() < 0.9  # the cases are of all kinds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  U.S. of A", "us of"),
        ("a-the", "athe"),  # punctuation goes first
        ("a\u2013the", "\u2013"),  # but only that of ASCII: the dash parts two articles
        ("theatre an", "theatre"),
        ("\u00a0A\u2003man\n", "man"),
        ("", ""),
    ],
)
def test_normalised(text, expected):
    assert normalize_answer(text) == expected


def test_version_1_by_hand():
    questions = of(["the Denver Broncos", "Broncos"], ["cat sat"], ["the"], ["x"])
    scores = squad1_scores(questions, {"0": "broncos!", "1": "cat sat down a", "2": "an"})
    # 1 and 1; 0 and 2 * 2/3 * 1 / (5/3) = 0.8; "" is "" but shares no word; not answered: 0
    assert scores == {"exact": 50.0, "f1": pytest.approx(45.0), "total": 4}


def test_version_1_has_no_question_without_an_answer():
    with pytest.raises(ValueError, match="mem: question '1' has no answer, .*: use squad2"):
        squad1_scores(of(["x"], []), {"0": "x", "1": ""})


def test_version_2_by_hand():
    questions = of(["the Denver Broncos"], [], [], ["the"], ["x"])
    scores = squad2_scores(questions, {"0": "Broncos", "1": "", "2": "cat", "3": "an"})
    # 0 and 2/3; right; wrong; a right answer without a word is none, and "an" says nothing; the
    # fifth was not answered and does not count
    assert scores["total"] == 4 and scores["HasAns_total"] == 2 and scores["NoAns_total"] == 2
    assert scores["exact"] == 50.0 and scores["f1"] == pytest.approx(100 * (2 / 3 + 2) / 4)
    assert scores["HasAns_exact"] == 50.0 and scores["NoAns_exact"] == 50.0
    assert "NoAns_f1" not in squad2_scores(of(["x"]), {"0": "x"})


@pytest.mark.parametrize("score", [squad1_scores, squad2_scores])
def test_predictions_for_something_else(score):
    with pytest.raises(ValueError, match="mem: none of its 1 question ids is in the predictions"):
        score(of(["x"]), {"other": "x"})


def brute_force(odds, text, null):
    thresholds = np.concatenate([odds - 1e-9, odds, [odds.min() - 1, odds.max() + 1]])
    return max(np.where(odds > t, null, text).mean() for t in thresholds)


@pytest.mark.parametrize("seed", range(40))
def test_the_threshold_is_the_best_there_is(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))
    odds = random.normal(size=count) * 3
    if seed % 2:
        odds = odds.round()  # many equal ones
    text, null = random.random(count).round(1), random.integers(0, 2, count)
    threshold, score = best_threshold(odds, text, null)
    reached = np.where(odds > threshold, null, text).mean()
    assert reached == pytest.approx(score) == pytest.approx(brute_force(odds, text, null))
    # never worse than answering always, never, or with the threshold 0
    assert score >= max(text.mean(), null.mean(), np.where(odds > 0, null, text).mean()) - 1e-12


def test_equal_thresholds_and_neighbours():
    ones, zeros = np.ones(2), np.zeros(2)
    assert best_threshold(np.array([5.0, 7.0]), zeros, ones) == (4.0, 1.0)
    assert best_threshold(np.array([5.0, 7.0]), ones, zeros) == (8.0, 1.0)
    assert best_threshold(np.array([-5.0, 7.0]), ones, ones) == (1.0, 1.0)  # the nearest to 0
    close = np.array([1.0, np.nextafter(1.0, 2)])  # nothing lies between them
    threshold, score = best_threshold(close, np.array([1.0, 0]), np.array([0, 1.0]))
    assert score == 1.0 and (close > threshold).tolist() == [False, True]


def answer(identity, text, odds):
    null = Candidate("", 0, 0, 0.5, odds, 0.0)
    return Answer(identity, [Candidate(text, 0, 1, 0.5, 0.0, 0.0), null], odds)


def test_the_threshold_for_answers():
    questions = of(["x y"], [], ["z"])
    answers = [answer("2", "z", -1.0), answer("1", "x", 2.0), answer("0", "x", 1.0)]
    threshold = search_threshold(questions, answers, "f1")
    assert threshold == 1.5
    predictions = {answer.id: answer.chosen(threshold).text for answer in answers}
    assert squad2_scores(questions, predictions)["f1"] == pytest.approx(100 * (2 / 3 + 2) / 3)


@pytest.mark.parametrize(("score", "expected"), [("f1", 4.0), ("exact", 0.0)])
def test_the_threshold_is_the_best_by_the_score_asked_for(score, expected):
    """Answering all has F1 0, 2/3, 2/3 and nothing exact; answering none has one right."""
    questions = of([], ["x y"], ["x y"])
    answers = [answer("0", "x", 1.0), answer("1", "x", 2.0), answer("2", "x", 3.0)]
    threshold = search_threshold(questions, answers, score)
    assert threshold == expected
    reached = {}
    for tried in (4.0, 2.5, 1.5, 0.0):
        texts = {answer.id: answer.chosen(tried).text for answer in answers}
        reached[tried] = squad2_scores(questions, texts)[score]
    assert reached[threshold] == max(reached.values()) > min(reached.values())
