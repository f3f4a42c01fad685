"""A page and its parts, as functions that return HTML.

Words from a file pass through `text`, which escapes them, and numbers through the formats of
`base/terminal.py`. Colors are CSS variables: page and charts follow the reader's light or dark
setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from bertsmith.base.terminal import NO_VALUE, percent

NUM_COLORS = 6  # --c0 .. --c5, told apart by people who do not see red and green

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfaf7; --panel: #ffffff; --ink: #23272e; --soft: #6a7079; --line: #e5e1d8;
  --c0: #2b6395; --c1: #c8642c; --c2: #3d8a72; --c3: #8a5a9c; --c4: #a8862a; --c5: #6b7785;
  --on: #ffffff; --mark: #f3ead6;
  --words: -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", sans-serif; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #15181c; --panel: #1c2025; --ink: #e4e2dc; --soft: #98a0a9; --line: #30353c;
  --c0: #7db4e3; --c1: #e89563; --c2: #72c4a8; --c3: #c39ad4; --c4: #d8ba64; --c5: #a3afbb;
  --on: #15181c; --mark: #3a3423; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 var(--words); }
main { max-width: 960px; margin: 0 auto; padding: 64px 24px 80px; }
h1, h2 { font-family: Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia,
  "Liberation Serif", serif; font-weight: 600; line-height: 1.2; letter-spacing: -.01em; }
h1 { font-size: 40px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 25px; margin: 72px 0 6px; }
h3 { font-size: 15px; font-weight: 600; margin: 32px 0 4px; }
p { margin: 8px 0; max-width: 44em; }
.eyebrow { color: var(--c0); font-size: 13px; font-weight: 600; letter-spacing: .08em;
  text-transform: uppercase; margin: 0 0 14px; }
.lead { color: var(--soft); font-size: 17px; margin: 0; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: 14px; max-width: 60em; }
.figures { display: grid; margin: 36px 0 0; background: var(--panel); overflow: hidden;
  grid-template-columns: repeat(auto-fit, minmax(max(150px, 100% / var(--columns) - 1px), 1fr));
  border: 1px solid var(--line); border-radius: 10px; }
.figures div { padding: 18px 20px 16px; margin: 0 -1px -1px 0; border: solid var(--line);
  border-width: 0 1px 1px 0; }
.figures b { display: block; font-size: 27px; font-weight: 600; line-height: 1.25;
  letter-spacing: -.015em; white-space: nowrap; }
.figures span { display: block; font-size: 14px; }
.figures small { display: block; color: var(--soft); font-size: 13px; line-height: 1.4; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 18px 0; }
.panel h3 { margin: 0 0 6px; }
.panel svg { display: block; width: 100%; height: auto; margin: 0 auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr));
  gap: 18px; margin: 18px 0; } .pair .panel { margin: 0; min-width: 0; }
.legend { font-size: 13px; color: var(--soft); margin: 0 0 8px; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 16px; height: 0; border-top: 3px solid; margin-right: 6px;
  vertical-align: middle; border-radius: 2px; } .legend i.dot { width: 8px; border-width: 8px 0 0;
  border-radius: 50%; }
.scroll { overflow-x: auto; margin: 16px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; line-height: 1.45;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 500; font-size: 13px; text-align: left;
  vertical-align: bottom; }
th, td { padding: 7px 18px 7px 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; } .any { overflow-wrap: anywhere; } .word { white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
th.n, td.n { text-align: right; white-space: nowrap; } .values td:first-child { width: 36%; }
tr.total td { font-weight: 600; }
mark { background: var(--mark); color: inherit; padding: 1px 6px;
  border-radius: 5px; font-size: .92em; }
.bars { display: grid; grid-template-columns: 108px 1fr 52px; gap: 5px 12px;
  align-items: center; font-size: 14px; margin: 12px 0 2px; overflow-wrap: anywhere; }
.bars + .bars { margin-top: 22px; }
.bars .bar { height: 10px; } .bars .value { text-align: right; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.bar { display: block; background: var(--line); border-radius: 5px; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--c0); border-radius: 5px; }
.bar.long { height: 8px; min-width: 260px; margin-top: 7px; }
.bars .first { font-weight: 600; } .sentence { font-size: 17px; margin: 0; }
pre { font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
pre span { display: inline-block; max-width: 100%; }
details { margin: 16px 0; } summary { cursor: pointer; color: var(--c0); font-size: 15px; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.warn { border-left: 3px solid var(--c1); padding: 2px 0 2px 16px; margin: 28px 0 0; }
svg text { fill: var(--ink); } footer { margin-top: 80px; color: var(--soft); font-size: 13px; }
@media (max-width: 640px) { .figures b { font-size: 22px; } svg.wide { overflow: visible; }
  svg.wide text { font-size: 15px !important; } }
@media print { main { padding: 0; } h2 { break-after: avoid; } .panel { break-inside: avoid; } }
"""


def page(title: str, eyebrow: str, lead: str, body: Iterable[str], version: str) -> str:
    """A whole page; `lead` and the parts of the body are HTML, the rest is plain text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body><main>\n"
        f'<p class="eyebrow">{text(eyebrow)}</p>\n<h1>{text(title)}</h1>\n'
        f'<p class="lead">{lead}</p>\n{"".join(body)}\n'
        f"<footer>bertsmith {text(version)}</footer>\n</main></body>\n</html>\n"
    )


def text(value: Any) -> str:
    """Any value as escaped text, an absent one as a dash."""
    return NO_VALUE if value is None or value == "" else escaped(str(value))


def escaped(words: str) -> str:
    """Escaped text, which may be empty.

    A byte that is not UTF-8 and half a character, which no page could hold, are question marks.

    >>> escaped("a < \\ud83d")
    'a &lt; ?'
    """
    return escape(whole(words))


def whole(words: str) -> str:
    """The text with a question mark for a byte that is not UTF-8 and for half a character."""
    return words.encode("utf-8", "replace").decode("utf-8")


def note(words: str) -> str:
    """A paragraph in small type."""
    return f'<p class="note">{text(words)}</p>' if words else ""


def details(summary: str, body: str, is_open: bool = False) -> str:
    """HTML that is folded away behind its summary."""
    head = f"<summary>{text(summary)}</summary>"
    return f"<details{' open' if is_open else ''}>{head}{body}</details>\n" if body else ""


def section(title: str, *parts: str) -> str:
    """A headline and its HTML; nothing when there is nothing to show."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>" if body else ""


def figures(*items: tuple[str, str, str]) -> str:
    """Headline figures (value, label, note), all plain text; without a value one is left out."""
    cells = []
    for value, label, note in items:
        if value not in ("", NO_VALUE):
            small = f"<small>{text(note)}</small>" if note else ""
            cells.append(f"<div><b>{text(value)}</b><span>{text(label)}</span>{small}</div>")
    columns = len(cells) if len(cells) <= 5 else -(-len(cells) // 2)
    body = "".join(cells)
    return f'<div class="figures" style="--columns:{columns}">{body}</div>' if cells else ""


def panel(title: str, *parts: str) -> str:
    """A framed picture, the last part, with its title and legend; nothing without a picture."""
    head = f"<h3>{text(title)}</h3>" if title else ""
    return f'<div class="panel">{head}{"".join(parts)}</div>' if parts[-1] else ""


def pair(*panels: str) -> str:
    """Panels two abreast where the page is wide enough."""
    return f'<div class="pair">{"".join(panels)}</div>' if any(panels) else ""


def legend(items: Iterable[tuple[str, int, str]]) -> str:
    """(label, color number, "line" | "dot") of each curve; nothing for no curve."""
    keys = [
        f'<span><i class="{shape}" style="border-color:{color(number)}"></i>{text(label)}</span>'
        for label, number, shape in items
    ]
    return f'<p class="legend">{"".join(keys)}</p>' if keys else ""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, total: int = 0
) -> str:
    """A table of HTML cells: the first `left` columns are words, the others figures.

    The last `total` rows are set in bold.
    """
    rows = list(rows)
    if not rows:
        return ""
    kinds = [""] * left + [' class="n"'] * (len(head) - left)

    def line(tag: str, cells: Sequence[str], kind: str = "") -> str:
        parts = zip(cells, kinds, strict=True)
        return f"<tr{kind}>{''.join(f'<{tag}{own}>{cell}</{tag}>' for cell, own in parts)}</tr>"

    bold = [""] * (len(rows) - total) + [' class="total"'] * total
    body = "".join(f"{line('td', *row)}\n" for row in zip(rows, bold, strict=True))
    top = line("th", [escaped(name) for name in head])
    return f'<div class="scroll"><table><thead>{top}</thead>\n<tbody>{body}</tbody></table></div>'


def bars(items: Iterable[tuple[str, float]], longest: float) -> str:
    """Labelled fractions as bars; a bar of the full width is `longest`."""
    rows = [
        f"<span{' class=first' if k == 0 else ''}>{text(label)}</span>"
        f'{bar(fraction / (longest or 1))}<span class="value">{percent(fraction)}</span>'
        for k, (label, fraction) in enumerate(items)
    ]
    return f'<div class="bars">{"".join(rows)}</div>'


def bar(fraction: float, kind: str = "bar") -> str:
    """A bar that is filled to a fraction of its width."""
    filled = 100 * max(0.0, min(1.0, fraction))
    return f'<span class="{kind}"><i style="width:{filled:.1f}%"></i></span>'


def color(number: int) -> str:
    return f"var(--c{number % NUM_COLORS})"


def swatch(number: int) -> str:
    """A dot in the color of a curve, for tables that name it."""
    return f'<i class="swatch" style="background:{color(number)}"></i>'
