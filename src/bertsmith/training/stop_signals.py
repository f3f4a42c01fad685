"""Why a loop should end before its budget: SIGTERM, Ctrl-C or a time limit."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class StopWish:
    """What a loop looks at between two steps: true once it should end."""

    def __init__(self, deadline: float) -> None:
        self.reason = ""
        self._deadline = deadline

    def __bool__(self) -> bool:
        if not self.reason and time.monotonic() >= self._deadline:
            self.reason = "the time limit"
        return bool(self.reason)


@contextmanager
def stop_signals(deadline: float = math.inf) -> Iterator[StopWish]:
    """SIGTERM and SIGINT make the yielded wish true instead of ending the process; a second one
    ends it, under torchrun a second SIGINT alone. The wish comes true as well at the `deadline`, a
    time of `time.monotonic`, which no change of the clock moves.

    Outside the main thread, where Python allows no handlers, signals are left as they are.
    """
    wish = StopWish(deadline)

    def note(number: int, frame: FrameType | None) -> None:
        if wish.reason.startswith("SIG"):
            if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                return  # torchrun passes on what a scheduler has sent to all processes
            raise KeyboardInterrupt
        wish.reason = signal.Signals(number).name

    previous: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, note)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield wish
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def seconds_of(limit: str) -> float:
    """The seconds of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Errors: ValueError for anything else, and for a limit of nothing.

    >>> seconds_of("90"), seconds_of("23:50:00"), seconds_of("1-12")
    (5400, 85800, 129600)
    """
    parts = LIMIT.fullmatch(limit)
    if parts is None:
        raise ValueError(f"time limit '{limit}': give minutes, H:M:S or D-H:M:S, such as 23:50:00")
    days, first, second, third = (int(part) if part else None for part in parts.groups())
    if days is None and third is None:  # minutes lead only where nothing says hours
        hours, minutes, seconds = 0, first, second
    else:
        hours, minutes, seconds = first, second, third
    whole = (((days or 0) * 24 + (hours or 0)) * 60 + (minutes or 0)) * 60 + (seconds or 0)
    if not whole:
        raise ValueError(f"time limit '{limit}': must be above 0")
    return whole
