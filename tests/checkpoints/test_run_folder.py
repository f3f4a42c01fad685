"""The run directory: whole checkpoints or none, the newest few, files that say what they are."""

import errno
import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from bertsmith.checkpoints.model_folder import config_file, load_model
from bertsmith.checkpoints.run_folder import RunFolder, source_commit
from bertsmith.checkpoints.snapshots import Snapshot, load_training_state, save_checkpoint
from bertsmith.model.heads import PreTrainingModel

MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
MODEL_FILES |= {"vocab.txt"}
STEP_1, STEP_2, STEP_3 = (f"step-{k:08d}" for k in (1, 2, 3))


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


@pytest.fixture
def save(run, pretrained, tokenizer):
    run.write_settings({"kind": "pretrain", "identity": "of these tests"})

    def save(step, keep_last=2, keep_at=()):
        torch.nn.init.constant_(pretrained.nsp.bias, step)  # so that a model tells its step
        moments = {"moments": torch.full((3, 2), float(step)), "step": torch.tensor(step)}
        weights, state = pretrained.state_dict(), {"position": [step, 7]}
        entries = config_file(pretrained)
        snapshot = Snapshot(step, "of these tests", entries, weights, moments, state)
        save_checkpoint(run, snapshot, tokenizer, keep_last, keep_at)

    return save


def step_number(folder):
    return load_model(folder, PreTrainingModel).model.nsp.bias[0].item()


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_holds_a_model_and_all_that_training_needs(run, save):
    assert run.latest() is None and run.latest_valid() == (None, [])
    save(12)
    assert run.exists()
    assert run.latest() == run.path / "checkpoints" / "step-00000012"
    others = {"manifest.json", "optimizer.safetensors", "state.json"}
    assert names(run.latest()) == MODEL_FILES | others
    assert run.latest_valid() == (run.latest(), [])
    tensors, state = load_training_state(run.latest())
    assert state == {"step": 12, "position": [12, 7]}
    assert torch.equal(tensors["moments"], torch.full((3, 2), 12.0)) and tensors["step"] == 12
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())  # not a map of the file
    assert step_number(run.latest()) == step_number(run.path) == 12


def test_the_newest_few_are_kept_and_the_run_has_the_newest_model(run, save):
    for step in (9, 10, 100):
        save(step, keep_last=2)
    assert [path.name for path in run.saved()] == ["step-00000010", "step-00000100"]
    assert names(run.path) == MODEL_FILES | {"checkpoints", "run.json"}
    assert [step_number(folder) for folder in (*run.saved(), run.path)] == [10, 100, 100]
    # the run's own model is the checkpoint's file under a second name, not a copy
    assert (run.path / "model.safetensors").samefile(run.latest() / "model.safetensors")


def test_the_steps_to_keep_are_kept_besides_the_newest(run, save):
    for step in (5, 10, 15, 20, 25):
        save(step, keep_last=1, keep_at=(10, 20, 25, 30))
    assert [path.name[-2:] for path in run.saved()] == ["10", "20", "25"]


def test_a_checkpoint_can_be_written_again(run, save, pretrained):
    save(5)
    save(5)
    assert step_number(run.path) == 5 and len(run.saved()) == 1


def test_a_disk_without_hard_links_gets_copies(run, save, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted", str(target))

    monkeypatch.setattr(os, "link", refuse)
    save(3)
    assert step_number(run.path) == 3
    assert not (run.path / "model.safetensors").samefile(run.latest() / "model.safetensors")


def test_an_error_while_writing_leaves_the_checkpoints_of_before(run, save, monkeypatch):
    save(1)
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.checkpoints.snapshots.write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save(2)
    assert names(run.checkpoints) == {STEP_1} and step_number(run.path) == 1


def killed_at_the_rename(save):
    replace = os.replace

    def kill(source, target):
        if os.path.basename(target).startswith("step-"):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = kill
    save(2)


def test_a_kill_before_the_rename_leaves_the_previous_checkpoint(run, save):
    save(1)
    killed = get_context("fork").Process(target=killed_at_the_rename, args=(save,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert any(name.startswith(".partial-") for name in names(run.checkpoints))
    assert run.latest().name == STEP_1
    assert run.latest_valid() == (run.latest(), []) and step_number(run.path) == 1
    save(3)  # the next writer clears up
    assert names(run.checkpoints) == {STEP_1, STEP_3}


def test_without_a_manifest_a_checkpoint_is_half_written(run, save, monkeypatch):
    save(1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("bertsmith.checkpoints.snapshots.write_manifest", lambda *_: 1 / 0)
        save(2)
    assert names(run.checkpoints) == {STEP_1, STEP_2}
    assert run.latest().name == STEP_1 and step_number(run.path) == 1
    checkpoint, skipped = run.latest_valid()
    assert checkpoint == run.latest()
    assert skipped == [(run.checkpoints / STEP_2, "half-written: no manifest.json")]
    run.return_to(checkpoint, skipped)
    assert names(run.checkpoints) == {STEP_1}
    save(3)
    assert names(run.checkpoints) == {STEP_1, STEP_3}


def test_a_resume_makes_its_checkpoint_the_runs_own_model(run, save, monkeypatch):
    save(1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(RunFolder, "publish", lambda *_: 1 / 0)
        save(2)
    assert step_number(run.path) == 1  # the kill came behind the manifest
    run.return_to(*run.latest_valid())
    assert step_number(run.path) == 2


def test_damaged_checkpoints_take_no_place_among_the_newest(run, save):
    for step in (1, 2, 3):
        save(step, keep_last=3)
    (run.latest() / "state.json").write_text("{}")
    checkpoint, skipped = run.latest_valid()
    assert [reason for _, reason in skipped] == ["state.json is truncated: 2 bytes, not 50"]
    for _ in range(2):  # a second one of the same step takes the first one's place
        run.return_to(checkpoint, skipped)
        assert names(run.checkpoints) == {STEP_1, STEP_2, f"skipped-{STEP_3}"}
        (run.checkpoints / f"skipped-{STEP_3}").rename(skipped[0].path)
    run.return_to(checkpoint, skipped)
    save(4, keep_last=2)
    assert [path.name for path in run.saved()] == [STEP_2, "step-00000004"]


@pytest.mark.parametrize("name", ["optimizer.safetensors", "manifest.json"])
def test_a_file_that_the_disk_has_lost_is_damage_and_one_of_another_user_is_not(
    run, save, monkeypatch, name
):
    save(1)
    save(2)
    real = Path.open

    def cannot(number):
        def opened(path, *how, **named):
            if path == run.checkpoints / STEP_2 / name:
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *how, **named)

        monkeypatch.setattr(Path, "open", opened)

    cannot(errno.EIO)
    lost = run.checkpoints / STEP_2, f"{name} cannot be read: Input/output error"
    assert run.latest_valid() == (run.checkpoints / STEP_1, [lost])
    cannot(errno.EACCES)
    with pytest.raises(PermissionError, match=name):
        run.latest_valid()


def test_a_newer_checkpoint_than_the_one_written_is_left_alone(run, save):
    save(9)
    for step in (1, 2, 3):
        save(step, keep_last=1)
    assert [path.name for path in run.saved()] == [STEP_3, "step-00000009"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="file size limits differ elsewhere")
def test_a_full_disk_is_an_error_of_the_machine_that_names_the_file(run, save):
    import resource

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # the model has 20 kB
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.filename.endswith("model.safetensors") and caught.value.errno == 27
    assert names(run.checkpoints) == set()
    assert not (run.path / "model.safetensors").exists()


def test_settings_and_result_are_kept_with_format_and_version(run):
    with pytest.raises(ValueError, match=r"run: no run.json, so not a run directory"):
        run.settings()
    with pytest.raises(ValueError, match=r"run: no result.json, so the run has not ended"):
        run.result()
    run.write_settings({"kind": "pretrain", "settings": {"size": "tiny"}})
    settings = run.settings()
    assert settings["kind"] == "pretrain" and settings["settings"] == {"size": "tiny"}
    assert {"format", "bertsmith", "created"} < settings.keys()
    run.write_result({"steps": 3})
    assert run.result() == {"steps": 3}

    (run.path / "run.json").write_text(json.dumps(settings | {"format": 3}))
    with pytest.raises(ValueError, match=r"run.json: format 3, but this bertsmith .* format 2"):
        run.settings()
    (run.path / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match="run.json: not a JSON object"):
        run.settings()


def test_one_process_at_a_time_writes_a_run(run):
    message = "run: another process is training here right now: wait until it has ended, or name an"
    with run.locked(), pytest.raises(ValueError, match=message), RunFolder(run.path).locked():
        pass
    run.check_unlocked()
    with run.locked(), pytest.raises(ValueError, match=message):
        RunFolder(run.path).check_unlocked()
    with run.locked():  # free again
        assert names(run.path) == {"run.lock"}


HOLDER = """
import sys, time
from bertsmith.checkpoints.run_folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_holds_nothing(run):
    command = [sys.executable, "-c", HOLDER, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="another process is training here"), run.locked():
            pass
        holder.kill()
    with run.locked():
        pass


def test_a_file_system_without_locks_keeps_nobody_out_and_is_told_of(run, monkeypatch, capsys):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with run.locked(), run.locked():
        said = capsys.readouterr().err.splitlines()
    what = "run.lock: no locks on this file system (No locks available): see that no second"
    assert said[0].endswith(f"{what} process is started on this run")


def test_a_run_that_has_begun_since_the_folder_was_looked_at_is_left_alone(run):
    with run.locked(begun=False):
        run.write_settings({"kind": "pretrain"})
    with pytest.raises(ValueError, match="has begun a run here meanwhile"), run.locked(begun=False):
        pass
    with run.locked():
        pass


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    assert source_commit(tmp_path) is None
    person = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*person, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    head = (tmp_path / ".git" / "HEAD").read_text().split()[1]
    commit = (tmp_path / ".git" / head).read_text().strip()
    assert source_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("x")
    subprocess.run(["git", "-C", str(tmp_path), "add", "code.py"], check=True)
    assert source_commit(tmp_path) == f"{commit}-dirty"
    (tmp_path / "inside").mkdir()
    assert source_commit(tmp_path / "inside") is None  # another's checkout around the package
    monkeypatch.setenv("PATH", "")
    assert source_commit(tmp_path) is None


def test_a_database_password_is_not_stored(tmp_path):
    url = "postgresql://me:se:cret@host:5432/studies"
    start = ["bertsmith", "finetune", "rte", "--storage"]
    command = [*start, url, f"--storage={url}", "--out", "a:b@c"]
    RunFolder(tmp_path).write_settings({"kind": "finetune", "command": command})
    hidden = "postgresql://me:***@host:5432/studies"
    stored = RunFolder(tmp_path).settings()["command"]
    assert stored == [*start, hidden, f"--storage={hidden}", "--out", "a:b@c"]


def test_a_run_goes_on_with_its_own_settings_but_for_free_ones(run):
    assert not run.is_begun("lineage rnn", {"seed": 1})
    run.write_settings({"kind": "lineage rnn", "settings": {"seed": 1, "threads": 2}})
    with pytest.raises(ValueError, match="was made with threads = 2, not 4"):
        run.is_begun("lineage rnn", {"seed": 1, "threads": 4})
    assert run.is_begun("lineage rnn", {"seed": 1, "threads": 4}, free=("threads",))
    with pytest.raises(ValueError, match="was made with seed = 1, not 3"):
        run.is_begun("lineage rnn", {"seed": 3}, free=("threads",))
