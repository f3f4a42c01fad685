"""The command finetune, and the flags that contradict each other or the task type."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, Suppress

from bertsmith.base.settings import Advanced, Metavar
from bertsmith.base.terminal import MANY_CASES, counted
from bertsmith.cli.flags import part_of
from bertsmith.cli.outputs import after_finetuning
from bertsmith.tasks.task import OWN_KINDS, find_task, own_task
from bertsmith.training.finetuning.search_space import (
    Space,
    check_points,
    check_trials,
    parse_space,
)
from bertsmith.training.finetuning.settings import FinetuneSettings

if TYPE_CHECKING:
    from bertsmith.tasks.tagging.sentences import Sentences
    from bertsmith.tasks.task import Task
    from bertsmith.training.finetuning.task_types.base import TaskType
    from bertsmith.training.finetuning.trainer import Job

TEXTS = ("classify", "regress", "multilabel", "choice")
READ_BY = {  # what not every kind of task reads
    "text_pair": (*TEXTS, "answer"),
    "positive": ("classify",),
    "separator": ("multilabel",),
    "skip_unlabelled": TEXTS,
    "long_texts": TEXTS,
    "pool": TEXTS,
    "stride": (*TEXTS, "answer"),
    "max_question": ("answer",),
    "max_answer": ("answer",),
    "document_context": ("tag",),
    "tagged_pieces": ("tag",),
    "frozen": ("tag",),
    "class_weights": ("classify", "multilabel", "tag"),
    "focal": ("classify", "multilabel", "choice", "tag", "answer"),
    "tune_thresholds": ("classify", "multilabel"),
    "temperature": ("classify", "multilabel", "choice"),
}


def check_flags(settings: Finetune, space: Space) -> None:
    """Refuse flags without effect, and a space with a point that cannot be.

    Errors: ValueError that names them.
    """
    if fixed := [name for name in space if name in settings.given]:
        raise ValueError(f"{flags_of(fixed)}: searched by --sweep; leave it out")
    needs = {
        "sweep": ("trials", "study"),
        "teacher": ("teacher_data", "teacher_share", "temperature"),
    }
    for flag, names in needs.items():
        alone = [name for name in names if name in settings.given or name in space]
        if alone and getattr(settings, flag) is None:
            raise ValueError(f"{flags_of(alone)}: only with --{flag}")
    check_trials(space, settings.trials)
    check_points(space, settings)
    of_a_start = [
        name
        for name in ("restarts", "reinit_layers")
        if name in space or (name in settings.given and getattr(settings, name))
    ]
    if of_a_start and settings.from_scratch:
        raise ValueError(
            f"{flags_of(of_a_start)}: without effect with --from-scratch: leave it out"
        )
    if settings.teacher is None:
        return
    all_of_teacher = settings.teacher_share == 1 and "teacher_share" not in space
    if settings.teacher_data and not all_of_teacher:
        raise ValueError("--teacher-data has no labels: leave --teacher-share at 1")
    of_labels = [
        name for name in ("class_weights", "focal") if name in settings.given or name in space
    ]
    if of_labels and all_of_teacher:
        raise ValueError(f"{flags_of(of_labels)}: of the labels, unused at --teacher-share 1")


def check_folders(out: Path, data: Path) -> None:
    """Errors: ValueError where the run would lie among the user's own files."""
    folder = data if data.is_dir() else data.parent
    if out.exists() and folder.exists() and out.samefile(folder):
        raise ValueError(f"--out {out} is the folder of the data: name another one")


def check_machine(settings: Finetune, default_length: int, model: Path) -> None:
    """Refuse what no training can be, before much data is read.

    Errors: ValueError for a device, precision or number of threads that this machine does not have,
    and for rows longer than the model knows.
    """
    from bertsmith.checkpoints.config_json import read_config
    from bertsmith.training.engine import choose_engine

    choose_engine(settings.device, settings.precision, settings.threads)
    settings.layout(default_length, read_config(model).max_positions)


def check_kind(settings: Finetune, space: Space, task_type: str) -> None:
    """Refuse flags that this kind of task does not read. Errors: ValueError that names them."""
    given = {*settings.given, *space}
    check_reads(task_type, *given)
    if settings.frozen and "attention_dropout" in given:
        raise ValueError("--attention-dropout: without effect with --frozen")
    alone = [name for name in ("stride", "pool") if name in given]
    if alone and task_type != "answer" and settings.long_texts != "windows":
        raise ValueError(f"{flags_of(alone)}: only with --long-texts windows")


def check_reads(task_type: str, *given: str) -> None:
    """Errors: ValueError that names those of the settings which this kind of task does not read."""
    if wrong := [
        name
        for name, task_types in READ_BY.items()
        if name in given and task_type not in task_types
    ]:
        raise ValueError(f"{flags_of(wrong)}: without effect on a task of kind '{task_type}'")


def check_tagged_pieces(pieces: int, document_context: bool, *sets: Sentences) -> None:
    """Refuse to tag sentences together that have nothing to do with each other.

    Errors: ValueError where they stand alone in their rows, or no data set has documents.
    """
    if pieces and not document_context:
        raise ValueError("--tagged-pieces: without effect with --no-document-context")
    if pieces and not any(data.has_documents for data in sets):
        raise ValueError(
            f"--tagged-pieces {pieces}: without effect: no -DOCSTART- line says which sentences"
            " belong together; leave it out"
        )


def flags_of(names: list[str]) -> str:
    """Settings as flags.

    >>> flags_of(["teacher_data", "focal"])
    '--teacher-data, --focal'
    """
    return ", ".join("--" + name.replace("_", "-") for name in names)


DEV_SHARE, DEV_SEED = 0.1, 0  # of a training set that comes without a dev file
OWN_FLAGS = ("text", "text_pair", "label", "positive", "separator", "options", "skip_unlabelled")


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
class Search:
    """Settings to try first, and a teacher to learn from."""

    title = "search and teacher"

    sweep: Annotated[str | None, Metavar("SPACE")] = None
    """Search first: paper (batch x rate x epochs), or such as "rate=1e-5..1e-4 batch=16|32"."""
    trials: Annotated[int | None, Advanced] = None
    """--sweep: settings to try; default: every one of a space of choices."""
    study: Annotated[str | None, Advanced] = None
    """--sweep: Optuna study that processes may share: file (OUT/sweep/study.db) or database URL."""
    teacher: Annotated[str | None, Metavar("MODEL")] = None
    """A run (folder, hub name) fine-tuned for this task, whose answers are to be learned."""
    teacher_data: Annotated[Path | None, Advanced] = None
    """--teacher: file of texts without labels (.txt: one a line) to be learned as well."""


@dataclass(frozen=True, kw_only=True)
class Finetune(OwnFiles, Search, FinetuneSettings):
    """Train a model for a task on top of a pre-trained one.

    Examples:
      bertsmith finetune sst2 --model run --data glue/SST-2 --out sst2
      bertsmith finetune mrpc --model run --data glue/MRPC --out mrpc --seeds 1..5
      bertsmith finetune classify --model run --data mail.csv --text body --label queue --out mail
      bertsmith finetune multilabel --model run --data films.csv --text plot --label genre --out o
      bertsmith finetune ner --model run --data conll2003 --out ner
      bertsmith finetune squad2 --model run --data squad --out squad
      bertsmith finetune rte --model run --data glue/RTE --out rte --sweep paper --seeds 1..5
      bertsmith finetune sst2 --model small --data glue/SST-2 --out small-sst2 --teacher sst2

    TASK is a data set (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, squad1, squad2, swag,
    hellaswag, codah, ner: docs/reference/tasks.md), or what your own files are about: classify (a
    class), regress (a number), multilabel (any number of labels), choice (one of several options),
    tag (a tag a word), answer (questions about texts). --data is a training file, or a folder with
    train and dev files. Without a dev file a tenth is split off, at least one of each class. A run
    that was stopped goes on by the same command.
    """

    common = ("seeds", "epochs", "dev", "from_scratch")

    task: Positional[str]
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
    """Seeds, such as 1,2,3 or 1..5; the model kept is the best on dev."""
    from_scratch: bool = False
    """Same shape and vocabulary, random weights: what pre-training is worth."""
    given: Suppress[tuple[str, ...]] = ()

    @classmethod
    def check_first(cls, words: Sequence[str]) -> None:
        """Refuse a misspelt TASK before anything else. Errors: ValueError."""
        if words and not words[0].startswith("-"):
            task_type_of(words[0])

    @classmethod
    def not_read(cls, words: Sequence[str]) -> set[str]:
        """Flags without effect on the TASK among the words."""
        if not words or words[0].startswith("-"):
            return set()
        task_type = task_type_of(words[0])
        others = {name for name, task_types in READ_BY.items() if task_type not in task_types}
        return others if words[0] == task_type else others | {*OWN_FLAGS}


def run_finetune(settings: Finetune) -> int:
    seeds = parse_seeds(settings.seeds)
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.checkpoints.run_folder import RunFolder
    from bertsmith.checkpoints.tensors import weight_files
    from bertsmith.cli.outputs import check_folder
    from bertsmith.tasks.metrics import check_two_classes
    from bertsmith.text.readers.tables import digest
    from bertsmith.training.finetuning.run import KIND, begun_settings, check_seeds, finetune
    from bertsmith.training.finetuning.sweep import sweep
    from bertsmith.training.finetuning.task_types import TASK_TYPES
    from bertsmith.training.finetuning.trainer import Job, Start, with_metric

    space = parse_space(settings.sweep) if settings.sweep is not None else {}
    check_flags(settings, space)
    check_seeds(part_of(settings, FinetuneSettings), seeds)
    check_folder(settings.out)
    start = Start(open_model_folder(settings.model), settings.from_scratch)
    RunFolder(settings.out).check_free(KIND)
    check_folders(settings.out, settings.data)
    task = dataclasses.replace(task_of(settings), skip_unlabelled=settings.skip_unlabelled)
    check_kind(settings, space, task.task_type)
    task_type = TASK_TYPES[task.task_type]
    check_machine(settings, task_type.default_length, start.folder)
    train, dev, files = read_data(task_type, task, settings.data, settings.dev)
    if "tagged_pieces" in settings.given:
        check_tagged_pieces(settings.tagged_pieces, settings.document_context, train, *dev.values())
    names = task_type.label_names(train)
    task = with_metric(task, settings.metric, names)
    if task.task_type == "classify" and (settings.tune_thresholds or "tune_thresholds" in space):
        check_two_classes(names)
    if task.main_metric == "f1" and task.name == "classify" and settings.positive is None:
        print(f"f1 is that of '{names[1]}': --positive names the other", file=sys.stderr)
    print(task_type.summarise(train, next(iter(dev.values()))), file=sys.stderr)
    recipe = part_of(settings, FinetuneSettings)
    outputs, teacher = None, ""
    if settings.teacher is not None:
        folder = open_model_folder(settings.teacher)
        train, outputs = ask_teacher(settings, folder, task, train)
        files["data_sha256"]["teacher"] = teacher = " ".join(map(digest, weight_files(folder)))
        files |= {"teacher": settings.teacher, "teacher_data": str(settings.teacher_data or "")}
        if settings.teacher_data:
            files["data_sha256"]["teacher_data"] = digest(settings.teacher_data)
    job = Job.prepare(start, task, train, dev, recipe, outputs)
    _tell_what_is_lost(job, train)
    searched: list[dict[str, Any]] = []
    if space:
        folder, trials, store = settings.out / "sweep", settings.trials, settings.study
        shared: dict[str, Any] = {"trials": trials, "store": store, "teacher": teacher}
        begun = begun_settings(RunFolder(settings.out))
        recipe, searched = sweep(job, recipe, space, seeds[0], folder, **shared, begun=begun)
    origin: dict[str, Any] = {"command": ["bertsmith", *sys.argv[1:]], "data": files}
    result = finetune(job, settings.out, recipe, seeds, **origin, searched=searched)
    show(result["seeds"], result["dev_examples"])
    kept = f"seed {result['best_seed']} after step {result['best_step']:,}"
    print(f"{settings.out}: the model of {kept} of {result['steps']:,}, {why_kept(recipe, seeds)}")
    print(after_finetuning(settings.out, task.task_type))
    return 0


def _tell_what_is_lost(job: Job, train: Any) -> None:
    """Texts that are cut or cost several rows, capitals that the model does not see."""
    from bertsmith.tasks.tagging.summary import case_warning

    if note := job.train.long_note(job.model_task.layout):
        remedy = (
            f": {job.train.long_remedy(job.model_task.layout)}" if job.train.num_truncated else ""
        )
        print(f"train: {note}{remedy}", file=sys.stderr)
    is_tag = job.task_type.name == "tag"
    if is_tag and (warning := case_warning(train, job.tokenizer.normalization)):
        print(warning, file=sys.stderr)


def show(seeds: Mapping[str, Mapping[str, float]], num_dev: int) -> None:
    """Print a line a seed, and one for all; with the number of dev examples where it is small."""
    beside = f" ({counted(num_dev, 'dev example')})" if num_dev < MANY_CASES else ""
    for seed, figures in seeds.items():
        told = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(f"seed {seed}: {told}{beside}")
    if len(seeds) > 1:
        print(f"{seeds_line(list(seeds.values()))}{beside}")


def seeds_line(figures: Sequence[Mapping[str, float]]) -> str:
    """Mean, standard deviation and Student's 95% interval of the mean of each metric.

    Two seeds have a mean only: an interval of theirs is 13 times as wide as their distance.

    >>> seeds_line([{"accuracy": 0.8}, {"accuracy": 0.9}, {"accuracy": 0.85}])
    'mean of 3 seeds: accuracy 0.8500 +- 0.0500 (95% interval 0.7258 to 0.9742)'
    >>> seeds_line([{"accuracy": 0.8}, {"accuracy": 0.9}])
    'mean of 2 seeds: accuracy 0.8500'
    """
    from bertsmith.reports.finetuning import FEWEST_SEEDS, student_interval
    from bertsmith.reports.runs import spread

    words = []
    for name in figures[0]:
        values = [seed[name] for seed in figures]
        mean, deviation = spread(values)
        words.append(f"{name} {mean:.4f}")
        if len(values) >= FEWEST_SEEDS:
            low, high = student_interval(values)
            words[-1] += f" +- {deviation:.4f} (95% interval {low:.4f} to {high:.4f})"
    return f"mean of {len(figures)} seeds: " + ", ".join(words)


def why_kept(recipe: FinetuneSettings, seeds: Sequence[int]) -> str:
    """
    >>> why_kept(FinetuneSettings(), [1]), why_kept(FinetuneSettings(keep="last"), [1])
    ('the best on dev', 'its last')
    """
    return "its last" if recipe.keep == "last" and len(seeds) == 1 else "the best on dev"


def ask_teacher(settings: Finetune, folder: Path, task: Task, train: Any) -> tuple[Any, Any]:
    """The training data, with --teacher-data behind it, and the teacher's outputs for all of it."""
    from bertsmith.inference.distillation import Teacher
    from bertsmith.training.engine import choose_engine
    from bertsmith.training.finetuning.task_types import TASK_TYPES

    engine = choose_engine(settings.device, settings.precision, settings.threads)
    names = TASK_TYPES[task.task_type].label_names(train)
    teacher = Teacher.open(folder, task, names, engine)
    return teacher.teach(train, settings.teacher_data)


def task_type_of(name: str) -> str:
    """What kind of task a TASK is. Errors: ValueError for an unknown one, with the nearest."""
    return name if name in OWN_KINDS else find_task(name).task_type


def task_of(settings: Finetune) -> Task:
    """The row of the data set, or one for the user's columns.

    Errors: ValueError for an unknown task, or columns named for a data set that knows its own.
    """
    if settings.task in OWN_KINDS:
        return own_task(
            settings.task,
            settings.text,
            settings.text_pair,
            settings.label,
            positive=settings.positive,
            separator=settings.separator,
            options=settings.options,
        )
    task = find_task(settings.task)
    if wrong := [name for name in OWN_FLAGS if name in settings.given]:
        raise ValueError(
            f"{flags_of(wrong)}: for your own files; task {task.name} knows its columns"
        )
    return task


def read_data(
    task_type: TaskType, task: Task, data: Path, dev: Path | None
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The training set, the dev sets by name, and what to record of their files.

    Errors: ValueError when `dev` is a folder, but for that of one split; those of `kind`.
    """
    from bertsmith.tasks.examples import single_file
    from bertsmith.text.readers.tables import digest

    dev = dev and (single_file(dev) or dev)
    if dev and dev.is_dir():
        raise ValueError(f"--dev {dev}: a folder: name the file in it")
    train_file = task_type.find_file(task, data, "train")
    assert train_file is not None
    train = task_type.read(train_file, task)
    found = {split: task_type.find_file(task, data, split) for split in task.dev_splits}
    files = {"dev": dev} if dev else {name: path for name, path in found.items() if path}
    names = task_type.label_names(train)
    sets = {name: task_type.read(path, task, names) for name, path in files.items()}
    if not sets:
        train, sets["dev"] = task_type.split_dev(train, DEV_SHARE, DEV_SEED)
    first = next(iter(files.values()), None)
    return (
        train,
        sets,
        {
            "data": str(train_file),
            "dev": str(first or f"{DEV_SHARE:.0%} of train"),
            "skip_unlabelled": task.skip_unlabelled,
            "data_sha256": {
                name: digest(path) for name, path in {"train": train_file, **files}.items()
            },
        },
    )


def parse_seeds(text: str) -> list[int]:
    """Seeds as users write them.

    Errors: ValueError for anything else than numbers, a range that goes downwards, and a seed named
    twice.

    >>> parse_seeds("1,2,5"), parse_seeds("1..3")
    ([1, 2, 5], [1, 2, 3])
    """
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span:
        seeds = list(range(int(span[1]), int(span[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(seed) for seed in text.split(",")]
    else:
        raise ValueError(f"--seeds {text}: write 1,2,3 or 1..3")
    if not seeds:
        raise ValueError(f"--seeds {text}: a range goes upwards, such as 1..3")
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ValueError(f"--seeds {text}: {twice[0]} is named twice: leave one out")
    return seeds
