import json
import math

import numpy as np
import pytest

from bertsmith.tasks.squad.answers import answer_questions, write_answers

from .test_squad_windows import LETTERS, of, windows_of


def random_questions(random, count, most=30):
    def text(words):
        return "  ".join("".join(random.choice([*LETTERS], 2)) for _ in range(words))

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
    windows = windows_of(questions, max_length=16, stride=5)
    start, end = random_logits(random, windows)
    answers = answer_questions(
        questions, windows, start, end, with_null=with_null, n_best=7, max_answer_tokens=6
    )
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
    windows = windows_of(questions, max_length=24, stride=7)
    start, end = random_logits(random, windows)
    for answer, number in zip(
        answer_questions(questions, windows, start, end, with_null=True),
        questions.context_numbers,
        strict=True,
    ):
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


def test_the_text_is_the_contexts_own():
    """Not pieces put together again: spaces, hyphens and characters without a piece are kept."""
    questions = of(("a", "ab-c  \u00e9x.", None))
    windows = windows_of(questions)
    logits = np.zeros((2, len(windows.ids)), np.float32)
    logits[0, windows.context_begins[0]] = logits[1, -3] = 9  # first token; [UNK] before the stop
    answer = answer_questions(questions, windows, *logits, with_null=False)[0]
    assert answer.best.text == "ab-c  \u00e9x"


@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("a b\u0301 c", "a b\u0301"),  # an accent that the tokenizer drops
        ("a b\u0301\u0323, c", "a b\u0301\u0323"),
        ("a b\u20dd c", "a b\u20dd"),  # an enclosing circle
        ("a b\u2014c", "a b"),
    ],
)
def test_marks_stay_with_their_character(context, answer):
    questions = of(("a", context, None))
    windows = windows_of(questions)
    first = windows.context_begins[0]
    logits = np.zeros((2, len(windows.ids)), np.float32)
    logits[0, first] = logits[1, first + 1] = 9
    best = answer_questions(questions, windows, *logits, with_null=False)[0].best
    assert best.text == answer == context[best.begin : best.end]


def test_the_null_score_is_the_lowest_of_the_windows():
    questions = of(("h", "a b c d e f g", None))
    windows = windows_of(questions, max_length=7, stride=2)
    logits = np.zeros((2, len(windows.ids)), np.float32)
    logits[0, windows.boundaries[:-1]] = [5, 1, 3]
    logits[1, windows.boundaries[:-1]] = [0, 2, -1]
    answer = answer_questions(questions, windows, *logits, with_null=True)[0]
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
