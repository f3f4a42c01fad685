"""What a model that gives numbers does on its dev set: score over truth, errors, worst texts.

Whether a model is right as often as it is sure: the reliability diagram and its error.

What a classifier does on its dev set, shown: figures per class, calibration, examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bertsmith.reports import html, plots
from bertsmith.reports.plots import confusion_panel
from bertsmith.reports.runs import Run, is_number, spread

NUM_BINS = 10


class Bin(NamedTuple):
    """The answers whose confidence lies in a tenth of the way from 0 to 1."""

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
    members: dict[int, list[tuple[float, bool]]] = {}
    for confidence, is_right in zip(confidences, right, strict=True):
        number = min(int(confidence * num_bins), num_bins - 1)
        members.setdefault(number, []).append((confidence, is_right))
    bins = []
    for _, found in sorted(members.items()):
        sure = sum(confidence for confidence, _ in found) / len(found)
        bins.append(Bin(len(found), sure, sum(is_right for _, is_right in found) / len(found)))
    return bins


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between confidence and share of right answers (Guo et al. 2017, eq. 5).

    A bin counts by its answers: 0 is perfect.

    >>> round(expected_calibration_error([Bin(1, 0.55, 1.0), Bin(2, 0.95, 0.5)]), 4)
    0.45
    """
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.right - one.confidence) for one in bins) / total


def calibration(confidences: Sequence[float], right: Sequence[bool], axis: str) -> str:
    """The reliability diagram, how sure the answers are, and the error; `axis` says of what."""
    if not confidences:
        return ""
    bins = reliability(confidences, right)
    mean = sum(confidences) / len(confidences)
    share = sum(right) / len(right)
    note = (
        f'<p class="note">Expected calibration error {expected_calibration_error(bins):.1%}: the '
        "mean distance of the dots from the diagonal, where a model that knows how sure it may be "
        f"would lie. On average {html.percent(mean)} was claimed and {html.percent(share)} came "
        "true; a dot under the diagonal is too sure, and a large dot stands for many answers.</p>"
    )
    panels = [
        html.panel("Right as often as sure?", plots.draw_reliability(bins, axis)),
        html.panel("How sure it is", plots.draw_histogram(confidences, axis, (0.0, 1.0))),
    ]
    return html.pair(panels) + note


NUM_EXAMPLES = 8
MAX_TEXT = 320  # characters of an example that are shown
MAX_CLASSES = 60  # rows of the table of classes


def class_sections(run: Run) -> str:
    """Of a classifier; of a run without dev_scores.json what its result.json holds."""
    labels, counts = run.result.get("labels") or [], run.result.get("confusion")
    items = [_with_confidence(item, labels) for item in run.dev.get("examples", [])]
    return "".join(
        [
            html.section("What is taken for what", confusion_panel(labels, counts)),
            html.section("By class", class_table(labels, counts)),
            html.section("Calibration", _certainty(items)),
            html.section("Examples", examples(items or run.result.get("examples"))),
        ]
    )


def choice_sections(run: Run) -> str:
    """Of a task that picks one of several options, which are no classes."""
    items = [_with_options(_with_confidence(item, [])) for item in run.dev["examples"]]
    return html.section("Calibration", _certainty(items)) + html.section(
        "Examples", examples(items)
    )


def label_set_sections(run: Run) -> str:
    """Of a task with any number of labels a text: each label is a decision of its own."""
    labels, found = run.dev["labels"], run.dev["examples"]
    decided = [
        (name in item["label"], name in item["predicted"], probability)
        for item in found
        for name, probability in zip(labels, item["probabilities"], strict=True)
    ]
    rows = [
        (
            name,
            sum(is_true and is_given for is_true, is_given, _ in decided[k :: len(labels)]),
            sum(is_true for is_true, *_ in decided[k :: len(labels)]),
            sum(is_given for _, is_given, _ in decided[k :: len(labels)]),
        )
        for k, name in enumerate(labels)
    ]
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


def class_table(labels: Sequence[Any], counts: Any) -> str:
    """Precision, recall and F1 of each label, computed from the confusion matrix."""
    rows = [
        (str(label), counts[k][k], sum(counts[k]), sum(line[k] for line in counts))
        for k, label in enumerate(labels if counts else [])
    ]
    return figures_table("label", rows)


def figures_table(head: str, rows: Sequence[tuple[str, int, int, int]]) -> str:
    """A row a class (name, right, true, predicted), with its precision, recall, F1 and support."""
    cells = [
        [html.text(name), f"{true:,}", *map(html.percent, class_figures(right, true, predicted))]
        for name, right, true, predicted in rows[:MAX_CLASSES]
    ]
    table = html.table([head, "examples", "precision", "recall", "F1"], cells)
    if len(rows) > MAX_CLASSES:
        table += f'<p class="note">{len(rows) - MAX_CLASSES} more are left out.</p>'
    return table


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


def examples(items: Any) -> str:
    """The most confident mistakes and the answers given with the least confidence."""
    items = [item for item in items or [] if is_number(item.get("probability"))]
    items = sorted(items, key=lambda item: item["probability"])
    wrong = [item for item in items[::-1] if not _is_right(item)]
    return _worst_and_unsure(wrong, items)


def shown_text(item: Mapping[str, Any]) -> str:
    """The text, or both texts of a pair, cut and escaped."""
    shown = " ▸ ".join(str(item[name]) for name in ("text", "pair") if item.get(name))
    return f'<span class="any">{html.text(cut(shown))}</span>'


def cut(words: str) -> str:
    return words if len(words) <= MAX_TEXT else words[: MAX_TEXT - 1].rstrip() + "…"


def _with_confidence(item: Mapping[str, Any], labels: Sequence[Any]) -> dict[str, Any]:
    """The example with the probability of what was answered, which a tuned threshold may make
    another than the highest."""
    probabilities, names = item.get("probabilities") or [], [str(label) for label in labels]
    if str(item["predicted"]) in names[: len(probabilities)]:
        sure = probabilities[names.index(str(item["predicted"]))]
    else:
        sure = max(probabilities, default=None)
    return {**item, "probability": sure}


def _with_options(item: Mapping[str, Any]) -> dict[str, Any]:
    """The example with the texts of its options instead of their numbers, of which two may have
    the same."""
    options = dict(enumerate(item.get("options") or []))
    numbers = {name: item[name] for name in ("label", "predicted")}
    texts = {name: options.get(int(k), k) for name, k in numbers.items()}
    return {**item, **texts, "is_right": _is_right(item)}


def _is_right(item: Mapping[str, Any]) -> bool:
    return item.get("is_right", item.get("label") == item.get("predicted"))


def _certainty(items: Sequence[Mapping[str, Any]]) -> str:
    items = [item for item in items if is_number(item["probability"])]
    return calibration(
        [item["probability"] for item in items],
        [_is_right(item) for item in items],
        "probability of the answer",
    )


def _label_set_examples(labels: Sequence[str], found: Iterable[Mapping[str, Any]]) -> str:
    """The texts with the surest wrong decision, and those with the least sure decision."""
    wrong, unsure = [], []
    for item in found:
        true, given = set(item["label"]), set(item["predicted"])
        sure = {
            name: probability if name in given else 1 - probability
            for name, probability in zip(labels, item["probabilities"], strict=True)
        }
        item = {**item, **{name: ", ".join(item[name]) for name in ("label", "predicted")}}
        unsure.append({**item, "probability": min(sure.values())})
        if true != given:
            wrong.append({**item, "probability": max(sure[name] for name in true ^ given)})
    wrong.sort(key=lambda item: -item["probability"])
    unsure.sort(key=lambda item: item["probability"])
    return _worst_and_unsure(wrong, unsure)


def _worst_and_unsure(
    wrong: Sequence[Mapping[str, Any]], unsure: Sequence[Mapping[str, Any]]
) -> str:
    """The first of both lists, each text once."""
    wrong = wrong[:NUM_EXAMPLES]
    texts = {shown_text(item) for item in wrong}
    unsure = [item for item in unsure if shown_text(item) not in texts][:NUM_EXAMPLES]
    return _example_table("Wrong, and sure of it", wrong) + _example_table("Least sure", unsure)


def _example_table(title: str, items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            shown_text(item),
            html.text(item.get("label")),
            html.text(item.get("predicted")),
            html.percent(item["probability"]),
        ]
        for item in items
    ]
    if not rows:
        return ""
    return f"<h3>{title}</h3>" + html.table(["text", "true", "predicted", "sure"], rows, left=3)


def score_sections(run: Run) -> str:
    """Of a regression."""
    items = run.dev["examples"]
    if not items:
        return ""
    truths = [float(item["label"]) for item in items]
    scores = [float(item["predicted"]) for item in items]
    errors = [score - truth for truth, score in zip(truths, scores, strict=True)]
    mean, deviation = spread(errors)
    note = (
        f'<p class="note">The error is score minus truth: {mean:+.3g} on average, with a standard '
        f"deviation of {deviation:.3g}.</p>"
    )
    panels = [
        html.panel("Score over truth", plots.draw_scatter(truths, scores)),
        html.panel("Errors", plots.draw_histogram(errors, "score minus truth", None)),
    ]
    order = sorted(range(len(items)), key=lambda k: -abs(errors[k]))[:NUM_EXAMPLES]
    rows = [
        [shown_text(items[k]), *map(html.number, (truths[k], scores[k])), f"{errors[k]:+.3g}"]
        for k in order
    ]
    worst = html.table(["text", "true", "score", "error"], rows)
    return html.section("Scores", html.pair(panels), note) + html.section("Furthest off", worst)
