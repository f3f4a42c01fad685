"""Forward passes on several cores: rows in micro-batches, dealt to one worker a core.

As in a training step (replicas.py) a worker computes whole passes with one of PyTorch's threads.
PyTorch's own threads wait for one another after every operator, and beside a busy process each of
them waits for the core which that process has: ten to fifty times as long as the operator takes.

A worker that is free takes the next micro-batch, so that a core that is half busy does half as
many. All share the one model. What is in a micro-batch, and with it the rounding, is for the
caller to say: who computes it when changes no number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from bertsmith.tasks.features import token_budget_batches
from bertsmith.training.engine import Engine

TOKENS_AT_ONCE = 2048  # of a worker on a CPU, about, padding too: more take memory, no less time

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")


def row_batches(engine: Engine, lengths: np.ndarray, budget: int = 8192) -> list[np.ndarray]:
    """`token_budget_batches`, on a CPU of no more tokens than a worker computes at once."""
    on_cpu = engine.device.type == "cpu"
    return token_budget_batches(lengths, min(budget, TOKENS_AT_ONCE) if on_cpu else budget)


def computed(
    engine: Engine, compute: Callable[[Piece], Outcome], pieces: Sequence[Piece]
) -> Iterator[Outcome]:
    """compute(piece) of every micro-batch without gradients, in the micro-batches' order.

    It runs in the engine's precision, on several cores side by side where there are several
    pieces; those that are made ahead are two a worker at most.
    """

    def measured(piece: Piece) -> Outcome:
        with torch.inference_mode(), _autocast(engine):
            return compute(piece)

    workers = min(engine.workers, len(pieces))
    with _casts_kept():
        if workers <= 1:
            yield from map(measured, pieces)
            return
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(workers, "rows", initializer=_begin)
        waiting: deque[Future[Outcome]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(measured, piece))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # threads that start later have the number set last


def _begin() -> None:
    """In a worker's thread, which never leaves the outermost autocast: see `_casts_kept`."""
    torch.set_num_threads(1)
    torch.autocast_increment_nesting()


def _autocast(engine: Engine) -> torch.autocast:
    # weights that are gathered for a pass must not stay, nor their casts
    kind, kept = engine.device.type, not engine.ranks.shard
    return torch.autocast(
        kind, engine.products, enabled=engine.products is not None, cache_enabled=kept
    )


@contextmanager
def _casts_kept() -> Iterator[None]:
    """Weights are cast once, not in every pass: PyTorch forgets casts, which all threads share,
    when any thread leaves its outermost autocast. None is older than this: weights move."""
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
