"""This process' memory: fetched from the system ahead, and kept when it is freed."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

MADV_HUGEPAGE = 14  # in sys/mman.h
PAGE, STRETCH = 2 << 20, 32 << 20  # bytes; a stretch is fetched in some 20 ms


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of returning it to the system.

    A training step frees and asks for the same hundreds of megabytes again; every page that came
    back from the system must be cleared first, which costs up to a third of a small model's step.
    """
    libc = _glibc()
    if libc is None:
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # names in malloc.h
    libc.mallopt(mmap_max, 0)
    libc.mallopt(arena_max, 1)
    libc.mallopt(trim_threshold, -1)
    libc.mallopt(top_pad, 64 << 20)


@contextmanager
def memory_ahead(size: int) -> Iterator[None]:
    """Fetch up to so many bytes from the system while the block runs, for what comes after it.

    A thread touches them page by page and gives them to glibc, which keeps them. A virtual machine
    may have to ask its host for each page: about a second a gigabyte, which a block that computes
    on one core, such as importing packages, hides. Pages that are not touched when it ends take no
    memory. Without glibc, for no bytes, and where addresses are limited (`ulimit -v`), nothing is
    done.
    """
    libc = _glibc()
    if libc is None or not size or _addresses_are_limited():
        yield
        return
    keep_freed_memory()
    enough = threading.Event()
    fetching = threading.Thread(target=_fetch, args=(libc, size, enough), name="memory ahead")
    fetching.start()
    try:
        yield
    finally:
        enough.set()
        fetching.join()


def _fetch(libc: ctypes.CDLL, size: int, enough: threading.Event) -> None:
    start = libc.malloc(size)
    if not start:
        return
    first = -(-start // PAGE) * PAGE
    libc.madvise(first, (start + size - first) // PAGE * PAGE, MADV_HUGEPAGE)
    for offset in range(0, size, STRETCH):
        if enough.is_set():
            break
        ctypes.memset(start + offset, 0, min(STRETCH, size - offset))  # without Python's lock
    libc.free(start)


def _addresses_are_limited() -> bool:
    import resource  # not on every system

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
