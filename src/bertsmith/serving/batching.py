"""Calls of a model that requests share: a queue, and threads that compute.

A request brings items (texts, pairs) that are to go through a function. Those of several requests
with the same function go through one call, up to about `BATCH_SECONDS` of work. Nobody waits for a
batch to fill: it is what came while the threads were busy.

How long work takes is reckoned from tokens, by the pace of the same kind of work before. A request
is due so many times its own seconds after it came (`STRETCH`), and the earliest due is done first:
equal ones in the order in which they came, small ones before the rest of a large one, which never
waits for more than those that are due before it. So the queue is bounded by time: what would wait
longer than `max_wait` is refused when it comes.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bertsmith.inference.fill import BEAM, MASK, MAX_COMBINATIONS

BATCH_SECONDS = 0.03  # of work in a call: short enough that a request beside it does not feel it
STRETCH = 4.0  # a request is due so many times its own seconds after it came
SHARED_SECONDS = 0.003  # of a call that threads may share: they meet at every layer
NICE = 5  # of the threads that compute: a third of the event loop's share of a core
FIRST_PACE = 1e-4  # seconds a token, before anything was measured
Call = Callable[[list[Any], int], Sequence[Any]]
"""(Items, threads that it may use) -> as many answers."""


class Busy(Exception):
    """The queue is full; `seconds` until there may be room."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the queue is full: try again in {seconds:.1f} s")
        self.seconds = seconds


@dataclass(eq=False)
class Job:
    """The items of a request for one function."""

    kind: str
    """The kind of work, of the same pace, such as "reviews/classify"."""
    key: Hashable
    """Jobs of the same key go through one call."""
    call: Call
    items: Sequence[Any]
    tokens: Sequence[int]
    """The tokens of each item, about: its share of the memory."""
    costs: Sequence[int] = ()
    """Tokens that the model reads for each item, in all its passes; (): in one."""
    numbers: int = 0
    """In the answers, at most; 0: few."""
    answers: list[Any] = field(default_factory=list)
    began: float | None = None
    """Start of its first call, by `time.perf_counter`."""
    queued_at: float = 0.0
    computed: float = 0.0
    """Seconds of the calls that it was part of."""
    future: asyncio.Future[list[Any]] | None = None
    taken: int = 0
    left: int = 0
    """Items without an answer."""
    tokens_left: int = 0
    """Of the items that were not taken."""
    cost_left: int = 0
    """Of the same."""
    due: float = 0.0
    """The time when it should be done, by `time.perf_counter`; its place in the queue."""

    def __post_init__(self) -> None:
        self.costs = self.costs or self.tokens


Part = tuple[Job, int, int]  # the items begin:end of a job


class Batcher:
    """A queue of jobs and the threads that do them.

    `threads` calls run at once, each in one thread; a call beside which there is nothing to do gets
    all of them. `on_batch` is told kind, items, tokens and seconds of every call, in its thread.
    """

    def __init__(
        self,
        threads: int,
        max_wait: float,
        max_tokens: int,
        on_batch: Callable[[str, int, int, float], None],
    ) -> None:
        self.threads, self.max_wait, self.max_tokens = threads, max_wait, max_tokens
        self.on_batch = on_batch
        self.queue: list[Job] = []  # those with items that were not taken, the earliest due first
        self.queued_tokens = 0
        self._costs: Counter[str] = Counter()  # of each kind what is in the queue
        self._pace: dict[str, float] = {}  # seconds a token of a kind, in one thread
        self._busy = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._workers = [
            threading.Thread(target=self._work, daemon=True, name=f"compute-{k}")
            for k in range(threads)
        ]

    def start(self) -> None:
        """Begin to compute, in this process."""
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """End the threads when the queue is empty."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def check_room(self, kind: str, cost: int, tokens: int) -> None:
        """Raise `Busy` if such a request would wait too long, or is too large beside the others."""
        if not self.queue:
            return
        due = self._due(kind, cost)
        with self._changed:
            wait = sum(itertools.starmap(self.seconds, self._costs.items()))
            for job in reversed(self.queue):  # the few that are due later: the queue can be long
                if job.due < due:
                    break
                wait -= self.seconds(job.kind, job.cost_left)
            too_many = self.queued_tokens + tokens > self.max_tokens
        wait /= self.threads
        if wait > self.max_wait or too_many:
            raise Busy(max(wait - self.max_wait / 2, 0.1))

    def seconds(self, kind: str, cost: int) -> float:
        """Seconds of work in one thread, estimated from the tokens that the model reads for it."""
        return cost * self._pace.get(kind, FIRST_PACE)

    def _due(self, kind: str, cost: int) -> float:
        return time.perf_counter() + STRETCH * self.seconds(kind, cost)

    async def run(self, job: Job) -> list[Any]:
        """The answers to a job's items. Errors: `Busy`; whatever its function raises."""
        if not job.items:
            return []
        total, cost = sum(job.tokens), sum(job.costs)
        self.check_room(job.kind, cost, total)
        job.future = asyncio.get_running_loop().create_future()
        job.answers = [None] * len(job.items)
        job.left, job.tokens_left, job.cost_left = len(job.items), total, cost
        job.queued_at, job.due = time.perf_counter(), self._due(job.kind, cost)
        with self._changed:
            bisect.insort(self.queue, job, key=lambda other: other.due)
            self.queued_tokens += total
            self._costs[job.kind] += cost
            self._changed.notify()
        try:
            return await job.future
        finally:
            if job.left:  # cancelled, or failed
                with self._changed:
                    self._drop(job)

    def _drop(self, job: Job) -> None:
        """Take nothing more from a job."""
        if job.taken < len(job.items):
            self.queue.remove(job)
            self.queued_tokens -= job.tokens_left
            self._costs[job.kind] -= job.cost_left

    def _work(self) -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process
            # who reads and refuses requests goes first, or refusals come late when cores are short
            own = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, own) + NICE
            os.setpriority(os.PRIO_PROCESS, own, nice)
        while True:
            with self._changed:
                while not (parts := self._take()):
                    if self._is_closed:
                        return
                    self._changed.wait()
                self._busy += 1
                is_alone = self._busy == 1 and not self.queue
            cost = sum(sum(job.costs[begin:end]) for job, begin, end in parts)
            is_long = self.seconds(parts[0][0].kind, cost) > SHARED_SECONDS
            try:
                self._compute(parts, self.threads if is_alone and is_long else 1)
            finally:
                with self._changed:
                    self._busy -= 1

    def _take(self) -> list[Part]:
        """Items for the next call: those of the first job and of others of its key."""
        parts: list[Part] = []
        budget, place = BATCH_SECONDS, 0
        while place < len(self.queue) and budget > 0:
            job = self.queue[place]
            if parts and job.key != parts[0][0].key:
                place += 1
                continue
            begin, end = job.taken, job.taken
            while end < len(job.items) and budget > 0:
                budget -= self.seconds(job.kind, job.costs[end])
                end += 1
            tokens, job.taken = sum(job.tokens[begin:end]), end
            job.tokens_left -= tokens
            cost = sum(job.costs[begin:end])
            job.cost_left -= cost
            self.queued_tokens -= tokens
            self._costs[job.kind] -= cost
            parts.append((job, begin, end))
            if end == len(job.items):
                del self.queue[place]
        return parts

    def _compute(self, parts: list[Part], threads: int) -> None:
        started = time.perf_counter()
        for job, *_ in parts:
            job.began = job.began or started
        first = parts[0][0]
        items = [item for job, begin, end in parts for item in job.items[begin:end]]
        try:
            answers = first.call(items, threads)
            assert len(answers) == len(items)
        except Exception as error:
            if len(parts) > 1:  # one of them is at fault
                for part in parts:
                    self._compute([part], threads)
            else:
                self._end([(first, error)])
            return
        seconds = time.perf_counter() - started
        tokens = sum(sum(job.tokens[begin:end]) for job, begin, end in parts)
        cost = sum(sum(job.costs[begin:end]) for job, begin, end in parts)
        ended, place = [], 0
        with self._changed:
            pace = seconds * threads / max(cost, 1)
            before = self._pace.get(first.kind, FIRST_PACE)
            # a call that was held up says little
            self._pace[first.kind] = 0.9 * before + 0.1 * min(pace, 10 * before)
            for job, begin, end in parts:
                job.answers[begin:end] = answers[place : place + end - begin]
                place += end - begin
                job.computed += seconds
                job.left -= end - begin
                if not job.left:
                    ended.append((job, None))
        self._end(ended)
        with contextlib.suppress(OSError):  # no numbers are better than no answers
            self.on_batch(first.kind, len(items), tokens, seconds)

    def _end(self, jobs: list[tuple[Job, Exception | None]]) -> None:
        """Give the answers, or an error, to those who wait, in their event loop."""
        if not jobs:
            return

        def end() -> None:
            for job, error in jobs:
                assert job.future is not None
                if job.future.done():  # cancelled
                    continue
                if error is None:
                    job.future.set_result(job.answers)
                else:
                    job.future.set_exception(error)

        assert jobs[0][0].future is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            jobs[0][0].future.get_loop().call_soon_threadsafe(end)


def work(
    method: str, items: Sequence[Any], tokens: Sequence[int], options: dict[str, Any]
) -> list[int]:
    """Tokens that the model reads for each item in all its passes, about; fill.py has the passes.

    >>> work("fill_together", [("[MASK] or [MASK]",)], [7], {"top": 5})
    [147]
    """
    width = max(options.get("top", 0), BEAM)

    def searched(masks: int) -> int:  # rows: one for the first mask, then all of the beam
        return 1 + (max(masks, 1) - 1) * width

    @functools.cache
    def words(masks: int) -> tuple[int, int]:  # rows, and tokens in them besides the text's own
        most = options["max_pieces"]
        if most**masks > MAX_COMBINATIONS:  # it is refused
            return 1, 0
        sums = [*map(sum, itertools.product(range(1, most + 1), repeat=masks))]
        rows = [2 * searched(k) for k in sums]  # found, then scored
        return sum(rows), sum(row * (k - masks) for row, k in zip(rows, sums, strict=True))

    both = list(zip(items, tokens, strict=True))
    if method == "explain" and options.get("method") == "occlusion":  # a pass for each word
        return [count * count for count in tokens]
    if method == "choose":  # the prompt is read with every option
        return [count + (len(item[1]) - 1) * about_tokens(item[0]) for item, count in both]
    if method == "fill_together":
        return [count * searched(item[0].count(MASK)) for item, count in both]
    if method == "fill_words":
        found = [words(max(1, item[0].count(MASK))) for item in items]
        return [rows * count + more for (rows, more), count in zip(found, tokens, strict=True)]
    if method == "fill_candidates":
        sizes = [max(1, about_tokens(one) - 2) for one in options["candidates"]]
        # a row a piece; that of the last is one for all candidates of as many pieces
        rows = [(size, size - 1) for size in sizes] + [(size, 1) for size in set(sizes)]
        own, passes = sum(size * times for size, times in rows), sum(times for _, times in rows)
        return [own + (count - 1) * passes for count in tokens]
    return [*tokens]


def about_tokens(item: Any) -> int:
    """Tokens of a text, or of texts together, with [CLS] and [SEP]: a token is about four letters.

    >>> about_tokens(("A fine film.", "Really?"))
    8
    """
    if isinstance(item, int):
        return 1  # the id of a piece
    if isinstance(item, str):
        return 2 + (len(item) if item.isascii() else len(item.encode(errors="replace"))) // 4
    return sum(map(about_tokens, item)) if isinstance(item, tuple | list) else 0
