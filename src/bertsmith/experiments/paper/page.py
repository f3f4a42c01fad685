"""The page of an experiment, as Markdown and as HTML, from what result.json holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.base import VERSION
from bertsmith.base.terminal import NO_VALUE, short
from bertsmith.experiments.paper.experiment import PERPLEXITY
from bertsmith.reports import html
from bertsmith.reports.plots import Curve, draw

TOLERANCE = 0.1  # of parameters


@dataclass(frozen=True)
class Part:
    """A section: words, a table, or pictures that only HTML has."""

    title: str
    words: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[str, str, str]] = ()
    """(title, legend, SVG)."""


def markdown(result: Mapping[str, Any]) -> str:
    lines = [f"# {result['title']}", "", result["about"]]
    for part in parts(result):
        if not (part.words or part.rows):
            continue
        lines += ["", f"## {part.title}"]
        lines += ["", part.words] if part.words else []
        if part.rows:
            lines += ["", f"| {' | '.join(part.head)} |", f"|{'---|' * len(part.head)}"]
            lines += [f"| {' | '.join(row)} |" for row in part.rows]
    return "\n".join(lines) + "\n"


def page(result: Mapping[str, Any]) -> str:
    """The page as HTML that needs no other file."""
    body = []
    for part in parts(result):
        rows = [[html.text(cell) for cell in row] for row in part.rows]
        pictures = [html.panel(*picture) for picture in part.pictures]
        table = html.table(part.head, rows) if rows else ""
        body.append(html.section(part.title, html.note(part.words), *pictures, table))
    lead = html.text(result["about"])
    return html.page(result["title"], "bertsmith reproduce", lead, body, VERSION)


def parts(result: Mapping[str, Any]) -> Iterator[Part]:
    rows, columns = result["rows"], result["columns"]
    groups = dict.fromkeys(row["group"] for row in rows.values())
    for group in groups:
        own = {name: row for name, row in rows.items() if row["group"] == group}
        yield _figures(group or "Figures", own, columns)
    if result["curves"]:
        yield _curves(result["curves"], columns)
    if result["claims"]:
        yield _claims(result)
    if any(test["columns"] for test in result["tests"]):
        yield _tests(result, columns)
    yield _costs(rows, columns)


def _figures(title: str, rows: Mapping[str, Any], columns: Sequence[str]) -> Part:
    def cell(row: Mapping[str, Any], column: str) -> str:
        found = row["figures"].get(column)
        if found is None:
            return NO_VALUE
        scale = 1 if column == PERPLEXITY else 100
        spread = "" if found["std"] is None else f" ± {scale * found['std']:.1f}"
        paper = "" if found["paper"] is None else f" ({found['paper']:g})"
        return f"{scale * found['mean']:.{2 if scale == 1 else 1}f}{spread}{paper}"

    table = [[row["title"], *(cell(row, column) for column in columns)] for row in rows.values()]
    beside = "; in brackets the paper's figure" if has_paper(rows) else ""
    words = f"Mean and standard deviation of the seeds{beside}."
    return Part(title, words, ["", *columns], table)


def has_paper(rows: Mapping[str, Any]) -> bool:
    """True: some row has a figure of the paper."""
    return any(one["paper"] is not None for row in rows.values() for one in row["figures"].values())


def _curves(curves: Mapping[str, Any], columns: Sequence[str]) -> Part:
    """A picture a column: a variant's figures over its pre-training, ours and the paper's."""
    pictures = []
    for column in columns:
        drawn, names = [], []
        for number, (name, points) in enumerate(curves.items()):
            measured = [(100 * at, row[column]) for at, row in points if column in row]
            ours = [(at, 100 * found["mean"]) for at, found in measured]
            theirs = [(at, found["paper"]) for at, found in measured]
            known = [(at, value) for at, value in theirs if value is not None]
            for line, shape in ((ours, "step"), (known, "dot")):
                drawn.append(Curve([x for x, _ in line], [y for _, y in line], number, shape))
            names.append((name, number, "line"))
            if known:
                names.append((f"{name}, the paper's", number, "dot"))
        chart = draw(drawn, x_label="percent of the pre-training")
        pictures.append((column, html.legend(names), chart))
    return Part("Over the pre-training", pictures=pictures)


def named(rows: Mapping[str, Any], names: Sequence[str], between: str = "") -> str:
    """Rows by their titles, behind the title of their group: two groups may have namesakes.

    >>> row = {"title": "A", "group": "At equal text"}
    >>> named({"a": row, "b": {**row, "title": "B"}}, ("a", "b"), " > ")
    'At equal text: A > B'
    """
    parts, group = [], ""
    for row in map(rows.__getitem__, names):
        is_new = row["group"] not in ("", group)
        parts.append(f"{row['group']}: {row['title']}" if is_new else row["title"])
        group = row["group"]
    return between.join(parts)


def _claims(result: Mapping[str, Any]) -> Part:
    rows = []
    for claim in result["claims"]:
        pair = named(result["rows"], (claim["better"], claim["worse"]), " > ")
        rows += [[pair, column, claim["source"], word] for column, word in claim["words"].items()]
    words = (
        "A difference holds, or does not, where a paired bootstrap over the dev examples and a "
        "paired t over the seeds both have p below 0.05; else it is not sure. At a small scale "
        "much of what the paper found cannot be seen, and what is not seen is not refuted."
    )
    who = "What the paper says" if has_paper(result["rows"]) else "Claims"
    title = f"{who}, and what was found"
    return Part(title, words, ["", "on", "source", "here"], rows)


def _tests(result: Mapping[str, Any], columns: Sequence[str]) -> Part:
    def cell(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return NO_VALUE
        if "is_sure" not in found:
            return f"{found['difference']:+.2f}"
        low_high = ""
        if "interval" in found:
            low, high = (100 * end for end in found["interval"])
            low_high = f" ({low:+.1f} to {high:+.1f})"
        p = [_p(found[name]) for name in ("p_examples", "p_seeds") if name in found]
        return f"{100 * found['difference']:+.1f}{low_high}, p {', '.join(p)}"

    rows = []
    for test in result["tests"]:
        pair, found = named(result["rows"], test["rows"], " - "), test["columns"]
        rows.append([pair, *(cell(found.get(column)) for column in columns)])
    words = (
        "First minus second in points, the 95% interval of the bootstrap, its p, and p over the "
        "seeds; of perplexities how much lower the first one's is. Of twenty tests of nothing one "
        "is below 0.05 by luck."
    )
    return Part("Differences", words, ["", *columns], rows)


def _costs(rows: Mapping[str, Any], columns: Sequence[str]) -> Part:
    first = next(iter(rows.values()))
    table = []
    for name, row in rows.items():
        made, found = row.get("pretraining", {}), row["figures"]
        # two metrics of a task are one training
        spent = {column.partition(":")[0]: one for column, one in found.items()}
        total = sum(one.get("flops", 0.0) for one in spent.values())
        table.append(
            [
                named(rows, (name,)),
                row.get("size", NO_VALUE),
                f"{made['tokens']:,}" if made else NO_VALUE,
                f"{made['flops']:.2e}" if made else NO_VALUE,
                *(_parameters(found.get(c), first["figures"].get(c)) for c in columns),
                f"{total:.2e}" if total else NO_VALUE,
            ]
        )
    heads = [f"parameters, {column}" for column in columns]
    head = ["", "size", "tokens or words read", "pre-training", *heads, "a seed of all tasks"]
    words = "Parameters used downstream, with the difference from the first row, and FLOPs."
    return Part("Costs", words, head, table)


def _parameters(found: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> str:
    if not (found and first and "parameters" in found and "parameters" in first):
        return NO_VALUE
    off = found["parameters"] / first["parameters"] - 1
    more = "" if abs(off) <= TOLERANCE else ", more than 10%"
    return f"{short(found['parameters'])} ({off:+.0%}{more})"


def _p(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"
