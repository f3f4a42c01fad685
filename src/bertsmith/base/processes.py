"""Processes: the cores they may use, pools that work in order, idle threads, memory that is kept.

A worker of a pool leaves Ctrl-C to its parent, and does not outlive it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

QUOTAS = Path("/sys/fs/cgroup")  # of this container
TOPOLOGY = Path("/sys/devices/system/cpu")
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")  # 2: addresses count as memory
HUGE_PAGE = 2 << 20  # bytes
Outcome = TypeVar("Outcome")


def usable_cores(quotas: Path = QUOTAS) -> int:
    """Cores this process may use: those it may run on, or fewer where a container has a quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = len(allowed) if allowed else os.cpu_count() or 1
    limit, period = "max", "1"
    if (quotas / "cpu.max").is_file():  # cgroup 2
        limit, period = (quotas / "cpu.max").read_text().split()
    elif (quotas / "cpu/cpu.cfs_quota_us").is_file():  # cgroup 1
        limit = (quotas / "cpu/cpu.cfs_quota_us").read_text()
        period = (quotas / "cpu/cpu.cfs_period_us").read_text()
    if limit != "max" and int(limit) > 0:
        cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)


def computing_threads(topology: Path = TOPOLOGY) -> int:
    """Threads to compute with, as PyTorch counts: OMP_NUM_THREADS, else one a physical core.

    At most one a usable core.
    """
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if told.isdecimal() and int(told):
        return min(int(told), usable_cores())
    siblings = [*topology.glob("cpu[0-9]*/topology/thread_siblings_list")]
    physical = {path.read_text() for path in siblings}  # the same text for all threads of a core
    return min(len(physical) or usable_cores(), usable_cores())


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back to the end of the block: no new process gets it before `start_worker`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker() -> None:
    """Begin a worker process: the initializer of every process pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker with its parent: after a kill it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_task: Callable[[Any], Any]  # of a worker process


def _start_task(start: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _task
    _task = start(*arguments)
    start_worker()


def _run_task(item: Any) -> Any:
    return _task(item)


def map_in_order(
    start: Callable[..., Callable[[Any], Any]],
    arguments: tuple[Any, ...],
    items: Iterable[tuple[Any, Any]],
    workers: int,
) -> Generator[tuple[Any, Any], None, None]:
    """Map (label, item) to (label, `start(*arguments)(item)`), in order, in several processes.

    This process is a worker too: it takes the first item, and then those for which the others have
    no time. At most 3 items a worker are under way; labels stay here. Each worker calls `start`
    once. Arguments must be small: with one too large for a pipe, this process would wait for ever
    for a worker that died at its start.

    Errors: those of the items and of the work, this process' own at once, others' in their turn;
    OSError when a worker was killed.
    """
    task = start(*arguments)
    if workers == 1:
        yield from ((label, task(item)) for label, item in items)
        return
    others = workers - 1
    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(others, context, _start_task, (start, arguments))
        stack.callback(pool.shutdown, cancel_futures=True)
        under_way: deque[tuple[Any, Future[Any]]] = deque()
        try:
            for number, (label, item) in enumerate(items):
                unfinished = sum(not future.done() for _, future in under_way)
                if number and unfinished < 2 * others:
                    with interrupts_held():
                        future = pool.submit(_run_task, item)
                else:
                    future = Future()
                    future.set_result(task(item))
                under_way.append((label, future))
                while under_way and (under_way[0][1].done() or len(under_way) >= 3 * workers):
                    label, future = under_way.popleft()
                    yield label, future.result()
            while under_way:
                label, future = under_way.popleft()
                yield label, future.result()
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process died, most likely for want of memory: run again with fewer "
                "workers, a build resumes (a script needs `if __name__ == '__main__':`)"
            ) from error


def in_order(
    pool: Executor, work: Callable[[Any], Outcome], items: Iterable[Any], ahead: int
) -> Generator[Outcome, None, None]:
    """work(item) by a pool's threads in the items' order, of which `ahead` are under way at most.

    Errors: those of the items and of the work; what has not begun by then is left out.
    """
    begun = (pool.submit(work, item) for item in items)
    waiting = deque(islice(begun, ahead))
    try:
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(islice(begun, 1))
    finally:
        for future in waiting:
            future.cancel()


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, on huge pages, instead of returning it to the system.

    A training step frees and asks for the same hundreds of megabytes again. Clearing pages that
    come back from the system costs up to a third of a small model's step, and pages of 4 KB in
    place of 2 MB up to a fifth. The heap gets addresses for half of the machine's memory, but none
    where addresses are limited or count as memory; only those that are used take memory. Call it
    first: what threads hold by then is not on this heap.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # names in malloc.h
    libc.mallopt(mmap_max, 0)
    libc.mallopt(arena_max, 1)
    libc.mallopt(trim_threshold, -1)
    libc.mallopt(top_pad, 64 << 20)
    import resource  # not on every system

    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if limited or (OVERCOMMIT.exists() and OVERCOMMIT.read_text(encoding="ascii") == "2\n"):
        return
    size = os.sysconf("SC_PHYS_PAGES") // 2 * mmap.PAGESIZE
    libc.malloc.restype = ctypes.c_void_p
    if start := libc.malloc(ctypes.c_size_t(size)):
        first = start + -start % HUGE_PAGE
        length = ctypes.c_size_t(start + size - first)
        libc.madvise(ctypes.c_void_p(first), length, mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(start))


class Helpers:
    """Threads of a pool that have nothing left to do, and take parts of what another computes."""

    def __init__(self, pool: Executor) -> None:
        self.pool, self.idle = pool, threading.Semaphore(0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around the work of one of the pool's threads: it is helped, and helps from its end on."""
        _thread.helpers = self
        try:
            yield
        finally:
            _thread.helpers = None
            self.idle.release()


class _Thread(threading.local):
    helpers: Helpers | None = None


_thread = _Thread()


def share(work: Callable[[int, int], None], count: int, step: int) -> None:
    """Do work(start, stop) of 0..count in one part, or in as many as threads are idle.

    Parts begin at multiples of `step`. Returns when all are done. Errors: those of the parts.

    >>> share(lambda start, stop: print(start, stop), 100, 32)
    0 100
    """
    helpers, parts = _thread.helpers, 1
    while helpers and parts * step < count and helpers.idle.acquire(blocking=False):
        parts += 1
    if helpers is None or parts == 1:
        work(0, count)
        return
    steps = -(-count // step)
    borders = [min(count, steps * part // parts * step) for part in range(parts + 1)]
    first, *others = pairwise(borders)
    taken = [(helpers.pool.submit(work, *part), part) for part in others]
    try:
        work(*first)
        for future, part in taken:
            if future.cancel():  # its thread has not come to it
                work(*part)
            else:
                future.result()
    finally:
        helpers.idle.release(len(others))
