"""Steps of a budget in minutes: beside a busy core, and where no kernel was compiled before.

    python benchmarks/busy_neighbour.py [--store STORE] [--minutes 4] [--rounds 3]

STORE is a finished token store; without one that of `bertsmith quickstart` is made. Each round runs
the quickstart's pre-training three times, one after the other: with an empty folder for Numba's
machine code; again, on the free machine; and beside a loop that never ends, pinned to one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.base.files import read_json, read_json_lines, write_json, write_text
from bertsmith.checkpoints.run_folder import STATE_FILE, RunFolder
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.experiments.installed_prose import harvest_prose
from bertsmith.experiments.settings import QuickstartSettings
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.engine import choose_engine, machine, measure_peak

TURNS = ("no kernels", "free", "busy")
QUICKSTART = QuickstartSettings()
LOOP = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def make_store(folder: Path) -> Path:
    """The quickstart's, of the prose of this Python installation."""
    modules = harvest_prose(workers=QUICKSTART.workers)
    documents = [Document(m.name, 1, m.paragraphs) for m in modules if m.paragraphs]
    tokenizer = Tokenizer(train_vocabulary(documents, QUICKSTART.vocab_size))
    build_store(
        [], tokenizer, folder, BuildSettings(workers=QUICKSTART.workers), documents=documents
    )
    return folder


@contextmanager
def busy_core() -> Iterator[None]:
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(core)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(store: Path, minutes: float, kernels: Path) -> dict[str, Any]:
    """One pre-training, with Numba's machine code in the folder `kernels`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "bertsmith", "pretrain", f"--corpus={store}"]
        # the quickstart's rate is that of the command, if nobody names another
        flags = [f"--minutes={minutes:g}", f"--size={QUICKSTART.size}"]
        subprocess.run(
            [*command, f"--out={out}", *flags],
            env=os.environ | {"NUMBA_CACHE_DIR": str(kernels)},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        steps = read_json(out / "result.json")["steps"]
        state = read_json(RunFolder(out).saved()[-1] / STATE_FILE)["loop"]
        evaluations = (
            sum(line["event"] == "evaluate" for line in read_json_lines(out / "log.jsonl")) - 1
        )
    share = state["evaluating"] / state["seconds"]
    return {"steps": steps, "evaluations": evaluations, "evaluation_share": round(share, 4)}


def table(record: dict[str, Any]) -> str:
    about, rounds = record["machine"], record["rounds"]
    rows = "".join(
        f"| {turn} | {number + 1} | {one[turn]['steps']:,} | {one[turn]['evaluations']} "
        f"| {one[turn]['evaluation_share']:.1%} |\n"
        for turn in TURNS
        for number, one in enumerate(rounds)
    )
    return (
        "# A busy neighbour, and a new machine\n\n"
        f"`{record['command']}`, {record['date']}, {about['cpu']}, {about['threads']} threads, "
        f"torch {about['torch']}, {about['precision']}. Steps that the quickstart's pre-training "
        f"makes in {record['minutes']:g} minutes.\n\n"
        "| turn | round | steps | evaluations on the way | their share of the time |\n"
        "|---|---|---|---|---|\n"
        f"{rows}\nBeside a loop pinned to one core: **{record['busy']:.1%}** of the free machine's "
        f"steps (bar: 45%). With no kernel compiled: **{record['no kernels']:.1%}** (bar: 97%). "
        "Medians over the rounds.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path)
    parser.add_argument("--minutes", type=float, default=QUICKSTART.minutes)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = arguments.store or make_store(Path(folder) / "store")
        for number in range(arguments.rounds):
            kernels, made = Path(folder) / f"kernels-{number}", {}
            for turn in TURNS:
                with busy_core() if turn == "busy" else nullcontext():
                    made[turn] = run(store, arguments.minutes, kernels)
                print(number, turn, made[turn], flush=True)
            rounds.append(made)
    engine = choose_engine()
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(engine, measure_peak(engine)),
        "minutes": arguments.minutes,
        "rounds": rounds,
        **{
            turn: median(one[turn]["steps"] / one["free"]["steps"] for one in rounds)
            for turn in ("busy", "no kernels")
        },
    }
    write_json(arguments.out / "busy_neighbour.json", record)
    write_text(arguments.out / "busy_neighbour.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
