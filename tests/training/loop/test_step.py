"""The guard against bad steps on a GPU, tried on the CPU: its fused AdamW heeds the same flag."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from bertsmith.base.files import read_json
from bertsmith.corpus.examples.stream import Position
from bertsmith.training.loop import loop
from bertsmith.training.loop.step import NonFiniteGuard
from bertsmith.training.loop.task import Training, TrainingState
from bertsmith.training.optimizers import build_optimizer, state_tensors

from ..runs import lines

CPU = torch.device("cpu")


@pytest.fixture
def guard_on_a_cpu(monkeypatch):
    """Runs on a CPU have the guard as well."""
    real = NonFiniteGuard.where_it_fits

    def fits(cls, device, optimizer):
        return cls(device) if device.type == "cpu" else real(device, optimizer)

    monkeypatch.setattr(NonFiniteGuard, "where_it_fits", classmethod(fits))


def moved(model, optimizer, guard, state, scale=1.0):
    """One step of a made-up loss under the guard."""
    loss = scale * model(torch.ones(4, 8)).square().sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    guard.record(Training(None, optimizer, state, None, None), loss.detach(), norm)
    optimizer.step()
    optimizer.zero_grad()
    state.since_log["loss"] = state.since_log.get("loss", 0.0) + loss.detach()
    state.step, state.position = state.step + 1, Position(0, state.position.index + 4)


@pytest.mark.parametrize("kind", ["adamw", "paper-adam"])
def test_after_a_bad_step_nothing_moves_and_the_state_is_as_before_it(kind):
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(model, kind, 1e-2, 0.01)
    guard, state = NonFiniteGuard(CPU), TrainingState()
    for _ in range(2):
        moved(model, optimizer, guard, state)
    guard.check(state)
    assert isinstance(state.since_log["loss"], float)
    moved(model, optimizer, guard, state)
    before = copy.deepcopy(model.state_dict())
    moments = {name: value.clone() for name, value in state_tensors(model, optimizer).items()}
    expected = replace(state, since_log=dict(state.since_log))
    moved(model, optimizer, guard, state, scale=float("nan"))
    moved(model, optimizer, guard, state)  # sent before anybody has looked
    with pytest.raises(FloatingPointError, match=r"step 3: loss nan.* epoch 0, index 12"):
        guard.check(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = state_tensors(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in moments.items())
    assert (state.step, state.position) == (3, Position(0, 12))
    assert state.since_log == {"loss": expected.since_log["loss"].item()}


def test_it_is_for_a_gpu_and_an_optimizer_that_heeds_it():
    model, cuda = nn.Linear(4, 4), torch.device("cuda")
    for kind in ("lamb", "muon"):
        optimizer = build_optimizer(model, kind, 1e-2, 0.0)
        assert NonFiniteGuard.where_it_fits(cuda, optimizer) is None
    assert NonFiniteGuard.where_it_fits(CPU, build_optimizer(model, "adamw", 1e-2, 0.0)) is None


def test_a_run_under_the_guard_is_the_run_without(train, whole_run, guard_on_a_cpu):
    guarded = train().folder
    found = [read_json(run / "result.json")["held_out"] for run in (whole_run, guarded)]
    assert found[0] == found[1]
    files = [run / "model.safetensors" for run in (whole_run, guarded)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bad_step_of_a_run_is_found_at_the_next_line_of_the_log(
    train, tmp_path, monkeypatch, guard_on_a_cpu, device
):
    record = NonFiniteGuard.record

    def poisoned(self, run, loss, norm):
        record(self, run, loss * (float("nan") if run.state.step == 9 else 1.0), norm)

    monkeypatch.setattr(NonFiniteGuard, "record", poisoned)
    with pytest.raises(FloatingPointError, match="step 9: loss nan"):
        train(device=device, compile="off")
    assert (tmp_path / "run" / "checkpoints" / "step-00000009").is_dir()


def test_an_evaluation_that_falls_due_while_the_device_is_waited_for_is_made(
    train, monkeypatch, guard_on_a_cpu
):
    monkeypatch.setattr(loop, "EVALUATION_SHARE", 1.0)
    check = NonFiniteGuard.check

    def slow(self, state):
        time.sleep(1.0)  # more than half of the budget
        check(self, state)

    monkeypatch.setattr(NonFiniteGuard, "check", slow)
    run = train(steps=None, minutes=0.03, num_evals=2, log_every=1).folder
    assert len(lines(run, "evaluate")) == 2  # half way, and at the end
