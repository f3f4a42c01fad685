"""What a model that gives numbers does on its dev set: score over truth, errors, worst texts."""

from __future__ import annotations

from bertsmith.reports import html, plots
from bertsmith.reports.classification import NUM_EXAMPLES, shown_text
from bertsmith.reports.runs import Run, spread


def score_sections(run: Run) -> str:
    """Of a regression."""
    items = run.dev["examples"]
    if not items:
        return ""
    truths = [float(item["label"]) for item in items]
    scores = [float(item["predicted"]) for item in items]
    errors = [score - truth for truth, score in zip(truths, scores, strict=True)]
    mean, deviation = spread(errors)
    note = (
        f'<p class="note">The error is score minus truth: {mean:+.3g} on average, with a standard '
        f"deviation of {deviation:.3g}.</p>"
    )
    panels = [
        html.panel("Score over truth", plots.draw_scatter(truths, scores)),
        html.panel("Errors", plots.draw_histogram(errors, "score minus truth", None)),
    ]
    order = sorted(range(len(items)), key=lambda k: -abs(errors[k]))[:NUM_EXAMPLES]
    rows = [
        [shown_text(items[k]), *map(html.number, (truths[k], scores[k])), f"{errors[k]:+.3g}"]
        for k in order
    ]
    worst = html.table(["text", "true", "score", "error"], rows)
    return html.section("Scores", html.pair(panels), note) + html.section("Furthest off", worst)
