"""The engine and precision in which a model answers: measured on rows that it is to answer, kept.

~/.cache/bertsmith/engines/DIGEST.json      a choice; see `kept_choice`
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertsmith.base import VERSION
from bertsmith.base.files import kept_for_user
from bertsmith.checkpoints.config_json import config_path
from bertsmith.inference.engines.exported import model_files
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.kernels.llvm.blocks import cpu_features
from bertsmith.training.settings import LEAST_GAIN

FEWEST_ROWS = 800  # below, measuring costs more than it saves
SHARE, SAMPLE = 100, (8, 64)  # one row of so many is measured, within these numbers
TURNS = 3  # after a first one, which loads the weights and is not timed
TOLERANCE = 0.03  # as `doctor` allows bf16; 12 layers were off by 1.5% at most; see `deviation`
PACKAGES = {"bertsmith": "numba", "pytorch": "torch", "onnx": "onnxruntime", "openvino": "openvino"}

Compute = Callable[[Processor, np.ndarray], np.ndarray]
"""(processor, numbers of rows) -> the rows' outputs, float32 [N, K], or [T, K] of T tokens."""


class Trial(NamedTuple):
    """A processor beside the exact one on a sample of rows."""

    engine: str
    precision: str
    gain: float = 1.0  # the exact one's time over its own
    deviation: float = 0.0
    beside: str = ""  # the others

    def __str__(self) -> str:
        how = f"answers by {self.engine} in {self.precision}"
        beside = f" (beside it: {self.beside})" if self.beside else ""
        if self.gain == 1:
            return f"{how}: nothing faster is off by less than {TOLERANCE:.0%}{beside}"
        return (
            f"{how}, {self.gain:.1f}x as fast here and {self.deviation:.1%} off at most in a "
            f"sample{beside}; float32 precision is exact"
        )

    @property
    def is_taken(self) -> bool:
        """False where the deviation is no number."""
        return self.gain * (1 - LEAST_GAIN) >= 1 and self.deviation <= TOLERANCE


def quickest(exact: Processor, count: int, compute: Compute, others: Sequence[Processor]) -> Trial:
    """The quickest of the processors that agree with the exact one on some of `count` rows.

    They run by turns with it on rows that are evenly spread. Where nothing is gained, it is itself
    the answer.
    """
    few, many = SAMPLE
    rows = np.linspace(0, count - 1, min(max(count // SHARE, few), many)).astype(np.int64)
    # a few rows do not keep all cores busy, and other processes are none of this
    clock = time.process_time if exact.is_cpu else time.perf_counter
    processors = [exact, *others]
    outputs = [compute(each, rows) for each in processors]
    seconds = [math.inf] * len(processors)
    for _ in range(TURNS):
        for number, each in enumerate(processors):
            started = clock()
            compute(each, rows)
            seconds[number] = min(seconds[number], clock() - started)
    trials = [
        Trial(each.engine, each.precision, seconds[0] / own, deviation(outputs[0], found))
        for each, own, found in zip(others, seconds[1:], outputs[1:], strict=True)
    ]
    taken = (one for one in trials if one.is_taken)
    best = max(taken, key=lambda one: one.gain, default=Trial(exact.engine, exact.precision))
    rest = (
        f"{o.engine} in {o.precision} {o.gain:.1f}x, {o.deviation:.1%} off"
        for o in trials
        if o != best
    )
    return best._replace(beside="; ".join(rest))


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
    largest = np.linalg.norm(quick - exact, axis=1).max()
    if not size:  # all scores are alike
        return math.inf if largest else 0.0
    return float(largest / size)


def kept_choice(
    folder: Path, processors: Sequence[Processor], work: object, measure: Callable[[], Trial]
) -> Processor:
    """The choice among these processors that was kept for this model, work and machine.

    Without one it is measured and kept, if the disk allows it. A line on stderr says which it is.
    """
    versions = [VERSION, Trial._fields, *(_version(PACKAGES[each.engine]) for each in processors)]
    digest = request_digest([folder], processors, work, sorted(cpu_features()), versions)
    kept, source = kept_for_user("engines", digest, lambda: measure()._asdict())
    trial = Trial(**kept)
    print(f"{folder}: {trial}; {source}", file=sys.stderr)
    return next(o for o in processors if (o.engine, o.precision) == (trial.engine, trial.precision))


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""  # a package of another name has the module, as onnxruntime-gpu


def request_digest(models: Iterable[Path], *settings: object) -> str:
    """A digest of what decides the numbers besides input and pieces: the files of models, settings.

    Of the files it takes path, size and time, which are quick to tell.
    """
    known = sha256()
    read = ([config_path(folder), *chain(*model_files(folder))] for folder in models)
    for file in chain.from_iterable(read):
        stat = file.stat()
        known.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\0".encode())
    known.update(repr(settings).encode("utf-8", "backslashreplace"))
    return known.hexdigest()
