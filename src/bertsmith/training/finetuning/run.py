"""A fine-tuning run: a training a seed, and a run directory with the best model (paper A.3)."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import (
    atomic_folder,
    read_json,
    read_json_lines,
    remove_folder,
    remove_leftovers,
    write_json,
)
from bertsmith.base.settings import to_mapping
from bertsmith.base.terminal import counted
from bertsmith.checkpoints.config_json import read_extra_config
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RESULT_FILE, RunFolder, describe
from bertsmith.checkpoints.stored import weight_files
from bertsmith.tasks.metrics import confusion
from bertsmith.tasks.task import Task
from bertsmith.text.readers.tables import digest
from bertsmith.training import engine as engines
from bertsmith.training.checkpointing import checkpoints_in
from bertsmith.training.finetuning.search_space import MACHINE
from bertsmith.training.finetuning.settings import DROPOUTS, UNKNOWN, FinetuneSettings, Provenance
from bertsmith.training.finetuning.task import is_better
from bertsmith.training.finetuning.trainer import Trained, Trainer
from bertsmith.training.loop.step import LOWER_RATE, without_hint

KIND = "finetune"  # of the run
SHOWN_EXAMPLES = 40  # wrong and uncertain examples kept for the report
SCORES_FILE = "dev_scores.json"
# shares of the loss of guessing: above them a run has learned nothing, or hardly anything
AT_CHANCE, NEAR_CHANCE = 0.99, 0.9


def train_seeds(
    trainer: Trainer,
    out: Path,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    provenance: Provenance = UNKNOWN,
    searched: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Fine-tune once a seed; `out` gets the model that is best on dev, and every seed's metrics.

    A run that collapsed is repeated with the next seed that is not in use. A stopped run resumes
    when it is called again: finished seeds stay, the unfinished one goes on from its checkpoint.
    `searched` are the trials of a sweep, for result.json, which is returned.

    Errors: ValueError when `out` holds a run already, or an unfinished one of other settings, or
    another process writes one there; for seeds that would all be the same run. FloatingPointError
    when no seed came to its end, since a step was not finite.
    """
    run = RunFolder(out)
    run.check_free(KIND)
    check_seeds(settings, seeds)
    settings = trainer.with_defaults(settings)
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    fresh = trainer.fresh_model(settings, seeds[0])  # damaged weights leave no folder behind
    with run.locked():
        run.check_free(KIND)  # again: another process may have been here meanwhile
        peak = engines.measure_peak(engine)
        print(plan(trainer, settings), file=sys.stderr)
        described = {**_described(trainer, settings, engine, seeds), **provenance.data}
        machine = engines.machine(engine, peak)
        record = describe(KIND, provenance.command, described, fresh, machine=machine)
        del fresh
        _begin(run, record)
        result, best = SeedRuns(trainer, out / "seeds", settings, peak).train(seeds)
        if searched:
            result["sweep"] = list(searched)
        run.publish(best)
        run.write_result(result)
        remove_folder(best)
    return result


def plan(trainer: Trainer, settings: FinetuneSettings) -> str:
    """A log line on how much training the settings are."""
    epochs = settings.epochs
    steps = math.ceil(len(trainer.train.unit_lengths) / settings.batch_size)
    times = {0: "at the end", 1: "once an epoch"}
    often = times.get(settings.evals_per_epoch, f"{settings.evals_per_epoch} times an epoch")
    return (
        f"finetune: {counted(epochs, 'epoch')} of {counted(steps, 'step')}, {epochs * steps:,} in "
        f"all; batch {settings.batch_size}, rate {settings.learning_rate:.3g}; dev measured {often}"
    )


def check_seeds(settings: FinetuneSettings, seeds: Sequence[int]) -> None:
    """Refuse several seeds that would all be the same run. Errors: ValueError."""
    if len(seeds) > 1 and settings.part_seeds(0) == settings.part_seeds(1):
        raise ValueError("seeds for init, order and dropout are all set: `seeds` has no effect")


def _described(
    trainer: Trainer, settings: FinetuneSettings, engine: engines.Engine, seeds: Sequence[int]
) -> dict[str, Any]:
    task, folder = trainer.model_task.task, trainer.start.folder
    return {
        **to_mapping(replace(settings, max_length=trainer.model_task.encoding.max_length)),
        **engine.settings(),
        "task": task.name,
        "task_kind": task.task_type,
        **_columns(task),
        "model": os.fspath(folder),
        "model_sha256": [digest(path) for path in weight_files(folder)],
        "from_scratch": trainer.start.from_scratch,
        "seeds": list(seeds),
    }


def _columns(task: Task) -> dict[str, Any]:
    names = ("text", "text_pair", "label", "positive", "separator", "options", "metrics")
    return {name: getattr(task, name) for name in names}


def _begin(run: RunFolder, record: dict[str, Any]) -> None:
    """Resume the unfinished run that `record` describes, or begin it.

    Errors: ValueError for an unfinished run of other settings.
    """
    remove_leftovers(run.path)
    has_trained, here = begun_settings(run) is not None, json.loads(json.dumps(record["settings"]))
    if run.kind() is not None:
        there = run.settings()["settings"]
        # numbers may differ a little on another machine, seeds may be added, files may have moved:
        # what is in them is compared by `model_sha256` and `data_sha256`
        free = (*MACHINE, "seeds", "model", "data", "dev", "teacher", "teacher_data")
        other = [name for name in here if name not in free and there.get(name) != here[name]]
        listed = ", ".join(f"{name} {there.get(name)}, not {here[name]}" for name in other)
        listed = f" of other settings ({listed})" if other else ""
        if has_trained and other:
            raise ValueError(
                f"{run.path} holds an unfinished run{listed}: repeat its "
                "command to go on with it, remove it, or name another `out`"
            )
        anew = f"begins anew: the unfinished run{listed} that was here left no checkpoint"
        how = "going on with the run that was stopped here" if has_trained else anew
        print(f"{run.path}: {how}", file=sys.stderr)
    if not has_trained:
        shutil.rmtree(run.path / "seeds", ignore_errors=True)
    run.write_settings(record)


def begun_settings(run: RunFolder) -> dict[str, Any] | None:
    """The settings of a run, ended or not, with a trained seed or a checkpoint; else None."""
    folders = sorted((run.path / "seeds").glob("*"))
    if not any((part / RESULT_FILE).exists() or checkpoints_in(part) for part in folders):
        return None
    return run.settings()["settings"]


@dataclass(frozen=True)
class SeedRuns:
    """The trainings of a run, each in a folder of its own in `folder`.

    While they go on, the best one so far has its model there.
    """

    trainer: Trainer
    folder: Path
    settings: FinetuneSettings
    peak: float

    def train(self, seeds: Sequence[int]) -> tuple[dict[str, Any], Path]:
        """(The content of result.json, the folder of the best seed's model)."""
        metrics: dict[str, dict[str, float]] = {}
        restarts: list[dict[str, Any]] = []
        best: dict[str, Any] | None = None
        told: set[tuple[str, str]] = set()
        spare = itertools.count(max(seeds) + 1)
        for wanted in seeds:
            seed, found, collapsed = self._train_until_sound(wanted, spare, best)
            restarts += collapsed
            if not found["metrics"]:
                continue  # no step of it was finite, of which a line was printed
            metrics[str(seed)] = found["metrics"]
            for name, note in found["notes"].items() - told:
                _warn(f"seed {seed}: {name} on dev: {note}")
            told |= found["notes"].items()
            if self._is_better(found, best):
                if best is not None:
                    remove_folder(self._model(best["best_seed"]))
                best = found
        if best is None:
            shutil.rmtree(self.folder)  # other settings may be tried here
            raise FloatingPointError(f"{restarts[-1]['reason']}: {LOWER_RATE}")
        model = self._model(seed := best["best_seed"])
        if not model.exists():  # a seed that is left out since the run was stopped was the best
            (model.parent / RESULT_FILE).unlink()
            best = self._train(seed, None, is_last=True)
            metrics[str(seed)] = best["metrics"]
        self._tidy({*metrics, *(str(row["seed"]) for row in restarts)}, model)
        result = {name: value for name, value in best.items() if name != "collapsed"}
        return result | {"seeds": metrics, "restarts": restarts}, model

    def _is_better(self, found: dict[str, Any], best: dict[str, Any] | None) -> bool:
        return best is None or is_better(found["metrics"], best["metrics"], self.trainer.metric)

    def _model(self, seed: int) -> Path:
        return self.folder / str(seed) / "model"

    def _tidy(self, used: set[str], best: Path) -> None:
        """Leave the best model, and of each seed what a finished run keeps."""
        for folder in [path for path in self.folder.iterdir() if path.is_dir()]:
            if folder.name not in used:  # of a run that was stopped, with other seeds
                shutil.rmtree(folder)
                continue
            for part in (*checkpoints_in(folder), folder / "model"):
                if part != best:
                    remove_folder(part)
            remove_leftovers(folder)

    def _train_until_sound(
        self, wanted: int, spare: Iterator[int], best: dict[str, Any] | None
    ) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        """(Seed, its result, trainings that collapsed): the first sound one, or the last try."""
        settings, collapsed = self.settings, []
        # random weights may have nothing better to give; a seed that decides nothing is none
        fixed = settings.part_seeds(0) == settings.part_seeds(1)
        is_only = self.trainer.start.from_scratch or fixed
        tries, seed = 1 if is_only else settings.max_retries + 1, wanted
        while True:
            is_last = len(collapsed) + 1 == tries
            found = self._train(seed, best, is_last)
            reason = found["collapsed"]
            if reason is None:
                return seed, found, collapsed
            collapsed.append({"seed": seed, "instead_of": wanted, "reason": reason})
            if is_last:
                _warn(
                    f"seed {seed} collapsed ({reason}): raise the number of epochs or lower the"
                    " learning rate"
                )
                return seed, found, collapsed
            again = next(spare)
            _warn(f"seed {seed} collapsed ({reason}); again with seed {again}")
            seed = again

    def _train(self, seed: int, best: dict[str, Any] | None, is_last: bool) -> dict[str, Any]:
        """Train with one seed, unless it ended before the run was stopped: its result.

        "metrics" are empty when a step was not finite. Its model is kept if it may be the best.
        """
        trainer, settings, folder = self.trainer, self.settings, self.folder / str(seed)
        if (folder / RESULT_FILE).exists():
            return read_json(folder / RESULT_FILE)
        try:
            trained = trainer.run(settings, seed, folder, f"finetune seed {seed}", self.peak, True)
        except KeyboardInterrupt:
            stopped = f"seed {seed} was stopped: the same command goes on from its last checkpoint"
            print(stopped, file=sys.stderr)
            raise
        except FloatingPointError as error:
            found: dict[str, Any] = {"metrics": {}, "collapsed": without_hint(error)}
        else:
            if settings.keep == "best":
                kept = f"kept step {trained.best_step:,} of {trained.steps:,}"
                dev = trainer.describe(trained.evaluation.metrics)
                print(f"finetune seed {seed}: {kept} ({dev})", file=sys.stderr)
            log = folder / "log.jsonl"
            found = summary(trainer, trained, seed)
            found["collapsed"] = collapse(trainer, trained, settings, log)
            is_kept = found["collapsed"] is None or (is_last and bool(found["metrics"]))
            if is_kept and self._is_better(found, best):
                write_trained(trainer, self._model(seed), settings, trained, log)
        write_json(folder / RESULT_FILE, found)
        for checkpoint in checkpoints_in(folder):
            remove_folder(checkpoint)
        return found


def collapse(
    trainer: Trainer, trained: Trained, settings: FinetuneSettings, log: Path
) -> str | None:
    """The reason why a training is worth nothing; None: it is sound.

    Its loss never left that of guessing by the frequency of the labels, or came near it and
    everything gets one answer (which alone may be right: of uneven classes).
    """
    constant = trainer.task_type.constant_prediction(
        trained.evaluation.answers, trainer.dev[0].data
    )
    plain = (
        trainer.teacher is None
        and not (settings.focal_gamma or settings.lm_weight)
        and settings.class_weights == "none"
    )
    chance = trainer.task_type.baseline_loss(trainer.train) if plain else None
    lines = [line for line in read_json_lines(log) if line["event"] == "train"]
    late = [line["loss"] for line in lines if 2 * line["step"] > trained.steps]
    ratio = None if chance is None or len(late) < 2 else float(np.mean(late)) / chance
    if constant is not None and (ratio is None or ratio > NEAR_CHANCE):
        return f"every dev example gets '{constant}' after {trained.steps:,} steps"
    if ratio is None or ratio < AT_CHANCE:
        return None
    return f"its training loss of {np.mean(late):.3f} is that of guessing, {chance:.3f}"


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def summary(trainer: Trainer, trained: Trained, seed: int) -> dict[str, Any]:
    """A training for result.json."""
    model_task, records = trained.evaluation.model_task, _records(trainer, trained)
    return {
        "metrics": trained.evaluation.metrics,
        "notes": trained.evaluation.notes,
        "main_metric": trainer.metric,
        "labels": list(model_task.label_names),
        **confusion(records, model_task.label_names),
        "best_seed": seed,
        "best_step": trained.best_step,
        "steps": trained.steps,
        "flops": trained.flops,
        "thresholds": model_task.thresholds,
        "train_examples": len(trainer.train_data),
        "dev_examples": len(trainer.dev[0].data),
        "cut_examples": trainer.train.num_truncated,
        "examples": notable_examples(records, model_task.label_names),
    }


def write_trained(
    trainer: Trainer, folder: Path, settings: FinetuneSettings, trained: Trained, log: Path
) -> None:
    """Write the model, its answers on dev and its log; the folder appears whole or not at all.

    Errors: RuntimeError when the model that was written does not give what was measured.
    """
    model_task, task_type = trained.evaluation.model_task, trainer.task_type
    task, names = model_task.task, list(model_task.label_names)
    extra = {  # so that a copy without run.json knows it too
        "task": task.name,
        "kind": task_type.name,
        **{name: value for name, value in _columns(task).items() if name != "positive"},
        **asdict(model_task.encoding),
        "thresholds": model_task.thresholds,
    }
    with atomic_folder(folder) as temporary:
        save_model(
            trained.model,
            trainer.tokenizer,
            temporary,
            label_names=names or None,
            extra_config=extra,
            problem_type=task_type.problem_type,
        )
        _check_written(trainer, temporary, settings, trained)
        scores = {name: extra[name] for name in ("task", "kind", "metrics")}
        scores |= {"labels": names, "examples": _records(trainer, trained)}
        write_json(temporary / SCORES_FILE, scores)
        shutil.copyfile(log, temporary / log.name)


def _records(trainer: Trainer, trained: Trained) -> list[dict[str, Any]]:
    evaluation = trained.evaluation
    return trainer.task_type.to_records(
        evaluation.answers, trainer.dev[0].data, evaluation.model_task
    )


def _check_written(
    trainer: Trainer, folder: Path, settings: FinetuneSettings, trained: Trained
) -> None:
    config = trained.model.config
    dropout: Any = {name: getattr(config, name) for name in DROPOUTS}
    model = load_model(folder, type(trained.model), **dropout).model.to(trained.engine.device)
    outputs = replace(trained, model=model).outputs
    thresholds = read_extra_config(folder)["thresholds"]
    again = trainer.evaluate(outputs, settings, thresholds=thresholds)
    for name, value in trained.evaluation.metrics.items():
        if not np.isclose(again.metrics[name], value, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"{folder}: {name} was {value} in training, and is {again.metrics[name]} of the "
                "model that was written: the disk or memory is at fault"
            )


def notable_examples(
    records: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The examples a person should read: confidently wrong first, then the least certain ones.

    [] where the answers are not single classes.
    """
    if not names or any(not isinstance(r.get("label"), str) for r in records):
        return []
    # of what was answered, which a tuned threshold may make another than the most probable
    numbers = {name: number for number, name in enumerate(names)}
    confidence = np.array([r["probabilities"][numbers[r["predicted"]]] for r in records])
    wrong = np.flatnonzero([record["label"] != record["predicted"] for record in records])
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][: SHOWN_EXAMPLES // 2]
    unsure = np.argsort(confidence, kind="stable")[: SHOWN_EXAMPLES // 2]
    shown = ("text", "pair", "label", "predicted")
    return [
        {name: records[k][name] for name in shown if name in records[k]}
        | {"probability": round(float(confidence[k]), 4)}
        for k in dict.fromkeys([*wrong.tolist(), *unsure.tolist()])
    ]
