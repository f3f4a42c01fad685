"""Training on a CUDA device beside the CPU's float32: `make test-gpu`."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.kernels.elementwise import seed_dropout, without_kernels
from bertsmith.training import ranks as ranks_module
from bertsmith.training.engine import choose_engine
from bertsmith.training.pretraining.task import Pretraining
from bertsmith.training.pretraining.trial import compiled_losses, dry_run
from bertsmith.training.ranks import Ranks

from ..runs import CPU, NO_DROPOUT, random_model, train_stream

# Norm of the error over the norm of the gradient. float32: another order of sums. bf16: weights,
# activations and gradients are rounded to 2^-9 at some thirty places; the same on a CPU is off by
# 0.6%. float8: to 2^-4 in the layers' products, and most of the norm is the output table's: 1.4%.
TOLERANCE = {"float32": 1e-3, "bf16": 2e-2, "float8": 5e-2}
DRAWS = 64  # of dropout


@pytest.fixture
def task(store_folder, settings):
    """The task of a model with random weights, on an engine."""

    def make(engine, deviation=0.05, objective="mlm+nsp", **dropout):
        made = replace(settings, objective=objective)
        pieces = len(TokenStore.open(store_folder).tokenizer.vocabulary)
        model = random_model(pieces, deviation=deviation, **{**NO_DROPOUT, **dropout})
        engine.prepare(model)
        stream = train_stream(store_folder, made)
        return Pretraining(model.to(engine.device), stream, None, made, engine)

    return make


def gradients(made, repeats=1):
    """Loss and all gradients of the first batch; repeated, since a graph is recorded on the way."""
    batch, _ = made.batch(Position(0, 0))
    for _ in range(repeats):
        made.model.zero_grad()
        losses = []
        for micro in batch.micro_batches:
            with made.engine.autocast():
                loss, _ = made.loss(made.model, made.engine.staged(micro), batch.counts)
            loss.backward()
            losses.append(loss.item())
    found = [p.grad.flatten().cpu() for p in made.model.parameters() if p.grad is not None]
    return sum(losses), torch.cat(found)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm", "ltr"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_loss_and_gradients_are_the_cpus(task, objective, compiled, precision):
    torch.compiler.reset()
    expected, exact = gradients(task(CPU, objective=objective))
    made = task(choose_engine("cuda", precision), objective=objective)
    if compiled:
        made.compiled = compiled_losses(made)
    loss, found = gradients(made, repeats=4 if compiled else 1)
    tolerance = TOLERANCE[precision]
    assert loss == pytest.approx(expected, rel=tolerance)
    assert (found - exact).norm() / exact.norm() < tolerance


class Draws(NamedTuple):
    loss: float
    """The mean over draws of dropout."""
    gradient: torch.Tensor
    """The same."""
    variance: float
    """Of one draw's gradient, summed over its numbers."""


def seed(number):
    torch.manual_seed(number)  # of PyTorch's operators
    seed_dropout(number)  # of the CPU's kernels


def draws_of(made, count):
    losses, gradient, squares = [], 0.0, 0.0
    for draw in range(count):
        seed(draw)
        loss, found = gradients(made)
        losses.append(loss)
        gradient = gradient + found.double()
        squares += found.double().square().sum().item()
    mean = gradient / count
    spread = squares / count - mean.square().sum().item()
    return Draws(sum(losses) / count, mean, spread * count / (count - 1))


@pytest.mark.parametrize("dropped", [{"dropout": 0.1}, {"attention_dropout": 0.25}])
@pytest.mark.parametrize(
    ("device", "precision", "compiled"),
    [
        ("cpu", "float32", False),  # PyTorch's operators, as on a GPU
        pytest.param("cuda", "float32", False, marks=pytest.mark.gpu),
        pytest.param("cuda", "bf16", False, marks=pytest.mark.gpu),
        pytest.param("cuda", "bf16", True, marks=pytest.mark.gpu),
    ],
)
def test_dropout_over_padded_rows_is_that_of_the_cpus_kernels(
    task, device, precision, compiled, dropped
):
    """No two devices draw alike, but the means over many draws agree, and so do the spreads.

    Two means of N draws differ by their noise, whose square is (V1 + V2) / N for variances V, and
    by rounding. Another share, a factor left out or padding that is seen is above that.
    """
    torch.compiler.reset()
    exact = draws_of(task(CPU, 0.15, **dropped), DRAWS)
    made = task(choose_engine(device, precision, 1), 0.15, **dropped)
    if compiled:
        made.compiled = compiled_losses(made)
    with without_kernels():
        found = draws_of(made, DRAWS)
    noise = math.sqrt((exact.variance + found.variance) / DRAWS)
    norm = exact.gradient.norm().item()
    assert 0 < noise < 0.1 * norm  # else nothing would be seen
    error = (found.gradient - exact.gradient).norm().item()
    assert error < 1.3 * noise + TOLERANCE[precision] * norm
    assert found.variance == pytest.approx(exact.variance, rel=0.2)
    assert found.loss == pytest.approx(exact.loss, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_way_back_drops_what_the_way_there_dropped(task, device):
    """With the same draw, the slope of the loss along its gradient is the gradient's norm."""
    engine = choose_engine(device, "float32", 1)
    made = task(engine, 0.15, dropout=0.1, attention_dropout=0.1)
    losses = []
    with without_kernels():
        seed(1)
        _, gradient = gradients(made)
        norm = gradient.norm().item()
        direction = [p.grad / norm for p in made.model.parameters()]
        for step in (1e-2, -2e-2):  # to either side
            with torch.no_grad():
                for parameter, along in zip(made.model.parameters(), direction, strict=True):
                    parameter += step * along
            seed(1)
            losses.append(gradients(made)[0])
    # float32 and the third derivative: 0.05% on a CPU; one mask drawn anew on the way back: 1.7%
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(norm, rel=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_run_learns_what_the_cpus_run_learns(train, compile):
    long = {"steps": 200, "precision": "auto", "checkpoint_every": 1000}
    here = train("cpu", device="cpu", **long)
    found = train("gpu", device="cuda", compile=compile, **long)
    losses = [result.eval_metrics["mlm_loss"] for result in (here, found)]
    assert math.isclose(*losses, rel_tol=0.1)  # other dropout, another order of sums
    assert losses[1] < found.eval_metrics["unigram_entropy"]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_dry_run_times_the_runs_steps(store_folder, settings, compile):
    torch.compiler.reset()
    recipe = replace(settings, device="cuda", compile=compile, phase2_length=96)
    assert all(found.speed.measured for found in dry_run(store_folder, recipe)[0])


@pytest.mark.gpu
def test_nobody_waits_for_the_sums_of_the_ranks(monkeypatch):
    monkeypatch.setattr(ranks_module.dist, "all_reduce", lambda sums: None)
    numbers = {"loss": torch.ones((), device="cuda"), "rows": 4.0}
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = Ranks(0, size=2).all_reduce(numbers)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert {name: value.item() for name, value in found.items()} == {"loss": 1.0, "rows": 4.0}
