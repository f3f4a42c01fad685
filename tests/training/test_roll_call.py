"""Ranks find each other through a store that may hold what dead ones wrote."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bertsmith.training.ranks import gather, roll_call


class Memory:
    """A store in this process; it checks what the real one would block on."""

    def __init__(self):
        self.kept, self.lock = {}, threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.kept[key] = value.encode()

    def get(self, key):
        return self.kept[key]

    def check(self, keys):
        return all(key in self.kept for key in keys)


def all_of(size, ask):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(ask, range(size)))


def test_all_ranks_get_one_word_and_another_one_next_time():
    store = Memory()
    words = [all_of(3, lambda rank: roll_call(store, rank, 3, timeout=20)) for _ in range(2)]
    assert [len(set(found)) for found in words] == [1, 1]
    assert words[0] != words[1]


def test_what_dead_ranks_left_in_the_store_is_not_taken_for_the_living():
    store = Memory()
    first = all_of(3, lambda rank: roll_call(store, rank, 3, timeout=20))[0]
    with pytest.raises(TimeoutError, match="ranks 1, 2 of 3 did not come within 0.2 s"):
        roll_call(store, 0, 3, timeout=0.2)
    second = all_of(3, lambda rank: roll_call(store, rank, 3, timeout=20))
    assert len({first, *second}) == 2


def test_the_missing_rank_is_named():
    store = Memory()

    def ask(rank):
        with pytest.raises(TimeoutError, match="rank 2 of 4 did not come within 0.5 s") as caught:
            roll_call(store, rank, 4, timeout=0.5)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        messages = list(pool.map(ask, (0, 1, 3)))
    assert all("--rank-timeout" in message for message in messages)


def test_without_rank_0_nobody_is_listed():
    with pytest.raises(TimeoutError, match="rank 0 of 2 did not come within 0.1 s"):
        roll_call(Memory(), 1, 2, timeout=0.1)


def test_texts_come_in_the_order_of_the_ranks():
    store = Memory()
    texts = all_of(3, lambda rank: gather(store, "what", f"text {rank}", rank, 3, timeout=20))
    assert texts == [["text 0", "text 1", "text 2"]] * 3


def test_a_rank_that_tells_nothing_is_named():
    with pytest.raises(TimeoutError, match="rank 1 of 2"):
        gather(Memory(), "what", "text", 0, 2, timeout=0.1)
