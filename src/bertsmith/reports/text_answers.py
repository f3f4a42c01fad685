"""Answers of classification, multiple choice, multi-label and regression on a dev set.

Each task type has its sections: the confusion matrix or the scores, figures by class,
calibration, and notable examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.terminal import is_number, number, percent, shortened
from bertsmith.reports import html, plots
from bertsmith.reports.runs import Run, mean_and_std

NUM_BINS = 10
NUM_EXAMPLES = 8
MAX_TEXT = 320  # characters of an example that are shown
MAX_WORD = 24  # characters that are not broken into two lines
MAX_CLASSES = 60  # rows of the table of classes


def class_sections(run: Run) -> list[str]:
    """A classifier's sections; without dev_scores.json they show what result.json holds."""
    labels, counts = run.result.get("labels") or [], run.result.get("confusion")
    items = [_with_confidence(item, labels) for item in run.dev.get("examples", [])]
    return [
        html.section("Confusion matrix", confusion_panel(labels, counts)),
        html.section("By class", class_table(labels, counts)),
        html.section("Calibration", _answer_calibration(items)),
        html.section("Examples", examples(items or run.result.get("examples"))),
    ]


def choice_sections(run: Run) -> list[str]:
    """The sections of a task that picks one of several options, which are no classes."""
    items = []
    for item in run.dev["examples"]:  # the options' texts for their numbers; two may be the same
        options = dict(enumerate(item.get("options") or []))
        texts = {name: options.get(int(item[name]), item[name]) for name in ("label", "predicted")}
        items.append({**_with_confidence(item, []), **texts, "correct": _is_correct(item)})
    calibrated = html.section("Calibration", _answer_calibration(items))
    return [calibrated, html.section("Examples", examples(items))]


def label_set_sections(run: Run) -> list[str]:
    """The sections of a multi-label task: each label is a decision of its own."""
    labels, items = run.dev["labels"], run.dev["examples"]
    probabilities = [one for item in items for one in item["probabilities"]]
    true = [name in item["label"] for item in items for name in labels]
    rows = []
    for name in labels:
        wanted, found = ([name in item[side] for item in items] for side in ("label", "predicted"))
        correct = sum(a and b for a, b in zip(wanted, found, strict=True))
        rows.append((name, correct, sum(wanted), sum(found)))
    panel = calibration(probabilities, true, "probability of a label")
    return [
        html.section("By label", figures_table("label", rows)),
        html.section("Calibration", panel),
        html.section("Examples", _label_set_examples(labels, items)),
    ]


def score_sections(run: Run) -> list[str]:
    """A regression's sections: predictions over truths, errors, the largest errors."""
    items = run.dev["examples"]
    if not items:
        return []
    true, predicted = ([float(item[side]) for item in items] for side in ("label", "predicted"))
    errors = [score - truth for truth, score in zip(true, predicted, strict=True)]
    mean, std = mean_and_std(errors)
    note = f"The error is predicted minus true: {mean:+.3g} on average, with a std of {std:.3g}."
    panels = [
        html.panel("Predicted against true", plots.draw_scatter(true, predicted)),
        html.panel("Errors", plots.draw_histogram(errors, "predicted minus true")),
    ]
    largest = sorted(range(len(items)), key=lambda k: -abs(errors[k]))[:NUM_EXAMPLES]
    rows = [
        (shown_text(items[k]), number(true[k]), number(predicted[k]), f"{errors[k]:+.3g}")
        for k in largest
    ]
    worst = example_table(["text", "true", "predicted", "error"], rows, figures=3)
    scores = html.section("Scores", html.pair(*panels), html.note(note))
    return [scores, html.section("Largest errors", worst)]


# Figures by class


def confusion_panel(labels: Sequence[Any], counts: Any, title: str = "") -> str:
    """The confusion matrix and the pairs of labels that are confused most often."""
    if not counts:
        return ""
    names = [str(label) for label in labels]
    cells = [
        (count, names[row], names[column])
        for row, line in enumerate(counts)
        for column, count in enumerate(line)
        if row != column and count
    ]
    cells.sort(key=lambda cell: -cell[0])
    worst = ", ".join(f"{true} for {predicted} ({n:,})" for n, true, predicted in cells[:3])
    mistakes = html.note(f"Most often confused (true for predicted): {worst}.") if worst else ""
    note = (
        "A row is a true label, a column a predicted one; a cell is shaded by its share of the row."
    )
    return html.panel(title, html.note(note), plots.draw_confusion(names, counts)) + mistakes


def class_table(labels: Sequence[Any], counts: Any) -> str:
    """Precision, recall and F1 of each label, computed from the confusion matrix."""
    rows = [
        (str(label), counts[k][k], sum(counts[k]), sum(line[k] for line in counts))
        for k, label in enumerate(labels if counts else [])
    ]
    return figures_table("label", rows)


def figures_table(head: str, rows: Sequence[tuple[str, int, int, int]]) -> str:
    """A row a class (name, correct, true, predicted): support, precision, recall and F1."""
    cells = [
        [html.text(name), f"{true:,}", *map(percent, class_figures(correct, true, predicted))]
        for name, correct, true, predicted in rows[:MAX_CLASSES]
    ]
    table = html.table([head, "examples", "precision", "recall", "F1"], cells)
    more = len(rows) - MAX_CLASSES
    return table + (html.note(f"{more} more are left out.") if more > 0 else "")


def class_figures(correct: int, true: int, predicted: int) -> tuple[float | None, ...]:
    """Precision, recall and F1 of a class; None where there is nothing to divide by.

    >>> class_figures(30, 40, 50), class_figures(0, 2, 0)
    ((0.6, 0.75, 0.6666666666666666), (None, 0.0, 0.0))
    """
    parts = (correct, predicted), (correct, true), (2 * correct, true + predicted)
    return tuple(above / below if below else None for above, below in parts)


# Calibration


class Bin(NamedTuple):
    """The answers whose confidence lies in one tenth of the range from 0 to 1."""

    size: int
    confidence: float  # mean over the bin
    accuracy: float


def reliability(confidences: Sequence[float], correct: Sequence[bool]) -> list[Bin]:
    """Bins of equal width over the confidence, 0 to 1; an empty bin is left out.

    >>> reliability([0.92, 0.98, 0.55], [True, False, True])
    [Bin(size=1, confidence=0.55, accuracy=1.0), Bin(size=2, confidence=0.95, accuracy=0.5)]
    """
    numbers = np.minimum((np.asarray(confidences) * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    sums = [np.bincount(numbers, weights).tolist() for weights in (None, confidences, correct)]
    return [Bin(n, total / n, hits / n) for n, total, hits in zip(*sums, strict=True) if n]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance between confidence and accuracy over the answers (Guo et al. 2017, eq. 5).

    >>> round(expected_calibration_error([Bin(1, 0.55, 1.0), Bin(2, 0.95, 0.5)]), 4)
    0.45
    """
    total = sum(one.size for one in bins)
    return sum(one.size * abs(one.accuracy - one.confidence) for one in bins) / total


def calibration(confidences: Sequence[float], correct: Sequence[bool], axis: str) -> str:
    """The reliability diagram, the confidences, and the error; `axis` names the probability."""
    if not confidences:
        return ""
    bins = reliability(confidences, correct)
    mean, accuracy = (percent(sum(side) / len(side)) for side in (confidences, correct))
    note = (
        f"Expected calibration error {expected_calibration_error(bins):.1%}: the mean distance of "
        "the dots from the diagonal, where confidence and accuracy would be equal. On average "
        f"{mean} was claimed and {accuracy} came true; a dot under the "
        "diagonal is overconfident, and a large dot stands for many answers."
    )
    panels = [
        html.panel("Reliability diagram", plots.draw_reliability(bins, axis)),
        html.panel("Confidence", plots.draw_histogram(confidences, axis, percent=True)),
    ]
    return html.pair(*panels) + html.note(note)


def _answer_calibration(items: Sequence[Mapping[str, Any]]) -> str:
    items = [item for item in items if is_number(item["probability"])]
    confidences = [item["probability"] for item in items]
    return calibration(confidences, [*map(_is_correct, items)], "probability of the answer")


# Examples


def examples(items: Any) -> str:
    """The most confident errors and the least confident answers."""
    items = [item for item in items or [] if is_number(item.get("probability"))]
    items = sorted(items, key=lambda item: item["probability"])
    return _notable_examples([item for item in items[::-1] if not _is_correct(item)], items)


def example_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", figures: int = 1
) -> str:
    """A row an example: HTML of its text, then plain words, last so many figures.

    Short words and tags stay on one line each; long texts may break anywhere.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    for k, column in enumerate(columns[: len(head) - figures]):
        kind = "any"
        if k:
            column = [shortened("" if word is None else str(word), MAX_TEXT) for word in column]
            kind = "word" if max(map(len, column)) <= MAX_WORD else "any"
            column = map(html.text, column)
        columns[k] = [f'<span class="{kind}">{cell}</span>' for cell in column]
    table = html.table(head, list(zip(*columns, strict=True)), left=len(head) - figures)
    return f"<h3>{html.text(title)}</h3>{table}" if title and table else table


def shown_text(item: Mapping[str, Any]) -> str:
    """The text, or both texts of a pair, cut and escaped."""
    shown = " ▸ ".join(str(item[name]) for name in ("text", "pair") if item.get(name))
    return html.text(shortened(shown, MAX_TEXT))


def _with_confidence(item: Mapping[str, Any], labels: Sequence[Any]) -> dict[str, Any]:
    """Add the probability of the answer, which with a tuned threshold may not be the highest."""
    known = dict(zip(map(str, labels), item.get("probabilities") or [], strict=False))
    highest = max(item.get("probabilities") or [], default=None)
    return {**item, "probability": known.get(str(item["predicted"]), highest)}


def _is_correct(item: Mapping[str, Any]) -> bool:
    return item.get("correct", item.get("label") == item.get("predicted"))


def _label_set_examples(labels: Sequence[str], items: Iterable[Mapping[str, Any]]) -> str:
    """The texts with the most confident wrong decision, and with the least confident one."""
    wrong, least = [], []
    for item in items:
        differing = {*item["label"]} ^ {*item["predicted"]}
        confidence = {
            name: probability if name in item["predicted"] else 1 - probability
            for name, probability in zip(labels, item["probabilities"], strict=True)
        }
        shown = {**item, **{name: ", ".join(item[name]) for name in ("label", "predicted")}}
        least.append({**shown, "probability": min(confidence.values())})
        if differing:
            wrong.append({**shown, "probability": max(confidence[name] for name in differing)})
    wrong.sort(key=lambda item: -item["probability"])
    least.sort(key=lambda item: item["probability"])
    return _notable_examples(wrong, least)


def _notable_examples(
    wrong: Sequence[Mapping[str, Any]], least: Sequence[Mapping[str, Any]]
) -> str:
    """The first of both lists, each text once."""
    wrong = wrong[:NUM_EXAMPLES]
    texts = {shown_text(item) for item in wrong}
    least = [item for item in least if shown_text(item) not in texts][:NUM_EXAMPLES]
    tables, head = "", ["text", "true", "predicted", "confidence"]
    for title, items in (("Most confident errors", wrong), ("Least confident", least)):
        rows = [
            (shown_text(i), i.get("label"), i.get("predicted"), percent(i["probability"]))
            for i in items
        ]
        tables += example_table(head, rows, title)
    return tables
