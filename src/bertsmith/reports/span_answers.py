"""What a model that answers questions does on its dev set: kinds of errors, and examples.

What a tagger does on its dev set: figures by type of entity, and the worst sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from bertsmith.reports import html
from bertsmith.reports.runs import Run, is_number
from bertsmith.reports.text_answers import NUM_EXAMPLES, calibration, cut, figures_table
from bertsmith.tasks.squad.answers import answer_scores
from bertsmith.tasks.tagging.schemes import OUTSIDE, classes_scheme, find_entities

SHOWN = ("words", "label", "predicted")  # of the least sure word
Entity = tuple[int, int, str]  # first word, word behind the last one, type


def tag_sections(run: Run) -> str:
    """Of a tagger; where tags spell no entities, each word counts by its tag."""
    sentences, plain = run.dev["examples"], is_plain(run.dev)
    true = [entities(sentence["label"], plain) for sentence in sentences]
    given = [entities(sentence["predicted"], plain) for sentence in sentences]
    right = _by_type([a & b for a, b in zip(true, given, strict=True)])
    wanted, found = _by_type(true), _by_type(given)
    rows = [
        (name or "(no type)", right[name], wanted[name], found[name])
        for name in sorted(wanted | found)
    ]
    if len(rows) > 1:
        rows.append(("together", right.total(), wanted.total(), found.total()))
    order = sorted(range(len(sentences)), key=lambda k: -len(true[k] ^ given[k]))
    worst = [
        _row(sentences[k], true[k] - given[k], given[k] - true[k])
        for k in order[:NUM_EXAMPLES]
        if true[k] != given[k]
    ]
    head = ["sentence", "missed", "found in error"]
    return "".join(
        [
            html.section("By type of entity", figures_table("type", rows)),
            html.section("Calibration", _calibration(sentences)),
            html.section("Sentences with most errors", html.table(head, worst, left=3)),
            html.section("Least sure", _least_sure(sentences)),
        ]
    )


def is_plain(dev: Mapping[str, Any]) -> bool:
    """Whether the tags of a dev_scores.json spell no entities. That is a matter of all of them:
    among parts of speech may be one that is called S.

    >>> is_plain({"labels": ["NN", "S"]}), is_plain({"labels": ["O", "S-PER"]})
    (True, False)
    """
    return classes_scheme(dev.get("labels") or []) == "plain"


def entities(tags: Sequence[str], plain: bool) -> set[Entity]:
    """The entities that the tags of one sentence spell, see `find_entities`; of plain tags each
    that is not O is a type by itself, of one word.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "E-PER"], plain=False))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'PER')]
    >>> sorted(entities(["B", "I", "O"], plain=True))
    [(0, 1, 'B'), (1, 2, 'I')]
    """
    if plain:
        tags = [tag if tag == OUTSIDE else f"S-{tag}" for tag in tags]
    return find_entities(tags, np.array([0, len(tags)])).keys()


def _calibration(sentences: Sequence[Mapping[str, Any]]) -> str:
    """Of all words, each with its tag."""
    confidences, right = [], []
    for item in sentences:
        confidences += item["probabilities"]
        right += [a == b for a, b in zip(item["label"], item["predicted"], strict=True)]
    return calibration(confidences, right, "probability of a word's tag")


def _least_sure(sentences: Sequence[Mapping[str, Any]]) -> str:
    """The sentences with the least sure word, and what that was taken for."""
    rows = []
    for item in sorted(sentences, key=lambda item: min(item["probabilities"]))[:NUM_EXAMPLES]:
        probability = min(item["probabilities"])
        word = item["probabilities"].index(probability)
        cells = [" ".join(map(str, item["words"])), *(item[name][word] for name in SHOWN)]
        shown = [f'<span class="any">{html.text(cut(str(cell)))}</span>' for cell in cells]
        rows.append([*shown, html.percent(probability)])
    return html.table(["sentence", "word", "true", "predicted", "sure"], rows, left=4)


def _by_type(sentences: Iterable[set[Entity]]) -> Counter[str]:
    return Counter(name for found in sentences for *_, name in found)


def _row(sentence: Mapping[str, Any], missed: set[Entity], wrong: set[Entity]) -> list[str]:
    words = [str(word) for word in sentence["words"]]
    named = [
        ", ".join(f"{' '.join(words[begin:end])} ({name})" for begin, end, name in sorted(part))
        for part in (missed, wrong)
    ]
    return [
        f'<span class="any">{html.text(cut(cell))}</span>' for cell in (" ".join(words), *named)
    ]


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
