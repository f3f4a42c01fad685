"""Logits of start and end -> answers with their place in the context, their files and scores.

Answers follow google-research/bert `run_squad.py`, `write_predictions`, but from all spans, not
only those of the 20 best starts and ends of a window: never worse, and no question is without an
answer as long as its context has a token.

Exact match, F1 and the threshold for "no answer" follow SQuAD's scoring scripts: texts without
case, punctuation and articles, F1 over words, each as often as it occurs, the best of several
correct answers. The scripts differ:

                                          1.1            2.0
    no word left on one side              F1 0           F1 1 if on both sides, else 0
    correct answers without a word        count          left out
    a question that was not answered      0              left out of the mean
    a question without a correct answer   -              "" is correct
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertsmith.base.files import write_json
from bertsmith.base.jit import compiled
from bertsmith.tasks.squad.questions import Questions
from bertsmith.tasks.squad.windows import Windows
from bertsmith.text.tokenizer.normalize import second_characters

REPEATS = 3  # spans kept for each one wanted, as several may have the same text


class Candidate(NamedTuple):
    """A possible answer: the characters begin:end of the context; text "" means there is none."""

    text: str
    begin: int
    end: int
    probability: float  # softmax over the candidates' scores
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Answer:
    """A model's answer to one question."""

    id: str
    candidates: list[Candidate]  # best first, never empty, no text twice
    null_odds: float | None  # score of "no answer" minus that of the best text; None: not asked

    @property
    def best(self) -> Candidate:
        """The best candidate with a text; the empty one if there is no other."""
        return next((c for c in self.candidates if c.text), self.candidates[0])

    def chosen(self, threshold: float = 0.0) -> Candidate:
        """The best with a text, or the empty one where the null odds are above the threshold."""
        is_null = self.null_odds is not None and self.null_odds > threshold
        return next(c for c in self.candidates if not c.text) if is_null else self.best


def answer_questions(
    questions: Questions,
    windows: Windows,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    *,
    with_null: bool,
    n_best: int = 20,
    max_answer_tokens: int = 30,
) -> list[Answer]:
    """The n best answers to each question from logits [T] for every token of every window.

    A span begins and ends in the context of one window, is at most `max_answer_tokens` long and
    begins where its window has most context. Its text is cut out of the context. `with_null`: "no
    answer" is a candidate too, with the lowest of the windows' scores at [CLS] (SQuAD 2.0).
    """
    assert len(start_logits) == len(end_logits) == len(windows.ids)
    assert np.isfinite(start_logits).all() and np.isfinite(end_logits).all()
    shape = len(questions), REPEATS * n_best
    scores = np.empty(shape, np.float64)
    spans = np.zeros((*shape, 3), np.int64)  # window, first token, last token
    found = np.zeros(len(questions), np.int64)
    null_places = np.zeros(len(questions), np.int64)
    begins = windows.boundaries[:-1] + windows.context_begins
    _search_spans(
        (start_logits.astype(np.float64), end_logits.astype(np.float64), windows.is_max_context),
        (windows.question_windows, windows.boundaries, begins, max_answer_tokens),
        (scores, spans, found, null_places),
    )
    kept = np.arange(shape[1]) < found[:, None]  # [Q, N]
    window, first, last = spans[kept].T
    begin_characters = windows.characters(window, first)[:, 0]
    end_characters = windows.characters(window, last)[:, 1]
    columns = begin_characters, end_characters, start_logits[first], end_logits[last]
    rows = np.stack(columns, axis=1, dtype=np.float64)
    answers = []
    for q, found_rows in enumerate(np.split(rows, np.cumsum(found)[:-1])):
        context = questions.contexts[questions.context_numbers[q]]
        candidates, null = _distinct(found_rows, context, n_best), None
        if with_null:
            cls = null_places[q]
            null = Candidate("", 0, 0, 0.0, float(start_logits[cls]), float(end_logits[cls]))
        answers.append(_answer(questions.ids[q], candidates, null, n_best))
    return answers


@compiled
def _search_spans(logits, windows, out):
    """Keep the best spans of each question, best first; of equal ones the earlier."""
    start, end, is_max_context = logits
    question_windows, boundaries, begins, max_tokens = windows
    scores, spans, found, null_places = out
    wanted = scores.shape[1]
    for q in range(len(question_windows) - 1):
        count = 0
        null_score = np.inf
        for w in range(question_windows[q], question_windows[q + 1]):
            cls = boundaries[w]
            if start[cls] + end[cls] < null_score:
                null_score = start[cls] + end[cls]
                null_places[q] = cls
            after = boundaries[w + 1] - 1  # [SEP]
            for i in range(begins[w], after):
                if not is_max_context[i]:
                    continue
                for j in range(i, min(i + max_tokens, after)):
                    score = start[i] + end[j]
                    if count == wanted and score <= scores[q, count - 1]:
                        continue
                    if count < wanted:
                        count += 1
                    k = count - 1
                    while k > 0 and scores[q, k - 1] < score:
                        scores[q, k] = scores[q, k - 1]
                        spans[q, k] = spans[q, k - 1]
                        k -= 1
                    scores[q, k] = score
                    spans[q, k, 0] = w
                    spans[q, k, 1] = i
                    spans[q, k, 2] = j
        found[q] = count


def _distinct(rows: np.ndarray, context: str, n_best: int) -> list[Candidate]:
    """The first n with different texts, of rows (begin, end, start logit, end logit)."""
    candidates: dict[str, Candidate] = {}
    for begin, end, start_logit, end_logit in rows.tolist():
        span = int(begin), _include_marks(context, int(end))
        text = context[slice(*span)]
        candidates.setdefault(text, Candidate(text, *span, 0.0, start_logit, end_logit))
        if len(candidates) == n_best:  # nearly always soon
            break
    return list(candidates.values())


def _include_marks(context: str, end: int) -> int:
    """The end of a cut, moved after marks of its last character, which tokenizers drop or compose.

    >>> _include_marks("cafe\u0301 noir", 4), _include_marks("cafe noir", 4)
    (5, 4)
    """
    while end < len(context) and not context[end].isascii():
        mark = unicodedata.category(context[end]) in ("Mn", "Me")
        if not mark and context[end] not in second_characters():
            break
        end += 1
    return end


def _answer(
    identity: str, candidates: list[Candidate], null: Candidate | None, n_best: int
) -> Answer:
    null_odds = None
    if null is not None:
        null_odds = null.score - candidates[0].score if candidates else 0.0
        ranked = sorted([*candidates, null], key=lambda candidate: -candidate.score)[:n_best]
        candidates = ranked if null in ranked else [*ranked, null]
    if not candidates:  # a context without a token
        candidates = [Candidate("", 0, 0, 0.0, 0.0, 0.0)]
    weights = [math.exp(c.score - candidates[0].score) for c in candidates]
    total = sum(weights)
    both = zip(candidates, weights, strict=True)
    return Answer(identity, [c._replace(probability=w / total) for c, w in both], null_odds)


def write_answers(out: Path, answers: Sequence[Answer], chosen: Sequence[Candidate]) -> None:
    """Write `out` (a .json): question id -> its text, as SQuAD's scoring scripts read it.

    Also `OUT.nbest.json` and, where "no answer" was a candidate, `OUT.null_odds.json`, in the
    formats of google-research/bert.
    """
    write_json(out, {a.id: candidate.text for a, candidate in zip(answers, chosen, strict=True)})
    fields = ("text", "probability", "start_logit", "end_logit")
    n_best = {a.id: [{f: getattr(c, f) for f in fields} for c in a.candidates] for a in answers}
    write_json(out.with_suffix(".nbest.json"), n_best)
    if any(answer.null_odds is not None for answer in answers):
        write_json(out.with_suffix(".null_odds.json"), {a.id: a.null_odds for a in answers})


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """The form in which two answers are compared.

    >>> normalize_answer("The  U.S. of  A!")
    'us of'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(answers: Sequence[str], predicted: str, version: int = 2) -> tuple[float, float]:
    """(exact match, F1), 0 to 1, by the best of the correct answers; version 2: [] is "no answer".

    >>> answer_scores(["The year 1066", "1066"], "in 1066"), answer_scores([], "")
    ((0.0, 0.6666666666666666), (1.0, 1.0))
    """
    assert version in (1, 2)
    given, correct = normalize_answer(predicted), {normalize_answer(answer) for answer in answers}
    if version == 2:
        correct = correct - {""} or {""}
    return float(given in correct), max(_word_f1(given, answer, version) for answer in correct)


def squad1_scores(questions: Questions, predictions: Mapping[str, str]) -> dict[str, float]:
    """{"exact", "f1"} in percent and "total", as `evaluate-v1.1.py`. Errors: as `question_scores`.

    `predictions`: question id -> text.
    """
    exact, f1, _ = question_scores(questions, predictions, version=1)
    return _means("", exact, f1)


def squad2_scores(questions: Questions, predictions: Mapping[str, str]) -> dict[str, float]:
    """The scores of `evaluate-v2.0.py`, also of the questions with ("HasAns_...") and without an
    answer ("NoAns_..."). Errors: as `question_scores`."""
    exact, f1, is_answered = question_scores(questions, predictions, version=2)
    has_answer = questions.has_answer & is_answered
    scores = _means("", exact[is_answered], f1[is_answered])
    for name, part in (("HasAns_", has_answer), ("NoAns_", is_answered & ~has_answer)):
        if part.any():
            scores |= _means(name, exact[part], f1[part])
    return scores


def question_scores(
    questions: Questions, predictions: Mapping[str, str], version: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact match and F1 of each question, 0 to 1, float64 [Q]; True where answered, bool [Q].

    Errors: ValueError when no question was answered, and in version 1 for one without an answer.
    """
    assert questions.answers is not None
    scores = np.zeros((len(questions), 2))
    is_answered = np.array([identity in predictions for identity in questions.ids])
    if not is_answered.any():
        raise ValueError(
            f"{questions.source}: none of its {len(questions):,} question ids is in the predictions"
        )
    for q in np.flatnonzero(is_answered):
        if version == 1 and not questions.answers[q]:
            raise ValueError(
                f"{questions.source}: question '{questions.ids[q]}' has no answer, which SQuAD 1.1"
                " does not know: use squad2"
            )
        scores[q] = answer_scores(questions.answers[q], predictions[questions.ids[q]], version)
    return scores[:, 0], scores[:, 1], is_answered


def _word_f1(given: str, correct: str, version: int) -> float:
    given_words, correct_words = given.split(), correct.split()
    if not given_words or not correct_words:
        return float(version == 2 and given_words == correct_words)
    shared = (Counter(given_words) & Counter(correct_words)).total()
    return 2 * shared / (len(given_words) + len(correct_words))


def _means(name: str, exact: np.ndarray, f1: np.ndarray) -> dict[str, float]:
    return {
        f"{name}exact": 100 * float(exact.mean()),
        f"{name}f1": 100 * float(f1.mean()),
        f"{name}total": len(exact),
    }


def search_threshold(questions: Questions, answers: Sequence[Answer], score: str) -> float:
    """The threshold on the null odds with the best mean "exact" or "f1", by the rules of 2.0."""
    column = ("exact", "f1").index(score)
    texts = {answer.id: answer.best.text for answer in answers}
    of_text = question_scores(questions, texts, version=2)[column]
    of_null = question_scores(questions, dict.fromkeys(texts, ""), version=2)[column]
    odds = {answer.id: answer.null_odds for answer in answers}
    null_odds = np.array([odds[identity] for identity in questions.ids], np.float64)
    return best_threshold(null_odds, of_text, of_null)[0]


def best_threshold(
    null_odds: np.ndarray, of_text: np.ndarray, of_null: np.ndarray
) -> tuple[float, float]:
    """The threshold that makes the mean score highest, and that score.

    Question q gets of_null[q] where null_odds[q] is above the threshold, else of_text[q]. A
    threshold lies in the middle between two neighbouring odds, or 1 beyond the outermost; of
    equally good ones it is the nearest to 0.

    >>> best_threshold(np.array([-3.0, -1.0, 2.0]), np.array([1.0, 0.0, 0.0]), np.array([0, 1, 1]))
    (-2.0, 1.0)
    """
    order = np.argsort(null_odds, kind="stable")
    odds = null_odds[order]
    gains = np.concatenate([[0.0], np.cumsum((of_text - of_null)[order])])  # [Q + 1]
    middles = odds[:-1] + (odds[1:] - odds[:-1]) / 2
    thresholds = np.concatenate([[odds[0] - 1], middles, [odds[-1] + 1]])
    # Equal odds are answered alike; a middle that rounds up to its upper end does not divide.
    divides = np.concatenate([[True], (middles < odds[1:]), [True]])
    thresholds, scores = thresholds[divides], (gains[divides] + of_null.sum()) / len(odds)
    best = np.flatnonzero(scores >= scores.max() - 1e-12)  # equal but for rounding
    chosen = best[np.abs(thresholds[best]).argmin()]
    return float(thresholds[chosen]), float(scores[chosen])
