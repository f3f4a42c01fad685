"""A resume at step 10 and one at step 1,000,000 of a store of 1e9 tokens: seconds to the next step.

    python benchmarks/resume_cost.py FOLDER [--rounds 5]

FOLDER gets the store of large_store.py (2.4 GB) and two runs of a tiny model. The first trains ten
steps. The second is its copy, which says that it has made 1,000,000: the checkpoint has that step
and the stream's position there, and is sealed again; the log has 100,000 lines. A round resumes
each of them: `bertsmith pretrain --resume` from its start until the log has the line of the next
step, when it is killed. A first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import read_json, read_json_lines, write_json, write_text
from bertsmith.base.settings import from_mapping, to_mapping
from bertsmith.checkpoints.run_folder import MANIFEST_FILE, STATE_FILE, RunFolder, write_manifest
from bertsmith.corpus.examples.mixture import open_stream
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.blocks import MANIFEST
from bertsmith.corpus.store.store import TokenStore
from bertsmith.training.engine import cpu_name
from bertsmith.training.pretraining.settings import PretrainSettings
from large_store import make_billion

NEAR, FAR = 10, 1_000_000  # steps
LOG = "log.jsonl"
PRETRAIN = (sys.executable, "-m", "bertsmith", "pretrain")


def make_far(store: Path, near: Path, out: Path) -> None:
    """The same run as if it had come to step 1,000,000, with a line of the log every ten steps."""
    shutil.copytree(near, out)
    run, opened = RunFolder(out), TokenStore.open(store)
    record, checkpoint = run.settings(), run.saved()[-1]
    settings = from_mapping(PretrainSettings, record["settings"], str(out))
    rows, vocabulary = settings.examples(settings.max_length), opened.tokenizer.vocabulary
    stream = open_stream(opened.train, vocabulary, rows, settings.seed)
    position = stream.advance(Position(), FAR * settings.batch_size)
    state = read_json(checkpoint / STATE_FILE)
    tokens = state["loop"]["tokens"] * (FAR // NEAR)
    state["loop"] |= {"step": FAR, "position": to_mapping(position), "tokens": tokens}
    checkpoint = checkpoint.rename(checkpoint.with_name(f"step-{FAR:08d}"))
    (checkpoint / MANIFEST_FILE).unlink()
    write_json(checkpoint / STATE_FILE, state | {"step": FAR})
    write_manifest(checkpoint, {"step": FAR, "identity": record["identity"]})
    assert run.latest_valid() == (checkpoint, [])
    line = next(line for line in read_json_lines(out / LOG) if line.get("step") == NEAR)
    lines = (json.dumps(line | {"step": step}) for step in range(NEAR, FAR + 1, NEAR))
    write_text(out / LOG, "\n".join(lines) + "\n")


def seconds_to_next_step(store: Path, out: Path, step: int, log: bytes) -> tuple[float, float]:
    """(wall, processor) time of the process until the log's line of the step behind `step`."""
    (out / LOG).write_bytes(log)  # without the lines of the round before
    flags = ["--resume", f"--steps={2 * FAR}", f"--checkpoint-every={2 * FAR}"]
    command = [*PRETRAIN, f"--corpus={store}", f"--out={out}", *flags]
    line = f'"step": {step + 1},'.encode()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while line not in end_of(out / LOG):
        if process.poll() is not None:
            raise SystemExit(f"the command ended with {process.returncode}")
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    process.kill()
    used = os.wait4(process.pid, 0)[2]
    return seconds, used.ru_utime + used.ru_stime


def end_of(file: Path) -> bytes:
    with file.open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
        return log.read()


def table(record: dict[str, Any]) -> str:
    rows = "".join(
        f"| {step:,} | {record['log_bytes'][step] / 1e6:.1f} MB | **{wall:.2f} s** | {used:.2f} s "
        f"| {', '.join(f'{seconds:.2f}' for seconds, _ in record['rounds'][step])} |\n"
        for step, (wall, used) in record["medians"].items()
    )
    return (
        "# What a resume costs\n\n"
        f"`{record['command']}`, {record['date']}, {record['cpu']}, {record['cores']} cores; a "
        f"tiny model, a store of {record['tokens']:,} tokens. Wall time of `bertsmith pretrain "
        "--resume` from its start to the end of its first step, the files in the system's memory; "
        f"medians of {len(record['rounds'][NEAR])} rounds, in each of which both are resumed.\n\n"
        "| resumed at step | log | to the next | processor time | rounds |\n|---|---|---|---|---|\n"
        f"{rows}\nThe later one takes {record['ratios'][0]:.2f} times as long, and "
        f"{record['ratios'][1]:.2f} times the processor time.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    store = arguments.folder / "billion"
    runs = {step: arguments.folder / f"run-{step}" for step in (NEAR, FAR)}
    if not (store / MANIFEST).is_file():
        make_billion(store)
    for out in runs.values():
        shutil.rmtree(out, ignore_errors=True)
    flags = ["--size=tiny", f"--steps={NEAR}", "--log-every=1", "--loggers"]
    first = [*PRETRAIN, f"--corpus={store}", f"--out={runs[NEAR]}", *flags]
    subprocess.run(first, check=True, stdout=subprocess.DEVNULL)
    make_far(store, runs[NEAR], runs[FAR])
    logs = {step: (out / LOG).read_bytes() for step, out in runs.items()}
    rounds: dict[int, list[tuple[float, float]]] = {step: [] for step in runs}
    for number in range(arguments.rounds + 1):
        for step, out in runs.items():
            seconds = seconds_to_next_step(store, out, step, logs[step])
            rounds[step] += [seconds] * (number > 0)
    medians = {step: np.median(times, axis=0).tolist() for step, times in rounds.items()}
    record = {
        "command": "python benchmarks/resume_cost.py FOLDER",
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "tokens": TokenStore.open(store).train.num_tokens,
        "log_bytes": {step: len(log) for step, log in logs.items()},
        "rounds": rounds,
        "medians": medians,
        "ratios": (np.array(medians[FAR]) / medians[NEAR]).tolist(),
    }
    write_json(arguments.out / "resume_cost.json", record)
    write_text(arguments.out / "resume_cost.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
