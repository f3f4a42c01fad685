"""How many processes a machine, or a container on it, has room for, and work done in order."""

import ctypes
import functools
import multiprocessing
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from bertsmith.base import processes
from bertsmith.base.processes import (
    Helpers,
    keep_freed_memory,
    map_in_order,
    share,
    usable_cores,
)

from ..tiny import python, write

PERIOD = {"cpu/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n"} | PERIOD, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n"} | PERIOD, 2),
        ({"cpu.max": "9900000 100000\n"}, 8),
    ],
)
def test_affinity_and_quota_limit_the_cores(tmp_path, monkeypatch, files, limit):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for name, content in files.items():
        write(tmp_path / name, content)
    assert usable_cores(tmp_path) == limit


def test_where_the_system_tells_no_affinity_all_cores_count(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores(tmp_path) == 64


def test_an_interrupt_is_held_until_the_processes_are_started():
    program = """
import os, signal
from bertsmith.base.processes import interrupts_held
try:
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        print("held", flush=True)
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert python(program).out == "held\ninterrupted\n"


def worked(expressions, workers):
    """map_in_order with `eval` as the work, which every process has."""
    items = ((f"label {n}", expression) for n, expression in enumerate(expressions))
    return map_in_order(functools.partial, (eval,), items, workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order_from_this_process_and_others(workers):
    slowly = "({}, __import__('os').getpid(), __import__('time').sleep({}))"
    found = list(worked([slowly.format(n, 0.03 * (n % 3)) for n in range(60)], workers))
    assert [label for label, _ in found] == [f"label {n}" for n in range(60)]
    assert [number for _, (number, *_) in found] == list(range(60))
    processes = [process for _, (_, process, _) in found]
    assert processes[0] == os.getpid()
    assert min(workers, 2) <= len(set(processes)) <= workers  # a third may start too late


@pytest.fixture
def no_worker_is_left():
    before = multiprocessing.active_children()
    yield before
    assert multiprocessing.active_children() == before


def test_for_a_single_item_no_worker_is_started(no_worker_is_left):
    before = no_worker_is_left
    with closing(worked(["1 + 1", "1 + 2"], 2)) as results:
        assert next(results) == ("label 0", 2)
        assert multiprocessing.active_children() == before
        assert next(results) == ("label 1", 3)
        assert len(multiprocessing.active_children()) == len(before) + 1


def test_no_more_are_under_way_than_three_a_worker():
    drawn = []

    def expressions():
        for n in range(100):
            drawn.append(n)
            yield "__import__('time').sleep(1.5)" if n == 1 else "0"

    with closing(worked(expressions(), 2)) as results:
        assert next(results) == ("label 0", 0) and drawn == [0]
        assert next(results) == ("label 1", None)  # the other process' first
        assert drawn[-1] == 3 * 2


@pytest.mark.parametrize("where", [0, 1, 5])
@pytest.mark.usefixtures("no_worker_is_left")
def test_an_error_of_the_work_comes_from_whichever_process(where):
    with pytest.raises(ZeroDivisionError):
        list(worked(["0"] * where + ["1 / 0"] + ["0"] * 20, 2))


def test_another_c_library_keeps_its_own_ways(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    monkeypatch.setattr(ctypes, "CDLL", None)  # not called
    keep_freed_memory()


ARRAYS = """
import resource, sys
from pathlib import Path
from bertsmith.base import processes
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
if sys.argv[1] == "promised":
    processes.OVERCOMMIT = Path(sys.argv[2])
def addresses():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
before = addresses()
processes.keep_freed_memory()
print(addresses() - before)
import numpy as np
def heap(field):
    lines, inside = [], False
    for line in open("/proc/self/smaps", encoding="utf-8"):
        inside = line.rstrip().endswith("[heap]") if "-" in line.split()[0] else inside
        lines += [int(line.split()[1])] if inside and line.startswith(field + ":") else []
    return sum(lines) >> 10
for _ in range(2):
    arrays = [np.ones(1 << 17) for _ in range(64)]  # 1 MB each, less than a huge page
    print(heap("Rss"), heap("AnonHugePages"))
    del arrays
print(heap("Rss"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("how", ["plain", "limited", "promised"])
def test_freed_memory_is_kept_on_huge_pages_if_the_system_has_them(tmp_path, how):
    done = python(ARRAYS, how, write(tmp_path / "overcommit", "2\n"))
    assert done.code == 0, done.err
    grown, first, huge, second, _, after = map(int, done.out.split())
    assert 64 <= first == second == after < 96  # MB: used again, not given back
    if how != "plain":
        assert grown < 1 << 16  # pages of 4 KB: no addresses are taken
        return
    assert grown > 0.4 * os.sysconf("SC_PHYS_PAGES")
    choices = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if choices.exists() and "[never]" not in choices.read_text(encoding="ascii"):
        assert huge >= 56  # a few pages are not to be had


def test_threads_are_told_or_one_a_physical_core(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes.computing_threads(tmp_path) == 4  # nothing tells of cores
    for number, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert processes.computing_threads(tmp_path) == 2
    for told, threads in (("3,1", 3), ("9", 4), ("0", 2), ("all", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert processes.computing_threads(tmp_path) == threads


@pytest.fixture
def helped():
    """call(function): its result in a thread of a pool of three, the others of which are idle."""
    with ThreadPoolExecutor(3) as pool:
        helpers = Helpers(pool)

        def finished():
            with helpers.working():
                pass

        def work(function):
            with helpers.working():
                return function()

        for future in [pool.submit(finished) for _ in range(2)]:
            future.result()
        yield lambda function: pool.submit(work, function).result()


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (100, [(0, 32), (32, 64), (64, 100)]),
        (96, [(0, 32), (32, 64), (64, 96)]),
        (64, [(0, 32), (32, 64)]),
        (32, [(0, 32)]),
        (5, [(0, 5)]),
    ],
)
def test_idle_threads_take_parts(helped, count, parts):
    def shared():
        done = []
        share(lambda start, stop: done.append((start, stop)), count, 32)
        return sorted(done)

    assert helped(shared) == parts


def test_helpers_are_free_again_after_their_part_and_an_error_of_theirs_is_raised(helped):
    def shared():
        def refuse(start, stop):
            if start == 64:
                raise ValueError(f"part {start}")

        for _ in range(3):
            with pytest.raises(ValueError, match="part 64"):
                share(refuse, 96, 32)

    helped(shared)


def test_who_works_is_not_asked_for_help():
    with ThreadPoolExecutor(2) as pool:
        helpers, done = Helpers(pool), []
        with helpers.working():
            share(lambda start, stop: done.append((start, stop)), 100, 32)
    assert done == [(0, 100)]


def test_a_part_that_no_thread_has_come_to_is_taken_back():
    free, done = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        helpers = Helpers(pool)
        helpers.idle.release()  # for a thread that has found other work by now
        pool.submit(free.wait)
        with helpers.working():
            share(lambda start, stop: done.append((start, stop)), 64, 32)
        free.set()
    assert done == [(0, 32), (32, 64)]
