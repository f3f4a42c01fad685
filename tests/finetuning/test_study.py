"""A study's trials: whole grids, seeded draws, kills, and several processes on one file."""

import json
import math
import subprocess
import sys

import pytest

from bertsmith.training.finetuning.search_space import Range, expand_grid
from bertsmith.training.finetuning.sweep import Study

GRID = {"batch_size": (16, 32), "learning_rate": (5e-5, 3e-5), "epochs": (2, 3)}
FREE = {
    "learning_rate": Range(1e-5, 1e-3, is_whole=False, is_logarithmic=True),
    "batch_size": (8, 16, 32),
    "epochs": Range(2, 6, is_whole=True, is_logarithmic=False),
}


def open_study(store, space=GRID, trials=None, owner="me", seed=0, **more):
    return Study(str(store), "name", space, trials, owner, seed, **more)


def quality(setting):
    """Best at a rate of 1e-4, whatever the rest."""
    return -abs(math.log10(setting["learning_rate"]) + 4)


def go(study, at_most=1000):
    """Make trials; the settings in the order in which they were tried here."""
    made = []
    while len(made) < at_most and (attempt := study.next()):
        value = quality(attempt.setting)
        study.finish(attempt, value, {"quality": value})
        made.append(attempt.setting)
    return made


def test_a_grid_is_tried_whole_and_once(tmp_path):
    study = open_study(tmp_path / "study.db")
    assert study.total == 8 and go(study) == expand_grid(GRID)
    assert study.next() is None
    assert [setting for setting, _ in study.tried()] == expand_grid(GRID)
    assert study.tried()[0][1] == {"quality": quality({"learning_rate": 5e-5})}


def test_a_finished_trial_is_not_made_again(tmp_path):
    first = go(open_study(tmp_path / "study.db"), 3)
    second = go(open_study(tmp_path / "study.db"))
    assert first + second == expand_grid(GRID)
    assert go(open_study(tmp_path / "study.db")) == []


def test_a_setting_whose_process_was_killed_is_tried_again(tmp_path):
    study = open_study(tmp_path / "study.db")
    go(study, 2)
    lost = study.next()  # never finished
    again = go(open_study(tmp_path / "study.db"))
    assert sorted(map(str, again)) == sorted(map(str, expand_grid(GRID)[2:]))
    assert again[-1] == lost.setting  # the others first


def test_two_processes_of_one_name_are_told_apart(tmp_path):
    first = open_study(tmp_path / "study.db")
    attempt = first.next()
    open_study(tmp_path / "study.db")  # takes itself for the first, started again
    with pytest.raises(ValueError, match="trial 1 was given up by another process with the same"):
        first.finish(attempt, 1.0, {})


def test_what_another_process_leaves_behind_is_made_at_the_end(tmp_path):
    other = open_study(tmp_path / "study.db", owner="other")
    lost = other.next()  # perhaps it is still at it
    mine = go(open_study(tmp_path / "study.db"))
    assert len(mine) == 8 and mine[-1] == lost.setting
    other.finish(lost, 0.0, {})  # it was, and has done it for nothing
    assert other.next() is None and len(other.tried()) == 9


def test_the_last_setting_may_be_gone_when_the_number_is_drawn(tmp_path, monkeypatch):
    study = open_study(tmp_path / "study.db")
    go(study)
    monkeypatch.setattr(study, "_is_done", lambda: False)  # as it was a moment before
    assert study.next() is None and len(study.tried()) == 8


def test_draws_are_a_function_of_seed_number_and_figures(tmp_path):
    whole = go(open_study(tmp_path / "whole.db", FREE, 14))
    parts = []
    while made := go(open_study(tmp_path / "parts.db", FREE, 14), 5):  # stopped twice
        parts += made
    assert parts == whole and len(whole) == 14
    assert go(open_study(tmp_path / "other.db", FREE, 14, seed=1))[:10] != whole[:10]
    assert len({str(setting) for setting in whole}) == 14


def test_a_search_that_is_killed_in_a_trial_draws_as_one_that_is_not(tmp_path):
    whole = go(open_study(tmp_path / "whole.db", FREE, 14))
    parts = []
    for trials in (3, 0, 9):  # twice at the same place
        study = open_study(tmp_path / "parts.db", FREE, 14)
        parts += go(study, trials)
        assert study.next().setting == whole[len(parts)]  # never finished
    parts += go(open_study(tmp_path / "parts.db", FREE, 14))
    assert parts == whole


def test_draws_keep_to_the_space_and_move_to_where_it_is_good(tmp_path):
    made = go(open_study(tmp_path / "study.db", FREE, 40))
    assert all(1e-5 <= setting["learning_rate"] <= 1e-3 for setting in made)
    assert all(setting["batch_size"] in (8, 16, 32) for setting in made)
    assert all(setting["epochs"] in range(2, 7) for setting in made)
    assert {type(setting["epochs"]) for setting in made} == {int}
    # logarithmic: uniform draws of 10 would put 1 in 10 below 1e-4; the rest follow what is good
    assert sum(setting["learning_rate"] < 1e-4 for setting in made[:10]) >= 2
    late = [abs(quality(setting)) for setting in made[20:]]
    assert sum(late) / len(late) < 0.35  # uniform: 0.5


def test_a_trial_that_failed_counts_as_the_worst(tmp_path):
    for less_is_better in (False, True):
        study = open_study(tmp_path / f"{less_is_better}.db", less_is_better=less_is_better)
        while attempt := study.next():
            value, figures = (1.0, {}) if attempt.number > 1 else (None, {"failure": "not finite"})
            study.finish(attempt, value, figures)
        assert len(study.tried()) == 8 and study.tried()[0][1] == {"failure": "not finite"}


def test_studies_of_one_file_do_not_mix(tmp_path):
    store = str(tmp_path / "study.db")
    go(Study(store, "one", GRID, None, "me", 0), 3)
    assert Study(store, "two", GRID, None, "me", 0).tried() == []


WORKER = """
import json, sys, time
from bertsmith.training.finetuning.sweep import Study
store, trials, owner = sys.argv[1:]
space = {"batch_size": (16, 32), "learning_rate": (5e-5, 3e-5), "epochs": (2, 3)}
study = Study(store, "name", space, int(trials) or None, owner, 0)
made = []
while attempt := study.next():
    time.sleep(0.05)
    study.finish(attempt, attempt.setting["learning_rate"], {"number": attempt.number})
    made.append(attempt.setting)
print(json.dumps(made))
"""


@pytest.mark.parametrize("trials", [0, 12])
def test_two_processes_share_a_study(tmp_path, trials):
    """Started together on a file that is not there yet."""
    command = [sys.executable, "-c", WORKER, str(tmp_path / "shared.db"), str(trials)]
    workers = [
        subprocess.Popen([*command, owner], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for owner in "ab"
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    made = [json.loads(out) for out, _ in outputs]
    total = trials or 8
    # the last may be made by both: what one of them has in hand does not count yet
    assert total <= sum(map(len, made)) <= total + 1
    study = open_study(tmp_path / "shared.db")
    tried = study.tried()
    assert len(tried) == sum(map(len, made))
    assert sorted(figures["number"] for _, figures in tried) == list(range(1, len(tried) + 1))
    if not trials:
        assert all(setting in [s for s, _ in tried] for setting in expand_grid(GRID))
        first = [setting for setting, _ in tried[:8]]
        assert sorted(map(str, first)) == sorted(
            map(str, expand_grid(GRID))
        )  # each once, till then


def test_a_new_file_that_another_process_is_making(tmp_path, monkeypatch):
    import optuna
    from sqlalchemy.exc import OperationalError

    real, calls = optuna.create_study, []

    def quarrelling(*args, **kwargs):
        calls.append(args)
        if len(calls) < 3:
            raise OperationalError("CREATE TABLE", {}, Exception("table exists already"))
        return real(*args, **kwargs)

    monkeypatch.setattr(optuna, "create_study", quarrelling)
    monkeypatch.setattr("bertsmith.training.finetuning.sweep.time.sleep", lambda _: None)
    assert len(go(open_study(tmp_path / "study.db"))) == 8 and len(calls) == 3


def test_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.training.finetuning.sweep.time.sleep", lambda _: None)
    with pytest.raises(ValueError, match="a range needs --trials"):
        open_study(tmp_path / "study.db", FREE)
    with pytest.raises(ValueError, match="--trials 0: must be at least 1"):
        open_study(tmp_path / "study.db", trials=0)
    (tmp_path / "notes.txt").write_text("no database at all, but a text of some length\n" * 50)
    with pytest.raises(ValueError, match="notes.txt: no database for a study: .*not a database"):
        open_study(tmp_path / "notes.txt")
    with pytest.raises(OSError, match="the database fails: .*unable to open"):
        open_study(tmp_path)  # a folder
    with pytest.raises(ValueError, match="no database for a study: .*dialects:clay"):
        open_study("clay://tablet")
    with pytest.raises(ValueError, match="no Python package for 'mysql.pymysql' databases"):
        open_study("mysql+pymysql://me:secret@host/name")


def test_a_database_that_fails_is_named_without_its_password(tmp_path, monkeypatch):
    from sqlalchemy.exc import OperationalError

    def fail(*_):
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr("bertsmith.training.finetuning.sweep._open", fail)
    message = r"^postgresql://me:\*\*\*@host/name: the database fails: .*gone"
    with pytest.raises(OSError, match=message):
        open_study("postgresql://me:secret@host/name")


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch, capsys):
    from bertsmith.cli.main import one_line

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'bertsmith") as refusal:
        open_study(tmp_path / "study.db")
    assert one_line(refusal.value) == "Optuna is not installed: pip install 'bertsmith[train]'"
