"""Dev figures of every task from the MiniLM-size weights, beside the Trainer's and published ones.

    python benchmarks/finetune_table.py --data DATA --work WORK [--rows mrpc rte ...] [--minutes 60]
    python benchmarks/finetune_table.py --list

Runs what is missing in results/finetune_table.json, a training at a time, each with a seed and a
process of its own, and writes down each one's figures when it ends: started again, it goes on.
Several may run at once, each with rows of its own. WORK (outside the repository) keeps the prepared
data. What is trained, and on what, is in ROWS and in benchmarks/finetune_data.py; a row whose
settings there are not those of its results begins anew. Weights, the Trainer's best and its
settings are those of benchmarks/finetune.py. Figures are those of the last epoch on dev (bar 3: of
the best, as `bertsmith finetune` does unless told otherwise); `bertsmith evaluate` measures each
run on the files in a row's `tests` too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.training.engine import cpu_name
from finetune import Setting, not_below, published_model, spread, train_ours, train_theirs, values
from finetune_data import prepare

OURS, THEIRS = "bertsmith", "trainer, best"
MINILM, TURC = "MiniLM L6 x H384, dev", "Turc et al. Small (4/512), test"


@dataclass(frozen=True)
class Row:
    """A line of the table; seeds are 1 to `seeds`."""

    setting: Setting
    seeds: int
    trainer: int = 0  # seeds of the Trainer at its best
    data: str = ""  # name in finetune_data.py, where it is not the task's
    flags: tuple[str, ...] = ()  # of `bertsmith finetune`
    tests: tuple[str, ...] = ()  # files of the prepared folder to measure each run on
    published: str = ""  # of the nearest model; sources in `page`


def by_default(task: str) -> Setting:
    """What `bertsmith finetune` does when only task, model and data are named."""
    return Setting(task, epochs=0, rate=0.0, max_length=0)


BEST = ("--keep", "best")
ROWS = {
    # Bar 2: quality.
    "mrpc": Row(Setting("mrpc", epochs=5), 5, 3, published=f"88.9 ({MINILM})"),
    "rte": Row(Setting("rte", epochs=5), 5, 1, published=f"68.8 ({MINILM})"),
    "stsb": Row(Setting("stsb", epochs=5), 5, 1, published=f"78.8 / 77.0 ({TURC})"),
    "cola": Row(Setting("cola", epochs=5), 5, 1, published=f"47.5 ({MINILM})"),
    "sst2": Row(Setting("sst2", 20_000), 3, 1, published=f"91.5 ({MINILM}; whole set)"),
    "mnli": Row(Setting("mnli", 9_000), 3, 1, published=f"83.3 ({MINILM}; whole set)"),
    "qqp": Row(Setting("qqp", 9_000, 5_000), 3, 3, published=f"90.6 ({MINILM}; whole set)"),
    "qnli": Row(Setting("qnli", 10_000), 3, 3, published=f"90.5 ({MINILM}; whole set)"),
    "squad1": Row(
        Setting("squad1", 10_000, epochs=2, rate=1e-4, max_length=384),
        1,
        published="F1 88.5 (BERT-BASE, dev; whole set)",
    ),
    "squad2": Row(
        Setting("squad2", 10_000, epochs=2, rate=1e-4, max_length=384),
        1,
        tests=("test.json",),
        published=f"F1 75.6 ({MINILM}; the real training set)",
    ),
    "ner": Row(
        # rows of several sentences each: about as many in a step as below
        Setting("ner", epochs=5, batch=8, rate=1e-4, max_length=256),
        1,
        data="conll",
        tests=("eng.testb",),
        published="96.4 dev, 92.4 test (BERT-BASE, paper's Table 7)",
    ),
    "ner-sentences": Row(
        Setting("ner", epochs=5, rate=1e-4, max_length=256),
        1,
        data="conll",
        flags=("--no-document-context",),
        tests=("eng.testb",),
        published="96.4 dev, 92.4 test (BERT-BASE, paper's Table 7)",
    ),
    "codah": Row(Setting("codah", epochs=5), 3),
    # Bar 3: stability.
    "rte-20-seeds": Row(by_default("rte"), 20, flags=BEST),
    "mrpc-10-seeds": Row(by_default("mrpc"), 10, flags=BEST),
    "rte-paper-adam": Row(
        by_default("rte"), 10, flags=(*BEST, "--optimizer", "paper-adam", "--max-retries", "0")
    ),
    "rte-made-to-collapse": Row(Setting("rte", 1_000, rate=1e-3), 3, flags=BEST),
}


def missing(record: dict[str, Any], names: list[str]) -> Iterator[tuple[str, str, int]]:
    """(Row, system, seed) of what is still to run."""
    for name in names:
        row, found = ROWS[name], results_of(name, record)
        for system, seeds in ((OURS, row.seeds), (THEIRS, row.trainer)):
            done = found.get(system, {})
            yield from (
                (name, system, seed) for seed in range(1, seeds + 1) if str(seed) not in done
            )


def results_of(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """{"setting", system: {seed: figures}} of a row; without those of other settings."""
    setting = told(ROWS[name])
    found = record["rows"].get(name, {})
    return found if found.get("setting") == setting else {"setting": setting}


def add(path: Path, name: str, system: str, seed: int, figures: dict[str, Any]) -> None:
    """Write a training's figures into the record as it is now, and the page anew."""
    record = read_record(path)
    record["rows"][name] = row = results_of(name, record)
    row.setdefault(system, {})[str(seed)] = figures
    record["cpu"] = cpu_name()
    write_json(path, record)
    write_text(path.with_suffix(".md"), page(record))


def read_record(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {"rows": {}}


def measure(name: str, system: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once; its figures, with those of the row's test files."""
    row = ROWS[name]
    setting = row.setting
    data = prepare(
        row.data or setting.task, arguments.data, arguments.work, setting.examples, setting.dev
    )
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        out = Path(folder, "run")
        same = (setting, data, arguments.model, seed, arguments.threads, out)
        if system != OURS:
            return train_theirs(system, *same)
        figures = train_ours(*same, *row.flags)
        answers = read_json(out / "dev_scores.json")["examples"]
        figures["is_constant"] = len({str(answer["predicted"]) for answer in answers}) == 1
        figures["tests"] = {file: evaluate(out, data / file, arguments) for file in row.tests}
    return figures


def evaluate(run: Path, file: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """What `bertsmith evaluate` measures on a file."""
    command = [sys.executable, "-m", "bertsmith", "evaluate", str(run), "--data", str(file)]
    threads = {"OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=os.environ | threads
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)["metrics"]


def page(record: dict[str, Any]) -> str:
    """The table as Markdown."""
    text = (
        "# Fine-tuning: every task from the MiniLM-size weights\n\n"
        f"`python benchmarks/finetune_table.py`, {record.get('cpu', '')}; what is trained on what "
        "is said there and in `benchmarks/finetune_data.py`. Dev figures in percent, mean +- "
        "standard deviation (seeds). The rule: not below the Trainer's by more than the larger of "
        "0.5 points and one pooled standard deviation. Published: MiniLM from microsoft/unilm "
        "`minilm/README.md`, Turc et al. from the README of google-research/bert, BERT-BASE from "
        "the paper. Ours start from MiniLM weights that were trained on sentence pairs since, and "
        "most see a part of the training set only: near relatives, not the same experiment. "
        "squad2's dev set is that on which its threshold was set; what it is worth is the figure "
        "on test.json.\n\n"
        "| row | training | metric | bertsmith | Trainer, best | rule | published |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for name, found in known_rows(record).items():
        systems = {system: found[system] for system in (OURS, THEIRS) if found.get(system)}
        first = next(iter(next(iter(systems.values())).values()))
        for k, metric in enumerate(first["metrics"]):
            cells = [figure(systems.get(system, {}), metric) for system in (OURS, THEIRS)]
            rule = ""
            if all(cells):
                holds, _ = not_below(*(values(runs, metric) for runs in systems.values()))
                rule = "holds" if holds else "NO"
            about = [name, told(ROWS[name]), metric] if not k else ["", "", metric]
            published = "" if k else ROWS[name].published
            text += f"| {' | '.join([*about, *cells, rule, published])} |\n"
    return text + tests_page(record) + stability_page(record)


def known_rows(record: dict[str, Any]) -> dict[str, Any]:
    """Those that ROWS has, in its order."""
    return {name: record["rows"][name] for name in ROWS if name in record["rows"]}


def told(row: Row) -> str:
    """A row's settings in words.

    >>> told(Row(Setting("rte", 500, 90, epochs=0, rate=0.0), 1, flags=BEST))
    '500, dev 90, default epochs, batch 32, default rate, length 128 --keep best'
    """
    setting = row.setting
    choices = {"epochs": setting.epochs, "rate": setting.rate, "length": setting.max_length}
    epochs, rate, length = (
        f"{name} {value:g}" if value else f"default {name}" for name, value in choices.items()
    )
    data = f"{setting.examples or 'all'}" + (f", dev {setting.dev}" if setting.dev else "")
    words = f"{data}, {epochs}, batch {setting.batch}, {rate}, {length}"
    return " ".join([words, *row.flags])


def figure(runs: dict[str, Any], metric: str) -> str:
    """Mean, spread and seeds.

    >>> figure({"1": {"metrics": {"f1": 0.8}}, "2": {"metrics": {"f1": 0.9}}}, "f1")
    '85.0 +- 7.1 (2)'
    """
    found = [run["metrics"][metric] for run in runs.values() if metric in run["metrics"]]
    if not found:
        return ""
    return f"{100 * mean(found):.1f} +- {100 * spread(found):.1f} ({len(found)})"


def tests_page(record: dict[str, Any]) -> str:
    """Figures on further files."""
    lines = [
        f"- {name}, {file}, seed {seed}: "
        + ", ".join(f"{metric} {100 * value:.1f}" for metric, value in figures.items())
        for name, found in known_rows(record).items()
        for seed, run in found.get(OURS, {}).items()
        for file, figures in run["tests"].items()
    ]
    return "\n## Measured on other files too\n\n" + "\n".join(lines) + "\n" if lines else ""


def stability_page(record: dict[str, Any]) -> str:
    """How often a training collapsed."""
    text = (
        "\n## Stability\n\nWith a collapse: `bertsmith finetune` found one answer to all of dev, "
        "or a training loss of guessing, and, but for --max-retries 0, trained with another seed. "
        "The lowest and highest figure are of the runs as they ended.\n\n"
        "| row | runs | with a collapse | one answer to all of dev in the end | lowest | highest "
        "| first reason |\n|---|---|---|---|---|---|---|\n"
    )
    for name, found in known_rows(record).items():
        if runs := found.get(OURS, {}):
            metric = next(iter(next(iter(runs.values()))["metrics"]))
            scores = [100 * value for value in values(runs, metric)]
            reasons = [run["restarts"][0] for run in runs.values() if run["restarts"]]
            constant = sum(run["is_constant"] for run in runs.values())
            text += f"| {name} | {len(runs)} | {len(reasons)} | {constant} | {min(scores):.1f} "
            text += f"| {max(scores):.1f} | {''.join(reasons[:1])} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", default=[*ROWS])
    parser.add_argument("--list", action="store_true", help="the rows, and what is missing")
    parser.add_argument("--data", type=Path, help="folder with glue/, squad/ ...")
    parser.add_argument("--work", type=Path, help="folder for prepared data, outside this project")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing later")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=published_model())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path = arguments.out / "finetune_table.json"
    tasks = list(missing(read_record(path), arguments.rows))
    if arguments.list:
        for name in arguments.rows:
            rest = sum(row == name for row, _, _ in tasks)
            print(f"{name:22} {rest:2} of {ROWS[name].seeds + ROWS[name].trainer} to run")
        return
    if arguments.data is None or arguments.work is None:
        parser.error("--data and --work are needed to run")
    arguments.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for name, system, seed in tasks:
        if time.monotonic() - started > 60 * arguments.minutes:
            break
        figures = measure(name, system, seed, arguments)
        add(path, name, system, seed, figures)
        print(f"{name}, {system}, seed {seed}: {figures}", flush=True)


if __name__ == "__main__":
    main()
