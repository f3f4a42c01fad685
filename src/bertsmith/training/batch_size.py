"""How many rows to compute at once: the settings' share, or (`--batch auto`) found by trying.

A step's batch belongs to the recipe; it is cut into micro-batches whose gradients are summed, so
the number found here changes speed and memory, and the result by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bertsmith.model.encoder import ModelConfig
from bertsmith.training.memory import StepShape, step_memory

MARGIN = 0.1  # of the memory, left free: rows of a later batch may hold more predictions
GAIN = 1.05  # a larger micro-batch must be this much faster, or it only costs memory


@dataclass(frozen=True)
class MicroBatch:
    """What was found: `rows` at once, and why, in one line."""

    rows: int
    rule: str


def find_micro_batch(
    batch: int,
    fits: Callable[[int], bool],
    rate: Callable[[int], float] | None = None,
    workers: int = 1,
) -> MicroBatch:
    """The largest number of rows that divides the batch and fits.

    With `rate` (tokens a second at that many rows) it grows only as long as that makes it faster:
    the choice for a CPU, whose caches are full long before its memory is. Every one of `workers`
    gets equally many micro-batches where the batch allows it. The sizes tried at least double.

    Errors: ValueError when not even one row fits.

    >>> find_micro_batch(96, fits=lambda rows: rows <= 50).rows
    48
    >>> find_micro_batch(256, fits=lambda rows: True, rate=lambda rows: min(rows, 16)).rows
    16
    """
    sizes = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n % workers == 0]
    if not sizes:  # fewer rows than workers, or not a multiple of them
        sizes = [
            n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * workers < batch)
        ]
    chosen, best, why = 0, 0.0, f"all {batch} rows at once fit"
    for size in sizes:
        if size < 2 * chosen:
            continue
        if not fits(size):
            between = [n for n in sizes if chosen < n < size] if rate is None else []
            chosen = next((n for n in reversed(between) if fits(n)), chosen)
            why = f"{size} rows would fill more than {1 - MARGIN:.0%} of the memory"
            break
        if rate is not None:
            found = rate(size)
            if found < GAIN * best:
                why = f"{size} rows are not {GAIN - 1:.0%} faster"
                break
            best = found
        chosen = size
    else:
        if workers > 1:
            why = f"the batch's share of each of {workers} cores"
    if not chosen:
        raise ValueError(
            "--batch auto: not even one row fits in the memory; lower --length, take a smaller "
            "--size, or add --checkpoint-activations if it is not there yet"
        )
    return MicroBatch(chosen, f"micro-batch {chosen} of batch {batch}: {why}")


def fits_cpu(config: ModelConfig, shape: StepShape, available: int | None) -> Callable[[int], bool]:
    """Whether a step with that many rows at once is estimated to leave `MARGIN` of `available`.

    `available` is memory.available_memory(); None, unknown, lets everything fit.
    """

    def fits(rows: int) -> bool:
        if available is None:
            return True
        needed = step_memory(config, replace(shape, micro_batch=rows)).peak
        return needed <= (1 - MARGIN) * available

    return fits


def fits_cuda(
    step: Callable[[int], object], device: torch.device, more: int = 0
) -> Callable[[int], bool]:
    """Whether a real step with that many rows at once runs and leaves `MARGIN` of the GPU.

    `step` does forward, backward and update; `more` bytes are what a run holds besides.
    """

    def fits(rows: int) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            step(rows)
        except torch.OutOfMemoryError:
            return False
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        needed = torch.cuda.max_memory_reserved(device) + others + more
        return needed <= (1 - MARGIN) * total

    return fits
