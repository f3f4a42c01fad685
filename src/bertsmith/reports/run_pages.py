"""The body of a run's page, and of a page that puts several runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.base.terminal import (
    NO_VALUE,
    duration,
    fixed,
    is_number,
    number,
    of_cases,
    percent,
    short,
)
from bertsmith.reports import html
from bertsmith.reports.finetuning import (
    finetuning,
    format_mean,
    is_share,
    main_metric,
    metric_name,
    metrics_by_seed,
    on_dev_set,
    seed_values,
)
from bertsmith.reports.plots import Curve, draw
from bertsmith.reports.runs import Run, flatten
from bertsmith.tasks.task import READ_BY

Defaults = Mapping[str, Mapping[str, Any]]  # kind of run -> its settings' defaults

# Predictions of pre-training by the name that their figures begin with: tokens, then pairs.
PREDICTED = {
    "mlm": "masked tokens",
    "ltr": "next tokens",
    "rtl": "previous tokens",
    "nsp": "next sentences",
    "sop": "sentence orders",
}
# For readers to whom both are new.
LOSS_NOTE = html.note(
    "A loss is given in nats a token: minus the logarithm of the probability that the model "
    "gave to the right piece, on average; less is better. The unigram entropy is the loss of "
    "knowing only how often each piece occurs."
)


def run_body(run: Run, defaults: Defaults) -> list[str]:
    """All sections of a run's page."""
    if run.kind == "pretrain":
        curves = html.section("Curves", loss_panel(run), health_panels(run))
        body = [pretraining_figures(run), curves]
    else:
        body = finetuning(run)
    return [in_progress(run), *body, origin(run, defaults.get(run.kind, {}))]


def in_progress(run: Run) -> str:
    """A notice when the run has no result yet."""
    if run.finished:
        return ""
    steps = [line["step"] for part in run.part_runs.values() if (line := part.last("train"))]
    at = f" at step {max(steps):,}" if steps else ""
    return (
        f'<p class="warn">{html.text(run.name)} is in progress{at}, or was stopped: '
        "it has no result.json yet. The figures below are the newest of its log.</p>"
    )


# Pre-training


def pretraining_figures(run: Run) -> str:
    """Loss and accuracies on held-out text, then tokens, time and size."""
    names, figures, newest = objective(run), run.eval_metrics, run.newest
    gained, rate = "", ""
    if is_number(gain := gain_over_entropy(figures, names[0])):
        gained = f"gain over unigram entropy {figures['unigram_entropy']:.2f}: {gain:.2f} nats"
    tokens, seconds = newest.get("tokens"), newest.get("seconds")
    if is_number(tokens) and is_number(seconds) and seconds:
        rate = f"{short(tokens / seconds)} tokens a second"
        _, mfu = run.curve("train", "mfu")
        rate += f", {sum(mfu) / len(mfu):.0%} of the peak (MFU)" if mfu else ""
    _, padding = run.curve("train", "padding_ratio")
    steps = f"{number(newest.get('steps', newest.get('step')))} steps"
    steps += f", {sum(padding) / len(padding):.0%} padding" if padding else ""
    # of the phase that was measured last
    measured = [any(line.get("event") == "evaluate" for line in phase) for phase in run.phases]
    is_second = run.finished or any(measured[1:])
    length = (is_second and run.setting("phase2_length")) or run.setting("max_length")
    rows = f", rows of {length}" if length else ""
    return html.figures(
        (number(figures.get(f"{names[0]}_loss")), f"held-out {names[0].upper()} loss", gained),
        *(accuracy_figure(figures, name, rows) for name in names),
        (short(tokens), "tokens seen", steps),
        (duration(seconds), "of training", rate),
        (short(run.description.get("parameters")), "parameters", ""),
    )


def gain_over_entropy(figures: Mapping[str, Any], token: str = "mlm") -> float | None:
    """The unigram entropy minus the loss; None where one of them is unknown."""
    loss, entropy = figures.get(f"{token}_loss"), figures.get("unigram_entropy")
    return entropy - loss if is_number(loss) and is_number(entropy) else None


def accuracy_figure(figures: Mapping[str, Any], name: str, rows: str = "") -> tuple[str, str, str]:
    """The headline figure of an accuracy: its value, its name, the number of its predictions.

    >>> accuracy_figure({"nsp_cases": 256, "nsp_accuracy": 0.75}, "nsp", ", rows of 128")
    ('75.0%', 'NSP accuracy', 'of 256 next sentences of held-out text, rows of 128')
    """
    cases = of_cases(figures.get(f"{name}_cases")).strip() or "of the"
    accuracy, label = percent(figures.get(f"{name}_accuracy")), f"{name.upper()} accuracy"
    return accuracy, label, f"{cases} {PREDICTED[name]} of held-out text{rows}"


def loss_panel(run: Run) -> str:
    """The token loss, in training and held-out, over the line of the unigram entropy."""
    token, entropy = objective(run)[0], run.eval_metrics.get("unigram_entropy")
    train = curves(run, "train", f"{token}_loss", 0)
    evaluate = curves(run, "evaluate", f"{token}_loss", 1, "dot")
    levels = [(entropy, f"unigram entropy {entropy:.2f}")] if is_number(entropy) else []
    picture = draw([*train, *evaluate], levels=levels, marks=phase_marks(run))
    keys = [("training", 0, "line")]
    if any(curve.x for curve in evaluate):
        keys.append(("held-out text", 1, "dot"))
    return html.panel(f"Loss of the {PREDICTED[token]} (nats)", html.legend(keys), picture)


def health_panels(run: Run) -> str:
    """Accuracy, speed, learning rate and grad norm: they tell a healthy run from a sick one."""
    drawn: list[Curve] = []
    keys: list[tuple[str, int, str]] = []
    for name, color in zip(objective(run), (0, 2), strict=False):
        for event, shape, of in (("train", "line", ""), ("evaluate", "dot", ", held-out")):
            own = curves(run, event, f"{name}_accuracy", color, shape)
            drawn += own
            if any(curve.x for curve in own):
                keys.append((f"{PREDICTED[name]}{of}", color, shape))
    style: Any = {"from_zero": True, "half": True, "marks": phase_marks(run)}
    panels = [html.panel("Accuracy", html.legend(keys), draw(drawn, percent=True, **style))]
    for name, title, color in (
        ("tokens_per_second", "Speed (tokens a second)", 4),
        ("learning_rate", "Learning rate", 5),
        ("grad_norm", "Grad norm", 3),
    ):
        panels.append(html.panel(title, draw(curves(run, "train", name, color), **style)))
    return html.pair(*panels)


def objective(run: Run) -> list[str]:
    """The names of PREDICTED that the run has figures of: its tokens', then its pairs' if any."""
    figures = {**run.last("train"), **run.eval_metrics}
    return [name for name in PREDICTED if f"{name}_accuracy" in figures] or ["mlm"]


def curves(
    run: Run, event: str, name: str, color: int, shape: str = "line", along: str = "step"
) -> list[Curve]:
    """One logged figure to be drawn: a curve a phase, all in one color."""
    return [Curve(x, y, color, shape) for x, y in run.pieces(event, name, along)]


def phase_marks(run: Run) -> list[tuple[float, str]]:
    """The beginning of each phase after the first: the last step of the one before."""
    steps = [[line["step"] for line in lines if "step" in line] for lines in run.phases]
    return [(max(before), f"phase {k}") for k, before in enumerate(steps[:-1], 2) if before]


# How it was made


def origin(run: Run, defaults: Mapping[str, Any]) -> str:
    """Command, machine, settings and messages: everything needed to do the run again."""
    described, task_type = run.description, run.setting("task_kind")
    words = [shlex.quote(str(word)) for word in described.get("command") or []]
    command = " ".join(f"<span>{html.text(word)}</span>" for word in words)
    facts = {
        "made": described.get("created"),
        "bertsmith": described.get("bertsmith"),
        "commit": described.get("commit"),
        **run.machine,
    }
    settings, folded = {}, {}
    for name, value in own_settings(run).items():
        is_read = task_type is None or task_type in READ_BY.get(name, (task_type,))
        is_default = name in defaults and value == defaults[name]
        (folded if is_default or not is_read else settings)[name] = value
    hashes = settings.pop("data_sha256", None) or {}
    logged = [line.get("text", "") for line in run.events if line.get("event") == "message"]
    messages = "".join(f"<p>{html.text(str(message))}</p>" for message in logged)
    return html.section(
        "How it was made",
        html.panel("Command", command and f"<pre>{command}</pre>"),
        value_table("machine", facts),
        value_table("setting", settings),
        html.details(
            f"{len(folded)} settings at their defaults, or of other tasks",
            value_table("setting", folded),
        ),
        value_table("SHA-256 of the data", hashes),
        messages and "<h3>Messages of the run</h3>" + messages,
    )


def own_settings(run: Run) -> dict[str, Any]:
    """The settings, without those that the machine's facts repeat."""
    return {
        name: value
        for name, value in run.settings.items()
        if value is not None and (name not in run.machine or value != run.machine[name])
    }


def value_table(head: str, values: Mapping[str, Any]) -> str:
    """Names and values; nested ones by dotted names, absent ones left out."""
    known = [(name, value) for name, value in flatten(values) if value is not None]
    table = html.table([head, ""], [[html.text(name), setting(it)] for name, it in known], left=2)
    return f'<div class="values">{table}</div>' if table else ""


def setting(value: Any) -> str:
    """A setting's value as escaped text."""
    value = ", ".join(map(str, value)) if isinstance(value, list) else value
    shown = number(value) if isinstance(value, float) else html.text(value)
    return f'<span class="any">{shown}</span>'


# Several runs


def by_training(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The pre-training runs and the others; runs of one side can be compared."""
    pretrained = [run for run in runs if run.kind == "pretrain"]
    return pretrained, [run for run in runs if run.kind != "pretrain"]


def comparison_body(runs: Sequence[Run], defaults: Defaults) -> list[str]:
    """The sections that put runs side by side, then each run's own, folded away if compared."""
    pretrained, finetuned = (group if len(group) > 1 else [] for group in by_training(runs))
    compared = [*pretrained, *finetuned]
    details = ""
    for run in runs:
        body = "".join(run_body(run, defaults))
        details += html.details(run.name, body, is_open=run not in compared)
    differing = map(differing_settings, (pretrained, finetuned))
    return [
        *map(in_progress, compared),
        html.section("Pre-training, side by side", *_pretraining(pretrained)),
        html.section("Fine-tuning, side by side", *_finetuning(finetuned)),
        html.section("What differs", *differing),
        html.section("Each run in full", details) if compared else details,
    ]


def _pretraining(runs: Sequence[Run]) -> list[str]:
    """The table, and the losses of all runs in one chart, whatever their objectives."""
    legend = html.legend(
        (f"{run.name} ({'+'.join(objective(run))})", k, "line") for k, run in enumerate(runs)
    )
    breaks = "A curve breaks where a run's second phase begins, with rows of another length."
    evaluated = [
        html.panel("Held-out loss (nats)", _overlaid(runs, "evaluate", "loss")),
        html.panel("Held-out accuracy", _overlaid(runs, "evaluate", "accuracy")),
    ]
    return [
        _pretraining_table(runs),
        html.panel("Training loss (nats)", legend, _overlaid(runs, "train", "loss")),
        html.pair(*evaluated),
        html.note(breaks) if any(len(run.phases) > 1 for run in runs) else "",
    ]


def _overlaid(runs: Sequence[Run], event: str, figure: str) -> str:
    """The "loss" or "accuracy" of all runs' tokens: a color a run, a curve a phase.

    The axis is tokens where all runs log them, since runs differ in the size of a step.
    """
    logged = all(run.curve(event, f"{objective(run)[0]}_loss", "tokens")[0] for run in runs)
    along, half = "tokens" if logged else "step", event == "evaluate"
    drawn: list[Curve] = []
    for k, run in enumerate(runs):
        name, shape = f"{objective(run)[0]}_{figure}", "step" if half else "line"
        drawn += curves(run, event, name, k, shape, along)
    levels, label = [] if half else _entropy_levels(runs), "tokens" if logged else "steps"
    return draw(drawn, x_label=label, percent=figure == "accuracy", half=half, levels=levels)


def _pretraining_table(runs: Sequence[Run]) -> str:
    """A row a run; a column that no run has a figure for is left out."""
    objectives = [objective(run) for run in runs]
    sides = [
        dict.fromkeys(names[k].upper() for names in objectives if k < len(names)) for k in (0, 1)
    ]
    head = ["run", "objective", "loss (nats)", "gain over unigram entropy"]
    head += [f"{'/'.join(side)} accuracy" for side in sides] + ["tokens", "time", "parameters"]
    rows = []
    for k, (run, names) in enumerate(zip(runs, objectives, strict=True)):
        figures, accuracies = run.eval_metrics, [NO_VALUE] * 2
        for side, name in enumerate(names):
            if is_number(accuracy := figures.get(f"{name}_accuracy")):
                accuracies[side] = percent(accuracy) + of_cases(figures.get(f"{name}_cases"))
        rows.append(
            [
                html.swatch(k) + html.text(run.name),
                "+".join(names),
                fixed(figures.get(f"{names[0]}_loss")),
                fixed(gain_over_entropy(figures, names[0])),
                *accuracies,
                short(run.newest.get("tokens")),
                duration(run.newest.get("seconds")),
                short(run.description.get("parameters")),
            ]
        )
    kept = [k for k in range(len(head)) if any(row[k] != NO_VALUE for row in rows)]
    return html.table([head[k] for k in kept], [[row[k] for k in kept] for row in rows], left=2)


def _entropy_levels(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """The unigram entropies; objectives and lengths differ in their held-out rows, so a little."""
    found = [run.eval_metrics.get("unigram_entropy") for run in runs]
    heights = sorted({round(entropy, 2) for entropy in found if is_number(entropy)})
    ends = " to ".join(f"{height:.2f}" for height in dict.fromkeys(heights[:1] + heights[-1:]))
    names = [""] * (len(heights) - 1) + [f"unigram entropy {ends}"]
    return list(zip(heights, names, strict=False))


def _finetuning(runs: Sequence[Run]) -> list[str]:
    """The table, and a chart a main metric: a color a run, a line a seed."""
    names = list(dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})))
    rows = []
    for k, run in enumerate(runs):
        cells = [html.swatch(k) + html.text(run.name), f"{len(metrics_by_seed(run))}"]
        cells.append(number(run.result.get("dev_examples")))
        for name in names:
            values = seed_values(run, name)
            cells.append("".join(format_mean(name, values)) if values else NO_VALUE)
        rows.append(cells)
    legend = html.legend(
        (run.name + ", a line a seed" * (len(run.part_runs) > 1), k, "line")
        for k, run in enumerate(runs)
    )
    panels = []
    for name in dict.fromkeys(main_metric(run) for run in runs):
        lines = [
            Curve(*part.curve("evaluate", name), color=k, shape="step")
            for k, run in enumerate(runs)
            for part in run.part_runs.values()
        ]
        panels.append(html.panel(on_dev_set(name), legend, draw(lines, percent=is_share(name))))
    return [html.table(["run", "seeds", "dev examples", *map(metric_name, names)], rows), *panels]


def differing_settings(runs: Sequence[Run]) -> str:
    """The settings and machines that are not the same in all runs."""
    columns = [dict(flatten({**own_settings(run), "machine": run.machine})) for run in runs]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        if any(value != values[0] for value in values):
            rows.append([html.text(name), *map(setting, values)])
    return html.table(["setting", *(run.name for run in runs)], rows, left=len(runs) + 1)
