"""Two lengths in one run: shares of the budget, rows at once, and a resume in either phase."""

import dataclasses
import os
import signal

import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.config import config_for
from bertsmith.training.engine import Engine
from bertsmith.training.loop.log import read_log
from bertsmith.training.loop.step import not_finite
from bertsmith.training.pretraining.diagnostics import replay
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings, read_recipe
from bertsmith.training.pretraining.task import rows_per_forward

from .steps import Killed, before_steps, killed_at
from .test_pretrain import assert_same_run, tensors

BASE = config_for("base", 8000)


@pytest.fixture
def two_phases(settings):
    return dataclasses.replace(
        settings, max_length=24, steps=20, phase2_length=48, phase2_ratio=0.3, phase2_batch_size=8,
        checkpoint_every=4, log_every=2,
    )  # fmt: skip


def test_the_second_phase_has_its_length_and_share(store_folder, tmp_path, two_phases):
    pretrain(store_folder, tmp_path / "run", two_phases)
    events = read_log(tmp_path / "run" / "log.jsonl")
    lines = [line for line in events if line["event"] == "train"]
    assert [line["phase"] for line in lines] == [1] * 7 + [2] * 3  # 14 of 20 steps
    assert "phase 2 from step 14 on: length 48, batch 8" in [line.get("text") for line in events]
    assert lines[7]["epoch"] == 0 and lines[6]["tokens"] < 14 * 16 * 24
    # the schedule runs through: the rate falls by the same amount from line to line
    rates = [line["learning_rate"] for line in lines[1:]]
    falls = [before - after for before, after in zip(rates, rates[1:], strict=False)]
    assert falls == pytest.approx([falls[0]] * len(falls))
    state = tensors(tmp_path / "run")[2]
    position = state["position"]
    assert (state["phase"], position["epoch"], position["index"]) == (2, 0, 6 * 8)


@pytest.mark.parametrize("step", [6, 14, 17], ids=["first", "between", "second"])
def test_a_killed_run_resumes_bit_for_bit_in_its_phase(
    store_folder, tmp_path, two_phases, monkeypatch, step
):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    pretrain(store_folder, whole, two_phases)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(step, patch)
        pretrain(store_folder, out, two_phases)
    assert tensors(out)[2]["phase"] == (2 if step > 16 else 1)
    pretrain(store_folder, out, two_phases, resume=True)
    assert_same_run(whole, out)


def test_a_signal_in_the_last_step_of_a_phase_is_heeded(
    store_folder, tmp_path, two_phases, monkeypatch
):
    def signal_self(run, batch):
        if run.state.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    whole, out = tmp_path / "whole", tmp_path / "stopped"
    pretrain(store_folder, whole, two_phases)
    with monkeypatch.context() as patch:
        before_steps(patch, signal_self)
        assert not pretrain(store_folder, out, two_phases).finished
    assert RunFolder(out).latest().name == "step-00000014"
    pretrain(store_folder, out, two_phases, resume=True)
    assert_same_run(whole, out)


def test_a_bad_first_step_of_the_second_phase_is_replayed_there(
    store_folder, tmp_path, two_phases, monkeypatch
):
    def poison(run, batch):
        if run.state.step == 14:
            raise not_finite(run.state, float("nan"), 0.0)

    with (
        monkeypatch.context() as patch,
        pytest.raises(FloatingPointError, match="phase 2"),
    ):
        before_steps(patch, poison)
        pretrain(store_folder, tmp_path / "run", two_phases)
    found = replay(store_folder, tmp_path / "run", two_phases)
    assert (found.step, found.phase, found.position, found.rows) == (14, 2, Position(0, 0), 8)


def test_the_two_streams_have_different_orders_and_masks(store_folder, tmp_path, two_phases):
    batches = []
    with pytest.MonkeyPatch.context() as patch:
        before_steps(patch, lambda run, batch: batches.append(batch.micro_batches[0]["ids"]))
        pretrain(store_folder, tmp_path / "run", dataclasses.replace(two_phases, batch_size=8))
    # 14 steps of one micro-batch, then each of two, of half the rows
    assert [ids.shape for ids in (batches[0], batches[14])] == [(8, 24), (4, 48)]
    assert not (batches[0][:4, 1:] == batches[14][:, 1:24]).all(1).any()


def cores(count):
    return Engine(torch.device("cpu"), "bf16", count)


def test_a_longer_row_takes_fewer_at_once(two_phases):
    phases = dataclasses.replace(two_phases, batch_size=16, phase2_batch_size=None).phases()
    recipe = dataclasses.replace(
        two_phases, batch_size=16, micro_batch_size=8, phase2_batch_size=None
    )
    assert [rows_per_forward(recipe, phase, cores(1), BASE) for phase in phases] == [8, 4]
    whole = dataclasses.replace(recipe, micro_batch_size=None)
    assert [rows_per_forward(whole, phase, cores(1), BASE) for phase in phases] == [16, 8]
    # 3 workers: 6 rows each, then half of them, evenly cut
    assert [rows_per_forward(whole, phase, cores(3), BASE) for phase in phases] == [6, 3]


def test_without_a_word_a_core_takes_its_share_in_parts_and_a_gpu_the_batch():
    paper = read_recipe("paper")
    assert paper.micro_batch_size is None

    def rows(engine, config=BASE):
        return [rows_per_forward(paper, phase, engine, config) for phase in paper.phases()]

    assert [rows(cores(count)) for count in (1, 2, 8)] == [[32, 8]] * 3
    assert rows(cores(16)) == [16, 4]  # its share
    assert rows(cores(2), config_for("mini", 8000)) == [128, 32]  # little memory: whole
    assert rows(Engine(torch.device("cuda"), "bf16", 8)) == [256, 64]
    uneven = PretrainSettings(batch_size=80)  # two pieces for each core, not three for both
    assert rows_per_forward(uneven, uneven.phases()[0], cores(2), BASE) == 20
    long = PretrainSettings(batch_size=2, max_length=8192)
    assert rows_per_forward(long, long.phases()[0], cores(1), BASE) == 1


def test_a_run_of_one_phase_says_nothing_of_phases(store_folder, tmp_path, settings):
    pretrain(store_folder, tmp_path / "run", dataclasses.replace(settings, steps=4))
    assert all("phase" not in line for line in read_log(tmp_path / "run" / "log.jsonl"))
    assert RunFolder(tmp_path / "run").latest() is not None
