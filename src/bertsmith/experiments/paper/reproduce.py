"""Experiments from text and folders of tasks to tables: what is not there yet is computed.

OUT/cells/                          every piece of work, shared by all experiments
OUT/table5.md table5.html table5.json      what came out
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from bertsmith.base.files import write_json, write_text
from bertsmith.base.settings import group_values, nearest, to_mapping
from bertsmith.base.terminal import counted, duration
from bertsmith.experiments.paper.cells import Cell, compute, time_left
from bertsmith.experiments.paper.experiment import (
    LINEAGE,
    Column,
    Experiment,
    Variant,
    experiment_names,
    read_experiment,
)
from bertsmith.experiments.paper.page import markdown, page
from bertsmith.experiments.paper.verdicts import result_of
from bertsmith.experiments.paper.work import TaskData, Work, find_data
from bertsmith.experiments.settings import ReproduceSettings
from bertsmith.training.engine import choose_engine, measure_peak
from bertsmith.training.settings import Machine

ALL = "all"
ASSUMED_SHARE = 0.4  # of the peak, where no cell of a kind was measured; two cores had about that


def reproduce(settings: ReproduceSettings) -> list[Path]:
    """Compute what the experiments need and write their tables: the paths of the pages.

    Errors: ValueError for an unknown experiment, variant or task, an experiment without any of its
    tasks, an `out` within the text, a finished cell whose files were changed; KeyboardInterrupt
    when a signal asked to stop.
    """
    check_out(settings)
    plans = plans_of(settings)
    if settings.dry_run:
        print("\n".join(cost(plans, settings)))
        return []
    lacking = {name: cells_of(*plan) for name, plan in plans.items()}
    root, written, failed = settings.out / "cells", list[Path](), list[ValueError]()
    # all at once: where other processes hold what a table lacks, this one begins the next
    for _ in compute([*chain.from_iterable(lacking.values())], root):
        for name, cells in [*lacking.items()]:
            lacking[name] = [cell for cell in cells if cell.seconds(root) is None]
            if lacking[name]:
                continue
            del lacking[name]
            try:
                written.append(write_pages(name, *plans[name], settings))
            except ValueError as error:  # other tables do not wait for it
                print(f"{name}: {error}", file=sys.stderr)
                failed.append(error)
    if failed:
        raise failed[0]
    return written


def check_out(settings: ReproduceSettings) -> None:
    """Errors: ValueError for an `out` in a folder of text: what is written there would be text."""
    for path in settings.text:
        if path.is_dir() and settings.out.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{settings.out} lies in the text {path}: name an `out` outside of it")


def write_pages(name: str, experiment: Experiment, work: Work, settings: ReproduceSettings) -> Path:
    """NAME.json, NAME.html and NAME.md; the path of the last."""
    result = result_of(experiment, work) | {
        "about": experiment.about,
        "columns": experiment.columns,
        "settings": to_mapping(settings),
    }
    result["curves"] = curves(experiment, result["rows"])
    write_json(settings.out / f"{name}.json", result)
    write_text(settings.out / f"{name}.html", page(result))
    path = settings.out / f"{name}.md"
    write_text(path, markdown(result))
    print(f"{name}: written to {path}", file=sys.stderr)
    return path


def plans_of(settings: ReproduceSettings) -> dict[str, tuple[Experiment, Work]]:
    """The experiments that were asked for, by the name of their pages."""
    if settings.experiments != (ALL,):
        names = [Path(name).stem for name in settings.experiments]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two experiments are called {twice[0]}: rename a file")
        return {Path(name).stem: plan_of(name, settings) for name in settings.experiments}
    plans = {}
    for name in experiment_names():
        if name != LINEAGE:
            try:
                plans[name] = plan_of(name, settings)
            except NothingToMeasure as reason:
                print(f"{name}: left out: {reason}", file=sys.stderr)
    if not plans:
        raise ValueError("no table has anything to measure: the lines above say why")
    return plans


class NothingToMeasure(ValueError):
    """No column of an experiment is left."""


def plan_of(name: str, settings: ReproduceSettings) -> tuple[Experiment, Work]:
    """An experiment, with the user's models as rows of it, and what makes its cells."""
    experiment = read_experiment(name, settings.scale)
    rows = tuple(dict.fromkeys(one.features for one in experiment.variants))
    if settings.seeds:
        experiment = replace(experiment, scale=replace(experiment.scale, seeds=settings.seeds))
    data = task_data(name, experiment, settings)
    columns = tuple(
        column
        for column in chosen(experiment.columns, settings.tasks, name)
        if Column(column).is_perplexity or Column(column).task.name in data
    )
    if not columns:
        raise NothingToMeasure(f"none of its columns ({', '.join(experiment.columns)}) is left")
    names = chosen([one.name for one in experiment.variants], settings.variants, name)
    kept = [
        replace(one, columns=tuple(own))
        for one in experiment.variants
        if one.name in names and (own := [c for c in one.columns or columns if c in columns])
    ]
    if not kept:
        asked = f"none of the rows {', '.join(names)} has one of the columns {', '.join(columns)}"
        raise NothingToMeasure(f"{name}: {asked}")
    known = {one.name for one in kept}
    claims = [
        replace(one, columns=tuple(c for c in one.columns or columns if c in columns))
        for one in experiment.claims
        if {one.better, one.worse} <= known
    ]
    experiment = replace(
        experiment,
        columns=columns,
        variants=tuple(kept),
        claims=tuple(claim for claim in claims if claim.columns),
    )
    work = Work(
        scale_name=settings.scale,
        scale=experiment.scale,
        text=[one_spelling(path) for path in settings.text],
        data=data,
        rows=rows,
        points=experiment.points,
        root=settings.out.absolute() / "cells",
        machine=group_values(settings, Machine),
        workers=settings.workers,
    )
    return with_models(experiment, settings), work


def chosen(known: Sequence[str], asked: Sequence[str], experiment: str) -> list[str]:
    """The known ones that were asked for; () asks for all.

    Errors: NothingToMeasure for an unknown one, with the nearest.
    """
    for one in asked:
        if one not in known:
            raise NothingToMeasure(f"{experiment}: unknown '{one}': {nearest(one, known)}")
    return [*asked] or [*known]


def one_spelling(path: Path) -> Path:
    """The path from the root: an unfinished cell goes on however it is spelled. Links stay: the
    end of a name tells the kind of a file."""
    return Path(os.path.abspath(path))


def task_data(
    name: str, experiment: Experiment, settings: ReproduceSettings
) -> dict[str, TaskData]:
    """The tasks of the columns, by name; those without a folder are left out, and a line says so.

    Errors: ValueError where one that was asked for has none; NothingToMeasure where none has any.
    """
    asked = chosen(experiment.columns, settings.tasks, name)
    columns = [column for column in map(Column, asked) if not column.is_perplexity]
    tasks = {column.task.name: column.task for column in columns}
    if tasks and not settings.data.is_dir():
        raise ValueError(
            f"{settings.data}: no such folder; it has one for each task, such as SST-2"
        )
    data = one_spelling(settings.data)
    paths = {task: find_data(data, row) for task, row in tasks.items()}
    missing = ", ".join(task for task, path in paths.items() if path is None)
    if missing and (settings.tasks or (len(columns) == len(asked) and not any(paths.values()))):
        raise NothingToMeasure(f"{settings.data}: no folder of {missing}, which {name} measures")
    if missing:
        print(f"{name}: left out, without a folder in {settings.data}: {missing}", file=sys.stderr)
    return {
        task: TaskData(tasks[task], path, experiment.scale) for task, path in paths.items() if path
    }


def with_models(experiment: Experiment, settings: ReproduceSettings) -> Experiment:
    """With each of the user's models measured in every way in which a variant is; without a text
    these and the variants that are models alone.

    Errors: NothingToMeasure where nothing is left; ValueError where the experiment is about
    pre-training.
    """
    models = settings.models if experiment.models else ()
    if settings.models and not models and settings.experiments != (ALL,):
        raise ValueError(f"{experiment.title}: about pre-training: leave `models` out")
    ways: dict[str, Variant] = {}
    for one in experiment.variants:
        ways.setdefault(str((one.finetune, one.features, one.columns)), one)
    own = tuple(one for one in experiment.variants if settings.text or one.model)
    given = [
        replace(
            way,
            name=f"{Path(model).name} {way.name}" if len(ways) > 1 else Path(model).name,
            title=f"{Path(model).name}, {way.title}" if len(ways) > 1 else Path(model).name,
            model=model,
            paper={},
        )
        for model in models
        for way in ways.values()
    ]
    if not own and not given:
        either = " or `models`" if experiment.models else ""
        raise NothingToMeasure(f"{experiment.title}: name `text` to pre-train on{either}")
    kept = {one.name for one in own}
    claims = tuple(one for one in experiment.claims if {one.better, one.worse} <= kept)
    return replace(experiment, variants=(*own, *given), claims=claims)


def cells_of(experiment: Experiment, work: Work) -> list[Cell]:
    """The cells of all figures, row by row."""
    return [
        work.measurement(variant, column, seed)
        for variant in experiment.variants
        for column in experiment.columns_of(variant)
        for seed in range(1, experiment.scale.seeds + 1)
    ]


def curves(experiment: Experiment, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Variant -> (part of the pre-training, figures), in order, where there are points; a model
    that is there has no pre-training."""
    found: dict[str, Any] = {}
    made_here = [one for one in experiment.variants if not one.model]
    for variant in made_here if experiment.points else ():
        title = variant.title.rpartition(", ")[0]
        found.setdefault(title, []).append((variant.at, rows[variant.name]["figures"]))
    return found


def cost(plans: Mapping[str, tuple[Experiment, Work]], settings: ReproduceSettings) -> list[str]:
    """Lines that say what is left to compute, and about how long it takes on this machine."""
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    speed = ASSUMED_SHARE * measure_peak(engine)
    lines, cells = [], list[Cell]()
    root = settings.out / "cells"
    for name, (experiment, work) in plans.items():
        own = cells_of(experiment, work)
        lines.append(f"{name}: {_time(own, root, speed)}")
        cells += own
    if len(plans) > 1:
        lines.append(f"together, what they share once: {_time(cells, root, speed)}")
    return lines


def _time(cells: Sequence[Cell], root: Path, speed: float) -> str:
    kinds = time_left(cells, root, speed)
    total = sum(kind["seconds"] for kind in kinds.values())
    listed = ", ".join(
        f"{kind['left']} of {counted(kind['left'] + kind['done'], f'{name} cell')}"
        for name, kind in kinds.items()
    )
    flops = sum(kind["flops"] for kind in kinds.values())
    return f"{listed} left; about {flops:.1e} FLOPs, {duration(total)}"
