from functools import partial

import pytest
import torch

from bertsmith.model.config import config_for
from bertsmith.training.memory import StepShape, step_memory
from bertsmith.training.pretraining import trial as batch_size
from bertsmith.training.pretraining.trial import find_micro_batch, fits_cpu, fits_cuda


def tried(limit):
    """(fits, the sizes that were tried)."""
    seen = []
    return (lambda rows: seen.append(rows) or rows <= limit), seen


@pytest.mark.parametrize(
    ("batch", "limit", "rows", "sizes"),
    [
        (256, 1000, 256, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        (256, 100, 64, [1, 2, 4, 8, 16, 32, 64, 128]),
        (96, 50, 48, [1, 2, 4, 8, 16, 32, 96, 48]),
        (7, 6, 1, [1, 7]),
        (1, 1, 1, [1]),
    ],
)
def test_the_largest_divisor_that_fits(batch, limit, rows, sizes):
    fits, seen = tried(limit)
    found = find_micro_batch(batch, fits)
    assert (found.rows, seen) == (rows, sizes)
    assert f"micro-batch {rows} of batch {batch}: " in found.rule
    assert ("fit" if rows == batch else "90% of the memory") in found.rule


def test_speed_stops_the_search_on_a_cpu():
    speeds = {1: 100.0, 2: 180.0, 4: 200.0, 8: 205.0, 16: 500.0}
    found = find_micro_batch(32, lambda rows: True, speeds.__getitem__)
    assert found.rows == 4 and "8 rows are not 5% faster" in found.rule
    assert find_micro_batch(32, lambda rows: rows <= 2, speeds.__getitem__).rows == 2


@pytest.mark.parametrize(
    ("batch", "workers", "rows"), [(32, 2, 16), (24, 4, 6), (33, 2, 11), (1, 2, 1)]
)
def test_workers_share_the_batch(batch, workers, rows):
    found = find_micro_batch(batch, lambda rows: True, float, workers)
    assert found.rows == rows and f"each of {workers} cores" in found.rule


def test_not_even_one_row():
    with pytest.raises(ValueError, match="not even one row .*--max-length.*--size.*--activation-"):
        find_micro_batch(8, lambda rows: False)


def test_a_cpu_fits_what_the_estimate_says():
    config = config_for("mini", 8000)
    shape = StepShape(batch_size=64, micro_batch_size=64, length=128, predictions=20)
    needed = step_memory(config, StepShape(64, 16, 128, 20)).peak
    fits = partial(fits_cpu, config, shape, int(needed / 0.9) + 1)
    assert fits(16) and not fits(32)
    assert fits_cpu(config, shape, None, 64)


def test_a_gpu_fits_what_runs_and_leaves_a_margin(monkeypatch):
    """A device of 100 bytes, of which others hold 10; a row takes 8."""
    taken = []
    fake = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: taken.clear(),
        "mem_get_info": lambda device: (100 - 10 - taken[-1], 100),
        "memory_reserved": lambda device: taken[-1],
        "max_memory_reserved": lambda device: taken[-1],
    }
    for name, function in fake.items():
        monkeypatch.setattr(batch_size.torch.cuda, name, function)

    def step(rows):
        if 8 * rows > 90:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        taken.append(8 * rows)

    fits = fits_cuda(step, torch.device("cuda"))
    assert [fits(rows) for rows in (1, 10, 11, 12)] == [True, True, False, False]
    with_buckets = fits_cuda(step, torch.device("cuda"), more=16)
    assert [with_buckets(rows) for rows in (8, 9)] == [True, False]


@pytest.mark.gpu
def test_a_real_gpu_runs_out():
    device = torch.device("cuda")
    total = torch.cuda.mem_get_info(device)[1]
    found = find_micro_batch(
        64, fits_cuda(lambda rows: torch.empty(rows * total // 40, device=device).sum(), device)
    )
    assert found.rows == 8  # a row takes a tenth of the memory
