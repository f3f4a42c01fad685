"""Checkpoints written beside the steps: what is saved, what a full disk does, when a run ends."""

import dataclasses
import errno
import itertools
import os
import shutil
import signal
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from bertsmith.base.files import read_json
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.cli.main import main
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.loop.log import read_log
from bertsmith.training.pretraining import run as pretrain_module
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

from .steps import before_steps
from .test_pretrain import assert_same_run

SHORT = PretrainSettings(
    size="1x64", max_length=32, batch_size=4, steps=12, learning_rate=3e-3, dropout=0.1,
    precision="float32",
    threads=1, checkpoint_every=4, log_every=2, num_evals=2, eval_rows=8, loggers=(),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def no_peak():
    """Half a second at the start of every run, of which no weight hears."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_module, "measure_peak", lambda engine: 0.0)
        yield


@pytest.fixture(scope="module")
def whole(store_folder, tmp_path_factory, no_peak):
    out = tmp_path_factory.mktemp("runs") / "whole"
    pretrain(store_folder, out, SHORT)
    return out


def full_at(step, monkeypatch, name="write_tensors"):
    """A disk without room for a file of the checkpoint of this step."""
    real = RunFolder.save_checkpoint

    def save(self, snapshot, *given):
        if snapshot.step != step:
            return real(self, snapshot, *given)

        def refuse(path, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(f"bertsmith.checkpoints.run_folder.{name}", refuse)
            return real(self, snapshot, *given)

    monkeypatch.setattr(RunFolder, "save_checkpoint", save)


@pytest.mark.parametrize("name", ["write_tensors", "write_manifest"])
def test_a_full_disk_ends_the_run_with_the_remedy_and_the_checkpoint_before(
    store_folder, tmp_path, whole, monkeypatch, name
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        full_at(8, patch, name)
        pretrain(store_folder, out, SHORT)
    said = str(error.value)
    assert "No space left on device: the checkpoint of step 8 could not be written, " in said
    assert said.endswith("step-00000004 is whole: free some space, then go on with --resume")
    assert "\n" not in said and isinstance(error.value.__cause__, OSError)
    assert RunFolder(out).latest_valid()[0].name == "step-00000004"
    assert not (out / "result.json").exists()
    pretrain(store_folder, out, SHORT, resume=True)
    assert_same_run(whole, out)


def test_a_disk_that_is_full_at_the_last_or_first_checkpoint(store_folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="step-00000008 is whole"):
        full_at(12, patch)
        pretrain(store_folder, tmp_path / "last", SHORT)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="there is none before it"):
        full_at(4, patch)
        pretrain(store_folder, tmp_path / "first", SHORT)


def test_another_fault_of_the_disk_has_another_remedy(store_folder, tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "a file")

    monkeypatch.setattr("bertsmith.checkpoints.run_folder.write_tensors", refuse)
    with pytest.raises(OSError, match="^a file: Input/output error: .*: mend that, then go on"):
        pretrain(store_folder, tmp_path / "run", SHORT)


def test_the_error_comes_with_the_next_step(store_folder, tmp_path, monkeypatch):
    """Not with the next checkpoint, hours later."""
    steps, failed = [], threading.Event()

    def note(run, batch):
        steps.append(run.state.step)
        if run.state.step == 4:  # the checkpoint of step 4 is under way
            assert failed.wait(60)
            time.sleep(0.2)  # until the thread's future is done

    def refuse(*given):
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    before_steps(monkeypatch, note)
    monkeypatch.setattr("bertsmith.checkpoints.run_folder.write_tensors", refuse)
    with pytest.raises(OSError, match="checkpoint of step 4"):
        pretrain(store_folder, tmp_path / "run", SHORT)
    assert steps == list(range(5))


def test_the_error_of_a_step_goes_before_that_of_the_disk(
    store_folder, tmp_path, monkeypatch, capsys
):
    def poison(run, batch):
        if run.state.step == 4:
            raise FloatingPointError("not finite")

    full_at(4, monkeypatch)
    before_steps(monkeypatch, poison)
    with pytest.raises(FloatingPointError, match="not finite"):
        pretrain(store_folder, tmp_path / "run", SHORT)
    assert "warning: " in (said := capsys.readouterr().err) and "checkpoint of step 4" in said


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(
    store_folder, tmp_path, whole, monkeypatch
):
    after_six = threading.Event()
    real_save = RunFolder.save_checkpoint

    def note(run, batch):
        if run.state.step == 6:
            after_six.set()

    def save(self, snapshot, *given):
        assert after_six.wait(60)  # the first checkpoint, of step 4, is written after six steps
        return real_save(self, snapshot, *given)

    before_steps(monkeypatch, note)
    monkeypatch.setattr(RunFolder, "save_checkpoint", save)
    out = tmp_path / "slow"
    pretrain(store_folder, out, dataclasses.replace(SHORT, keep_checkpoints=3))
    assert_same_run(whole, out)
    for checkpoint, step in zip(RunFolder(out).saved(), (4, 8, 12), strict=True):
        assert read_json(checkpoint / "state.json")["loop"]["step"] == step
    pretrain(store_folder, tmp_path / "four", dataclasses.replace(SHORT, keep_steps=(4,)))
    names = [path.name for path in RunFolder(tmp_path / "four").saved()]
    assert names == ["step-00000004", "step-00000008", "step-00000012"]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (
            read_tensor_file(run / "checkpoints" / "step-00000004" / file)
            for run in (out, tmp_path / "four")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_signal_while_the_last_checkpoint_is_written_lets_it_be(
    store_folder, tmp_path, monkeypatch
):
    real = RunFolder.save_checkpoint

    def save(self, snapshot, *given):
        if snapshot.step == 12:
            time.sleep(0.2)  # until the main thread waits
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return real(self, snapshot, *given)

    monkeypatch.setattr(RunFolder, "save_checkpoint", save)
    assert pretrain(store_folder, tmp_path / "run", SHORT).steps == 12
    assert RunFolder(tmp_path / "run").latest().name == "step-00000012"


def test_the_steps_to_keep_have_a_checkpoint_wherever_they_are(store_folder, tmp_path):
    out = tmp_path / "run"
    kept = dataclasses.replace(SHORT, keep_steps=(3, 4, 7), keep_checkpoints=1)
    pretrain(store_folder, out, kept)
    assert [path.name[-2:] for path in RunFolder(out).saved()] == ["03", "04", "07", "12"]
    with pytest.raises(ValueError, match="keep_steps = 0: must be at least 1"):
        dataclasses.replace(SHORT, keep_steps=(5, 0))


def test_a_run_ends_at_its_time_limit_whatever_the_clock_says(
    store_folder, tmp_path, whole, monkeypatch
):
    """time.monotonic is moved past the limit in step 6; before, the wall's clock jumps in vain."""
    monotonic, later = time.monotonic, [0.0]

    def jump(run, batch):
        far = 1e9 if run.state.step % 2 else -1e9
        monkeypatch.setattr(time, "time", lambda: 1.7e9 + far)
        if run.state.step == 5:
            later[0] = 1000.0

    out = tmp_path / "limited"
    with monkeypatch.context() as patch:
        before_steps(patch, jump)
        patch.setattr(time, "monotonic", lambda: monotonic() + later[0])
        assert not pretrain(store_folder, out, SHORT, time_limit=900).finished
    assert RunFolder(out).latest().name == "step-00000006"
    texts = [line.get("text") for line in read_log(out / "log.jsonl")]
    assert "stopped by the time limit at step 6; saved" in texts
    pretrain(store_folder, out, SHORT, resume=True)
    assert_same_run(whole, out)


def test_a_jump_of_the_wall_clock_changes_no_budget_of_minutes(store_folder, tmp_path, monkeypatch):
    jumps = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 - next(jumps))  # an hour back at every look
    minutes = dataclasses.replace(SHORT, steps=None, minutes=0.01)
    result = pretrain(store_folder, tmp_path / "run", minutes)
    assert 0.6 <= result.seconds < 3600
    seconds = [line["seconds"] for line in read_log(tmp_path / "run" / "log.jsonl")
               if line["event"] == "train"]  # fmt: skip
    assert seconds == sorted(seconds) and all(0 <= value < 3600 for value in seconds)


def test_the_command_stops_at_its_time_limit_with_a_code_of_its_own(
    store_folder, tmp_path, monkeypatch, capsys
):
    words = ["pretrain", "--corpus", store_folder, "--out", tmp_path / "run", "--size", "1x64"]
    words += [
        "--max-length",
        "32",
        "--steps",
        "9",
        "--threads",
        "1",
        "--time-limit",
        "5",
        "--loggers",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.cli.pretrain.parse_duration", lambda limit: 1e-9)
        assert main([str(word) for word in words]) == 75
    said = capsys.readouterr().err
    assert said.endswith(f"stopped and saved; add --resume to go on with {tmp_path / 'run'}\n")
    assert RunFolder(tmp_path / "run").latest().name == "step-00000000"
    with monkeypatch.context() as patch:  # which starts again what leaves with another code
        patch.setattr("bertsmith.cli.pretrain.parse_duration", lambda limit: 1e-9)
        stopped = Mock(finished=False)
        patch.setattr("bertsmith.training.pretraining.run.pretrain", lambda *_, **__: stopped)
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        assert main([str(word) for word in words]) == 0
        words = words[: words.index("--time-limit")] + ["--loggers"]  # a signal, then
        assert main([str(word) for word in words]) == 75
    assert main(["pretrain", "--corpus", "a", "--out", "b", "--time-limit", "soon"]) == 2
    assert "time limit 'soon': give minutes" in capsys.readouterr().err


def test_the_figures_of_the_end_are_taken_once(store_folder, tmp_path, whole):
    """A kill between them and result.json."""
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    (again / "result.json").unlink()
    pretrain(store_folder, again, SHORT, resume=True)
    before, after = (read_log(run / "log.jsonl") for run in (whole, again))
    assert [line for line in before if "step" in line] == [line for line in after if "step" in line]
    assert (again / "result.json").exists()


def test_a_run_that_another_process_writes_is_refused_and_left_alone(store_folder, tmp_path, whole):
    new, begun = tmp_path / "new", tmp_path / "begun"
    shutil.copytree(whole, begun)
    before = {file: file.read_bytes() for file in begun.rglob("*") if file.is_file()}
    halted = tmp_path / "halted"  # before its first checkpoint, or so one might think
    halted.mkdir()
    shutil.copy(whole / "run.json", halted)
    for out, resume in itertools.product((new, halted, begun), (False, True)):
        refused = pytest.raises(ValueError, match="another process is training here right now")
        with RunFolder(out).locked(), refused:
            pretrain(store_folder, out, SHORT, resume=resume)
    assert [path.name for path in new.iterdir()] == ["run.lock"]
    assert before == {file: file.read_bytes() for file in begun.rglob("*") if file.is_file()}
    pretrain(store_folder, new, SHORT)
    assert_same_run(whole, new)


def test_a_refused_start_leaves_no_lock(store_folder, tmp_path, whole):
    run = RunFolder(tmp_path / "tuned")
    run.write_settings({"kind": "finetune"})
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a model already: name another --out"):
            pretrain(store_folder, run.path, SHORT, resume=resume)
    assert [path.name for path in run.path.iterdir()] == ["run.json"]


def test_a_run_that_another_process_begins_meanwhile_is_left_alone(
    store_folder, tmp_path, monkeypatch
):
    run = RunFolder(tmp_path / "run")

    def other_process(engine):  # while this one measures the machine
        run.write_settings({"kind": "pretrain", "settings": "the other one's"})
        return 0.0

    monkeypatch.setattr(pretrain_module, "measure_peak", other_process)
    with pytest.raises(ValueError, match="another process has begun a run here meanwhile"):
        pretrain(store_folder, run.path, SHORT)
    assert run.settings()["settings"] == "the other one's"
    assert not (run.path / "log.jsonl").exists()


def test_a_head_that_came_with_the_model_stays_in_the_files(store_folder, tmp_path):
    """Masked words alone do not train it: it is what it was; what the model had not is left out."""
    pairs, words = SHORT, dataclasses.replace(SHORT, objective="mlm", steps=2)
    heads = {"pooler": "bert.pooler.dense.weight", "nsp": "cls.seq_relationship.weight"}
    pretrain(store_folder, tmp_path / "whole", dataclasses.replace(pairs, steps=2))
    loaded = load_model(tmp_path / "whole", PreTrainingModel).model
    tokenizer = Tokenizer.from_pretrained(store_folder)
    save_model(loaded, tokenizer, tmp_path / "pooler", exclude=["nsp.weight", "nsp.bias"])
    pretrain(store_folder, tmp_path / "neither", words)  # from no model
    architectures = {"whole": "PreTraining", "pooler": "MaskedLM", "neither": "MaskedLM"}
    there = {"whole": {"pooler", "nsp"}, "pooler": {"pooler"}, "neither": set()}
    for name, kept in there.items():
        out, init = tmp_path / f"from-{name}", tmp_path / name
        given = read_tensor_file(init / "model.safetensors")
        for more in (0, 2):  # a resume goes by the checkpoint
            longer = dataclasses.replace(words, steps=2 + more)
            pretrain(store_folder, out, longer, model=init, resume=more > 0, steps=longer.steps)
            found = read_tensor_file(out / "model.safetensors")
            assert {head for head, tensor in heads.items() if tensor in found} == kept
            assert all(torch.equal(found[heads[head]], given[heads[head]]) for head in kept)
            trained = "cls.predictions.transform.dense.weight"
            assert not torch.equal(found[trained], given[trained])
            architecture = read_json(out / "config.json")["architectures"]
            assert architecture == [f"BertFor{architectures[name]}"]
            assert load_model(out, PreTrainingModel).unused == []
