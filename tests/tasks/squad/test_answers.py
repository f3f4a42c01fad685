"""Answers against loops over all spans, scores against the scripts' rules written a second time."""

import json
import math
import random as standard_random
import re
import unicodedata

import numpy as np
import pytest

from bertsmith.tasks.squad.answers import (
    Answer,
    Candidate,
    answer_questions,
    best_threshold,
    normalize_answer,
    question_scores,
    search_threshold,
    squad1_scores,
    squad2_scores,
    write_answers,
)
from bertsmith.tasks.squad.questions import Question, Questions

from ..made import ALPHABET
from .test_windows import of, windows_of


def random_questions(random, count, most=30):
    def text(words):
        return "  ".join("".join(random.choice([*ALPHABET], 2)) for _ in range(words))

    return of(*(("a", text(random.integers(1, most)), None) for _ in range(count)))


def random_logits(random, windows):
    return random.normal(size=(2, len(windows.ids))).astype(np.float32) * 3


def reference(windows, q, start, end, max_tokens):
    """All allowed spans of a question as (score, first, last), best first, and the null score."""
    spans, null = [], math.inf
    for w in range(windows.question_windows[q], windows.question_windows[q + 1]):
        begin, after = windows.boundaries[w], windows.boundaries[w + 1]
        null = min(null, float(start[begin]) + float(end[begin]))
        for i in range(begin, after):
            for j in range(i, min(i + max_tokens, after)):
                text = slice(begin + windows.context_begins[w], after - 1)
                if text.start <= i and j < text.stop and windows.is_max_context[i]:
                    spans.append((float(start[i]) + float(end[j]), w, i, j))
    return sorted(spans, key=lambda span: -span[0]), null


@pytest.mark.parametrize("with_null", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_as_loops_over_all_spans_do_it(seed, with_null):
    random = np.random.default_rng(seed)
    questions = random_questions(random, 40)
    windows = windows_of(questions, max_length=16, doc_stride=5)
    start, end = random_logits(random, windows)
    settings = {"with_null": with_null, "n_best": 7, "max_answer_tokens": 6}
    answers = answer_questions(questions, windows, start, end, **settings)
    assert len(windows) > 100
    for q, answer in enumerate(answers):
        context = questions.contexts[questions.context_numbers[q]]
        spans, null = reference(windows, q, start, end, 6)
        expected: dict[str, float] = {}
        for score, w, i, j in spans:
            cut = windows.characters(np.array([w, w]), np.array([i, j]))
            expected.setdefault(context[cut[0, 0] : cut[1, 1]], score)
        wanted = list(expected.items())[:7]
        if with_null:
            assert answer.null_odds == pytest.approx(null - wanted[0][1], abs=1e-6)
            wanted = sorted([*wanted, ("", null)], key=lambda pair: -pair[1])
            wanted = wanted[:7] + ([("", null)] if ("", null) not in wanted[:7] else [])
        else:
            assert answer.null_odds is None
        assert [c.text for c in answer.candidates] == [text for text, _ in wanted]
        scores = np.array([score for _, score in wanted])
        assert np.allclose([c.score for c in answer.candidates], scores, atol=1e-6)
        softmax = np.exp(scores) / np.exp(scores).sum()
        assert np.allclose([c.probability for c in answer.candidates], softmax)


@pytest.mark.parametrize("seed", range(3))
def test_properties(seed):
    random = np.random.default_rng(100 + seed)
    questions = random_questions(random, 50, most=60)
    windows = windows_of(questions, max_length=24, doc_stride=7)
    start, end = random_logits(random, windows)
    answers = answer_questions(questions, windows, start, end, with_null=True)
    for answer, number in zip(answers, questions.context_numbers, strict=True):
        context = questions.contexts[number]
        assert 1 < len(answer.candidates) <= 21
        assert sum(c.probability for c in answer.candidates) == pytest.approx(1)
        texts = [c.text for c in answer.candidates]
        assert len(set(texts)) == len(texts) and "" in texts and answer.best.text
        for c in answer.candidates:
            assert context[c.begin : c.end] == c.text == c.text.strip()
            assert len(c.text.split()) <= 30
        assert answer.chosen(answer.null_odds) == answer.best  # "above", not "at"
        null = answer.chosen(answer.null_odds - 1e-3)
        assert null.text == "" and null in answer.candidates
        assert answer.chosen() == (null if answer.null_odds > 0 else answer.best)


@pytest.mark.parametrize(
    ("context", "last", "answer"),
    [
        # not pieces put together again: spaces, hyphens and characters without a piece are kept
        ("ab-c  \u00e9x.", -3, "ab-c  \u00e9x"),  # [UNK] before the stop
        # marks stay with their character
        ("a b\u0301 c", None, "a b\u0301"),  # an accent that the tokenizer drops
        ("a b\u0301\u0323, c", None, "a b\u0301\u0323"),
        ("a b\u20dd c", None, "a b\u20dd"),  # an enclosing circle
        ("a b\u2014c", None, "a b"),
    ],
)
def test_the_text_is_the_contexts_own(context, last, answer):
    questions = of(("a", context, None))
    windows = windows_of(questions)
    first = windows.context_begins[0]
    logits = np.zeros((2, len(windows.ids)), np.float32)
    logits[0, first] = logits[1, last or first + 1] = 9
    best = answer_questions(questions, windows, *logits, with_null=False)[0].best
    assert best.text == answer == context[best.begin : best.end]


def test_the_null_score_is_the_lowest_of_the_windows():
    questions = of(("h", "a b c d e f g", None))
    windows = windows_of(questions, max_length=7, doc_stride=2)
    logits = np.zeros((2, len(windows.ids)), np.float32)
    logits[0, windows.boundaries[:-1]] = [5, 1, 3]
    logits[1, windows.boundaries[:-1]] = [0, 2, -1]
    (answer,) = answer_questions(questions, windows, *logits, with_null=True)
    assert answer.null_odds == 2.0  # 3 - 1 of the third; the best span has 0
    assert answer.candidates[0].text == "" and answer.candidates[0].start_logit == 3


def test_a_context_without_tokens():
    questions = of(("a", "\x01", None))
    windows = windows_of(questions)
    logits = np.ones((2, len(windows.ids)), np.float32)
    for with_null in (False, True):
        answer = answer_questions(questions, windows, *logits, with_null=with_null)[0]
        assert [(c.text, c.probability) for c in answer.candidates] == [("", 1.0)]
        assert answer.chosen() == answer.best


def test_files(tmp_path):
    random = np.random.default_rng(3)
    questions = random_questions(random, 5)
    windows = windows_of(questions)
    logits = random_logits(random, windows)
    answers = answer_questions(questions, windows, *logits, with_null=True)
    threshold = float(np.median([answer.null_odds for answer in answers])) - 1e-6
    chosen = [answer.chosen(threshold) for answer in answers]
    write_answers(tmp_path / "v2.json", answers, chosen)
    read = {p.name: json.loads(p.read_text(encoding="utf-8")) for p in tmp_path.iterdir()}
    assert sorted(read) == ["v2.json", "v2.nbest.json", "v2.null_odds.json"]
    texts, n_best, odds = (read[name] for name in sorted(read))
    assert list(texts) == list(odds) == list(n_best) == questions.ids
    assert [not text for text in texts.values()] == [o > threshold for o in odds.values()]
    assert sum(not text for text in texts.values()) == 3
    first = n_best["0"][0]
    assert sorted(first) == ["end_logit", "probability", "start_logit", "text"]

    answers = answer_questions(questions, windows, *logits, with_null=False)
    write_answers(tmp_path / "v1.json", answers, [answer.chosen() for answer in answers])
    assert not (tmp_path / "v1.null_odds.json").exists()
    texts = json.loads((tmp_path / "v1.json").read_text())
    assert all(texts.values())


ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def scored(*answers: list[str]) -> Questions:
    """Questions with these right answers, ids "0", "1", ..."""
    found = [Question(str(k), "?", 0, right, None) for k, right in enumerate(answers)]
    found = [q._replace(span=(0, 1)) if q.answers else q for q in found]
    return Questions.of(found, ["x"], "mem")


def split_words(text: str) -> list[str]:
    """Words that count: a second reading of the rules, without the regular expression of ours."""
    bare = "".join(c for c in text.lower() if c not in ASCII_PUNCTUATION)
    runs = re.findall(r"\w+|\W", bare)  # an article is a whole run of word characters
    return "".join(" " if run in {"a", "an", "the"} else run for run in runs).split()


def reference_f1(given: str, right: str, version: int) -> float:
    given_words, right_words = split_words(given), split_words(right)
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
        answers = [answer for answer in answers if split_words(answer)] or [""]
    exact = max(float(split_words(given) == split_words(answer)) for answer in answers)
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
    exact, f1, is_answered = question_scores(scored(*answers), given, version)
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
    questions = scored(["the Denver Broncos", "Broncos"], ["cat sat"], ["the"], ["x"])
    scores = squad1_scores(questions, {"0": "broncos!", "1": "cat sat down a", "2": "an"})
    # 1 and 1; 0 and 2 * 2/3 * 1 / (5/3) = 0.8; "" is "" but shares no word; not answered: 0
    assert scores == {"exact": 50.0, "f1": pytest.approx(45.0), "total": 4}


def test_version_1_has_no_question_without_an_answer():
    with pytest.raises(ValueError, match="mem: question '1' has no answer, .*: use squad2"):
        squad1_scores(scored(["x"], []), {"0": "x", "1": ""})


def test_version_2_by_hand():
    questions = scored(["the Denver Broncos"], [], [], ["the"], ["x"])
    scores = squad2_scores(questions, {"0": "Broncos", "1": "", "2": "cat", "3": "an"})
    # 0 and 2/3; right; wrong; a right answer without a word is none, and "an" says nothing; the
    # fifth was not answered and does not count
    assert scores["total"] == 4 and scores["HasAns_total"] == 2 and scores["NoAns_total"] == 2
    assert scores["exact"] == 50.0 and scores["f1"] == pytest.approx(100 * (2 / 3 + 2) / 4)
    assert scores["HasAns_exact"] == 50.0 and scores["NoAns_exact"] == 50.0
    assert "NoAns_f1" not in squad2_scores(scored(["x"]), {"0": "x"})


@pytest.mark.parametrize("score", [squad1_scores, squad2_scores])
def test_predictions_for_something_else(score):
    with pytest.raises(ValueError, match="mem: none of its 1 question ids is in the predictions"):
        score(scored(["x"]), {"other": "x"})


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
    questions = scored(["x y"], [], ["z"])
    answers = [answer("2", "z", -1.0), answer("1", "x", 2.0), answer("0", "x", 1.0)]
    threshold = search_threshold(questions, answers, "f1")
    assert threshold == 1.5
    predictions = {answer.id: answer.chosen(threshold).text for answer in answers}
    assert squad2_scores(questions, predictions)["f1"] == pytest.approx(100 * (2 / 3 + 2) / 3)


@pytest.mark.parametrize(("score", "expected"), [("f1", 4.0), ("exact", 0.0)])
def test_the_threshold_is_the_best_by_the_score_asked_for(score, expected):
    """Answering all has F1 0, 2/3, 2/3 and nothing exact; answering none has one right."""
    questions = scored([], ["x y"], ["x y"])
    answers = [answer("0", "x", 1.0), answer("1", "x", 2.0), answer("2", "x", 3.0)]
    threshold = search_threshold(questions, answers, score)
    assert threshold == expected
    reached = {}
    for tried in (4.0, 2.5, 1.5, 0.0):
        texts = {answer.id: answer.chosen(tried).text for answer in answers}
        reached[tried] = squad2_scores(questions, texts)[score]
    assert reached[threshold] == max(reached.values()) > min(reached.values())
