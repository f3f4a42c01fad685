"""One rank of several, without the others, and how ranks find each other through a store.

test_torchrun.py has two of them.
"""

import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from bertsmith.corpus.examples.mixture import Mixture, open_stream
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.training import ranks as ranks_module
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.pretraining import evaluation
from bertsmith.training.pretraining.evaluation import eval_stream, evaluate_pretraining
from bertsmith.training.pretraining.settings import PretrainSettings
from bertsmith.training.pretraining.task import Pretraining, rows_per_forward
from bertsmith.training.ranks import (
    SINGLE_PROCESS,
    DistributedGradients,
    Ranks,
    process_group,
    rank_zero_output,
    rendezvous,
)

CPU = torch.device("cpu")


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


def test_a_rank_that_never_joins_is_named(lonely):
    with (
        pytest.raises(TimeoutError, match="rank 1 of 2 did not come within 0.3 s"),
        process_group(0.3),
    ):
        pass


def test_the_rank_that_holds_the_store_is_named(lonely):
    lonely.setenv("RANK", "1")
    with (
        pytest.raises(TimeoutError, match="rank 0 of 2 did not come within 0.3 s"),
        process_group(0.3),
    ):
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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/pair.cc:534] Connection closed by peer"),
        torch.distributed.DistError("gone"),
    ],
)
def test_a_lost_rank_is_an_error_of_the_machine(lonely, error, monkeypatch):
    monkeypatch.setattr(ranks_module, "rendezvous", lambda *_: "names")
    monkeypatch.setattr(Ranks, "texts", lambda *_: ["0", "1"])
    monkeypatch.setattr(ranks_module.dist, "init_process_group", lambda *_, **__: None)
    with (
        pytest.raises(ConnectionError, match="rank 0 of 2 lost another one"),
        process_group(5) as ranks,
    ):
        assert ranks.restarted
        raise error
    with pytest.raises(RuntimeError, match="shapes"), process_group(5):
        raise RuntimeError("shapes do not fit")


def test_a_process_alone_is_started_again_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with process_group(timeout=1) as ranks:
        assert ranks.restarted and ranks.size == 1


def test_shards_need_an_optimizer_that_takes_them():
    for optimizer in ("lamb", "muon"):
        with pytest.raises(ValueError, match=f"shard = true: {optimizer} needs whole matrices"):
            PretrainSettings(shard=True, optimizer=optimizer)
    with pytest.raises(ValueError, match="dist_timeout = 0: must be above 0"):
        PretrainSettings(dist_timeout=0)


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
    with pytest.raises(ValueError, match="threads=5: .* 8 cores for 2 ranks; give 1 to 4"):
        choose_engine("cpu", "float32", 5, two)


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    ranks = Ranks(5, size=8, local_rank=1, local_size=2)
    assert ranks.device(torch.device("cuda")) == torch.device("cuda", 1) and taken == [1]
    assert ranks.device(CPU) == CPU
    with pytest.raises(ValueError, match="--device cuda:0: each of 8 ranks takes its own GPU"):
        ranks.device(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="rank 6 is number 2 on a machine with 2 GPUs"):
        Ranks(6, size=8, local_rank=2, local_size=3).device(torch.device("cuda"))


@pytest.mark.parametrize(("batch", "stores"), [(16, 1), (15, 1), (16, 2)])
def test_the_ranks_make_the_rows_of_one_batch(store_folder, batch, stores):
    settings = PretrainSettings(size="2x64", max_length=48, batch_size=batch, steps=1)
    store = TokenStore.open(store_folder)
    corpus = store if stores == 1 else Mixture([store, store], [3, 1])
    vocabulary = store.tokenizer.vocabulary
    stream = open_stream(corpus.train, vocabulary, settings.examples(48), 1)
    config = config_for("2x64", len(vocabulary))
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    # of the epoch: some rows of the batch lie behind its end
    near_the_end = stream.advance(Position(), stream.streams[0].examples_in_epoch(0) - 6)

    def made(*ranks):
        engine = Engine(CPU, "float32", 1, *ranks)
        return Pretraining(model, stream, None, settings, engine).batch(near_the_end)

    whole, following = made()
    parts = [made(Ranks(rank, size=3)) for rank in range(3)]
    assert [part[1] for part in parts] == [following] * 3
    assert sum(part[0].counts["masked"] for part in parts) == whole.counts["masked"]
    assert sum(part[0].counts["rows"] for part in parts) == batch
    assert sum(part[0].tokens for part in parts) == whole.tokens
    assert [part[0].first for part in parts] == [0, 1, 2]  # of one micro-batch each
    for name in ("ids", "lengths", "labels", "next"):
        found = np.concatenate([micro[name] for part in parts for micro in part[0].micro_batches])
        assert np.array_equal(found, whole.micro_batches[0][name]), name


@pytest.mark.parametrize("rows", [1, 12, 13, 16])
def test_the_ranks_share_the_held_out_rows(store_folder, monkeypatch, rows):
    store = TokenStore.open(store_folder)
    vocabulary = store.tokenizer.vocabulary
    stream = eval_stream(store, vocabulary, 48, "mlm+nsp")
    config = config_for("2x64", len(vocabulary))
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    passes, real = [], evaluation.pretraining_sums

    def counted(model, micro, engine):
        passes.append(engine.ranks.rank)
        return real(model, micro, engine)

    monkeypatch.setattr(evaluation, "pretraining_sums", counted)
    sums, some = [], {"masked": 1.0, "rows": 1.0}  # of the others, of whom there are none here
    monkeypatch.setattr(Ranks, "all_reduce", lambda ranks, own: sums.append(own) or {**own, **some})

    def evaluated(*ranks):
        engine = Engine(CPU, "float32", 1, *ranks)
        evaluate_pretraining(model, stream, engine, rows, batch=4)
        return sums.pop()

    whole = evaluated()
    assert whole["rows"] == rows and len(passes) == -(-rows // 4)
    passes.clear()
    parts = [evaluated(Ranks(rank, size=3)) for rank in range(3)]
    for name in whole:
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], rel=1e-5), name
    assert [passes.count(rank) for rank in range(3)] == [-(-rows // 12)] * 3  # as sharding needs


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


def test_micro_batches_are_those_of_one_rank_that_makes_as_many():
    def rows(workers, ranks=1):
        engine = Engine(CPU, "float32", workers, Ranks(0, size=ranks))
        return rows_per_forward(settings, settings.phases()[0], engine, config_for("base", 8000))

    settings = PretrainSettings(batch_size=32, micro_batch_size=4)
    assert rows(workers=1) == rows(workers=1, ranks=2) == 4
    settings = PretrainSettings(batch_size=32)
    assert rows(workers=4) == rows(workers=2, ranks=2) == 8


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


def test_all_ranks_get_one_word_and_another_one_next_time():
    store = Memory()
    words = [all_of(3, lambda rank: rendezvous(of(store, rank, 3))) for _ in range(2)]
    assert [len(set(found)) for found in words] == [1, 1]
    assert words[0] != words[1]


def test_what_dead_ranks_left_in_the_store_is_not_taken_for_the_living():
    store = Memory()
    first = all_of(3, lambda rank: rendezvous(of(store, rank, 3)))[0]
    with pytest.raises(TimeoutError, match="ranks 1, 2 of 3 did not come within 0.2 s"):
        rendezvous(of(store, 0, 3, timeout=0.2))
    second = all_of(3, lambda rank: rendezvous(of(store, rank, 3)))
    assert len({first, *second}) == 2


def test_the_missing_rank_is_named():
    store = Memory()

    def ask(rank):
        with pytest.raises(TimeoutError, match="rank 2 of 4 did not come within 0.5 s") as caught:
            rendezvous(of(store, rank, 4, timeout=0.5))
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        messages = list(pool.map(ask, (0, 1, 3)))
    assert all("--dist-timeout" in message for message in messages)


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
