"""Answers of tagging and question answering on a dev set.

A tagger: figures by type of entity, calibration of its words, the worst sentences. Question
answering: how often each kind of error is made, and examples of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertsmith.base.terminal import is_number, percent, shortened
from bertsmith.reports import html
from bertsmith.reports.runs import Run
from bertsmith.reports.text_answers import (
    MAX_TEXT,
    NUM_EXAMPLES,
    calibration,
    example_table,
    figures_table,
)
from bertsmith.tasks.squad.answers import answer_scores
from bertsmith.tasks.tagging.schemes import Entity, entities, is_plain

# Kinds of answers, in the order of the table; the first two are right.
RIGHT = ("right", "rightly left without an answer")
ERRORS = {
    "partial overlap": "partial overlap with a right answer",
    "no overlap": "no word of a right answer",
    "null where answer": "left without an answer that the context has",
    "answer where null": "answered though the context has no answer",
}
PER_KIND = 4  # examples of each kind of error
AROUND = 120  # characters on both sides of a marked word


def tag_sections(run: Run) -> list[str]:
    """A tagger's sections; where tags spell no entities, each word counts by its tag."""
    sentences, plain = run.dev["examples"], is_plain(run.dev)
    true = [entities(sentence["label"], plain) for sentence in sentences]
    given = [entities(sentence["predicted"], plain) for sentence in sentences]
    correct = _by_type([a & b for a, b in zip(true, given, strict=True)])
    wanted, found = _by_type(true), _by_type(given)
    rows = [
        (name or "(no type)", correct[name], wanted[name], found[name])
        for name in sorted(wanted | found)
    ]
    if len(rows) > 1:
        rows.append(("together", correct.total(), wanted.total(), found.total()))
    confidences = [one for sentence in sentences for one in sentence["probabilities"]]
    is_correct = [
        a == b
        for sentence in sentences
        for a, b in zip(sentence["label"], sentence["predicted"], strict=True)
    ]
    worst = [
        (
            html.text(shortened(" ".join(map(str, sentences[k]["words"])), MAX_TEXT)),
            _named(sentences[k], true[k] - given[k]),
            _named(sentences[k], given[k] - true[k]),
        )
        for k in sorted(range(len(sentences)), key=lambda k: -len(true[k] ^ given[k]))
        if true[k] != given[k]
    ]
    head = ["sentence", "missed", "found in error"]
    errors = example_table(head, worst[:NUM_EXAMPLES], figures=0)
    panel = calibration(confidences, is_correct, "probability of a word's tag")
    return [
        html.section("By type of entity", figures_table("type", rows)),
        html.section("Calibration", panel),
        html.section("Sentences with most errors", errors),
        html.section("Least confident", _least_confident(sentences)),
    ]


def _by_type(sentences: Iterable[set[Entity]]) -> Counter[str]:
    return Counter(name for found in sentences for *_, name in found)


def _named(sentence: Mapping[str, Any], found: set[Entity]) -> str:
    words = [str(word) for word in sentence["words"]]
    return ", ".join(f"{' '.join(words[begin:end])} ({name})" for begin, end, name in sorted(found))


def _least_confident(sentences: Sequence[Mapping[str, Any]]) -> str:
    """The sentences with the least confident word, which is marked, and its tags."""
    rows = []
    for item in sorted(sentences, key=lambda item: min(item["probabilities"]))[:NUM_EXAMPLES]:
        confidence, words = min(item["probabilities"]), [str(word) for word in item["words"]]
        k = item["probabilities"].index(confidence)
        before, after = (
            "".join(f"{w} " for w in words[:k]),
            "".join(f" {w}" for w in words[k + 1 :]),
        )
        tags = item["label"][k], item["predicted"][k]
        rows.append((_marked(before, words[k], after), *tags, percent(confidence)))
    return example_table(["sentence", "true", "predicted", "confidence"], rows)


def answer_sections(run: Run) -> list[str]:
    """The sections of question answering: kinds of errors, and the most confident ones of each."""
    items = run.dev["examples"]
    kinds = [answer_kind(item["answers"], item["predicted"]) for item in items]
    counts = Counter(kinds)
    rows = [
        [html.text(words or kind), f"{counts[kind]:,}", percent(counts[kind] / len(items))]
        for kind, words in {**dict.fromkeys(RIGHT), **ERRORS}.items()
        if counts[kind]
    ]
    numbered = sorted(range(len(items)), key=lambda k: -_confidence(items[k]))
    errors = []
    for kind, words in ERRORS.items():
        own = [items[k] for k in numbered if kinds[k] == kind]
        errors.append(_question_table(own[:PER_KIND], words.capitalize()))
    known = [k for k, item in enumerate(items) if is_number(item.get("probability"))]
    confidences = [items[k]["probability"] for k in known]
    panel = calibration(confidences, [kinds[k] in RIGHT for k in known], "probability")
    least = sorted(items, key=_confidence)[: 2 * PER_KIND]
    return [
        html.section("Answers", html.table(["answer", "questions", "share"], rows)),
        html.section("Calibration", panel),
        html.section("Most confident errors", *errors),
        html.section("Least confident", _question_table(least)),
    ]


def answer_kind(answers: Sequence[str], predicted: str) -> str:
    """One of RIGHT or ERRORS; "" is no answer, and no right answers mean that there is none.

    >>> answer_kind(["in the year 1066"], "1066"), answer_kind([], "1066"), answer_kind(["x"], "")
    ('partial overlap', 'answer where null', 'null where answer')
    """
    exact, f1 = answer_scores(answers, predicted)
    if not predicted:
        return RIGHT[1] if exact else "null where answer"
    if not any(answers):
        return RIGHT[0] if exact else "answer where null"
    return RIGHT[0] if exact else "partial overlap" if f1 else "no overlap"


def _question_table(items: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Contexts with their first right answer marked, if they hold one."""
    rows = []
    for item in items:
        context, answers = str(item["context"]), item["answers"]
        held = next((answer for answer in answers if answer and answer in context), None)
        before, _, after = context.partition(held) if held else (context, "", "")
        rows.append(
            (
                _marked(before, held, after) if held else html.text(shortened(context, MAX_TEXT)),
                item["question"],
                " / ".join(dict.fromkeys(answers)),
                item["predicted"],
                percent(item.get("probability")),
            )
        )
    head = ["context", "question", "right", "predicted", "confidence"]
    return example_table(head, rows, title)


def _marked(before: str, held: str, after: str) -> str:
    before = before if len(before) <= AROUND else "…" + before[-AROUND:]
    after = after if len(after) <= AROUND else after[:AROUND] + "…"
    return f"{html.escaped(before)}<mark>{html.escaped(held)}</mark>{html.escaped(after)}"


def _confidence(item: Mapping[str, Any]) -> float:
    probability = item.get("probability")
    return probability if is_number(probability) else 0.0
