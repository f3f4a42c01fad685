"""Search for settings: a training each, with one seed, the best on dev wins."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.config import to_mapping
from bertsmith.finetuning.fine_tuning import is_better
from bertsmith.finetuning.finetune_settings import FinetuneSettings
from bertsmith.finetuning.job import Job
from bertsmith.finetuning.search_space import MACHINE, Range, Space, check_points, shown
from bertsmith.finetuning.study import Study
from bertsmith.tasks.metrics import METRICS


def sweep(
    job: Job,
    settings: FinetuneSettings,
    space: Space,
    seed: int,
    folder: Path,
    *,
    trials: int | None = None,
    store: str | None = None,
    teacher: str = "",
    begun: Mapping[str, Any] | None = None,
) -> tuple[FinetuneSettings, list[dict[str, Any]]]:
    """Try settings of the space with one seed: (the best on dev, what was tried with its figures).

    The seed is that of the trainings, and of what is drawn from ranges.

    The search ends when the study has `trials` finished ones, by whatever process (None: every
    setting of a space of choices). `store` is the study's file or database URL, by default study.db
    in `folder`; the logs of this process' trials go to `folder`/NUMBER. Processes that share a
    study need folders of their own. A trial of which a step is not finite counts as the worst, and
    has a "failure" among what was tried. Of equally good ones the first is taken. `teacher` tells
    teachers apart, see `study_name`. `begun` are the settings of a run whose seeds are under way:
    they stay the best, whatever other processes have found since.

    Errors: ValueError, before a trial is made, for a point of the space that settings or model
    cannot have, and when no trial came to its end; those of `Study` and `Job.run`.
    """
    check_points(space, settings)
    _check_layers(job, settings, space, seed)
    study = Study(
        store or str(folder / "study.db"),
        study_name(job, settings, space, seed, teacher),
        space,
        trials,
        owner=f"{platform.node()}:{folder.resolve()}",
        sampler_seed=seed,
        less_is_better=job.metric in METRICS and METRICS[job.metric].less_is_better,
    )
    if finished := len(study.tried()):
        _tell(f"sweep: {finished} of {study.total} trials are finished already")
    while attempt := study.next():
        chosen, label = attempt.setting, f"sweep {attempt.finished + 1}/{study.total}"
        try:
            trained = job.run(
                replace(settings, **chosen), seed, folder / str(attempt.number), label
            )
        except FloatingPointError as error:
            study.finish(attempt, None, {"failure": str(error)})
            _tell(f"{label}: {shown(chosen)}: {error}")
        else:
            figures = {name: float(value) for name, value in trained.judged.figures.items()}
            study.finish(attempt, figures[job.metric], figures)
            _tell(f"{label}: {shown(chosen)}: {job.told(figures)}")
    tried = study.tried()
    best = _best(tried, job.metric)
    if begun is not None:
        same = [setting for setting, _ in tried if setting.items() <= begun.items()]
        best = same[0] if same else best
    return replace(settings, **best), [setting | figures for setting, figures in tried]


def _check_layers(job: Job, settings: FinetuneSettings, space: Space, seed: int) -> None:
    """Make the model with the most fresh layers: only it knows how many it has."""
    if values := space.get("reinit_layers"):
        most = int(values.high) if isinstance(values, Range) else max(values)
        job.fresh_model(replace(settings, reinit_layers=most), seed)


def study_name(
    job: Job, settings: FinetuneSettings, space: Space, seed: int, teacher: str = ""
) -> str:
    """A name by contents for what is searched: task, data, weights, teacher, seed, settings, space.

    The same command finds its study again, also on another machine; trials of different searches
    never mix, though they be in one database. `teacher` is a digest of the teacher's weights; where
    there is none it is made of its outputs, whose rounding differs from machine to machine.
    """
    searched = {
        name: asdict(values) if isinstance(values, Range) else list(values)
        for name, values in space.items()
    }
    fixed = {
        name: value
        for name, value in to_mapping(settings).items()
        if name not in space and name not in MACHINE
    }
    taught_by = None
    if job.teacher is not None:
        taught_by = teacher or hashlib.sha256(job.teacher.tobytes()).hexdigest()
    described = [job.purpose.task.name, job.metric, seed, searched, fixed, taught_by]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for features in (job.train, *(split.features for split in job.dev)):
        for array in (features.ids, features.boundaries, features.labels):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    for weight in job.fresh_model(settings, seed).encoder.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return f"{job.purpose.task.name}-{digest.hexdigest()[:16]}"


def _best(tried: Sequence[tuple[dict[str, Any], dict[str, Any]]], metric: str) -> dict[str, Any]:
    best: tuple[dict[str, Any], dict[str, Any]] | None = None
    for setting, figures in tried:
        if metric in figures and (best is None or is_better(figures, best[1], metric)):
            best = setting, figures
    if best is None:
        raise ValueError("--sweep: no trial came to its end: search lower rates")
    return best[0]


def _tell(message: str) -> None:
    print(message, file=sys.stderr)
