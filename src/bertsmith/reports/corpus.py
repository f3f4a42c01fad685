"""The page of a corpus report and the picture of a vocabulary report.

Both read figures as JSON has them: of `corpus/statistics.py`, and of `text/vocabulary/report.py`
for what one vocabulary, or two, do to a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.base import VERSION
from bertsmith.base.files import atomic_file
from bertsmith.base.terminal import counted, fixed, percent, short
from bertsmith.reports import html
from bertsmith.reports.plots import INK, LINE, PANEL, SOFT, STEPS, STYLE
from bertsmith.text.readers.files import without_password

MAX_NAMES = 3  # inputs named in the headline

KINDS = (".png", ".svg")
# The colors of the report page in light mode: a picture has no style sheet to ask.
PAINT = {INK: "#23272e", SOFT: "#6a7079", LINE: "#e5e1d8", PANEL: "#ffffff"}
SIDES = ("#2b6395", "#c8642c")
PANEL_WIDTH, HEIGHT = 4.4, 3.9  # inches
MARKED = (128, 512)  # pieces: usual limits of a sequence
TICKS = (2, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
MIN_FRACTION = 0.0005  # of all words: a few odd ones would stretch the axis for all others
MAX_NAME = 40  # characters of a vocabulary's name


def corpus_page(figures: dict[str, Any], inputs: Sequence[str]) -> str:
    names = ", ".join(without_password(str(name)) for name in inputs[:MAX_NAMES])
    names += " …" * (len(inputs) > MAX_NAMES)
    scripts = html.bars([(one["script"], one["share"]) for one in figures["scripts"]], 1.0)
    body = [
        _headline(figures),
        html.section("Documents", *_lengths(figures["document_characters"])),
        html.section("Letters by script", html.panel("", scripts)),
        html.section("Repeated documents", _documents(figures["duplicate_documents"])),
        html.section("Repeated lines", *_lines(figures["duplicate_lines"])),
    ]
    lead = html.text(names)
    return html.page("What is in the corpus", "bertsmith corpus report", lead, body, VERSION)


def _headline(figures: dict[str, Any]) -> str:
    found, size = figures["duplicate_documents"], max(1, figures["bytes"])
    exact, near = found["exact"], found["near"]
    near_bytes = percent(near["bytes"] / size) if found["similarity"] is not None else ""
    equal, similar = (counted(one["documents"], "document") for one in (exact, near))
    return html.figures(
        (f"{figures['bytes'] / 1e6:,.1f} MB", "of text", counted(figures["files"], "file")),
        (short(figures["documents"]), "documents", counted(figures["lines"], "line")),
        (percent(exact["bytes"] / size), "of the text in equal documents", equal),
        (near_bytes, "in near duplicates", similar),
        (percent(figures["duplicate_lines"]["share"]), "of the lines repeated", ""),
    )


def _lengths(lengths: dict[str, Any]) -> tuple[str, str]:
    bars = lengths["histogram"]
    total = max(1, sum(one["documents"] for one in bars))
    parts = [(f"{one['from']:,} to {one['to']:,}", one["documents"] / total) for one in bars]
    note = (
        f"Characters of a document: {lengths['shortest']:,} to {lengths['longest']:,}; half of "
        f"them have {lengths['median']:,} or fewer, a tenth {lengths['tenth']:,} or fewer."
    )
    longest = max((part for _, part in parts), default=1.0)
    return html.note(note), html.panel("", html.bars(parts, longest))


def _documents(found: dict[str, Any]) -> str:
    rows = [
        (
            html.text(f"{example['source']}:{example['line']}"),
            html.text(f"{example['of']['source']}:{example['of']['line']}"),
            fixed(example["similarity"]),
        )
        for kind in ("exact", "near")
        for example in found[kind]["examples"]
    ]
    return html.table(["document", "repeats", "similarity"], rows, left=2) or html.note("None.")


def _lines(found: dict[str, Any]) -> tuple[str, str]:
    rows = [(html.text(one["line"]), f"{one['count']:,}") for one in found["most_frequent"]]
    part = "" if found["counted"] == 1 else f", counted on {found['counted']:.2%} of them"
    note = html.note(f"{found['count']:,} lines repeat an earlier one{part}.")
    return note, html.table(["line", "times"], rows)


def check_plot_path(path: Path) -> None:
    """Refuse a file that `write_plot` cannot write, before the long work starts.

    Errors: ValueError for another ending; ModuleNotFoundError without matplotlib.
    """
    import matplotlib  # noqa: F401

    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path}: a plot is a .png or an .svg file: give it one of these endings")


def write_plot(figures: dict[str, Any], path: Path) -> None:
    """Draw pieces per word by its length, and the lengths of lines and documents."""
    import matplotlib
    from matplotlib.figure import Figure

    sides = figures["vocabularies"]
    units = ["lines", "documents"]
    if sides[0]["lines"] == sides[0]["documents"]:
        units = ["documents"]  # a line each: the two pictures would be one
    style: Any = {name: PAINT.get(value, value) for name, value in STYLE.items()}
    style |= {"figure.facecolor": PAINT[PANEL], "savefig.dpi": 160}
    with matplotlib.rc_context(style):
        size = (PANEL_WIDTH * (1 + len(units)), HEIGHT)
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr]
        axes = figure.subplots(1, 1 + len(units), width_ratios=[1.3] + [1] * len(units))
        _draw_words(axes[0], sides)
        for panel, unit in zip(axes[1:], units, strict=True):
            _draw_sequences(panel, sides, unit)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", frameon=False, ncols=2)
        kind = path.suffix.lower().removeprefix(".")
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else {})


def _draw_words(axes: Any, sides: Sequence[dict[str, Any]]) -> None:
    """Pieces per word over the word's length, with the number of words of that length as bars."""
    first = sides[0]["by_word_length"]
    fewest = MIN_FRACTION * sum(row["words"] for row in first)
    shown = [k for k, row in enumerate(first) if row["words"] > fewest]
    labels = [length_label(first[k]["from"], first[k]["to"]) for k in shown]
    lines = [[side["by_word_length"][k]["pieces_per_word"] for k in shown] for side in sides]
    most = max((first[k]["words"] for k in shown), default=1)
    half = 0.5 * max((max(line, default=0.0) for line in lines), default=0.0)
    bars = [half * first[k]["words"] / most for k in shown]
    axes.bar(labels, bars, width=0.9, color=PAINT[LINE], alpha=0.7, zorder=1)
    style: Any = {"linewidth": 1.8, "markersize": 4.5, "markeredgecolor": PAINT[PANEL], "zorder": 3}
    for side, line, color in zip(sides, lines, SIDES, strict=False):
        name = side["name"] if len(side["name"]) <= MAX_NAME else "…" + side["name"][1 - MAX_NAME :]
        label = (
            f"{name}: {side['size']:,} pieces, {side['pieces_per_word']:.2f} a word, "
            f"{1 - side['word_coverage']:.2%} of the words unknown"
        )
        axes.plot(labels, line, "o-", color=color, label=label, **style)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.tick_params("x", labelsize=6.8)
    _frame(axes, "pieces per word", "characters of the word (bars: words of this length)")


def _draw_sequences(axes: Any, sides: Sequence[dict[str, Any]], unit: str) -> None:
    """Histogram of the lengths in pieces, on a logarithmic axis."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    shortest, longest = MARKED[0] // 2, int(1.5 * MARKED[-1])
    for k, (side, color) in enumerate(zip(sides, SIDES, strict=False)):
        edges, parts = [], []
        for bar in side[unit]["histogram"]:
            if edges and edges[-1] != bar["from"]:  # lengths that nothing has
                parts.append(0.0)
                edges.append(bar["from"])
            edges = edges or [bar["from"]]
            edges.append(bar["to"] + 1)
            parts.append(bar["count"] / side[unit]["count"])
            shortest, longest = min(shortest, bar["from"]), max(longest, bar["to"] + 1)
        if edges:
            axes.stairs(parts, edges, fill=True, color=color, alpha=0.16, zorder=2)
            axes.stairs(parts, edges, color=color, linewidth=1.6, zorder=3)
        over = ", ".join(f"{side[unit][f'over_{limit}']:.1%} over {limit}" for limit in MARKED)
        corner: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
        offset = (0, 6 + 11 * (len(sides) - 1 - k))
        axes.annotate(over, (1, 1), offset, color=color, fontsize=8, **corner)
    axes.set_xscale("log", base=2)
    axes.set_xlim(shortest, longest)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([tick for tick in TICKS if shortest <= tick <= longest])
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    axes.yaxis.set_major_formatter(lambda part, _: f"{100 * part:.3g}%")
    for limit in MARKED:
        axes.axvline(limit, color=PAINT[SOFT], linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
    _frame(axes, unit, "pieces, [CLS] and [SEP] included")


def _frame(axes: Any, title: str, x_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=12)
    axes.set_xlabel(x_label, loc="right")
    axes.grid(axis="y", color=PAINT[LINE], linewidth=0.8)


def length_label(begin: int, end: int | None) -> str:
    """A range of word lengths.

    >>> length_label(7, 7), length_label(11, 12), length_label(21, None)
    ('7', '11-12', '21+')
    """
    if end is None:
        return f"{begin}+"
    return str(begin) if begin == end else f"{begin}-{end}"
