"""The report of a run, of several runs side by side, or of a quickstart, as one HTML file.

The file stands alone: its style and its charts are inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_json_object, write_text
from bertsmith.base.terminal import duration, is_number, number, of_cases, percent, short
from bertsmith.reports import html, plots
from bertsmith.reports.run_pages import (
    LOSS_NOTE,
    Defaults,
    accuracy_figure,
    by_training,
    comparison_body,
    gain_over_entropy,
    health_panels,
    loss_panel,
    run_body,
    value_table,
)
from bertsmith.reports.runs import Run, check_confusion, mean_and_std, read_run
from bertsmith.reports.text_answers import class_table, confusion_panel, examples

KINDS = {
    "pretrain": "Pre-training",
    "finetune": "Fine-tuning",
    "contrastive": "Sentence vectors from pairs",
}
# The sides of a quickstart's classifier: key, name, color
SIDES = (("pretrained", "pre-trained", 0), ("scratch", "from scratch", 1))


def write_report(runs: Sequence[Path], out: Path, defaults: Defaults | None = None) -> None:
    """Write the report of these run directories, or of one quickstart folder, to `out`.

    Settings that are as in `defaults`, by the kind of run, are folded away.

    Errors: ValueError that names the folder or file that is missing or damaged; nothing is written
    then.
    """
    if not runs:
        raise ValueError("no run is given: name at least one run directory")
    quickstarts = [folder for folder in runs if (folder / "quickstart.json").exists()]
    if quickstarts and len(runs) > 1:
        raise ValueError(
            f"{quickstarts[0]}: a quickstart folder has a page of its own; "
            "to compare its pre-training give the run directory inside it"
        )
    write_text(
        out, _story_page(quickstarts[0]) if quickstarts else _runs_page(runs, defaults or {})
    )


def _runs_page(folders: Sequence[Path], defaults: Defaults) -> str:
    runs = [read_run(folder) for folder in folders]
    explained = LOSS_NOTE if any(run.kind == "pretrain" for run in runs) else ""
    if len(runs) == 1:
        [run] = runs
        base = run.setting("model")
        if isinstance(base, str):
            way = "{}'s shape, from scratch" if run.setting("from_scratch") else "from {}"
            base = way.format(base)
        facts = [run.setting("task"), base, *map(run.machine.get, ("cpu", "device", "precision"))]
        facts.append(str(run.description.get("created", ""))[:10])
        lead = " · ".join(html.text(fact) for fact in facts if fact)
        kind, body = KINDS.get(run.kind, run.kind), [explained, *run_body(run, defaults)]
        return html.page(run.name, kind, lead, body, _version(run))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # tell namesakes apart by their whole path
        runs = [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    lead = html.text(", ".join(run.name for run in runs))
    eyebrow, title = "Comparison", f"{len(runs)} runs side by side"
    if max(map(len, by_training(runs))) == 1:  # a pre-training, and a fine-tuning of another sort
        eyebrow, title = "Runs", f"{len(runs)} runs"
    body = [explained, *comparison_body(runs, defaults)]
    return html.page(title, eyebrow, lead, body, _version(runs[0]))


def _version(run: Run) -> str:
    return str(run.description.get("bertsmith", ""))


# The quickstart


def _story_page(folder: Path) -> str:
    """The page of a quickstart folder, in the order in which things were done."""
    story, run = read_quickstart(folder)
    corpus, seconds = story.get("corpus") or {}, story.get("seconds") or {}
    task, machine = story.get("classification") or {}, story.get("machine") or {}
    total = duration(sum(value for value in seconds.values() if is_number(value)))
    lead = (
        f"{number(corpus.get('documents'))} documents of raw text, a vocabulary, a network that "
        f"learned from them, and a classifier on top: {total}"
    )
    lead += f" on {html.text(machine['cpu'])}." if machine.get("cpu") else "."
    labels, counts = task.get("labels") or [], task.get("confusion")
    matrix = confusion_panel(labels, counts, "Confusion matrix of the first seed")
    classes, shown = class_table(labels, counts), examples(task.get("examples"))
    settings = value_table("setting", story.get("settings") or {})
    body = [
        LOSS_NOTE,
        _headline(corpus, task, run),
        html.section("The text", _corpus(corpus)),
        html.section("Pre-training", _pretraining(run), loss_panel(run), health_panels(run)),
        html.section("Filling masks", _fill(story.get("fill") or [])),
        html.section("Does pre-training help?", *_classification(task)),
        html.section("Where it errs", matrix, classes, shown),
        html.section("Where the time went", _timing(seconds)),
        html.section("Settings", value_table("machine", machine), settings),
    ]
    title = "A BERT of your own, from raw text"
    return html.page(title, "bertsmith quickstart", lead, body, _version(run))


def read_quickstart(folder: Path) -> tuple[dict[str, Any], Run]:
    """quickstart.json and the pre-training run it names.

    Errors: ValueError that names the file that is missing or damaged.
    """
    story = read_json_object(folder / "quickstart.json")
    check_confusion(folder / "quickstart.json", story.get("classification") or {})
    if not isinstance(story.get("pretrain"), str):
        raise ValueError(f"{folder}/quickstart.json: 'pretrain' does not name a run directory")
    run = read_run(folder / story["pretrain"])
    entropy = {"unigram_entropy": story.get("unigram_entropy")}
    figures = {**entropy, **run.result.get("held_out", {}), **(story.get("held_out") or {})}
    return story, replace(run, result={**run.result, "held_out": figures})


def _headline(corpus: Mapping[str, Any], task: Mapping[str, Any], run: Run) -> str:
    figures, nats, losses, points = run.eval_metrics, "", "", ""
    if is_number(gain := gain_over_entropy(figures)):
        nats, entropy = f"{gain:.2f} nats", figures["unigram_entropy"]
        losses = f"held-out loss {figures['mlm_loss']:.2f}, unigram entropy {entropy:.2f}"
    mean, scratch = ((task.get(side) or {}).get("mean") for side, _, _ in SIDES)
    if is_number(mean) and is_number(scratch):  # the means that the verdict is about
        tests = of_cases(task.get("test_examples"), "test texts").strip()
        points = f"{100 * (mean - scratch):+.1f} points against the same network from scratch"
        points += f", {tests}" if tests else ""
    return html.figures(
        (short(corpus.get("tokens")), "tokens of text", ""),
        (nats, "gain over unigram entropy", losses),
        accuracy_figure(figures, "mlm"),
        (percent(mean), "accuracy of the classifier", points),
    )


def _corpus(corpus: Mapping[str, Any]) -> str:
    if not corpus:
        return ""
    held_out = f"{short(corpus.get('held_out_tokens'))} held out"
    return html.figures(
        (number(corpus.get("documents")), "documents", ""),
        (short(corpus.get("sentences")), "sentences", ""),
        (short(corpus.get("tokens")), "tokens", held_out),
        (f"{number(corpus.get('megabytes'))} MB", "of text", ""),
        (number(corpus.get("vocabulary_size")), "pieces in the vocabulary", ""),
    )


def _pretraining(run: Run) -> str:
    figures = run.eval_metrics
    if gain_over_entropy(figures) is None:
        return ""
    return (
        "<p>Some of the tokens are hidden and have to be guessed from the rest. Knowing no more "
        f"than how often each piece occurs costs {figures['unigram_entropy']:.2f} nats a token, "
        f"the dashed line. After {duration(run.result.get('seconds'))} this network stands at "
        f"{figures['mlm_loss']:.2f} on text that it has never seen, with "
        f"{percent(figures.get('mlm_accuracy'))} of the hidden tokens right.</p>"
    )


def _fill(texts: Sequence[Mapping[str, Any]]) -> str:
    """Each text with its masks marked, and a group of bars for each mask; all on one scale."""
    masks = [mask for text in texts for mask in text.get("predictions") or []]
    longest = max((best.get("probability", 0) for mask in masks for best in mask), default=1)
    panels = []
    for text in texts:
        sentence = html.text(text.get("text")).replace("[MASK]", "<mark>[MASK]</mark>")
        groups = [
            html.bars([(best.get("token"), best.get("probability")) for best in mask], longest)
            for mask in text.get("predictions") or []
        ]
        panels.append(html.panel("", f'<p class="sentence">{sentence}</p>', *groups))
    return html.pair(*panels)


def _classification(task: Mapping[str, Any]) -> list[str]:
    sides = [(task.get(key) or {}, name, color) for key, name, color in SIDES]
    sides = [side for side in sides if side[0].get("accuracies")]
    if not sides:
        return []
    labels, tests = task.get("labels") or [], number(task.get("test_examples"))
    dots = [(color, list(side["accuracies"].values())) for side, _, color in sides]
    picture = plots.draw_seeds(dots, 1 / len(labels) if labels else None)
    legend = html.legend((name, color, "dot") for _, name, color in sides)
    seeds = list(dict.fromkeys(seed for side, _, _ in sides for seed in side["accuracies"]))
    rates = list(dict.fromkeys(rate for side, _, _ in sides for rate in side.get("rates") or {}))
    seed_rows, rate_rows = [], []
    for side, name, color in sides:
        accuracies, by_rate = side["accuracies"], side.get("rates") or {}
        head, best = html.swatch(color) + name, str(side.get("best_rate"))
        values = [
            *map(accuracies.get, seeds),
            side.get("mean"),
            mean_and_std(accuracies.values())[1],
        ]
        seed_rows.append([head, *map(percent, values)])
        cells = {rate: percent(by_rate.get(rate)) for rate in rates}
        rate_rows.append([head, *(f"<b>{c}</b>" if r == best else c for r, c in cells.items())])
    return [
        f"<p>The task: {len(labels)} classes, {number(task.get('train_examples'))} texts to "
        f"learn from, {tests} to be tested on. Both sides are the "
        "same network, trained for the same epochs, each at the best of its learning rates; only "
        "one was pre-trained before, on text that held these texts too, without their labels. "
        f"A dot is a seed, the bar their mean. {html.text(task.get('verdict') or '')}</p>",
        html.panel(f"Accuracy on {tests} test texts", legend, picture),
        html.table(["", *(f"seed {seed}" for seed in seeds), "mean", "std"], seed_rows),
        f"<h3>Accuracy on {number(task.get('dev_examples'))} development texts by learning "
        "rate</h3>",
        html.table(["", *rates], rate_rows),
    ]


def _timing(seconds: Mapping[str, Any]) -> str:
    known = {name: value for name, value in seconds.items() if is_number(value)}
    total = sum(known.values())
    rows = [
        [html.text(name), html.bar(value / (total or 1), "bar long"), duration(value)]
        for name, value in known.items()
    ]
    rows.append(["together", "", duration(total)])
    return html.table(["stage", "", "time"], rows, left=2, total=1) if known else ""
