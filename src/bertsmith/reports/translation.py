"""The page that compares translation systems, from the figures that their evaluation wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.base import VERSION
from bertsmith.base.terminal import counted
from bertsmith.reports import html
from bertsmith.reports.plots import Curve, draw, draw_alignment, draw_intervals

MAX_EXAMPLES = 4  # sentences shown with all translations

Attention = tuple[list[str], list[str], np.ndarray]  # source pieces, target pieces, [T, S]


def translation_page(
    result: Mapping[str, Any],
    texts: Sequence[tuple[str, str]],
    attention: Mapping[str, Sequence[Attention]],
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    """The whole page.

    result     of `measure`, with "translations" in each system
    texts      (source, reference) of the first sentences
    attention  some sentences of each system that has any
    curves     (minutes, nats a piece on dev) of each system that was trained in steps
    """
    systems = result["systems"]
    names = list(systems)
    legend = html.legend((name, number, "line") for number, name in enumerate(names))
    curves_drawn = draw(
        [
            Curve([x for x, _ in curves[name]], [y for _, y in curves[name]], number, "step")
            for number, name in enumerate(names)
            if name in curves
        ],
        x_label="minutes of training",
    )
    body = [
        html.section("Scores", _scores(systems), _signatures(systems)),
        html.section("Differences", _differences(result["pairs"])),
        html.section(
            "Long sentences",
            html.note(
                "BLEU of sentences read alone, and of two to four in a row read as one; lines are "
                "95% intervals by bootstrap."
            ),
            html.panel("", legend, _joined(systems)),
        ),
        html.section(
            "Length of the source", html.panel("", legend, _groups(systems, "by_length", "words"))
        ),
        *_rarest(systems, legend),
        html.section("Training", html.panel("nats a piece on dev", legend, curves_drawn)),
        html.section("Attention", *_attention(attention)),
        html.section("Translations", *_examples(systems, texts)),
    ]
    lead = html.text(f"{result['data']}, {counted(result['sentences'], 'sentence')}")
    return html.page("Translation systems", "bertsmith lineage evaluate", lead, body, VERSION)


def _rarest(systems: Mapping[str, Any], legend: str) -> Iterator[str]:
    """The section on rare words, where training text was at hand to count them in."""
    if any(system["by_rarest_word"] for system in systems.values()):
        groups = _groups(systems, "by_rarest_word", "times in training")
        note = html.note("By how often training had it.")
        yield html.section("Rarest word of the source", note, html.panel("", legend, groups))


def _scores(systems: Mapping[str, Any]) -> str:
    def score(found: Mapping[str, Any]) -> str:
        low, high = found["interval"]
        return f"{found['score']:.1f} ({low:.1f} to {high:.1f})"

    rows = [
        (
            html.text(name),
            score(found["bleu"]),
            score(found["bleu_lower"]),
            f"{found['chrf']['score']:.1f}",
            f"{found['seconds']:.1f} s",
        )
        for name, found in systems.items()
    ]
    return html.table(["system", "BLEU", "BLEU, lower-cased", "chrF", "time"], rows)


def _signatures(systems: Mapping[str, Any]) -> str:
    first = next(iter(systems.values()))
    named = {"BLEU": "bleu", "lower-cased": "bleu_lower", "chrF": "chrf"}
    return html.note("; ".join(f"{name}: {first[key]['signature']}" for name, key in named.items()))


def _differences(pairs: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for pair in pairs:
        first, second = pair["systems"]
        low, high = pair["interval"]
        spread = f"{pair['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
        rows.append((html.text(second), html.text(first), spread, f"{pair['p']:.3f}"))
    head = ["system", "against", "BLEU, lower-cased", "p"]
    return html.table(head, rows, left=2)


def _joined(systems: Mapping[str, Any]) -> str:
    first = next(iter(systems.values()))["joined"]
    names = [f"{group['sentences']} ({group['words']:.0f} words)" for group in first]
    sides = [[_interval(group) for group in found["joined"]] for found in systems.values()]
    return draw_intervals(names, sides, "sentences in a text")


def _groups(systems: Mapping[str, Any], key: str, unit: str) -> str:
    first = next(iter(systems.values()))[key]
    names = [
        f"{group['from']:,} to {group['to']:,}\n{counted(group['sentences'], 'sentence')}"
        for group in first
    ]
    sides = [[_interval(group) for group in found[key]] for found in systems.values()]
    return draw_intervals(names, sides, unit)


def _interval(group: Mapping[str, Any]) -> tuple[float, float, float]:
    return group["score"], *group["interval"]


def _attention(attention: Mapping[str, Sequence[Attention]]) -> list[str]:
    rows = zip(*attention.values(), strict=True)
    return [
        html.pair(
            *(
                html.panel(name, draw_alignment(*one))
                for name, one in zip(attention, row, strict=True)
            )
        )
        for row in rows
    ]


def _examples(systems: Mapping[str, Any], texts: Sequence[tuple[str, str]]) -> list[str]:
    found = []
    for number, (source, reference) in enumerate(texts[:MAX_EXAMPLES]):
        rows = [("source", html.text(source)), ("reference", html.text(reference))]
        rows += [(name, html.text(own["translations"][number])) for name, own in systems.items()]
        found.append(html.table(["", ""], rows, left=2))
    return found
