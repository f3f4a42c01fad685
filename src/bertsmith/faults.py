"""Places at which a test has this process killed, as `kill -9` does; nothing else uses them.

BERTSMITH_KILL_AT=step-weights:9 bertsmith pretrain ...    at the ninth fault_point("step-weights")
"""

from __future__ import annotations

import os
import signal


class _Armed:
    place = ""
    left = 0


def kill_at(where: str) -> None:
    """Arm one place, "PLACE:N"; an empty string disarms."""
    place, _, number = where.partition(":")
    _Armed.place, _Armed.left = place, int(number or 0)


def fault_point(place: str) -> None:
    """End the process here if this is the armed place's N-th passing."""
    if place == _Armed.place:
        _Armed.left -= 1
        if _Armed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


kill_at(os.environ.get("BERTSMITH_KILL_AT", ""))
