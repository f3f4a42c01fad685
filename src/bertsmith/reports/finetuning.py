"""The sections of a fine-tuning run: its seeds, curves, search, and its answers on the dev set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bertsmith.progress import of_cases
from bertsmith.reports import html
from bertsmith.reports.answering import answer_sections
from bertsmith.reports.classification import choice_sections, class_sections, label_set_sections
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.regression import score_sections
from bertsmith.reports.runs import Run, is_number
from bertsmith.reports.seeds import (
    is_share,
    mean_and_spread,
    metric,
    restart_table,
    seed_table,
)
from bertsmith.reports.sweep import sweep_parts
from bertsmith.reports.tagging import tag_sections

# What is shown of the answers on the dev set, by the kind of the task.
SECTIONS: dict[str, Callable[[Run], str]] = {
    "classify": class_sections,
    "choice": choice_sections,
    "multilabel": label_set_sections,
    "regress": score_sections,
    "tag": tag_sections,
    "answer": answer_sections,
}


def metrics_by_seed(run: Run) -> dict[str, Mapping[str, Any]]:
    """The metrics of each seed; while the run goes on, the newest evaluation of each."""
    if run.result.get("seeds"):
        return {str(seed): metrics for seed, metrics in run.result["seeds"].items()}
    found = {}
    for seed, part in run.part_runs.items():
        newest = part.last("evaluate").items()
        metrics = {name: value for name, value in newest if name not in ("event", "step", "epoch")}
        found[seed] = part.result.get("metrics") or metrics
    return found


def main_metric(run: Run) -> str:
    """The metric that the task is judged by: named by the result, or the first of the log."""
    seeds = list(metrics_by_seed(run).values())
    if run.result.get("main_metric"):
        return str(run.result["main_metric"])
    names = [name for metrics in seeds for name in metrics]
    return next((name for name in names if "loss" not in name), "accuracy")


def finetuning(run: Run) -> str:
    """Figures, curves and what each kind of task has to show of a fine-tuning run."""
    seeds, result = metrics_by_seed(run), run.result
    return "".join(
        [
            finetuning_figures(run),
            html.section(
                "Seeds",
                seed_table(seeds, result.get("best_seed")),
                restart_table(result.get("restarts") or [], seeds),
            ),
            html.section("Curves", finetuning_curves(run)),
            html.section(
                "Settings that were tried",
                *sweep_parts(
                    result.get("sweep") or [], result.get("metrics") or (), main_metric(run)
                ),
            ),
            SECTIONS[run.dev.get("kind", "classify")](run),
        ]
    )


def finetuning_figures(run: Run) -> str:
    seeds, undefined = metrics_by_seed(run), run.result.get("undefined") or {}
    before = run.result.get("metrics_before") or {}
    items = []
    for name in run.result.get("metrics") or next(iter(seeds.values()), {}):
        values = [metrics[name] for metrics in seeds.values() if is_number(metrics.get(name))]
        if not values:
            values = [run.result.get("metrics", {}).get(name)]
        if not is_number(values[0]):
            continue
        notes = [f"no value: {undefined[name]}"] if name in undefined else []
        if name in before:
            notes = [f"before training {metric(name, before[name])}"]
        mean, deviation = mean_and_spread(name, values)
        if len(values) > 1:
            notes = [f"mean of {len(values)} seeds{deviation}"]
        if is_share(name) and (cases := of_cases(run.result.get("dev_examples"), "dev examples")):
            notes.append(cases.strip())
        items.append((mean, name.replace("_", " "), ", ".join(notes)))
    items.append((html.short(run.description.get("parameters")), "parameters", ""))
    return html.figures(items)


def finetuning_curves(run: Run) -> str:
    """Training loss, and the main metric on the development set, a colour a seed."""
    name, parts = main_metric(run), list(run.part_runs.items())
    loss = draw(
        [Curve(*part.curve("train", "loss"), colour=k) for k, (_, part) in enumerate(parts)],
        Chart(from_zero=True, half=True),
    )
    judged = draw(
        [
            Curve(*part.curve("evaluate", name), colour=k, shape="step")
            for k, (_, part) in enumerate(parts)
        ],
        Chart(percent=is_share(name), half=True),
    )
    keys = [(f"seed {seed}", k, "line") for k, (seed, _) in enumerate(parts)]
    marks = html.legend(keys) if len(parts) > 1 else ""
    title = f"{name.replace('_', ' ')} on the development set".capitalize()
    panels = [html.panel("Training loss", marks, loss)] if loss else []
    panels += [html.panel(title, marks, judged)] if judged else []
    return html.pair(panels)
