"""Processes of a pool: how many there is room for, and how one begins.

A worker leaves Ctrl-C to its parent, and does not outlive it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUOTAS = Path("/sys/fs/cgroup")  # of this container


def usable_cores(quotas: Path = QUOTAS) -> int:
    """Cores this process may use: those it may run on, or fewer where a container has a quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = len(allowed) if allowed else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(quotas))))


def _quota(folder: Path) -> float:
    """Cores' worth of time that the kernel gives; infinite without a limit."""
    if (folder / "cpu.max").is_file():  # cgroup 2
        limit, period = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu/cpu.cfs_quota_us").is_file():  # cgroup 1
        limit = (folder / "cpu/cpu.cfs_quota_us").read_text()
        period = (folder / "cpu/cpu.cfs_period_us").read_text()
    else:
        return math.inf
    return math.inf if limit == "max" or int(limit) <= 0 else int(limit) / int(period)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Around a submission, which may start processes: Ctrl-C reaches none before `start_worker`.

    What is held back comes to this process at the end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker() -> None:
    """The initializer of every process pool here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent is killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
