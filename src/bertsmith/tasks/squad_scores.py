"""Exact match and F1 by the rules of SQuAD's scoring scripts, and the threshold for "no answer".

Two texts are compared after lower-casing, without punctuation and articles, words split at white
space. F1 is over words, each as often as it occurs. Of several right answers the one that gives
most counts. Where the scripts differ:

                                          1.1            2.0
    no word left on one side              F1 0           F1 1 if on both sides, else 0
    right answers without a word          count          left out
    a question that was not answered      0              left out of the mean
    a question without a right answer     -              "" is right
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bertsmith.tasks.squad_answers import Answer
from bertsmith.tasks.squad_questions import Questions

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """What two answers are compared by.

    >>> normalize_answer("The  U.S. of  A!")
    'us of'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(answers: Sequence[str], predicted: str, version: int = 2) -> tuple[float, float]:
    """(exact match, F1) of the best of the right answers, 0 to 1; in version 2 [] or "" is "no
    answer", version 1 has at least one answer.

    >>> answer_scores(["The year 1066", "1066"], "in 1066")
    (0.0, 0.6666666666666666)
    >>> answer_scores([], ""), answer_scores([], "1066")
    ((1.0, 1.0), (0.0, 0.0))
    """
    assert version in (1, 2)
    given, right = normalize_answer(predicted), {normalize_answer(answer) for answer in answers}
    if version == 2:
        right = right - {""} or {""}
    return float(given in right), max(_word_f1(given, answer, version) for answer in right)


def squad1_scores(questions: Questions, predictions: Mapping[str, str]) -> dict[str, float]:
    """{"exact", "f1"} in percent and "total", as `evaluate-v1.1.py` counts them.

    `predictions`: question id -> text. Errors: ValueError when no question was answered, or one
    has no right answer.
    """
    exact, f1, is_answered = question_scores(questions, predictions, version=1)
    _check_answered(questions, is_answered)
    return _means("", exact, f1)


def squad2_scores(questions: Questions, predictions: Mapping[str, str]) -> dict[str, float]:
    """{"exact", "f1"} in percent and "total", as `evaluate-v2.0.py` counts them, and the same with
    "HasAns_" and "NoAns_" before them for the questions with and without an answer.

    Errors: ValueError when no question was answered.
    """
    exact, f1, is_answered = question_scores(questions, predictions, version=2)
    _check_answered(questions, is_answered)
    has_answer = questions.has_answer
    scores = _means("", exact[is_answered], f1[is_answered])
    for name, part in (("HasAns_", has_answer), ("NoAns_", ~has_answer)):
        if (part & is_answered).any():
            scores |= _means(name, exact[part & is_answered], f1[part & is_answered])
    return scores


def question_scores(
    questions: Questions, predictions: Mapping[str, str], version: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact match and F1 of each question, 0 to 1, float64 [Q], and who was answered, bool [Q].

    Errors: ValueError in version 1 for a question without a right answer.
    """
    assert questions.answers is not None
    scores = np.zeros((len(questions), 2))
    is_answered = np.array([identity in predictions for identity in questions.ids])
    for q in np.flatnonzero(is_answered):
        if version == 1 and not questions.answers[q]:
            raise ValueError(
                f"{questions.source}: question '{questions.ids[q]}' has no answer, which SQuAD 1.1"
                " does not know: use squad2"
            )
        scores[q] = answer_scores(questions.answers[q], predictions[questions.ids[q]], version)
    return scores[:, 0], scores[:, 1], is_answered


def _word_f1(given: str, right: str, version: int) -> float:
    given_words, right_words = given.split(), right.split()
    if not given_words or not right_words:
        return float(version == 2 and given_words == right_words)
    shared = sum((Counter(given_words) & Counter(right_words)).values())
    return 2 * shared / (len(given_words) + len(right_words))


def _means(name: str, exact: np.ndarray, f1: np.ndarray) -> dict[str, float]:
    return {
        f"{name}exact": 100 * float(exact.mean()),
        f"{name}f1": 100 * float(f1.mean()),
        f"{name}total": len(exact),
    }


def _check_answered(questions: Questions, is_answered: np.ndarray) -> None:
    if not is_answered.any():
        raise ValueError(
            f"{questions.source}: none of its {len(questions):,} question ids is in the predictions"
        )


def search_threshold(questions: Questions, answers: Sequence[Answer], score: str) -> float:
    """The threshold on the null odds with the best mean of a score on labelled questions.

    `score` is "exact" or "f1", by the rules of 2.0.
    """
    place = ("exact", "f1").index(score)
    texts = {answer.id: answer.best.text for answer in answers}
    of_text = question_scores(questions, texts, version=2)[place]
    of_null = question_scores(questions, dict.fromkeys(texts, ""), version=2)[place]
    odds = {answer.id: answer.null_odds for answer in answers}
    null_odds = np.array([odds[identity] for identity in questions.ids], np.float64)
    return best_threshold(null_odds, of_text, of_null)[0]


def best_threshold(
    null_odds: np.ndarray, of_text: np.ndarray, of_null: np.ndarray
) -> tuple[float, float]:
    """The threshold that makes the mean score highest, and that score.

    Question q gets of_null[q] where null_odds[q] is above the threshold, else of_text[q].
    All of the at most Q + 1 different outcomes are compared. A threshold lies in the middle between
    two neighbouring odds, or 1 beyond the outermost; of equally good ones it is the nearest to 0.

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
