"""A sweep: what is tried, what wins, what a kill leaves, what is written."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bertsmith.cli.main import main
from bertsmith.training.finetuning.request import Request, check_flags, parse_seeds
from bertsmith.training.finetuning.search_space import PAPER_SWEEP, Search, parse_space
from bertsmith.training.finetuning.sweep import study_name, sweep
from bertsmith.training.finetuning.trainer import InitialModel, Trainer

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
    assert best == replace(
        toy.settings, learning_rate=1e-4, batch_size=16
    )  # of equally good ones the first
    assert [seed for _, seed, _ in tried] == [7] * 6
    assert [folder for *_, folder in tried] == [str(k) for k in range(1, 7)]
    assert record[0] == {"learning_rate": 1e-5, "batch_size": 16, "accuracy": 0.5}
    assert record[4] == {
        "learning_rate": 1e-3,
        "batch_size": 16,
        "failure": "the loss is not finite",
    }
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0]
        == "sweep 1/6: learning_rate 1e-05, batch_size 16: dev accuracy 0.5000 of 40 examples"
    )
    assert lines[5] == "sweep 6/6: learning_rate 0.001, batch_size 32: the loss is not finite"


def test_seeds_that_are_under_way_keep_their_setting(trainer, toy, tried, tmp_path):
    begun = {
        "learning_rate": 1e-5,
        "batch_size": 32,
        "epochs": 2,
    }  # another process has found better since
    best, _ = sweep(trainer, toy.settings, Search(SPACE), 1, tmp_path, begun=begun)
    assert best == replace(toy.settings, learning_rate=1e-5, batch_size=32)
    best, _ = sweep(
        trainer, toy.settings, Search(SPACE), 1, tmp_path, begun={**begun, "learning_rate": 7.0}
    )
    assert best.learning_rate == 1e-4  # a run of another search, which `finetune` refuses


def judged_by(metric, trainer):
    task = replace(trainer.model_task.task, metrics=(metric,))
    return replace(trainer, model_task=replace(trainer.model_task, task=task))


def test_less_is_better_where_it_is(trainer, toy, tmp_path, monkeypatch):
    def run(self, chosen, *_):
        return SimpleNamespace(evaluation=SimpleNamespace(metrics={"mse": chosen.learning_rate}))

    monkeypatch.setattr(Trainer, "run", run)
    best, _ = sweep(judged_by("mse", trainer), toy.settings, Search(SPACE), 1, tmp_path)
    assert best.learning_rate == 1e-5


def test_the_same_command_goes_on_after_a_kill(trainer, toy, tried, tmp_path, monkeypatch, capsys):
    whole, _ = sweep(trainer, toy.settings, Search(SPACE), 1, tmp_path / "whole")
    full_run, tried[:] = Trainer.run, []

    def killed(self, *args):
        if len(tried) == 3:
            raise KeyboardInterrupt
        return full_run(self, *args)

    monkeypatch.setattr(Trainer, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(trainer, toy.settings, Search(SPACE), 1, tmp_path / "sweep")
    monkeypatch.setattr(Trainer, "run", full_run)
    capsys.readouterr()
    best, record = sweep(trainer, toy.settings, Search(SPACE), 1, tmp_path / "sweep")
    assert len(tried) == 6 and len(record) == 6 and best == whole
    assert "sweep: 3 of 6 trials are finished already" in capsys.readouterr().err
    assert sweep(trainer, toy.settings, Search(SPACE), 1, tmp_path / "sweep") == (best, record)
    assert len(tried) == 6  # nothing was left to do


def test_a_search_where_all_diverges_says_so(trainer, toy, tried, tmp_path):
    with pytest.raises(ValueError, match="no trial came to its end: search lower rates"):
        sweep(trainer, toy.settings, Search({"learning_rate": (1e-3,)}), 1, tmp_path)


def test_a_study_is_known_by_what_it_searches(trainer, model_folder, toy, tmp_path):
    name = study_name(trainer, toy.settings, SPACE, 1)
    assert name.startswith("classify-") and name == study_name(trainer, toy.settings, SPACE, 1)
    same = replace(
        toy.settings, threads=2, learning_rate=0.5
    )  # a machine's, and one that is searched
    assert study_name(trainer, same, SPACE, 1) == name
    assert study_name(trainer, toy.settings, dict(reversed(SPACE.items())), 1) == name
    other_data = Trainer.prepare(
        InitialModel(model_folder),
        toy.task,
        toy.examples(96, 3),
        {"dev": toy.examples(40, 2)},
        same,
    )
    scratch = replace(trainer, start=InitialModel(model_folder, from_scratch=True))
    taught = replace(trainer, teacher=np.ones((96, 2), np.float32))
    others = [
        study_name(trainer, toy.settings, SPACE, 2),
        study_name(trainer, toy.settings, PAPER_SWEEP, 1),
        study_name(
            trainer, toy.settings, parse_space("learning_rate=1e-5..1e-3 batch_size=16|32"), 1
        ),
        study_name(trainer, replace(toy.settings, epochs=7), SPACE, 1),
        study_name(judged_by("macro_f1", trainer), toy.settings, SPACE, 1),
        study_name(other_data, toy.settings, SPACE, 1),
        study_name(scratch, toy.settings, SPACE, 1),
        study_name(taught, toy.settings, SPACE, 1),
        study_name(replace(taught, teacher=2 * taught.teacher), toy.settings, SPACE, 1),
    ]
    assert len({name, *others}) == 10


@pytest.fixture
def command(toy, model_folder, tmp_path):
    """A fine-tuning on files, but for what a test adds."""
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("train", 96), ("dev", 40)):
        examples = toy.examples(count, len(name))
        with (data / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows(
                (text, examples.label_names[label])
                for text, label in zip(examples.texts, examples.labels, strict=True)
            )
    words = f"finetune classify --model {model_folder} --data {data} --out {tmp_path / 'run'}"
    return [*words.split(), *["--max-length", "16", "--precision", "float32", "--threads", "1"]]


def test_the_command_searches_then_trains_all_seeds_at_the_best(command, tmp_path, capsys):
    space = "learning_rate=1e-6|3e-3 epochs=1|6"
    assert main([*command, "--batch-size", "16", "--sweep", space, "--seeds", "1,2"]) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert len(result["sweep"]) == 4 and set(result["seeds"]) == {"1", "2"}
    best = max(result["sweep"], key=lambda row: row["accuracy"])
    record = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert (
        (record["learning_rate"], record["epochs"])
        == (best["learning_rate"], best["epochs"])
        == (3e-3, 6)
    )
    assert record["batch_size"] == 16
    # the trial and the run of its seed are one training
    assert result["seeds"]["1"] == {name: best[name] for name in result["seeds"]["1"]}
    assert (tmp_path / "run/sweep/4/log.jsonl").exists()
    assert "sweep 4/4: learning_rate 0.003, epochs 6: dev accuracy" in capsys.readouterr().err


def test_an_interrupted_command_goes_on(command, tmp_path, capsys, monkeypatch):
    run, folders = Trainer.run, []

    def interrupted(self, settings, seed, folder, *args):
        folders.append(folder.name)
        if len(folders) == 2:
            raise KeyboardInterrupt
        return run(self, settings, seed, folder, *args)

    monkeypatch.setattr(Trainer, "run", interrupted)
    command += [
        "--sweep",
        "learning_rate=1e-4..1e-2",
        "--trials",
        "3",
        "--epochs",
        "1",
        "--max-retries",
        "0",
    ]
    assert main(command) == 130
    assert main(command) == 0
    assert folders == ["1", "2", "3", "4", "1"]  # the second was lost; the last is the run's seed
    assert len(json.loads((tmp_path / "run/result.json").read_text())["sweep"]) == 3
    assert "sweep: 1 of 3 trials are finished already" in (told := capsys.readouterr().err)
    assert "sweep 2/3: learning_rate" in told and "sweep 3/3: learning_rate" in told


def test_more_trials_leave_the_seeds_their_setting(command, tmp_path, monkeypatch):
    run, folders = Trainer.run, []

    def interrupted(self, settings, seed, folder, *args):
        folders.append(folder.name)
        if len(folders) == 4:
            raise KeyboardInterrupt
        return run(self, settings, seed, folder, *args)

    monkeypatch.setattr(Trainer, "run", interrupted)
    command += [
        "--sweep",
        "learning_rate=1e-6..1e-2",
        "--epochs",
        "2",
        "--max-retries",
        "0",
        "--seeds",
        "1,2",
    ]
    assert main([*command, "--trials", "2"]) == 130
    assert folders == ["1", "2", "1", "2"]  # the first seed has ended
    begun = json.loads((tmp_path / "run/run.json").read_text())["settings"]["learning_rate"]
    assert main([*command, "--trials", "8"]) == 0
    assert json.loads((tmp_path / "run/run.json").read_text())["settings"]["learning_rate"] == begun
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert len(result["sweep"]) == 8 and list(result["seeds"]) == ["1", "2"]
    best = max(result["sweep"], key=lambda trial: trial["accuracy"])
    assert best["learning_rate"] != begun  # or this would show nothing


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--sweep paper --learning-rate 1e-5",
            "--learning-rate: searched by --sweep; leave it out",
        ),
        ("--sweep learning_rate=1e-5..1e-4", "a range needs --trials"),
        ("--sweep ratte=1|2", "unknown setting 'ratte'"),
        ("--trials 3 --storage x.db", "--trials, --storage: only with --sweep"),
        ("--teacher-data x.txt --temperature 2", "--teacher-data, --temperature: only with --te"),
        ("--sweep distillation_weight=0|1", "--distillation-weight: only with --teacher"),
        (
            "--teacher t --teacher-data x --distillation-weight 0.5",
            "has no labels: leave --distillation-w",
        ),
        ("--teacher t --teacher-data x --sweep distillation_weight=0|1", "has no labels: leave"),
        (
            "--teacher t --focal-gamma 2",
            "--focal-gamma: of the labels, unused at --distillation-weight 1",
        ),
        (
            "--max-answer-length 9 --doc-stride 9",
            "--max-answer-length: without effect on a task of kind 'classify'",
        ),
        ("--doc-stride 9 --pool max", "--doc-stride, --pool: only with --long-texts windows"),
        (
            "--keep last --sweep early_stopping_patience=0|2",
            "--sweep: early_stopping_patience 2: early_stopping_patience keeps the",
        ),
        (
            "--from-scratch --max-retries 3",
            "--max-retries: without effect with --from-scratch: leave it",
        ),
        ("--from-scratch --reinit-layers 1", "--reinit-layers: without effect with --from-scratch"),
        ("--from-scratch --sweep reinit_layers=0|1", "--reinit-layers: without effect with"),
    ],
)
def test_flags_that_do_not_go_together(command, flags, message, capsys):
    assert main([*command, *flags.split()]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]


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
            "--sweep: early_stopping_patience 2, keep last: early_stopping_patience keeps the",
        ),
        ("reinit_layers=0|2", "--reinit-layers 2: the model has 1"),
        ("reinit_layers=0..3", "--reinit-layers 3: the model has 1"),
    ],
)
def test_what_cannot_be_is_refused_before_a_trial(trainer, toy, tried, tmp_path, space, message):
    with pytest.raises(ValueError, match=message):
        sweep(trainer, toy.settings, Search(parse_space(space), 9), 1, tmp_path / "sweep")
    assert tried == [] and not (tmp_path / "sweep").exists()


def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path, capsys):
    words = f"finetune classify --model {tmp_path}/no --data {tmp_path}/no --out {tmp_path}/run"
    assert main([*words.split(), "--sweep", "early_stopping_patience=0|2 keep=best|last"]) == 2
    assert (
        "--sweep: early_stopping_patience 2, keep last: early_stopping_patience keeps"
        in capsys.readouterr().err
    )


def test_what_says_nothing_may_stand_beside_from_scratch(tmp_path):
    words = {"task": "rte", "model": "m", "data": tmp_path, "out": tmp_path, "from_scratch": True}
    check_flags(Request(**words))  # restarts are 2 by default
    given = ("restarts", "reinit_layers")
    check_flags(Request(**words, max_retries=0, reinit_layers=0, given=given))


def test_a_temperature_is_refused_where_outputs_are_no_logits(command, capsys):
    flags = ["--teacher", "t", "--temperature", "2"]
    assert main(["finetune", "regress", *command[2:], *flags]) == 2
    error = capsys.readouterr().err
    assert "--temperature: without effect on a task of kind 'regress'" in error


def test_teachers_do_not_share_a_study(trainer, toy):
    """These have the same mean, but say the contrary."""
    yes, no = (np.tile(np.float32([row]), (96, 1)) for row in ([3, -1], [-1, 3]))
    near = yes * np.float32(1 + 1e-6)  # of another machine
    taught = [replace(trainer, teacher=outputs) for outputs in (yes, no, near)]
    names = [study_name(student, toy.settings, SPACE, 1) for student in taught]
    assert len({*names, study_name(trainer, toy.settings, SPACE, 1)}) == 4
    known = [
        study_name(replace(student, teacher_sha256="ab12"), toy.settings, SPACE, 1)
        for student in taught
    ]
    assert len(set(known)) == 1 and known[0] not in names
    assert study_name(replace(taught[0], teacher_sha256="cd34"), toy.settings, SPACE, 1) != known[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3..1", "--seeds 3..1: a range goes upwards, such as 1..3"),
        ("1,2,1", "--seeds 1,2,1: 1 is named twice: leave one out"),
        ("1..", "--seeds 1..: write 1,2,3 or 1..3"),
    ],
)
def test_seeds_that_are_refused(text, message):
    with pytest.raises(ValueError) as error:
        parse_seeds(text)
    assert str(error.value) == message
