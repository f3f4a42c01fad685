"""A search over settings, shown: what each setting came to, and all tries, the best first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bertsmith.reports import html, plots
from bertsmith.reports.runs import is_number
from bertsmith.reports.seeds import LESS_IS_BETTER, is_share, metric

MAX_TRIES = 60  # rows of the table


def sweep_parts(
    tried: Sequence[Mapping[str, Any]], metrics: Collection[str], main: str
) -> list[str]:
    """A picture a setting, then a row a try, sorted by the main metric.

    What a try holds that is not in `metrics` is a setting. A try without the main metric failed; it
    is last in the table and in no picture.
    """
    if not tried:
        return []
    names = list(dict.fromkeys(name for row in tried for name in row))
    done = [row for row in tried if is_number(row.get(main))]
    done.sort(key=lambda row: row[main] if main in LESS_IS_BETTER else -row[main])
    panels = []
    for name in names:
        values = [value if is_number(value := row.get(name)) else str(value) for row in done]
        if name not in metrics and len(set(values)) > 1:
            scores = [row[main] for row in done]
            panels.append(html.panel(name, plots.draw_setting(values, scores, is_share(main))))
    rows = [
        [_shown(name, row.get(name), metrics) for name in names]
        for row in [*done, *(row for row in tried if not is_number(row.get(main)))]
    ]
    note = (
        f'<p class="note">A dot is a try, its height the {html.text(main.replace("_", " "))} on '
        "the development set; the best one is in another colour, a bar is the mean.</p>"
    )
    table = html.table(names, rows[:MAX_TRIES])
    if len(rows) > MAX_TRIES:
        table += f'<p class="note">{len(rows) - MAX_TRIES} worse tries are left out.</p>'
    return [note if panels else "", html.pair(panels), table]


def _shown(name: str, value: Any, metrics: Collection[str]) -> str:
    """A metric rounded; a setting as it is, since a seed with fewer digits is another."""
    if name in metrics:
        return metric(name, value)
    return html.number(value) if isinstance(value, float) else html.text(value)
