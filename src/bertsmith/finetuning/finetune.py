"""Fine-tuning: one model and labelled files in, a run directory out (paper A.3)."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.checkpoints.folder import load_model, save_model
from bertsmith.checkpoints.run import RunFolder
from bertsmith.config import to_mapping
from bertsmith.files import write_json
from bertsmith.finetuning.fine_tuning import is_better
from bertsmith.finetuning.finetune_settings import FinetuneSettings
from bertsmith.finetuning.job import Job, Trained, outputs_of
from bertsmith.training import engine as engines
from bertsmith.training.run_log import read_log

KIND = "finetune"  # of the run
SHOWN_EXAMPLES = 40  # wrong and uncertain examples kept for the report
SCORES_FILE = "dev_scores.json"
# shares of the loss of guessing: above them a run has learned nothing, or hardly anything
AT_CHANCE, NEAR_CHANCE = 0.99, 0.9


def finetune(
    job: Job,
    out: Path,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    *,
    command: Sequence[str] = (),
    data: dict[str, Any] | None = None,
    searched: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Fine-tune once a seed; `out` holds the model that is best on dev, and every seed's figures.

    A run that collapsed is told of and made again with the next seed that is not in use. `searched`
    is what a sweep tried before, for the record.

    Errors: ValueError when `out` holds a run already or another process writes one there, for seeds
    that would all be the same run.
    """
    run = RunFolder(out)
    run.check_free(KIND)
    if len(seeds) > 1 and settings.seeds(0) == settings.seeds(1):
        raise ValueError("seeds for init, order and dropout are all set: --seeds has no effect")
    settings = job.settled(settings)
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    with run.held():
        run.check_free(KIND)  # again: another process may have been here meanwhile
        result = _train_seeds(job, run, settings, seeds, engine, command, data or {})
        if searched:
            result["sweep"] = list(searched)
        run.write_result(result)
    return result


def _train_seeds(
    job: Job,
    run: RunFolder,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    engine: engines.Engine,
    command: Sequence[str],
    data: dict[str, Any],
) -> dict[str, Any]:
    """Write the run but for its result, which is returned."""
    out = run.path
    shutil.rmtree(out / "seeds", ignore_errors=True)  # of a run that was not finished
    peak = engines.measure_peak(engine)
    record = _record(job, settings, seeds, command, data)
    run.write_settings({**record, "machine": engines.machine(engine, peak)})
    figures: dict[str, dict[str, float]] = {}
    restarts: list[dict[str, Any]] = []
    best: tuple[int, Trained] | None = None
    spare = itertools.count(max(seeds) + 1)
    for wanted in seeds:
        seed, trained, collapsed = _until_sound(job, out, settings, wanted, spare, peak)
        restarts += collapsed
        figures[str(seed)] = trained.judged.figures
        for name, reason in trained.judged.undefined.items():
            _tell(f"warning: seed {seed}: {name} has no value on dev and counts 0: {reason}")
        if best is None or is_better(figures[str(seed)], figures[str(best[0])], job.metric):
            best = seed, trained
    assert best is not None
    result = _write(job, out, settings, *best)
    return result | {"seeds": figures, "restarts": restarts}


def _until_sound(
    job: Job,
    out: Path,
    settings: FinetuneSettings,
    wanted: int,
    spare: Iterator[int],
    peak: float,
) -> tuple[int, Trained, list[dict[str, Any]]]:
    """(seed, model, runs that collapsed): the first run that did not collapse, or the last try."""
    # random weights may have nothing better to give, and without a part left to it a seed is none
    is_last = job.start.from_scratch or settings.seeds(0) == settings.seeds(1)
    tries = 1 if is_last else settings.restarts + 1
    collapsed: list[dict[str, Any]] = []
    seed = wanted
    while True:
        folder = out / "seeds" / str(seed)
        trained = job.run(settings, seed, folder, f"finetune seed {seed}", peak)
        figures = {"metrics": trained.judged.figures, "best_step": trained.best_step}
        write_json(folder / "result.json", figures)
        reason = collapse(job, trained, settings, folder / "log.jsonl")
        if reason is None:
            return seed, trained, collapsed
        collapsed.append({"seed": seed, "instead_of": wanted, "reason": reason})
        if len(collapsed) == tries:
            _tell(f"warning: seed {seed} collapsed ({reason}): raise --epochs or lower --rate")
            return seed, trained, collapsed
        again = next(spare)
        _tell(f"warning: seed {seed} collapsed ({reason}); again with seed {again}")
        seed = again


def collapse(job: Job, trained: Trained, settings: FinetuneSettings, log: Path) -> str | None:
    """Why a run is worth nothing: its loss never left that of guessing by the labels' shares, or
    came near it and everything gets one answer (which alone may be right: of uneven classes).
    None: it is worth something.
    """
    constant = job.kind.constant(trained.judged.answers, job.dev[0].data)
    plain = job.teacher is None and not settings.focal and settings.class_weights == "none"
    chance = job.kind.chance_loss(job.train) if plain else None
    lines = [line for line in read_log(log) if line["event"] == "train"]
    late = [line["loss"] for line in lines if 2 * line["step"] > trained.steps]
    share = None if chance is None or len(late) < 2 else float(np.mean(late)) / chance
    if constant is not None and (share is None or share > NEAR_CHANCE):
        return f"every dev example gets '{constant}' after {trained.steps:,} steps"
    if share is None or share < AT_CHANCE:
        return None
    return f"its training loss of {np.mean(late):.3f} is that of guessing, {chance:.3f}"


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def _write(
    job: Job, out: Path, settings: FinetuneSettings, seed: int, trained: Trained
) -> dict[str, Any]:
    """The model of the best seed with its log and dev answers; what result.json says of it.

    Errors: RuntimeError when the model that was written does not give what was measured.
    """
    purpose, dev = trained.judged.purpose, job.dev[0]
    extra = {
        "task": purpose.task.name,
        "kind": job.kind.name,
        **asdict(purpose.layout),
        "decision": purpose.decision,
    }
    save_model(
        trained.model,
        job.tokenizer,
        out,
        label_names=purpose.label_names or None,
        extra_config=extra,
        problem_type=job.kind.problem_type,
    )
    shutil.copyfile(out / "seeds" / str(seed) / "log.jsonl", out / "log.jsonl")
    _check_written(job, out, settings, trained)
    records = job.kind.records(trained.judged.answers, dev.data, purpose)
    head = {"task": purpose.task.name, "kind": job.kind.name, "metrics": list(purpose.task.metrics)}
    write_json(
        out / SCORES_FILE, {**head, "labels": list(purpose.label_names), "examples": records}
    )
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
        "dev_examples": len(dev.data),
        "cut_examples": job.train.num_truncated,
        "examples": telling_examples(records, purpose.label_names),
    }


def _check_written(job: Job, out: Path, settings: FinetuneSettings, trained: Trained) -> None:
    config = trained.model.config
    same: dict[str, Any] = {
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }
    model = load_model(out, type(trained.model), **same).model.to(trained.engine.device)
    again = job.judge(lambda rows: outputs_of(model, trained.engine, rows), settings)
    for name, value in trained.judged.figures.items():
        if not np.isclose(again.figures[name], value, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"{out}: {name} was {value} in training, and is {again.figures[name]} of the model "
                "that was written: the disk or memory is at fault"
            )


def _record(
    job: Job,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    command: Sequence[str],
    data: dict[str, Any],
) -> dict[str, Any]:
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    model = job.fresh_model(settings, seeds[0])
    task = job.purpose.task
    return {
        "kind": KIND,
        "command": list(command),
        "settings": {
            **to_mapping(replace(settings, max_length=job.purpose.layout.max_length)),
            **engine.settings(),
            "task": task.name,
            "task_kind": task.kind,
            "text": task.text,
            "text_pair": task.text_pair,
            "label": task.label,
            "separator": task.separator,
            "options": list(task.options),
            "metrics": list(task.metrics),
            "model": os.fspath(job.start.folder),
            "from_scratch": job.start.from_scratch,
            "seeds": list(seeds),
            **data,
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def confusion(records: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """{"confusion": counts [true class][predicted class]}, or {} where answers are not classes.

    >>> confusion([{"label": "b", "predicted": "a"}, {"label": "a", "predicted": "a"}], "ab")
    {'confusion': [[1, 0], [1, 0]]}
    """
    known = {name: number for number, name in enumerate(names)}
    if not known or not all(
        isinstance(r.get("label"), str) and isinstance(r["predicted"], str) for r in records
    ):
        return {}
    counts = np.zeros((len(known), len(known)), np.int64)
    for record in records:
        counts[known[record["label"]], known[record["predicted"]]] += 1
    return {"confusion": counts.tolist()}


def telling_examples(
    records: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The examples a person should read: confidently wrong first, then the least certain ones.

    [] where the answers are not single classes.
    """
    if not names or any(not isinstance(r.get("label"), str) for r in records):
        return []
    certain = np.array([max(record["probabilities"]) for record in records])
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
