"""Exact match and F1 of one answer by SQuAD's rules, from strings alone.

`tasks/squad_scores.py` scores whole data sets by the same rules while a model is made; reports read
files and import nothing of that, and a test holds the two equal.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence


def answer_scores(answers: Sequence[str], predicted: str, version: int = 2) -> tuple[float, float]:
    """(exact match, F1) of the best of the right answers, 0 to 1; [] or "" is "no answer".

    In version 1.1 answers without a word count as right ones, and nothing has a word in common with
    nothing.

    >>> answer_scores(["The year 1066", "1066"], "in 1066")
    (0.0, 0.6666666666666666)
    >>> answer_scores([], ""), answer_scores([], "1066")
    ((1.0, 1.0), (0.0, 0.0))
    """
    given, right = _words(predicted), [_words(answer) for answer in answers]
    if version == 2:
        right = [words for words in right if words] or [[]]
    return float(given in right), max(_f1(given, words, version) for words in right)


def _words(answer: str) -> list[str]:
    """Without case, punctuation and articles."""
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(given: Sequence[str], right: Sequence[str], version: int) -> float:
    if not given or not right:
        return float(version == 2 and given == right)
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right))
