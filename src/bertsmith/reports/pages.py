"""The report of a run, of several runs side by side, or of a quickstart, as one HTML file.

The file needs nothing beside itself: its style and its charts stand in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bertsmith.files import write_text
from bertsmith.reports import html
from bertsmith.reports.comparison import comparison_body
from bertsmith.reports.quickstart import quickstart_body, quickstart_lead, read_quickstart
from bertsmith.reports.run_page import loss_note, run_body
from bertsmith.reports.runs import Run, read_run

KINDS = {
    "pretrain": "Pre-training",
    "finetune": "Fine-tuning",
    "contrastive": "Sentence vectors from pairs",
}


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the report of these run directories, or of one quickstart folder, to `out`.

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
        page = _quickstart_page(quickstarts[0])
    elif len(runs) == 1:
        page = _run_page(read_run(runs[0]))
    else:
        page = _comparison_page(runs)
    write_text(out, page)


def _quickstart_page(folder: Path) -> str:
    story, run = read_quickstart(folder)
    body = quickstart_body(story, run)
    title = "A BERT of your own, from raw text"
    return html.page(title, "bertsmith quickstart", quickstart_lead(story), body, _version(run))


def _run_page(run: Run) -> str:
    kind, body = KINDS.get(run.kind, run.kind), _explained([run]) + run_body(run)
    return html.page(run.name, kind, _lead(run), body, _version(run))


def _comparison_page(folders: Sequence[Path]) -> str:
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # tell namesakes apart by their whole path
        runs = [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    lead = html.text(", ".join(run.name for run in runs))
    title = f"{len(runs)} runs side by side"
    body = _explained(runs) + comparison_body(runs)
    return html.page(title, "Comparison", lead, body, _version(runs[0]))


def _explained(runs: Sequence[Run]) -> str:
    """Explain losses above the figures of runs that have them."""
    return loss_note() if any(run.kind == "pretrain" for run in runs) else ""


def _lead(run: Run) -> str:
    machine = run.description.get("machine") or {}
    facts = [
        run.setting("task"),
        machine.get("cpu"),
        machine.get("device"),
        machine.get("precision"),
    ]
    facts.append(str(run.description.get("created", ""))[:10])
    return " · ".join(html.text(fact) for fact in facts if fact)


def _version(run: Run) -> str:
    return str(run.description.get("bertsmith", ""))
