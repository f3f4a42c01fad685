"""Commands: fill, predict, evaluate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bertsmith.base.settings import Metavar
from bertsmith.cli.flags import Answering

if TYPE_CHECKING:
    import numpy as np

    from bertsmith.inference.predictor import Predictor
    from bertsmith.tasks.features import Features
    from bertsmith.tasks.task import Task

BAR = 24  # characters of a bar that stands for probability 1


@dataclass
class Fill:
    """Fill the [MASK] of a sentence: the likeliest pieces at each mask, with their probabilities.

    Examples:
      bertsmith fill "The [MASK] sat on the mat." --model runs/books
      bertsmith fill "[MASK] is the capital of [MASK]." --model bert-base-uncased --joint --json
      bertsmith fill "She brought me a [MASK] from Rome." --model bert-base-uncased --words 3
      bertsmith fill "The film was [MASK]." --model bert-base-uncased --candidates good,bad,so-so

    By itself each [MASK] is one piece and knows nothing of what stands at the others. --joint fills
    all together. --words K puts whole words of 1 to K pieces there. --candidates scores exactly
    these words or phrases at the one [MASK]; one that the vocabulary cannot spell is refused.

    MODEL is a run directory, a local Hugging Face folder or the name of a model on the hub.
    """

    text: Annotated[str, tyro.conf.Positional, Metavar("TEXT")]
    """The sentence, with one or more [MASK]."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    top: int = 5
    """How many answers to show."""
    joint: bool = False
    """Fill several [MASK] together."""
    words: int | None = None
    """Put a whole word of at most so many pieces at each [MASK]."""
    candidates: Annotated[str | None, Metavar("A,B,...|@FILE")] = None
    """Words or phrases to choose from, or @ and a file with one a line; all are shown."""
    json: bool = False
    """Print one JSON object: {"text", "predictions": [[{"token", "probability"}]]}; of --joint
    and --words {"text", "fillings": [...]}, of candidates {"text", "candidates": [...]}."""


def run_fill(settings: Fill) -> None:
    from bertsmith.inference.predictor import load

    given = ["joint"] if settings.joint else []
    given += [name for name in ("words", "candidates") if getattr(settings, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{', '.join('--' + name for name in given)}: give one of them")
    if given:
        together(settings)
        return
    predictions = load(settings.model).fill(settings.text, settings.top)
    if settings.json:
        rows = [[{k: row[k] for k in ("token", "probability")} for row in m] for m in predictions]
        print(json.dumps({"text": settings.text, "predictions": rows}, ensure_ascii=False))
    elif sys.stdout.isatty():
        show_predictions(settings.text, predictions)
    else:
        print(settings.text)
        for number, mask in enumerate(predictions, start=1):
            if len(predictions) > 1:
                print(f"[MASK] {number}")
            for row in mask:
                print(f"  {row['probability']:.4f}  {row['token']}")


def together(settings: Fill) -> None:
    """Answers about all masks at once, or about given words."""
    from bertsmith.inference.fill import fill_candidates, fill_words
    from bertsmith.inference.predictor import load

    text, key = settings.text, "fillings"
    filler = load(settings.model).filler
    if settings.joint:
        answers = filler.joint(text, settings.top)
        lines = [f"{row['probability']:.4f}  {' '.join(row['tokens'])}" for row in answers]
    elif settings.words is not None:
        answers = fill_words(filler, text, settings.words, settings.top)
        lines = [f"{row['score']:8.4f}  {', '.join(row['words'])}" for row in answers]
    else:
        answers = fill_candidates(filler, text, read_candidates(settings.candidates or ""))
        key = "candidates"
        lines = [f"{row['probability']:.4f}  {row['candidate']}" for row in answers]
    if settings.json:
        print(json.dumps({"text": text, key: answers}, ensure_ascii=False))
    else:
        print("\n  ".join([text, *lines]))


def read_candidates(words: str) -> list[str]:
    """Those between the commas, or the lines of @FILE. Errors: ValueError for an absent file."""
    from bertsmith.text.readers.documents import read_lines

    if words.startswith("@"):
        return [line for _, line in read_lines(Path(words[1:])) if line]
    return [word.strip() for word in words.split(",")]


def show_predictions(text: str, predictions: list[list[dict[str, Any]]]) -> None:
    """The same for people at a terminal: bars, and the sentence with the likeliest pieces in it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    line = Text()
    parts = text.split("[MASK]")
    for part, mask in zip(parts, predictions, strict=False):
        line.append(part).append(mask[0]["token"], style="bold green")
    console.print(line.append(parts[-1]))
    width = max((Text(row["token"]).cell_len for mask in predictions for row in mask), default=1)
    for number, mask in enumerate(predictions, start=1):
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(min_width=width)  # all bars begin at one place
        if len(predictions) > 1:
            console.print(Text(f"\n[MASK] {number}", style="bold"))
        for row in mask:
            bar = "█" * max(1, round(BAR * row["probability"]))
            share = f"{row['probability']:>6.1%}"
            table.add_row(Text(row["token"]), share, Text(bar, style="green"))
        console.print(table)


@dataclass(frozen=True, kw_only=True)
class Predict(Answering):
    """Answer new data with a fine-tuned model.

    Examples:
      bertsmith predict runs/reviews new.csv --out labelled.csv
      cat tickets.txt | bertsmith predict runs/reviews - --out labelled.tsv
      bertsmith predict runs/ner test.conll --out tagged.conll
      bertsmith predict runs/squad dev-v2.0.json --out answers.json
      bertsmith predict runs/mnli glue/MNLI/test_mismatched.tsv --submission --out glue-upload

    Texts: the rows of the input are written again, in their order, with the answer's columns behind
    their own. The answer is called as the column of the labels in training ("predicted_..." where
    the input has that column); beside it stand its probability, of several labels those of all, the
    text of an option, the place of an answer; a .jsonl gets the probabilities of all labels or
    options. Words: the input with a column of tags; a .jsonl of running text gets its entities with
    their places. Questions: {id: answer}, and the n best answers beside it. What is done is kept in
    OUT.partial: after Ctrl-C or a kill the same command goes on.
    """

    run: Annotated[str, tyro.conf.Positional, Metavar("RUN")]
    """Run directory of a fine-tuning, or another folder or hub name of a fine-tuned model."""
    input: Annotated[str, tyro.conf.Positional, Metavar("INPUT")]
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
    ensemble: Annotated[tuple[str, ...], Metavar("RUN...")] = ()
    """More runs of the task: the mean of all their outputs decides."""


def run_predict(settings: Predict) -> None:
    from bertsmith.cli.outputs import check_folder, check_outputs
    from bertsmith.inference.ensemble import common_model_task
    from bertsmith.inference.predictor import load, read_model_task
    from bertsmith.tasks.answer_files import check_size, is_lines, no_columns, write_submission
    from bertsmith.tasks.examples import Examples

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
        model.model_task = read_model_task(model.folder, **columns)
    first.model_task = model_task = common_model_task(first, others)
    task_type = first.task_type
    if settings.text is not None and is_lines(settings.input, model_task.task):
        raise no_columns(settings.input, settings.text)
    data = task_type.read_input(settings.input, model_task)
    split = submission_split(model_task.task, Path(settings.input)) if settings.submission else None
    if split is None:
        task_type.check_output(data, settings.out, model_task)
    else:
        check_size(model_task.task, split, len(data))
    rows = task_type.featurise(first.tokenizer, data, model_task.layout, model_task.label_names)
    written = settings.out
    with outputs_of((first, *others), rows, settings) as outputs:
        answers = task_type.answers(outputs, rows, data, model_task)
        if split is None:
            task_type.write_answers(settings.out, answers, data, model_task)
        else:
            given = [record["predicted"] for record in task_type.records(answers, data, model_task)]
            written = write_submission(model_task.task, split, dict(enumerate(given)), settings.out)
    if note := rows.long_note(model_task.layout):
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

    from bertsmith.base.terminal import Progress
    from bertsmith.inference.kept_blocks import BLOCK_TOKENS, job_of, kept_blocks, sorted_blocks
    from bertsmith.text.tokenizer.rows import concatenated_ranges

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
    from bertsmith.tasks.answer_files import FILES

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


MAX_SHOWN = 20  # classes of a confusion matrix printed on a terminal


@dataclass
class Evaluate:
    """Measure a fine-tuned model on labelled data, or a pre-trained one on a token store.

    Examples:
      bertsmith evaluate runs/reviews --data test.csv
      bertsmith evaluate runs/mrpc --data glue/MRPC --json
      bertsmith evaluate runs/books --data stores/books

    --data is a file, a folder of the task (its labelled test file, else its dev file), or a token
    store for a model with pre-training heads (its held-out part is used).
    """

    run: Annotated[str, tyro.conf.Positional, Metavar("RUN")]
    """Run directory, or another folder or hub name of a model."""
    data: Path
    """Labelled file as in training, a folder with one, or a token store."""
    text: str | None = None
    """Column with the text, when it has another name than in training."""
    text_pair: str | None = None
    """Column with the second text, for a model of pairs."""
    label: str | None = None
    """Column with the label, when it has another name than in training."""
    skip_unlabelled: bool = False
    """Leave out the rows that have no label."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 is quicker on machines that multiply it, and a little less exact."""
    json: bool = False
    """Print one JSON object: {"metrics": {name: number}, "examples", ...}."""


def run_evaluate(settings: Evaluate) -> None:
    from bertsmith.inference.evaluation import evaluate_files
    from bertsmith.inference.predictor import load

    predictor = load(settings.run, device=settings.device, precision=settings.precision)
    if (settings.data / "manifest.json").exists():
        result = measure_language_model(predictor, settings.data)
    else:
        columns = {"text": settings.text, "text_pair": settings.text_pair, "label": settings.label}
        found = evaluate_files(predictor, settings.data, columns, settings.skip_unlabelled)
        result = found.to_dict()
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        show_metrics(result)


def measure_language_model(predictor: Predictor, data: Path) -> dict[str, Any]:
    """Held-out figures on a token store: the same rows and masks as at the end of pre-training."""
    from bertsmith.base.settings import from_mapping
    from bertsmith.corpus.store.store import TokenStore
    from bertsmith.inference.predictor import read_run
    from bertsmith.training.pretraining.evaluation import (
        evaluate_pretraining,
        held_out_stream,
        num_rows,
        unigram_entropy,
    )
    from bertsmith.training.pretraining.settings import PretrainSettings
    from bertsmith.training.pretraining.task import rows_at_once

    model, vocabulary = predictor.language_model, predictor.tokenizer.vocabulary
    store = TokenStore.open(data)
    store.check_tokenizer(predictor.tokenizer, predictor.folder)
    source = str(predictor.folder / "run.json")
    stored = read_run(predictor.folder).get("settings", {})
    settings = from_mapping(PretrainSettings, stored, source)
    phase, engine = settings.phases()[-1], predictor.engine
    stream = held_out_stream(store, vocabulary, phase.length, settings.objective)
    rows = num_rows(stream, 4 * settings.held_out_rows)
    at_once = rows_at_once(settings, phase, engine, model.config)
    metrics = evaluate_pretraining(model, stream, engine, rows, at_once)
    metrics["unigram_entropy"] = unigram_entropy(store, stream, rows)
    if not predictor.has_next_sentence_head:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("nsp_")}
    return {"metrics": metrics, "examples": rows}


def show_metrics(result: dict[str, Any]) -> None:
    """Metrics a line each, those of every split where there are two, then the confusion matrix."""
    from bertsmith.base.terminal import of_cases
    from bertsmith.reports.finetuning import is_share

    undefined = result.get("undefined", {})
    metrics = result["metrics"]
    for name in [name for name in metrics if not name.endswith("_cases")]:
        beside = ""
        if (cases := metrics.get(f"{name.removesuffix('_accuracy')}_cases")) is not None:
            beside = of_cases(cases)
        elif is_share(name):
            beside = of_cases(result["examples"], "examples")
        if name in undefined:
            beside = f"  (no value: {undefined[name]})"
        print(f"{name:<20} {metrics[name]:.4f}{beside}")
    for split, metrics in result.get("splits", {}).items():
        print(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print(f"{'examples':<20} {result['examples']:,}")
    labels = result.get("labels", [])
    if "confusion" in result and len(labels) <= MAX_SHOWN:
        width = max(6, *(len(label) for label in labels))
        print("\nrows: true label, columns: answer")
        print(" " * width + "".join(f"  {label:>{width}}" for label in labels))
        for label, counts in zip(labels, result["confusion"], strict=True):
            print(f"{label:>{width}}" + "".join(f"  {count:>{width},}" for count in counts))
