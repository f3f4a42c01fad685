"""How many processes a machine, or a container on it, has room for."""

import os
import subprocess
import sys

import pytest

from bertsmith.text.workers import usable_cores


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu.max": "9900000 100000\n"}, 8),
    ],
)
def test_affinity_and_quota_limit_the_cores(tmp_path, monkeypatch, files, limit):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert usable_cores(tmp_path) == limit


def test_where_the_system_tells_no_affinity_all_cores_count(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores(tmp_path) == 64


def test_an_interrupt_is_held_until_the_processes_are_started():
    program = """
import os, signal
from bertsmith.text.workers import interrupts_held
try:
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        print("held", flush=True)
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "held\ninterrupted\n", done.stderr
