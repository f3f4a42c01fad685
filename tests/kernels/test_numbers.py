import numpy as np
import torch

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import exp, hash32, largest, load, rows, store


@compiled
def exponentials(values, results):
    for index in range(len(values)):
        results[index] = exp(values[index])


@compiled
def copied(source, target):
    for row in range(len(source)):
        for column in range(source.shape[1]):
            target[row, column] = store(load(source[row, column]), target[row, column])


def test_the_exponential_is_within_its_error():
    values = np.linspace(-87, 0, 100_001, dtype=np.float32)
    results = np.empty_like(values)
    exponentials(values, results)
    assert np.abs(results / np.exp(values.astype(np.float64)) - 1).max() < 4e-6
    assert results[-1] == np.float32(1)
    far = np.array([-1e30, -np.inf, -200], np.float32)
    exponentials(far, far)
    assert not far.any()
    for sign in (1, -1):
        unknown = np.full(3, np.copysign(np.nan, sign), np.float32)
        exponentials(unknown, unknown)
        assert np.isnan(unknown).all()


def test_bf16_is_rounded_as_torch_rounds():
    values = torch.randn(50, 31) * torch.logspace(-30, 30, 50)[:, None]
    values[0, :4] = torch.tensor([0.0, -0.0, float("inf"), 1 + 2**-8])  # a tie goes to even
    target = torch.empty(50, 31, dtype=torch.bfloat16)
    copied(rows(values), rows(target))
    assert torch.equal(target, values.bfloat16())
    back = torch.empty(50, 31)
    copied(rows(target), rows(back))
    assert torch.equal(back, target.float())


def test_the_largest():
    random = np.random.default_rng(1)
    for scale in (1, -1):
        values = scale * np.abs(random.normal(size=100)).astype(np.float32)
        assert largest(values) == values.max()
    assert largest(np.array([-np.inf, -3.0], np.float32)) == -3


def test_the_hash_moves_half_of_its_bits():
    changed = [
        bin(int(hash32(np.uint32(word))) ^ int(hash32(np.uint32(word ^ (1 << bit))))).count("1")
        for word in range(200)
        for bit in range(32)
    ]
    assert abs(np.mean(changed) - 16) < 0.2  # 6,400 draws with a deviation of 2.8
