"""Two commands to try next, with which a run ends."""

from __future__ import annotations

import shlex
from pathlib import Path

NEW = {"tag": ("new.txt", "tagged.conll"), "answer": ("new.json", "answers.json")}
TEXTS = "new.csv", "answers.csv"  # of the other kinds of task


def after_pretraining(run: Path, fills_masks: bool = True) -> str:
    """Fill a mask, or look at the run, and train on labels.

    >>> print(after_pretraining(Path("my run")))
    try next:
      bertsmith fill "The [MASK] is not found." --model 'my run'
      bertsmith finetune classify --model 'my run' --data labelled.csv --out tuned
    """
    folder = shlex.quote(str(run))
    first = f"report {folder}"
    if fills_masks:
        first = f'fill "The [MASK] is not found." --model {folder}'
    return _lines(first, f"finetune classify --model {folder} --data labelled.csv --out tuned")


def after_finetuning(run: Path, kind: str) -> str:
    """Answer new data, and look at the run.

    >>> print(after_finetuning(Path("ner"), "tag"))
    try next:
      bertsmith predict ner new.txt --out tagged.conll
      bertsmith report ner
    """
    folder, (new, answers) = shlex.quote(str(run)), NEW.get(kind, TEXTS)
    return _lines(f"predict {folder} {new} --out {answers}", f"report {folder}")


def after_similarity_training(run: Path) -> str:
    """Make vectors of new texts, and look at the run.

    >>> print(after_similarity_training(Path("pairs")))
    try next:
      bertsmith embed new.txt --model pairs --out vectors.npy
      bertsmith report pairs
    """
    folder = shlex.quote(str(run))
    return _lines(f"embed new.txt --model {folder} --out vectors.npy", f"report {folder}")


def _lines(*commands: str) -> str:
    return "\n".join(["try next:", *(f"  bertsmith {command}" for command in commands)])
