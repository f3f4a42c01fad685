"""Measure a fine-tuned model on labelled data, or a pre-trained one on a token store.

Examples:
    bertsmith evaluate runs/reviews --data test.csv
    bertsmith evaluate runs/mrpc --data glue/MRPC --json
    bertsmith evaluate runs/books --data stores/books

--data is a file, a folder of the task (its labelled test file, else its dev file), or a token store
for a model with pre-training heads (its held-out part is used).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from bertsmith.finetuning.kind import Kind
    from bertsmith.inference.predictor import Predictor
    from bertsmith.tasks.table import Task

MAX_SHOWN = 20  # classes of a confusion matrix printed on a terminal


@dataclass
class Evaluate:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
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
    from bertsmith.inference.predictor import load

    predictor = load(settings.run, device=settings.device, precision=settings.precision)
    if (settings.data / "manifest.json").exists():
        result = measure_language_model(predictor, settings.data)
    else:
        result = measure_fine_tuned(predictor, settings)
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        show_metrics(result)


def measure_fine_tuned(predictor: Predictor, settings: Evaluate) -> dict[str, Any]:
    from bertsmith.cli.finetune_flags import check_reads
    from bertsmith.inference.evaluate import evaluate_on
    from bertsmith.inference.purpose import read_purpose
    from bertsmith.progress import Progress

    columns = {"text": settings.text, "text_pair": settings.text_pair, "label": settings.label}
    predictor.purpose = purpose = read_purpose(predictor.folder, **columns)
    kind, task, names = predictor.kind, purpose.task, purpose.label_names
    if settings.skip_unlabelled:
        check_reads(task.kind, "skip_unlabelled")
        task = dataclasses.replace(task, skip_unlabelled=True)
    splits = {
        split: kind.read(file, task, names)
        for split, file in find_evaluation_files(kind, task, settings.data).items()
    }
    with Progress("evaluate", unit="rows") as progress:
        results = {
            split: evaluate_on(predictor, data, progress.update) for split, data in splits.items()
        }
    first = next(iter(results.values()))
    if len(results) == 1:
        return first
    return {**first, "splits": {split: result["metrics"] for split, result in results.items()}}


def find_evaluation_files(kind: Kind, task: Task, data: Path) -> dict[str, Path]:
    """The labelled files to score a model on, by split: `data` itself, or its test file, else its
    dev files, of which MNLI has two. A line on stderr says that the test file has no labels.

    Errors: ValueError when a folder has none.
    """
    from bertsmith.tasks.reading import single_file

    if single := single_file(data):
        return {"data": single}
    test = kind.find_file(task, data, "test") if task.test_is_labelled else None
    if test and kind.is_labelled(test, task):
        return {"test": test}
    files = {split: kind.find_file(task, data, split) for split in task.dev_splits}
    found = {split: path for split, path in files.items() if path is not None}
    if not found:
        raise ValueError(f"{data}: no labelled test or dev file; name the file itself with --data")
    if test:
        names = ", ".join(map(str, found.values()))
        print(f"{test}: no labels (column '{task.label}'): measured on {names}", file=sys.stderr)
    return found


def measure_language_model(predictor: Predictor, data: Path) -> dict[str, Any]:
    """Held-out figures on a token store: the same rows and masks as at the end of pre-training."""
    from bertsmith.config import from_mapping
    from bertsmith.corpus.store import TokenStore
    from bertsmith.inference.purpose import read_run
    from bertsmith.training.evaluation import (
        evaluate_pretraining,
        held_out_stream,
        num_rows,
        unigram_entropy,
    )
    from bertsmith.training.pretrain_settings import PretrainSettings
    from bertsmith.training.pretraining import rows_at_once

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
    from bertsmith.progress import of_cases
    from bertsmith.reports.seeds import is_share

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
