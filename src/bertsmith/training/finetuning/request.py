"""A fine-tuning as users ask for it: task, files, settings, search; and what cannot be asked for.

The fields of `Request` are the flags of `bertsmith finetune` and the keywords of
`bertsmith.finetune`. The checks here come before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from bertsmith.base.settings import Advanced, Count, Metavar, group_values
from bertsmith.tasks.task import OWN_KINDS, READ_BY, Task, find_task, own_task
from bertsmith.training.finetuning.search_space import (
    Search,
    check_points,
    check_trials,
    parse_space,
)
from bertsmith.training.finetuning.settings import FinetuneSettings


@dataclass(frozen=True, kw_only=True)
class OwnFiles:
    """Columns of the user's own files."""

    title = "your own files"

    text: str = "text"
    """Column of the text (answer: of the question)."""
    text_pair: str | None = None
    """Column of the second text (answer: of the context)."""
    label: str = "label"
    """Column of the label."""
    positive: str | None = None
    """classify: the class of two that f1 and a tuned threshold are about; default: the last."""
    separator: Annotated[str, Advanced] = ","
    """multilabel: what stands between the labels of a cell."""
    options: tuple[str, ...] = ()
    """choice: columns of the options, or the one column with a list of them."""
    skip_unlabelled: bool = False
    """Leave out the rows that have no label."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings to try first, and a teacher to learn from."""

    title = "search and teacher"

    sweep: Annotated[str | None, Metavar("SPACE")] = None
    """Search first: paper (batch size, learning rate and epochs), or such as
    "learning_rate=1e-5..1e-4 batch_size=16|32"."""
    trials: Annotated[int | None, Advanced, Count] = None
    """--sweep: settings to try; default: every one of a space of choices."""
    storage: Annotated[str | None, Advanced] = None
    """--sweep: Optuna study that processes may share: file (OUT/sweep/study.db) or database URL."""
    teacher: Annotated[str | None, Metavar("MODEL")] = None
    """A run (folder, hub name) fine-tuned for this task, whose answers are to be learned."""
    teacher_data: Annotated[Path | None, Advanced] = None
    """--teacher: file of texts without labels (.txt: one a line) to be learned as well."""


@dataclass(frozen=True, kw_only=True)
class Request(OwnFiles, SearchSettings, FinetuneSettings):
    """A task, its files, and how to train."""

    title = "more"

    task: str
    """A data set such as sst2, or what your own files are about."""
    model: str
    """A run, a Hugging Face folder or hub name."""
    data: Path
    """Training file, or folder with the data set's files."""
    out: Path
    """Run directory to write."""
    dev: Path | None = None
    """Dev file, or folder of one saved split. Default: a tenth of --data, where it has none."""
    seeds: str = "1"
    """Seeds, such as 1,2,3 or 1..5; the best on dev is kept."""
    from_scratch: bool = False
    """Same shape and vocabulary, random weights: what pre-training is worth."""
    given: tuple[str, ...] = ()

    @property
    def recipe(self) -> FinetuneSettings:
        """The settings of the training alone."""
        return group_values(self, FinetuneSettings)

    @property
    def search(self) -> Search:
        """The sweep; its space is empty where there is none. Errors: as `parse_space`."""
        space = parse_space(self.sweep) if self.sweep is not None else {}
        return Search(space, self.trials, self.storage)


def find_task_type(name: str) -> str:
    """The type of a TASK. Errors: ValueError for an unknown one, with the nearest."""
    return name if name in OWN_KINDS else find_task(name).task_type


def unread_settings(name: str) -> set[str]:
    """Settings without effect on a TASK."""
    task_type = find_task_type(name)
    unread = {setting for setting, readers in READ_BY.items() if task_type not in readers}
    return unread if name == task_type else unread | {field.name for field in fields(OwnFiles)}


def make_task(request: Request) -> Task:
    """The row of the data set, or one for the user's columns.

    Errors: ValueError for an unknown task, or columns named for a data set that knows its own.
    """
    if request.task in OWN_KINDS:
        own = vars(group_values(request, OwnFiles))
        skips = own.pop("skip_unlabelled")
        return replace(own_task(request.task, **own), skip_unlabelled=skips)
    task = find_task(request.task)
    own = (field.name for field in fields(OwnFiles))
    known = f"task {task.name} knows its columns, task {task.task_type} reads those that you name"
    refuse(own, request.given, f"for your own files; {known}")
    return task


def parse_seeds(text: str) -> list[int]:
    """Read seeds as users write them.

    Errors: ValueError for anything else than numbers, a range that goes downwards, a number that no
    generator takes, and a seed named twice.

    >>> parse_seeds("1,2,5") + parse_seeds("1..3")
    [1, 2, 5, 1, 2, 3]
    """
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        seeds = list(range(int(span[1]), int(span[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(seed) for seed in text.split(",")]
    else:
        raise ValueError(f"`seeds={text!r}`: write 1,2,3 or 1..3")
    if not seeds:
        raise ValueError(f"`seeds={text!r}`: a range goes upwards, such as 1..3")
    if max(seeds) >= 2**63:
        raise ValueError(f"`seeds={text!r}`: seeds are at most 2**63 - 1")
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ValueError(f"`seeds={text!r}`: {twice[0]} is named twice: leave one out")
    return seeds


def refuse(names: Iterable[str], given: Container[str], fault: str) -> None:
    """Refuse those of the settings that are given.

    >>> refuse(("lm_weight", "pool", "metric"), {"pool", "lm_weight"}, "leave it out")
    Traceback (most recent call last):
    ValueError: `lm_weight`, `pool`: leave it out
    """
    if wrong := [name for name in names if name in given]:
        listed = ", ".join(f"`{name}`" for name in wrong)
        raise ValueError(f"{listed}: {fault}")


def check_flags(request: Request) -> None:
    """Refuse seeds that cannot be read, settings without effect beside others, and a space with a
    point that cannot be; nothing heavy is imported for it.

    Errors: ValueError that names them.
    """
    parse_seeds(request.seeds)
    task = make_task(request)
    check_task_type(request, task.task_type)
    if task.text_pair is None and request.both_orders == "on":
        raise ValueError("`both_orders`: without effect on single texts: leave it out")
    search = request.search
    space, given = search.space, {*request.given, *search.space}
    refuse(space, request.given, "searched by `sweep`; leave it out")
    if request.sweep is None:
        refuse(("trials", "storage"), given, "only with `sweep`")
    if request.teacher is None:
        of_a_teacher = ("teacher_data", "distillation_weight", "temperature")
        refuse(of_a_teacher, given, "only with `teacher`")
    check_trials(space, search.trials)
    check_points(space, request)
    if request.from_scratch:
        of_a_start = ("max_retries", "reinit_layers")
        used = (name for name in of_a_start if name in space or getattr(request, name))
        refuse(used, given, "without effect with `from_scratch=True`: leave it out")
    if request.teacher is None:
        return
    is_all_of_loss = request.distillation_weight == 1 and "distillation_weight" not in space
    if request.teacher_data and not is_all_of_loss:
        raise ValueError("`teacher_data` has no labels: leave `distillation_weight` at 1")
    if is_all_of_loss:
        of_labels = ("class_weights", "focal_gamma")
        refuse(of_labels, given, "of the labels, unused at `distillation_weight=1`")


def check_folders(out: Path, data: Path) -> None:
    """Refuse to write the run among the user's own files. Errors: ValueError."""
    folder = data if data.is_dir() else data.parent
    if out.exists() and folder.exists() and out.samefile(folder):
        raise ValueError(f"`out={str(out)!r}` is the folder of the data: name another one")


def check_task_type(request: Request, task_type: str) -> None:
    """Refuse settings that this type of task does not read. Errors: ValueError that names them."""
    given = {*request.given, *request.search.space}
    check_reads(task_type, *given)
    if request.freeze_encoder:
        refuse(["attention_dropout"], given, "without effect with `freeze_encoder=True`")
    if task_type != "answer" and request.long_texts != "windows":
        refuse(("doc_stride", "pool"), given, "only with `long_texts='windows'`")


def check_reads(task_type: str, *given: str) -> None:
    """Refuse those of the settings that this type of task does not read. Errors: ValueError."""
    unread = (name for name, readers in READ_BY.items() if task_type not in readers)
    refuse(unread, given, f"without effect on a task of kind '{task_type}'")


def check_tokens_per_window(pieces: int, document_context: bool, *sets: Any) -> None:
    """Refuse to tag sentences together that have nothing to do with each other.

    Errors: ValueError where they stand alone in their rows, or no data set has documents.
    """
    if pieces and not document_context:
        raise ValueError("`tokens_per_window`: without effect with `document_context=False`")
    if pieces and not any(data.has_documents for data in sets):
        raise ValueError(
            f"`tokens_per_window={pieces}`: without effect: no -DOCSTART- line says which sentences"
            " belong together; leave it out"
        )
