"""Files answered by a fine-tuned model, or by the mean outputs of several: `bertsmith predict`."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bertsmith.base.settings import checked
from bertsmith.base.terminal import Progress
from bertsmith.inference import bulk
from bertsmith.inference.model_task import read_model_task
from bertsmith.inference.predictor import Predictor, opened
from bertsmith.tasks.answer_files import FILES, check_size, write_submission
from bertsmith.tasks.examples import empty_note
from bertsmith.tasks.features import Features, long_note
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.training.finetuning.task_types.base import ModelTask, check_columns
from bertsmith.training.finetuning.task_types.texts import LabelType, TextType


@checked()
def predict(
    model: str | Path | Predictor,
    input: str | Path,
    out: str | Path,
    *,
    submission: bool = False,
    text: str | None = None,
    text_pair: str | None = None,
    ensemble: str | Path | Sequence[str | Path | Predictor] = (),
) -> Path:
    """Answer the rows of a file with a fine-tuned model, as `bertsmith predict` does.

        bertsmith.predict("runs/reviews", "new.csv", "labelled.csv")
        bertsmith.predict(bertsmith.load("runs/ner", device="cuda"), "new.conll", "tagged.conll")
        bertsmith.predict("runs/mnli", "test_matched.tsv", "upload", submission=True)

    `model` is a run, a Hugging Face folder, a hub name, or what `load` gave. `input` and `out` are
    files of the kinds that `bertsmith predict --help` lists, of any size; `out` is replaced once
    the new one is whole, and after a stop the same call goes on. `submission`: `input` is a test
    file of GLUE, and `out` the folder for what its server takes. `text` and `text_pair` are
    columns, where they have other names than in training; `ensemble` are more runs of the task, and
    the mean of all their outputs decides. Returns the file that was written.

    Errors: ValueError for a model that was not fine-tuned, runs of other tasks, an input that
    cannot be read, a kind of file that cannot hold the answers.
    """
    if Path(input).resolve() == Path(out).resolve():
        raise ValueError(f"`out={str(out)!r}`: is the input itself: name another file")
    others = [ensemble] if isinstance(ensemble, str | Path) else ensemble
    # a given one keeps its own columns and engine
    models = [copy.copy(opened(one)) for one in (model, *others)]
    columns = {"text": text, "text_pair": text_pair}
    return predict_file(models, str(input), Path(out), columns, submission)[1]


def predict_file(
    models: Sequence[Predictor],
    source: str,
    out: Path,
    columns: dict[str, str | None],
    submission: bool,
    backend: bulk.Backend = "local",
) -> tuple[int, Path]:
    """The number of answers, and the file that they are in; the models read its columns from now
    on. Errors: as `predict`."""
    for model in models:
        model.model_task = read_model_task(model.folder, **columns)
    task_type, model_task = models[0].task_type, common_model_task(models[0], models[1:])
    check_columns(task_type, model_task.task, [Path(source)], columns)
    if submission or not isinstance(task_type, TextType):
        split = submission_split(model_task.task, Path(source)) if submission else None
        return _answer_whole(models, model_task, source, out, split, backend)
    counts = bulk.answer_rows(models, model_task, source, out, backend)
    read = {name: counts[name] for name in ("examples", "units", "cut")}
    if note := long_note(model_task.encoding, **read):
        print(f"{note}, as in training", file=sys.stderr)
    if note := empty_note(counts["texts"], counts["empty"]):
        print(note, file=sys.stderr)
    return counts["rows"], out


def _answer_whole(
    models: Sequence[Predictor],
    model_task: ModelTask,
    source: str,
    out: Path,
    split: str | None,
    backend: bulk.Backend,
) -> tuple[int, Path]:
    """Answer words, questions, choices and GLUE's test files, which are held as a whole."""
    task, task_type = model_task.task, models[0].task_type
    data = task_type.read_input(source, model_task)
    if split is None:
        task_type.check_output(data, out, model_task)
    else:
        check_size(task, split, len(data))
    rows = task_type.featurize(models[0].tokenizer, data, model_task)
    with outputs_of(models, rows, out, backend) as outputs:
        answers = task_type.answers(outputs, rows, data, model_task)
        if split is None:
            task_type.write_answers(out, answers, data, model_task)
        else:
            records = task_type.to_records(answers, data, model_task)
            given = dict(enumerate(record["predicted"] for record in records))
            out = write_submission(task, split, given, out)
    if note := rows.long_note(model_task.encoding):
        print(f"{note}, as in training", file=sys.stderr)
    return len(data), out


@contextmanager
def outputs_of(
    models: Sequence[Predictor], rows: Features, out: Path, backend: bulk.Backend
) -> Iterator[np.ndarray]:
    """The mean of the models' outputs, kept beside `out` until the block has used them."""
    blocks, request = bulk.sorted_blocks(rows.lengths), bulk.models_digest(models)

    def parts() -> Iterator[tuple[bulk.Label, Features]]:
        for block in blocks:
            part = rows.of_rows(block)
            read = b"".join(map(np.ndarray.tobytes, (part.ids, part.token_types, part.lengths)))
            yield (hashlib.sha256(read).hexdigest(), len(part)), part

    with bulk.kept_parts(out, request, "rows", backend) as kept:
        kept.set_engines(models, lambda model: model.resolve_for(rows))
        with Progress("predict", len(rows), "rows", start=kept.rows) as progress:
            kept.add(parts(), models, bulk.answer_block, progress)
        found = np.concatenate([bulk.array_of(data)[0] for data in kept.of(slice(None))])
        positions = order = np.concatenate(blocks)
        if len(found) > len(rows):  # of tokens
            positions = concatenated_ranges(rows.boundaries[order], rows.lengths[order])
        outputs = np.empty_like(found)
        outputs[positions] = found
        yield outputs


def submission_split(task: Task, file: Path) -> str:
    """The test set of GLUE that a file is, by its name.

    Errors: ValueError for another name, or a task that is not of GLUE.
    """
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


def common_model_task(first: Predictor, others: Sequence[Predictor]) -> ModelTask:
    """The task that runs answer together, with the mean of the thresholds that each tuned on dev.

    Errors: ValueError for runs whose outputs cannot be averaged: another task type, other columns
    of texts, classes, vocabulary or encoding, other things tuned.
    """
    task = first.model_task
    for other in others:
        theirs = other.model_task
        for name, one, another in (
            ("kind of task", first.task_type.name, other.task_type.name),
            ("set of classes", task.label_names, theirs.label_names),
            ("encoding (max_length, doc_stride, ...)", task.encoding, theirs.encoding),
            ("vocabulary or casing", first.tokenizer.fingerprint, other.tokenizer.fingerprint),
            ("set of tuned thresholds", task.thresholds.keys(), theirs.thresholds.keys()),
            ("activation of scores", task.score_activation, theirs.score_activation),
        ):
            if one != another:
                raise ValueError(
                    f"{other.folder}: has another {name} than {first.folder}: an ensemble needs "
                    "runs of one task, trained alike"
                )
        # questions and words are the same thing whatever their columns are called
        if isinstance(first.task_type, LabelType):
            _check_columns(first, other)
    thresholds = [task.thresholds, *(other.model_task.thresholds for other in others)]
    mean = {
        name: np.mean([of_model[name] for of_model in thresholds], axis=0).tolist()
        for name in task.thresholds
    }
    return replace(task, thresholds=mean)


def _check_columns(first: Predictor, other: Predictor) -> None:
    for name in ("text", "text_pair"):
        ours, theirs = (getattr(model.model_task.task, name) for model in (first, other))
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            pairs, single = (first, other) if theirs is None else (other, first)
            raise ValueError(
                f"{single.folder}: reads no second text, but {pairs.folder} reads that of"
                f" '{ours or theirs}': an ensemble needs runs of one task, trained alike"
            )
        raise ValueError(
            f"{other.folder}: reads the column '{theirs}', but {first.folder} '{ours}': if both"
            f" hold the same texts, name that of the input, such as `{name}={ours!r}`"
        )
