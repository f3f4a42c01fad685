"""Commands: fill, predict, evaluate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import bertsmith
from bertsmith.base.settings import Count, Metavar, Positional
from bertsmith.base.terminal import of_cases
from bertsmith.cli.flags import Answering, BulkAnswering
from bertsmith.cli.outputs import check_folder, check_outputs

BAR = 24  # characters of a bar that stands for probability 1


@dataclass
class Fill:
    """Fill the [MASK] of a sentence: the likeliest pieces at each mask, with their probabilities.

    Examples:
      bertsmith fill "The [MASK] sat on the mat." --model runs/books
      bertsmith fill "[MASK] is the capital of [MASK]." --model bert-base-uncased --joint --json
      bertsmith fill "She brought me a [MASK] from Rome." --model bert-base-uncased --max-pieces 3
      bertsmith fill "The film was [MASK]." --model bert-base-uncased --candidates good,bad,so-so

    By itself each [MASK] is one piece and knows nothing of what stands at the others. --joint fills
    all together. --max-pieces K puts words of 1 to K pieces there. --candidates scores exactly
    these words or phrases at the one [MASK]; one that the vocabulary cannot spell is refused.

    MODEL is a run directory, a local Hugging Face folder or the name of a model on the hub.
    """

    text: Annotated[str, Positional, Metavar("TEXT")]
    """The sentence, with one or more [MASK]."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    top: int = 5
    """How many answers to show."""
    joint: bool = False
    """Fill several [MASK] together."""
    max_pieces: int | None = None
    """Put a whole word of at most so many pieces at each [MASK]."""
    candidates: Annotated[str | None, Metavar("A,B,...|@FILE")] = None
    """Words or phrases to choose from, or @ and a file with one a line; all are shown."""
    json: bool = False
    """Print one JSON object: {"text", "predictions": [[{"token", "probability"}]]}; of --joint
    and --max-pieces {"text", "fillings": [...]}, of candidates {"text", "candidates": [...]}."""


def run_fill(settings: Fill) -> None:
    from bertsmith.inference.fill import fill_candidates, fill_words
    from bertsmith.text.readers.documents import read_lines

    text, top, words = settings.text, settings.top, settings.candidates
    given = ["joint"] if settings.joint else []
    given += [name for name in ("max_pieces", "candidates") if getattr(settings, name) is not None]
    if len(given) > 1:
        raise ValueError(
            f"{', '.join('--' + name.replace('_', '-') for name in given)}: give one of them"
        )
    predictor, masks, key = bertsmith.load(settings.model), [], "fillings"
    if settings.joint:
        answers = predictor.filler.joint(text, top)
        lines = [f"  {row['probability']:.4f}  {' '.join(row['tokens'])}" for row in answers]
    elif settings.max_pieces is not None:
        answers = fill_words(predictor.filler, text, settings.max_pieces, top)
        lines = [f"  {row['score']:8.4f}  {', '.join(row['words'])}" for row in answers]
    elif words is not None:
        candidates = [word.strip() for word in words.split(",")]
        if words.startswith("@"):
            candidates = [line for _, line in read_lines(Path(words[1:])) if line]
        answers, key = fill_candidates(predictor.filler, text, candidates), "candidates"
        lines = [f"  {row['probability']:.4f}  {row['candidate']}" for row in answers]
    else:
        masks, key, lines = predictor.fill(text, top), "predictions", []
        answers = [[{"token": c.token, "probability": c.probability} for c in m] for m in masks]
        for number, mask in enumerate(masks, start=1):
            lines += [f"[MASK] {number}"] * (len(masks) > 1)
            lines += [f"  {candidate.probability:.4f}  {candidate.token}" for candidate in mask]
    if settings.json:
        print(json.dumps({"text": text, key: answers}, ensure_ascii=False))
    elif masks and sys.stdout.isatty():
        show_predictions(text, masks)
    else:
        print("\n".join([text, *lines]))


def show_predictions(text: str, masks: Sequence[Sequence[bertsmith.FillCandidate]]) -> None:
    """Draw the candidates with bars, under the sentence with the likeliest pieces in it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    line = Text()
    parts = text.split("[MASK]")
    for part, mask in zip(parts, masks, strict=False):
        line.append(part).append(mask[0].token, style="bold green")
    console.print(line.append(parts[-1]))
    width = max((Text(c.token).cell_len for mask in masks for c in mask), default=1)
    for number, mask in enumerate(masks, start=1):
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(min_width=width)  # all bars begin in one column
        if len(masks) > 1:
            console.print(Text(f"\n[MASK] {number}", style="bold"))
        for candidate in mask:
            bar = "█" * max(1, round(BAR * candidate.probability))
            percent = f"{candidate.probability:>6.1%}"
            table.add_row(Text(candidate.token), percent, Text(bar, style="green"))
        console.print(table)


@dataclass(frozen=True, kw_only=True)
class Predict(BulkAnswering):
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
    text of an option, the place of an answer; a .jsonl or .parquet gets the probabilities of all
    labels or options, a .txt the answers alone, a line a row. Words: the input with a column of
    tags; a .jsonl of running text gets its entities with their places. Questions: {id: answer}, and
    the n best answers beside it. Files of texts may be of any size. What is done is kept in
    OUT.partial: after Ctrl-C or a kill the same command goes on.
    """

    run: Annotated[str, Positional, Metavar("RUN")]
    """Run directory of a fine-tuning, or another folder or hub name of a fine-tuned model."""
    input: Annotated[str, Positional, Metavar("INPUT")]
    """csv, tsv, jsonl or parquet with the columns of training; .txt: a text a line, or a tsv whose
    first line names the text's column; - for standard input, a text a line. Words: .txt, jsonl,
    parquet or CoNLL columns; questions: also SQuAD's .json."""
    out: Path
    """.csv, .tsv, .jsonl, .parquet or .txt to write; of words .conll, .txt or .jsonl; of questions
    also .json. A file that is there is replaced, once the new one is whole."""
    submission: bool = False
    """The input is a GLUE test file: write what the GLUE server takes into the folder --out."""
    text: str | None = None
    """Column with the text, when it has another name than in training."""
    text_pair: str | None = None
    """Column with the second text, for a model of pairs."""
    ensemble: Annotated[tuple[str, ...], Metavar("RUN...")] = ()
    """More runs of the task: the mean of all their outputs decides."""


def run_predict(settings: Predict) -> None:
    from bertsmith.inference.predict import predict_file

    out = settings.out
    if settings.submission:
        check_folder(out)
    else:
        check_outputs([Path(settings.input)], {"--out": out})
    models = [settings.load(name) for name in (settings.run, *settings.ensemble)]
    columns = {"text": settings.text, "text_pair": settings.text_pair}
    count, written = predict_file(
        models, settings.input, out, columns, settings.submission, settings.backend
    )
    print(f"{count:,} answers written to {written}")


MAX_SHOWN = 20  # classes of a confusion matrix printed on a terminal
OF_A_PART = "has_answer_", "no_answer_"  # metrics of some of the examples begin so


@dataclass(frozen=True, kw_only=True)
class Evaluate(Answering):
    """Measure a fine-tuned model on labelled data, or what a pre-trained one has learned.

    Examples:
      bertsmith evaluate runs/reviews --data test.csv
      bertsmith evaluate runs/mrpc --data glue/MRPC --json
      bertsmith evaluate runs/books --held-out novel.txt textbook.txt
      bertsmith evaluate runs/books --held-out stores/books
      bertsmith evaluate runs/books --blimp blimp.jsonl.xz --first 200
      bertsmith evaluate runs/books --probe conll2003

    One of --data, --held-out, --blimp and --probe says what is measured.
    """

    run: Annotated[str, Positional, Metavar("RUN")]
    """Run directory, or another folder or hub name of a model."""
    data: Path | None = None
    """Labelled file as in training, or a folder of the task: its labelled test file, else dev."""
    held_out: Annotated[tuple[Path, ...], Metavar("TEXT...|STORE")] = ()
    """Texts that were not trained on: nats of whole masked words, which compare between
    vocabularies. Or a token store: its held-out part, as at the end of pre-training."""
    blimp: Annotated[Path | None, Metavar("FILE")] = None
    """Minimal pairs, a .jsonl or a folder of them: in how many the better sentence is likelier."""
    first: Annotated[int | None, Count] = None
    """--blimp: so many pairs of each paradigm; default: all."""
    masked: Literal["word", "piece"] | None = None
    """--blimp: mask with a piece also those behind it in its word, or it alone as in older tables;
    default: word. A left-to-right model masks nothing."""
    probe: Annotated[Path | None, Metavar("FOLDER")] = None
    """CoNLL-2003: how well a linear model reads part of speech and chunk off each frozen layer."""
    text: str | None = None
    """--data: column with the text, when it has another name than in training."""
    text_pair: str | None = None
    """--data: column with the second text, for a model of pairs."""
    label: str | None = None
    """--data: column with the label, when it has another name than in training."""
    skip_unlabelled: bool = False
    """--data: leave out the rows that have no label."""
    precision: Literal["auto", "float32", "bf16", "int8"] = "float32"
    """int8 and, on machines that multiply it, bf16 are quicker and less exact; auto: as `predict`
    chooses."""
    json: bool = False
    """Print one JSON object: {"metrics": {name: number}, "examples", ...}; of --held-out TEXT
    {"texts": ...}, of --blimp {"accuracy", "fields", "paradigms", ...}, of --probe {"columns"}."""


READ_WITH = {
    "data": ("text", "text_pair", "label", "skip_unlabelled"),
    "blimp": ("first", "masked"),
}


def run_evaluate(settings: Evaluate) -> None:
    asked = [name for name in ("data", "held_out", "blimp", "probe") if getattr(settings, name)]
    if len(asked) != 1:
        given = ", ".join(f"`{name}`" for name in asked) or "none of them"
        raise ValueError(f"give one of `data`, `held_out`, `blimp` and `probe`, not {given}")
    for wanted, names in READ_WITH.items():
        for name in names if wanted not in asked else ():
            if getattr(settings, name):
                raise ValueError(f"`{name}`: only with `{wanted}`")
    predictor = settings.load(settings.run)
    if settings.blimp is not None:
        from bertsmith.inference.evaluation import minimal_pairs

        result = minimal_pairs.evaluate_blimp(
            predictor, settings.blimp, first=settings.first, masked=settings.masked or "word"
        )
        lines = minimal_pairs.describe(result)
    elif settings.probe is not None:
        from bertsmith.inference.evaluation import probe

        result = probe.evaluate_probe(predictor, settings.probe)
        lines = probe.describe(result)
    elif settings.data is not None:
        from bertsmith.inference.evaluation.labelled import evaluate_files

        columns = {"text": settings.text, "text_pair": settings.text_pair, "label": settings.label}
        found = evaluate_files(predictor, settings.data, columns, settings.skip_unlabelled)
        result = found.to_dict()
        lines = metric_lines(result)
    else:
        from bertsmith.inference.evaluation import held_out

        result = held_out.evaluate_held_out(predictor, settings.held_out)
        lines = metric_lines(result) if "metrics" in result else held_out.describe(result)
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(lines))


def metric_lines(result: dict[str, Any]) -> Iterator[str]:
    """The metrics, those of every split where there are two, then the confusion matrix."""
    from bertsmith.reports.finetuning import is_share

    notes, are_counted = result.get("notes", {}), False
    metrics = result["metrics"]
    names = [name for name in metrics if not name.endswith("_cases")]
    width = max(20, *map(len, names))
    for name in names:
        beside = ""
        if (cases := metrics.get(f"{name.removesuffix('_accuracy')}_cases")) is not None:
            beside = of_cases(cases)
        elif is_share(name) and not name.startswith(OF_A_PART):
            beside = of_cases(result["examples"], "examples")
        if name in notes:
            beside = f"  ({notes[name]})"
        are_counted |= beside.endswith("examples")
        yield f"{name:<{width}} {metrics[name]:.4f}{beside}"
    for split, metrics in result.get("splits", {}).items():
        yield f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    if not are_counted:
        yield f"{'examples':<{width}} {result['examples']:,}"
    labels = result.get("labels", [])
    if "confusion" in result and len(labels) <= MAX_SHOWN:
        width = max(6, *(len(label) for label in labels))
        yield "\nrows: true label, columns: answer"
        yield " " * width + "".join(f"  {label:>{width}}" for label in labels)
        for label, counts in zip(labels, result["confusion"], strict=True):
            yield f"{label:>{width}}" + "".join(f"  {count:>{width},}" for count in counts)
