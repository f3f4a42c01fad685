"""The confusion matrix: its picture, drawn by hand, and the labels most often mistaken."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bertsmith.reports import html

MAX_CELLS = 40  # labels of a confusion matrix that is still drawn


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
    picture = draw_confusion(names, counts)
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


def draw_confusion(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """A confusion matrix: a row a true label, a column a predicted one, shaded by the row's share.

    More than MAX_CELLS labels give an empty string: nothing could be read in the picture.
    """
    size = len(labels)
    if not 0 < size <= MAX_CELLS:
        return ""
    cell = max(18, min(62, 620 // size))
    left = 12 + min(190, max(7 * len(_clip(label)) for label in labels))
    top = left * 0.72 + 14
    parts = []
    for row, line in enumerate(counts):
        total = sum(line) or 1
        y = top + row * cell
        parts.append(_label(left - 8, y + cell / 2, labels[row]))
        for column, count in enumerate(line):
            x, share = left + column * cell, count / total
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{cell - 2}" height="{cell - 2}" rx="3" '
                f'fill="{html.colour(row != column)}" fill-opacity="{0.05 + 0.95 * share:.3f}">'
                f"<title>{escape(labels[row])} taken for {escape(labels[column])}: {count}</title>"
                "</rect>"
            )
            if count and size <= 20:
                paint = "var(--on)" if share > 0.72 else "var(--ink)"
                parts.append(
                    f'<text x="{x + cell / 2 - 1:g}" y="{y + cell / 2 + 3.5:g}" '
                    f'text-anchor="middle" font-size="{min(13, cell // 3)}" '
                    f'style="fill:{paint}">{count}</text>'
                )
    for column, label in enumerate(labels):
        place = f"translate({left + column * cell + cell / 2:g} {top - 8:g}) rotate(-40)"
        parts.append(f'<g transform="{place}">{_label(0, 0, label, "start")}</g>')
    width, height = left + size * cell + left * 0.5, top + size * cell
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px;margin:0 auto" '
        f'role="img" aria-label="confusion matrix">{"".join(parts)}</svg>'
    )


def _label(x: float, y: float, label: str, anchor: str = "end") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" dy="4" font-size="13" text-anchor="{anchor}">'
        f"{escape(_clip(label))}</text>"
    )


def _clip(label: str) -> str:
    return label if len(label) <= 26 else label[:25] + "…"
