"""What a model that answers questions does on its dev set: kinds of errors, and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bertsmith.reports import html
from bertsmith.reports.calibration import calibration
from bertsmith.reports.classification import cut
from bertsmith.reports.runs import Run, is_number
from bertsmith.tasks.squad_scores import answer_scores

# What an answer can be, in the order of the table; the first two are right.
RIGHT = ("right", "rightly left without an answer")
ERRORS = {
    "partial overlap": "partial overlap with a right answer",
    "no overlap": "no word of a right answer",
    "null where answer": "left without an answer that the context has",
    "answer where null": "answered though the context has no answer",
}
PER_KIND = 4  # examples of each kind of error


def answer_sections(run: Run) -> str:
    """Of question answering: how often each kind of error is made, the surest of each, and what was
    answered with the least confidence."""
    items = run.dev["examples"]
    kinds = [answer_kind(item["answers"], item["predicted"]) for item in items]
    counts = Counter(kinds)
    rows = [
        [html.text(words), f"{counts[kind]:,}", html.percent(counts[kind] / len(items))]
        for kind, words in {**dict.fromkeys(RIGHT), **ERRORS}.items()
        if counts[kind]
        for words in [words or kind]
    ]
    parts = []
    for kind, words in ERRORS.items():
        own = [item for item, of in zip(items, kinds, strict=True) if of == kind]
        own.sort(key=lambda item: -_sure(item))
        parts.append(_error_table(words, own[:PER_KIND]))
    sure = [
        (item["probability"], kind in RIGHT)
        for item, kind in zip(items, kinds, strict=True)
        if is_number(item.get("probability"))
    ]
    panel = calibration([p for p, _ in sure], [right for _, right in sure], "probability")
    return "".join(
        [
            html.section("Answers", html.table(["answer", "questions", "share"], rows)),
            html.section("Calibration", panel),
            html.section("Errors, the surest first", *parts),
            html.section("Least sure", _table(sorted(items, key=_sure)[: 2 * PER_KIND])),
        ]
    )


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


def _error_table(title: str, items: Sequence[Mapping[str, Any]]) -> str:
    return f"<h3>{title.capitalize()}</h3>" + _table(items) if items else ""


def _table(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f'<span class="any">{_marked(str(item["context"]), item["answers"])}</span>',
            f'<span class="any">{html.text(item["question"])}</span>',
            html.text(" / ".join(dict.fromkeys(item["answers"]))),
            html.text(item["predicted"]),
            html.percent(item.get("probability")),
        ]
        for item in items
    ]
    head = ["context", "question", "right", "predicted", "sure"]
    return html.table(head, rows, left=4)


def _marked(context: str, answers: Sequence[str]) -> str:
    """The context around the first right answer that it holds, with that answer marked."""
    held = next((answer for answer in answers if answer and answer in context), None)
    if held is None:
        return html.text(cut(context))
    before, _, after = context.partition(held)
    before = before if len(before) <= 120 else "…" + before[-120:]
    after = after if len(after) <= 120 else after[:120] + "…"
    return f"{escape(before)}<mark>{escape(held)}</mark>{escape(after)}"


def _sure(item: Mapping[str, Any]) -> float:
    probability = item.get("probability")
    return probability if is_number(probability) else 0.0
