"""Seconds from the command `bertsmith pretrain` to the end of its first step.

    python benchmarks/first_step.py STORE [--sizes tiny mini base] [--batch 32] [--rounds 3]

STORE is a finished token store. Each round starts the command anew; the first, which compiles the
kernels where they have not been used yet, is not counted. What was measured before at other sizes,
or with other rows, stays in the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.training.engine import choose_engine, machine, measure_peak
from bertsmith.training.pretraining.settings import read_recipe


def seconds_to_first_step(store: Path, size: str, batch: int) -> float:
    """Until the log has the line of step 1."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "log.jsonl"
        flags = ["--steps=1", "--warmup-ratio=0", "--log-every=1", f"--batch-size={batch}"]
        command = [sys.executable, "-m", "bertsmith", "pretrain", "--config", "fast"]
        started = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--corpus", str(store), "--out", str(log.parent), "--size", size, *flags],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while not (log.exists() and '"step": 1,' in log.read_text(encoding="utf-8")):
            if process.poll() is not None:
                raise SystemExit(f"the command ended with {process.returncode}")
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        process.kill()
        process.wait()
    return seconds


def measure(store: Path, size: str, batch: int, rounds: int) -> dict[str, Any]:
    seconds_to_first_step(store, size, batch)
    seconds = [seconds_to_first_step(store, size, batch) for _ in range(rounds)]
    return {
        "size": size,
        "rows": batch,
        "seconds": round(median(seconds), 2),
        "rounds": [round(value, 2) for value in seconds],
        "date": datetime.now(UTC).date().isoformat(),
    }


def table(record: dict[str, Any]) -> str:
    about = record["machine"]
    rows = "".join(
        f"| {row['size']} | {row['rows']} | {len(row['rounds'])} | **{row['seconds']:.1f} s** "
        f"| {', '.join(f'{seconds:.1f}' for seconds in row['rounds'])} | {row['date']} |\n"
        for row in record["results"]
    )
    return (
        "# First step\n\n"
        f"The last of its commands: `{record['command']}`, {record['date']}, {about['cpu']}, "
        f"{about['threads']} threads, torch {about['torch']}. Wall time from the command "
        "`bertsmith pretrain --config fast` to the end of its first step; medians.\n\n"
        "| size | rows of the step | rounds | median | all rounds | date |\n"
        "|---|---|---|---|---|---|\n" + rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", metavar="STORE", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mini", "base"])
    parser.add_argument("--batch", type=int, default=32, help="rows of the step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path = arguments.out / "first_step.json"
    results = read_json(path)["results"] if path.exists() else []
    chosen = {(size, arguments.batch) for size in arguments.sizes}
    results = [row for row in results if (row["size"], row["rows"]) not in chosen]
    for size in arguments.sizes:
        results.append(measure(arguments.store, size, arguments.batch, arguments.rounds))
    # as the command, and behind it: it asks for huge pages here
    engine = choose_engine(precision=read_recipe("fast").precision)
    words = [Path(word).name for word in sys.argv[1:]]
    record = {
        "command": " ".join(["python benchmarks/first_step.py", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(engine, measure_peak(engine)),
        "results": results,
    }
    write_json(path, record)
    write_text(path.with_suffix(".md"), table(record))
    print(table(record))


if __name__ == "__main__":
    main()
