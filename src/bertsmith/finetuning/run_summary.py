"""What a training leaves in its run: figures, telling examples, the model and its answers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.checkpoints.folder import load_model, save_model
from bertsmith.checkpoints.model_config import read_extra_config
from bertsmith.files import atomic_folder, write_json
from bertsmith.finetuning.finetune_settings import FinetuneSettings
from bertsmith.finetuning.job import Job, Trained, outputs_of
from bertsmith.tasks.metrics import confusion

SHOWN_EXAMPLES = 40  # wrong and uncertain examples kept for the report
SCORES_FILE = "dev_scores.json"


def summary(job: Job, trained: Trained, seed: int) -> dict[str, Any]:
    """What result.json says of the training."""
    purpose = trained.judged.purpose
    records = _records(job, trained)
    return {
        "metrics": trained.judged.figures,
        "undefined": trained.judged.undefined,
        "main_metric": job.metric,
        "labels": list(purpose.label_names),
        **confusion(records, purpose.label_names),
        "best_seed": seed,
        "best_step": trained.best_step,
        "steps": trained.steps,
        "decision": purpose.decision,
        "train_examples": len(job.train_data),
        "dev_examples": len(job.dev[0].data),
        "cut_examples": job.train.num_truncated,
        "examples": telling_examples(records, purpose.label_names),
    }


def write_trained(
    job: Job, folder: Path, settings: FinetuneSettings, trained: Trained, log: Path
) -> None:
    """The model, its answers on dev and its log, in a folder that is whole or absent.

    Errors: RuntimeError when the model that was written does not give what was measured.
    """
    purpose, kind = trained.judged.purpose, job.kind
    task = purpose.task
    columns = {"text": task.text, "text_pair": task.text_pair, "label": task.label}
    extra = {  # also of a copy without run.json
        "task": task.name,
        "kind": kind.name,
        **columns,
        "separator": task.separator,
        "options": list(task.options),
        "metrics": list(task.metrics),
        **asdict(purpose.layout),
        "decision": purpose.decision,
    }
    head = {"task": purpose.task.name, "kind": kind.name, "metrics": list(purpose.task.metrics)}
    labels = {"labels": list(purpose.label_names)}
    with atomic_folder(folder) as temporary:
        save_model(
            trained.model,
            job.tokenizer,
            temporary,
            label_names=purpose.label_names or None,
            extra_config=extra,
            problem_type=kind.problem_type,
        )
        _check_written(job, temporary, settings, trained)
        examples = _records(job, trained)
        write_json(temporary / SCORES_FILE, {**head, **labels, "examples": examples})
        shutil.copyfile(log, temporary / log.name)


def _records(job: Job, trained: Trained) -> list[dict[str, Any]]:
    judged = trained.judged
    return job.kind.records(judged.answers, job.dev[0].data, judged.purpose)


def _check_written(job: Job, folder: Path, settings: FinetuneSettings, trained: Trained) -> None:
    config = trained.model.config
    same: dict[str, Any] = {
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }
    model = load_model(folder, type(trained.model), **same).model.to(trained.engine.device)
    decision = read_extra_config(folder)["decision"]
    again = job.judge(
        lambda rows: outputs_of(model, trained.engine, rows), settings, decision=decision
    )
    for name, value in trained.judged.figures.items():
        if not np.isclose(again.figures[name], value, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"{folder}: {name} was {value} in training, and is {again.figures[name]} of the "
                "model that was written: the disk or memory is at fault"
            )


def telling_examples(
    records: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The examples a person should read: confidently wrong first, then the least certain ones.

    [] where the answers are not single classes.
    """
    if not names or any(not isinstance(r.get("label"), str) for r in records):
        return []
    # of what was answered, which a tuned threshold may make another than the most probable
    numbers = {name: number for number, name in enumerate(names)}
    certain = np.array([r["probabilities"][numbers[r["predicted"]]] for r in records])
    wrong = np.flatnonzero([record["label"] != record["predicted"] for record in records])
    wrong = wrong[np.argsort(-certain[wrong], kind="stable")][: SHOWN_EXAMPLES // 2]
    unsure = np.argsort(certain, kind="stable")[: SHOWN_EXAMPLES // 2]
    chosen = dict.fromkeys([*wrong.tolist(), *unsure.tolist()])
    shown = ("text", "pair", "label", "predicted")
    return [
        {name: records[k][name] for name in shown if name in records[k]}
        | {"probability": round(float(certain[k]), 4)}
        for k in chosen
    ]
