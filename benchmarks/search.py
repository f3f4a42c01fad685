"""Search by exact cosine over stored vectors, beside NumPy's matmul and argpartition.

    python benchmarks/search.py FOLDER [--rows 1000000] [--size 384] [--queries 1 100]

FOLDER gets vectors.npy, random float32 (1.5 GB by default), unless it is there. Each system runs in
a process of its own: NumPy with all in memory (reading the file is shown on its own), bertsmith
from the file, which the system has in its cache. Seconds are the best of the rounds; memory is the
peak of the process less what it had after its imports. The rows found must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

TOP, ROUNDS, PART = 10, 3, 50_000


def make_vectors(path: Path, rows: int, size: int) -> None:
    """Write random vectors, unless they are there. Errors: ValueError for others than asked."""
    if not path.exists():
        random = np.random.default_rng(0)
        vectors = np.lib.format.open_memmap(path, "w+", np.float32, (rows, size))
        for start in range(0, rows, PART):
            part = vectors[start : start + PART]
            part[:] = random.standard_normal(part.shape, dtype=np.float32)
        vectors.flush()
    found = np.load(path, mmap_mode="r").shape
    if found != (rows, size):
        raise ValueError(
            f"{path} has {' x '.join(map(str, found))} numbers, not {rows} x {size}: remove it, or "
            "name its --rows and --size"
        )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def numpy_search(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    scores = queries @ vectors.T
    scores /= lengths
    rows = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    order = np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1)
    return np.take_along_axis(rows, order, axis=1)


def measure(system: str, path: Path, count: int) -> dict[str, float | int]:
    from bertsmith.inference.embeddings.search import search

    size = np.load(path, mmap_mode="r").shape[1]
    queries = np.random.default_rng(1).standard_normal((count, size), dtype=np.float32)
    before, seconds, read = peak_mib(), [], 0.0
    if system == "numpy":
        started = time.perf_counter()
        vectors = np.load(path)
        read = time.perf_counter() - started
    for _ in range(ROUNDS):
        started = time.perf_counter()
        if system == "numpy":
            rows = numpy_search(vectors, queries)
        else:
            rows = search(path, queries, TOP).rows
        seconds.append(time.perf_counter() - started)
    memory = peak_mib() - before
    return {"seconds": min(seconds), "read": read, "memory": memory, "check": hash(rows.tobytes())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # system, number of queries
    given = parser.parse_args()
    path = given.folder / "vectors.npy"
    if given.one:
        print(json.dumps(measure(given.one[0], path, int(given.one[1]))))
        return
    make_vectors(path, given.rows, given.size)
    for count in given.queries:
        found = {}
        for system in ("numpy", "bertsmith"):
            words = [sys.executable, __file__, str(given.folder), "--one", system, str(count)]
            environment = {"PYTHONHASHSEED": "0"}
            done = subprocess.run(
                words, capture_output=True, text=True, check=True, env=os.environ | environment
            )
            found[system] = json.loads(done.stdout)
            line = "{seconds:.2f} s, reading before {read:.2f} s, {memory:,.0f} MiB"
            print(f"{count} queries, {system}: {line.format(**found[system])}", flush=True)
        assert found["numpy"]["check"] == found["bertsmith"]["check"], "other rows were found"


if __name__ == "__main__":
    main()
