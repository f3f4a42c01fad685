"""The table of tasks: what a data set's files look like and how its answers are scored."""

from __future__ import annotations

from dataclasses import dataclass

from bertsmith.config import nearest


@dataclass(frozen=True)
class Task:
    """One row of the table; a new data set of a known kind is a new row and a test.

    `labels` fixes the classes and their order; None = found by reading the training file.
    `test_is_labelled` is False where the publisher keeps the test answers (GLUE).
    """

    name: str
    kind: str  # "classify": one class for a text or a pair of texts
    text: str  # column names
    text_pair: str | None
    label: str
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...]  # names of metrics.METRICS; the first decides which model is best
    files: dict[str, str]  # split -> file name in the data set's own folder
    test_is_labelled: bool = True

    @property
    def main_metric(self) -> str:
        return self.metrics[0]


TASKS = {
    "sst2": Task(
        name="sst2",
        kind="classify",
        text="sentence",
        text_pair=None,
        label="label",
        labels=("0", "1"),
        metrics=("accuracy",),
        files={"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"},
        test_is_labelled=False,
    ),
    # The original MSR files, which have no dev set: like GLUE, training cuts one out of train. The
    # labelled test file is for the evaluation.
    "mrpc": Task(
        name="mrpc",
        kind="classify",
        text="#1 String",
        text_pair="#2 String",
        label="Quality",
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
        files={"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"},
    ),
}
OWN_KINDS = ("classify",)  # kinds that people's own files can be read as, see `own_task`


def find_task(name: str) -> Task:
    """The row of a published data set; case, "-" and "_" of the name do not matter.

    >>> find_task("SST-2").text
    'sentence'

    Errors: ValueError for an unknown name, with the nearest known one.
    """
    key = name.lower().replace("-", "").replace("_", "")
    if key not in TASKS:
        raise ValueError(f"unknown task '{name}': {nearest(key, [*TASKS, *OWN_KINDS])}")
    return TASKS[key]


def own_task(text: str, text_pair: str | None, label: str) -> Task:
    """The row for one's own files, whose columns are named by --text, --text-pair and --label.

    >>> own_task("review", None, "stars").metrics
    ('accuracy', 'macro_f1')

    Errors: ValueError when one column is named twice.
    """
    columns = [name for name in (text, text_pair, label) if name is not None]
    if len(set(columns)) < len(columns):
        raise ValueError(
            f"--text '{text}', --text-pair '{text_pair}' and --label '{label}'"
            " must name different columns"
        )
    return Task(
        name="classify",
        kind="classify",
        text=text,
        text_pair=text_pair,
        label=label,
        labels=None,
        metrics=("accuracy", "macro_f1"),
        files={},
    )
