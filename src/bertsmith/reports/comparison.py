"""Several runs: figures side by side, curves overlaid, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence

from bertsmith.reports import html
from bertsmith.reports.finetuning import main_metric, metrics_by_seed
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.run_page import (
    curves,
    held_out,
    in_progress,
    objective,
    run_body,
    setting,
    share_right,
)
from bertsmith.reports.runs import Run, flatten, is_number
from bertsmith.reports.seeds import is_share, mean_and_spread

AXES = {"tokens": "tokens", "step": "steps"}  # what the log names it, and how the axis does


def comparison_body(runs: Sequence[Run]) -> str:
    """The sections of a page on several runs, then each run's own, folded away."""
    pretrained = [run for run in runs if run.kind == "pretrain"]
    finetuned = [run for run in runs if run.kind != "pretrain"]
    details = "".join(
        f"<details><summary>{html.text(run.name)}</summary>{run_body(run)}</details>\n"
        for run in runs
    )
    return "".join(
        [
            *map(in_progress, runs),
            html.section("Pre-training, side by side", *_pretraining(pretrained)),
            html.section("Fine-tuning, side by side", *_finetuning(finetuned)),
            html.section(
                "What differs", differing_settings(pretrained), differing_settings(finetuned)
            ),
            html.section("Each run in full", details),
        ]
    )


def _pretraining(runs: Sequence[Run]) -> list[str]:
    """The table, and the losses of all runs in one chart, whatever their objectives."""
    keys = html.legend(
        (f"{run.name} ({'+'.join(objective(run))})", k, "line") for k, run in enumerate(runs)
    )
    loss = _overlaid(runs, "train", "loss")
    judged = [
        html.panel(title, picture)
        for title, figure in (("Held-out token loss", "loss"), ("Held-out accuracy", "accuracy"))
        if (picture := _overlaid(runs, "evaluate", figure))
    ]
    breaks = "A curve breaks where a run's second phase begins, with rows of another length."
    return [
        _pretraining_table(runs),
        html.panel("Token loss in training (nats)", keys, loss) if loss else "",
        html.pair(judged),
        f'<p class="note">{breaks}</p>' if any(len(run.phases) > 1 for run in runs) else "",
    ]


def _overlaid(runs: Sequence[Run], event: str, figure: str) -> str:
    """The "loss" or "accuracy" of all runs' tokens: a colour a run, a curve a phase."""
    along, half = _shared_axis(runs, event), event == "evaluate"
    drawn = [
        curve
        for k, run in enumerate(runs)
        for curve in curves(
            run, event, f"{objective(run)[0]}_{figure}", k, "step" if half else "line", along
        )
    ]
    levels = [] if half else _entropy_levels(runs)
    return draw(drawn, Chart(AXES[along], percent=figure == "accuracy", half=half, levels=levels))


def _pretraining_table(runs: Sequence[Run]) -> str:
    """A row a run; a column that no run has a figure for is left out."""
    head = ["run", "objective", "token loss", "under unigrams", "tokens right", "pairs right"]
    head += ["tokens", "time", "parameters"]
    rows = []
    for number, run in enumerate(runs):
        names, figures = objective(run), held_out(run)
        newest = {**run.last("train"), **run.result}
        loss, entropy = figures.get(f"{names[0]}_loss"), figures.get("unigram_entropy")
        under = entropy - loss if is_number(loss) and is_number(entropy) else None
        rows.append(
            [
                html.swatch(number) + html.text(run.name),
                "+".join(names),
                html.fixed(loss),
                html.fixed(under),
                *(share_right(figures, name) for name in names),
                *([html.text(None)] if len(names) == 1 else []),
                html.short(newest.get("tokens")),
                html.duration(newest.get("seconds")),
                html.short(run.description.get("parameters")),
            ]
        )
    kept = [k for k in range(len(head)) if any(row[k] != html.text(None) for row in rows)]
    return html.table([head[k] for k in kept], [[row[k] for k in kept] for row in rows], left=2)


def _entropy_levels(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """The unigram entropies; objectives and lengths differ in their held-out rows, so a little."""
    found = [held_out(run).get("unigram_entropy") for run in runs]
    heights = sorted({round(entropy, 2) for entropy in found if is_number(entropy)})
    ends = " to ".join(f"{height:.2f}" for height in dict.fromkeys(heights[:1] + heights[-1:]))
    names = [""] * (len(heights) - 1) + [f"unigram entropy {ends}"]
    return list(zip(heights, names, strict=False))


def _shared_axis(runs: Sequence[Run], event: str) -> str:
    """Tokens where all runs log them, since runs differ in the size of a step; steps otherwise."""
    logged = all(run.curve(event, f"{objective(run)[0]}_loss", "tokens")[0] for run in runs)
    return "tokens" if logged else "step"


def _finetuning(runs: Sequence[Run]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})))
    rows = []
    for number, run in enumerate(runs):
        seeds = metrics_by_seed(run)
        cells = [html.swatch(number) + html.text(run.name), f"{len(seeds)}"]
        cells.append(html.number(run.result.get("dev_examples")))
        for name in names:
            values = [metrics[name] for metrics in seeds.values() if is_number(metrics.get(name))]
            values = values or [run.result.get("metrics", {}).get(name)]
            cells.append("".join(mean_and_spread(name, values)) if is_number(values[0]) else "–")
        rows.append(cells)
    panels = []
    for name in dict.fromkeys(main_metric(run) for run in runs):
        picture = draw(
            [
                Curve(*part.curve("evaluate", name), colour=number, shape="step")
                for number, run in enumerate(runs)
                for part in run.part_runs.values()
            ],
            Chart(percent=is_share(name)),
        )
        title = f"{name.replace('_', ' ')} on the development set".capitalize()
        panels += [html.panel(title, _legend(runs), picture)] if picture else []
    return [html.table(["run", "seeds", "dev examples", *names], rows), *panels]


def differing_settings(runs: Sequence[Run]) -> str:
    """The settings and machines that are not the same in all runs."""
    if len(runs) < 2:
        return ""
    columns = [
        dict(flatten({name: run.description.get(name) or {} for name in ("settings", "machine")}))
        for run in runs
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [
        [
            html.text(name.removeprefix("settings.")),
            *(setting(column.get(name)) for column in columns),
        ]
        for name in names
        if any(column.get(name) != columns[0].get(name) for column in columns)
    ]
    return html.table(["setting", *(run.name for run in runs)], rows, left=len(runs) + 1)


def _legend(runs: Sequence[Run]) -> str:
    return html.legend((run.name, number, "line") for number, run in enumerate(runs))
