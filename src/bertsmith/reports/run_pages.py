"""Several runs: figures side by side, curves overlaid, and the settings that differ.

The sections of one run: how pre-training or fine-tuning went, and how the run was made.
"""

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
    metrics_by_seed,
)
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.runs import Run, flatten, is_number


def run_body(run: Run) -> str:
    """All sections of a run's page."""
    body = pretraining(run) if run.kind == "pretrain" else finetuning(run)
    return in_progress(run) + body + origin(run)


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

# What is predicted, by the name that its figures begin with: tokens, then pairs
PREDICTED = {
    "mlm": "masked tokens",
    "ltr": "next tokens",
    "nsp": "next sentences",
    "sop": "sentence orders",
}


def objective(run: Run) -> list[str]:
    """The names of PREDICTED that the run has figures of: its tokens', then its pairs' if any."""
    figures = {**run.last("train"), **held_out(run)}
    return [name for name in PREDICTED if f"{name}_accuracy" in figures] or ["mlm"]


def curves(
    run: Run, event: str, name: str, colour: int, shape: str = "line", along: str = "step"
) -> list[Curve]:
    """One logged figure to be drawn: a curve a phase, all in one colour."""
    return [Curve(x, y, colour, shape) for x, y in run.pieces(event, name, along)]


def phase_marks(run: Run) -> list[tuple[float, str]]:
    """Where each phase after the first begins: at the last line of the one before."""
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


def pretraining(run: Run) -> str:
    """Headline figures and curves of a pre-training run."""
    return pretraining_figures(run) + html.section("Curves", loss_panel(run), health_panels(run))


def loss_note() -> str:
    """Explain nats and the unigram entropy to readers to whom both are new."""
    return (
        '<p class="note">A loss is given in nats a token: minus the logarithm of the probability '
        "that the model gave to the right piece, on average; less is better. The unigram entropy "
        "is the loss of knowing only how often each piece occurs.</p>"
    )


def what_is_right(figures: Mapping[str, Any], name: str) -> str:
    """The predictions of which a share is right.

    >>> what_is_right({"nsp_cases": 256}, "nsp"), what_is_right({}, "mlm")
    ('of 256 next sentences right', 'of the masked tokens right')
    """
    return f"{of_cases(figures.get(f'{name}_cases')) or 'of the'} {PREDICTED[name]} right".strip()


def share_right(figures: Mapping[str, Any], name: str) -> str:
    """The share of the predictions that is right, with their number where they are few."""
    share, cases = figures.get(f"{name}_accuracy"), figures.get(f"{name}_cases")
    return html.percent(share) + (of_cases(cases) if is_number(share) else "")


def pretraining_figures(run: Run) -> str:
    names = objective(run)
    figures, newest = held_out(run), {**run.last("train"), **run.result}
    steps = html.number(newest.get("steps", newest.get("step")))
    loss, entropy = figures.get(f"{names[0]}_loss"), figures.get("unigram_entropy")
    under = ""
    if is_number(loss) and is_number(entropy):
        under = f"{entropy - loss:.2f} nats under the unigram entropy, {entropy:.2f}"
    tokens, seconds = newest.get("tokens"), newest.get("seconds")
    rate = ""
    if is_number(tokens) and is_number(seconds) and seconds:
        rate = f"{html.short(tokens / seconds)} tokens a second"
    _, shares = run.curve("train", "peak_share")
    if rate and shares:
        rate += f", {sum(shares) / len(shares):.0%} of the peak"
    _, padding = run.curve("train", "padding_share")
    work = f"{steps} steps"
    if padding:
        work += f", {sum(padding) / len(padding):.0%} padding"
    size, where = run.description.get("parameters"), "on held-out text"
    if length := held_out_length(run):
        where += f", rows of {length}"
    return html.figures(
        [
            (html.number(loss), f"held-out {names[0].upper()} loss", under),
            *(
                (
                    html.percent(figures.get(f"{name}_accuracy")),
                    what_is_right(figures, name),
                    where,
                )
                for name in names
            ),
            (html.short(tokens), "tokens seen", work),
            (html.duration(seconds), "of training", rate),
            (html.short(size), "parameters", ""),
        ]
    )


def loss_panel(run: Run) -> str:
    """The token loss, in training and held-out, over the line of knowing only frequencies."""
    token = objective(run)[0]
    entropy = held_out(run).get("unigram_entropy")
    train = curves(run, "train", f"{token}_loss", 0)
    evaluate = curves(run, "evaluate", f"{token}_loss", 1, "dot")
    levels = [(entropy, f"unigram entropy {entropy:.2f}")] if is_number(entropy) else []
    picture = draw([*train, *evaluate], Chart(levels=levels, marks=phase_marks(run)))
    judged = any(curve.x for curve in evaluate)
    keys = [("training", 0, "line")] + ([("held-out text", 1, "dot")] if judged else [])
    title = f"Loss of the {PREDICTED[token]} (nats)"
    return html.panel(title, html.legend(keys), picture) if picture else ""


def health_panels(run: Run) -> str:
    """Accuracy, rate, gradient norm and speed: what tells a healthy run from a sick one."""
    marks = phase_marks(run)
    predicted = list(zip(objective(run), (0, 2), strict=False))  # (name, colour)
    accuracy = draw(
        [
            curve
            for name, number in predicted
            for event, shape in (("train", "line"), ("evaluate", "dot"))
            for curve in curves(run, event, f"{name}_accuracy", number, shape)
        ],
        Chart(percent=True, from_zero=True, half=True, marks=marks),
    )
    keys = [(PREDICTED[name], number, "line") for name, number in predicted]
    panels = [html.panel("Accuracy", html.legend(keys), accuracy)] if accuracy else []
    for name, title, number in (
        ("tokens_per_second", "Speed (tokens a second)", 4),
        ("rate", "Learning rate", 5),
        ("gradient_norm", "Gradient norm", 3),
    ):
        chart = Chart(from_zero=True, half=True, marks=marks)
        picture = draw(curves(run, "train", name, number), chart)
        panels += [html.panel(title, picture)] if picture else []
    return html.pair(panels)


# How it was made


def origin(run: Run) -> str:
    """Command, machine, settings and messages: what it takes to do the run again."""
    described = run.description
    command = described.get("command")
    line = shlex.join(map(str, command)) if isinstance(command, list) else command
    facts = {
        "made": described.get("created"),
        "bertsmith": described.get("bertsmith"),
        "commit": described.get("commit"),
        **(described.get("machine") or {}),
    }
    settings = dict(described.get("settings") or {})
    hashes = settings.pop("data_sha256", None) or {}
    messages = "".join(f"<p>{html.text(message)}</p>" for message in run.messages())
    return html.section(
        "How it was made",
        html.panel("Command", f"<pre>{html.text(line)}</pre>") if line else "",
        value_table("machine", facts),
        value_table("setting", settings),
        value_table("SHA-256 of the data", hashes),
        messages and "<h3>Messages of the run</h3>" + messages,
    )


def value_table(head: str, values: Mapping[str, Any]) -> str:
    """Names and values; nested ones by dotted names, absent ones left out."""
    rows = [
        [html.text(name), f'<span class="any">{setting(value)}</span>']
        for name, value in flatten(values)
        if value is not None
    ]
    return f'<div class="values">{html.table([head, ""], rows, left=2)}</div>' if rows else ""


def setting(value: Any) -> str:
    """A setting's value as escaped text."""
    if isinstance(value, list):
        return html.text(", ".join(map(str, value)))
    return html.number(value) if isinstance(value, float) else html.text(value)


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
