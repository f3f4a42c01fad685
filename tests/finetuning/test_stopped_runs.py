"""A fine-tuning run that was stopped goes on as if it had not been."""

import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints.model_folder import load_model
from bertsmith.model.heads import SequenceClassifier
from bertsmith.reports.finetuning import restart_table
from bertsmith.reports.runs import read_run
from bertsmith.training.checkpointing import SeedCheckpoint, checkpoints_in
from bertsmith.training.finetuning import run as run_summary
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task import BestOnDev
from bertsmith.training.finetuning.trainer import Trainer
from bertsmith.training.loop.log import read_log


@pytest.fixture
def settings(toy):
    """36 steps, a checkpoint every 8, dev every 6."""
    return replace(toy.settings, checkpoint_every=8)


def stopping(monkeypatch, evaluation):
    """SIGTERM at that evaluation, counted over all seeds; from then on none."""
    measure, left = BestOnDev.__call__, [evaluation]

    def call(self):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self)

    monkeypatch.setattr(BestOnDev, "__call__", call)


def test_a_seed_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    trainer, settings, tmp_path, monkeypatch
):
    whole = trainer.run(settings, 3, tmp_path / "whole", resume=True)
    write, steps = SeedCheckpoint.write, []

    def killed(folder, model, optimizer, state, *best):
        steps.append(state.step)
        if state.step == 24:
            raise KeyboardInterrupt  # eight steps and an evaluation after the last checkpoint
        write(folder, model, optimizer, state, *best)

    monkeypatch.setattr(SeedCheckpoint, "write", killed)
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        trainer.run(settings, 3, folder, resume=True)
    assert steps == [8, 16, 24]
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-00000016"]
    monkeypatch.setattr(SeedCheckpoint, "write", write)
    again = trainer.run(settings, 3, folder, resume=True)
    dev = trainer.dev[0].features
    assert np.array_equal(again.outputs(dev), whole.outputs(dev))
    assert again.evaluation.metrics == whole.evaluation.metrics
    assert (again.best_step, again.steps) == (whole.best_step, whole.steps)
    tables = [one.model.encoder.embeddings.token.weight for one in (whole, again)]
    assert torch.equal(*tables)  # with the rows that training leaves out

    def events(name):
        lines = read_log(tmp_path / name / "log.jsonl")
        return [(line["event"], line["step"], line.get("loss")) for line in lines]

    assert events("stopped") == events("whole")


def test_a_training_that_is_not_to_go_on_leaves_and_takes_no_checkpoint(
    trainer, settings, tmp_path
):
    trainer.run(settings, 3, tmp_path)
    assert checkpoints_in(tmp_path) == []


def test_the_same_command_goes_on(trainer, settings, tmp_path, monkeypatch, capsys):
    whole = train_seeds(trainer, tmp_path / "whole", settings, [1, 2, 3])
    stopping(monkeypatch, 9)  # the third of seed 2
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_seeds(trainer, run, settings, [1, 2, 3])
    told = "seed 2 was stopped: the same command goes on from its last checkpoint\n"
    assert told in capsys.readouterr().err
    assert not (run / "config.json").exists() and (run / "seeds/1/model/config.json").exists()
    assert [path.name for path in checkpoints_in(run / "seeds/2")] == ["checkpoint-00000018"]
    seeds, train = [], Trainer.run
    monkeypatch.setattr(
        Trainer,
        "run",
        lambda self, s, seed, *rest: seeds.append(seed) or train(self, s, seed, *rest),
    )
    result = train_seeds(trainer, run, settings, [1, 2, 3])
    assert seeds == [2, 3]
    assert "going on with the run that was stopped here" in capsys.readouterr().err
    assert result == whole
    weights = [load_model(tmp_path / name, SequenceClassifier).model for name in ("whole", "run")]
    states = [model.state_dict() for model in weights]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in run.iterdir()) == names
    left = {path.name for seed in (1, 2, 3) for path in (run / "seeds" / str(seed)).iterdir()}
    assert not [name for name in left if name == "model" or name.startswith("checkpoint")]


def test_a_stopped_run_is_not_lost_to_other_settings(trainer, settings, tmp_path, monkeypatch):
    stopping(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        train_seeds(trainer, tmp_path / "run", settings, [1])
    other = replace(settings, learning_rate=1e-3)
    with pytest.raises(
        ValueError, match=r"unfinished run of other settings \(learning_rate 0.003, not 0.0"
    ):
        train_seeds(trainer, tmp_path / "run", other, [1])
    assert checkpoints_in(tmp_path / "run/seeds/1")
    elsewhere = replace(settings, threads=None, checkpoint_every=100)
    assert train_seeds(trainer, tmp_path / "run", elsewhere, [1, 2])["metrics"]["accuracy"] > 0.95


def test_before_anything_is_kept_other_settings_begin_anew(
    trainer, settings, tmp_path, monkeypatch
):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "run", stopped)
        train_seeds(trainer, tmp_path / "run", settings, [1])
    result = train_seeds(trainer, tmp_path / "run", replace(settings, epochs=1), [1])
    assert result["steps"] == 6


def test_a_damaged_checkpoint_is_told_of_and_left(trainer, settings, tmp_path, monkeypatch, capsys):
    whole = trainer.run(settings, 1, tmp_path / "whole")
    stopping(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(settings, 1, tmp_path / "run", resume=True)
    (checkpoint,) = checkpoints_in(tmp_path / "run")
    tensors = checkpoint / "training.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    again = trainer.run(settings, 1, tmp_path / "run", resume=True)
    assert f"skipped {checkpoint}: training.safetensors is truncated" in capsys.readouterr().err
    dev = trainer.dev[0].features
    assert np.array_equal(again.outputs(dev), whole.outputs(dev))


def test_patience_is_kept(trainer, settings, tmp_path, monkeypatch):
    """The toy is right on all of dev early: each evaluation after that is one without a gain."""
    patient = replace(settings, early_stopping_patience=3)
    whole = trainer.run(patient, 1, tmp_path / "whole")
    assert whole.steps < 36
    stopping(monkeypatch, whole.steps // 6 - 1)  # the last before it stops early
    with pytest.raises(KeyboardInterrupt):
        trainer.run(patient, 1, tmp_path / "run", resume=True)
    again = trainer.run(patient, 1, tmp_path / "run", resume=True)
    assert (again.steps, again.best_step) == (whole.steps, whole.best_step)


def not_finite(monkeypatch, wrong):
    train = Trainer.run

    def run(self, settings, seed, *rest):
        if seed in wrong:
            raise FloatingPointError(f"step 3 of seed {seed}: loss nan")
        return train(self, settings, seed, *rest)

    monkeypatch.setattr(Trainer, "run", run)


def test_a_seed_that_is_not_finite_is_a_collapse(trainer, settings, tmp_path, monkeypatch, capsys):
    not_finite(monkeypatch, [1])
    result = train_seeds(trainer, tmp_path / "run", settings, [1, 2])
    assert list(result["seeds"]) == ["3", "2"]
    (restart,) = result["restarts"]
    assert restart == {"seed": 1, "instead_of": 1, "reason": "step 3 of seed 1: loss nan"}
    assert "again with seed 3" in capsys.readouterr().err


def test_seeds_that_ended_stay_when_another_cannot(
    trainer, settings, tmp_path, monkeypatch, capsys
):
    not_finite(monkeypatch, [2])
    result = train_seeds(trainer, tmp_path / "run", replace(settings, max_retries=0), [1, 2])
    assert list(result["seeds"]) == ["1"] and result["best_seed"] == 1
    assert "warning: seed 2 collapsed (step 3 of seed 2" in capsys.readouterr().err
    assert "step 3 of seed 2" in restart_table(result["restarts"], result["seeds"])
    assert read_run(tmp_path / "run").result["restarts"] == result["restarts"]


def test_without_any_sound_seed_it_is_an_error(trainer, settings, tmp_path, monkeypatch):
    not_finite(monkeypatch, range(9))
    with pytest.raises(FloatingPointError, match="step 3 of seed 4"):
        train_seeds(trainer, tmp_path / "run", replace(settings, max_retries=1), [1, 2])
    assert not (tmp_path / "run/result.json").exists()
    monkeypatch.undo()
    slower = replace(settings, learning_rate=1e-3, epochs=1)  # as the error has told
    assert train_seeds(trainer, tmp_path / "run", slower, [1])["steps"] == 6


def rising(monkeypatch, accuracy):
    """Dev figures that are told for each seed; the seeds trained are in the list returned."""
    train, trained = Trainer.run, []

    def run(self, settings, seed, *rest):
        trained.append(seed)
        found = train(self, settings, seed, *rest)
        if accuracy is None:
            return found
        judged = replace(
            found.evaluation, metrics=found.evaluation.metrics | {"accuracy": accuracy[seed]}
        )
        return replace(found, evaluation=judged)

    monkeypatch.setattr(Trainer, "run", run)
    monkeypatch.setattr(run_summary, "_check_written", lambda *_: None)
    return trained


def test_the_best_of_the_seeds_that_ended_stays(trainer, settings, tmp_path, monkeypatch):
    """Seed 2 is better than 1, whose model is gone by then, and 3 is the one under way."""
    run, quick = tmp_path / "run", replace(settings, epochs=1, max_retries=0)
    trained = rising(monkeypatch, {1: 0.7, 2: 0.8, 4: 0.75})
    with pytest.raises(KeyError):  # seed 3, as a kill
        train_seeds(trainer, run, quick, [1, 2, 3, 4])
    assert trained == [1, 2, 3]
    assert [path.parent.name for path in run.glob("seeds/*/model")] == ["2"]
    monkeypatch.undo()
    trained = rising(monkeypatch, {3: 0.6, 4: 0.75})
    result = train_seeds(trainer, run, quick, [1, 2, 3, 4])
    assert trained == [3, 4] and result["best_seed"] == 2
    assert [seed["accuracy"] for seed in result["seeds"].values()] == [0.7, 0.8, 0.6, 0.75]
    assert (run / "model.safetensors").exists() and not list(run.glob("seeds/*/model"))


def test_a_best_seed_whose_model_is_gone_is_trained_again(trainer, settings, tmp_path, monkeypatch):
    """When the command names other seeds than before, and the best of those is left out."""
    run, quick = tmp_path / "run", replace(settings, epochs=1, max_retries=0)
    rising(monkeypatch, {1: 0.7, 2: 0.8})
    with pytest.raises(KeyError):
        train_seeds(trainer, run, quick, [1, 2, 3])
    monkeypatch.undo()
    trained = rising(monkeypatch, {1: 0.7})
    result = train_seeds(trainer, run, quick, [1])
    assert trained == [1] and result["best_seed"] == 1
    assert (run / "model.safetensors").exists()
    assert [folder.name for folder in (run / "seeds").iterdir()] == ["1"]


def test_what_a_kill_left_is_cleared_away(trainer, settings, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train_seeds(trainer, run, settings, [1])
    (run / "result.json").unlink()
    for name in ("seeds/1/checkpoint-00000008", "seeds/1/.partial-9-model", ".partial-9-x"):
        (run / name).mkdir()
    assert train_seeds(trainer, run, settings, [1])["best_seed"] == 1
    assert not list(run.glob("seeds/1/checkpoint-*")) and not list(run.rglob(".partial-*"))


def test_other_weights_to_start_from_are_refused(
    trainer, model_folder, settings, tmp_path, monkeypatch
):
    start = tmp_path / "start"
    shutil.copytree(model_folder, start)
    moving = replace(trainer, start=replace(trainer.start, folder=start))
    stopping(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        train_seeds(moving, tmp_path / "run", settings, [1])
    weights = load_file(start / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, start / "model.safetensors")
    with pytest.raises(ValueError, match="unfinished run of other settings .model_sha256"):
        train_seeds(moving, tmp_path / "run", settings, [1])


def test_checkpoints_are_at_least_a_step_apart():
    with pytest.raises(ValueError, match="checkpoint_every = 0: must be at least 1"):
        FinetuneSettings(checkpoint_every=0)
