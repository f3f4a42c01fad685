"""How a process of a pool begins: it leaves Ctrl-C to its parent, and does not outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


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
