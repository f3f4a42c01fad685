"""Hyper-parameter search: a training a trial, all with one seed; the best on dev wins.

Trials are kept in an Optuna study, which several processes and machines can share: a file of
SQLite, or a database that a URL names. A killed process leaves a trial unfinished, which is given
up when the same process is started again; its setting is tried again. At the end of a search, when
what is left is in the hands of others who may be dead, it is tried once more, so processes that
share a study may do more than was asked by one trial each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bertsmith.base.settings import to_mapping
from bertsmith.tasks.metrics import METRICS
from bertsmith.text.readers.files import without_password
from bertsmith.training.finetuning.search_space import (
    MACHINE,
    Range,
    Search,
    Space,
    check_points,
    check_trials,
    expand_grid,
    shown,
)
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.trainer import Trainer
from bertsmith.training.loop.step import without_hint

LOCK_SECONDS = 60  # how long to wait for another process that writes to the same SQLite file
OPENINGS = 5  # tries to make a database that another process may be making at this moment


@dataclass(frozen=True)
class Attempt:
    """A setting that this process is to try."""

    number: int  # from 1, each once in a study, whatever process it is of
    finished: int  # trials that the study has finished before
    setting: dict[str, Any]
    trial: Any  # Optuna's


class Study:
    """The trials of one search.

    Optuna's own heartbeat and RetryFailedTrialCallback work in `Study.optimize` alone, and only
    after a grace period; its GridSampler draws a grid in random order. Here a restarted process
    knows its lost trial at once, and a search that was stopped draws as one that was not.
    """

    def __init__(
        self,
        store: str,
        name: str,
        space: Space,
        trials: int | None,
        owner: str,
        sampler_seed: int,
        less_is_better: bool = False,
    ) -> None:
        """`store` is a file or a database URL, `name` tells its studies apart. `trials` None: every
        setting of a space of choices; else so many, drawn by TPE (Bergstra et al. 2011, "Algorithms
        for hyper-parameter optimization") as a function of `sampler_seed`, the trial's number and
        the metrics known. `owner` is this process' name, the same when it is started again.

        Errors: ValueError as `check_trials`, or for a database that cannot be opened; OSError when
        it fails, now or later; ModuleNotFoundError that names the extra without Optuna.
        """
        check_trials(space, trials)
        try:
            import optuna
        except ModuleNotFoundError as error:
            message = "a sweep needs Optuna: pip install 'bertsmith[train]'"
            raise ModuleNotFoundError(message, name=error.name) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._failed = optuna, optuna.trial.TrialState.FAIL
        self._space, self._owner, self._sampler_seed = space, owner, sampler_seed
        self._grid = expand_grid(space) if trials is None else []
        self.total = trials or len(self._grid)
        self._shown = without_password(store)
        self._worst = float("inf") if less_is_better else float("-inf")
        with self._database():
            direction = "minimize" if less_is_better else "maximize"
            self._study = _open(self._optuna, store, name, direction)
            for trial in self._trials("RUNNING"):
                if trial.user_attrs.get("owner") == owner:
                    if not self._grid:  # which comes back by itself
                        fixed = trial.system_attrs.get("fixed_params", trial.params)
                        self._study.enqueue_trial(fixed)
                    self._study.tell(trial.number, state=self._failed)

    def next(self) -> Attempt | None:
        """The next setting to try, or None when the search is finished. Errors: OSError."""
        with self._database():
            if self._is_done():
                return None
            trial = self._study.ask()
            trial.set_user_attr("owner", self._owner)
            sampler = self._sampler(trial.number)
            if sampler is None:  # others were quicker
                self._study.tell(trial, state=self._failed)
                return None
            self._study.sampler = sampler
            setting = {name: _suggest(trial, name, of) for name, of in self._space.items()}
            return Attempt(trial.number + 1, len(self._trials("COMPLETE")), setting, trial)

    def finish(self, attempt: Attempt, value: float | None, figures: dict[str, Any]) -> None:
        """Store the value that decides, and all metrics; None: as bad as can be.

        Errors: ValueError when a second process took itself for this one, and gave the trial up.
        """
        with self._database():
            try:
                attempt.trial.set_user_attr("figures", figures)
            except self._optuna.exceptions.UpdateFinishedTrialError as error:
                raise ValueError(
                    f"trial {attempt.number} was given up by another process with the same `out`:"
                    " give each its own, and the same `storage`"
                ) from error
            self._study.tell(attempt.trial, self._worst if value is None else value)

    def tried(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(Setting, metrics) of every finished trial in the order of their numbers."""
        with self._database():
            return [(t.params, t.user_attrs["figures"]) for t in self._trials("COMPLETE")]

    def _is_done(self) -> bool:
        if self._grid:
            return not self._open_points()
        return len(self._trials("COMPLETE")) >= self.total

    def _trials(self, state: str) -> list[Any]:
        wanted = (self._optuna.trial.TrialState[state],)
        return self._study.get_trials(deepcopy=False, states=wanted)

    def _open_points(self) -> list[dict[str, Any]]:
        finished = [trial.params for trial in self._trials("COMPLETE")]
        return [point for point in self._grid if point not in finished]

    def _sampler(self, number: int) -> Any:
        """The sampler that draws a trial's setting; None: there is none left to try.

        Numbers are unique among processes, so that no two of them draw alike. Those of trials that
        were given up do not count: a search that was stopped draws as one that was not.
        """
        samplers = self._optuna.samplers
        if not self._grid:
            given_up = sum(trial.number < number for trial in self._trials("FAIL"))
            # NumPy's old generator takes a seed of 32 bits
            mixed = np.random.SeedSequence((self._sampler_seed, number - given_up))
            return samplers.TPESampler(seed=int(mixed.generate_state(1)[0]))
        if number < len(self._grid):
            point = self._grid[number]
        else:
            left = self._open_points()
            running = [trial.params for trial in self._trials("RUNNING")]
            idle = [point for point in left if point not in running] or left
            if not idle:
                return None
            point = idle[number % len(idle)]
        with warnings.catch_warnings():  # it is called experimental since 2020
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return samplers.PartialFixedSampler(point, samplers.RandomSampler())

    @contextlib.contextmanager
    def _database(self) -> Iterator[None]:
        """Put a database's failure into one line."""
        from sqlalchemy.exc import OperationalError, SQLAlchemyError

        try:
            yield
        except (OperationalError, self._optuna.exceptions.StorageInternalError) as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise OSError(f"{self._shown}: the database fails: {reason}") from error
        except SQLAlchemyError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"`storage={self._shown!r}`: no database for a study: {reason}: name a file that "
                "is not there yet, or a database URL"
            ) from error


def _open(optuna: ModuleType, store: str, name: str, direction: str) -> Any:
    """The study of that name, made where there is none."""
    from sqlalchemy.exc import SQLAlchemyError

    url = store
    if "://" not in store:
        path = Path(store).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{path}".replace("{", "{{").replace("}", "}}")  # Optuna formats it
    options = {"connect_args": {"timeout": LOCK_SECONDS}} if url.startswith("sqlite") else {}
    for opening in range(OPENINGS):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=options)
            return optuna.create_study(
                storage=storage, study_name=name, direction=direction, load_if_exists=True
            )
        except SQLAlchemyError:
            if opening + 1 == OPENINGS:
                raise
            time.sleep(0.2)
        except ImportError as error:
            driver = url.partition("://")[0]
            raise ValueError(
                f"`storage`: no Python package for '{driver}' databases here: install its driver"
            ) from error
    raise AssertionError


def _suggest(trial: Any, name: str, values: tuple[Any, ...] | Range) -> Any:
    if isinstance(values, tuple):
        return trial.suggest_categorical(name, values)
    suggest = trial.suggest_int if values.is_whole else trial.suggest_float
    return suggest(name, values.low, values.high, log=values.is_logarithmic)


def sweep(
    trainer: Trainer,
    settings: FinetuneSettings,
    search: Search,
    seed: int,
    folder: Path,
    begun: Mapping[str, Any] | None = None,
) -> tuple[FinetuneSettings, list[dict[str, Any]]]:
    """Try settings of a space: (the best on dev, every finished trial with its metrics).

    `seed` is that of the trainings, and of what is drawn from ranges. Logs of this process' trials
    go to `folder`/NUMBER; processes that share a study need folders of their own. A trial with a
    step that is not finite counts as the worst, and has a "failure" in place of metrics. Of equally
    good ones the first is taken. `begun` are the settings of a run whose seeds are under way: they
    stay the best, whatever other processes have found since.

    Errors: ValueError, before a trial is made, for a point of the space that settings or model
    cannot have, and for a run under way of another search or none; when no trial came to its end;
    those of `Study` and `Trainer.run`.
    """
    check_points(search.space, settings, trainer.start.check)
    if values := search.space.get("reinit_layers"):  # the model alone knows how many it has
        most = int(values.high) if isinstance(values, Range) else max(values)
        trainer.fresh_model(replace(settings, reinit_layers=most), seed)
    less_is_better = trainer.metric in METRICS and METRICS[trainer.metric].less_is_better
    study = Study(
        search.store or str(folder / "study.db"),
        study_name(trainer, settings, search.space, seed),
        search.space,
        search.trials,
        owner=f"{platform.node()}:{folder.resolve()}",
        sampler_seed=seed,
        less_is_better=less_is_better,
    )
    if finished := study.tried():
        told = f"sweep: {len(finished)} of {study.total} trials are finished already"
        print(told, file=sys.stderr)
    points = [point for point, _ in finished]
    own = [point for point in points if begun is not None and point.items() <= begun.items()]
    if begun is not None and not own:  # after all trials it would be refused, too
        raise ValueError(
            f"{folder.parent} holds an unfinished run of settings that this search has not tried: "
            "repeat its command to go on with it, remove it, or name another `out`"
        )
    while attempt := study.next():
        chosen, label = attempt.setting, f"sweep {attempt.finished + 1}/{study.total}"
        log = folder / str(attempt.number)
        try:
            trained = trainer.run(replace(settings, **chosen), seed, log, label)
        except FloatingPointError as error:
            study.finish(attempt, None, {"failure": without_hint(error)})
            print(f"{label}: {shown(chosen)}: {without_hint(error)}", file=sys.stderr)
        else:
            figures = {name: float(value) for name, value in trained.evaluation.metrics.items()}
            study.finish(attempt, figures[trainer.metric], figures)
            print(f"{label}: {shown(chosen)}: {trainer.describe(figures)}", file=sys.stderr)
    tried = study.tried()
    sound = [(setting, figures) for setting, figures in tried if trainer.metric in figures]
    if not sound:
        raise ValueError("`sweep`: no trial came to its end: search lower rates")
    sign = -1 if less_is_better else 1
    best, _ = max(sound, key=lambda trial: sign * trial[1][trainer.metric])
    best = own[0] if own else best
    return replace(settings, **best), [setting | figures for setting, figures in tried]


def study_name(trainer: Trainer, settings: FinetuneSettings, space: Space, seed: int) -> str:
    """A name by contents for a search: task, data, weights, teacher, seed, settings, space.

    The same command finds its study again, also on another machine; trials of different searches
    never mix, though they be in one database. A teacher is known by its weights or, without any, by
    its outputs, whose rounding differs from machine to machine.
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
    if trainer.teacher is not None:
        taught_by = trainer.teacher_sha256 or hashlib.sha256(trainer.teacher.tobytes()).hexdigest()
    task = trainer.model_task.task.name
    described = json.dumps([task, trainer.metric, seed, searched, fixed, taught_by], sort_keys=True)
    digest = hashlib.sha256(described.encode())
    for features in (trainer.train, *(split.features for split in trainer.dev)):
        for array in (features.ids, features.boundaries, features.labels):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    for weight in trainer.fresh_model(settings, seed).encoder.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return f"{task}-{digest.hexdigest()[:16]}"
