"""The sections of one run: how pre-training or fine-tuning went, and how the run was made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from bertsmith.progress import of_cases
from bertsmith.reports import html
from bertsmith.reports.finetuning import finetuning
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
