"""Replicas of a step, and passes without gradients: order, errors, and who computes what."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.base.processes import share
from bertsmith.model.encoder import Encoder
from bertsmith.tasks.features import Features
from bertsmith.training import replicas as replicas_module
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.hidden_states import sentence_vectors, states_at
from bertsmith.training.replicas import TOKENS_AT_ONCE, Replicas, computed, row_batches

from .runs import random_model


def engine(workers=2, precision="float32", device="cpu"):
    return Engine(torch.device(device), precision, workers)


def linear():
    layer = nn.Linear(3, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def add_gradient(model, rows, number):
    loss = model(rows).sum()
    loss.backward()
    return number, loss.item()


@pytest.mark.parametrize(("workers", "count"), [(1, 5), (2, 5), (3, 5), (3, 2), (3, 1)])
def test_gradients_are_the_sum_over_all_pieces_whoever_computes_them(workers, count):
    model, pieces = linear(), [torch.full((2, 3), float(n + 1)) for n in range(count)]
    with Replicas(model, engine(workers)) as replicas:
        found = replicas.map(add_gradient, pieces)
        replicas.gather()
        assert found == [(n, 6.0 * (n + 1)) for n in range(count)]  # in the order of the pieces
        assert model.weight.grad.tolist() == [[count * (count + 1)] * 3]  # 2 x (1 + 2 + ...)
        assert all(copy.weight.grad is None for copy in replicas.models[1:])


def test_replicas_see_every_change_of_the_weights():
    model = linear()
    with Replicas(model, engine(2)) as replicas:
        with torch.no_grad():
            model.weight.mul_(3)
        pieces = [torch.ones(1, 3)] * 2
        assert replicas.map(lambda model, rows, _: model(rows).item(), pieces) == [9.0, 9.0]


def test_a_parameter_that_only_another_replica_used_keeps_its_gradient():
    model = nn.ModuleList([linear(), linear()])

    def compute(model, rows, number):
        model[number](rows).sum().backward()

    with Replicas(model, engine(2)) as replicas:
        replicas.map(compute, [torch.ones(1, 3)] * 2)
        replicas.gather()
    assert [layer.weight.grad.tolist() for layer in model] == [[[1.0] * 3]] * 2


def test_each_replica_has_a_thread_with_one_core():
    seen = set()

    def compute(model, piece, number):
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        time.sleep(0.01)

    with Replicas(linear(), engine(2)) as replicas:
        replicas.map(compute, [None] * 4)
    assert {threads for _, threads in seen} == {1} and len(seen) == 2


def test_an_error_in_a_replica_is_raised():
    def compute(model, piece, number):
        raise FloatingPointError(f"piece {number}")

    replicas = Replicas(linear(), engine(2))
    with pytest.raises(FloatingPointError, match="piece 0"):
        replicas.map(compute, [None] * 2)
    replicas.close()


def test_a_small_model_is_moved_by_one_thread_and_a_large_one_by_all(monkeypatch):
    seen = []
    torch.set_num_threads(2)
    for most in (replicas_module.SHARED_UPDATE, 1):
        monkeypatch.setattr(replicas_module, "SHARED_UPDATE", most)
        with Replicas(linear(), engine(2)) as replicas, replicas.updating():
            seen.append(torch.get_num_threads())
    assert seen == [1, 2] and torch.get_num_threads() == 2


def who():
    return threading.current_thread().name


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_outcomes_come_in_the_order_of_the_pieces(workers):
    def slow(piece):
        time.sleep(0.01 * (piece % 3 == 0))
        return piece, torch.is_inference_mode_enabled()

    found = list(computed(engine(workers), slow, range(12)))
    assert found == [(piece, True) for piece in range(12)]
    assert not torch.is_inference_mode_enabled()


def test_each_worker_has_one_of_pytorchs_threads_and_the_caller_keeps_its_own():
    torch.set_num_threads(2)

    def compute(piece):
        time.sleep(0.01)
        return who(), torch.get_num_threads()

    found = set(computed(engine(2), compute, range(6)))
    assert len(found) == 2 and {threads for _, threads in found} == {1}
    assert torch.get_num_threads() == 2
    # one worker, or one piece, is computed here
    for few in (computed(engine(1), compute, range(3)), computed(engine(2), compute, [0])):
        assert set(few) == {(who(), 2)}


def test_a_slow_core_takes_fewer_pieces():
    slow = []

    def compute(piece):
        slow[:] = slow or [who()]
        time.sleep(0.1 if who() == slow[0] else 0.01)
        return who()

    found = list(computed(engine(2), compute, range(12)))
    assert found.count(slow[0]) <= 4


def test_no_more_is_made_ahead_than_two_pieces_a_worker():
    begun = []
    outcomes = computed(engine(2), begun.append, range(100))
    next(outcomes)
    time.sleep(0.1)
    assert len(begun) <= 6
    outcomes.close()


def test_an_error_is_raised_and_the_rest_left_alone():
    done = []

    def compute(piece):
        if piece == 3:
            raise FloatingPointError("piece 3")
        done.append(piece)

    with pytest.raises(FloatingPointError, match="piece 3"):
        list(computed(engine(2), compute, range(100)))
    assert len(done) < 20


@pytest.mark.parametrize("workers", [1, 2])
def test_products_are_bf16_of_the_weights_as_they_are_now(workers):
    """Casts are kept from piece to piece, but not from call to call, nor by a call cut short."""
    model = linear()
    pieces = [torch.ones(1, 3)] * 5
    for factor in (1, 3, 9):
        outcomes = computed(engine(workers, "bf16"), model, pieces)
        if factor == 3:  # still open when the weights move, as behind an error that is looked at
            cut_short = outcomes
            next(cut_short)
        else:
            found = list(outcomes)
            assert {outcome.dtype for outcome in found} == {torch.bfloat16}
            assert {outcome.item() for outcome in found} == {3.0 * factor}
        with torch.no_grad():
            model.weight.mul_(3)
    cut_short.close()


def test_on_a_cpu_a_batch_is_what_one_core_computes():
    lengths = np.full(100, 128)
    assert {len(rows) for rows in row_batches(engine(), lengths)} == {TOKENS_AT_ONCE // 128, 4}
    assert len(row_batches(engine(device="cuda"), lengths)) == 2
    assert len(row_batches(engine(), lengths, budget=128)) == 100


def rows():
    random = np.random.default_rng(1)
    lengths = random.integers(2, 40, 200)
    ids = random.integers(1, 50, lengths.sum()).astype(np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    return Features(ids, np.zeros_like(ids), boundaries, None, max_length=40, num_truncated=0)


def test_how_many_compute_vectors_and_states_changes_no_bit():
    encoder = random_model(50, kind=Encoder).eval()
    features = rows()
    first = features.boundaries[:-1]
    one, two = engine(1), engine(2)
    vectors = [sentence_vectors(encoder, features, some) for some in (one, two)]
    assert np.array_equal(*vectors)
    states = [list(states_at(encoder, features, first, [0, 2], some, 512)) for some in (one, two)]
    assert len(states[0]) > 4
    for (left, of_left), (right, of_right) in zip(*states, strict=True):
        assert np.array_equal(left, right)
        assert all(map(torch.equal, of_left, of_right))


def test_a_worker_keeps_its_one_thread_when_another_sets_more():
    """With `torch.set_num_threads(1)` alone it has 2: it takes the number that was set last."""

    begun, others_set, found = threading.Event(), threading.Event(), []

    def work():
        replicas_module.use_one_thread()
        begun.set()
        assert others_set.wait(60)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    torch.set_num_threads(2)
    others_set.set()
    thread.join()
    assert found == [1]


def test_a_replica_that_has_no_more_helps_another():
    other_is_done, parts = threading.Event(), []

    def compute(model, item, number):
        if item == "short":
            other_is_done.set()
            return
        other_is_done.wait()
        while len(parts) < 2:  # until the other is idle
            parts.clear()
            share(lambda start, stop: parts.append((start, stop)), 64, 32)

    with Replicas(linear(), engine()) as replicas:
        for items in (["long", "short"], ["short", "long"]):
            replicas.map(compute, items)
            assert sorted(parts) == [(0, 32), (32, 64)]
            other_is_done.clear()
            parts.clear()
