"""The loop's clock and its early ends: signals, and a time limit that no change of clock moves."""

import os
import signal
import threading
import time

import pytest
import torch

from bertsmith.training.engine import Engine
from bertsmith.training.loop import loop
from bertsmith.training.loop.loop import stop_signals
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import LoopSettings, Training, TrainingState

CPU = Engine(torch.device("cpu"), "float32", 1)


def test_the_limit_is_a_request_to_stop(monkeypatch):
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


def test_control_c_is_answered_at_once(capfd):
    for number, answers in ((signal.SIGINT, 1), (signal.SIGTERM, 0)):
        with stop_signals() as stop:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        said = capfd.readouterr().err
        assert stop.reason == number.name and said.count("stopping when all is saved") == answers


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


def test_first_passes_are_done_before_the_clock_of_a_budget_in_minutes(monkeypatch):
    done = []
    monkeypatch.setattr(Stepper, "first_passes", lambda self: done.append(time.monotonic()))
    gpu = Engine(torch.device("cuda"), "float32", 1)

    def begun(engine, seconds=0.0, **budget):
        done.clear()
        recipe = LoopSettings(Budget(**budget), 1e-3, "linear", 0.1, 1.0, 1)
        run = Training(None, None, TrainingState(seconds=seconds), recipe, engine)
        bar = loop.begin(run, Stepper(run, replicas="unused"))
        assert all(bar._started >= when for when in done)
        return len(done)

    for engine in (gpu, CPU):
        assert begun(engine, minutes=1) == begun(engine, seconds=59.0, minutes=1) == 1
        assert begun(engine, seconds=60.0, minutes=1) == 0  # nothing is left to train
        assert begun(engine, steps=10) == 0


def test_the_first_evaluation_is_guessed_from_the_steps_before():
    budget = Budget(minutes=10)
    recipe = LoopSettings(budget, 1e-3, "linear", 0.1, 1.0, 1, evaluation_steps=10.0)

    def clock(last=0.0, **state):
        run = Training(None, None, TrainingState(seconds=60.0, **state), recipe, CPU)
        found = loop.Clock(run, stop=False)
        found.last_evaluation = last
        return found

    assert not clock(step=100).has_time_to_evaluate()  # 6 s, where 1.8 s are free
    assert clock(step=1000).has_time_to_evaluate()
    assert not clock(step=1000, last=2.0).has_time_to_evaluate()  # as long as the last one took
    assert not clock(step=1000, evaluating=1.5).has_time_to_evaluate()


@pytest.mark.parametrize(("steps", "times"), [(100, 100), (1000, 50), (1000, 100), (7, 3)])
def test_all_evaluations_fall_due_at_their_steps(steps, times):
    """Also where a share of the budget is a hair below its fraction, as 29 / 100 * 100."""
    settings = LoopSettings(Budget(steps), 1e-3, "linear", 0.1, 1.0, 1, num_evals=times)
    run = Training(None, None, TrainingState(), settings, CPU)
    found = []
    for step in range(1, steps + 1):
        before, run.state = run.done(), TrainingState(step=step)
        if run.due(before).evaluation:
            found.append(step)
    assert found == [-(-steps * number // times) for number in range(1, times)]
