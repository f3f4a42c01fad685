"""Checks of outputs before a command's work, and the commands to try next, printed after it."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bertsmith.base.files import check_new, is_special


def check_outputs(read: Iterable[Any], outputs: Mapping[str, Path | None]) -> None:
    """Check the files that a command will write, before hours of work; name those it replaces.

    read: paths and remote files; outputs: flag -> file.

    Errors: ValueError that names the flag, for a file that is read or written under another flag, a
    folder, a device, a pipe, a URL, or a place that cannot be written.
    """
    taken = {path.resolve(): "is an input itself" for path in read if isinstance(path, Path)}
    for flag, out in outputs.items():
        if out is None:
            continue
        trouble = taken.get(out.resolve()) or _trouble(out.resolve().parent)
        if out.is_dir():
            trouble = "is a folder"
        if is_special(out):
            trouble = "is a device or a pipe, not a file"
        if "".join(out.parts[:1]).endswith(":"):  # s3://bucket/list.jsonl would make a folder here
            trouble = "is a URL, and is written on this machine"
        if trouble:
            raise ValueError(f"{flag} {out} {trouble}: name another file")
        taken[out.resolve()] = "is written under another flag"
    for flag, out in outputs.items():
        if out is not None and out.is_file():
            print(f"{flag} {out} is there: the new file will replace it", file=sys.stderr)


def check_folder(folder: Path, flag: str = "--out") -> None:
    """Check the folder that a command will write into; it need not be there yet.

    Errors: ValueError that names the flag, for a file or a place that cannot be written.
    """
    if folder.is_file():
        raise ValueError(f"{flag} {folder} is a file: name a folder that is not there yet")
    if trouble := _trouble(folder.resolve()):
        raise ValueError(f"{flag} {folder} {trouble}: name another folder")


def check_new_folder(folder: Path, flag: str = "--out") -> None:
    """Like `check_folder`, for a folder that must be new or empty."""
    check_new(folder)
    check_folder(folder, flag)


def _trouble(folder: Path) -> str | None:
    """The reason why a folder, or the first above it that is there, cannot be written; or None."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir():
        return f"cannot be written: {place} is no folder"
    try:
        tempfile.TemporaryFile(dir=place).close()  # permissions alone do not tell of every disk
    except OSError as error:
        return f"cannot be written: {place}: {error.strerror}"
    return None


# Names of new data and of its answers, by the task type.
NEW = {"tag": ("new.txt", "tagged.conll"), "answer": ("new.json", "answers.json")}
TEXTS = "new.csv", "answers.csv"
TUNE = "finetune classify --model RUN --data labelled.csv --out tuned"


def after_pretraining(run: Path, fills_masks: bool = True) -> str:
    """Fill a mask, or report on the run, and train on labels.

    >>> print(after_pretraining(Path("my run")))
    try next:
      bertsmith fill "The [MASK] is not found." --model 'my run'
      bertsmith finetune classify --model 'my run' --data labelled.csv --out tuned
    """
    first = 'fill "The [MASK] is not found." --model RUN' if fills_masks else "report RUN"
    return try_next(run, first, TUNE)


def after_finetuning(run: Path, task_type: str) -> str:
    """Answer new data, and report on the run.

    >>> print(after_finetuning(Path("ner"), "tag"))
    try next:
      bertsmith predict ner new.txt --out tagged.conll
      bertsmith report ner
    """
    new, answers = NEW.get(task_type, TEXTS)
    return try_next(run, f"predict RUN {new} --out {answers}", "report RUN")


def try_next(run: Path, *commands: str) -> str:
    """Lines that name these commands, in which RUN stands for the run."""
    named = (command.replace("RUN", shlex.quote(str(run))) for command in commands)
    return "\n".join(["try next:", *(f"  bertsmith {command}" for command in named)])
