"""What a second thread gains, beside what the machine can: two processes that share nothing.

A second thread cannot be expected to gain more than a second process does: what both lack to 2 is
what the cores share (cache, memory, the clock) and what neighbours on the machine take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.text.tokenizer.tokenizer import Tokenizer
from tokenizer_peers import OURS, OURS_LOCATED, System

ROUNDS = 61  # with 15 what a second thread gains came out anywhere from 1.66x to 2.01x


def own_ratios(systems: list[System], texts: list[str], folder: Path) -> dict[str, list[float]]:
    """What a second thread or process gains and offsets cost, of rounds of neighbouring passes.

    The machine's speed changes by the second, so that what is compared must lie side by side. Each
    variant first runs once unmeasured: memory then is as it leaves it itself.
    """
    ours, located = (next(s for s in systems if s.name == name) for name in (OURS, OURS_LOCATED))
    ratios: dict[str, list[float]] = {"threads": [], "processes": [], "offsets": []}
    with two_processes(folder, texts) as both:
        for _ in range(ROUNDS):
            spent = []
            for system, threads in ((ours, 1), (ours, 2), (located, 1)):
                system.encode(texts, threads)
                started = time.perf_counter()
                system.encode(texts, threads)
                spent.append(time.perf_counter() - started)
            both()
            ratios["threads"].append(spent[0] / spent[1])
            ratios["processes"].append(2 * spent[0] / both())
            ratios["offsets"].append(spent[2] / spent[0])
    return ratios


def medians(results: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of all their rounds' ratios."""
    ratios = [result["own_ratios"] for result in results]
    return {
        name: round(median(chain.from_iterable(one[name] for one in ratios)), 3)
        for name in ratios[0]
    }


def own_ratio_lines(summary: dict[str, dict[str, float]]) -> list[str]:
    """The medians, by name, as a section of Markdown."""
    lines = [f"## Ours alone: medians of {ROUNDS} rounds of neighbouring passes", ""]
    lines += ["Two processes share nothing: what they gain is what the second core gives.", ""]
    lines += ["| | two threads over one | two processes over one | offsets and word ids, time |"]
    lines += ["|---|---|---|---|"]
    return lines + [
        f"| {name} | {v['threads']:.2f}x | {v['processes']:.2f}x | {v['offsets'] - 1:+.0%} |"
        for name, v in summary.items()
    ]


@contextmanager
def two_processes(folder: Path, texts: Sequence[str]) -> Iterator[Callable[[], float]]:
    """Seconds until both have encoded all texts, each by one thread.

    `folder` holds the tokenizer.
    """
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_encode, args=(end, folder, texts)) for _, end in pipes]
    for process in processes:
        process.start()

    def seconds() -> float:
        started = time.perf_counter()
        for pipe, _ in pipes:
            pipe.send(True)
        for pipe, _ in pipes:
            pipe.recv()
        return time.perf_counter() - started

    seconds()  # both have begun
    try:
        yield seconds
    finally:
        for pipe, _ in pipes:
            pipe.send(False)
        for process in processes:
            process.join()


def _encode(pipe: Connection, folder: Path, texts: Sequence[str]) -> None:
    tokenizer = Tokenizer.from_pretrained(folder)
    while pipe.recv():
        tokenizer.encode_batch(texts, offsets=False, threads=1)
        pipe.send(None)
