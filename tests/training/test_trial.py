"""What is measured before a run: the estimate of each phase, and nothing is written."""

import dataclasses
import json

import pytest
import torch

from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.cli.main import main
from bertsmith.training.engine import Engine
from bertsmith.training.loop.step import Stepper
from bertsmith.training.pretraining import trial
from bertsmith.training.pretraining.estimate import Speed
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.trial import dry_run
from bertsmith.training.ranks import Ranks

from .steps import before_steps


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS_A_PHASE", 0.0)
    monkeypatch.setattr(trial, "SECONDS_A_SIZE", 0.0)


def test_the_phases_share_the_budget(store_folder, settings):
    recipe = dataclasses.replace(settings, steps=100, phase2_length=64, phase2_batch_size=8)
    (first, second), rule = dry_run(store_folder, recipe)
    assert rule is None
    assert (first.steps, second.steps) == (90, 10)
    for one, rows, length in ((first, 16, 48), (second, 8, 64)):
        assert one.tokens == round(one.steps * rows * length * (1 - one.padding))
    assert first.speed.measured and first.speed.tokens_per_second > 0
    by_tokens = dataclasses.replace(recipe, steps=None, tokens=100_000)
    for one, share in zip(dry_run(store_folder, by_tokens)[0], (90_000, 10_000), strict=True):
        assert share <= one.tokens <= share + 2 * one.step_tokens
    by_time = dataclasses.replace(recipe, steps=None, minutes=10)
    hours = [one.hours for one in dry_run(store_folder, by_time)[0]]
    assert hours == pytest.approx([0.15, 1 / 60], rel=0.01)


def test_the_tokens_promised_are_those_that_a_run_counts(store_folder, settings, tmp_path):
    """Of rows that are half a sentence, which the first row of the text does not tell."""
    short = dataclasses.replace(settings, short_seq_prob=0.9, steps=40, num_evals=1)
    (found,), _ = dry_run(store_folder, short)
    made = pretrain(store_folder, tmp_path / "run", short)
    assert made.finished and found.padding > 0.2
    assert found.tokens == pytest.approx(made.tokens, rel=0.05)
    by_tokens = dataclasses.replace(short, steps=None, tokens=made.tokens)
    assert dry_run(store_folder, by_tokens)[0][0].steps == pytest.approx(40, abs=2)


def test_held_out_figures_on_the_way_take_of_the_budget(store_folder, settings, monkeypatch):
    monkeypatch.setattr(trial, "measure_speed", lambda *given: Speed(1000.0, measured=True))
    recipe = dataclasses.replace(settings, steps=None, minutes=1.0, eval_rows=50)
    steps = []
    for evaluations in (1, 2, 4):
        (found,), _ = dry_run(store_folder, dataclasses.replace(recipe, num_evals=evaluations))
        steps.append(found.steps)
        assert found.hours == pytest.approx(1 / 60, rel=0.02)
    # 78.1 steps of 16 rows, less 50 rows in half of their steps' time, less at most 3%
    assert steps == [78, 76, 75]


def test_a_step_of_several_parts_has_one_update(store_folder, settings, monkeypatch):
    """A part of 4 rows of 48 takes 1 s, with an update 3 s: a step of 16 rows takes 6 s."""
    speeds = iter([Speed(4 * 48 / 1.0, measured=True), Speed(4 * 48 / 3.0, measured=True)])
    monkeypatch.setattr(trial, "measure_speed", lambda *given: next(speeds))
    recipe = dataclasses.replace(settings, micro_batch_size=4, num_evals=1, steps=600)
    (found,), _ = dry_run(store_folder, recipe)
    assert found.hours == pytest.approx(1.0)


def test_without_the_memory_nothing_is_tried(store_folder, settings, monkeypatch):
    monkeypatch.setattr(trial, "available_memory", lambda: 1000)
    monkeypatch.setattr(trial, "start_model", None)
    (found,), _ = dry_run(store_folder, settings)
    assert not found.speed.measured and found.available == 1000


def test_auto_tries_sizes_and_tells_its_rule(store_folder, settings, monkeypatch):
    def as_fast_as_rows(step, seconds):
        return Speed(step(), measured=True)  # twice the rows, twice the speed

    monkeypatch.setattr(trial, "measure_speed", as_fast_as_rows)
    auto = dataclasses.replace(settings, micro_batch_size="auto")
    (found,), rule = dry_run(store_folder, auto)
    assert found.shape.micro_batch_size == 16
    assert rule is not None and rule.startswith("micro-batch 16 of batch 16")
    monkeypatch.setattr(trial, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="not even one row fits"):
        dry_run(store_folder, auto)


def test_steps_are_tried_as_the_run_will_do_them(store_folder, settings, monkeypatch):
    prepared, replicas = [], []

    class Noted(trial.Replicas):
        def __init__(self, *given):
            replicas.append(self)
            super().__init__(*given)

    monkeypatch.setattr(Engine, "prepare", lambda self, model: prepared.append(model))
    monkeypatch.setattr(trial, "Replicas", Noted)
    dry_run(store_folder, settings)
    # the copies of the model are made once, not for every step
    assert len(prepared) == len(replicas) == 1


def noted_shapes(monkeypatch):
    """(of the ids, of the masked positions) of every micro-batch of every step that is tried."""
    steps = []

    def note(run, batch):
        steps.append([(m["ids"].shape, m["positions"].shape) for m in batch.micro_batches])

    before_steps(monkeypatch, note)
    return steps


@pytest.mark.parametrize(("tokens", "rows"), [(2048, (8, 4)), (192, (4, 2)), (1, (1, 1))])
def test_a_phase_is_tried_with_rows_of_its_own(store_folder, settings, monkeypatch, tokens, rows):
    monkeypatch.setattr(trial, "MEASURED_TOKENS", tokens)
    recipe = dataclasses.replace(
        settings, micro_batch_size=8, phase2_length=96, max_predictions_per_seq=5
    )
    steps = noted_shapes(monkeypatch)
    first, second = dry_run(store_folder, recipe)[0]
    assert (first.shape.micro_batch_size, second.shape.micro_batch_size) == (8, 4)
    expected = [[((rows[0], 48), (rows[0], 5))], [((rows[1], 96), (rows[1], 10))]]
    assert steps == [step for step in expected for _ in range(2)]  # the first is not timed


def test_the_search_on_a_cpu_computes_gradients_alone(store_folder, settings, monkeypatch):
    passes, real = [], Stepper.gradients

    def noting(self, batch):
        weights = [weight for model in self.replicas.models for weight in model.parameters()]
        assert all(weight.grad is None for weight in weights)  # none of the step before
        sums = real(self, batch)
        assert any(weight.grad is not None for weight in weights)
        passes.append(self.run.task.phase.batch)
        return sums

    monkeypatch.setattr(Stepper, "gradients", noting)
    monkeypatch.setattr(Stepper, "step", None)
    monkeypatch.setattr(trial, "build_optimizer", None)
    auto = dataclasses.replace(settings, micro_batch_size="auto")
    found, _, rule = trial.resolve(store_folder, auto, None)
    assert passes[:4] == [1, 1, 2, 2] and found.micro_batch_size in {1, 2, 4, 8, 16} and rule


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The way of a trial on a GPU; the steps that its compiled form would do are noted."""
    compiled = []

    def compile_tasks(setting, tasks, peak):
        assert setting == "auto" and peak > 0
        for task in tasks:
            task.compiled = noting(task)

    def noting(task):
        def losses(ids, *rest, **named):
            compiled.append(tuple(ids.shape))
            return task.model.losses(ids, *rest, **named)

        return losses

    monkeypatch.setattr(trial.Trial, "_on_gpu", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(trial, "compile_tasks", compile_tasks)
    return compiled


def test_on_a_gpu_the_runs_own_steps_are_timed(store_folder, settings, as_on_a_gpu, monkeypatch):
    recipe = dataclasses.replace(
        settings, micro_batch_size=8, phase2_length=96, phase2_batch_size=4
    )
    steps = noted_shapes(monkeypatch)
    assert all(found.speed.measured for found in dry_run(store_folder, recipe)[0])
    whole = [(8, 48), (8, 48)], [(4, 96)]
    assert [[ids for ids, _ in step] for step in steps] == [whole[0]] * 2 + [whole[1]] * 2
    assert as_on_a_gpu == [*whole[0], *whole[0], *whole[1], *whole[1]]


def test_a_gpu_that_is_too_small_for_the_step_says_what_to_lower(
    store_folder, settings, as_on_a_gpu, monkeypatch
):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(Stepper, "step", full)
    with pytest.raises(
        MemoryError, match=r"out of memory: lower --micro-batch-size \(now 16\), lower"
    ):
        dry_run(store_folder, settings)


def test_the_shape_of_a_recipe_gives_way_to_a_models(store_folder, settings, tmp_path, capsys):
    small = dataclasses.replace(settings, size="1x64", steps=1)
    pretrain(store_folder, tmp_path / "small", small)
    words = ["pretrain", "--corpus", store_folder, "--model", tmp_path / "small", "--threads", "1"]
    words += [
        "--config",
        "paper",
        "--max-length",
        "48",
        "--batch-size",
        "4",
        "--phase2-length",
        "64",
    ]
    assert main([str(word) for word in [*words, "--dry-run", "--json"]]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    weights = read_tensor_file(tmp_path / "small" / "model.safetensors").values()
    assert {phase["parameters"] for phase in phases} == {sum(w.numel() for w in weights)}
    assert main([str(word) for word in [*words, "--size", "1x64", "--dry-run"]]) == 2
    assert "size: fixed by the model that --model goes on from; leave" in capsys.readouterr().err


def test_the_command_prints_it_and_writes_nothing(store_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "--corpus", str(store_folder), "--size", "1x64", "--threads", "1"]
    words += ["--steps", "10", "--max-length", "16", "--phase2-length", "24", "--dry-run"]
    assert main(words) == 0
    text, said = capsys.readouterr()
    assert not said
    assert text.startswith("phase 1\nmodel ") and "\n\nphase 2\nmodel " in text
    assert "\ntogether " in text
    assert main([*words, "--micro-batch-size", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["phases"]) == 2 and found["rows"].startswith("micro-batch ")
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--compile", "on"]) == 2  # as the run would
    assert "compile = on: a CPU's kernels" in capsys.readouterr().err
    assert main(words[:7]) == 2 and "missing --out" in capsys.readouterr().err
    assert main([*words[:7], "--dry-run"]) == 2  # a dry run, too, needs a budget
    assert "exactly one of --steps" in capsys.readouterr().err


def test_a_gpu_is_tried_with_the_gradients_of_another_micro_batch(
    store_folder, settings, monkeypatch
):
    done = []

    def fits_cuda(step, device, more):
        def fits(rows):
            done.append((rows, step(rows), more))
            return True

        return fits

    monkeypatch.setattr(trial.Trial, "_on_gpu", True)
    monkeypatch.setattr(trial, "fits_cuda", fits_cuda)
    tried = trial.Trial(store_folder, settings, Engine(torch.device("cpu"), "float32", 1), None)
    assert tried.micro_batch().rows == settings.batch_size == 16
    tokens = {rows: tokens for rows, tokens, _ in done}
    assert tokens[4] == 2 * 4 * 48 and tokens[16] == 16 * 48  # the whole batch is one
    assert {more for *_, more in done} == {0}
    done.clear()
    auto = dataclasses.replace(settings, micro_batch_size="auto", threads=1, precision="float32")
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, name, value: value)
    trial.resolve(store_folder, auto, None, Ranks(size=2))
    numbers = sum(weight.numel() for weight in tried._model.parameters())
    assert {more for *_, more in done} == {4 * numbers}  # DDP's buckets
