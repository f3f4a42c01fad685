"""Commands: explain, report, compare, baseline, doctor."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import bertsmith
from bertsmith.base.settings import Hidden, Metavar, Positional, group_values
from bertsmith.cli.outputs import check_outputs
from bertsmith.training.finetuning.request import OwnFiles, Request, check_reads, make_task


@dataclass
class Explain:
    """Show the words that a fine-tuned model's class, label or score of a text hangs on.

    Examples:
      bertsmith explain runs/reviews "A fine film, if a bit long."
      bertsmith explain runs/reviews "A fine film, if a bit long." --label bad --method gradient
      bertsmith explain runs/mnli "A man sings." --text-pair "Nobody sings." --json

    A score above 0 speaks for the label, one below 0 against it. Each method measures something
    else, which is said with the scores; none tells the model's reason. Signs of punctuation are
    words of their own.
    """

    run: Annotated[str, Positional, Metavar("RUN")]
    """Run directory of a fine-tuning, or another folder or hub name of a fine-tuned model."""
    text: Annotated[str, Positional, Metavar("TEXT")]
    """The text."""
    text_pair: Annotated[str | None, Metavar("TEXT")] = None
    """The second text, for a model of pairs."""
    method: Literal["occlusion", "gradient", "rollout"] = "occlusion"
    """occlusion: the fall without the word; gradient: gradient x input; rollout: attention."""
    label: Annotated[str | None, Metavar("LABEL")] = None
    """The label to explain; by default the predicted one."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    json: bool = False
    """Print one JSON object: {"text", "answer", "label", "method", "measures", "words":
    [{"text", "start", "end", "segment", "score"}]}."""


def run_explain(settings: Explain) -> None:
    predictor = bertsmith.load(settings.run, device=settings.device)
    texts = {"text": settings.text}
    if settings.text_pair is not None:
        texts["text_pair"] = settings.text_pair
    found = predictor.explain(**texts, method=settings.method, label=settings.label)
    if settings.json:
        print(json.dumps(texts | found.to_dict(), ensure_ascii=False, allow_nan=False))
    elif sys.stdout.isatty():
        draw_words(texts, found)
    else:
        print("\n".join([*about_answer(found), ""]))
        for word in found.words:
            print(f"{word.score:8.4f}  {word.text}")


def about_answer(found: bertsmith.Explanation) -> list[str]:
    """Lines that say what was answered, what is explained, and what the scores mean."""
    answer, label = found.answer, found.label
    if not isinstance(answer, bertsmith.Label | bertsmith.LabelSet):
        return [f"answer: {answer:.4g}", found.measures]
    predicted = answer.labels if isinstance(answer, bertsmith.LabelSet) else (answer.label,)
    shown = {name: f"{name} ({share:.1%})" for name, share in answer.probabilities.items()}
    lines = [f"answer: {', '.join(shown[name] for name in predicted) or 'no label'}"]
    if label is not None and (label,) != predicted:
        lines.append(f"explained: {shown[label]}")
    return [*lines, found.measures]


STRONGEST = 10  # words whose scores stand under a text on a terminal
GREEN, RED, BLUE = (70, 190, 100), (240, 100, 90), (90, 160, 240)
FAINT = 0.1  # share of the largest score below which a word has no colour


def draw_words(texts: dict[str, str], found: bertsmith.Explanation) -> None:
    """Draw the texts with their words on green for the label and on red against it (of rollout on
    blue), the fuller the larger their scores, and under them the words with the largest."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    largest = max(abs(word.score) for word in found.words) or 1.0
    console.print("\n".join(about_answer(found)), markup=False)
    for segment, text in texts.items():
        line = Text(text)
        for word in found.words:
            if word.segment == segment:
                line.stylize(_shade(word.score / largest, found.method), word.start, word.end)
        console.print("", line, sep="\n")
    console.print()
    for word in sorted(found.words, key=lambda word: -abs(word.score))[:STRONGEST]:
        score = Text(f"{word.score:8.4f}  ")
        console.print(score.append(word.text, style=_shade(word.score / largest, found.method)))
    if (left := len(found.words) - STRONGEST) > 0:
        console.print(f"{left} more with smaller scores", style="dim")


def _shade(share: float, method: str) -> str:
    """A style of rich for a share of the largest score: none near 0, then ever fuller colours."""
    full = BLUE if method == "rollout" else GREEN if share > 0 else RED
    mixed = (round(255 + (part - 255) * abs(share)) for part in full)
    return f"black on rgb({','.join(map(str, mixed))})" if abs(share) > FAINT else ""


@dataclass
class Report:
    """Write a report on runs as one HTML file that stands alone.

    Examples:
      bertsmith report runs/pretrain
      bertsmith report runs/tiny runs/mini --out compare.html
      bertsmith report quickstart
    """

    runs: Annotated[list[Path], Positional, Metavar("RUN...")]
    """Run directories of pretrain, finetune or embed train (several are compared), or one folder
    of quickstart."""
    out: Path | None = None
    """The file to write; a name without an ending gets .html. By default report.html in the run,
    or here when there are several runs."""


def run_report(settings: Report) -> None:
    """Write the report and print where it is."""
    from bertsmith.experiments.report import report, report_file

    out = report_file(settings.runs, settings.out)
    check_outputs((), {"--out": out})
    print(report(settings.runs, out))


SMALL = 1e-3  # figures below it have significant digits instead of decimals
NO_INTERVAL = "2 seeds: no interval"


@dataclass
class Compare:
    """Compare two fine-tuning runs on one dev set: how large is the difference, and is it luck?

    Examples:
      bertsmith compare runs/mrpc-base runs/mrpc-mine
      bertsmith compare runs/a runs/b --resamples 100000 --json

    A paired bootstrap: dev examples are drawn with replacement, the same ones for both runs. A
    difference is second run minus first. Where both have several seeds, their means are compared
    too.
    """

    first: Annotated[Path, Positional, Metavar("RUN")]
    """Run directory of finetune."""
    second: Annotated[Path, Positional, Metavar("RUN")]
    """Another one, of the same task and dev set."""
    resamples: int = 10_000
    """Resamples of the dev set."""
    json: bool = False
    """Print one JSON object: {"metrics": {name: {"first", "second", "difference", ...}}, ...}."""


def run_compare(settings: Compare) -> None:
    from bertsmith.reports.significance import compare

    result = compare(settings.first, settings.second, settings.resamples)
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Print a table of metrics, the count of examples, and a table of means over seeds."""
    width = max(len("mean over seeds"), *map(len, result["metrics"])) + 2
    figures = [*result["metrics"].values(), *result["seeds"].values()]
    wide = max(20, *(len(_row(figure)[-1]) for figure in figures))

    def line(name: str, cells: Sequence[str]) -> str:
        first, second, difference, interval = cells
        return f"{name:<{width}}{first:>9} {second:>9} {difference:>11}  {interval:<{wide}}"

    head = ("first", "second", "difference", "95% interval")
    examples = f"{result['examples']:,} dev examples"
    print(f"{result['task']}, {examples}, {result['resamples']:,} resamples\n")
    print(f"{line('', head)} p")
    for name, figure in result["metrics"].items():
        less = "  (less is better)" if figure.get("less_is_better") else ""
        print(f"{line(name, _row(figure))} {figure['p']:.4f}{less}")
    counts = "{better:,} examples better, {equal:,} alike, {worse:,} worse"
    print(f"\nthe second run answers {counts.format(**result)}")
    if result["seeds"]:
        print("\n" + line("mean over seeds", head).rstrip())
        for name, figure in result["seeds"].items():
            print(line(name, _row(figure)).rstrip())


def _row(figure: dict[str, Any]) -> list[str]:
    """Both figures, their difference and its interval."""
    first, second, interval = figure["first"], figure["second"], figure["interval"]
    # differences as their figures: small ones of larger figures may be rounding alone
    signed = f"+{_digits(max(abs(first), abs(second)))}"
    ends = " to ".join(f"{end:{signed}}" for end in interval) if interval else NO_INTERVAL
    cells = [f"{value:{_digits(value)}}" for value in (first, second)]
    return [*cells, f"{figure['difference']:{signed}}", ends]


def _digits(value: float) -> str:
    """Four decimals, which would show nothing of a small figure, such as an error of small scores.

    >>> _digits(0.5), _digits(-2e-7), _digits(0.0)
    ('.4f', '.4g', '.4f')
    """
    return ".4g" if 0 < abs(value) < SMALL else ".4f"


@dataclass(frozen=True, kw_only=True)
class Baseline(OwnFiles):
    """Measure what a task gives without any network: the line to print beside a model's figures.

    Examples:
      bertsmith baseline mrpc --data glue/MRPC
      bertsmith baseline classify --data reviews.csv --dev test.csv --text body --label stars

    Pairs of texts: how much they overlap, in 14 numbers; single texts: tf-idf. A linear model
    learns from the training file and is measured where `bertsmith evaluate` measures a model.
    """

    task: Annotated[str, Positional, Metavar("TASK")]
    """A data set such as mrpc; of your own files classify or regress."""
    data: Path
    """Training file, or folder with the data set's files."""
    dev: Path | None = None
    """Labelled file to measure on; default: the labelled test file of the folder, else dev."""
    json: bool = False
    """Print one JSON object: {"metrics": {name: number}, "examples", "train_examples", "task"}."""
    given: Annotated[tuple[str, ...], Hidden] = ()
    # of multilabel and choice, which have no baseline
    separator: Annotated[str, Hidden] = OwnFiles.separator
    options: Annotated[tuple[str, ...], Hidden] = OwnFiles.options


def run_baseline(settings: Baseline) -> None:
    from bertsmith.cli.predict import metric_lines
    from bertsmith.experiments.no_network import measure_no_network

    own = vars(group_values(settings, OwnFiles))
    given = tuple(name for name in settings.given if name in own)
    files = {"data": settings.data, "model": "", "out": Path()}
    task = make_task(Request(task=settings.task, **files, **own, given=given))
    check_reads(task.task_type, *given)
    result = measure_no_network(task, settings.data, settings.dev)
    if settings.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(metric_lines(result)))


@dataclass
class Doctor:
    """Check that this machine computes what it should, and measure how fast it multiplies.

    A small encoder runs forward and backward on every device, in every precision and on every
    attention path, and is compared with the same encoder in float64. Takes some ten seconds; the
    exit code is 1 when a comparison fails.

    Examples:
      bertsmith doctor
      bertsmith doctor --json
      bertsmith doctor --warm
    """

    warm: bool = False
    """Only compile what answers need, so that the first one does not wait for it, as in an image of
    a container."""
    json: bool = False
    """Print one JSON object."""


def run_doctor(settings: Doctor) -> int:
    if settings.warm:
        from bertsmith.inference.engines.native import warm_up

        seconds = warm_up()
        told = ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items())
        print(json.dumps({"seconds": seconds}) if settings.json else f"compiled and kept: {told}")
        return 0
    from bertsmith.training.doctor import examine

    found = examine()
    print(json.dumps(found, indent=2) if settings.json else described(found))
    return 0 if found["passed"] else 1


def described(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"versions   {versions}",
        f"system     {found['system']}",
        f"processor  {found['cpu']} ({', '.join(found['features']) or 'features unknown'})",
        f"cores      {found['cores']}, threads {found['threads']}, memory {found['memory_gb']} GB",
    ]
    lines += [f"device     {name}" for name in found["accelerators"]]
    lines += ["", "matmul of large square matrices:"]
    lines += [f"  {name:<16} {rate:>10,.1f} GFLOP/s" for name, rate in found["gigaflops"].items()]
    if times := found["matmul_times"]:
        took = ", ".join(f"{name} {took:g} ms" for name, took in times["milliseconds"].items())
        lines += [f"matmuls of a layer of {times['size']}, {times['tokens']:,} tokens a core:"]
        lines += [f"  {took}: {times['taken']} is what --precision auto-int8 would take now"]
    lines += ["", "the same encoder against float64 (relative error):"]
    lines.append("  device  precision  attention   forward   gradient  tolerance")
    for check in found["checks"]:
        lines.append(
            f"  {check['device']:<8}{check['precision']:<11}{check['attention']:<10}"
            f"{shown(check['forward_error'])} {shown(check['gradient_error'])}"
            f"{shown(check['tolerance'])}  {'ok' if check['passed'] else 'FAILED'}"
        )
    lines += ["", *(f"warning: {note}" for note in found["warnings"])]
    failed = sum(not check["passed"] for check in found["checks"])
    verdict = f"{failed} failed: do not train on these" if failed else "passed"
    lines.append(f"{len(found['checks'])} checks, {verdict}")
    return "\n".join(lines)


def shown(error: float | None) -> str:
    """An error in ten columns; None was not a number.

    >>> shown(0.000012), shown(None)
    ('   1.2e-05', '       nan')
    """
    return f"{float('nan') if error is None else error:10.1e}"
