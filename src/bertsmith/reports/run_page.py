"""The sections of one run: how pre-training or fine-tuning went, and how the run was made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.reports import classification, html
from bertsmith.reports.plots import Chart, Curve, draw
from bertsmith.reports.runs import Run, flatten, is_number, spread


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


def held_out(run: Run) -> dict[str, Any]:
    """The final figures on held-out text; while the run goes on, the newest ones."""
    return {**run.last("evaluate"), **run.result.get("held_out", {})}


def pretraining(run: Run) -> str:
    """Headline figures and curves of a pre-training run."""
    return pretraining_figures(run) + html.section("Curves", loss_panel(run), health_panels(run))


def pretraining_figures(run: Run) -> str:
    figures, newest = held_out(run), {**run.last("train"), **run.result}
    steps = html.number(newest.get("steps", newest.get("step")))
    loss, entropy = figures.get("mlm_loss"), figures.get("unigram_entropy")
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
    size, where = run.description.get("parameters"), "on held-out text"
    return html.figures(
        [
            (html.number(loss), "held-out MLM loss", under),
            (html.percent(figures.get("mlm_accuracy")), "of masked tokens right", where),
            (html.percent(figures.get("nsp_accuracy")), "next sentences right", where),
            (
                html.short(tokens),
                "tokens seen",
                f"{steps} steps",
            ),
            (html.duration(seconds), "of training", rate),
            (html.short(size), "parameters", ""),
        ]
    )


def loss_panel(run: Run) -> str:
    """The MLM loss in training and on held-out text, over the line of knowing only frequencies."""
    entropy = held_out(run).get("unigram_entropy")
    train, evaluate = run.curve("train", "mlm_loss"), run.curve("evaluate", "mlm_loss")
    levels = [(entropy, f"unigram entropy {entropy:.2f}")] if is_number(entropy) else []
    picture = draw(
        [Curve(*train, colour=0), Curve(*evaluate, colour=1, shape="dot")], Chart(levels=levels)
    )
    keys = [("training", 0, "line")] + ([("held-out text", 1, "dot")] if evaluate[0] else [])
    return html.panel("Masked-token loss (nats)", html.legend(keys), picture) if picture else ""


def health_panels(run: Run) -> str:
    """Accuracy, rate, gradient norm and speed: what tells a healthy run from a sick one."""
    accuracy = draw(
        [
            Curve(*run.curve("train", "mlm_accuracy"), colour=0),
            Curve(*run.curve("evaluate", "mlm_accuracy"), colour=0, shape="dot"),
            Curve(*run.curve("train", "nsp_accuracy"), colour=2),
            Curve(*run.curve("evaluate", "nsp_accuracy"), colour=2, shape="dot"),
        ],
        Chart(percent=True, from_zero=True, half=True),
    )
    keys = [("masked tokens", 0, "line"), ("next sentence", 2, "line")]
    panels = [html.panel("Accuracy", html.legend(keys), accuracy)] if accuracy else []
    for name, title, number in (
        ("tokens_per_second", "Speed (tokens a second)", 4),
        ("rate", "Learning rate", 5),
        ("gradient_norm", "Gradient norm", 3),
    ):
        curve = Curve(*run.curve("train", name), colour=number)
        picture = draw([curve], Chart(from_zero=True, half=True))
        panels += [html.panel(title, picture)] if picture else []
    return html.pair(panels)


# Fine-tuning


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
    """Figures, curves, confusion matrix, classes and examples of a fine-tuning run."""
    labels, counts = run.result.get("labels") or [], run.result.get("confusion")
    seeds = metrics_by_seed(run)
    return "".join(
        [
            finetuning_figures(run),
            html.section("Seeds", classification.seed_table(seeds, run.result.get("best_seed"))),
            html.section("Curves", finetuning_curves(run)),
            html.section("Settings that were tried", sweep_table(run.result.get("sweep") or [])),
            html.section("What is taken for what", classification.confusion_panel(labels, counts)),
            html.section("By class", classification.class_table(labels, counts)),
            html.section("Examples", classification.examples(run.result.get("examples"))),
        ]
    )


def finetuning_figures(run: Run) -> str:
    seeds = metrics_by_seed(run)
    items = []
    for name in run.result.get("metrics") or next(iter(seeds.values()), {}):
        values = [metrics[name] for metrics in seeds.values() if is_number(metrics.get(name))]
        if not values:
            values = [run.result.get("metrics", {}).get(name)]
        if not is_number(values[0]):
            continue
        mean, deviation = spread(values)
        note = ""
        if len(values) > 1:
            note = f"mean of {len(values)} seeds ± {classification.metric(name, deviation)}"
        items.append((classification.metric(name, mean), name.replace("_", " "), note))
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
        Chart(percent=classification.is_share(name), half=True),
    )
    keys = [(f"seed {seed}", k, "line") for k, (seed, _) in enumerate(parts)]
    marks = html.legend(keys) if len(parts) > 1 else ""
    title = f"{name.replace('_', ' ')} on the development set".capitalize()
    panels = [html.panel("Training loss", marks, loss)] if loss else []
    panels += [html.panel(title, marks, judged)] if judged else []
    return html.pair(panels)


def sweep_table(tried: Sequence[Mapping[str, Any]]) -> str:
    """A row a setting of the search, with the figures it came to."""
    names = list(tried[0]) if tried else []
    rows = [[classification.metric(name, row.get(name)) for name in names] for row in tried]
    return html.table(names, rows)


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
    messages = "".join(f"<p>{html.text(message)}</p>" for message in run.messages())
    return html.section(
        "How it was made",
        html.panel("Command", f"<pre>{html.text(line)}</pre>") if line else "",
        value_table("machine", facts),
        value_table("setting", described.get("settings") or {}),
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
