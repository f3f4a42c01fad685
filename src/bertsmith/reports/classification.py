"""What a classifier does, shown: confusion matrix, figures per class, telling examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.reports import html, plots
from bertsmith.reports.runs import is_number, spread

NUM_EXAMPLES = 8
MAX_TEXT = 320  # characters of an example that are shown
MAX_CLASSES = 60  # rows of the table of classes


def confusion_panel(labels: Sequence[Any], counts: Any) -> str:
    """The confusion matrix and the pairs of labels that are taken for one another most often."""
    if not counts:
        return ""
    names = [str(label) for label in labels]
    pairs = sorted(
        (
            (count, names[row], names[column])
            for row, line in enumerate(counts)
            for column, count in enumerate(line)
            if row != column and count
        ),
        key=lambda pair: -pair[0],
    )
    picture = plots.draw_confusion(names, counts)
    note = (
        '<p class="note">A row is a true label, a column what was predicted; '
        "a cell is shaded by its share of the row.</p>"
    )
    worst = ", ".join(
        f"{html.text(true)} for {html.text(predicted)} ({count:,})"
        for count, true, predicted in pairs[:3]
    )
    mistakes = f"Most often mistaken (true for predicted): {worst}." if worst else ""
    mistakes = f'<p class="note">{mistakes}</p>'
    if not picture:
        return mistakes
    return html.panel("Confusion matrix", note, picture) + mistakes


def class_table(labels: Sequence[Any], counts: Any) -> str:
    """Precision, recall and F1 of each label, computed from the confusion matrix."""
    if not counts:
        return ""
    rows = []
    for number, label in enumerate(labels):
        right = counts[number][number]
        true, predicted = sum(counts[number]), sum(line[number] for line in counts)
        precision = right / predicted if predicted else None
        recall = right / true if true else None
        f1 = 2 * right / (true + predicted) if true + predicted else None
        rows.append([html.text(label), f"{true:,}", *map(html.percent, (precision, recall, f1))])
    table = html.table(["label", "examples", "precision", "recall", "F1"], rows[:MAX_CLASSES])
    if len(rows) > MAX_CLASSES:
        table += f'<p class="note">{len(rows) - MAX_CLASSES} more labels are left out.</p>'
    return table


def examples(items: Any) -> str:
    """The most confident mistakes and the answers given with the least confidence."""
    items = [item for item in items or [] if is_number(item.get("probability"))]
    wrong = [item for item in items if item.get("label") != item.get("predicted")]
    wrong = sorted(wrong, key=lambda item: -item["probability"])[:NUM_EXAMPLES]
    unsure = sorted(items, key=lambda item: item["probability"])
    unsure = [item for item in unsure if item not in wrong][:NUM_EXAMPLES]
    return _example_table("Wrong, and sure of it", wrong) + _example_table("Least sure", unsure)


def seed_table(seeds: Mapping[str, Mapping[str, Any]], best_seed: Any = None) -> str:
    """A row a seed, then mean, standard deviation, lowest and highest of each metric."""
    names = list(dict.fromkeys(name for metrics in seeds.values() for name in metrics))
    names = [name for name in names if all(is_number(seed.get(name)) for seed in seeds.values())]
    if not names:
        return ""
    rows = [
        [html.text(seed) + (" (kept)" if str(best_seed) == seed and len(seeds) > 1 else "")]
        + [metric(name, metrics[name]) for name in names]
        for seed, metrics in seeds.items()
    ]
    columns = {name: [seed[name] for seed in seeds.values()] for name in names}
    if len(seeds) == 1:
        return html.table(["seed", *names], rows)
    summaries = {
        "mean": lambda values: spread(values)[0],
        "standard deviation": lambda values: spread(values)[1],
        "lowest": min,
        "highest": max,
    }
    summary = [
        [word, *(metric(name, figure(values)) for name, values in columns.items())]
        for word, figure in summaries.items()
    ]
    return html.table(["seed", *names], rows + summary, total=len(summary))


def metric(name: str, value: Any) -> str:
    """Losses and correlations as numbers, shares of one in percent.

    >>> metric("accuracy", 0.8123), metric("loss", 0.51), metric("pearson", 0.9137)
    ('81.2%', '0.51', '0.914')
    """
    if is_share(name) or not is_number(value):
        return html.percent(value)
    return f"{value:.3g}"


def is_share(name: str) -> bool:
    """Whether the metric of that name is a share of one."""
    return any(word in name.lower() for word in ("accuracy", "f1", "precision", "recall"))


def _example_table(title: str, items: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for item in items:
        shown = " ▸ ".join(str(item[name]) for name in ("text", "pair") if item.get(name))
        shown = shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1].rstrip() + "…"
        rows.append(
            [
                f'<span class="any">{html.text(shown)}</span>',
                html.text(item.get("label")),
                html.text(item.get("predicted")),
                html.percent(item["probability"]),
            ]
        )
    if not rows:
        return ""
    return f"<h3>{title}</h3>" + html.table(["text", "true", "predicted", "sure"], rows, left=3)
