"""Requests share calls in fair turns; what would wait too long is refused; faults stay apart."""

import asyncio
import contextlib
import os
import random
import sys
import threading
import time

import pytest

from bertsmith.serving.batching import BATCH_SECONDS, FIRST_PACE, Batcher, Busy, Job


class Recorder:
    """A function that doubles numbers: its calls, their threads, and a gate before them."""

    def __init__(self, seconds=0.0):
        self.calls, self.threads, self.seconds = [], [], seconds
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def __call__(self, items, threads):
        self.calls.append(list(items))
        self.threads.append(threads)
        self.began.set()
        assert self.gate.wait(10)
        time.sleep(self.seconds * len(items))
        if "bad" in items:
            raise ValueError("a bad one")
        return [2 * item for item in items]

    def job(self, *items, tokens=10, key="k", kind="m/double"):
        return Job(kind, key, self, items, [tokens] * len(items))


@contextlib.contextmanager
def batcher(threads=1, max_wait=100.0, max_tokens=10**9, on_batch=lambda *told: None):
    made = Batcher(threads, max_wait, max_tokens, on_batch)
    made.start()
    try:
        yield made
    finally:
        made.close()
        for worker in made._workers:
            worker.join(10)
            assert not worker.is_alive()


async def held(own, call):
    """A job whose call stands at the gate, so that what comes now waits in the queue."""
    call.gate.clear()
    first = asyncio.ensure_future(own.run(call.job(0, key="gate", kind="m/gate")))
    while not call.began.is_set():
        await asyncio.sleep(0.001)
    return first


def test_jobs_that_wait_share_a_call_and_get_their_own_answers():
    async def go(own, call):
        first = await held(own, call)
        others = [asyncio.ensure_future(own.run(call.job(n, 10 * n))) for n in (1, 2, 3)]
        await asyncio.sleep(0.01)
        call.gate.set()
        return await asyncio.gather(first, *others)

    told = []
    with batcher(on_batch=lambda *one: told.append(one)) as own:
        answers = asyncio.run(go(own, call := Recorder()))
    assert answers == [[0], [2, 20], [4, 40], [6, 60]]
    assert call.calls == [[0], [1, 10, 2, 20, 3, 30]]
    assert [one[:3] for one in told] == [("m/gate", 1, 10), ("m/double", 6, 60)]


def test_keys_are_not_mixed_and_nobody_is_overtaken():
    async def go(own, call):
        first = await held(own, call)
        jobs = [call.job("x", key="x"), call.job("y", key="y"), call.job("X", key="x")]
        others = [asyncio.ensure_future(own.run(job)) for job in jobs]
        await asyncio.sleep(0.01)
        call.gate.set()
        await asyncio.gather(first, *others)

    with batcher() as own:
        asyncio.run(go(own, call := Recorder()))
    assert call.calls == [[0], ["x", "X"], ["y"]]


def test_a_request_of_a_thousand_items_holds_up_nobody():
    waits = []

    async def go(own, call):
        big = asyncio.ensure_future(own.run(call.job(*range(1000))))
        await asyncio.sleep(0.05)
        for n in range(10):
            started = time.perf_counter()
            assert await own.run(call.job(n)) == [2 * n]
            waits.append(time.perf_counter() - started)
        assert not big.done()
        assert await big == [2 * n for n in range(1000)]

    with batcher() as own:
        asyncio.run(go(own, call := Recorder(seconds=0.001)))
    assert max(map(len, call.calls)) <= 1.2 * BATCH_SECONDS / 0.001 + 1
    # a part of the big one that is under way, and a call of its own: not the second of it all
    assert sorted(waits)[len(waits) // 2] < 0.15


def test_what_is_due_first_is_done_first():
    """Small requests before the rest of a large one, equal ones in the order in which they came."""
    done = []

    async def one(own, call, name, count):
        await own.run(call.job(*[name] * count, key=name))
        done.append(name)

    async def go(own, call):
        first = await held(own, call)
        sizes = {"a": 400, "b": 60, "c": 60, "d": 40}
        others = [asyncio.ensure_future(one(own, call, *pair)) for pair in sizes.items()]
        await asyncio.sleep(0.01)
        call.gate.set()
        await asyncio.gather(first, *others)

    with batcher() as own:
        asyncio.run(go(own, Recorder(seconds=0.0005)))
    assert done == ["d", "b", "c", "a"]


def test_busy_by_the_wait_that_is_reckoned():
    """A second of work stands before: a request of a token is due before it, one of a second has to
    wait for all of it."""
    second = round(1 / FIRST_PACE)

    async def go(own, call):
        first = await held(own, call)
        other = asyncio.ensure_future(own.run(call.job("long", tokens=second)))
        await asyncio.sleep(0)
        small = asyncio.ensure_future(own.run(call.job("small", tokens=1)))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="try again in 0.8 s") as busy:
            await own.run(call.job("late", tokens=second))
        assert busy.value.seconds == pytest.approx(0.75, abs=0.01)
        own.check_room("m/double", second // 3, 1)
        call.gate.set()
        await asyncio.gather(first, other, small)
        await own.run(call.job("late", tokens=second))  # nobody waits now: any size is taken

    with batcher(max_wait=0.5) as own:
        asyncio.run(go(own, Recorder()))


def test_the_wait_is_the_work_of_all_that_is_due_before():
    """Of kinds of different pace; items that were taken or whose sender has gone do not count."""
    draw, pace = random.Random(0), {"m/double": 1e-3, "m/other": 5e-3}

    async def go(own, call):
        first = await held(own, call)
        own._pace = dict(pace)
        jobs = [
            call.job(*"ab", tokens=draw.randint(1, 300), kind=draw.choice([*pace]))
            for _ in range(40)
        ]
        tasks = [asyncio.ensure_future(own.run(job)) for job in jobs]
        await asyncio.sleep(0)
        for task in draw.sample(tasks, 10):
            task.cancel()
        await asyncio.sleep(0.01)
        assert own._take() and len(own.queue) == 29
        own.max_wait = 0.0
        for cost in (200, 400, 700, 3000):
            due = own._due("m/double", cost)
            before = [job for job in own.queue if job.due < due]
            wait = sum(pace[job.kind] * job.cost_left for job in before)
            with pytest.raises(Busy) as busy:
                own.check_room("m/double", cost, 1)
            assert busy.value.seconds == pytest.approx(wait) and wait > 0.1
        assert len(before) == 29
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert not any(own._costs.values())
        call.gate.set()
        await first

    with batcher() as own:
        asyncio.run(go(own, Recorder()))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_who_computes_stands_back_behind_who_reads():
    def call(items, threads):
        return [os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) for _ in items]

    with batcher() as own:
        [found] = asyncio.run(own.run(Job("k", "k", call, ["a"], [1])))
    assert found == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)


def test_busy_by_tokens():
    async def go(own, call):
        first = await held(own, call)
        other = asyncio.ensure_future(own.run(call.job("a", "b", tokens=40)))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await own.run(call.job("c", tokens=21))
        third = asyncio.ensure_future(own.run(call.job("c", tokens=20)))
        await asyncio.sleep(0)
        assert own.queued_tokens == 100
        call.gate.set()
        await asyncio.gather(first, other, third)
        assert own.queued_tokens == 0

    with batcher(max_tokens=100) as own:
        asyncio.run(go(own, Recorder()))


def test_one_bad_item_fails_alone():
    async def go(own, call):
        first = await held(own, call)
        given = [(1, 2), ("bad", 3), (4,)]
        others = [asyncio.ensure_future(own.run(call.job(*items))) for items in given]
        await asyncio.sleep(0.01)
        call.gate.set()
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert [found[0], found[1], found[3]] == [[0], [2, 4], [8]]
        assert isinstance(found[2], ValueError)
        assert await own.run(call.job(5)) == [10]
        assert own.queued_tokens == 0

    with batcher() as own:
        asyncio.run(go(own, Recorder()))


def test_nothing_more_is_taken_from_a_job_whose_sender_has_gone():
    async def go(own, call):
        first = await held(own, call)
        left = asyncio.ensure_future(own.run(call.job(*["left"] * 500)))
        stays = asyncio.ensure_future(own.run(call.job(7)))
        await asyncio.sleep(0)
        assert own.queued_tokens == 5010
        left.cancel()
        await asyncio.sleep(0)
        assert own.queued_tokens == 10
        call.gate.set()
        assert await asyncio.gather(first, stays) == [[0], [14]]
        with pytest.raises(asyncio.CancelledError):
            await left

    with batcher() as own:
        asyncio.run(go(own, call := Recorder()))
    assert "left" not in sum(call.calls, [])


def test_a_job_that_fails_or_is_left_half_way_is_not_gone_on_with():
    async def go(own, call):
        with pytest.raises(ValueError):
            await own.run(call.job("bad", *range(100_000)))
        half = asyncio.ensure_future(own.run(call.job(*range(100_000), key="half")))
        await asyncio.sleep(0.03)
        half.cancel()
        await asyncio.sleep(0.05)
        assert own.queued_tokens == 0 and not own.queue

    with batcher() as own:
        asyncio.run(go(own, call := Recorder(seconds=1e-4)))
    assert sum(map(len, call.calls)) < 5000


def test_the_pace_of_a_kind_is_learned():
    """Slow work is taken in smaller portions, quick work in larger ones, each kind by itself."""

    async def go(own, slow, quick):
        for _ in range(40):
            await own.run(slow.job(*range(4), kind="m/slow"))
        slow.calls.clear()
        await own.run(slow.job(*range(40), kind="m/slow"))
        await own.run(quick.job(*range(100), kind="m/quick"))

    with batcher() as own:
        asyncio.run(go(own, slow := Recorder(seconds=0.005), Recorder()))
    # 5 ms an item: about six fit into 30 ms; by the pace before it was measured, thirty
    assert max(map(len, slow.calls)) <= 8
    # ten tokens an item; of the pace before it was measured 0.9^41 is left, which is near nothing
    assert 0.0005 * (1 - 0.9**41) <= own._pace["m/slow"] < 0.002


def test_a_call_that_was_held_up_says_little_of_the_pace():
    """Such as the first, which reads what later ones have."""

    async def go(own, call):
        for _ in range(20):
            await own.run(call.job(1))
        before = own._pace["m/double"]
        call.gate.clear()
        slow = asyncio.ensure_future(own.run(call.job(1)))
        await asyncio.sleep(0.3)
        call.gate.set()
        await slow
        return before, own._pace["m/double"]

    with batcher() as own:
        before, after = asyncio.run(go(own, Recorder(seconds=0.001)))
    assert before < after <= 2 * before


def test_calls_run_in_several_threads_and_a_lone_one_gets_all():
    async def go(own, call):
        await own.run(call.job(*range(20)))
        call.gate.clear()
        two = [asyncio.ensure_future(own.run(call.job(n, key=n))) for n in (1, 2)]
        while len(call.calls) < 3:  # both stand at the gate at once
            await asyncio.sleep(0.001)
        call.gate.set()
        assert await asyncio.gather(*two) == [[2], [4]]

    with batcher(threads=2) as own:
        asyncio.run(asyncio.wait_for(go(own, call := Recorder()), 10))
    assert call.threads[0] == 2 and 1 in call.threads[1:]


def test_no_items_need_no_turn():
    with batcher() as own:
        assert asyncio.run(own.run(Recorder().job())) == []


def test_answers_to_a_loop_that_has_ended_hurt_nobody():
    """Who stops at the first answer leaves others whose loop is closed when they are ready."""
    call = Recorder()
    call.gate.clear()

    async def leave(own):
        asyncio.ensure_future(own.run(call.job(1)))
        while not call.began.is_set():
            await asyncio.sleep(0.001)

    with batcher() as own:
        asyncio.run(leave(own))
        call.gate.set()
        assert asyncio.run(own.run(call.job(2))) == [4]
