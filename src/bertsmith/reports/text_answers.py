"""Answers of classification, multiple choice, multi-label and regression on a dev set.

Each kind of task has its sections: the confusion matrix or the scores, figures by class,
calibration, and notable examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.terminal import shortened
from bertsmith.reports import html, plots
from bertsmith.reports.runs import Run, is_number, spread

NUM_BINS = 10
NUM_EXAMPLES = 8
MAX_TEXT = 320  # characters of an example that are shown
MAX_WORD = 24  # characters that are not broken into two lines
MAX_CLASSES = 60  # rows of the table of classes


def class_sections(run: Run) -> str:
    """A classifier's sections; without dev_scores.json they show what result.json holds."""
    labels, counts = run.result.get("labels") or [], run.result.get("confusion")
    items = [_with_confidence(item, labels) for item in run.dev.get("examples", [])]
    return "".join(
        [
            html.section("Confusion matrix", confusion_panel(labels, counts)),
            html.section("By class", class_table(labels, counts)),
            html.section("Calibration", _class_calibration(items)),
            html.section("Examples", examples(items or run.result.get("examples"))),
        ]
    )


def choice_sections(run: Run) -> str:
    """The sections of a task that picks one of several options, which are no classes."""
    items = [_with_options(_with_confidence(item, [])) for item in run.dev["examples"]]
    return html.section("Calibration", _class_calibration(items)) + html.section(
        "Examples", examples(items)
    )


def label_set_sections(run: Run) -> str:
    """The sections of a multi-label task: each label is a decision of its own."""
    labels, found = run.dev["labels"], run.dev["examples"]
    decided = [
        (name in item["label"], name in item["predicted"], probability)
        for item in found
        for name, probability in zip(labels, item["probabilities"], strict=True)
    ]
    rows = []
    for k, name in enumerate(labels):
        own = decided[k :: len(labels)]
        right = sum(is_true and is_given for is_true, is_given, _ in own)
        rows.append((name, right, sum(true for true, *_ in own), sum(given for _, given, _ in own)))
    panel = calibration(
        [probability for *_, probability in decided],
        [is_true for is_true, *_ in decided],
        "probability of a label",
    )
    return "".join(
        [
            html.section("By label", figures_table("label", rows)),
            html.section("Calibration", panel),
            html.section("Examples", _label_set_examples(labels, found)),
        ]
    )


def score_sections(run: Run) -> str:
    """A regression's sections: predictions over truths, errors, the largest errors."""
    items = run.dev["examples"]
    if not items:
        return ""
    truths = [float(item["label"]) for item in items]
    scores = [float(item["predicted"]) for item in items]
    errors = [score - truth for truth, score in zip(truths, scores, strict=True)]
    mean, deviation = spread(errors)
    note = f"The error is predicted minus true: {mean:+.3g} on average, with a std of "
    panels = [
        html.panel("Predicted against true", plots.draw_scatter(truths, scores)),
        html.panel("Errors", plots.draw_histogram(errors, "predicted minus true", None)),
    ]
    rows = [
        (shown_text(items[k]), html.number(truths[k]), html.number(scores[k]), f"{errors[k]:+.3g}")
        for k in sorted(range(len(items)), key=lambda k: -abs(errors[k]))[:NUM_EXAMPLES]
    ]
    worst = example_table(["text", "true", "predicted", "error"], rows, figures=3)
    return html.section(
        "Scores", html.pair(panels), html.note(f"{note}{deviation:.3g}.")
    ) + html.section("Largest errors", worst)


# Figures by class


def confusion_panel(labels: Sequence[Any], counts: Any, title: str = "") -> str:
    """The confusion matrix and the pairs of labels that are confused most often."""
    if not counts:
        return ""
    names = [str(label) for label in labels]
    pairs = [
        (count, names[row], names[column])
        for row, line in enumerate(counts)
        for column, count in enumerate(line)
        if row != column and count
    ]
    pairs.sort(key=lambda pair: -pair[0])
    worst = ", ".join(f"{true} for {predicted} ({n:,})" for n, true, predicted in pairs[:3])
    mistakes = html.note(f"Most often confused (true for predicted): {worst}.") if worst else ""
    picture = plots.draw_confusion(names, counts)
    if not picture:
        return mistakes
    note = (
        "A row is a true label, a column a predicted one; a cell is shaded by its share of the row."
    )
    return html.panel(title, html.note(note), picture) + mistakes


def class_table(labels: Sequence[Any], counts: Any) -> str:
    """Precision, recall and F1 of each label, computed from the confusion matrix."""
    rows = [
        (str(label), counts[k][k], sum(counts[k]), sum(line[k] for line in counts))
        for k, label in enumerate(labels if counts else [])
    ]
    return figures_table("label", rows)


def figures_table(head: str, rows: Sequence[tuple[str, int, int, int]]) -> str:
    """A row a class (name, right, true, predicted): precision, recall, F1 and support."""
    cells = [
        [html.text(name), f"{true:,}", *map(html.percent, class_figures(right, true, predicted))]
        for name, right, true, predicted in rows[:MAX_CLASSES]
    ]
    table = html.table([head, "examples", "precision", "recall", "F1"], cells)
    more = len(rows) - MAX_CLASSES
    return table + (html.note(f"{more} more are left out.") if more > 0 else "")


def class_figures(
    right: int, true: int, predicted: int
) -> tuple[float | None, float | None, float | None]:
    """Precision, recall and F1 of a class; None where they would be shares of nothing.

    >>> class_figures(30, 40, 50), class_figures(0, 2, 0)
    ((0.6, 0.75, 0.6666666666666666), (None, 0.0, 0.0))
    """
    return (
        right / predicted if predicted else None,
        right / true if true else None,
        2 * right / (true + predicted) if true + predicted else None,
    )


# Calibration


class Bin(NamedTuple):
    """The answers whose confidence lies in one tenth of the way from 0 to 1."""

    count: int
    confidence: float  # mean of the answers in it
    right: float  # share of them that is right


def reliability(
    confidences: Sequence[float], right: Sequence[bool], num_bins: int = NUM_BINS
) -> list[Bin]:
    """The answers in bins of equal width over their confidence, 0 to 1; an empty bin is left out.

    Bin k holds k / num_bins <= confidence < (k + 1) / num_bins, the last one 1 as well.

    >>> reliability([0.92, 0.98, 0.55], [True, False, True])
    [Bin(count=1, confidence=0.55, right=1.0), Bin(count=2, confidence=0.95, right=0.5)]
    """
    numbers = np.minimum((np.asarray(confidences) * num_bins).astype(np.int64), num_bins - 1)
    sums = [np.bincount(numbers, weights).tolist() for weights in (None, confidences, right)]
    return [Bin(n, mean / n, share / n) for n, mean, share in zip(*sums, strict=True) if n]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between confidence and share of right answers (Guo et al. 2017, eq. 5).

    A bin counts by its answers: 0 is perfect.

    >>> round(expected_calibration_error([Bin(1, 0.55, 1.0), Bin(2, 0.95, 0.5)]), 4)
    0.45
    """
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.right - one.confidence) for one in bins) / total


def calibration(confidences: Sequence[float], right: Sequence[bool], axis: str) -> str:
    """The reliability diagram, the confidences, and the error; `axis` names the probability."""
    if not confidences:
        return ""
    bins = reliability(confidences, right)
    mean = sum(confidences) / len(confidences)
    share = sum(right) / len(right)
    note = (
        f"Expected calibration error {expected_calibration_error(bins):.1%}: the mean distance of "
        "the dots from the diagonal, where confidence and accuracy would be equal. On average "
        f"{html.percent(mean)} was claimed and {html.percent(share)} came true; a dot under the "
        "diagonal is overconfident, and a large dot stands for many answers."
    )
    panels = [
        html.panel("Reliability diagram", plots.draw_reliability(bins, axis)),
        html.panel("Confidence", plots.draw_histogram(confidences, axis, (0.0, 1.0))),
    ]
    return html.pair(panels) + html.note(note)


def _class_calibration(items: Sequence[Mapping[str, Any]]) -> str:
    items = [item for item in items if is_number(item["probability"])]
    return calibration(
        [item["probability"] for item in items],
        [_is_right(item) for item in items],
        "probability of the answer",
    )


# Examples


def examples(items: Any) -> str:
    """The most confident errors and the least confident answers."""
    items = [item for item in items or [] if is_number(item.get("probability"))]
    items = sorted(items, key=lambda item: item["probability"])
    wrong = [item for item in items[::-1] if not _is_right(item)]
    return _notable_examples(wrong, items)


def example_table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", figures: int = 1
) -> str:
    """A row an example: HTML of its text, then plain words, last so many figures.

    Short words and tags stay on one line each; long texts may break anywhere.
    """
    rows = [list(row) for row in rows]
    texts = len(head) - figures
    for column in range(1, texts):
        values = [
            shortened(str("" if row[column] is None else row[column]), MAX_TEXT) for row in rows
        ]
        kind = "word" if max(map(len, values), default=0) <= MAX_WORD else "any"
        for row, value in zip(rows, values, strict=True):
            row[column] = f'<span class="{kind}">{html.text(value)}</span>'
    for row in rows:
        row[0] = f'<span class="any">{row[0]}</span>'
    table = html.table(head, rows, left=texts)
    return f"<h3>{html.text(title)}</h3>{table}" if title and rows else table


def shown_text(item: Mapping[str, Any]) -> str:
    """The text, or both texts of a pair, cut and escaped."""
    shown = " ▸ ".join(str(item[name]) for name in ("text", "pair") if item.get(name))
    return html.text(shortened(shown, MAX_TEXT))


def _with_confidence(item: Mapping[str, Any], labels: Sequence[Any]) -> dict[str, Any]:
    """Add the probability of the answer, which with a tuned threshold may not be the highest."""
    probabilities, names = item.get("probabilities") or [], [str(label) for label in labels]
    if str(item["predicted"]) in names[: len(probabilities)]:
        confidence = probabilities[names.index(str(item["predicted"]))]
    else:
        confidence = max(probabilities, default=None)
    return {**item, "probability": confidence}


def _with_options(item: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the numbers of the options by their texts, of which two may be the same."""
    options = dict(enumerate(item.get("options") or []))
    texts = {name: options.get(int(item[name]), item[name]) for name in ("label", "predicted")}
    return {**item, **texts, "is_right": _is_right(item)}


def _is_right(item: Mapping[str, Any]) -> bool:
    return item.get("is_right", item.get("label") == item.get("predicted"))


def _label_set_examples(labels: Sequence[str], found: Iterable[Mapping[str, Any]]) -> str:
    """The texts with the most confident wrong decision, and with the least confident one."""
    wrong, unsure = [], []
    for item in found:
        true, given = set(item["label"]), set(item["predicted"])
        confidence = {
            name: probability if name in given else 1 - probability
            for name, probability in zip(labels, item["probabilities"], strict=True)
        }
        item = {**item, **{name: ", ".join(item[name]) for name in ("label", "predicted")}}
        unsure.append({**item, "probability": min(confidence.values())})
        if true != given:
            wrong.append({**item, "probability": max(confidence[name] for name in true ^ given)})
    wrong.sort(key=lambda item: -item["probability"])
    unsure.sort(key=lambda item: item["probability"])
    return _notable_examples(wrong, unsure)


def _notable_examples(
    wrong: Sequence[Mapping[str, Any]], unsure: Sequence[Mapping[str, Any]]
) -> str:
    """The first of both lists, each text once."""
    wrong = wrong[:NUM_EXAMPLES]
    texts = {shown_text(item) for item in wrong}
    unsure = [item for item in unsure if shown_text(item) not in texts][:NUM_EXAMPLES]
    head = ["text", "true", "predicted", "confidence"]
    return "".join(
        example_table(
            head,
            [
                (shown_text(i), i.get("label"), i.get("predicted"), html.percent(i["probability"]))
                for i in items
            ],
            title,
        )
        for title, items in (("Most confident errors", wrong), ("Least confident", unsure))
    )
