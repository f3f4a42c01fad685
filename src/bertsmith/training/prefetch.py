"""Batches in order, made ahead by threads, so that no step waits for its data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bertsmith.corpus.stream import Position
from bertsmith.training.engine import Engine

if TYPE_CHECKING:
    from bertsmith.training.task import StepBatch, Task


@contextmanager
def prefetch(
    task: Task, engine: Engine, position: Position, workers: int
) -> Iterator[Iterator[tuple[StepBatch, Position]]]:
    """(batch, next position) from `position` on; how many threads changes nothing but the time.

    A batch is this rank's share, with the counts of all ranks. For a GPU the threads also put the
    arrays where its copies make nobody wait.
    """
    waiting: deque[Future[tuple[StepBatch, Position]]] = deque()

    def made(position: Position) -> tuple[StepBatch, Position]:
        batch, following = task.batch(position)
        batch.micro_batches = [engine.staged(micro) for micro in batch.micro_batches]
        return batch, following

    def batches(pool: ThreadPoolExecutor) -> Iterator[tuple[StepBatch, Position]]:
        ahead = position
        while True:
            while len(waiting) < workers + 1:
                waiting.append(pool.submit(made, ahead))
                ahead = task.advance(ahead)
            batch, following = waiting.popleft().result()
            yield batch.over(engine.ranks), following

    with ThreadPoolExecutor(workers, thread_name_prefix="loader") as pool:
        yield batches(pool)
        for future in waiting:
            future.cancel()
