"""Memory fetched ahead is there for what comes after, and no more of it than was touched."""

import subprocess
import sys
import threading

import pytest

from bertsmith.base import processes as process_memory
from bertsmith.base.processes import memory_ahead
from bertsmith.cli.pretrain import HEADS, TOKEN_BYTES, WEIGHT_BYTES, Pretrain, _first_memory
from bertsmith.training.pretraining.settings import PretrainSettings

on_glibc = pytest.mark.skipif(process_memory._glibc() is None, reason="the C library is not glibc")
RESIDENT = """
import time
from pathlib import Path
from bertsmith.base.processes import memory_ahead

def resident():  # MB
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in l)
    return int(line.split()[1]) * 1024 / 1e6
"""


def run(script):
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT + script], capture_output=True, text=True, check=True
    )
    return [float(value) for value in done.stdout.split()]


@on_glibc
def test_what_was_fetched_is_used():
    before, fetched, used = run("""
before, late = resident(), time.monotonic() + 60
with memory_ahead(200_000_000):
    while resident() < before + 199 and time.monotonic() < late:
        time.sleep(0.01)
fetched = resident()
kept = bytearray(150_000_000)
kept[::4096] = b"x" * len(kept[::4096])
print(before, fetched, resident())
""")
    assert 190 < fetched - before < 230
    assert abs(used - fetched) < 20  # not another 150


@on_glibc
def test_what_was_not_touched_takes_no_memory():
    before, after = run("""
before = resident()
with memory_ahead(8_000_000_000):
    pass
print(before, resident())
""")
    assert after - before < 1000  # a stretch or a few of 34 MB, on a machine with other work


@pytest.mark.parametrize("why", ["no bytes", "another C library", "a limit"])
def test_nothing_is_fetched(monkeypatch, why):
    size = 0 if why == "no bytes" else 1 << 30
    if why == "another C library":
        monkeypatch.setattr(process_memory, "_glibc", lambda: None)
    monkeypatch.setattr(process_memory, "_addresses_are_limited", lambda: why == "a limit")
    before = threading.active_count()
    with memory_ahead(size):
        assert threading.active_count() == before


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(process_memory, "_glibc", lambda: None)
    process_memory.keep_freed_memory()


def test_memory_that_the_system_refuses_is_left_alone():
    run("""
with memory_ahead(1 << 60):
    pass
""")


def test_the_first_step_of_a_new_model_on_a_processor(monkeypatch, tmp_path):
    new = Pretrain(corpus=["no-store"])
    base = PretrainSettings(size="base", steps=1)
    monkeypatch.setattr("bertsmith.cli.pretrain.GRAPHICS", [tmp_path / "absent"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + HEADS * 768 * 768
    expected = WEIGHT_BYTES * weights + TOKEN_BYTES * 12 * 768 * 32 * 128
    assert _first_memory(new, base) == expected
    many = PretrainSettings(size="base", steps=1, batch_size=256)
    assert _first_memory(new, many) == expected  # what a core has at once
    parts = PretrainSettings(size="base", steps=1, micro_batch_size=8)
    assert _first_memory(new, parts) == expected - TOKEN_BYTES * 12 * 768 * 24 * 128
    assert _first_memory(Pretrain(corpus=["store"], model="model"), base) == 0
    assert _first_memory(Pretrain(corpus=["store"], resume=True), base) == 0
    small = PretrainSettings(size="base", steps=1, activation_checkpointing=True)
    assert _first_memory(new, small) == WEIGHT_BYTES * weights
    found = PretrainSettings(size="base", steps=1, micro_batch_size="auto")
    assert _first_memory(new, found) == 0  # it looks at what is free
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _first_memory(new, base) == 0
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("bertsmith.cli.pretrain.GRAPHICS", [tmp_path / "absent", tmp_path])
    assert _first_memory(new, base) == 0
    on_cpu = PretrainSettings(size="base", steps=1, device="cpu")
    assert _first_memory(new, on_cpu) == expected
    (tmp_path / "vocab.txt").write_text("one\ntwo\nthree\n")
    for words in ([f"{tmp_path}=0.7", "other=0.3"], [str(tmp_path)]):
        assert _first_memory(Pretrain(corpus=words), on_cpu) == expected + WEIGHT_BYTES * 3 * 768
