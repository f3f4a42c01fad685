"""Several runs: figures side by side, curves overlaid, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence

from bertsmith.reports import classification, html
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.run_page import (
    held_out,
    in_progress,
    main_metric,
    metrics_by_seed,
    run_body,
    setting,
)
from bertsmith.reports.runs import Run, flatten, is_number, spread

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
    rows = []
    for number, run in enumerate(runs):
        figures, newest = held_out(run), {**run.last("train"), **run.result}
        loss, entropy = figures.get("mlm_loss"), figures.get("unigram_entropy")
        under = entropy - loss if is_number(loss) and is_number(entropy) else None
        rows.append(
            [
                html.swatch(number) + html.text(run.name),
                html.fixed(loss),
                html.fixed(under),
                html.percent(figures.get("mlm_accuracy")),
                html.percent(figures.get("nsp_accuracy")),
                html.short(newest.get("tokens")),
                html.duration(newest.get("seconds")),
                html.short(run.description.get("parameters")),
            ]
        )
    head = ["run", "MLM loss", "under unigrams", "MLM", "NSP", "tokens", "time", "parameters"]
    along = _shared_axis(runs, "train")
    loss = draw(
        [
            Curve(*run.curve("train", "mlm_loss", along), colour=number)
            for number, run in enumerate(runs)
        ],
        Chart(x_label=AXES[along]),
    )
    along = _shared_axis(runs, "evaluate")
    judged = [
        draw(
            [
                Curve(*run.curve("evaluate", name, along), colour=number, shape="step")
                for number, run in enumerate(runs)
            ],
            Chart(AXES[along], percent=percent, half=True),
        )
        for name, percent in (("mlm_loss", False), ("mlm_accuracy", True))
    ]
    titles = ("Held-out MLM loss", "Held-out MLM accuracy")
    return [
        html.table(head, rows),
        html.panel("Masked-token loss in training (nats)", _legend(runs), loss) if loss else "",
        html.pair([html.panel(t, p) for t, p in zip(titles, judged, strict=True) if p]),
    ]


def _shared_axis(runs: Sequence[Run], event: str) -> str:
    """Tokens where all runs log them, since runs differ in the size of a step; steps otherwise."""
    logged = all(run.curve(event, "mlm_loss", "tokens")[0] for run in runs)
    return "tokens" if logged else "step"


def _finetuning(runs: Sequence[Run]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})))
    rows = []
    for number, run in enumerate(runs):
        seeds = metrics_by_seed(run)
        cells = [html.swatch(number) + html.text(run.name), f"{len(seeds)}"]
        for name in names:
            values = [metrics[name] for metrics in seeds.values() if is_number(metrics.get(name))]
            values = values or [run.result.get("metrics", {}).get(name)]
            cells.append(_mean_and_spread(name, values))
        rows.append(cells)
    panels = []
    for name in dict.fromkeys(main_metric(run) for run in runs):
        picture = draw(
            [
                Curve(*part.curve("evaluate", name), colour=number, shape="step")
                for number, run in enumerate(runs)
                for part in run.part_runs.values()
            ],
            Chart(percent=classification.is_share(name)),
        )
        title = f"{name.replace('_', ' ')} on the development set".capitalize()
        panels += [html.panel(title, _legend(runs), picture)] if picture else []
    return [html.table(["run", "seeds", *names], rows), *panels]


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


def _mean_and_spread(name: str, values: Sequence) -> str:
    if not is_number(values[0]):
        return "–"
    mean, deviation = spread(values)
    shown = classification.metric(name, mean)
    return f"{shown} ± {classification.metric(name, deviation)}" if len(values) > 1 else shown


def _legend(runs: Sequence[Run]) -> str:
    return html.legend((run.name, number, "line") for number, run in enumerate(runs))
