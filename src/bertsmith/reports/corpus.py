"""The page of a corpus report; it reads the figures of `corpus/survey.py` as they stand in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertsmith.base import VERSION
from bertsmith.progress import counted
from bertsmith.reports import html

MAX_NAMES = 3  # inputs named in the headline


def corpus_page(figures: dict[str, Any], inputs: Sequence[str]) -> str:
    """The whole page."""
    names = ", ".join(map(str, inputs[:MAX_NAMES])) + (" …" if len(inputs) > MAX_NAMES else "")
    body = "\n".join(
        [
            _headline(figures),
            html.section("Documents", _lengths(figures["document_characters"])),
            html.section("Letters by script", _scripts(figures["scripts"])),
            html.section("Repeated documents", _documents(figures["duplicate_documents"])),
            html.section("Repeated lines", _lines(figures["duplicate_lines"])),
        ]
    )
    return html.page(
        "What is in the corpus", "bertsmith corpus-report", html.text(names), body, VERSION
    )


def _headline(figures: dict[str, Any]) -> str:
    found, size = figures["duplicate_documents"], max(1, figures["bytes"])
    near = found["similarity"] is not None
    return html.figures(
        [
            (f"{figures['bytes'] / 1e6:,.1f} MB", "of text", counted(figures["files"], "file")),
            (html.short(figures["documents"]), "documents", counted(figures["lines"], "line")),
            (
                html.percent(found["exact"]["bytes"] / size),
                "of the text in equal documents",
                counted(found["exact"]["documents"], "document"),
            ),
            (
                html.percent(found["near"]["bytes"] / size) if near else "",
                "in near duplicates",
                counted(found["near"]["documents"], "document"),
            ),
            (html.percent(figures["duplicate_lines"]["share"]), "of the lines repeated", ""),
        ]
    )


def _lengths(lengths: dict[str, Any]) -> str:
    bars = lengths["histogram"]
    total = sum(one["documents"] for one in bars)
    shares = [
        (f"{one['from']:,} to {one['to']:,}", one["documents"] / max(1, total)) for one in bars
    ]
    note = (
        f"Characters of a document: {lengths['shortest']:,} to {lengths['longest']:,}; half of "
        f"them have {lengths['median']:,} or fewer, a tenth {lengths['tenth']:,} or fewer."
    )
    picture = html.bars(shares, max((share for _, share in shares), default=1.0))
    return f'<p class="note">{html.text(note)}</p>' + html.panel("", picture)


def _scripts(scripts: Sequence[dict[str, Any]]) -> str:
    return html.panel("", html.bars([(one["script"], one["share"]) for one in scripts], 1.0))


def _documents(found: dict[str, Any]) -> str:
    rows = [
        (
            html.text(f"{example['source']}:{example['line']}"),
            html.text(f"{example['of']['source']}:{example['of']['line']}"),
            html.fixed(example["similarity"]),
        )
        for kind in ("exact", "near")
        for example in found[kind]["examples"]
    ]
    if not rows:
        return '<p class="note">None.</p>'
    return html.table(["document", "repeats", "similarity"], rows, left=2)


def _lines(found: dict[str, Any]) -> str:
    rows = [(html.text(one["line"]), f"{one['count']:,}") for one in found["most_frequent"]]
    counted = "" if found["counted"] == 1 else f", counted on {found['counted']:.2%} of them"
    note = f"{found['count']:,} lines repeat an earlier one{counted}."
    return f'<p class="note">{html.text(note)}</p>' + html.table(["line", "times"], rows)
