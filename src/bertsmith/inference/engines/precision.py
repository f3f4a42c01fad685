"""The precision in which a model answers, measured on rows that it is to answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bertsmith.inference.engines.processor import Processor
from bertsmith.training.settings import LEAST_GAIN

FEWEST_ROWS = 800  # below, measuring costs more than it saves
SHARE, SAMPLE = 100, (8, 64)  # one row of so many is measured, within these numbers
TURNS = 2  # after a first one, which loads the weights and is not timed
TOLERANCE = 0.03  # as `doctor` allows bf16; 12 layers were off by 1.5% at most; see `deviation`

Compute = Callable[[Processor, np.ndarray], np.ndarray]
"""(processor, numbers of rows) -> the rows' outputs, float32 [N, K], or [T, K] of T tokens."""


class Trial(NamedTuple):
    """A precision beside float32 on a sample of rows."""

    precision: str
    gain: float  # float32's time over its own
    deviation: float

    @property
    def is_taken(self) -> bool:
        """False where the deviation is no number."""
        return self.gain * (1 - LEAST_GAIN) >= 1 and self.deviation <= TOLERANCE


def quickest(
    processor: Processor, count: int, compute: Compute, precisions: Sequence[str]
) -> Trial | None:
    """The quickest of the precisions that agree with float32 on some of `count` rows.

    They run by turns with float32, which `processor` has, on rows that are evenly spread. None:
    nothing is gained, or there are too few rows to gain by it.
    """
    if count < FEWEST_ROWS or not precisions:
        return None
    few, many = SAMPLE
    rows = np.linspace(0, count - 1, min(max(count // SHARE, few), many)).astype(np.int64)
    # the time that other processes take of a CPU does not count
    clock = time.process_time if processor.is_cpu else time.perf_counter
    processors = [processor, *(replace(processor, precision=name) for name in precisions)]
    outputs = [compute(each, rows) for each in processors]
    seconds = [math.inf] * len(processors)
    for _ in range(TURNS):
        for number, each in enumerate(processors):
            started = clock()
            compute(each, rows)
            seconds[number] = min(seconds[number], clock() - started)
    trials = [
        Trial(name, seconds[0] / own, deviation(outputs[0], found))
        for name, own, found in zip(precisions, seconds[1:], outputs[1:], strict=True)
    ]
    return max((one for one in trials if one.is_taken), key=lambda one: one.gain, default=None)


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
