"""Scores of a fine-tuned model on labelled examples, and the task that a run was trained for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.checkpoints.run import SETTINGS_FILE, RunFolder
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.features import featurise
from bertsmith.tasks.metrics import compute_metrics, confusion_matrix
from bertsmith.tasks.reading import Examples
from bertsmith.tasks.table import OWN_KINDS, TASKS, Task, own_task


def evaluate_classifier(
    predictor: Predictor,
    examples: Examples,
    task: Task,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Score the model by the metrics of the task.

    Returns {"metrics": {name: number}, "examples": N, "labels": [names], "confusion": counts
    [true class][predicted class]}. `on_batch` is told how many examples were done.
    """
    assert examples.labels is not None and examples.label_names == predictor.label_names
    features = featurise(predictor.tokenizer, examples, predictor.max_length)
    predicted = predictor.scores(features, on_batch).argmax(axis=1)
    num_labels = len(examples.label_names)
    return {
        "metrics": compute_metrics(task.metrics, predicted, examples.labels, num_labels),
        "examples": len(examples),
        "labels": list(examples.label_names),
        "confusion": confusion_matrix(predicted, examples.labels, num_labels).tolist(),
    }


def task_of(folder: Path, **columns: str | None) -> Task:
    """The task that the model in `folder` was fine-tuned for, from its run.json.

    `columns` (text, text_pair, label) that are given go before those of training. A folder
    without run.json has the columns "text" and "label".

    Errors: ValueError for a run that is not one of fine-tuning.
    """
    record = read_run(folder)
    if record.get("kind", "finetune") != "finetune":
        raise ValueError(
            f"{folder}: a run of '{record['kind']}', not a classifier: "
            "train one on it with `bertsmith finetune`"
        )
    settings = record.get("settings", {})
    given = {name: column for name, column in columns.items() if column is not None}
    if settings.get("task") in TASKS:
        return replace(TASKS[settings["task"]], **given)
    names = {"text": "text", "text_pair": None, "label": "label"}
    names |= {name: settings[name] for name in names if name in settings} | given
    return own_task(
        settings["task"] if settings.get("task") in OWN_KINDS else "classify",
        **names,
        separator=settings.get("separator", ","),
        options=tuple(settings.get("options", ())),
    )


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a run directory; {} for a model folder without one."""
    return RunFolder(folder).settings() if (folder / SETTINGS_FILE).exists() else {}
