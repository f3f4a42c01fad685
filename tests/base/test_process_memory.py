"""Memory fetched ahead is there for what comes after, and no more of it than was touched."""

import subprocess
import sys
import threading

import pytest

from bertsmith.base import processes
from bertsmith.base.processes import memory_ahead

on_glibc = pytest.mark.skipif(processes._glibc() is None, reason="the C library is not glibc")
RESIDENT = """
import time
from pathlib import Path
from bertsmith.base.processes import memory_ahead

def resident():  # MB
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in l)
    return int(line.split()[1]) * 1024 / 1e6
"""
USED = """
before, late = resident(), time.monotonic() + 60
with memory_ahead(200_000_000):
    while resident() < before + 199 and time.monotonic() < late:
        time.sleep(0.01)
fetched = resident()
kept = bytearray(150_000_000)
kept[::4096] = b"x" * len(kept[::4096])
print(before, fetched, resident())
"""
UNTOUCHED = """
before = resident()
with memory_ahead(8_000_000_000):
    pass
print(before, resident())
"""
REFUSED = """
with memory_ahead(1 << 60):
    pass
"""


def printed(script):
    command = [sys.executable, "-c", RESIDENT + script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


@on_glibc
def test_what_was_fetched_is_used():
    before, fetched, used = printed(USED)
    assert 190 < fetched - before < 230
    assert abs(used - fetched) < 20  # not another 150


@on_glibc
def test_what_was_not_touched_takes_no_memory():
    before, after = printed(UNTOUCHED)
    assert after - before < 1000  # a stretch or a few of 34 MB, on a machine with other work


def test_memory_that_the_system_refuses_is_left_alone():
    assert printed(REFUSED) == []


@pytest.mark.parametrize("why", ["no bytes", "another C library", "a limit"])
def test_nothing_is_fetched(monkeypatch, why):
    size = 0 if why == "no bytes" else 1 << 30
    if why == "another C library":
        monkeypatch.setattr(processes, "_glibc", lambda: None)
    monkeypatch.setattr(processes, "_addresses_are_limited", lambda: why == "a limit")
    before = threading.active_count()
    with memory_ahead(size):
        assert threading.active_count() == before


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(processes, "_glibc", lambda: None)
    processes.keep_freed_memory()
