"""Charts as inline SVG by matplotlib.

matplotlib sees numbers and words of this package, and escapes the few values of settings that it
is given; names that come from run directories stand in the HTML legends. Its colours are stand-ins
that are then replaced by CSS variables.

The confusion matrix: its picture, drawn by hand, and the labels most often mistaken.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from bertsmith.reports import html
from bertsmith.reports.html import NUM_COLOURS, colour
from bertsmith.reports.runs import smoothed

STAND_INS = {
    "#0a0b0c": "var(--ink)",
    "#0a0b0d": "var(--soft)",
    "#0a0b0e": "var(--line)",
    "#0a0b0f": "var(--panel)",
    **{f"#0a0c0{number}": colour(number) for number in range(NUM_COLOURS)},
}
INK, SOFT, LINE, PANEL, *COLOURS = STAND_INS
STYLE: Any = {
    "svg.fonttype": "none",  # words stay text, set in the reader's own font
    "svg.hashsalt": "bertsmith",  # the same run gives the same file
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
}
# inches; 9 points then come out as about 13 pixels
WIDE, HALF, SQUARE = (9.0, 3.1), (4.1, 2.2), (4.1, 3.1)
STEPS = [1, 2, 2.5, 5, 10]  # between ticks
MAX_POINTS = 400  # a curve is thinned to so many points, which keeps the page small
MAX_DOTS = 1500  # of a scatter plot
MAX_COLUMNS = 6  # values of a numeric setting that are shown as columns


@dataclass(frozen=True)
class Curve:
    """Values along an axis, drawn as a "line" (faint, with its moving mean), "dot"s or a "step"."""

    x: list[float]
    y: list[float]
    colour: int = 0
    shape: str = "line"


@dataclass(frozen=True)
class Chart:
    """What is drawn besides the curves.

    `levels`: (height, name) of dashed horizontal lines; `marks`: (place, name) of vertical ones.
    A `half` chart has room for a second one beside it.
    """

    x_label: str = "steps"
    percent: bool = False
    from_zero: bool = False
    half: bool = False
    levels: list[tuple[float, str]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)


def draw(curves: Sequence[Curve], chart: Chart) -> str:
    """The curves in one picture; an empty string when none has a point."""
    curves = [curve for curve in curves if curve.x]
    if not curves:
        return ""

    def paint(axes: Any) -> None:
        for curve in curves:
            _draw_curve(axes, curve)
        for height, name in chart.levels:
            axes.axhline(height, color=SOFT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
            _note(axes, name, (1.0, height), (0, 4), SOFT, ("axes fraction", "data"), ha="right")
        for place, name in chart.marks:
            axes.axvline(place, color=SOFT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
            _note(axes, name, (place, 1.0), (0, 3), SOFT, ("data", "axes fraction"), ha="center")
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        _number_axes(axes, chart)

    return _picture(*(HALF if chart.half else WIDE), paint)


def draw_seeds(sides: Sequence[tuple[int, Sequence[float]]], chance: float | None) -> str:
    """Accuracies of seeds: a row a side (colour, values), a dot a seed, a bar at the mean."""

    def paint(axes: Any) -> None:
        for row, (number, values) in enumerate(sides):
            mean, shade = sum(values) / len(values), COLOURS[number % NUM_COLOURS]
            axes.plot([0, mean], [row, row], color=shade, linewidth=9, alpha=0.16)
            axes.plot([mean, mean], [row - 0.3, row + 0.3], color=shade, linewidth=2)
            axes.plot(values, [row] * len(values), "o", color=shade, markersize=6, alpha=0.85)
            _note(axes, f"{mean:.1%}", (max(values), row), (12, 0), INK, "data", va="center")
        if chance is not None:
            axes.axvline(chance, color=SOFT, linewidth=1.0, linestyle=(0, (4, 3)))
            _note(axes, "guessing", (chance, -0.45), (4, 0), SOFT, "data")
        axes.set_xlim(0, 1.0)
        axes.set_ylim(len(sides) - 0.45, -0.6)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(_share)
        axes.grid(axis="x", color=LINE, linewidth=0.8)

    return _picture(WIDE[0], 0.62 * len(sides) + 0.65, paint)


def draw_reliability(bins: Sequence[tuple[int, float, float]], x_label: str) -> str:
    """Bins of answers (count, confidence, share right) beside the diagonal, by size of the dot."""

    def paint(axes: Any) -> None:
        counts, confidences, shares = zip(*bins, strict=True)
        largest = max(counts)
        areas = [12 + 130 * count / largest for count in counts]
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        axes.vlines(confidences, confidences, shares, color=COLOURS[1], linewidth=1.2, zorder=2)
        axes.plot(confidences, shares, color=COLOURS[0], linewidth=1.2, alpha=0.5, zorder=3)
        axes.scatter(
            confidences, shares, areas, color=COLOURS[0], edgecolor=PANEL, linewidth=0.8, zorder=4
        )
        _number_axes(axes, Chart(x_label, percent=True, half=True))
        axes.xaxis.set_major_formatter(_share)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.05, 1.05)

    return _picture(*SQUARE, paint)


def draw_histogram(values: Sequence[float], x_label: str, span: tuple[float, float] | None) -> str:
    """How many values lie where; `span` are the ends of the axis, by default those of the values.

    A span of shares, from 0 to 1, is numbered in percent.
    """

    def paint(axes: Any) -> None:
        axes.hist(values, bins=20, range=span, color=COLOURS[0], alpha=0.75, rwidth=0.92)
        if span is None:
            axes.axvline(0, color=SOFT, linewidth=1.0, linestyle=(0, (4, 3)))
        _number_axes(axes, Chart(x_label, half=True))
        if span == (0.0, 1.0):
            axes.xaxis.set_major_formatter(_share)

    return _picture(*SQUARE, paint)


def draw_scatter(truths: Sequence[float], scores: Sequence[float]) -> str:
    """A dot an example, its score over its truth, and the line where both are equal."""

    def paint(axes: Any) -> None:
        step = -(-len(truths) // MAX_DOTS)
        axes.plot(
            truths[::step], scores[::step], "o", color=COLOURS[0], markersize=3, alpha=0.4, mew=0
        )
        ends = min(*truths, *scores), max(*truths, *scores)
        axes.plot(ends, ends, color=SOFT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        _number_axes(axes, Chart("truth", half=True))

    return _picture(*SQUARE, paint)


def draw_setting(values: Sequence[Any], scores: Sequence[float], percent: bool) -> str:
    """What each try of one setting came to: a column a value, or a dot on an axis of numbers.

    The first try, which is the best, is coloured. Words are escaped by matplotlib.
    """
    known = list(dict.fromkeys(values))
    are_numbers = all(isinstance(value, (int, float)) for value in known)
    known = sorted(known) if are_numbers else known
    on_axis = are_numbers and len(known) > MAX_COLUMNS
    places = list(values) if on_axis else [known.index(value) for value in values]

    def paint(axes: Any) -> None:
        axes.plot(places, scores, "o", color=COLOURS[0], markersize=5.5, alpha=0.6, mew=0)
        axes.plot(places[0], scores[0], "o", color=COLOURS[1], markersize=7, mew=0)
        _number_axes(axes, Chart("", percent=percent, half=True))
        if on_axis and min(known) > 0 and max(known) / min(known) >= 10:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        elif not on_axis:
            means = [
                sum(own) / len(own)
                for k in range(len(known))
                if (
                    own := [
                        score for place, score in zip(places, scores, strict=True) if place == k
                    ]
                )
            ]
            axes.plot(range(len(known)), means, "_", color=SOFT, markersize=22, mew=1.6)
            axes.set_xticks(range(len(known)), [_tick(value) for value in known])
            axes.set_xlim(-0.5, len(known) - 0.5)

    return _picture(*HALF, paint)


def _draw_curve(axes: Any, curve: Curve) -> None:
    paint = COLOURS[curve.colour % NUM_COLOURS]
    if curve.shape == "dot" or len(curve.x) == 1:  # a line of one point would not be seen
        axes.plot(curve.x, curve.y, "o", color=paint, markersize=5, markeredgecolor=PANEL, zorder=4)
        return
    if curve.shape == "step":
        axes.plot(curve.x, curve.y, "o-", color=paint, linewidth=1.6, markersize=4, zorder=3)
        return
    smooth = smoothed(curve.y)
    if smooth != curve.y:
        axes.plot(*_thin(curve.x, curve.y), color=paint, linewidth=0.8, alpha=0.28, zorder=2)
    axes.plot(*_thin(curve.x, smooth), color=paint, linewidth=1.7, zorder=3)


def _thin(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    step = -(-len(x) // MAX_POINTS)
    if step <= 1:
        return x, y
    keep = [*range(0, len(x) - 1, step), len(x) - 1]
    return [x[k] for k in keep], [y[k] for k in keep]


def _number_axes(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(chart.x_label, loc="right")
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(4 if chart.half else 7, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5 if chart.half else 6, steps=STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(_amount))
    axes.yaxis.set_major_formatter(FuncFormatter(_share if chart.percent else _amount))


def _amount(value: float, _: int = 0) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:.3g}"


def _tick(value: Any) -> str:
    """A setting's value as it stands under a chart; a long one is cut.

    >>> _tick(5e-05), _tick("paper-adam"), _tick(16)
    ('5e-05', 'paper-adam', '16')
    """
    word = f"{value:.4g}" if isinstance(value, float) else str(value)
    return word if len(word) <= 12 else word[:11] + "…"


def _share(value: float, _: int = 0) -> str:
    return f"{value * 100:.3g}%"


def _note(
    axes: Any, words: str, place: Any, offset: Any, paint: str, by: Any, **align: Any
) -> None:
    """Words at a place of the chart, moved by an offset in points."""
    axes.annotate(
        words, place, offset, xycoords=by, textcoords="offset points", color=paint, **align
    )


def _picture(width: float, height: float, paint: Callable[[Any], None]) -> str:
    """What `paint` draws on fresh axes, as an SVG element that fills the width it is given."""
    import matplotlib  # of the extra `train`; the command line says so where it is missing
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)  # the same names would stand in every chart
    svg = re.sub(r"^<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1 role=\"img\">", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)  # the page's font is inherited
    svg = re.sub(r"\s*\n\s*", " ", svg)
    return re.sub("|".join(STAND_INS), lambda found: STAND_INS[found[0]], svg)


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
