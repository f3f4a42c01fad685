"""Charts as inline SVG, drawn by matplotlib.

matplotlib escapes the labels and values of settings that it is given; names of runs stand in HTML
legends. Its colors are stand-ins that are then replaced by CSS variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.base.terminal import shortened
from bertsmith.reports import html
from bertsmith.reports.html import NUM_COLORS

STAND_INS = {
    "#0a0b0c": "var(--ink)",
    "#0a0b0d": "var(--soft)",
    "#0a0b0e": "var(--line)",
    "#0a0b0f": "var(--panel)",
    "#0a0b10": "var(--on)",
    **{f"#0a0c0{number}": html.color(number) for number in range(NUM_COLORS)},
}
INK, SOFT, LINE, PANEL, ON, *COLORS = STAND_INS
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
PIXELS = 104  # of an inch
DASHED: Any = {"color": SOFT, "linewidth": 1.0, "linestyle": (0, (4, 3)), "zorder": 1}
STEPS = [1, 2, 2.5, 5, 10]  # between ticks
MAX_POINTS = 400  # of a curve, which keeps the page small
MAX_DOTS = 1500  # of a scatter plot
MAX_COLUMNS = 6  # values of a numeric setting that are shown as columns
MAX_CELLS, MAX_COUNTS = 40, 20  # labels of a confusion matrix that is drawn, that has its counts
MAX_LABEL, MAX_TICK = 26, 12  # characters


@dataclass(frozen=True)
class Curve:
    """Values along an axis: a "line" (faint, with its moving mean), "dot"s or a "step"."""

    x: list[float]
    y: list[float]
    color: int = 0
    shape: str = "line"


def draw(
    curves: Sequence[Curve],
    *,
    x_label: str = "steps",
    percent: bool = False,
    from_zero: bool = False,
    half: bool = False,
    levels: Sequence[tuple[float, str]] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """The curves in one picture; an empty string when none has a point.

    `levels`: (y, name) of dashed horizontal lines; `marks`: (x, name) of vertical ones.
    A `half` chart leaves space for a second one next to it.
    """
    curves = [curve for curve in curves if curve.x]
    if not curves:
        return ""

    def paint(axes: Any) -> None:
        for curve in curves:
            _draw_curve(axes, curve)
        for y, name in levels:
            axes.axhline(y, **DASHED)
            _note(axes, name, (1.0, y), (0, 4), SOFT, ("axes fraction", "data"), ha="right")
        for x, name in marks:
            axes.axvline(x, **DASHED)
            _note(axes, name, (x, 1.0), (0, 3), SOFT, ("data", "axes fraction"), ha="center")
        if from_zero:
            axes.set_ylim(bottom=0)
        _number_axes(axes, x_label, percent, half)

    return _picture(HALF if half else WIDE, paint)


def draw_seeds(sides: Sequence[tuple[int, Sequence[float]]], chance: float | None) -> str:
    """Accuracies of seeds: a row a side (color, values), a dot a seed, a bar at the mean."""

    def paint(axes: Any) -> None:
        for row, (number, values) in enumerate(sides):
            mean, shade = sum(values) / len(values), COLORS[number % NUM_COLORS]
            axes.plot([0, mean], [row, row], color=shade, linewidth=9, alpha=0.16)
            axes.plot([mean, mean], [row - 0.3, row + 0.3], color=shade, linewidth=2)
            axes.plot(values, [row] * len(values), "o", color=shade, markersize=6, alpha=0.85)
            _note(axes, f"{mean:.1%}", (max(values), row), (12, 0), INK, "data", va="center")
        if chance is not None:
            axes.axvline(chance, **DASHED)
            _note(axes, "guessing", (chance, -0.45), (4, 0), SOFT, "data")
        axes.set_xlim(0, 1.0)
        axes.set_ylim(len(sides) - 0.45, -0.6)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(_percent_tick)
        axes.grid(axis="x", color=LINE, linewidth=0.8)

    return _picture((WIDE[0], 0.62 * len(sides) + 0.65), paint)


def draw_reliability(bins: Sequence[tuple[int, float, float]], x_label: str) -> str:
    """Bins (count, confidence, accuracy) over the diagonal; a dot's area grows with the count."""

    def paint(axes: Any) -> None:
        counts, confidences, accuracies = zip(*bins, strict=True)
        areas = [12 + 130 * count / max(counts) for count in counts]
        axes.plot([0, 1], [0, 1], **DASHED)
        axes.vlines(confidences, confidences, accuracies, color=COLORS[1], linewidth=1.2, zorder=2)
        axes.plot(confidences, accuracies, color=COLORS[0], linewidth=1.2, alpha=0.5, zorder=3)
        dots = {"color": COLORS[0], "edgecolor": PANEL, "linewidth": 0.8, "zorder": 4}
        axes.scatter(confidences, accuracies, areas, **dots)
        _number_axes(axes, x_label, percent=True)
        axes.xaxis.set_major_formatter(_percent_tick)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.05, 1.05)

    return _picture(SQUARE, paint)


def draw_histogram(values: Sequence[float], x_label: str, percent: bool = False) -> str:
    """A histogram, of probabilities in percent or of values around 0."""

    def paint(axes: Any) -> None:
        span = (0.0, 1.0) if percent else None
        axes.hist(values, bins=20, range=span, color=COLORS[0], alpha=0.75, rwidth=0.92)
        if not percent:
            axes.axvline(0, **DASHED)
        _number_axes(axes, x_label)
        if percent:
            axes.xaxis.set_major_formatter(_percent_tick)

    return _picture(SQUARE, paint)


def draw_scatter(true: Sequence[float], predicted: Sequence[float]) -> str:
    """A dot an example, and the line where both scores are equal."""

    def paint(axes: Any) -> None:
        step = -(-len(true) // MAX_DOTS)
        dots: Any = {"color": COLORS[0], "markersize": 3, "alpha": 0.4, "mew": 0}
        axes.plot(true[::step], predicted[::step], "o", **dots)
        ends = min(*true, *predicted), max(*true, *predicted)
        axes.plot(ends, ends, **DASHED)
        _number_axes(axes, "true")

    return _picture(SQUARE, paint)


def draw_setting(values: Sequence[Any], scores: Sequence[float], percent: bool) -> str:
    """Scores of trials over one setting: a column a value, or a dot on an axis of numbers.

    The first trial, which is the best, is colored.
    """
    known = list(dict.fromkeys(values))
    if are_numbers := all(isinstance(value, (int, float)) for value in known):
        known.sort()
    on_axis = are_numbers and len(known) > MAX_COLUMNS
    x = list(values) if on_axis else [known.index(value) for value in values]

    def paint(axes: Any) -> None:
        axes.plot(x, scores, "o", color=COLORS[0], markersize=5.5, alpha=0.6, mew=0)
        axes.plot(x[0], scores[0], "o", color=COLORS[1], markersize=7, mew=0)
        _number_axes(axes, "", percent)
        if on_axis and min(known) > 0 and max(known) / min(known) >= 10:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        elif not on_axis:
            means = np.bincount(x, scores) / np.bincount(x)
            axes.plot(range(len(known)), means, "_", color=SOFT, markersize=22, mew=1.6)
            words = [f"{one:.4g}" if isinstance(one, float) else str(one) for one in known]
            axes.set_xticks(range(len(known)), [shortened(word, MAX_TICK) for word in words])
            axes.set_xlim(-0.5, len(known) - 0.5)

    return _picture(HALF, paint)


def draw_confusion(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """A confusion matrix: a row a true label, a column a predicted one, shaded by the row's part.

    A cell says on hover what it counts. More than MAX_CELLS labels give an empty string: nothing
    could be read in the picture.
    """
    labels, size = [html.whole(label) for label in labels], len(labels)
    if not 0 < size <= MAX_CELLS:
        return ""
    side = max(0.17, min(0.6, 6.0 / size))  # of a cell, in inches

    def paint(axes: Any) -> None:
        from matplotlib.patches import FancyBboxPatch

        for (row, column), count in np.ndenumerate(np.array(counts)):
            part = count / (sum(counts[row]) or 1)
            corner, hover = (
                (column - 0.44, row - 0.44),
                f"{labels[row]} predicted as {labels[column]}",
            )
            fill: Any = {
                "color": COLORS[row != column],
                "alpha": 0.05 + 0.95 * part,
                "linewidth": 0,
            }
            cell = FancyBboxPatch(corner, 0.88, 0.88, "round,pad=0.04", **fill)
            cell.set_gid(f"? {hover}: {count}")
            axes.add_patch(cell)
            if count and size <= MAX_COUNTS:
                where = {"ha": "center", "va": "center_baseline", "fontsize": min(9, 24 * side)}
                axes.text(column, row, count, color=ON if part > 0.72 else INK, **where)
        names = [shortened(label, MAX_LABEL) for label in labels]
        _name_cells(axes, names, names, 40)

    return _picture((size * side, size * side), paint, fixed=True)


def draw_intervals(
    names: Sequence[str], sides: Sequence[Sequence[tuple[float, float, float]]], x_label: str
) -> str:
    """Values with their intervals (value, low, high): a place a name, a line a side."""

    def paint(axes: Any) -> None:
        for number, side in enumerate(sides):
            x = np.arange(len(names)) + 0.12 * (number - (len(sides) - 1) / 2)
            values, low, high = np.array(side).T
            color = COLORS[number % NUM_COLORS]
            axes.vlines(x, low, high, color=color, linewidth=1.2, alpha=0.6, zorder=2)
            axes.plot(x, values, "o-", color=color, linewidth=1.4, markersize=4, zorder=3)
        axes.set_ylim(bottom=0)
        _number_axes(axes, x_label)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)

    return _picture(WIDE, paint)


def draw_alignment(source: Sequence[str], target: Sequence[str], weights: np.ndarray) -> str:
    """Attention: a row a target piece, a column a source piece, shaded by the weight [T, S].

    Longer texts than MAX_CELLS pieces give an empty string.
    """
    if not 0 < max(len(source), len(target)) <= MAX_CELLS:
        return ""
    side = max(0.17, min(0.32, 6.0 / max(weights.shape)))  # of a cell, in inches

    def paint(axes: Any) -> None:
        from matplotlib.patches import Rectangle

        for (row, column), weight in np.ndenumerate(weights):
            fill: Any = {"color": COLORS[0], "alpha": float(min(1.0, weight)), "linewidth": 0}
            cell = Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, **fill)
            cell.set_gid(f"? {target[row]} reads {source[column]}: {weight:.2f}")
            axes.add_patch(cell)
        _name_cells(axes, target, source, 60)

    return _picture((side * len(source), side * len(target)), paint, fixed=True)


def _name_cells(axes: Any, rows: Sequence[str], columns: Sequence[str], rotation: int) -> None:
    """Name the rows of a matrix, the first on top, and above it the columns."""
    axes.set_yticks(range(len(rows)), rows, color=INK)
    above: Any = {"rotation": rotation, "ha": "left", "va": "bottom"}
    axes.set_xticks(range(len(columns)), columns, color=INK, **above)
    axes.tick_params(length=0, rotation_mode="anchor", top=True, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def smoothed(values: list[float]) -> list[float]:
    """A centered moving mean over about a fortieth of the curve; it narrows towards both ends.

    >>> smoothed([3.0, 1.0, 2.0])
    [3.0, 1.0, 2.0]
    """
    half, k = len(values) // 80, np.arange(len(values))
    width = np.minimum(half, np.minimum(k, k[::-1]))  # of the window, to both sides of k
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return ((sums[k + width + 1] - sums[k - width]) / (2 * width + 1)).tolist()


def _draw_curve(axes: Any, curve: Curve) -> None:
    color = COLORS[curve.color % NUM_COLORS]
    if curve.shape == "dot" or len(curve.x) == 1:  # a line of one point would not be seen
        style = {"markersize": 5, "markeredgecolor": PANEL, "zorder": 4}
        axes.plot(curve.x, curve.y, "o", color=color, clip_on=False, **style)
        return
    if curve.shape == "step":
        axes.plot(curve.x, curve.y, "o-", color=color, linewidth=1.6, markersize=4, zorder=3)
        return
    step, smooth = -(-len(curve.x) // MAX_POINTS), smoothed(curve.y)
    kept = [*range(0, len(curve.x) - 1, step), len(curve.x) - 1]
    x, y = ([values[k] for k in kept] for values in (curve.x, curve.y))
    if smooth != curve.y:
        axes.plot(x, y, color=color, linewidth=0.8, alpha=0.28, zorder=2)
    axes.plot(x, [smooth[k] for k in kept], color=color, linewidth=1.7, zorder=3)


def _number_axes(axes: Any, x_label: str, percent: bool = False, half: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x_label, loc="right")
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(4 if half else 7, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5 if half else 6, steps=STEPS))
    axes.xaxis.set_major_formatter(_amount)
    axes.yaxis.set_major_formatter(_percent_tick if percent else _amount)


def _amount(value: float, _: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:.3g}"


def _percent_tick(fraction: float, _: int) -> str:
    return f"{fraction * 100:.3g}%"  # 25% and 12.5%


def _note(axes: Any, words: str, at: Any, offset: Any, color: str, by: Any, **align: Any) -> None:
    """Words at a point of the chart, moved by an offset in points."""
    where = {"xycoords": by, "textcoords": "offset points"}
    axes.annotate(words, at, offset, color=color, **where, **align)


def _picture(size: tuple[float, float], paint: Callable[[Any], None], fixed: bool = False) -> str:
    """Draw on fresh axes; an SVG element that fills the width it is given.

    `size` is that of the figure in inches. If `fixed`, it is that of the axes, and the picture
    grows no wider.
    """
    import matplotlib  # of the extra `train`; the command line says so where it is missing
    from matplotlib.figure import Figure

    buffer, kind = io.StringIO(), ' class="wide"' if size[0] == WIDE[0] else ""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout=None if fixed else "constrained")
        paint(figure.add_axes((0, 0, 1, 1)) if fixed else figure.add_subplot())
        tight = {"bbox_inches": "tight", "pad_inches": 0.02} if fixed else {}
        figure.savefig(buffer, format="svg", metadata={"Date": None}, **tight)
    svg = buffer.getvalue().partition("<svg")[2]
    if fixed and (points := re.search(r'viewBox="0 0 ([\d.]+)', svg)):
        kind = f' style="max-width: {float(points[1]) / 72 * PIXELS:.0f}px"'
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"\? ([^\"]*)\"[^>]*>", r"<g><title>\1</title>", svg)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)  # the same names would stand in every chart
    svg = re.sub(r"^[^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img"{kind}>', svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)  # the page's font is inherited
    svg = re.sub(r"\s*\n\s*", " ", svg)
    return re.sub("|".join(STAND_INS), lambda found: STAND_INS[found[0]], svg)
