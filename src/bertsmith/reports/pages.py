"""The report of a run, of several runs side by side, or of a quickstart, as one HTML file.

The file needs nothing beside itself: its style and its charts stand in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.base.files import write_text
from bertsmith.base.terminal import of_cases
from bertsmith.reports import html, plots
from bertsmith.reports.run_pages import (
    Defaults,
    accuracy_figure,
    by_training,
    comparison_body,
    health_panels,
    held_out,
    loss_note,
    loss_panel,
    run_body,
    value_table,
)
from bertsmith.reports.runs import Run, check_confusion, is_number, read_object, read_run, spread
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

    Errors: ValueError that names the folder or file that is missing or damaged, or the package
    that is not installed; nothing is written then.
    """
    if not runs:
        raise ValueError("no run is given: name at least one run directory")
    quickstarts = [folder for folder in runs if (folder / "quickstart.json").exists()]
    if quickstarts and len(runs) > 1:
        raise ValueError(
            f"{quickstarts[0]}: a quickstart folder has a page of its own; "
            "to compare its pre-training give the run directory inside it"
        )
    if quickstarts:
        story, run = read_quickstart(quickstarts[0])
        title, body = "A BERT of your own, from raw text", quickstart_body(story, run)
        lead = quickstart_lead(story)
        page = html.page(title, "bertsmith quickstart", lead, body, _version(run))
    else:
        page = _runs_page(runs, defaults or {})
    write_text(out, page)


def _runs_page(folders: Sequence[Path], defaults: Defaults) -> str:
    runs = [read_run(folder) for folder in folders]
    explained = loss_note() if any(run.kind == "pretrain" for run in runs) else ""
    if len(runs) == 1:
        [run] = runs
        kind, body = KINDS.get(run.kind, run.kind), explained + run_body(run, defaults)
        return html.page(run.name, kind, _lead(run), body, _version(run))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # tell namesakes apart by their whole path
        runs = [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    lead = html.text(", ".join(run.name for run in runs))
    eyebrow, title = "Comparison", f"{len(runs)} runs side by side"
    if max(map(len, by_training(runs))) == 1:  # a pre-training, and a fine-tuning of another sort
        eyebrow, title = "Runs", f"{len(runs)} runs"
    body = explained + comparison_body(runs, defaults)
    return html.page(title, eyebrow, lead, body, _version(runs[0]))


def _lead(run: Run) -> str:
    machine = run.description.get("machine") or {}
    base = run.setting("model")
    if isinstance(base, str):
        base = f"{base}'s shape, from scratch" if run.setting("from_scratch") else f"from {base}"
    facts = [run.setting("task"), base, *(machine.get(k) for k in ("cpu", "device", "precision"))]
    facts.append(str(run.description.get("created", ""))[:10])
    return " · ".join(html.text(fact) for fact in facts if fact)


def _version(run: Run) -> str:
    return str(run.description.get("bertsmith", ""))


# The quickstart


def read_quickstart(folder: Path) -> tuple[dict[str, Any], Run]:
    """quickstart.json and the pre-training run it names.

    Errors: ValueError that names the file that is missing or damaged.
    """
    story = read_object(folder / "quickstart.json")
    check_confusion(folder / "quickstart.json", story.get("classification") or {})
    if not isinstance(story.get("pretrain"), str):
        raise ValueError(f"{folder}/quickstart.json: 'pretrain' does not name a run directory")
    run = read_run(folder / story["pretrain"])
    entropy = {"unigram_entropy": story.get("unigram_entropy")}
    figures = {**entropy, **run.result.get("held_out", {}), **(story.get("held_out") or {})}
    return story, replace(run, result={**run.result, "held_out": figures})


def quickstart_lead(story: Mapping[str, Any]) -> str:
    corpus, seconds = story.get("corpus") or {}, story.get("seconds") or {}
    total = sum(value for value in seconds.values() if is_number(value))
    cpu = (story.get("machine") or {}).get("cpu")
    return (
        f"{html.number(corpus.get('documents'))} documents of raw text, a vocabulary, "
        f"a network that learned from them, and a classifier on top: {html.duration(total)}"
        + (f" on {html.text(cpu)}." if cpu else ".")
    )


def quickstart_body(story: Mapping[str, Any], run: Run) -> str:
    """The sections of the page, in the order in which things were done."""
    task = story.get("classification") or {}
    labels = task.get("labels") or []
    return "".join(
        [
            loss_note(),
            _headline(story, run),
            html.section("The text", _corpus(story.get("corpus") or {})),
            html.section("Pre-training", _pretraining(run), loss_panel(run), health_panels(run)),
            html.section("Filling masks", _fill(story.get("fill") or [])),
            html.section("Does pre-training help?", *_classification(task)),
            html.section(
                "Where it errs",
                confusion_panel(
                    labels, task.get("confusion"), "Confusion matrix of the first seed"
                ),
                class_table(labels, task.get("confusion")),
                examples(task.get("examples")),
            ),
            html.section("Where the time went", _timing(story.get("seconds") or {})),
            html.section(
                "Settings",
                value_table("machine", story.get("machine") or {}),
                value_table("setting", story.get("settings") or {}),
            ),
        ]
    )


def _headline(story: Mapping[str, Any], run: Run) -> str:
    figures = held_out(run)
    task = story.get("classification") or {}
    loss, entropy = figures.get("mlm_loss"), figures.get("unigram_entropy")
    nats, figured = "", ""
    if is_number(loss) and is_number(entropy):
        nats = f"{entropy - loss:.2f} nats"
        figured = f"held-out loss {loss:.2f}, unigram entropy {entropy:.2f}"
    mean, scratch = ((task.get(side) or {}).get("mean") for side, _, _ in SIDES)
    gain = ""
    if is_number(mean) and is_number(scratch):  # the means that the verdict is about
        tests = of_cases(task.get("test_examples"), "test texts").strip()
        gain = f"{100 * (mean - scratch):+.1f} points against the same network from scratch"
        gain += f", {tests}" if tests else ""
    return html.figures(
        [
            (html.short((story.get("corpus") or {}).get("tokens")), "tokens of text", ""),
            (nats, "gain over unigram entropy", figured),
            accuracy_figure(figures, "mlm"),
            (html.percent(mean), "accuracy of the classifier", gain),
        ]
    )


def _corpus(corpus: Mapping[str, Any]) -> str:
    if not corpus:
        return ""
    held_out_tokens = corpus.get("held_out_tokens")
    return html.figures(
        [
            (html.number(corpus.get("documents")), "documents", ""),
            (html.short(corpus.get("sentences")), "sentences", ""),
            (html.short(corpus.get("tokens")), "tokens", f"{html.short(held_out_tokens)} held out"),
            (f"{html.number(corpus.get('megabytes'))} MB", "of text", ""),
            (html.number(corpus.get("vocabulary_size")), "pieces in the vocabulary", ""),
        ]
    )


def _pretraining(run: Run) -> str:
    figures = held_out(run)
    loss, entropy = figures.get("mlm_loss"), figures.get("unigram_entropy")
    if not (is_number(loss) and is_number(entropy)):
        return ""
    return (
        "<p>Some of the tokens are hidden and have to be guessed from the rest. Knowing no more "
        f"than how often each piece occurs costs {entropy:.2f} nats a token, the dashed line. "
        f"After {html.duration(run.result.get('seconds'))} this network stands at {loss:.2f} on "
        f"text that it has never seen, with {html.percent(figures.get('mlm_accuracy'))} of the "
        "hidden tokens right.</p>"
    )


def _fill(examples: Sequence[Mapping[str, Any]]) -> str:
    """Each text with its masks marked, and a group of bars for each mask; all on one scale."""
    masks = [mask for example in examples for mask in example.get("predictions") or []]
    longest = max((best.get("probability", 0) for mask in masks for best in mask), default=1)
    panels = []
    for example in examples:
        sentence = html.text(example.get("text")).replace("[MASK]", "<mark>[MASK]</mark>")
        groups = [
            html.bars([(best.get("token"), best.get("probability")) for best in mask], longest)
            for mask in example.get("predictions") or []
        ]
        panels.append(html.panel("", f'<p class="sentence">{sentence}</p>', *groups))
    return html.pair(panels)


def _classification(task: Mapping[str, Any]) -> list[str]:
    sides = [(task.get(key) or {}, name, number) for key, name, number in SIDES]
    sides = [(side, name, number) for side, name, number in sides if side.get("accuracies")]
    if not sides:
        return []
    labels, tests = task.get("labels") or [], html.number(task.get("test_examples"))
    rows = [(number, list(side["accuracies"].values())) for side, _, number in sides]
    picture = plots.draw_seeds(rows, 1 / len(labels) if labels else None)
    keys = [(name, number, "dot") for _, name, number in sides]
    intro = (
        f"<p>The task: {len(labels)} classes, {html.number(task.get('train_examples'))} texts to "
        f"learn from, {tests} to be judged by. Both sides are the "
        "same network, trained for the same epochs, each at the best of its learning rates; only "
        "one was pre-trained before, on text that held these texts too, without their labels. "
        f"A dot is a seed, the bar their mean. {html.text(task.get('verdict') or '')}</p>"
    )
    return [
        intro,
        html.panel(f"Accuracy on {tests} test texts", html.legend(keys), picture),
        _seed_rows(sides),
        f"<h3>Accuracy on {html.number(task.get('dev_examples'))} development texts by learning "
        "rate</h3>",
        _rate_rows(sides),
    ]


def _seed_rows(sides: Sequence[tuple[Mapping[str, Any], str, int]]) -> str:
    seeds = list(dict.fromkeys(seed for side, _, _ in sides for seed in side["accuracies"]))
    rows = [
        [html.swatch(number) + name]
        + [html.percent(side["accuracies"].get(seed)) for seed in seeds]
        + [html.percent(side.get("mean")), html.percent(spread(side["accuracies"].values())[1])]
        for side, name, number in sides
    ]
    head = ["", *(f"seed {seed}" for seed in seeds), "mean", "std"]
    return html.table(head, rows)


def _rate_rows(sides: Sequence[tuple[Mapping[str, Any], str, int]]) -> str:
    rates = list(dict.fromkeys(rate for side, _, _ in sides for rate in side.get("rates") or {}))
    rows = []
    for side, name, number in sides:
        cells = [html.swatch(number) + name]
        for rate in rates:
            cell = html.percent((side.get("rates") or {}).get(rate))
            best = str(side.get("best_rate")) == str(rate)
            cells.append(f"<b>{cell}</b>" if best else cell)
        rows.append(cells)
    return html.table(["", *rates], rows)


def _timing(seconds: Mapping[str, Any]) -> str:
    known = {name: value for name, value in seconds.items() if is_number(value)}
    total = sum(known.values())
    rows = [
        [html.text(name), html.bar(value / (total or 1), "bar long"), html.duration(value)]
        for name, value in known.items()
    ]
    rows.append(["together", "", html.duration(total)])
    return html.table(["stage", "", "time"], rows, left=2, total=1) if known else ""
