"""log.jsonl, and the same figures in TensorBoard, W&B and MLflow."""

import importlib.util
import json
import struct
import sys
import time

import numpy as np
import pytest
import torch

from bertsmith.base.files import read_json_lines
from bertsmith.training.loop import log as log_module
from bertsmith.training.loop.log import RunLog, check_writers

from ..runs import lines, messages


def losses(folder, steps, **options):
    """The log of some steps, whose loss is the step."""
    with RunLog(folder, **options) as log:
        for step in steps:
            log.train(step, loss=float(step))


def test_every_line_is_on_disk_at_once(tmp_path):
    log = RunLog(tmp_path, loggers=())
    log.train(1, loss=2.5, learning_rate=np.float32(0.5))
    log.evaluate(1, mlm_accuracy=torch.tensor(0.25), examples=np.int64(7))
    log.message("멈춤: stopped")
    text = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == [
        {"event": "train", "step": 1, "loss": 2.5, "learning_rate": 0.5},
        {"event": "evaluate", "step": 1, "mlm_accuracy": 0.25, "examples": 7},
        {"event": "message", "text": "멈춤: stopped"},
    ]
    log.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with RunLog(tmp_path, loggers=()) as log:
        log.train(1, loss=float("nan"), grad_norm=np.float64("inf"), parts=[-float("inf"), 1.0])
    text = (tmp_path / "log.jsonl").read_text()
    figures = {"loss": None, "grad_norm": None, "parts": [None, 1.0]}
    expected = {"event": "train", "step": 1, **figures}
    assert json.loads(text, parse_constant=pytest.fail) == expected


def test_resume_leaves_no_gap_and_no_repeat(tmp_path):
    with RunLog(tmp_path, loggers=()) as log:
        for step in range(1, 8):
            log.train(step, loss=float(step))
        log.message("warned")
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "train", "st')  # the kill came in the middle of a line
    with RunLog(tmp_path, resume_step=5, loggers=()) as log:
        for step in range(6, 10):
            log.train(step, loss=step + 0.5)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10))
    assert [line["loss"] for line in lines(tmp_path)][4:6] == [5.0, 6.5]
    assert messages(tmp_path) == ["warned"]


def test_the_figures_of_the_end_are_behind_its_checkpoint(tmp_path):
    with RunLog(tmp_path, loggers=()) as log:
        for step in (1, 2):
            log.train(step, loss=1.0)
            log.evaluate(step, mlm_loss=2.0)
        log.evaluate(2, mlm_loss=1.5, unigram_entropy=5.0)
        log.sync()
    for step, count in ((2, 4), (1, 2)):
        with RunLog(tmp_path, resume_step=step, loggers=()):
            events = read_json_lines(tmp_path / "log.jsonl")
        assert len(events) == count and all("unigram_entropy" not in event for event in events)


def test_a_resume_looks_at_the_end_of_a_long_log_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "TAIL", 100)  # two lines
    path = tmp_path / "log.jsonl"
    early = b'half a li\n{"event": "train", "step": 1, "loss": 1.0}\n'
    own = b"".join(b'{"event": "train", "step": %d, "loss": 1.0}\n' % step for step in range(2, 60))
    behind = (
        b'[1]\n\0\0\0\n{"event": "train", "step": 60}\n{"event": "message", "text": "behind"}\n'
    )
    path.write_bytes(early + own + behind + b'{"event": "tra')
    RunLog(tmp_path, resume_step=59, loggers=()).close()
    kept = b'{"event": "message", "text": "behind"}\n'
    assert path.read_bytes() == early + own + kept  # what is before is not looked at
    RunLog(tmp_path, resume_step=30, loggers=()).close()
    assert path.read_bytes() == early + own[: own.index(b'{"event": "train", "step": 31')] + kept
    RunLog(tmp_path, resume_step=0, loggers=()).close()  # the whole log is behind
    assert path.read_bytes() == kept
    RunLog(tmp_path, resume_step=5, loggers=()).close()
    assert path.read_bytes() == kept
    path.unlink()
    RunLog(tmp_path, resume_step=5, loggers=()).close()
    assert path.read_bytes() == b""


def test_a_new_run_starts_a_new_log_and_without_writers_there_is_nothing_else(tmp_path):
    for _ in range(2):
        losses(tmp_path, [1], loggers=())
    assert len(read_json_lines(tmp_path / "log.jsonl")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_reading_forgives_the_last_line_only(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"text": "\xed\x95')  # half a character
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b"")
    assert read_json_lines(path) == []
    path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: damaged line"):
        read_json_lines(path)


class Memory:
    """A writer that only remembers."""

    opened: list["Memory"] = []

    def __init__(self, run_dir, first_step):
        self.first_step, self.figures, self.closed = first_step, [], False
        self.opened.append(self)

    def write(self, figures, step):
        self.figures.append((step, figures))

    def close(self):
        self.closed = True


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(log_module, "WRITERS", {"tensorboard": Memory})
    monkeypatch.setattr(Memory, "opened", [])
    return Memory.opened


def test_a_writer_gets_finite_figures_under_their_event(tmp_path, memory):
    log = RunLog(tmp_path, loggers=("tensorboard", "tensorboard"))
    log.train(2, loss=1.5, learning_rate=float("nan"), phase="one", flag=True, parts=[1.0])
    log.evaluate(2, mlm_loss=3)
    log.message("no figure")
    log.close()
    (writer,) = memory  # named twice, opened once
    expected = [(2, {"train/loss": 1.5, "train/flag": True}), (2, {"evaluate/mlm_loss": 3})]
    assert writer.figures == expected and writer.closed and writer.first_step == 0
    assert len(read_json_lines(tmp_path / "log.jsonl")) == 3


def test_a_resumed_run_opens_at_the_next_step(tmp_path, memory):
    RunLog(tmp_path, resume_step=40, loggers=("tensorboard",)).close()
    assert memory[0].first_step == 41


def test_an_unknown_writer():
    with pytest.raises(ValueError, match="'comet': known are tensorboard, wandb, mlflow"):
        check_writers(["tensorboard", "comet"])


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorboard", "train"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_writer_asked_for_without_its_package(tmp_path, monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"'{name}'.*pip install 'bertsmith\[{extra}\]'"):
        RunLog(tmp_path, loggers=(name,))


def test_without_tensorboard_there_is_one_notice(tmp_path, monkeypatch, capsys):
    log_module._note_missing_tensorboard.cache_clear()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in "ab":
        RunLog(tmp_path / name).close()
    log_module._note_missing_tensorboard.cache_clear()
    assert capsys.readouterr().err.count("pip install 'bertsmith[train]'") == 1
    assert not (tmp_path / "a" / "tensorboard").exists()


def test_tensorboard_holds_each_step_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    losses(tmp_path, range(1, 5))
    time.sleep(1.1)  # TensorBoard orders the files of a run by the second they were begun in
    with RunLog(tmp_path, resume_step=2) as log:
        log.train(3, loss=30.0, learning_rate=float("nan"))
        log.evaluate(3, mlm_loss=1.5)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]
    assert sorted(events.Tags()["scalars"]) == ["evaluate/mlm_loss", "train/loss"]


def two_processes(run_dir, name):
    """Steps 1 to 4, then a resume from step 2 that writes step 3 again."""
    losses(run_dir, range(1, 5), loggers=(name,))
    with RunLog(run_dir, resume_step=2, loggers=(name,)) as log:
        log.train(3, loss=30.0)
        log.evaluate(3, mlm_loss=1.5)


def wandb_records(path):
    """Records of a .wandb file: 7 bytes, then checksum (4 bytes), length (2), kind (1), data."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert len(data) < 32768, "longer files have records in parts"
    start = 7
    while start < len(data):
        length, kind = struct.unpack_from("<HB", data, start + 4)
        assert kind == 1, "a whole record"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[start + 7 : start + 7 + length])
        yield record
        start += 7 + length


def test_wandb_works_offline_in_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    two_processes(tmp_path / "out", "wandb")
    paths = list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(paths) == 2
    until = time.monotonic() + 30  # its own process writes on for a moment behind `finish`
    while any(path.stat().st_size < 100 for path in paths) and time.monotonic() < until:
        time.sleep(0.1)
    seen = {}
    for path in paths:
        name, figures = None, []
        for record in wandb_records(path):
            name = record.run.display_name or name
            for item in record.history.item:
                key = item.key or item.nested_key[0]
                if not key.startswith("_") or key == "_step":
                    figures.append((key, float(item.value_json)))
        seen[name] = sorted(figures)
    steps = [("_step", step) for step in (1.0, 2.0, 3.0, 4.0)]
    assert seen == {
        "out": steps + [("train/loss", step) for _, step in steps],
        "out from step 3": [("_step", 3.0), ("evaluate/mlm_loss", 1.5), ("train/loss", 30.0)],
    }


@pytest.mark.slow  # a new MLflow database takes 6 s
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_works_in_a_file_of_the_run(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    two_processes(tmp_path / "out", "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/out/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("bertsmith")
    runs = {run.info.run_name: run.info for run in client.search_runs([experiment.experiment_id])}
    found = {
        name: [(m.step, m.value) for m in client.get_metric_history(info.run_id, "train/loss")]
        for name, info in runs.items()
    }
    assert found == {"out": [(1, 1), (2, 2), (3, 3), (4, 4)], "out from step 3": [(3, 30)]}
    assert {info.status for info in runs.values()} == {"FINISHED"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing in the current folder
