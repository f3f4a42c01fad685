"""The one-pass kernel against PyTorch's clipping and fused AdamW, and against the formula."""

import numpy as np
import pytest
import torch

from bertsmith.training.loop.update import BLOCK, NO_COPY, adamw_stretch, sum_of_squares

SIZE = 2 * BLOCK + 77
# clip, beta1, 1 - beta1, beta2, 1 - beta2, decay, size, root, eps
FACTORS = np.array([0.5, 0.9, 0.1, 0.999, 0.001, 0.99, 1e-2, 1.5, 1e-6], np.float32)


def gradients(number, dtype, size=SIZE):
    """Of replicas: tensors, and as the kernel has them."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(size, generator=generator).to(dtype) for _ in range(number)]
    bits = [g.view(torch.uint16) if dtype == torch.bfloat16 else g for g in made]
    return made, tuple(part.numpy() for part in bits)


def weight_and_moments(size=SIZE):
    generator = np.random.default_rng(2)
    weight, first = generator.normal(size=(2, size)).astype(np.float32)
    return weight, first, generator.random(size, np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_formula(number, dtype):
    made, given = gradients(number, dtype)
    weight, first, second = weight_and_moments()
    copy = np.zeros(SIZE, np.uint16)
    g = 0.5 * sum(part.double().numpy() for part in made)
    m, v = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
    expected = 0.99 * weight - 0.01 * m / (1.5 * np.sqrt(v) + 1e-6)
    adamw_stretch(given, 0, SIZE, weight, first, second, copy, FACTORS)
    # float32 rounds each of some ten operations by 6e-8
    np.testing.assert_allclose(first, m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, v, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
    narrow = torch.from_numpy(weight).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(copy).view(torch.bfloat16), narrow)
    squares = sum_of_squares(given, 0, SIZE)
    np.testing.assert_allclose(squares, (4 * g**2).sum(), rtol=1e-5)


def test_a_tensor_in_stretches_is_the_whole_tensor_to_the_bit():
    _, given = gradients(2, torch.bfloat16)
    found = []
    for bounds in ([0, SIZE], [0, BLOCK, SIZE], [0, 2 * BLOCK, SIZE]):
        parts, copy = weight_and_moments(), np.zeros(SIZE, np.uint16)
        for start, stop in reversed(list(zip(bounds, bounds[1:], strict=False))):
            adamw_stretch(given, start, stop, *parts, copy, FACTORS)
        found.append(np.concatenate([*parts, copy]))
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


def test_memory_that_begins_anywhere_gives_the_same_bits():
    # a vector loop and the scalar one for overlapping arrays must round alike
    found, sums = [], []
    for offset in (0, 1, 3):
        (made, _), weights = gradients(2, torch.float32), weight_and_moments()
        room = np.zeros((5, SIZE + 8), np.float32)
        for line, part in zip(room, [*made, *weights], strict=True):
            line[offset : offset + SIZE] = part
        *given, weight, first, second = (line[offset : offset + SIZE] for line in room)
        sums.append(sum_of_squares(tuple(given), 0, SIZE))
        adamw_stretch(tuple(given), 0, SIZE, weight, first, second, NO_COPY, FACTORS)
        found.append(np.concatenate([weight, first, second]))
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    assert len(set(sums)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_in_the_sum(dtype, value):
    made, given = gradients(2, dtype)
    made[1][BLOCK + 5] = value  # the kernel's array is the same memory
    assert not np.isfinite(sum_of_squares(given, 0, SIZE))
    assert np.isfinite(sum_of_squares(given, 0, BLOCK))
