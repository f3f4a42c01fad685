"""Random numbers as functions: the number drawn under (key, number) is always the same.

A key is 64 bits, made from the seed step by step: run -> epoch -> document -> example -> purpose.
No state is kept, so an example can be made alone, in any order, by any thread. The mixing function
is the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014); `bits(key, 0), bits(key, 1), ...` is its sequence.
"""

from __future__ import annotations

import numpy as np

from bertsmith.base.jit import compiled

# Keys that are derived from another one; under one key no number may mean two things.
# Of a run: 0, 1, ... for its epochs, 2 for a phase (training/pretraining/run.py).
KEY_SOURCES, KEY_STREAMS = 1 << 40, 1 << 41
# Of an epoch or of a section of it: rows are pairs of documents, or packed.
KEY_ORDER, KEY_DOCUMENTS, KEY_SECTIONS, KEY_SHARDS = 0, 1, 3, 4
KEY_OFFSETS, KEY_PACKED_ROWS = 1, 2
# Of an example.
KEY_TRUNCATION, KEY_CHOICE, KEY_REPLACEMENT, KEY_CLEAN = 0, 1, 2, 3

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the step of splitmix64
ONE = np.uint64(1)
FEISTEL_ROUNDS = 6


@compiled
def _mix(word):  # uint64 -> uint64, a bijection in which every bit of input moves every bit
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def seed_key(seed: int) -> np.uint64:
    """The key of a run; any whole number is a seed."""
    return np.uint64(fold_in(np.uint64(0), seed % 2**63))


@compiled
def fold_in(key, number):
    """The key of part `number` (int >= 0) of what `key` stands for: an epoch of a run, and so on.

    >>> fold_in(np.uint64(1), 2) == fold_in(np.uint64(1), 2) != fold_in(np.uint64(1), 3)
    True
    """
    return _mix(_mix(np.uint64(key) ^ GOLDEN) + np.uint64(number) * GOLDEN)


def derived(key: np.uint64, *numbers: int) -> np.uint64:
    """`fold_in` of each number in turn, for Python: a compiled function returns a plain int."""
    for number in numbers:
        key = np.uint64(fold_in(key, number))
    return key


@compiled
def random_bits(key, number):
    """64 random bits (uint64)."""
    return _mix(np.uint64(key) + (np.uint64(number) + ONE) * GOLDEN)


@compiled
def uniform(key, number):
    """A float64, uniform in [0, 1)."""
    return np.float64(random_bits(key, number) >> np.uint64(11)) * 2.0**-53


@compiled
def between(key, number, low, high):
    """A whole number, uniform in low..high, both ends included (Python's `randint`).

    >>> sorted({between(np.uint64(7), number, 2, 4) for number in range(50)})
    [2, 3, 4]
    """
    return low + np.int64(uniform(key, number) * (high - low + 1))


@compiled
def permutation(index, size, key):
    """Item `index` of 0..size-1 in the shuffled order of `key`, in constant memory.

    A Feistel network shuffles the next power of four; results outside are sent through it again
    (cycle walking; Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002).

    >>> sorted(permutation(index, 5, np.uint64(3)) for index in range(5))
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(1)
    while np.uint64(size) > ONE << (half + half):
        half += ONE
    mask = (ONE << half) - ONE
    word = np.uint64(index)
    while True:
        left, right = word >> half, word & mask
        for round_number in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (random_bits(fold_in(key, round_number), right) & mask)
        word = (left << half) | right
        if word < np.uint64(size):
            return np.int64(word)
