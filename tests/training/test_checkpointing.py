"""Checkpoints written beside the steps: what is saved, what a full disk does, when a run ends."""

import errno
import itertools
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from bertsmith.base.files import read_json, read_json_lines
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training import checkpointing
from bertsmith.training.pretraining import run as pretrain_module
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

from ..tiny import cli, refused
from .runs import (
    assert_same_run,
    assert_same_weights,
    at_step,
    before_steps,
    lines,
    messages,
    weights,
)

SHORT = PretrainSettings(
    size="1x64", max_length=32, batch_size=4, steps=12, learning_rate=3e-3, dropout=0.1,
    precision="float32", threads=1, checkpoint_every=4, log_every=2, num_evals=2, eval_rows=8,
    loggers=(),
)  # fmt: skip


@pytest.fixture
def settings():
    return SHORT


@pytest.fixture(scope="module")
def whole(store_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    pretrain(store_folder, out, SHORT)
    return out


def saved(run):
    return [int(path.name[-8:]) for path in RunFolder(run).saved()]


def refusing(number, path="a file"):
    """A function that stands for a fault of the disk."""

    def refuse(*given):
        raise OSError(number, os.strerror(number), path)

    return refuse


def full_at(step, monkeypatch, name="write_tensors"):
    """A disk without room for a file of the checkpoint of this step."""
    real = checkpointing.save_checkpoint

    def save(run, snapshot, *given):
        if snapshot.step != step:
            return real(run, snapshot, *given)
        with monkeypatch.context() as patch:
            patch.setattr(f"bertsmith.checkpoints.snapshots.{name}", refusing(errno.ENOSPC))
            return real(run, snapshot, *given)

    monkeypatch.setattr(checkpointing, "save_checkpoint", save)


@pytest.mark.parametrize("name", ["write_tensors", "write_manifest"])
def test_a_full_disk_ends_the_run_with_the_remedy_and_the_checkpoint_before(
    train, tmp_path, whole, monkeypatch, name
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        full_at(8, patch, name)
        train()
    said = str(error.value)
    assert "No space left on device: the checkpoint of step 8 could not be written, " in said
    assert said.endswith("step-00000004 is whole: free some space, then resume the run")
    assert "\n" not in said and isinstance(error.value.__cause__, OSError)
    assert RunFolder(out).latest_valid()[0].name == "step-00000004"
    assert not (out / "result.json").exists()
    train(resume=True)
    assert_same_run(whole, out)


@pytest.mark.parametrize(
    ("step", "says"), [(12, "step-00000008 is whole"), (4, "there is none before it")]
)
def test_a_disk_that_is_full_at_the_last_or_first_checkpoint(train, monkeypatch, step, says):
    full_at(step, monkeypatch)
    with pytest.raises(OSError, match=says):
        train()


def test_another_fault_of_the_disk_has_another_remedy(train, monkeypatch):
    monkeypatch.setattr("bertsmith.checkpoints.snapshots.write_tensors", refusing(errno.EIO))
    with pytest.raises(OSError, match="^a file: Input/output error: .*: mend that, then resume"):
        train()


def test_the_error_comes_with_the_next_step(train, monkeypatch):
    """Not with the next checkpoint, hours later."""
    steps, failed = [], threading.Event()

    def note(run, batch):
        steps.append(run.state.step)
        if run.state.step == 4:  # the checkpoint of step 4 is under way
            assert failed.wait(60)
            time.sleep(0.2)  # until the thread's future is done

    def refuse(*given):
        failed.set()
        refusing(errno.ENOSPC)()

    before_steps(monkeypatch, note)
    monkeypatch.setattr("bertsmith.checkpoints.snapshots.write_tensors", refuse)
    with pytest.raises(OSError, match="checkpoint of step 4"):
        train()
    assert steps == list(range(5))


def test_the_error_of_a_step_goes_before_that_of_the_disk(train, monkeypatch, capsys):
    def poison():
        raise FloatingPointError("not finite")

    full_at(4, monkeypatch)
    at_step(4, monkeypatch, poison)
    with pytest.raises(FloatingPointError, match="not finite"):
        train()
    assert "warning: " in (said := capsys.readouterr().err) and "checkpoint of step 4" in said


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(train, whole, monkeypatch):
    after_six = threading.Event()
    real_save = checkpointing.save_checkpoint

    def save(run, snapshot, *given):
        assert after_six.wait(60)  # the first checkpoint, of step 4, is written after six steps
        return real_save(run, snapshot, *given)

    at_step(6, monkeypatch, after_six.set)
    monkeypatch.setattr(checkpointing, "save_checkpoint", save)
    slow = train("slow", keep_checkpoints=3).folder
    assert_same_run(whole, slow)
    for checkpoint, step in zip(RunFolder(slow).saved(), (4, 8, 12), strict=True):
        assert read_json(checkpoint / "state.json")["loop"]["step"] == step
    four = train("four", keep_steps=(4,)).folder
    assert saved(four) == [4, 8, 12]
    checkpoints = [RunFolder(run).saved()[0] for run in (slow, four)]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_weights(*checkpoints, file)


def test_a_signal_while_the_last_checkpoint_is_written_lets_it_be(train, tmp_path, monkeypatch):
    real = checkpointing.save_checkpoint

    def save(run, snapshot, *given):
        if snapshot.step == 12:
            time.sleep(0.2)  # until the main thread waits
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return real(run, snapshot, *given)

    monkeypatch.setattr(checkpointing, "save_checkpoint", save)
    assert train().steps == 12
    assert RunFolder(tmp_path / "run").latest().name == "step-00000012"


def test_the_steps_to_keep_have_a_checkpoint_wherever_they_are(train):
    assert saved(train(keep_steps=(3, 4, 7), keep_checkpoints=1).folder) == [3, 4, 7, 12]


def test_a_run_ends_at_its_time_limit_whatever_the_clock_says(train, tmp_path, whole, monkeypatch):
    """time.monotonic is moved past the limit in step 6; before, the wall's clock jumps in vain."""
    monotonic, later, out = time.monotonic, [0.0], tmp_path / "run"

    def jump(run, batch):
        far = 1e9 if run.state.step % 2 else -1e9
        monkeypatch.setattr(time, "time", lambda: 1.7e9 + far)
        if run.state.step == 5:
            later[0] = 1000.0

    with monkeypatch.context() as patch:
        before_steps(patch, jump)
        patch.setattr(time, "monotonic", lambda: monotonic() + later[0])
        assert not train(time_limit=900).finished
    assert RunFolder(out).latest().name == "step-00000006"
    assert "stopped by the time limit at step 6; saved" in messages(out)
    train(resume=True)
    assert_same_run(whole, out)


def test_a_jump_of_the_wall_clock_changes_no_budget_of_minutes(train, monkeypatch):
    jumps = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 - next(jumps))  # an hour back at every look
    result = train(steps=None, minutes=0.01)
    assert 0.6 <= result.seconds < 3600
    seconds = [line["seconds"] for line in lines(result.folder)]
    assert seconds == sorted(seconds) and all(0 <= value < 3600 for value in seconds)


def test_the_command_stops_at_its_time_limit_with_a_code_of_its_own(
    store_folder, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    words = ["pretrain", "--corpus", store_folder, "--out", out, "--size", "1x64", "--steps", 9]
    words += ["--max-length", 32, "--threads", 1, "--loggers"]
    limited = [*words[:-1], "--time-limit", 5, "--loggers"]
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.cli.train.parse_duration", lambda limit: 1e-9)
        ran = cli(*limited)
        assert ran.code == 75
    assert ran.err.endswith(f"stopped and saved; add --resume to go on with {out}\n")
    assert RunFolder(out).latest().name == "step-00000000"
    with monkeypatch.context() as patch:  # which starts again what leaves with another code
        patch.setattr("bertsmith.cli.train.parse_duration", lambda limit: 1e-9)
        stopped = Mock(finished=False)
        patch.setattr("bertsmith.training.pretraining.run.pretrain", lambda *_, **__: stopped)
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        assert cli(*limited).code == 0
        assert cli(*words).code == 75  # a signal, then
    said = refused("pretrain", "--corpus", "a", "--out", "b", "--time-limit", "soon")
    assert "time limit 'soon': give minutes" in said


def test_the_figures_of_the_end_are_taken_once(train, tmp_path, whole):
    """A kill between them and result.json."""
    again = shutil.copytree(whole, tmp_path / "run")
    (again / "result.json").unlink()
    train(resume=True)
    before, after = (read_json_lines(run / "log.jsonl") for run in (whole, again))
    assert [line for line in before if "step" in line] == [line for line in after if "step" in line]
    assert (again / "result.json").exists()


def test_a_run_that_another_process_writes_is_refused_and_left_alone(train, tmp_path, whole):
    new, begun, halted = tmp_path / "new", tmp_path / "begun", tmp_path / "halted"
    shutil.copytree(whole, begun)
    before = {file: file.read_bytes() for file in begun.rglob("*") if file.is_file()}
    halted.mkdir()  # before its first checkpoint, or so one might think
    shutil.copy(whole / "run.json", halted)
    for out, resume in itertools.product((new, halted, begun), (False, True)):
        says = "another process is training here right now"
        with RunFolder(out).locked(), pytest.raises(ValueError, match=says):
            train(out.name, resume=resume)
    assert [path.name for path in new.iterdir()] == ["run.lock"]
    assert before == {file: file.read_bytes() for file in begun.rglob("*") if file.is_file()}
    assert_same_run(whole, train("new").folder)


def test_a_refused_start_leaves_no_lock(train, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.write_settings({"kind": "finetune"})
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a model already: name another `out`"):
            train(resume=resume)
    assert [path.name for path in run.path.iterdir()] == ["run.json"]


def test_a_run_that_another_process_begins_meanwhile_is_left_alone(train, tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")

    def other_process(engine):  # while this one measures the machine
        run.write_settings({"kind": "pretrain", "settings": "the other one's"})
        return 0.0

    monkeypatch.setattr(pretrain_module, "measure_peak", other_process)
    with pytest.raises(ValueError, match="another process has begun a run here meanwhile"):
        train()
    assert run.settings()["settings"] == "the other one's"
    assert not (run.path / "log.jsonl").exists()


def test_a_head_that_came_with_the_model_stays_in_the_files(train, store_folder, tmp_path):
    """Masked words alone do not train it: it is what it was; what the model had not is left out."""
    words = replace(SHORT, objective="mlm", steps=2)
    heads = {"pooler": "bert.pooler.dense.weight", "nsp": "cls.seq_relationship.weight"}
    loaded = load_model(train("whole", steps=2).folder, PreTrainingModel).model
    tokenizer = Tokenizer.from_pretrained(store_folder)
    save_model(loaded, tokenizer, tmp_path / "pooler", exclude=["nsp.weight", "nsp.bias"])
    train("neither", words)  # from no model
    architectures = {"whole": "PreTraining", "pooler": "MaskedLM", "neither": "MaskedLM"}
    there = {"whole": {"pooler", "nsp"}, "pooler": {"pooler"}, "neither": set()}
    for name, kept in there.items():
        out, init = tmp_path / f"from-{name}", tmp_path / name
        given = weights(init)
        for steps in (2, 4):  # a resume goes by the checkpoint
            train(out.name, words, model=init, resume=steps > 2, steps=steps)
            found = weights(out)
            assert {head for head, tensor in heads.items() if tensor in found} == kept
            assert all(torch.equal(found[heads[head]], given[heads[head]]) for head in kept)
            trained = "cls.predictions.transform.dense.weight"
            assert not torch.equal(found[trained], given[trained])
            architecture = read_json(out / "config.json")["architectures"]
            assert architecture == [f"BertFor{architectures[name]}"]
            assert load_model(out, PreTrainingModel).unused == []
