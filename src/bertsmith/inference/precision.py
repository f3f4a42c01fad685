"""float32 or bf16: in which of them a model answers, measured on rows that it is to answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bertsmith.training.engine import LEAST_GAIN, Engine, has_bf16

FEWEST_ROWS = 800  # below, measuring costs more than bf16 saves
SHARE, SAMPLE = 100, (8, 64)  # one row of so many is measured, within these numbers
TURNS = 2  # after a first one, which loads the weights and is not timed
TOLERANCE = 0.03  # as `doctor` allows bf16; 12 layers were off by 1.5% at most; see `deviation`

Compute = Callable[[Engine, np.ndarray], np.ndarray]
"""(engine, numbers of rows) -> the rows' outputs, float32 [N, K], or [T, K] of their T tokens."""


class Trial(NamedTuple):
    """Seconds in both precisions, and the deviation of bf16, on a sample of rows."""

    float32: float
    bf16: float
    deviation: float

    @property
    def takes_bf16(self) -> bool:
        """False where the deviation is no number."""
        is_faster = self.bf16 <= (1 - LEAST_GAIN) * self.float32
        return is_faster and self.deviation <= TOLERANCE


def try_bf16(engine: Engine, count: int, compute: Compute) -> Trial | None:
    """Run a float32 engine and the same in bf16 by turns on some of `count` rows, evenly spread.

    None: bf16 has no hardware, or there are too few rows to gain by it.
    """
    if count < FEWEST_ROWS or not has_bf16(engine.device):
        return None
    few, many = SAMPLE
    rows = np.linspace(0, count - 1, min(max(count // SHARE, few), many)).astype(np.int64)
    # the time that other processes take of a CPU does not count
    clock = time.process_time if engine.device.type == "cpu" else time.perf_counter
    engines = engine, replace(engine, precision="bf16")
    exact, quick = (compute(each, rows) for each in engines)
    seconds: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for each, taken in zip(engines, seconds, strict=True):
            started = clock()
            compute(each, rows)
            taken.append(clock() - started)
    return Trial(min(seconds[0]), min(seconds[1]), deviation(exact, quick))


def deviation(exact: np.ndarray, quick: np.ndarray) -> float:
    """The largest error of a row [N, K] over the root mean square of the rows' norms.

    Where a row is a single score, such as a year, over their standard deviation. For vectors 0.03
    is a cosine of 0.9995.

    >>> deviation(np.array([[3.0, 4.0], [0.0, 5.0]]), np.array([[3.0, 4.0], [0.5, 5.0]]))
    0.1
    >>> deviation(np.array([[1990.0], [2010.0]]), np.array([[1991.0], [2010.0]]))
    0.1
    """
    origin = exact.mean() if exact.shape[1] == 1 else 0.0
    size = np.sqrt(np.square(exact - origin).sum(axis=1).mean())
    return float(np.linalg.norm(quick - exact, axis=1).max() / size)
