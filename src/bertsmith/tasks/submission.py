"""The files that the GLUE server takes: "index<tab>prediction", a row a test example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.config import nearest
from bertsmith.files import write_text
from bertsmith.tasks.labels import listed
from bertsmith.tasks.table import Task

# (task, split) -> the file's name and the number of examples of the official test set
FILES = {
    ("cola", "test"): ("CoLA.tsv", 1_063),
    ("sst2", "test"): ("SST-2.tsv", 1_821),
    ("mrpc", "test"): ("MRPC.tsv", 1_725),
    ("stsb", "test"): ("STS-B.tsv", 1_379),
    ("qqp", "test"): ("QQP.tsv", 390_965),
    ("mnli", "test"): ("MNLI-m.tsv", 9_796),
    ("mnli", "test_mismatched"): ("MNLI-mm.tsv", 9_847),
    ("mnli", "diagnostic"): ("AX.tsv", 1_104),  # GLUE's own probe, answered by an MNLI model
    ("qnli", "test"): ("QNLI.tsv", 5_463),
    ("rte", "test"): ("RTE.tsv", 3_000),
    ("wnli", "test"): ("WNLI.tsv", 146),
}


def check_size(task: Task, split: str, count: int) -> None:
    """Refuse, before it is answered, a file of another size than the official test set.

    Errors: ValueError.
    """
    name, wanted = FILES[task.name, split]
    if count != wanted:
        raise ValueError(
            f"{name}: the server wants {wanted:,} answers, but the input has {count:,} examples:"
            " predict the official test file"
        )


def write_submission(
    task: Task, split: str, answers: Mapping[int, str | float], folder: Path
) -> Path:
    """Write the answers of a test set into `folder` under the name that the server expects.

    `answers`: the index of a test example (0, 1, ..., its place in the official file) -> the
    label's name, or for STS-B the score, which is clipped to [0, 5] and rounded to 3 decimals.
    Returns the file; all is checked before it is written.

    Errors: ValueError for a task or split without a submission, an index that is missing or too
    much, a label that the server does not know, a score that is not finite.
    """
    if (task.name, split) not in FILES:
        known = [f"{name}/{part}" for name, part in FILES]
        hint = nearest(f"{task.name}/{split}", known)
        raise ValueError(f"no submission for {task.name}/{split}: {hint}")
    name, count = FILES[task.name, split]
    missing = [index for index in range(count) if index not in answers]
    if missing:
        raise ValueError(
            f"{name}: the server wants {count:,} answers, {len(missing):,} are missing, the first"
            f" for index {missing[0]}: predict the official test file"
        )
    if len(answers) > count:
        extra = next(index for index in answers if index not in range(count))
        raise ValueError(
            f"{name}: the server wants {count:,} answers, not {len(answers):,}: index {extra} is"
            " not in the official test file"
        )
    rows = [f"{index}\t{_cell(task, answers[index], name, index)}" for index in range(count)]
    write_text(folder / name, "\n".join(["index\tprediction", *rows]) + "\n")
    return folder / name


def _cell(task: Task, answer: Any, name: str, index: int) -> str:
    if task.kind == "regress":
        assert task.bounds is not None
        if not math.isfinite(answer):
            raise ValueError(f"{name}: index {index}: {answer} is not a finite score")
        low, high = task.bounds
        return f"{min(max(answer, low), high):.3f}"
    assert task.labels is not None
    if answer not in task.labels:
        raise ValueError(
            f"{name}: index {index}: label '{answer}' is not one of {listed(task.labels)}"
        )
    return answer
