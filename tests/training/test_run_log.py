import json

import numpy as np
import pytest
import torch

from bertsmith.training.loop import log as run_log
from bertsmith.training.loop.log import RunLog, read_log


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_line_is_on_disk_at_once(tmp_path):
    log = RunLog(tmp_path, writers=())
    log.train(1, loss=2.5, rate=np.float32(0.5))
    log.evaluate(1, mlm_accuracy=torch.tensor(0.25), examples=np.int64(7))
    log.message("멈춤: stopped")
    assert lines_of(tmp_path / "log.jsonl") == [
        {"event": "train", "step": 1, "loss": 2.5, "rate": 0.5},
        {"event": "evaluate", "step": 1, "mlm_accuracy": 0.25, "examples": 7},
        {"event": "message", "text": "멈춤: stopped"},
    ]
    log.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    log = RunLog(tmp_path, writers=())
    log.train(1, loss=float("nan"), gradient_norm=np.float64("inf"), parts=[-float("inf"), 1.0])
    log.close()
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "event": "train",
        "step": 1,
        "loss": None,
        "gradient_norm": None,
        "parts": [None, 1.0],
    }


def test_resume_leaves_no_gap_and_no_repeat(tmp_path):
    log = RunLog(tmp_path, writers=())
    for step in range(1, 8):
        log.train(step, loss=float(step))
    log.message("warned")
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "train", "st')  # the kill came in the middle of a line
    log = RunLog(tmp_path, resume_step=5, writers=())
    for step in range(6, 10):
        log.train(step, loss=step + 0.5)
    log.close()
    events = read_log(tmp_path / "log.jsonl")
    assert [event["step"] for event in events if "step" in event] == list(range(1, 10))
    assert [event["loss"] for event in events if "step" in event][4:6] == [5.0, 6.5]
    assert [event["text"] for event in events if event["event"] == "message"] == ["warned"]


def test_the_figures_of_the_end_are_behind_its_checkpoint(tmp_path):
    with RunLog(tmp_path, writers=()) as log:
        for step in (1, 2):
            log.train(step, loss=1.0)
            log.evaluate(step, mlm_loss=2.0)
        log.evaluate(2, mlm_loss=1.5, unigram_entropy=5.0)
        log.sync()
    for step, lines in ((2, 4), (1, 2)):
        with RunLog(tmp_path, resume_step=step, writers=()):
            events = read_log(tmp_path / "log.jsonl")
        assert len(events) == lines and all("unigram_entropy" not in event for event in events)


def test_a_resume_looks_at_the_end_of_a_long_log_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "TAIL", 100)  # two lines
    path = tmp_path / "log.jsonl"
    early = b'half a li\n{"event": "train", "step": 1, "loss": 1.0}\n'
    own = b"".join(b'{"event": "train", "step": %d, "loss": 1.0}\n' % step for step in range(2, 60))
    behind = (
        b'[1]\n\0\0\0\n{"event": "train", "step": 60}\n{"event": "message", "text": "behind"}\n'
    )
    path.write_bytes(early + own + behind + b'{"event": "tra')
    RunLog(tmp_path, resume_step=59, writers=()).close()
    kept = b'{"event": "message", "text": "behind"}\n'
    assert path.read_bytes() == early + own + kept  # what is before is not looked at
    RunLog(tmp_path, resume_step=30, writers=()).close()
    assert path.read_bytes() == early + own[: own.index(b'{"event": "train", "step": 31')] + kept
    RunLog(tmp_path, resume_step=0, writers=()).close()  # the whole log is behind
    assert path.read_bytes() == kept
    RunLog(tmp_path, resume_step=5, writers=()).close()
    assert path.read_bytes() == kept
    path.unlink()
    RunLog(tmp_path, resume_step=5, writers=()).close()
    assert path.read_bytes() == b""


def test_a_new_run_starts_a_new_log(tmp_path):
    for _ in range(2):
        log = RunLog(tmp_path, writers=())
        log.train(1, loss=1.0)
        log.close()
    assert len(read_log(tmp_path / "log.jsonl")) == 1


def test_reading_forgives_the_last_line_only(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"text": "\xed\x95')  # half a character
    assert read_log(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b"")
    assert read_log(path) == []
    path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: damaged line"):
        read_log(path)
