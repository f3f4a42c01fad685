"""The sections of a fine-tuning run: its seeds, curves, search, and its answers on the dev set.

The metrics of several seeds: each, their mean and spread, and what was begun again.

A search over settings, shown: what each setting came to, and all tries, the best first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bertsmith.base.terminal import of_cases
from bertsmith.reports import html, plots
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.runs import Run, is_number, spread
from bertsmith.reports.span_answers import answer_sections, tag_sections
from bertsmith.reports.text_answers import (
    choice_sections,
    class_sections,
    label_set_sections,
    score_sections,
)

FEWEST_SEEDS = 3  # of a spread or an interval: of two it is 13 times as wide as their distance
LESS_IS_BETTER = ("mse", "loss")
SHARES = ("accuracy", "f1", "precision", "recall", "exact_match")


def seed_table(seeds: Mapping[str, Mapping[str, Any]], best_seed: Any = None) -> str:
    """A row a seed, then mean, standard deviation, interval, lowest and highest of each metric.

    Fewer than FEWEST_SEEDS have neither deviation nor interval.
    """
    names = list(dict.fromkeys(name for metrics in seeds.values() for name in metrics))
    names = [name for name in names if all(is_number(seed.get(name)) for seed in seeds.values())]
    if not names:
        return ""
    columns = {name: [seed[name] for seed in seeds.values()] for name in names}
    rows = [
        [html.text(seed) + (" (kept)" if str(best_seed) == seed and len(seeds) > 1 else "")]
        + [metric(name, metrics[name]) for name in names]
        for seed, metrics in seeds.items()
    ]
    if len(seeds) == 1:
        return html.table(["seed", *names], rows)
    summaries: dict[str, Callable[[Sequence[float]], tuple[float, ...]]] = {
        "mean": lambda values: spread(values)[:1],
        "standard deviation": lambda values: spread(values)[1:],
        "95% interval of the mean": student_interval,
        "lowest": lambda values: (min(values),),
        "highest": lambda values: (max(values),),
    }
    if len(seeds) < FEWEST_SEEDS:
        summaries = {"mean": summaries["mean"]}
    summary = [
        [word]
        + [" to ".join(metric(name, value) for value in figure(columns[name])) for name in names]
        for word, figure in summaries.items()
    ]
    return html.table(["seed", *names], rows + summary, total=len(summary))


def restart_table(restarts: Sequence[Mapping[str, Any]], seeds: Mapping[str, Any]) -> str:
    """How many trainings collapsed, and what each of them gave; `seeds` are those that count."""
    if not restarts:
        return ""
    kept = [str(row["seed"]) for row in restarts if str(row["seed"]) in seeds]
    total = len(seeds) + len(restarts) - len(kept)
    note = (
        f"{len(restarts)} of {total} trainings collapsed. Such a training is made again with "
        "another seed, and is not in the figures above"
    )
    note += f", but for seed {', '.join(kept)}, the last that was tried." if kept else "."
    rows = [
        [html.text(row.get(name)) for name in ("seed", "instead_of", "reason")] for row in restarts
    ]
    table = html.table(["collapsed seed", "in the place of", "what was seen"], rows, left=3)
    return f'<p class="note">{html.text(note)}</p>{table}'


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean by Student's t, for two values or more.

    >>> [round(end, 3) for end in student_interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    from scipy import stats  # of the extra `train`, as matplotlib

    mean, deviation = spread(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of mean(second) - mean(first), whose variances may differ (Welch 1947).

    >>> [round(end, 3) for end in welch_interval([1.0, 2.0, 3.0], [4.0, 6.0])]
    [-2.977, 8.977]
    """
    from scipy import stats

    parts = [(spread(values)[1] ** 2 / len(values), len(values) - 1) for values in (first, second)]
    squared = sum(part for part, _ in parts)
    difference = spread(second)[0] - spread(first)[0]
    if squared == 0:
        return difference, difference
    freedom = squared**2 / sum(part**2 / count for part, count in parts)
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(squared)
    return difference - half, difference + half


def mean_and_spread(name: str, values: Sequence[float]) -> tuple[str, str]:
    """The mean of a metric over seeds, and the standard deviation where they are enough.

    >>> mean_and_spread("accuracy", [0.8, 0.9]), mean_and_spread("accuracy", [0.8, 0.9, 0.85])
    (('85.0%', ''), ('85.0%', ' ± 5.0%'))
    """
    mean, deviation = spread(values)
    behind = f" ± {metric(name, deviation)}" if len(values) >= FEWEST_SEEDS else ""
    return metric(name, mean), behind


def metric(name: str, value: Any) -> str:
    """Losses and correlations as numbers, shares of one in percent.

    >>> metric("accuracy", 0.8123), metric("loss", 0.51), metric("pearson", 0.9137)
    ('81.2%', '0.51', '0.914')
    """
    if is_share(name) or not is_number(value):
        return html.percent(value)
    return f"{value:.3g}"


def is_share(name: str) -> bool:
    """Whether the metric of that name is a share of one."""
    return any(word in name.lower() for word in SHARES)


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
