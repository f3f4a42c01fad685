"""Killed as by `kill -9` at any moment, a run goes on to the very bits of one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertsmith.base.files import TEMPORARY_PREFIX, read_json
from bertsmith.checkpoints.run_folder import RunFolder, step_number

from ..training.runs import assert_same_run, lines

SETTINGS = {
    "size": "1x64", "max_length": 32, "batch_size": 4, "steps": 24, "learning_rate": 3e-3,
    "dropout": 0.1, "attention_dropout": 0.1, "precision": "float32", "threads": 1,
    "checkpoint_every": 2, "keep_steps": [5], "log_every": 1, "num_evals": 3, "eval_rows": 8,
    "loggers": [],
}  # fmt: skip
# 13 checkpoints: every second step, and step 5. A file of the model is written twice for each: into
# the checkpoint, and then as the run's own.
STEP = "inside a step"
WRITE = "inside the writing of a checkpoint"
MANIFEST = "between rename and manifest"
AFTER = "behind the manifest"
ENDS = "at the run's start or end"
MOMENTS = {
    STEP: [
        *(f"step-gradients:{n}" for n in (1, 2, 3, 6, 9, 12, 15, 18, 21, 24)),
        *(f"step-weights:{n}" for n in (1, 4, 5, 8, 11, 16, 20, 24)),
    ],
    WRITE: [
        *(f"write-optimizer.safetensors:{n}" for n in (1, 2, 5, 9, 13)),
        *(f"write-model.safetensors:{n}" for n in (1, 3, 13, 21, 25)),
        *(f"write-state.json:{n}" for n in (1, 3, 7, 13)),
        *(f"write-config.json:{n}" for n in (3, 15)),
        "write-vocab.txt:5", "write-tokenizer.json:25",
    ],
    MANIFEST: [
        *(f"checkpoint-renamed:{n}" for n in (1, 2, 3, 4, 8, 12, 13)),
        *(f"checkpoint-hashed:{n}" for n in (1, 10, 50, 91)),
        *(f"write-manifest.json:{n}" for n in (1, 2, 3, 7, 13)),
    ],
    AFTER: [
        *(f"write-model.safetensors:{n}" for n in (2, 8, 26)),
        "write-config.json:4", "folder-removed:1", "folder-removed:6",
    ],
    ENDS: ["write-run.json:1", "write-log.jsonl:1", "write-result.json:1"],
}  # fmt: skip
EVERY_MOMENT = [(window, moment) for window, moments in MOMENTS.items() for moment in moments]
A_FEW = ["write-optimizer.safetensors:5", "checkpoint-renamed:8"]
INSTANTS = 10  # of the clock, wherever the run may be then


@pytest.fixture(scope="module")
def trainer(small_store, tmp_path_factory):
    """train(out) starts or resumes a run in a process of its own; its exit status, as of wait.

    And the run that was left in peace.
    """
    command = [sys.executable, str(Path(__file__).with_name("trainer.py"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def train(out, kill_at="", kill_after=None):
            job = {"store": str(small_store), "out": str(out), "settings": SETTINGS}
            job |= {"kill_at": kill_at, "kill_after": kill_after}
            print(json.dumps(job), file=process.stdin, flush=True)
            return int(process.stdout.readline())

        out = tmp_path_factory.mktemp("runs") / "undisturbed"
        assert train(out) == 0
        yield train, out
        process.stdin.close()


@pytest.fixture
def train(trainer):
    return trainer[0]


@pytest.fixture
def undisturbed(trainer):
    return trainer[1]


def assert_as_undisturbed(out, undisturbed):
    """Weights, optimizer and position to the bit; the log without gap or repeat; nothing left."""
    assert_same_run(undisturbed, out)
    assert (out / "model.safetensors").samefile(RunFolder(out).latest() / "model.safetensors")
    assert [line["step"] for line in lines(out)] == list(range(1, 25))
    results = [read_json(run / "result.json") for run in (undisturbed, out)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    kept = [path.name for path in RunFolder(undisturbed).checkpoints.iterdir()]
    assert sorted(kept) == ["step-00000005", "step-00000022", "step-00000024"]
    found = {path.name for path in RunFolder(out).checkpoints.iterdir()}
    # a kill before the last checkpoint's last deed, which is to remove an older one, is final
    assert found - set(kept) in (set(), {"step-00000020"}) and found >= set(kept)
    assert not list(out.glob(f"{TEMPORARY_PREFIX}*"))


def assert_survived(moment, train, undisturbed, out):
    assert train(out, kill_at=moment) == signal.SIGKILL, "it was never there"
    assert train(out) == 0
    assert_as_undisturbed(out, undisturbed)


@pytest.mark.parametrize("moment", A_FEW)
def test_a_run_killed_here_goes_on_bit_for_bit(train, undisturbed, tmp_path, moment):
    assert_survived(moment, train, undisturbed, tmp_path / "run")


@pytest.mark.faults
@pytest.mark.parametrize(("window", "moment"), EVERY_MOMENT)
def test_a_run_killed_anywhere_goes_on_bit_for_bit(
    train, undisturbed, tmp_path, tally, window, moment
):
    assert_survived(moment, train, undisturbed, tmp_path / "run")
    tally(f"kill -9 {window}: resumed to the same bits")


@pytest.mark.faults
@pytest.mark.parametrize("number", range(INSTANTS))
def test_a_run_killed_by_the_clock_goes_on_bit_for_bit(train, undisturbed, tmp_path, tally, number):
    seconds = read_json(undisturbed / "result.json")["seconds"]
    out, draw = tmp_path / "run", random.Random(number)
    status = train(out, kill_after=0.1 + draw.random() * seconds)
    assert status in (0, signal.SIGKILL)
    assert train(out) == 0
    assert_as_undisturbed(out, undisturbed)
    if status:  # it had not ended before
        tally("kill -9 at an instant of the clock: resumed to the same bits")


@pytest.mark.faults
def test_a_run_killed_again_and_again_goes_on_bit_for_bit(train, undisturbed, tmp_path, tally):
    out = tmp_path / "run"
    kills = ["step-weights:3", "checkpoint-renamed:2", "write-optimizer.safetensors:3"]
    kills += ["write-manifest.json:1", "step-gradients:5", "folder-removed:1"]
    for moment in kills:
        assert train(out, kill_at=moment) == signal.SIGKILL
        tally("kill -9 of one run, several times: resumed to the same bits")
    assert train(out) == 0
    assert_as_undisturbed(out, undisturbed)


def command_of(store, out, **changes):
    settings = {k: v for k, v in {**SETTINGS, **changes}.items() if not isinstance(v, list)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "bertsmith", "pretrain", f"--corpus={store}", *flags]
    return [*command, f"--out={out}", "--loggers"]


@pytest.mark.faults
def test_the_environment_names_the_moment(small_store, tmp_path):
    command = command_of(small_store, tmp_path / "run")
    environment = os.environ | {"BERTSMITH_KILL_AT": "checkpoint-renamed:2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = RunFolder(tmp_path / "run")
    assert run.latest().name == "step-00000002"
    checkpoint, skipped = run.latest_valid()
    assert checkpoint == run.latest()
    assert skipped == [(run.checkpoints / "step-00000004", "half-written: no manifest.json")]


@pytest.mark.faults
def test_a_second_process_is_refused_until_the_first_is_killed(small_store, tmp_path, tally):
    out = tmp_path / "run"
    first = subprocess.Popen(command_of(small_store, out, steps=10**6), stderr=subprocess.DEVNULL)
    while RunFolder(out).latest() is None and first.poll() is None:
        time.sleep(0.05)
    again = [*command_of(small_store, out), "--resume"]
    second = subprocess.run(again, capture_output=True, text=True)
    assert second.returncode == 2 and first.poll() is None
    assert f"{out}: another process is training here right now: wait until it has" in second.stderr
    first.kill()
    first.wait()
    steps = step_number(RunFolder(out).latest_valid()[0]) + 1
    again = [*command_of(small_store, out, steps=steps), "--resume"]
    third = subprocess.run(again, capture_output=True, text=True)
    assert third.returncode == 0, third.stderr
    assert RunFolder(out).result()["steps"] == steps
    tally("a second process in the folder of a run, refused until the first is killed")
