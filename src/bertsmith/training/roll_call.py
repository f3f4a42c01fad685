"""Every rank of a run says that it is there and is told when all are; who is missing is named.

torchrun starts all ranks again when one has died, and their store still holds what the dead ones
wrote. So every process has a name that none had before, and all agree on the list of names:

    rank r      here/r   its name
    rank 0      list     the names it has found, written again whenever one is another
    rank r      seen/r   the list's digest, once r's own name is in it
    rank 0      all      the list's digest, once every rank has seen it
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Protocol

PAUSE, PAUSE_A_RANK = 0.02, 0.001  # seconds between two looks


class Store(Protocol):
    """What is needed of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def roll_call(store: Store, rank: int, size: int, timeout: float) -> str:
    """A word that all ranks get, and that no other start of them has.

    Errors: TimeoutError that names the ranks which are not there after `timeout` seconds.
    """
    name = uuid.uuid4().hex[:12]
    store.set(f"here/{rank}", name)
    deadline = time.monotonic() + timeout
    while True:
        if rank == 0:
            found = " ".join(_read(store, f"here/{other}") for other in range(size))
            if found != _read(store, "list"):
                store.set("list", found)
        names = _read(store, "list")
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        listed = names.split(" ")[rank : rank + 1] == [name]
        if listed and _read(store, f"seen/{rank}") != digest:
            store.set(f"seen/{rank}", digest)
        if rank == 0 and not _unseen(store, digest, size):
            store.set("all", digest)
        if listed and _read(store, "all") == digest:
            return digest
        if time.monotonic() >= deadline:
            missing = _unseen(store, digest, size) if listed else []
            raise absent([other for other in missing if other != rank] or [0], size, timeout)
        time.sleep(PAUSE + PAUSE_A_RANK * size)


def gather(store: Store, key: str, text: str, rank: int, size: int, timeout: float) -> list[str]:
    """Every rank's text, in their order; a key serves once.

    Errors: TimeoutError that names the ranks whose text has not come after `timeout` seconds.
    """
    store.set(f"{key}/{rank}", text)
    deadline = time.monotonic() + timeout
    missing = list(range(size))
    while missing := [other for other in missing if not store.check([f"{key}/{other}"])]:
        if time.monotonic() >= deadline:
            raise absent(missing, size, timeout)
        time.sleep(PAUSE + PAUSE_A_RANK * size)
    return [_read(store, f"{key}/{other}") for other in range(size)]


def absent(missing: list[int], size: int, timeout: float) -> TimeoutError:
    """What to say of ranks that are not there.

    >>> print(absent([1, 3], size=4, timeout=60))
    ranks 1, 3 of 4 did not come within 60 s: see what they print, and whether their machines
    reach MASTER_ADDR; --rank-timeout gives slow ones more time
    """
    what = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return TimeoutError(
        f"{what} of {size} did not come within {timeout:g} s: see what they print, and whether "
        "their machines reach MASTER_ADDR; --rank-timeout gives slow ones more time"
    )


def _unseen(store: Store, digest: str, size: int) -> list[int]:
    """The ranks that have not seen this list."""
    return [rank for rank in range(size) if _read(store, f"seen/{rank}") != digest]


def _read(store: Store, key: str) -> str:
    """The text of a key, empty when nobody has set it."""
    return store.get(key).decode() if store.check([key]) else ""
