"""A sweep: trials on one file, what wins, what a kill leaves, what is written."""

import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from sqlalchemy.exc import OperationalError

from bertsmith.cli.main import one_line
from bertsmith.tasks.task import own_task
from bertsmith.training.finetuning import sweep as sweeps
from bertsmith.training.finetuning.search_space import (
    PAPER_SWEEP,
    Range,
    Search,
    expand_grid,
    parse_space,
)
from bertsmith.training.finetuning.sweep import Study, study_name, sweep
from bertsmith.training.finetuning.trainer import InitialModel, Trainer

from ...tiny import cli

# --- the trials of a study: whole grids, draws, kills, several processes ------------------------

GRID = {"batch_size": (16, 32), "learning_rate": (5e-5, 3e-5), "epochs": (2, 3)}
FREE = {
    "learning_rate": Range(1e-5, 1e-3, is_whole=False, is_logarithmic=True),
    "batch_size": (8, 16, 32),
    "epochs": Range(2, 6, is_whole=True, is_logarithmic=False),
}


def open_study(store, space=GRID, trials=None, owner="me", seed=0, name="name", **more):
    return Study(str(store), name, space, trials, owner, seed, **more)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "study.db"


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


def test_a_grid_is_tried_whole_and_once(store):
    study = open_study(store)
    assert study.total == 8 and go(study) == expand_grid(GRID)
    assert study.next() is None
    assert [setting for setting, _ in study.tried()] == expand_grid(GRID)
    assert study.tried()[0][1] == {"quality": quality({"learning_rate": 5e-5})}


def test_a_finished_trial_is_not_made_again(store):
    first = go(open_study(store), 3)
    second = go(open_study(store))
    assert first + second == expand_grid(GRID)
    assert go(open_study(store)) == []


def test_a_setting_whose_process_was_killed_is_tried_again(store):
    study = open_study(store)
    go(study, 2)
    lost = study.next()  # never finished
    again = go(open_study(store))
    assert sorted(map(str, again)) == sorted(map(str, expand_grid(GRID)[2:]))
    assert again[-1] == lost.setting  # the others first


def test_two_processes_of_one_name_are_told_apart(store):
    first = open_study(store)
    attempt = first.next()
    open_study(store)  # takes itself for the first, started again
    with pytest.raises(ValueError, match="trial 1 was given up by another process with the same"):
        first.finish(attempt, 1.0, {})


def test_what_another_process_leaves_behind_is_made_at_the_end(store):
    other = open_study(store, owner="other")
    lost = other.next()  # perhaps it is still at it
    mine = go(open_study(store))
    assert len(mine) == 8 and mine[-1] == lost.setting
    other.finish(lost, 0.0, {})  # it was, and has done it for nothing
    assert other.next() is None and len(other.tried()) == 9


def test_the_last_setting_may_be_gone_when_the_number_is_drawn(store, monkeypatch):
    study = open_study(store)
    go(study)
    monkeypatch.setattr(study, "_is_done", lambda: False)  # as it was a moment before
    assert study.next() is None and len(study.tried()) == 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The settings of a search that nothing has stopped."""
    return go(open_study(tmp_path_factory.mktemp("whole") / "study.db", FREE, 14))


def test_draws_are_a_function_of_seed_number_and_figures(whole, tmp_path):
    parts = []
    while made := go(open_study(tmp_path / "parts.db", FREE, 14), 5):  # stopped twice
        parts += made
    assert parts == whole and len(whole) == 14
    assert go(open_study(tmp_path / "other.db", FREE, 14, seed=1), 3) != whole[:3]
    assert len({str(setting) for setting in whole}) == 14


def test_a_search_that_is_killed_in_a_trial_draws_as_one_that_is_not(whole, store):
    parts = []
    for trials in (3, 0, 9):  # twice at the same place
        study = open_study(store, FREE, 14)
        parts += go(study, trials)
        assert study.next().setting == whole[len(parts)]  # never finished
    parts += go(open_study(store, FREE, 14))
    assert parts == whole


def test_draws_keep_to_the_space_and_move_to_where_it_is_good(store):
    made = go(open_study(store, FREE, 40))
    assert all(1e-5 <= setting["learning_rate"] <= 1e-3 for setting in made)
    assert all(setting["batch_size"] in (8, 16, 32) for setting in made)
    assert all(setting["epochs"] in range(2, 7) for setting in made)
    assert {type(setting["epochs"]) for setting in made} == {int}
    # logarithmic: uniform draws of 10 would put 1 in 10 below 1e-4; the rest follow what is good
    assert sum(setting["learning_rate"] < 1e-4 for setting in made[:10]) >= 2
    late = [abs(quality(setting)) for setting in made[20:]]
    assert sum(late) / len(late) < 0.35  # uniform: 0.5


@pytest.mark.parametrize("less_is_better", [False, True])
def test_a_trial_that_failed_counts_as_the_worst(store, less_is_better):
    study, failure = open_study(store, less_is_better=less_is_better), {"failure": "not finite"}
    while attempt := study.next():
        study.finish(attempt, *((1.0, {}) if attempt.number > 1 else (None, failure)))
    assert len(study.tried()) == 8 and study.tried()[0][1] == failure


def test_studies_of_one_file_do_not_mix(store):
    go(open_study(store, name="one"), 3)
    assert open_study(store, name="two").tried() == []


def make_trials(store, trials, owner):
    """How many trials a process has made, when there are none left."""
    study, made = open_study(store, trials=trials or None, owner=owner), 0
    while attempt := study.next():
        time.sleep(0.05)
        study.finish(attempt, attempt.setting["learning_rate"], {"number": attempt.number})
        made += 1
    return made


@pytest.mark.parametrize("trials", [0, 12])
def test_two_processes_share_a_study(tmp_path, trials):
    """Started together on a file that is not there yet."""
    store, total = [tmp_path / "shared.db"] * 2, trials or 8
    with ProcessPoolExecutor(2, get_context("fork")) as workers:  # spared the slow imports
        made = sum(workers.map(make_trials, store, [trials] * 2, "ab"))
    # the last may be made by both: what one of them has in hand does not count yet
    assert total <= made <= total + 1
    tried = open_study(tmp_path / "shared.db").tried()
    assert len(tried) == made
    assert sorted(figures["number"] for _, figures in tried) == list(range(1, len(tried) + 1))
    if not trials:
        assert all(setting in [s for s, _ in tried] for setting in expand_grid(GRID))
        first = [str(setting) for setting, _ in tried[:8]]
        assert sorted(first) == sorted(map(str, expand_grid(GRID)))  # each once, till then


def test_a_new_file_that_another_process_is_making(store, monkeypatch):
    real, calls = optuna.create_study, []

    def quarrelling(*args, **kwargs):
        calls.append(args)
        if len(calls) < 3:
            raise OperationalError("CREATE TABLE", {}, Exception("table exists already"))
        return real(*args, **kwargs)

    monkeypatch.setattr(optuna, "create_study", quarrelling)
    monkeypatch.setattr(sweeps.time, "sleep", lambda _: None)
    assert len(go(open_study(store))) == 8 and len(calls) == 3


@pytest.mark.parametrize(
    ("store", "settings", "message"),
    [
        ("study.db", {"space": FREE}, "a range needs `trials`"),
        ("notes.txt", {}, "notes.txt.*: no database for a study: .*not a database"),
        (".", {}, "the database fails: .*unable to open"),  # a folder
        ("clay://tablet", {}, "no database for a study: .*dialects:clay"),
        ("mysql+pymysql://me:it@host/name", {}, "no Python package for 'mysql.pymysql' databases"),
    ],
)
def test_a_study_that_cannot_be_is_refused(tmp_path, monkeypatch, store, settings, message):
    monkeypatch.setattr(sweeps.time, "sleep", lambda _: None)
    (tmp_path / "notes.txt").write_text("no database at all, but a text of some length\n" * 50)
    place = store if "://" in store else tmp_path / store
    with pytest.raises(OSError if store == "." else ValueError, match=message):
        open_study(place, **settings)


def test_a_database_that_fails_is_named_without_its_password(monkeypatch):
    def fail(*_):
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(sweeps, "_open", fail)
    message = r"^postgresql://me:\*\*\*@host/name: the database fails: .*gone"
    with pytest.raises(OSError, match=message):
        open_study("postgresql://me:secret@host/name")


def test_without_optuna_the_extra_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'bertsmith") as refusal:
        open_study(store)
    assert one_line(refusal.value) == "a sweep needs Optuna: pip install 'bertsmith[train]'"


# --- the trainings of a sweep ------------------------------------------------------------------

SPACE = parse_space("learning_rate=1e-5|1e-4|1e-3 batch_size=16|32")


@pytest.fixture
def tried(trainer, monkeypatch):
    """The settings of trainings that are not made; the accuracy is 0.9 at a rate of 1e-4."""
    settings = []

    def run(self, chosen, seed, folder, label="", peak=0.0):
        settings.append((chosen, seed, folder.name))
        accuracy = 0.9 if chosen.learning_rate == 1e-4 else 0.5
        if chosen.learning_rate == 1e-3:
            raise FloatingPointError("the loss is not finite")
        return SimpleNamespace(evaluation=SimpleNamespace(metrics={"accuracy": accuracy}))

    monkeypatch.setattr(Trainer, "run", run)
    return settings


def test_the_best_on_dev_wins_and_what_diverged_is_told(trainer, toy, tried, tmp_path, capsys):
    best, record = sweep(trainer, toy.settings, Search(SPACE), 7, tmp_path / "sweep")
    # of equally good ones the first
    assert best == replace(toy.settings, learning_rate=1e-4, batch_size=16)
    assert [seed for _, seed, _ in tried] == [7] * 6
    assert [folder for *_, folder in tried] == [str(k) for k in range(1, 7)]
    assert record[0] == {"learning_rate": 1e-5, "batch_size": 16, "accuracy": 0.5}
    failure = "the loss is not finite"
    assert record[4] == {"learning_rate": 1e-3, "batch_size": 16, "failure": failure}
    lines, told = capsys.readouterr().err.splitlines(), "dev accuracy 0.5000 of 40 examples"
    assert lines[0] == f"sweep 1/6: learning_rate 1e-05, batch_size 16: {told}"
    assert lines[5] == f"sweep 6/6: learning_rate 0.001, batch_size 32: {failure}"


@pytest.mark.parametrize(("kind", "dtype"), [("classify", np.int64), ("regress", np.float32)])
def test_a_trial_whose_answers_are_not_finite_has_failed(toy, tmp_path, kind, dtype):
    made = [toy.examples(count, seed=count) for count in (48, 24)]
    names = made[0].label_names if kind == "classify" else ()
    data = [replace(one, labels=one.labels.astype(dtype), label_names=names) for one in made]
    trainer = toy.prepare(*data, task=own_task(kind, "text", None, "label"))
    # a single step, of which the loss and its gradient are finite, and the weights after it too
    settings = replace(toy.settings, epochs=1, batch_size=48, warmup_ratio=0.0)
    space = Search({"learning_rate": (1e-4, 1e30)})
    best, (sound, failed) = sweep(trainer, settings, space, 1, tmp_path)
    assert best.learning_rate == 1e-4 and trainer.metric in sound
    assert failed["failure"] == "step 1: answers not finite"


def test_seeds_that_are_under_way_keep_their_setting(trainer, toy, tried, tmp_path):
    def best(space=SPACE, **begun):
        search, begun = Search(space), begun or None
        return sweep(trainer, toy.settings, search, 1, tmp_path / "sweep", begun=begun)[0]

    # of another search, or of none: refused before the first trial, not after the last
    other = f"^{tmp_path} holds an unfinished run of settings that this search has not tried"
    with pytest.raises(ValueError, match=other):
        best(learning_rate=1e-5, batch_size=32, epochs=2)
    assert tried == [] and best().learning_rate == 1e-4
    # another process has found better since
    found = best(learning_rate=1e-5, batch_size=32, epochs=2)
    assert found == replace(toy.settings, learning_rate=1e-5, batch_size=32)
    for begun, space in ((7.0, SPACE), (1e-5, {"learning_rate": (1e-5, 1e-2)})):
        with pytest.raises(ValueError, match=other):
            best(space, learning_rate=begun, batch_size=32, epochs=2)
    assert len(tried) == 6


def judged_by(metric, trainer):
    task = replace(trainer.model_task.task, metrics=(metric,))
    return replace(trainer, model_task=replace(trainer.model_task, task=task))


def test_less_is_better_where_it_is(trainer, toy, tmp_path, monkeypatch):
    def run(self, chosen, *_):
        return SimpleNamespace(evaluation=SimpleNamespace(metrics={"mse": chosen.learning_rate}))

    monkeypatch.setattr(Trainer, "run", run)
    best, _ = sweep(judged_by("mse", trainer), toy.settings, Search(SPACE), 1, tmp_path)
    assert best.learning_rate == 1e-5


@pytest.fixture
def interrupted(before_training):
    """Interrupt at that training of all; the folders of the trainings are in the list returned."""

    def patch(training):
        folders = []

        def interrupt(_settings, _seed, folder):
            folders.append(folder.name)
            if len(folders) == training:
                raise KeyboardInterrupt

        before_training(interrupt)
        return folders

    return patch


def test_the_same_command_goes_on_after_a_kill(trainer, toy, tried, interrupted, tmp_path, capsys):
    def search(folder):
        return sweep(trainer, toy.settings, Search(SPACE), 1, tmp_path / folder)

    whole, _ = search("whole")
    tried.clear()
    interrupted(4)
    with pytest.raises(KeyboardInterrupt):
        search("sweep")
    capsys.readouterr()
    best, record = search("sweep")
    assert len(tried) == 6 and len(record) == 6 and best == whole
    assert "sweep: 3 of 6 trials are finished already" in capsys.readouterr().err
    assert search("sweep") == (best, record)
    assert len(tried) == 6  # nothing was left to do


def test_a_search_where_all_diverges_says_so(trainer, toy, tried, tmp_path):
    with pytest.raises(ValueError, match="no trial came to its end: search lower rates"):
        sweep(trainer, toy.settings, Search({"learning_rate": (1e-3,)}), 1, tmp_path)


def test_a_study_is_known_by_what_it_searches(trainer, model_folder, toy):
    def name(trained=trainer, settings=toy.settings, space=SPACE, seed=1):
        return study_name(trained, settings, space, seed)

    assert name().startswith("classify-") and name() == name()
    # a machine's setting, and one that is searched
    assert name(settings=replace(toy.settings, threads=2, learning_rate=0.5)) == name()
    assert name(space=dict(reversed(SPACE.items()))) == name()
    taught = replace(trainer, teacher=np.ones((96, 2), np.float32))
    others = [
        name(seed=2),
        name(space=PAPER_SWEEP),
        name(space=parse_space("learning_rate=1e-5..1e-3 batch_size=16|32")),
        name(settings=replace(toy.settings, epochs=7)),
        name(judged_by("macro_f1", trainer)),
        name(toy.prepare(toy.examples(96, 3))),
        name(replace(trainer, start=InitialModel(model_folder, from_scratch=True))),
        name(taught),
        name(replace(taught, teacher=2 * taught.teacher)),
    ]
    assert len({name(), *others}) == 10


def test_teachers_do_not_share_a_study(trainer, toy):
    """These have the same mean, but say the contrary."""
    yes, no = (np.tile(np.float32([row]), (96, 1)) for row in ([3, -1], [-1, 3]))
    near = yes * np.float32(1 + 1e-6)  # of another machine

    def names(**teacher):
        taught = [replace(trainer, teacher=outputs, **teacher) for outputs in (yes, no, near)]
        return [study_name(student, toy.settings, SPACE, 1) for student in taught]

    without = study_name(trainer, toy.settings, SPACE, 1)
    assert len({*names(), without}) == 4
    known = names(teacher_sha256="ab12")
    assert len(set(known)) == 1 and known[0] not in names()
    assert names(teacher_sha256="cd34")[0] != known[0]


def test_a_sweep_can_search_what_a_model_is_made_with(trainer, toy, tmp_path):
    """Dropout and fresh layers are the model's, not the optimizer's."""
    space = parse_space("reinit_layers=0|1 dropout=0|0.3")
    _, record = sweep(trainer, replace(toy.settings, epochs=1), Search(space), 1, tmp_path)
    assert len(record) == 4


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            "early_stopping_patience=0|2 keep=best|last",
            "`sweep`: early_stopping_patience 2, keep last: `early_stopping_patience` keeps the",
        ),
        ("reinit_layers=0|2", "`reinit_layers=2`: the model has 1"),
        ("reinit_layers=0..3", "`reinit_layers=3`: the model has 1"),
        ("lm_weight=0|0.5", "`sweep`: lm_weight 0.5: `lm_weight=0.5`: .* is no GPT: leave"),
    ],
)
def test_what_cannot_be_is_refused_before_a_trial(trainer, toy, tried, tmp_path, space, message):
    with pytest.raises(ValueError, match=message):
        sweep(trainer, toy.settings, Search(parse_space(space), 9), 1, tmp_path / "sweep")
    assert tried == [] and not (tmp_path / "sweep").exists()


# --- by the command ----------------------------------------------------------------------------


ONE_TRY = ("--max-retries", 0)


@pytest.fixture
def command(toy_files, model_folder, tmp_path):
    """A fine-tuning on files, but for what a test adds."""
    words = f"finetune classify --model {model_folder} --data {toy_files} --out {tmp_path / 'run'}"
    return f"{words} --max-length 16 --precision float32 --threads 1".split()


def read(tmp_path, name):
    return json.loads((tmp_path / "run" / name).read_text())


def test_the_command_searches_then_trains_all_seeds_at_the_best(command, tmp_path):
    space = "learning_rate=1e-6|3e-3 epochs=1|6"
    ran = cli(*command, "--batch-size", 16, "--sweep", space, "--seeds", "1,2")
    assert ran.code == 0
    result = read(tmp_path, "result.json")
    assert len(result["sweep"]) == 4 and set(result["seeds"]) == {"1", "2"}
    best = max(result["sweep"], key=lambda row: row["accuracy"])
    record = read(tmp_path, "run.json")["settings"]
    chosen = {"learning_rate": 3e-3, "epochs": 6}
    assert best.items() >= chosen.items() and record.items() >= chosen.items()
    assert record["batch_size"] == 16
    # the trial and the run of its seed are one training
    assert result["seeds"]["1"] == {name: best[name] for name in result["seeds"]["1"]}
    assert (tmp_path / "run/sweep/4/log.jsonl").exists()
    assert "sweep 4/4: learning_rate 0.003, epochs 6: dev accuracy" in ran.err


def test_an_interrupted_command_goes_on(command, tmp_path, interrupted):
    folders = interrupted(2)
    command += ["--sweep", "learning_rate=1e-4..1e-2", "--epochs", 1, *ONE_TRY, "--trials", 3]
    assert cli(*command).code == 130
    again = cli(*command)
    assert again.code == 0
    assert folders == ["1", "2", "3", "4", "1"]  # the second was lost; the last is the run's seed
    assert len(read(tmp_path, "result.json")["sweep"]) == 3
    for told in ("sweep: 1 of 3 trials are finished already", "sweep 2/3: learning_rate",
                 "sweep 3/3: learning_rate"):  # fmt: skip
        assert told in again.err


def test_more_trials_leave_the_seeds_their_setting(command, tmp_path, interrupted):
    folders = interrupted(4)
    command += ["--sweep", "learning_rate=1e-6..1e-2", "--epochs", 2, *ONE_TRY, "--seeds", "1,2"]
    assert cli(*command, "--trials", 2).code == 130
    assert folders == ["1", "2", "1", "2"]  # the first seed has ended
    begun = read(tmp_path, "run.json")["settings"]["learning_rate"]
    assert cli(*command, "--trials", 8).code == 0
    assert read(tmp_path, "run.json")["settings"]["learning_rate"] == begun
    result = read(tmp_path, "result.json")
    assert len(result["sweep"]) == 8 and list(result["seeds"]) == ["1", "2"]
    best = max(result["sweep"], key=lambda trial: trial["accuracy"])
    assert best["learning_rate"] != begun  # or this would show nothing
