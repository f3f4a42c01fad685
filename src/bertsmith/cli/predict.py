"""Answer new data with a fine-tuned model.

Examples:
    bertsmith predict runs/reviews new.csv --out labelled.csv
    cat tickets.txt | bertsmith predict runs/reviews - --out labelled.tsv
    bertsmith predict runs/ner test.conll --out tagged.conll
    bertsmith predict runs/squad dev-v2.0.json --out answers.json
    bertsmith predict runs/mnli glue/MNLI/test_mismatched.tsv --submission --out glue-upload

Texts: the rows of the input are written again, in their order, with the answer's columns behind
their own. The answer is called as the column of the labels in training ("predicted_..." where the
input has that column); beside it stand its probability, of several labels those of all, the text of
an option, the place of an answer; a .jsonl gets the probabilities of all labels or options. Words:
the input with a column of tags; a .jsonl of running text gets its entities with their places.
Questions: {id: answer}, and the n best answers beside it.
What is done is kept in OUT.partial: after Ctrl-C or a kill the same command goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    import numpy as np

    from bertsmith.inference.predictor import Predictor
    from bertsmith.tasks.features import Features
    from bertsmith.tasks.table import Task


@dataclass
class Predict:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory of a fine-tuning, or another folder or hub name of a fine-tuned model."""
    input: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INPUT")]
    """csv, tsv, jsonl or parquet with the columns of training; .txt: a text a line, or a tsv whose
    first line names the text's column; - for standard input, a text a line. Words: .txt, jsonl,
    parquet or CoNLL columns; questions: also SQuAD's .json."""
    out: Path
    """.csv, .tsv or .jsonl to write; of words .conll, .txt or .jsonl; of questions also .json."""
    submission: bool = False
    """The input is a GLUE test file: write what the GLUE server takes into the folder --out."""
    text: str | None = None
    """Column with the text, when it has another name than in training."""
    text_pair: str | None = None
    """Column with the second text, for a model of pairs."""
    ensemble: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN...")] = ()
    """More runs of the task: the mean of all their outputs decides."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """bf16 is a little less exact; auto: bf16 where some rows show it faster, and off by less than
    3%, else float32."""


def run_predict(settings: Predict) -> None:
    from bertsmith.cli.outputs import check_folder, check_outputs
    from bertsmith.inference.ensemble import common_purpose
    from bertsmith.inference.predictor import load
    from bertsmith.inference.purpose import read_purpose
    from bertsmith.tasks.reading import Examples
    from bertsmith.tasks.submission import check_size, write_submission
    from bertsmith.tasks.tables import is_lines, no_columns

    if settings.submission:
        check_folder(settings.out)
    else:
        check_outputs([Path(settings.input)], {"--out": settings.out})
    first, *others = (
        load(name, device=settings.device, precision=settings.precision)
        for name in (settings.run, *settings.ensemble)
    )
    columns = {"text": settings.text, "text_pair": settings.text_pair}
    for model in (first, *others):
        model.purpose = read_purpose(model.folder, **columns)
    first.purpose = purpose = common_purpose(first, others)
    kind = first.kind
    if settings.text is not None and is_lines(settings.input, purpose.task):
        raise no_columns(settings.input, settings.text)
    data = kind.read_input(settings.input, purpose)
    split = submission_split(purpose.task, Path(settings.input)) if settings.submission else None
    if split is None:
        kind.check_output(data, settings.out, purpose)
    else:
        check_size(purpose.task, split, len(data))
    rows = kind.featurise(first.tokenizer, data, purpose.layout, purpose.label_names)
    written = settings.out
    with outputs_of((first, *others), rows, settings) as outputs:
        answers = kind.answers(outputs, rows, data, purpose)
        if split is None:
            kind.write_answers(settings.out, answers, data, purpose)
        else:
            given = [record["predicted"] for record in kind.records(answers, data, purpose)]
            written = write_submission(purpose.task, split, dict(enumerate(given)), settings.out)
    if note := rows.long_note(purpose.layout):
        print(f"{note}, as in training", file=sys.stderr)
    if isinstance(data, Examples) and (note := data.empty_note()):
        print(note, file=sys.stderr)
    print(f"{len(data):,} answers written to {written}")


@contextmanager
def outputs_of(
    models: Sequence[Predictor], rows: Features, settings: Predict
) -> Iterator[np.ndarray]:
    """The mean of the models' outputs, kept beside --out until the block has used them."""
    import numpy as np

    from bertsmith.inference.kept_blocks import BLOCK_TOKENS, job_of, kept_blocks, sorted_blocks
    from bertsmith.progress import Progress
    from bertsmith.text.sequences import concatenated_ranges

    blocks = sorted_blocks(rows.lengths, BLOCK_TOKENS)
    work = [(model, block) for model in models for block in blocks]
    sizes = [len(block) for _, block in work]
    read = (array.tobytes() for array in (rows.ids, rows.token_types, rows.boundaries))
    flags = (settings.device, settings.precision)
    job = job_of((model.folder for model in models), read, sizes, *flags)
    with kept_blocks(settings.out, job, sizes, "rows") as kept:
        kept.settle(models, lambda model: model.settle_precision_for(rows))
        with Progress("predict", sum(sizes), "rows", start=kept.rows) as progress:

            def compute(number: int) -> tuple[np.ndarray]:
                model, block = work[number]
                return (model.outputs(rows.of_rows(block), progress.update),)

            found = [outputs for (outputs,) in kept.arrays(compute)]
        of_runs = [
            np.concatenate(found[first : first + len(blocks)])
            for first in range(0, len(found), len(blocks))
        ]
        places = order = np.concatenate(blocks)
        if len(of_runs[0]) > len(rows):  # of tokens
            places = concatenated_ranges(rows.boundaries[order], rows.lengths[order])
        outputs = np.empty_like(of_runs[0])
        outputs[places] = np.mean(of_runs, axis=0)
        yield outputs


def submission_split(task: Task, file: Path) -> str:
    """Which test set of GLUE a file is, by its name.

    Errors: ValueError for another name, or a task that is not of GLUE.
    """
    from bertsmith.tasks.submission import FILES

    names = {
        name: split for split, files in task.files.items() for name in files if "test" in split
    }
    if (task.name, "test") in FILES:
        names.setdefault("test.tsv", "test")  # GLUE's copy of the files of MRPC
    if task.name == "mnli":
        names["diagnostic.tsv"] = "diagnostic"
    split = names.get(file.name)
    if (task.name, split) not in FILES or split is None:
        known = f"its test files are {', '.join(names)}" if names else "not a task of GLUE"
        raise ValueError(f"{file}: no submission for task {task.name}: {known}")
    return split
