"""Charts as inline SVG: curves and seed dots by matplotlib, the confusion matrix by hand.

matplotlib only ever sees numbers and words of this file; names that come from run directories
stand in the HTML legends. Its colours are stand-ins that are then replaced by CSS variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

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
WIDE, HALF = (9.0, 3.1), (4.1, 2.2)  # inches; 9 points then come out as about 13 pixels
STEPS = [1, 2, 2.5, 5, 10]  # between ticks
MAX_POINTS = 400  # a curve is thinned to so many points, which keeps the page small
MAX_CELLS = 40  # labels of a confusion matrix that is still drawn


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
                f'fill="{colour(row != column)}" fill-opacity="{0.05 + 0.95 * share:.3f}">'
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
