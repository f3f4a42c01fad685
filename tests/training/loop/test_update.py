"""The one-pass update of a step against PyTorch's operators, and its kernels by themselves."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.model.heads import PreTrainingModel, SequenceClassifier, Targets
from bertsmith.training.engine import Engine
from bertsmith.training.loop import update as update_module
from bertsmith.training.loop.update import (
    BLOCK,
    NO_COPY,
    FusedUpdate,
    Update,
    adamw_chunk,
    make_update,
    momentum_ahead,
    move_along,
    sum_of_squares,
)
from bertsmith.training.optimizers import build_optimizer, load_state_tensors, state_tensors
from bertsmith.training.replicas import Replicas

from ..runs import NO_DROPOUT, random_model

PIECES, LENGTH = 60, 12
KERNELS = ("sum_of_squares", "adamw_chunk", "momentum_ahead", "move_along")


def engine(workers=2, precision="bf16"):
    return Engine(torch.device("cpu"), precision, workers)


def made(kind=PreTrainingModel, *labels):
    return random_model(PIECES, kind=kind, labels=labels, **NO_DROPOUT)


def rows(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(5, PIECES, (3, LENGTH), generator=generator)


def pretraining_gradient(replica, piece, number, factor=0.1):
    ids = rows(piece)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        found = replica.losses(ids, ids * 0, None, Targets(None, None, ids.flatten()))
        (factor * (found.mlm_loss + found.nsp_logits.float().sum())).backward()
    return found.mlm_loss.item()


def steps(fused, kind="adamw", pieces=2, clip=1.0, workers=2, count=4, optimizer=None, model=None):
    """Some steps of one of the updates; (model, optimizer, norms, losses)."""
    model = model or made()
    if optimizer is None:
        optimizer = build_optimizer(model, kind, 1e-2, 0.1, layer_decay=0.5)
    norms, losses = [], []
    with Replicas(model, engine(workers)) as replicas:
        for step in range(count):
            numbers = range(step * pieces, (step + 1) * pieces)
            losses += replicas.map(pretraining_gradient, numbers)
            update = (FusedUpdate if fused else Update)(optimizer, replicas, clip)
            norms.append(float(update.norm()))
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * group.get("rate_scale", 1.0)
            update.move()
    return model, optimizer, norms, losses


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("kind", ["adamw", "paper-adam", "muon"])
@pytest.mark.parametrize(("pieces", "workers"), [(2, 2), (1, 2), (5, 2), (3, 1)])
@pytest.mark.parametrize("clip", [0.01, 1e9])
def test_it_does_what_clipping_and_the_optimizer_do(kind, pieces, workers, clip):
    expected = steps(False, kind, pieces, clip, workers, count=1)
    found = steps(True, kind, pieces, clip, workers, count=1)
    assert found[3] == expected[3]  # the losses before it: nothing has been added up yet
    assert found[2] == pytest.approx(expected[2], rel=1e-5)
    # the same arithmetic in float32, rounded in other places
    torch.testing.assert_close(weights(found[0]), weights(expected[0]), rtol=1e-5, atol=1e-7)
    states = [state_tensors(model, optimizer) for model, optimizer, _, _ in (found, expected)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_several_steps_stay_together(kind):
    expected, found = steps(False, kind, count=6), steps(True, kind, count=6)
    assert found[3] == pytest.approx(expected[3], rel=5e-3)  # a copy may round to either side
    assert found[3][-1] < 0.8 * found[3][0]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_is_the_same_every_time_to_the_bit(kind):
    first, second = steps(True, kind, pieces=5), steps(True, kind, pieces=5)
    assert first[2:] == second[2:] and torch.equal(weights(first[0]), weights(second[0]))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_going_on_from_the_stored_state_is_going_on(kind):
    whole, optimizer, _, _ = steps(True, kind, count=2)
    again = copy.deepcopy(whole)
    other = build_optimizer(again, kind, 1e-2, 0.1, layer_decay=0.5)
    load_state_tensors(again, other, state_tensors(whole, optimizer))
    first = steps(True, model=whole, optimizer=optimizer)
    second = steps(True, model=again, optimizer=other)
    assert first[2:] == second[2:] and torch.equal(weights(whole), weights(again))


def test_a_weight_without_gradient_stays_and_has_no_state():
    model = made(SequenceClassifier, 2)
    optimizer = build_optimizer(model, "adamw", 1e-2, 0.1)
    before, unused = weights(model), model.encoder.embeddings.position.weight

    def compute(replica, piece, number):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            replica.classifier(torch.ones(2, 64)).float().sum().backward()

    with Replicas(model, engine()) as replicas:
        replicas.map(compute, [0, 1])
        update = make_update(optimizer, replicas, 1.0)
        update.norm()
        update.move()
    assert unused not in optimizer.state and len(state_tensors(model, optimizer)) == 6
    moved = [name for name, value in model.named_parameters() if value in optimizer.state]
    assert moved == ["classifier.weight", "classifier.bias"]
    assert (weights(model) != before).sum() == sum(w.numel() for w in model.classifier.parameters())


def test_which_update_fits():
    model = made()
    optimizers = {
        kind: build_optimizer(model, kind, 1e-3, 0.0) for kind in ("adamw", "muon", "lamb")
    }
    optimizers["sgd"] = torch.optim.SGD(model.parameters(), lr=0.0)
    for precision in ("bf16", "float32"):
        with Replicas(model, engine(2, precision)) as replicas:
            for kind, optimizer in optimizers.items():
                fused = precision == "bf16" and kind in ("adamw", "muon")
                found = make_update(optimizer, replicas, 1.0)
                assert type(found) is (FusedUpdate if fused else Update)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradients_are_freed_after_a_step(kind):
    model = made()
    optimizer = build_optimizer(model, kind, 1e-2, 0.1)
    with Replicas(model, engine()) as replicas:
        update = make_update(optimizer, replicas, 1.0)
        for _ in range(2):
            replicas.map(pretraining_gradient, [0, 1])
            gradients = [weakref.ref(g) for part in replicas.trained() for g in part.gradients]
            update.norm()
            assert all(gradient() is not None for gradient in gradients)
            update.move()
            assert all(gradient() is None for gradient in gradients)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_are_forgotten_move_nothing(fused):
    model = made()
    optimizer = build_optimizer(model, "adamw", 1e-2, 0.1)
    before = weights(model)
    with Replicas(model, engine()) as replicas:
        replicas.map(pretraining_gradient, [0, 1, 2])
        update = (FusedUpdate if fused else Update)(optimizer, replicas, 1.0)
        update.norm()
        update.zero_grad()
        assert not replicas.trained()
        assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(weights(model), before) and not optimizer.state


def test_a_gradient_that_is_not_finite_is_seen():
    def compute(replica, piece, number):
        pretraining_gradient(replica, piece, number, float("inf") if piece else 1.0)

    model = made()
    optimizer = build_optimizer(model, "adamw", 1e-2, 0.1)
    with Replicas(model, engine()) as replicas:
        replicas.map(compute, [0, 1])
        assert not torch.tensor(make_update(optimizer, replicas, 1.0).norm()).isfinite()


@pytest.mark.parametrize("kind", ["muon", "lamb"])
def test_other_optimizers_reach_the_copies(kind):
    model = made()
    optimizer = build_optimizer(model, kind, 1e-2, 0.1)
    with Replicas(model, engine()) as replicas:
        for _ in range(2):
            replicas.map(pretraining_gradient, [0, 1])
            update = make_update(optimizer, replicas, 1.0)
            update.norm()
            update.move()
        copies = dict(replicas.models[0].named_parameters())
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                copy_of = copies[f"{name}.weight"]
                assert copy_of.dtype == torch.bfloat16
                assert torch.equal(copy_of, module.weight.to(torch.bfloat16))
        table = model.encoder.embeddings.token.weight
        assert torch.equal(replicas.models[1].output_table, table.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("pieces", [2, 3])  # with three, gradients are added in float32
def test_loading_compiles_what_a_step_runs_and_moves_nothing(kind, begun, pieces, monkeypatch):
    model = made()
    optimizer = build_optimizer(model, kind, 1e-2, 0.1, layer_decay=0.5)
    if begun:
        steps(True, count=1, optimizer=optimizer, model=model)
    before, state = weights(model), copy.deepcopy(state_tensors(model, optimizer))
    seen, real = [], {name: getattr(update_module, name) for name in KERNELS}

    def watched(name):
        def kernel(first, *others):
            gradients = first if isinstance(first, tuple) else [first]
            given = (name, [g.dtype for g in gradients], [getattr(o, "dtype", 0) for o in others])
            seen[-1].add(str(given))
            return real[name](first, *others)

        return kernel

    for name in KERNELS:
        monkeypatch.setattr(update_module, name, watched(name))
    with Replicas(model, engine()) as replicas:
        replicas.map(pretraining_gradient, range(pieces))
        update = make_update(optimizer, replicas, 1.0)
        seen.append(set())
        update.load()
        assert torch.equal(weights(model), before)
        now = state_tensors(model, optimizer)
        assert now.keys() == state.keys()
        assert all(torch.equal(now[name], value) for name, value in state.items())
        seen.append(set())
        update.norm()
        update.move()
    assert seen[0] == seen[1] != set()


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
    adamw_chunk(given, 0, SIZE, weight, (first, second), copy, FACTORS)
    # float32 rounds each of some ten operations by 6e-8
    np.testing.assert_allclose(first, m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, v, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
    narrow = torch.from_numpy(weight).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(copy).view(torch.bfloat16), narrow)
    squares = sum_of_squares(given, 0, SIZE)
    np.testing.assert_allclose(squares, (4 * g**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_formula_of_muon_around_its_products(number, dtype):
    made, given = gradients(number, dtype)
    weight, momentum, _ = weight_and_moments()
    ahead, copy = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.uint16)
    g = 0.5 * sum(part.double().numpy() for part in made)
    m = 0.95 * momentum + g
    expected = 0.99 * weight - 0.02 * (g + 0.95 * m)
    momentum_ahead(given, np.float32(0.5), momentum, ahead)
    move_along(ahead, np.float32(0.99), np.float32(0.02), weight, copy)
    np.testing.assert_allclose(momentum, m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ahead, g + 0.95 * m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
    narrow = torch.from_numpy(weight).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(copy).view(torch.bfloat16), narrow)


def test_a_tensor_in_stretches_is_the_whole_tensor_to_the_bit():
    _, given = gradients(2, torch.bfloat16)
    found = []
    for bounds in ([0, SIZE], [0, BLOCK, SIZE], [0, 2 * BLOCK, SIZE]):
        parts, copy = weight_and_moments(), np.zeros(SIZE, np.uint16)
        for start, stop in reversed(list(zip(bounds, bounds[1:], strict=False))):
            adamw_chunk(given, start, stop, parts[0], parts[1:], copy, FACTORS)
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
        adamw_chunk(tuple(given), 0, SIZE, weight, (first, second), NO_COPY, FACTORS)
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
