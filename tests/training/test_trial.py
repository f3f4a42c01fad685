"""What is measured before a run: the estimate of each phase, and nothing is written."""

import dataclasses
import json

import pytest

from bertsmith.cli.main import main
from bertsmith.training import trial
from bertsmith.training.engine import Engine
from bertsmith.training.estimate import Speed
from bertsmith.training.trial import dry_run


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS_A_PHASE", 0.0)
    monkeypatch.setattr(trial, "SECONDS_A_SIZE", 0.0)


def test_the_phases_share_the_budget(store_folder, settings):
    recipe = dataclasses.replace(settings, steps=100, second_length=64, second_batch=8)
    (first, second), rule = dry_run(store_folder, recipe)
    assert rule is None
    assert (first.steps, second.steps) == (90, 10)
    assert (first.tokens, second.tokens) == (90 * 16 * 48, 10 * 8 * 64)
    assert first.speed.measured and first.speed.tokens_per_second > 0
    by_tokens = dataclasses.replace(recipe, steps=None, tokens=100_000)
    assert [one.steps for one in dry_run(store_folder, by_tokens)[0]] == [118, 20]
    by_time = dataclasses.replace(recipe, steps=None, minutes=10)
    hours = [one.hours for one in dry_run(store_folder, by_time)[0]]
    assert hours == pytest.approx([0.15, 1 / 60], rel=0.01)


def test_without_the_memory_nothing_is_tried(store_folder, settings, monkeypatch):
    monkeypatch.setattr(trial, "available_memory", lambda: 1000)
    monkeypatch.setattr(trial, "start_model", None)
    (found,), _ = dry_run(store_folder, settings)
    assert not found.speed.measured and found.available == 1000


def test_auto_tries_sizes_and_tells_its_rule(store_folder, settings, monkeypatch):
    def as_fast_as_rows(step, seconds):
        return Speed(step(), measured=True)  # twice the rows, twice the speed

    monkeypatch.setattr(trial, "measure_speed", as_fast_as_rows)
    auto = dataclasses.replace(settings, micro_batch="auto")
    (found,), rule = dry_run(store_folder, auto)
    assert found.shape.micro_batch == 16
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


def test_a_shape_beside_a_model_to_go_on_from_is_refused(store_folder, settings, tmp_path):
    with pytest.raises(ValueError, match="size: fixed by the model that --init goes on from"):
        dry_run(store_folder, settings, tmp_path, given=["size", "steps"])


def test_the_command_prints_it_and_writes_nothing(store_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "--corpus", str(store_folder), "--size", "1x64", "--threads", "1"]
    words += ["--steps", "10", "--length", "16", "--second-length", "24", "--dry-run"]
    assert main(words) == 0
    text, said = capsys.readouterr()
    assert said.startswith("compile: off (")
    assert text.startswith("phase 1\nmodel ") and "\n\nphase 2\nmodel " in text
    assert "\ntogether " in text
    assert main([*words, "--batch", "auto", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["phases"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--compile", "on"]) == 2  # as the run would
    assert "compile = on: a CPU's kernels" in capsys.readouterr().err
    assert main(words[:7]) == 2 and "missing --out" in capsys.readouterr().err
    assert main([*words[:7], "--dry-run"]) == 2  # a dry run, too, needs a budget
    assert "exactly one of --steps" in capsys.readouterr().err
