"""The nearest of many stored vectors by exact cosine, in bounded memory.

Files are read in blocks, by as many workers as there are cores. A worker computes the cosines of a
block with all queries and passes on those above the K-th best so far, which are soon few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.processes import in_order, usable_cores
from bertsmith.base.settings import checked
from bertsmith.inference.embeddings.vector_files import (
    Block,
    HeldVectors,
    StoredVectors,
    rows_at_once,
)
from bertsmith.tasks.vectors import unit_length
from bertsmith.training.replicas import use_one_thread

QUERIES = 512  # compared at once; more read the files again


@dataclass(frozen=True)
class Found:
    """The K nearest vectors of Q queries, the nearest first; of equal ones the first row."""

    rows: np.ndarray
    """int64 [Q, K], counted from 0, through all files of a folder."""
    scores: np.ndarray
    """float32 [Q, K], cosines; that of a vector of length 0 is 0."""


@checked()
def search(
    vectors: str | Path | np.ndarray,
    queries: np.ndarray | Sequence[Any],
    top: int = 10,
    on_rows: Callable[[int], None] | None = None,
) -> Found:
    """The `top` vectors of the largest cosine with each query, by comparing all of them.

        found = bertsmith.search("titles.npy", model.embed(["A man sings."]))

    `vectors`: a .npy file or a folder of them, float32 or float16 [N, D], of which a MiB a core is
    in memory at a time; or an array. `queries`: [Q, D], or one, [D]. `on_rows` gets the number of
    vectors in each block that is done.

    Errors: ValueError for files that cannot be read, other sizes, numbers that are not finite.
    """
    queries = np.atleast_2d(np.asarray(queries, np.float32))
    held = HeldVectors(vectors) if isinstance(vectors, np.ndarray) else StoredVectors(vectors)
    count, size = held.shape
    if queries.ndim != 2 or queries.shape[1] != size:
        raise ValueError(
            f"queries {list(queries.shape)}, vectors {[count, size]}: not of one size: make both"
            " by the same model, in the same way"
        )
    if top < 1:
        raise ValueError(f"`top={top}`: 1 or more")
    if not np.isfinite(queries).all():
        raise ValueError("queries: a number of them is NaN or infinite")
    parts = [
        _search(held, unit_length(queries[start : start + QUERIES]), min(top, count), on_rows)
        for start in range(0, len(queries), QUERIES)
    ]
    rows = [part.rows for part in parts] or [np.empty((0, min(top, count)), np.int64)]
    scores = [part.scores for part in parts] or [np.empty((0, min(top, count)), np.float32)]
    return Found(np.concatenate(rows), np.concatenate(scores))


def _search(
    held: StoredVectors | HeldVectors,
    units: np.ndarray,
    top: int,
    on_rows: Callable[[int], None] | None,
) -> Found:
    best, lent = _Best(len(units), top), threading.local()
    units_QD = torch.from_numpy(np.ascontiguousarray(units))
    size, most = units.shape[1], rows_at_once(units.shape[1])

    def compute(block: Block) -> tuple[int, _Candidates]:
        first, count, read = block
        if not hasattr(lent, "block"):  # memory of this worker, or every block would fault it in
            lent.block = np.empty((most, size), np.float32)
            lent.scores = torch.empty(len(units) * most)
            lent.mask = torch.empty(len(units) * most, dtype=torch.bool)
        with torch.inference_mode():
            block_BD = torch.from_numpy(read(lent.block[:count])).float()
            lengths_B = torch.linalg.vector_norm(block_BD, dim=1)
            if not lengths_B.isfinite().all():
                file, row = held.place(first + int(lengths_B.isfinite().int().argmin()))
                raise ValueError(f"{file}: row {row} holds NaN, infinity or too large a number")
            numbers = len(units) * count
            scores_QB = lent.scores[:numbers].view(-1, count)
            torch.mm(units_QD, block_BD.T, out=scores_QB)
            scores_QB /= torch.where(lengths_B > 0, lengths_B, 1.0)
            mask_QB = lent.mask[:numbers].view(-1, count)
            return count, best.candidates(scores_QB, mask_QB, first)

    workers = usable_cores()
    with ExitStack() as files, ExitStack() as opened:
        pool = ThreadPoolExecutor(workers, "search", initializer=use_one_thread)
        opened.callback(pool.shutdown, cancel_futures=True)
        threads = torch.get_num_threads()
        opened.callback(torch.set_num_threads, threads)
        for rows, candidates in in_order(pool, compute, held.blocks(files), 2 * workers + 1):
            best.add(candidates)
            if on_rows:
                on_rows(rows)
    return best.found()


class _Candidates(NamedTuple):
    queries: np.ndarray  # int64 [M]
    rows: np.ndarray  # int64 [M]
    scores: np.ndarray  # float32 [M]


class _Best:
    """The best of each query so far.

    Candidates wait until there are as many as the best ones, so that sorting them costs little.
    What is found does not depend on when they are sorted in.
    """

    def __init__(self, queries: int, top: int) -> None:
        self._top, self._waiting = top, []
        self._kept = _Candidates(*(np.empty(0, kind) for kind in (np.int64, np.int64, np.float32)))
        self._least = torch.full((queries, 1), -torch.inf)

    def candidates(self, scores_QB: Tensor, is_better: Tensor, first: int) -> _Candidates:
        """The scores of a block of rows that may be among the best; `is_better` is overwritten."""
        torch.gt(scores_QB, self._least, out=is_better)
        which, columns = is_better.nonzero(as_tuple=True)
        (queries, count), top = scores_QB.shape, self._top
        if count > top and len(which) > 4 * queries * top:
            is_better &= scores_QB >= scores_QB.topk(top, dim=1).values[:, -1:]
            which, columns = is_better.nonzero(as_tuple=True)
        scores = scores_QB[which, columns].numpy()
        return _Candidates(which.numpy(), columns.numpy() + first, scores)

    def add(self, candidates: _Candidates) -> None:
        self._waiting.append(candidates)
        if sum(len(part.rows) for part in self._waiting) >= len(self._least) * self._top:
            self._sort_in()

    def _sort_in(self) -> None:
        every = _Candidates(*map(np.concatenate, zip(self._kept, *self._waiting, strict=True)))
        order = np.lexsort((every.rows, -every.scores, every.queries))
        queries = every.queries[order]
        ranks = np.arange(len(order)) - np.searchsorted(queries, queries)
        kept = order[ranks < self._top]
        self._kept, self._waiting = _Candidates(*(part[kept] for part in every)), []
        least = torch.full_like(self._least, -torch.inf)
        last = ranks[ranks < self._top] == self._top - 1
        least[self._kept.queries[last], 0] = torch.from_numpy(self._kept.scores[last])
        self._least = least  # at once, as workers read it

    def found(self) -> Found:
        self._sort_in()
        shape = len(self._least), self._top
        return Found(self._kept.rows.reshape(shape), self._kept.scores.reshape(shape))
