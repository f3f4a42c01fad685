"""The sections of a fine-tuning run: figures, seeds, curves, search, answers on the dev set."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bertsmith.base.terminal import duration, is_number, number, of_cases, percent, short
from bertsmith.reports import html, plots
from bertsmith.reports.plots import Curve, draw
from bertsmith.reports.runs import Run, mean_and_std
from bertsmith.reports.span_answers import answer_sections, tag_sections
from bertsmith.reports.text_answers import (
    choice_sections,
    class_sections,
    label_set_sections,
    score_sections,
)
from bertsmith.tasks.metrics import METRICS

FEWEST_SEEDS = 3  # of a std or an interval: of two it is 13 times as wide as their distance
MAX_TRIALS = 60  # rows of the table of a search
WHEN = ("event", "step", "epoch", "minutes")  # of a line of the log, beside its metrics

# The sections about the answers on the dev set, by the task type.
SECTIONS: dict[str, Callable[[Run], list[str]]] = {
    "classify": class_sections,
    "choice": choice_sections,
    "multilabel": label_set_sections,
    "regress": score_sections,
    "tag": tag_sections,
    "answer": answer_sections,
}


def finetuning(run: Run) -> list[str]:
    """All sections, down to those about the task's answers."""
    seeds, result = metrics_by_seed(run), run.result
    trials = sweep_parts(result.get("sweep") or [], result.get("metrics") or (), main_metric(run))
    answers = "".join(SECTIONS[run.dev.get("kind", "classify")](run))
    table = seed_table(seeds, result.get("best_seed")) if len(seeds) > 1 else ""
    return [
        finetuning_figures(run),
        html.section("Seeds", table, restart_table(result.get("restarts") or [], seeds)),
        html.section("Curves", finetuning_curves(run)),
        html.section("Hyper-parameter search", *trials),
        answers.replace("</h2>", f"</h2>{kept_seed_note(run)}", 1),
    ]


def finetuning_figures(run: Run) -> str:
    """The metrics, means over the seeds, then data, time, kept step and size."""
    result = run.result
    remarks, before = result.get("notes") or {}, result.get("metrics_before") or {}
    items = []
    for name in result.get("metrics") or next(iter(metrics_by_seed(run).values()), {}):
        if not (values := seed_values(run, name)):
            continue
        notes = [remarks[name]] if name in remarks else []
        if name in before:
            notes = [f"before training {metric(name, before[name])}"]
        mean, std = format_mean(name, values)
        if len(values) > 1:
            notes.insert(0, f"mean of {len(values)} seeds{std}")
        if is_share(name) and (cases := of_cases(result.get("dev_examples"), "dev examples")):
            notes.append(cases.strip())
        items.append((mean, metric_name(name), ", ".join(notes)))
    newest = [part.last("train") for part in run.part_runs.values()]
    seconds = [line["seconds"] for line in newest if is_number(line.get("seconds"))]
    of_all = f"{len(seconds)} seeds together" if len(seconds) > 1 else ""
    things = next((name for name in ("examples", "pairs") if f"train_{name}" in result), "examples")
    sizes = [number(result.get(f"{split}_{things}")) for split in ("train", "dev")]
    of_steps = f"of {result['steps']:,}" if is_number(result.get("steps")) else ""
    items += [
        (sizes[0], f"training {things}", f"{sizes[1]} dev {things}"),
        (duration(sum(seconds)) if seconds else "", "of training", of_all),
        (number(result.get("best_step")), "step that was kept", of_steps),
        (short(run.description.get("parameters")), "parameters", ""),
    ]
    return html.figures(*items)


def kept_seed_note(run: Run) -> str:
    """Name the seed of the answers, where the figures above are means of several."""
    seed, seeds = run.result.get("best_seed"), metrics_by_seed(run)
    if len(seeds) < 2 or seed is None:
        return ""
    main = main_metric(run)
    own = seeds.get(str(seed), {}).get(main)
    known = f" ({metric_name(main)} {metric(main, own)})" if is_number(own) else ""
    return html.note(
        f"The answers here and below are those of seed {seed}, which was kept{known}; the figures "
        f"at the top are means of {len(seeds)} seeds."
    )


def finetuning_curves(run: Run) -> str:
    """Training loss, and the main metric on the development set, a color a seed."""
    name, parts = main_metric(run), run.part_runs
    losses, metrics = (
        [Curve(*part.curve(event, figure), k, shape) for k, part in enumerate(parts.values())]
        for event, figure, shape in (("train", "loss", "line"), ("evaluate", name, "step"))
    )
    loss = draw(losses, from_zero=True, half=True)
    evaluated = draw(metrics, percent=is_share(name), half=True)
    keys = [(f"seed {seed}", k, "line") for k, seed in enumerate(parts)]
    legend = html.legend(keys) if len(parts) > 1 else ""
    panels = (("Training loss", loss), (on_dev_set(name), evaluated))
    return html.pair(*(html.panel(title, legend, picture) for title, picture in panels))


# Metrics


def metrics_by_seed(run: Run) -> dict[str, Mapping[str, Any]]:
    """The metrics of each seed; until the run has ended, the newest evaluation of each."""
    if run.result.get("seeds"):
        return {str(seed): metrics for seed, metrics in run.result["seeds"].items()}
    found = {}
    for seed, part in run.part_runs.items():
        newest = part.last("evaluate").items()
        metrics = {name: value for name, value in newest if name not in WHEN}
        found[seed] = part.result.get("metrics") or metrics
    return found


def seed_values(run: Run, name: str) -> list[float]:
    """A metric of each seed that has it; of a run whose seeds lack it, that of its result."""
    for found in (metrics_by_seed(run).values(), [run.result.get("metrics", {})]):
        if values := [value for metrics in found if is_number(value := metrics.get(name))]:
            return values
    return []


def main_metric(run: Run) -> str:
    """The metric that decides which model is best: the result's, or the first of the log."""
    if run.result.get("main_metric"):
        return str(run.result["main_metric"])
    names = [name for metrics in metrics_by_seed(run).values() for name in metrics]
    return next((name for name in names if "loss" not in name), "accuracy")


def metric_name(name: str) -> str:
    """The name of a metric as people write it.

    >>> metric_name("macro_f1"), metric_name("mse"), metric_name("tag_accuracy")
    ('macro F1', 'MSE', 'tag accuracy')
    """
    upper = ("f1", "mse", "mlm", "ltr", "rtl", "nsp", "sop")
    return " ".join(word.upper() if word in upper else word for word in name.split("_"))


def on_dev_set(name: str) -> str:
    """The title of a metric's chart."""
    words = metric_name(name)
    return f"{words[:1].upper()}{words[1:]} on the development set"


def metric(name: str, value: Any) -> str:
    """A metric's value: a fraction in percent, a loss or a correlation as a number.

    >>> metric("accuracy", 0.8123), metric("loss", 0.51), metric("pearson", 0.9137)
    ('81.2%', '0.51', '0.914')
    """
    return f"{value:.3g}" if is_number(value) and not is_share(name) else percent(value)


def is_share(name: str) -> bool:
    """True if the metric is a fraction; "has_answer_f1" is one as "f1" is."""
    return any(known in name.lower() for known, one in METRICS.items() if one.is_share)


def format_mean(name: str, values: Sequence[float]) -> tuple[str, str]:
    """The mean of a metric over seeds, and the standard deviation if there are enough.

    >>> format_mean("accuracy", [0.8, 0.9]), format_mean("accuracy", [0.8, 0.9, 0.85])
    (('85.0%', ''), ('85.0%', ' ± 5.0%'))
    """
    mean, std = mean_and_std(values)
    return metric(name, mean), f" ± {metric(name, std)}" if len(values) >= FEWEST_SEEDS else ""


# Seeds


def seed_table(seeds: Mapping[str, Mapping[str, Any]], best_seed: Any = None) -> str:
    """A row a seed, then mean, std, interval, lowest and highest of each metric.

    Fewer than FEWEST_SEEDS have neither std nor interval.
    """
    names = list(dict.fromkeys(name for metrics in seeds.values() for name in metrics))
    names = [name for name in names if all(is_number(seed.get(name)) for seed in seeds.values())]
    if not names:
        return ""
    rows = [
        [html.text(seed) + " (kept)" * (str(best_seed) == seed and len(seeds) > 1)]
        + [metric(name, metrics[name]) for name in names]
        for seed, metrics in seeds.items()
    ]
    columns = {name: [seed[name] for seed in seeds.values()] for name in names}
    summaries: dict[str, Callable[[str, Sequence[float]], tuple[float, ...]]] = {}
    if len(seeds) > 1:
        summaries["mean"] = lambda _, values: mean_and_std(values)[:1]
    if len(seeds) >= FEWEST_SEEDS:
        summaries["std"] = lambda _, values: mean_and_std(values)[1:]
        summaries["95% interval of the mean"] = student_interval
        summaries["lowest"] = lambda _, values: (min(values),)
        summaries["highest"] = lambda _, values: (max(values),)
    for word, figure in summaries.items():
        cells = [[metric(n, end) for end in figure(n, column)] for n, column in columns.items()]
        rows.append([word, *map(" to ".join, cells)])
    return html.table(["seed", *map(metric_name, names)], rows, total=len(summaries))


def restart_table(restarts: Sequence[Mapping[str, Any]], seeds: Mapping[str, Any]) -> str:
    """Collapsed trainings, each with its reason; `seeds` are those that count."""
    if not restarts:
        return ""
    kept = [str(row["seed"]) for row in restarts if str(row["seed"]) in seeds]
    note = (
        f"{len(restarts)} of {len(seeds) + len(restarts) - len(kept)} trainings collapsed. Such a "
        "training is made again with another seed, and is not in the figures above"
    )
    note += f", but for seed {', '.join(kept)}, the last that was tried." if kept else "."
    names = {"seed": "collapsed seed", "instead_of": "in the place of", "reason": "what was seen"}
    rows = [[html.text(row.get(name)) for name in names] for row in restarts]
    return html.note(note) + html.table([*names.values()], rows, left=3)


def student_interval(name: str, values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a metric's mean by Student's t, for two values or more.

    It ends where the metric's range does.

    >>> [round(end, 3) for end in student_interval("mse", [1.0, 2.0, 3.0])]
    [0.0, 4.484]
    """
    ranges = (known.bounds for part, known in METRICS.items() if part in name.lower())
    least, most = next(ranges, (-math.inf, math.inf))
    low, high = _interval(lambda stats: stats.ttest_1samp(values, 0))
    return max(low, least), min(high, most)


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of mean(second) - mean(first), whose variances may differ (Welch 1947).

    >>> [round(end, 3) for end in welch_interval([1.0, 2.0, 3.0], [4.0, 6.0])]
    [-2.977, 8.977]
    """
    return _interval(lambda stats: stats.ttest_ind(second, first, equal_var=False))


def _interval(test: Callable[[Any], Any]) -> tuple[float, float]:
    from scipy import stats  # of the extra `train`, as matplotlib

    with warnings.catch_warnings(action="ignore"):  # equal values, whose interval has no width
        low, high = test(stats).confidence_interval(0.95)
    return float(low), float(high)


# Search


def sweep_parts(
    tried: Sequence[Mapping[str, Any]], metrics: Collection[str], main: str
) -> list[str]:
    """A picture a setting, then a row a trial, sorted by the main metric.

    A value of a trial that is not in `metrics` is a setting. A trial without the main metric
    failed; it is last in the table and in no picture.
    """
    if not tried:
        return []
    names = list(dict.fromkeys(name for row in tried for name in row))
    less_is_better = main in METRICS and METRICS[main].less_is_better
    done = [row for row in tried if is_number(row.get(main))]
    done.sort(key=lambda row: row[main], reverse=not less_is_better)
    scores, panels = [row[main] for row in done], []
    for name in names:
        values = [value if is_number(value := row.get(name)) else str(value) for row in done]
        if name not in metrics and len(set(values)) > 1:
            panels.append(html.panel(name, plots.draw_setting(values, scores, is_share(main))))

    def shown(name: str, value: Any) -> str:
        """A metric rounded; a setting as it is, since a seed with fewer digits is another."""
        if name in metrics:
            return metric(name, value)
        return number(value) if isinstance(value, float) else html.text(value)

    failed = [row for row in tried if not is_number(row.get(main))]
    rows = [[shown(name, row.get(name)) for name in names] for row in [*done, *failed]]
    note = (
        f"A dot is a trial, its height the {metric_name(main)} on the development set; the best "
        "one is in another color, a bar is the mean."
    )
    heads = [metric_name(name) if name in metrics else name for name in names]
    more = len(rows) - MAX_TRIALS
    return [
        html.note(note) if panels else "",
        html.pair(*panels),
        html.table(heads, rows[:MAX_TRIALS]),
        html.note(f"{more} worse trials are left out.") if more > 0 else "",
    ]
