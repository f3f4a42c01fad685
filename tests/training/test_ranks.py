"""One rank of several, without the others, and how ranks find each other through a store.

test_torchrun.py has two of them.
"""

import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bertsmith.training import ranks as ranks_module
from bertsmith.training.engine import choose_engine
from bertsmith.training.ranks import (
    SINGLE_PROCESS,
    DistributedGradients,
    Ranks,
    process_group,
    rank_zero_output,
    rendezvous,
)


@pytest.fixture
def lonely(monkeypatch):
    """The environment of one of two ranks, of which the other never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    return monkeypatch


@pytest.mark.parametrize(("own", "missing"), [(0, 1), (1, 0)], ids=["the other", "the store's"])
def test_a_rank_that_never_joins_is_named(lonely, own, missing):
    lonely.setenv("RANK", str(own))
    says = f"rank {missing} of 2 did not come within 0.3 s"
    with pytest.raises(TimeoutError, match=says), process_group(0.3):
        pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_ADDR", "", "WORLD_SIZE = 2 without MASTER_ADDR and MASTER_PORT: use torchrun"),
        ("RANK", "one", "RANK=one in the environment: torchrun gives a number"),
    ],
)
def test_half_an_environment_is_refused(lonely, name, value, message):
    lonely.setenv(name, value)
    with pytest.raises(ValueError, match=message), process_group(0.3):
        pass


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_numbers_and_tensors_are_summed_alike(monkeypatch, kind):
    monkeypatch.setattr(ranks_module.dist, "all_reduce", lambda sums: sums.mul_(2))  # two alike
    numbers = {"loss": kind(0.1), "rows": 2**24 + 1}  # more than float32 holds
    found = Ranks(0, size=2).all_reduce(numbers)
    assert found == {"loss": pytest.approx(0.2), "rows": 2**25 + 2}


def test_a_process_alone_needs_nothing(capsys):
    with process_group(timeout=1) as ranks:
        assert ranks == SINGLE_PROCESS
        assert ranks.all_reduce({"loss": 1.5, "rows": 4}) == {"loss": 1.5, "rows": 4}
        assert ranks.broadcast("step", "8") == "8"
        assert ranks.share(7) == range(7)
        weight = torch.ones(2)
        assert ranks.gather({"w": weight}) == {"w": weight}
        ranks.all_reduce_(weight)
        assert weight.tolist() == [1, 1]
        ranks.agree({"batch": 16})
        assert ranks.sharding(False) == SINGLE_PROCESS
    assert capsys.readouterr().err == ""
    assert SINGLE_PROCESS.sharding(True) == SINGLE_PROCESS
    assert "shard = true has no effect" in capsys.readouterr().err
    assert Ranks(0, size=2).sharding(True).shard


CLOSED = RuntimeError("[../gloo/pair.cc:534] Connection closed by peer")


@pytest.mark.parametrize("error", [CLOSED, torch.distributed.DistError("gone")], ids=repr)
def test_a_lost_rank_is_an_error_of_the_machine(lonely, error, monkeypatch):
    monkeypatch.setattr(ranks_module, "rendezvous", lambda *_: "names")
    monkeypatch.setattr(Ranks, "texts", lambda *_: ["0", "1"])
    monkeypatch.setattr(ranks_module.dist, "init_process_group", lambda *_, **__: None)
    lost = pytest.raises(ConnectionError, match="rank 0 of 2 lost another one")
    with lost, process_group(5) as ranks:
        assert ranks.restarted
        raise error
    with pytest.raises(RuntimeError, match="shapes"), process_group(5):
        raise RuntimeError("shapes do not fit")


def test_a_process_alone_is_started_again_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with process_group(timeout=1) as ranks:
        assert ranks.restarted and ranks.size == 1


def test_ranks_with_other_facts_are_refused(monkeypatch):
    told = {"batch": 16, "writers": (), "corpus": "ab", "newest checkpoint": None}
    texts = [json.dumps(told), json.dumps(told)]
    monkeypatch.setattr(Ranks, "texts", lambda *_: texts)
    both = [Ranks(rank, size=2, store=torch.distributed.HashStore()) for rank in range(2)]
    for ranks in both:
        ranks.agree(told)
    texts[1] = json.dumps({**told, "corpus": "abc"})
    for ranks in both:  # rank 0 too, which would begin to write otherwise
        with pytest.raises(ValueError, match="corpus is abc at rank 1 and ab at rank 0: every ran"):
            ranks.agree(told)


def test_a_batch_too_small_to_cut_is_refused():
    with pytest.raises(ValueError, match="batch_size = 2: too few for 3 ranks: raise it"):
        Ranks(0, size=3).share(2)
    with pytest.raises(ValueError, match="batch_size = 16: with shard = true it is a multiple"):
        Ranks(0, size=3, shard=True).share(16)


def test_only_rank_0_speaks(monkeypatch, capsys):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with rank_zero_output():
            print(f"rank {rank}")
            print(f"rank {rank}", file=sys.stderr)
    assert capsys.readouterr() == ("rank 0\n", "rank 0\n")


def test_cores_are_divided_among_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr("bertsmith.training.engine.usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    two = Ranks(1, size=4, local_rank=1, local_size=2)
    assert choose_engine("cpu", "float32", None, two).threads == 4
    with pytest.raises(ValueError, match="`threads=5`: .* 8 cores for 2 ranks; give 1 to 4"):
        choose_engine("cpu", "float32", 5, two)


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    ranks = Ranks(5, size=8, local_rank=1, local_size=2)
    assert ranks.device(torch.device("cuda")) == torch.device("cuda", 1) and taken == [1]
    assert ranks.device(cpu := torch.device("cpu")) == cpu
    with pytest.raises(ValueError, match="`device='cuda:0'`: each of 8 ranks takes its own GPU"):
        ranks.device(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="rank 6 is number 2 on a machine with 2 GPUs"):
        Ranks(6, size=8, local_rank=2, local_size=3).device(torch.device("cuda"))


def test_before_the_last_micro_batch_nothing_is_sent(monkeypatch):
    passed, sent, real = [], [], ranks_module._sum_of_bucket

    def sum_of_bucket(state, bucket):
        sent.append(len(passed))
        return real(state, bucket)

    monkeypatch.setattr(ranks_module, "_sum_of_bucket", sum_of_bucket)
    model = torch.nn.Linear(3, 1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        joint = DistributedGradients(model, Ranks(0, size=2))
        for step in range(2):
            model.zero_grad()
            for number in range(3):
                passed.append(number)
                with joint.synced(last=number == 2) as computed:
                    computed(lambda rows: model(rows).sum(), torch.ones(2, 3)).backward()
            assert sent == [3, 6][: step + 1]  # one bucket, with the third pass of each step
            assert model.weight.grad.tolist() == [[6.0] * 3]
        # before its group: else it ends the group's thread, which may want what Python holds then
        del joint, computed
    finally:
        torch.distributed.destroy_process_group()


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


def of(store, rank, size, timeout=20):
    return Ranks(rank, size, store=store, timeout=timeout)


def all_of(size, ask):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(ask, range(size)))


def words_of_three(store):
    return all_of(3, lambda rank: rendezvous(of(store, rank, 3)))


def test_all_ranks_get_one_word_and_another_one_next_time():
    store = Memory()
    words = [words_of_three(store) for _ in range(2)]
    assert [len(set(found)) for found in words] == [1, 1]
    assert words[0] != words[1]


def test_what_dead_ranks_left_in_the_store_is_not_taken_for_the_living():
    store = Memory()
    first = words_of_three(store)[0]
    with pytest.raises(TimeoutError, match="ranks 1, 2 of 3 did not come within 0.2 s"):
        rendezvous(of(store, 0, 3, timeout=0.2))
    assert len({first, *words_of_three(store)}) == 2


def test_the_missing_rank_is_named():
    store = Memory()

    def ask(rank):
        with pytest.raises(TimeoutError, match="rank 2 of 4 did not come within 0.5 s") as caught:
            rendezvous(of(store, rank, 4, timeout=0.5))
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        assert all("`dist_timeout`" in message for message in pool.map(ask, (0, 1, 3)))


def test_without_rank_0_nobody_is_listed():
    with pytest.raises(TimeoutError, match="rank 0 of 2 did not come within 0.1 s"):
        rendezvous(of(Memory(), 1, 2, timeout=0.1))


def test_texts_come_in_the_order_of_the_ranks():
    store = Memory()
    texts = all_of(3, lambda rank: of(store, rank, 3).texts("what", f"text {rank}"))
    assert texts == [["text 0", "text 1", "text 2"]] * 3


def test_a_rank_that_tells_nothing_is_named():
    with pytest.raises(TimeoutError, match="rank 1 of 2"):
        of(Memory(), 0, 2, timeout=0.1).texts("what", "text")
