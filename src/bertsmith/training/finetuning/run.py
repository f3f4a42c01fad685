"""Fine-tuning: one model and labelled files in, a run directory out (paper A.3)."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import (
    atomic_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    write_json,
)
from bertsmith.base.settings import to_mapping
from bertsmith.base.terminal import counted
from bertsmith.checkpoints.config_json import read_extra_config
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RESULT_FILE, RunFolder, describe
from bertsmith.checkpoints.tensors import weight_files
from bertsmith.tasks.metrics import confusion
from bertsmith.text.readers.tables import digest
from bertsmith.training import engine as engines
from bertsmith.training.checkpointing import checkpoints_in
from bertsmith.training.finetuning.search_space import MACHINE
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task import is_better
from bertsmith.training.finetuning.trainer import Job, Trained, outputs_of
from bertsmith.training.loop.log import read_log

SHOWN_EXAMPLES = 40  # wrong and uncertain examples kept for the report
SCORES_FILE = "dev_scores.json"


def summary(job: Job, trained: Trained, seed: int) -> dict[str, Any]:
    """What result.json says of the training."""
    model_task = trained.judged.model_task
    records = _records(job, trained)
    return {
        "metrics": trained.judged.figures,
        "undefined": trained.judged.undefined,
        "main_metric": job.metric,
        "labels": list(model_task.label_names),
        **confusion(records, model_task.label_names),
        "best_seed": seed,
        "best_step": trained.best_step,
        "steps": trained.steps,
        "decision": model_task.decision,
        "train_examples": len(job.train_data),
        "dev_examples": len(job.dev[0].data),
        "cut_examples": job.train.num_truncated,
        "examples": telling_examples(records, model_task.label_names),
    }


def write_trained(
    job: Job, folder: Path, settings: FinetuneSettings, trained: Trained, log: Path
) -> None:
    """The model, its answers on dev and its log, in a folder that is whole or absent.

    Errors: RuntimeError when the model that was written does not give what was measured.
    """
    model_task, task_type = trained.judged.model_task, job.task_type
    task = model_task.task
    columns = {"text": task.text, "text_pair": task.text_pair, "label": task.label}
    extra = {  # also of a copy without run.json
        "task": task.name,
        "kind": task_type.name,
        **columns,
        "separator": task.separator,
        "options": list(task.options),
        "metrics": list(task.metrics),
        **asdict(model_task.layout),
        "decision": model_task.decision,
    }
    head = {
        "task": model_task.task.name,
        "kind": task_type.name,
        "metrics": list(model_task.task.metrics),
    }
    labels = {"labels": list(model_task.label_names)}
    with atomic_folder(folder) as temporary:
        save_model(
            trained.model,
            job.tokenizer,
            temporary,
            label_names=model_task.label_names or None,
            extra_config=extra,
            problem_type=task_type.problem_type,
        )
        _check_written(job, temporary, settings, trained)
        examples = _records(job, trained)
        write_json(temporary / SCORES_FILE, {**head, **labels, "examples": examples})
        shutil.copyfile(log, temporary / log.name)


def _records(job: Job, trained: Trained) -> list[dict[str, Any]]:
    judged = trained.judged
    return job.task_type.records(judged.answers, job.dev[0].data, judged.model_task)


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


KIND = "finetune"  # of the run
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

    A run that collapsed is told of and made again with the next seed that is not in use. One that
    was stopped goes on when it is asked for again: finished seeds stay, the seed that was under way
    goes on from its checkpoint. `searched` is what a sweep tried before, for the record.

    Errors: ValueError when `out` holds a run already, or an unfinished one of other settings, or
    another process writes one there; for seeds that would all be the same run. FloatingPointError
    when no seed came to its end, since a step was not finite.
    """
    run = RunFolder(out)
    run.check_free(KIND)
    check_seeds(settings, seeds)
    settings = job.settled(settings)
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    with run.held():
        run.check_free(KIND)  # again: another process may have been here meanwhile
        peak = engines.measure_peak(engine)
        _tell(plan(job, settings))
        record = _record(job, settings, seeds, command, data or {})
        _begin(run, record | {"machine": engines.machine(engine, peak)})
        result, best = _train_seeds(job, out, settings, seeds, peak)
        if searched:
            result["sweep"] = list(searched)
        run.publish(best)
        run.write_result(result)
        remove_folder(best)
    return result


def plan(job: Job, settings: FinetuneSettings) -> str:
    """A line on how much training the settings, which are settled, are.

    A step reads rows, which may be windows of the examples.
    """
    epochs, steps = settings.epochs, math.ceil(len(job.train.unit_lengths) / settings.batch)
    times = {0: "at the end", 1: "once an epoch"}
    often = times.get(settings.evaluations, f"{settings.evaluations} times an epoch")
    return (
        f"finetune: {counted(epochs, 'epoch')} of {counted(steps, 'step')}, {epochs * steps:,} in "
        f"all; batch {settings.batch}, rate {settings.rate:.3g}; dev measured {often}"
    )


def check_seeds(settings: FinetuneSettings, seeds: Sequence[int]) -> None:
    """Errors: ValueError for seeds that would all be the same run."""
    if len(seeds) > 1 and settings.seeds(0) == settings.seeds(1):
        raise ValueError("seeds for init, order and dropout are all set: --seeds has no effect")


def _begin(run: RunFolder, record: dict[str, Any]) -> None:
    """Go on with the unfinished run that `record` describes, or begin it.

    Errors: ValueError when what was trained here has other settings.
    """
    remove_leftovers(run.path)
    there, here = begun_settings(run), json.loads(json.dumps(record["settings"]))
    if there is None:
        shutil.rmtree(run.path / "seeds", ignore_errors=True)
        run.write_settings(record)
        return
    # numbers may differ a little on another machine, and seeds may be added
    free = (*MACHINE, "seeds")
    if other := [name for name in here if name not in free and there.get(name) != here[name]]:
        told = ", ".join(f"{name} {there.get(name)}, not {here[name]}" for name in other)
        raise ValueError(
            f"{run.path} holds an unfinished run of other settings ({told}): repeat its command to "
            "go on with it, remove it, or name another --out"
        )
    _tell(f"{run.path}: going on with the run that was stopped here")
    run.write_settings(record)


def begun_settings(run: RunFolder) -> dict[str, Any] | None:
    """The settings of a run that has something of its seeds; None: there is nothing to go on with.

    Of a run that has ended, too.
    """
    folders = sorted((run.path / "seeds").glob("*"))
    if not any((part / RESULT_FILE).exists() or checkpoints_in(part) for part in folders):
        return None
    return run.settings()["settings"]


def _train_seeds(
    job: Job, out: Path, settings: FinetuneSettings, seeds: Sequence[int], peak: float
) -> tuple[dict[str, Any], Path]:
    """(what result.json says, the folder of the best seed's model)."""
    figures: dict[str, dict[str, float]] = {}
    restarts: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    spare = itertools.count(max(seeds) + 1)
    for wanted in seeds:
        seed, found, collapsed = _until_sound(job, out, settings, wanted, spare, peak, best)
        restarts += collapsed
        if not found["metrics"]:
            continue  # no step of it could be finite, of which a line has told
        figures[str(seed)] = found["metrics"]
        for name, reason in found["undefined"].items():
            _tell(f"warning: seed {seed}: {name} has no value on dev and counts 0: {reason}")
        if best is None or is_better(found["metrics"], best["metrics"], job.metric):
            if best is not None:
                remove_folder(_model_of(out, best["best_seed"]))
            best = found
    if best is None:
        shutil.rmtree(out / "seeds")  # other settings may be tried here
        raise FloatingPointError(restarts[-1]["reason"])
    model = _model_of(out, seed := best["best_seed"])
    if not model.exists():  # of a run that was stopped: another seed, now left out, was the best
        (out / "seeds" / str(seed) / RESULT_FILE).unlink()
        best = _seed(job, out, settings, seed, peak, None, is_last=True)
        figures[str(seed)] = best["metrics"]
    _tidy(out, {*figures, *(str(row["seed"]) for row in restarts)}, model)
    result = {name: value for name, value in best.items() if name != "collapsed"}
    return result | {"seeds": figures, "restarts": restarts}, model


def _tidy(out: Path, used: set[str], best: Path) -> None:
    """Leave of the seeds what a finished run has, and the best model."""
    for folder in [path for path in (out / "seeds").iterdir() if path.is_dir()]:
        if folder.name not in used:  # of a run that was stopped, with other seeds
            shutil.rmtree(folder)
            continue
        for part in (*checkpoints_in(folder), folder / "model"):
            if part != best:
                remove_folder(part)
        remove_leftovers(folder)


def _model_of(out: Path, seed: int) -> Path:
    """Where a seed's model is while it is the best so far."""
    return out / "seeds" / str(seed) / "model"


def _until_sound(
    job: Job,
    out: Path,
    settings: FinetuneSettings,
    wanted: int,
    spare: Iterator[int],
    peak: float,
    best: dict[str, Any] | None,
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """(seed, what came of it, runs that collapsed): the first that did not, or the last try."""
    # random weights may have nothing better to give, and without a part left to it a seed is none
    is_last = job.start.from_scratch or settings.seeds(0) == settings.seeds(1)
    tries = 1 if is_last else settings.restarts + 1
    collapsed: list[dict[str, Any]] = []
    seed = wanted
    while True:
        is_last = len(collapsed) + 1 == tries
        found = _seed(job, out, settings, seed, peak, best, is_last)
        reason = found["collapsed"]
        if reason is None:
            return seed, found, collapsed
        collapsed.append({"seed": seed, "instead_of": wanted, "reason": reason})
        if is_last:
            _tell(f"warning: seed {seed} collapsed ({reason}): raise --epochs or lower --rate")
            return seed, found, collapsed
        again = next(spare)
        _tell(f"warning: seed {seed} collapsed ({reason}); again with seed {again}")
        seed = again


def _seed(
    job: Job,
    out: Path,
    settings: FinetuneSettings,
    seed: int,
    peak: float,
    best: dict[str, Any] | None,
    is_last: bool,
) -> dict[str, Any]:
    """Train with one seed, unless that was done before the run was stopped: what came of it.

    "metrics" are empty when a step was not finite. Its model is kept where it may be the best.
    """
    folder, model = out / "seeds" / str(seed), _model_of(out, seed)

    def is_kept(found: dict[str, Any]) -> bool:
        is_sound = found["collapsed"] is None or (is_last and bool(found["metrics"]))
        return is_sound and (not best or is_better(found["metrics"], best["metrics"], job.metric))

    if (folder / RESULT_FILE).exists():
        found = read_json(folder / RESULT_FILE)
        if "collapsed" in found:  # which earlier versions, that could not go on, did not write
            return found
    try:
        trained = job.run(settings, seed, folder, f"finetune seed {seed}", peak, True)
    except KeyboardInterrupt:
        _tell(f"seed {seed} was stopped: the same command goes on from its last checkpoint")
        raise
    except FloatingPointError as error:
        found = {"metrics": {}, "collapsed": str(error)}
    else:
        if settings.keep == "best":
            kept = f"kept step {trained.best_step:,} of {trained.steps:,}"
            _tell(f"finetune seed {seed}: {kept} ({job.told(trained.judged.figures)})")
        log = folder / "log.jsonl"
        found = summary(job, trained, seed)
        found["collapsed"] = collapse(job, trained, settings, log)
        if is_kept(found):
            write_trained(job, model, settings, trained, log)
    write_json(folder / RESULT_FILE, found)
    for checkpoint in checkpoints_in(folder):
        remove_folder(checkpoint)
    return found


def collapse(job: Job, trained: Trained, settings: FinetuneSettings, log: Path) -> str | None:
    """Why a run is worth nothing: its loss never left that of guessing by the labels' shares, or
    came near it and everything gets one answer (which alone may be right: of uneven classes).
    None: it is worth something.
    """
    constant = job.task_type.constant(trained.judged.answers, job.dev[0].data)
    plain = job.teacher is None and not settings.focal and settings.class_weights == "none"
    chance = job.task_type.chance_loss(job.train) if plain else None
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


def _record(
    job: Job,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    command: Sequence[str],
    data: dict[str, Any],
) -> dict[str, Any]:
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    model = job.fresh_model(settings, seeds[0])
    task = job.model_task.task
    described = {
        **to_mapping(replace(settings, max_length=job.model_task.layout.max_length)),
        **engine.settings(),
        "task": task.name,
        "task_kind": task.task_type,
        "text": task.text,
        "text_pair": task.text_pair,
        "label": task.label,
        "positive": task.positive,
        "separator": task.separator,
        "options": list(task.options),
        "metrics": list(task.metrics),
        "model": os.fspath(job.start.folder),
        "model_sha256": [digest(path) for path in weight_files(job.start.folder)],
        "from_scratch": job.start.from_scratch,
        "seeds": list(seeds),
        **data,
    }
    return describe(KIND, command, described, model)
