"""Seconds from the command `bertsmith pretrain` to the end of its first step.

    python benchmarks/first_step.py STORE [--sizes tiny mini base] [--batch 32] [--rounds 3]

STORE is a finished token store. Each round starts the command anew; the first, which compiles the
kernels where they have not been used yet, is not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median


def seconds_to_first_step(store: Path, size: str, batch: int) -> float:
    """Until the log has the line of step 1."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "log.jsonl"
        flags = ["--steps", "1", "--warmup", "0", "--log-every", "1", "--batch", str(batch)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mini", "base"])
    parser.add_argument("--batch", type=int, default=32, help="rows of the step")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for size in arguments.sizes:
        settings = arguments.store, size, arguments.batch
        seconds_to_first_step(*settings)
        rounds = [seconds_to_first_step(*settings) for _ in range(arguments.rounds)]
        print(f"{size}: {median(rounds):.1f} s ({', '.join(f'{value:.1f}' for value in rounds)})")


if __name__ == "__main__":
    main()
