"""Numbers of compiled loops, and dropout by keys."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import Dropout, dropout_state, rows, seed_dropout
from bertsmith.model.kernels.numbers import exp, hash32, largest, load, store

from .harness import assert_is_share

RATE = 0.1


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


def dropped(seed, shape=(64, 256), dtype=torch.float32):
    layer = Dropout(RATE)
    seed_dropout(seed)
    return layer(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_scale_and_gradient(dtype):
    x = torch.randn(200, 333, dtype=dtype, requires_grad=True)
    seed_dropout(3)
    y = Dropout(RATE)(x)
    kept = y != 0
    assert_is_share(~kept, RATE)
    # bf16: one rounding of a product, 2^-9 of it
    torch.testing.assert_close(y[kept].float(), x[kept].float() / (1 - RATE), rtol=4e-3, atol=0)
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept)


def test_columns_and_rows_are_dropped_alike_and_independently():
    kept = dropped(5, (400, 400)) != 0
    spread = 5 * (RATE * (1 - RATE) / 400) ** 0.5
    for axis in (0, 1):
        assert (kept.double().mean(axis) - (1 - RATE)).abs().max() < spread
    both = (kept[:-1] & kept[1:]).double().mean(), (kept[:, :-1] & kept[:, 1:]).double().mean()
    assert max(abs(share - (1 - RATE) ** 2) for share in both) < 0.005  # of 160,000 pairs


def test_a_mask_is_a_function_of_seed_and_count_in_any_thread():
    first, again, other = dropped(1), dropped(1), dropped(2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    layer, ones = Dropout(RATE), torch.ones(64, 256)
    assert not torch.equal(layer(ones), layer(ones))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(dropped, [1, 2, 1, 2]))
    assert all(torch.equal(a, b) for a, b in zip(found, [first, other] * 2, strict=True))


def test_a_pass_can_be_taken_up_where_it_was():
    layer, ones = Dropout(RATE), torch.ones(8, 64)
    seed_dropout(9)
    layer(ones)
    state = dropout_state()
    second = layer(ones)
    seed_dropout(*state)
    assert torch.equal(layer(ones), second)


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x = torch.ones(4, 4)
    assert Dropout(0.0)(x) is x and Dropout(RATE).eval()(x) is x


def test_other_types_are_left_to_pytorch():
    torch.manual_seed(0)
    x = torch.ones(64, 64, dtype=torch.float64)
    assert 0 < (Dropout(RATE)(x) == 0).sum() < 1000
