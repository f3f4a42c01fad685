"""A fine-tuned model measured on labelled files: `bertsmith.evaluate` and `bertsmith evaluate`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.base.settings import checked
from bertsmith.base.terminal import OnBatch, Progress, ignore
from bertsmith.inference.model_task import read_model_task
from bertsmith.inference.predictor import Predictor, opened
from bertsmith.tasks.examples import single_file
from bertsmith.tasks.metrics import confusion
from bertsmith.tasks.task import Task
from bertsmith.training.finetuning.request import check_reads
from bertsmith.training.finetuning.task_types.base import TaskType, check_columns


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The metrics of a model on labelled data."""

    metrics: dict[str, float]
    """The task's, the main one first; all are fractions (0.91, not 91)."""
    examples: int
    notes: dict[str, str]
    """Metrics that are 0, or partly, for want of examples, each with the reason."""
    labels: list[str]
    """The classes, where answers are classes."""
    confusion: list[list[int]] | None = None
    """Counts `[true class][predicted class]`, where answers are single classes."""
    splits: dict[str, dict[str, float]] | None = None
    """Metrics of each dev set, where there are several (MNLI); `metrics` are of the first."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        return f"Evaluation({metrics}; {self.examples:,} examples)"


@checked()
def evaluate(
    model: str | Path | Predictor,
    data: str | Path,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    skip_unlabelled: bool = False,
) -> Evaluation:
    """Measure a fine-tuned model on labelled data, as `bertsmith evaluate` does.

        bertsmith.evaluate("runs/reviews", "test.csv").metrics["accuracy"]
        bertsmith.evaluate(bertsmith.load("runs/mrpc", device="cuda"), "glue/MRPC")

    `model` is a run, a Hugging Face folder, a hub name, or what `load` gave. `data` is a file, or a
    folder of the task (its labelled test file, else its dev file). `text`, `text_pair` and `label`
    are columns, where they have other names than in training; `skip_unlabelled` leaves out the rows
    without a label.

    Errors: ValueError for a model that was not fine-tuned, or data that cannot be read.
    """
    columns = {"text": text, "text_pair": text_pair, "label": label}
    return evaluate_files(opened(model), Path(data), columns, skip_unlabelled)


def evaluate_files(
    predictor: Predictor, data: Path, columns: dict[str, str | None], skip_unlabelled: bool
) -> Evaluation:
    """Measure on the files of `data`. Errors: as `evaluate`."""
    trained_for = predictor.model_task
    model_task, task_type = read_model_task(predictor.folder, **columns), predictor.task_type
    task, results = model_task.task, {}
    if skip_unlabelled:
        check_reads(task.task_type, "skip_unlabelled")
        task = replace(task, skip_unlabelled=True)
    files = find_evaluation_files(task_type, task, data)
    check_columns(task_type, task, [*files.values()], columns)
    sets = {
        split: task_type.read(file, task, model_task.label_names) for split, file in files.items()
    }
    try:
        predictor.model_task = model_task
        with Progress("evaluate", unit="rows") as progress:
            for split, examples in sets.items():
                results[split] = evaluate_on(predictor, examples, progress.update)
    finally:
        predictor.model_task = trained_for
    splits = {split: result["metrics"] for split, result in results.items()}
    first = next(iter(results.values()))
    return Evaluation(**first, splits=splits if len(splits) > 1 else None)


def evaluate_on(predictor: Predictor, data: Any, on_batch: OnBatch = ignore) -> dict[str, Any]:
    """Score the model by the metrics of its task on labelled data.

    Returns {"metrics": {name: number}, "notes": {name: reason} of those that are 0, or partly, for
    want of examples, "examples": N} and, where the answers are classes, "labels": [names] and
    "confusion": counts [true class][predicted class].
    """
    task_type, model_task = predictor.task_type, predictor.model_task
    answers = predictor.predict(data, on_batch)
    records = task_type.to_records(answers, data, model_task)
    return {
        "metrics": task_type.measure(answers, data, model_task),
        "notes": task_type.notes(answers, data, model_task),
        "examples": len(data),
        "labels": list(model_task.label_names),
        **confusion(records, model_task.label_names),
    }


def find_evaluation_files(task_type: TaskType, task: Task, data: Path) -> dict[str, Path]:
    """Find the labelled files to score a model on, by split.

    They are `data` itself, or its test file, else its dev files, of which MNLI has two. A line on
    stderr says that the test file has no labels.

    Errors: ValueError when a folder has none.
    """
    if single := single_file(data):
        return {"data": single}
    test = task_type.find_file(task, data, "test") if task.test_is_labelled else None
    if test and task_type.is_labelled(test, task):
        return {"test": test}
    files = {split: task_type.find_file(task, data, split) for split in task.dev_splits}
    found = {split: path for split, path in files.items() if path is not None}
    if not found:
        raise ValueError(f"{data}: no labelled test or dev file; name the file itself with `data`")
    if test:
        names = ", ".join(map(str, found.values()))
        print(f"{test}: no labels (column '{task.label}'): measured on {names}", file=sys.stderr)
    return found
