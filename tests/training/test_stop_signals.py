"""Why a loop ends early: signals, and a time limit that no change of the clock moves."""

import os
import signal
import threading
import time

import pytest

from bertsmith.base.settings import seconds_of
from bertsmith.training.loop.loop import stop_signals


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 90 * 60),
        ("5:30", 5 * 60 + 30),
        ("23:50:00", 23 * 3600 + 50 * 60),
        ("2-0", 48 * 3600),
        ("1-12:30", 36.5 * 3600),
        ("1-00:00:01", 24 * 3600 + 1),
    ],
)
def test_a_limit_is_read_as_slurm_writes_it(limit, seconds):
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize("limit", ["", "x", "1h", "1:2:3:4", "-5", "1.5", "1-"])
def test_another_limit_is_refused(limit):
    with pytest.raises(ValueError, match=f"time limit '{limit}': give minutes, H:M:S or D-H:M:S"):
        seconds_of(limit)


@pytest.mark.parametrize("limit", ["0", "0:00", "0-0:00:00"])
def test_a_limit_of_nothing_is_refused(limit):
    with pytest.raises(ValueError, match="must be above 0"):
        seconds_of(limit)


def test_the_limit_is_a_wish_to_stop(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with stop_signals(101.0) as stop:
        assert not stop
        monkeypatch.setattr(time, "time", lambda: 1e12)  # the clock of the wall may jump
        assert not stop
        now[0] = 101.0
        assert stop and stop.reason == "the time limit"


def test_torchrun_may_pass_on_what_a_scheduler_has_sent_already(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with stop_signals() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_a_second_signal_ends_it_and_the_limit_is_none():
    with stop_signals(0.0) as stop:
        assert stop
        os.kill(os.getpid(), signal.SIGTERM)  # while the last checkpoint is written
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)


def test_another_thread_gets_the_limit_alone():
    reasons = []

    def work():
        with stop_signals(0.0) as stop:
            reasons.append(bool(stop) and stop.reason)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reasons == ["the time limit"] and signal.getsignal(signal.SIGTERM) is before
