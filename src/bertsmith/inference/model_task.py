"""The task that a model folder was fine-tuned for, by run.json or, without one, config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.checkpoints.config_json import (
    CONFIG_FILE,
    label_names,
    read_config,
    read_extra_config,
    read_stored_config,
)
from bertsmith.checkpoints.model_folder import model_class
from bertsmith.checkpoints.run_folder import SETTINGS_FILE, RunFolder
from bertsmith.model.heads import OptionScorer, SequenceClassifier, SpanPredictor, TokenClassifier
from bertsmith.model.lstm import FrozenTagger
from bertsmith.tasks.task import TASKS, Task, own_task, stored_encoding
from bertsmith.training.finetuning.task_types.base import ModelTask

HEAD_KINDS = {
    TokenClassifier: "tag",
    FrozenTagger: "tag",
    SpanPredictor: "answer",
    OptionScorer: "choice",
}
PROBLEM_TYPES = {"regression": "regress", "multi_label_classification": "multilabel"}
UNNAMED = ("",)  # columns of options


def read_model_task(folder: Path, **columns: str | None) -> ModelTask:
    """Task, classes, encoding and thresholds of a fine-tuned model that answers files.

    `columns` (text, text_pair, label) that are given go before those of training. Without a
    run.json, as of a model that transformers trained, its settings of the task (task, text, options
    ...) may stand in config.json under "bertsmith".

    Errors: ValueError as `task_of_texts`, and where nothing names the columns of options.
    """
    found = task_of_texts(folder, **columns)
    if found.task.options == UNNAMED:
        raise ValueError(
            f"{folder}: nothing says which columns its options are: write into {CONFIG_FILE} "
            '"bertsmith": {"task": "swag"} or {"text": "context", "options": ["first", "second"]}'
        )
    return found


def task_of_texts(folder: Path, **columns: str | None) -> ModelTask:
    """Do as `read_model_task`, also where nothing names the columns of options.

    Errors: ValueError for a folder whose model was not fine-tuned, and for a second text where it
    was trained on single ones.
    """
    stored, own = read_stored_config(folder), read_extra_config(folder)
    record = read_run(folder)
    if record.get("kind", "finetune") != "finetune":
        raise ValueError(
            f"{folder}: not a fine-tuned classifier but a run of '{record['kind']}': "
            "train a head on it with `bertsmith finetune`"
        )
    head = model_class(folder)
    if head is not SequenceClassifier and head not in HEAD_KINDS:
        raise ValueError(f"{folder}: not a fine-tuned classifier: fine-tune the model first")
    names = tuple(label_names(folder)) or ("LABEL_0", "LABEL_1")  # as transformers without names
    problem = stored.get("problem_type")
    guessed = HEAD_KINDS.get(head) or PROBLEM_TYPES.get(str(problem))
    if guessed is None:
        # transformers' rule for a model that does not say
        guessed = "regress" if len(names) == 1 else "classify"
    task_type, settings = own.get("kind", guessed), record.get("settings", own)
    if task_type == "choice" and settings.get("task") not in TASKS and not settings.get("options"):
        settings = settings | {"options": UNNAMED}
    task = _task(task_type, settings, columns)
    encoding = stored_encoding(own, read_config(folder).max_positions)
    with_names = task.task_type in ("classify", "multilabel", "tag")
    return ModelTask(task, names if with_names else (), encoding, own.get("thresholds", {}))


def _task(task_type: str, settings: dict[str, Any], columns: dict[str, str | None]) -> Task:
    given = {name: column for name, column in columns.items() if column is not None}
    published = TASKS.get(settings.get("task", ""))
    pair = settings.get("text_pair", "") if published is None else published.text_pair
    # questions may have been trained on JSON, which has no columns
    if "text_pair" in given and pair is None and task_type != "answer":
        raise ValueError(
            f"`text_pair={given['text_pair']!r}`: the model was trained without a second text:"
            " leave it out"
        )
    if published is not None:
        task = replace(published, **given)
    else:
        label = "answer" if task_type == "answer" else "label"
        names = {"text": "text", "text_pair": None, "label": label}
        names |= {name: settings[name] for name in names if name in settings} | given
        options, separator = tuple(settings.get("options", ())), settings.get("separator", ",")
        task = own_task(task_type, **names, separator=separator, options=options)
    return replace(task, metrics=tuple(settings.get("metrics", task.metrics)))


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a run directory; {} for a model folder without one."""
    return RunFolder(folder).settings() if (folder / SETTINGS_FILE).exists() else {}
