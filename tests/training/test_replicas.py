import threading
import time

import pytest
import torch
from torch import nn

from bertsmith.training import replicas as replicas_module
from bertsmith.training.engine import Engine
from bertsmith.training.replicas import Replicas


def engine(workers):
    return Engine(torch.device("cpu"), "float32", workers)


def linear():
    layer = nn.Linear(3, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def add_gradient(model, rows, number):
    loss = model(rows).sum()
    loss.backward()
    return number, loss.item()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gradients_are_the_sum_over_all_pieces_whoever_computes_them(workers):
    model, pieces = linear(), [torch.full((2, 3), float(n)) for n in range(5)]
    with Replicas(model, engine(workers)) as replicas:
        found = replicas.map(add_gradient, pieces)
        replicas.gather()
        assert found == [(n, 6.0 * n) for n in range(5)]  # in the order of the pieces
        assert model.weight.grad.tolist() == [[20.0] * 3]  # 2 x (0 + 1 + 2 + 3 + 4)
        assert all(copy.weight.grad is None for copy in replicas.models[1:])


def test_replicas_see_every_change_of_the_weights():
    model = linear()
    with Replicas(model, engine(2)) as replicas:
        with torch.no_grad():
            model.weight.mul_(3)
        pieces = [torch.ones(1, 3)] * 2
        assert replicas.map(lambda model, rows, _: model(rows).item(), pieces) == [9.0, 9.0]


def test_fewer_pieces_than_replicas():
    model = linear()
    with Replicas(model, engine(3)) as replicas:
        replicas.map(add_gradient, [torch.ones(1, 3)])
        replicas.gather()
    assert model.weight.grad.tolist() == [[1.0] * 3]


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
