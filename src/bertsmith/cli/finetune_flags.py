"""Flags of `finetune` that have no effect, or contradict each other or the data: refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.finetuning.search_space import Space, check_points, check_trials

if TYPE_CHECKING:
    from bertsmith.cli.finetune import Finetune
    from bertsmith.tasks.tagging_files import Sentences

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
    from bertsmith.checkpoints.model_config import read_config
    from bertsmith.training.engine import choose_engine

    choose_engine(settings.device, settings.precision, settings.threads)
    settings.layout(default_length, read_config(model).max_positions)


def check_kind(settings: Finetune, space: Space, kind: str) -> None:
    """Refuse flags that this kind of task does not read. Errors: ValueError that names them."""
    given = {*settings.given, *space}
    check_reads(kind, *given)
    if settings.frozen and "attention_dropout" in given:
        raise ValueError("--attention-dropout: without effect with --frozen")
    alone = [name for name in ("stride", "pool") if name in given]
    if alone and kind != "answer" and settings.long_texts != "windows":
        raise ValueError(f"{flags_of(alone)}: only with --long-texts windows")


def check_reads(kind: str, *given: str) -> None:
    """Errors: ValueError that names those of the settings which this kind of task does not read."""
    if wrong := [name for name, kinds in READ_BY.items() if name in given and kind not in kinds]:
        raise ValueError(f"{flags_of(wrong)}: without effect on a task of kind '{kind}'")


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
