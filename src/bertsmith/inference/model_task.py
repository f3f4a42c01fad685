"""The task that a model folder was fine-tuned for, by run.json or, without one, config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_optional_json
from bertsmith.checkpoints.config_json import (
    CONFIG_FILE,
    LENGTH_FILE,
    SCORED_BY,
    TASK_KINDS,
    label_names,
    model_kind,
    read_config,
    read_extra_config,
    read_stored_config,
)
from bertsmith.checkpoints.run_folder import SETTINGS_FILE, RunFolder
from bertsmith.tasks.task import OWN_KINDS, TASKS, Task, own_task, stored_encoding
from bertsmith.text.tokenizer.files import TOKENIZER_CONFIG
from bertsmith.training.finetuning.task_types.base import ModelTask

HEAD_KINDS = {
    "TokenClassifier": "tag",
    "FrozenTagger": "tag",
    "SpanPredictor": "answer",
    "OptionScorer": "choice",
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
    head = model_kind(folder)
    if head not in TASK_KINDS:
        raise ValueError(f"{folder}: not a fine-tuned classifier: fine-tune the model first")
    names = tuple(label_names(folder)) or ("LABEL_0", "LABEL_1")  # as transformers without names
    problem = stored.get("problem_type")
    guessed = HEAD_KINDS.get(head) or PROBLEM_TYPES.get(str(problem))
    if guessed is None:
        # transformers' rule for a model that does not say
        guessed = "regress" if len(names) == 1 else "classify"
    task_type, settings = own.get("kind", guessed), record.get("settings", own)
    thresholds, ours = own.get("thresholds", {}), f"{folder / CONFIG_FILE}: bertsmith"
    if task_type not in OWN_KINDS:
        raise ValueError(f"{ours}: kind {task_type!r}: known are {', '.join(OWN_KINDS)}")
    if not _are_thresholds(thresholds, len(names)):
        raise ValueError(f"{ours}: thresholds {thresholds!r:.60}: not numbers, one a label")
    if task_type == "choice" and settings.get("task") not in TASKS and not settings.get("options"):
        settings = settings | {"options": UNNAMED}
    task = _task(task_type, settings, columns)
    with_names = task.task_type in ("classify", "multilabel", "tag")
    found = ModelTask(
        task,
        names if with_names else (),
        stored_encoding(own, read_config(folder).max_positions, ours),
        thresholds,
    )
    activation = None if record else cross_encoder_activation(folder)
    if activation is None:
        return found
    if task.text_pair is None:  # it reads pairs, whatever their columns are called
        found = replace(found, task=replace(task, text_pair="text_pair"))
    # a tokenizer of ours knows the model's positions, see `copy_similarity_training`
    length = read_optional_json(folder / LENGTH_FILE).get("max_seq_length")
    if length is None:
        length = read_optional_json(folder / TOKENIZER_CONFIG).get("model_max_length")
    limits = {} if length is None else {"max_length": min(length, found.encoding.max_length)}
    encoding = replace(found.encoding, **limits)
    if task.task_type != "regress":
        return replace(found, encoding=encoding)
    if (name := activation.rpartition(".")[2].lower()) not in ("identity", "sigmoid"):
        raise ValueError(
            f"{folder}: its scores are made by {activation}: known are Sigmoid, Identity"
        )
    return replace(found, encoding=encoding, score_activation=name)


def _are_thresholds(stored: Any, num_labels: int) -> bool:
    """True for {"null_threshold": number} or {"thresholds": [numbers]}, one or one a label."""
    if not isinstance(stored, dict):
        return False
    lists = [value if isinstance(value, list) else [value] for value in stored.values()]
    return all(
        len(values) in (1, num_labels) and all(isinstance(x, int | float) for x in values)
        for values in lists
    )


def cross_encoder_activation(folder: Path) -> str | None:
    """The function that makes a cross-encoder's scores, by sentence-transformers' name for it.

    It stands in a file of its own (version 6), in config.json (4, 5) or there under a long name
    (before 4). None: no cross-encoder. Errors: ValueError for one with a prompt before every pair.
    """
    path, stored = folder / "config_sentence_transformers.json", read_stored_config(folder)
    own = read_optional_json(path)
    if own.get("model_type") == "CrossEncoder":
        if name := own.get("default_prompt_name"):
            raise ValueError(f"{path}: default_prompt_name '{name}': pairs have no prompt here")
        return str(own.get("activation_fn") or "Sigmoid")
    newer, older = map(stored.get, SCORED_BY)
    inner = newer.get("activation_fn") if isinstance(newer, dict) else None
    found = inner or older
    return None if found is None else str(found)


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
