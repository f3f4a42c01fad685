"""The random numbers: known values, and the statistics that the paper's procedure relies on."""

import numpy as np
import pytest
from numba import njit

from bertsmith.corpus.examples.rng import (
    between,
    fold_in,
    permutation,
    random_bits,
    seed_key,
    uniform,
)


def test_sequence_is_splitmix64():
    # First outputs of the reference implementation (Vigna's splitmix64.c) from state 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [random_bits(np.uint64(0), number) for number in range(3)] == expected


@njit
def _grid(key, documents, numbers):
    values = np.empty((documents, numbers))
    for document in range(documents):
        for number in range(numbers):
            values[document, number] = uniform(fold_in(key, document), number)
    return values


def test_draws_of_neighbouring_keys_are_uniform_and_independent():
    values = _grid(seed_key(0), 50_000, 4)
    for column in values.T:
        counts = np.bincount((column * 100).astype(int), minlength=100)
        chi_square = ((counts - 500) ** 2 / 500).sum()  # 99 degrees of freedom
        assert 50 < chi_square < 160
    correlations = np.corrcoef(np.vstack([values[:-1].T, values[1:].T])) - np.eye(8)
    assert np.abs(correlations).max() < 0.02


def test_between_takes_both_ends_equally_often():
    draws = [between(np.uint64(5), number, -1, 1) for number in range(3000)]
    assert all(900 < draws.count(value) < 1100 for value in (-1, 0, 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_permutation_is_one(size):
    for key in (0, 1, 2**63):
        order = [permutation(index, size, np.uint64(key)) for index in range(size)]
        assert sorted(order) == list(range(size))


def test_permutation_sends_every_item_everywhere():
    places = np.zeros((10, 10), int)
    for key in range(2000):
        for index in range(10):
            places[index, permutation(index, 10, np.uint64(fold_in(np.uint64(9), key)))] += 1
    assert places.min() > 130 and places.max() < 275


def test_seeds_may_be_any_whole_number():
    assert len({int(seed_key(seed)) for seed in (-1, 0, 1, 12345, 10**30)}) == 5
