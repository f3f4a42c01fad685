"""The body of a run's page, and of a page that puts several runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.base.terminal import of_cases
from bertsmith.reports import html
from bertsmith.reports.finetuning import (
    finetuning,
    is_share,
    main_metric,
    mean_and_spread,
    metric_name,
    metrics_by_seed,
    on_dev_set,
    seed_values,
)
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.runs import Run, flatten, is_number

Defaults = Mapping[str, Mapping[str, Any]]  # kind of run -> its settings' defaults

# What is predicted, by the name that its figures begin with: tokens, then pairs
PREDICTED = {
    "mlm": "masked tokens",
    "ltr": "next tokens",
    "nsp": "next sentences",
    "sop": "sentence orders",
}
AXES = {"tokens": "tokens", "step": "steps"}  # a figure of the log, and the name of its axis
# Settings that only some kinds of task read.
READ_BY = {
    "max_question": ("answer",),
    "max_answer": ("answer",),
    "document_context": ("tag",),
    "tagged_pieces": ("tag",),
    "frozen": ("tag",),
    "separator": ("multilabel",),
    "options": ("choice",),
    "long_texts": ("classify", "regress", "multilabel", "choice"),
    "stride": ("classify", "regress", "multilabel", "choice", "answer"),
    "pool": ("classify", "regress", "multilabel", "choice"),
}


def run_body(run: Run, defaults: Defaults) -> str:
    """All sections of a run's page."""
    body = pretraining(run) if run.kind == "pretrain" else finetuning(run)
    return in_progress(run) + body + origin(run, defaults.get(run.kind, {}))


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


def pretraining(run: Run) -> str:
    """Headline figures and curves of a pre-training run."""
    return pretraining_figures(run) + html.section("Curves", loss_panel(run), health_panels(run))


def loss_note() -> str:
    """Explain nats and the unigram entropy to readers to whom both are new."""
    return html.note(
        "A loss is given in nats a token: minus the logarithm of the probability that the model "
        "gave to the right piece, on average; less is better. The unigram entropy is the loss of "
        "knowing only how often each piece occurs."
    )


def pretraining_figures(run: Run) -> str:
    names = objective(run)
    figures, newest = held_out(run), {**run.last("train"), **run.result}
    gained = ""
    if is_number(gain := gain_over_entropy(figures, names[0])):
        gained = f"gain over unigram entropy {figures['unigram_entropy']:.2f}: {gain:.2f} nats"
    tokens, seconds = newest.get("tokens"), newest.get("seconds")
    rate = ""
    if is_number(tokens) and is_number(seconds) and seconds:
        rate = f"{html.short(tokens / seconds)} tokens a second"
        _, mfu = run.curve("train", "peak_share")
        rate += f", {sum(mfu) / len(mfu):.0%} of the peak (MFU)" if mfu else ""
    _, padding = run.curve("train", "padding_share")
    work = f"{html.number(newest.get('steps', newest.get('step')))} steps"
    if padding:
        work += f", {sum(padding) / len(padding):.0%} padding"
    length = held_out_length(run)
    accuracies = [
        accuracy_figure(figures, name, f", rows of {length}" * bool(length)) for name in names
    ]
    return html.figures(
        [
            (
                html.number(figures.get(f"{names[0]}_loss")),
                f"held-out {names[0].upper()} loss",
                gained,
            ),
            *accuracies,
            (html.short(tokens), "tokens seen", work),
            (html.duration(seconds), "of training", rate),
            (html.short(run.description.get("parameters")), "parameters", ""),
        ]
    )


def gain_over_entropy(figures: Mapping[str, Any], token: str) -> float | None:
    """The unigram entropy minus the loss; None where one of them is unknown."""
    loss, entropy = figures.get(f"{token}_loss"), figures.get("unigram_entropy")
    return entropy - loss if is_number(loss) and is_number(entropy) else None


def accuracy_figure(figures: Mapping[str, Any], name: str, rows: str = "") -> tuple[str, str, str]:
    """The headline figure of an accuracy: a share, its name, and of how many predictions it is.

    >>> accuracy_figure({"nsp_cases": 256, "nsp_accuracy": 0.75}, "nsp", ", rows of 128")
    ('75.0%', 'NSP accuracy', 'of 256 next sentences of held-out text, rows of 128')
    """
    cases = of_cases(figures.get(f"{name}_cases")).strip() or "of the"
    share, label = html.percent(figures.get(f"{name}_accuracy")), f"{name.upper()} accuracy"
    return share, label, f"{cases} {PREDICTED[name]} of held-out text{rows}"


def loss_panel(run: Run) -> str:
    """The token loss, in training and held-out, over the line of knowing only frequencies."""
    token = objective(run)[0]
    entropy = held_out(run).get("unigram_entropy")
    train = curves(run, "train", f"{token}_loss", 0)
    evaluate = curves(run, "evaluate", f"{token}_loss", 1, "dot")
    levels = [(entropy, f"unigram entropy {entropy:.2f}")] if is_number(entropy) else []
    picture = draw([*train, *evaluate], Chart(levels=levels, marks=phase_marks(run)))
    keys = [("training", 0, "line")]
    if any(curve.x for curve in evaluate):
        keys.append(("held-out text", 1, "dot"))
    title = f"Loss of the {PREDICTED[token]} (nats)"
    return html.panel(title, html.legend(keys), picture) if picture else ""


def health_panels(run: Run) -> str:
    """Accuracy, rate, gradient norm and speed: they tell a healthy run from a sick one."""
    marks = phase_marks(run)
    drawn: list[Curve] = []
    keys: list[tuple[str, int, str]] = []
    for name, number in zip(objective(run), (0, 2), strict=False):
        for event, shape, of in (("train", "line", ""), ("evaluate", "dot", ", held-out")):
            own = curves(run, event, f"{name}_accuracy", number, shape)
            drawn += own
            if any(curve.x for curve in own):
                keys.append((f"{PREDICTED[name]}{of}", number, shape))
    chart = Chart(percent=True, from_zero=True, half=True, marks=marks)
    accuracy = draw(drawn, chart)
    panels = [html.panel("Accuracy", html.legend(keys), accuracy)] if accuracy else []
    for name, title, number in (
        ("tokens_per_second", "Speed (tokens a second)", 4),
        ("rate", "Learning rate", 5),
        ("gradient_norm", "Grad norm", 3),
    ):
        chart = Chart(from_zero=True, half=True, marks=marks)
        picture = draw(curves(run, "train", name, number), chart)
        panels += [html.panel(title, picture)] if picture else []
    return html.pair(panels)


def objective(run: Run) -> list[str]:
    """The names of PREDICTED that the run has figures of: its tokens', then its pairs' if any."""
    figures = {**run.last("train"), **held_out(run)}
    return [name for name in PREDICTED if f"{name}_accuracy" in figures] or ["mlm"]


def curves(
    run: Run, event: str, name: str, color: int, shape: str = "line", along: str = "step"
) -> list[Curve]:
    """One logged figure to be drawn: a curve a phase, all in one color."""
    return [Curve(x, y, color, shape) for x, y in run.pieces(event, name, along)]


def phase_marks(run: Run) -> list[tuple[float, str]]:
    """The beginning of each phase after the first: the last line of the one before."""
    steps = [[line["step"] for line in lines if "step" in line] for lines in run.phases]
    return [(max(before), f"phase {k}") for k, before in enumerate(steps[:-1], 2) if before]


def held_out(run: Run) -> dict[str, Any]:
    """The final figures on held-out text; while the run goes on, the newest ones."""
    return {**run.last("evaluate"), **run.result.get("held_out", {})}


def held_out_length(run: Run) -> Any:
    """Tokens in a row of the newest held-out text: those of the phase that was measured last."""
    measured = [any(line.get("event") == "evaluate" for line in phase) for phase in run.phases]
    second = run.finished or any(measured[1:])
    return (second and run.setting("second_length")) or run.setting("length")


# How it was made


def origin(run: Run, defaults: Mapping[str, Any]) -> str:
    """Command, machine, settings and messages: everything needed to do the run again."""
    described = run.description
    words = [shlex.quote(str(word)) for word in described.get("command") or []]
    line = " ".join(f"<span>{html.text(word)}</span>" for word in words)
    facts = {
        "made": described.get("created"),
        "bertsmith": described.get("bertsmith"),
        "commit": described.get("commit"),
        **(described.get("machine") or {}),
    }
    settings, folded = {}, {}
    task_kind = run.setting("task_kind")
    for name, value in own_settings(run).items():
        is_read = task_kind is None or task_kind in READ_BY.get(name, (task_kind,))
        is_default = name in defaults and value == defaults[name]
        (folded if is_default or not is_read else settings)[name] = value
    hashes = settings.pop("data_sha256", None) or {}
    messages = "".join(f"<p>{html.text(message)}</p>" for message in run.messages())
    return html.section(
        "How it was made",
        html.panel("Command", f"<pre>{line}</pre>") if line else "",
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
    machine = run.description.get("machine") or {}
    settings = run.description.get("settings") or {}
    return {
        name: value
        for name, value in settings.items()
        if value is not None and (name not in machine or value != machine[name])
    }


def value_table(head: str, values: Mapping[str, Any]) -> str:
    """Names and values; nested ones by dotted names, absent ones left out."""
    rows = [
        [html.text(name), setting(value)] for name, value in flatten(values) if value is not None
    ]
    return f'<div class="values">{html.table([head, ""], rows, left=2)}</div>' if rows else ""


def setting(value: Any) -> str:
    """A setting's value as escaped text."""
    value = ", ".join(map(str, value)) if isinstance(value, list) else value
    shown = html.number(value) if isinstance(value, float) else html.text(value)
    return f'<span class="any">{shown}</span>'


# Several runs


def by_training(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The pre-training runs and the others; runs of one side can be compared."""
    return (
        [run for run in runs if run.kind == "pretrain"],
        [run for run in runs if run.kind != "pretrain"],
    )


def comparison_body(runs: Sequence[Run], defaults: Defaults) -> str:
    """The sections that put runs side by side, then each run's own, folded away if compared."""
    pretrained, finetuned = (group if len(group) > 1 else [] for group in by_training(runs))
    compared = [*pretrained, *finetuned]
    details = "".join(
        html.details(run.name, run_body(run, defaults), is_open=run not in compared) for run in runs
    )
    return "".join(
        [
            *map(in_progress, compared),
            html.section("Pre-training, side by side", *_pretraining(pretrained)),
            html.section("Fine-tuning, side by side", *_finetuning(finetuned)),
            html.section(
                "What differs", differing_settings(pretrained), differing_settings(finetuned)
            ),
            html.section("Each run in full", details) if compared else details,
        ]
    )


def _pretraining(runs: Sequence[Run]) -> list[str]:
    """The table, and the losses of all runs in one chart, whatever their objectives."""
    if not runs:
        return []
    keys = html.legend(
        (f"{run.name} ({'+'.join(objective(run))})", k, "line") for k, run in enumerate(runs)
    )
    loss = _overlaid(runs, "train", "loss")
    judged = [
        html.panel(title, picture)
        for title, figure in (("Held-out loss (nats)", "loss"), ("Held-out accuracy", "accuracy"))
        if (picture := _overlaid(runs, "evaluate", figure))
    ]
    breaks = "A curve breaks where a run's second phase begins, with rows of another length."
    return [
        _pretraining_table(runs),
        html.panel("Training loss (nats)", keys, loss) if loss else "",
        html.pair(judged),
        html.note(breaks) if any(len(run.phases) > 1 for run in runs) else "",
    ]


def _overlaid(runs: Sequence[Run], event: str, figure: str) -> str:
    """The "loss" or "accuracy" of all runs' tokens: a color a run, a curve a phase.

    The axis is tokens where all runs log them, since runs differ in the size of a step.
    """
    logged = all(run.curve(event, f"{objective(run)[0]}_loss", "tokens")[0] for run in runs)
    along, half = "tokens" if logged else "step", event == "evaluate"
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
    sides = [
        "/".join(
            dict.fromkeys(names[k].upper() for names in map(objective, runs) if k < len(names))
        )
        for k in (0, 1)
    ]
    head = ["run", "objective", "loss (nats)", "gain over unigram entropy"]
    head += [f"{side} accuracy" for side in sides] + ["tokens", "time", "parameters"]
    rows = []
    for number, run in enumerate(runs):
        names, figures = objective(run), held_out(run)
        newest = {**run.last("train"), **run.result}
        accuracies = [html.text(None)] * 2
        for k, name in enumerate(names):
            share, cases = figures.get(f"{name}_accuracy"), figures.get(f"{name}_cases")
            accuracies[k] = html.percent(share) + (of_cases(cases) if is_number(share) else "")
        rows.append(
            [
                html.swatch(number) + html.text(run.name),
                "+".join(names),
                html.fixed(figures.get(f"{names[0]}_loss")),
                html.fixed(gain_over_entropy(figures, names[0])),
                *accuracies,
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


def _finetuning(runs: Sequence[Run]) -> list[str]:
    """The table, and a chart a main metric: a color a run, a line a seed."""
    names = list(dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})))
    rows = []
    for number, run in enumerate(runs):
        cells = [html.swatch(number) + html.text(run.name), f"{len(metrics_by_seed(run))}"]
        cells.append(html.number(run.result.get("dev_examples")))
        for name in names:
            values = seed_values(run, name)
            cells.append("".join(mean_and_spread(name, values)) if values else html.text(None))
        rows.append(cells)
    keys = [
        (run.name + ", a line a seed" * (len(run.part_runs) > 1), number, "line")
        for number, run in enumerate(runs)
    ]
    panels = []
    for name in dict.fromkeys(main_metric(run) for run in runs):
        picture = draw(
            [
                Curve(*part.curve("evaluate", name), color=number, shape="step")
                for number, run in enumerate(runs)
                for part in run.part_runs.values()
            ],
            Chart(percent=is_share(name)),
        )
        panels += [html.panel(on_dev_set(name), html.legend(keys), picture)] if picture else []
    head = ["run", "seeds", "dev examples", *map(metric_name, names)]
    return [html.table(head, rows), *panels]


def differing_settings(runs: Sequence[Run]) -> str:
    """The settings and machines that are not the same in all runs."""
    columns = [
        dict(
            flatten(
                {"settings": own_settings(run), "machine": run.description.get("machine") or {}}
            )
        )
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
