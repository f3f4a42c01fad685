"""`bertsmith compare`: the table, the JSON object, refusals in one line."""

import json
import re

import pytest

from bertsmith.cli.inspect import show

from ..tiny import bertsmith, cli, refused, write


@pytest.fixture
def run(tmp_path):
    def make(name, right, seeds, task="classify"):
        predicted = ["a" if k < right else "b" for k in range(100)]
        items = [{"text": f"t{k}", "label": "a", "predicted": p} for k, p in enumerate(predicted)]
        metrics = [{"accuracy": value} for value in seeds]
        result = {
            "metrics": metrics[0],
            "main_metric": "accuracy",
            "seeds": dict(enumerate(metrics)),
        }
        files = {
            "run.json": {"kind": "finetune", "settings": {}},
            "log.jsonl": {"event": "train"},
            "result.json": result,
            "dev_scores.json": {"task": task, "kind": "classify", "examples": items},
        }
        for file, value in files.items():
            write(tmp_path / name / file, json.dumps(value))
        return tmp_path / name

    return make


def test_table(run):
    first, second = run("x", 60, [0.5, 0.6]), run("y", 65, [0.75, 0.75])
    out = bertsmith("compare", first, second, "--resamples", 1000)
    assert out.startswith("classify, 100 dev examples, 1,000 resamples\n")
    assert "accuracy            0.6000    0.6500     +0.0500  +0.0" in out
    assert "the second run answers 5 examples better, 95 alike, 0 worse" in out
    assert "accuracy            0.5500    0.7500     +0.2000  2 seeds: no interval\n" in out


def test_from_three_seeds_on_there_is_an_interval(run):
    first, second = run("x", 60, [0.5, 0.6, 0.7]), run("y", 65, [0.75, 0.75, 0.75])
    out = bertsmith("compare", first, second, "--resamples", 100)
    # t(2) = 4.303 times 0.1 / sqrt(3)
    assert "0.6000    0.7500     +0.1500  -0.0984 to +0.3984\n" in out


def test_json_is_the_same_every_time(run):
    command = ("compare", run("x", 60, [0.6]), run("y", 65, [0.65]), "--json", "--resamples", 500)
    result, again = (json.loads(bertsmith(*command)) for _ in range(2))
    assert result == again and result["seed"] == 0 and result["seeds"] == {}
    assert result["metrics"]["accuracy"]["difference"] == pytest.approx(0.05)


def test_refusals(run):
    first, second = run("x", 60, [0.6]), run("y", 65, [0.65], task="sst2")
    assert "different tasks, classify and sst2" in refused("compare", first, second)
    said = refused("compare", first, f"{first}-gone")
    assert f"no such run directory (did you mean '{first.name}'?): give a folder" in said


def shown(capsys, **metrics):
    """The lines of the table of some figures."""
    for figure in metrics.values():
        figure["difference"] = figure["second"] - figure["first"]
    counts = {"better": 3, "equal": 0, "worse": 1}
    show({"task": "t", "examples": 4, "resamples": 100, "metrics": metrics, "seeds": {}} | counts)
    return capsys.readouterr().out.splitlines()[2:]


def test_small_errors_are_not_shown_as_0(capsys):
    mse = {"first": 4e-12, "second": 1.5e-12, "interval": [-2.75e-12, -2.25e-12], "p": 0.01}
    rho = {"first": 0.5, "second": 0.5 + 1e-16, "interval": [-0.25, 0.25], "p": 1.0}
    head, first, second = shown(capsys, pearson=rho, mse=mse)[:3]
    assert " ".join(first.split()) == "pearson 0.5000 0.5000 +0.0000 -0.2500 to +0.2500 1.0000"
    assert " ".join(second.split()) == "mse 4e-12 1.5e-12 -2.5e-12 -2.75e-12 to -2.25e-12 0.0100"
    assert head.index(" p") == first.index(" 1.0000") == second.index(" 0.0100")


def test_less_error_is_said_to_be_better(capsys):
    mse = {
        "first": 0.5,
        "second": 0.25,
        "interval": [-0.4, -0.1],
        "p": 0.01,
        "less_is_better": True,
    }
    line = shown(capsys, mse=mse)[1]
    assert "-0.4000 to -0.1000   0.0100  (less is better)" in line


def test_doctor_warms_what_answers_need():
    ran = cli("doctor", "--warm")
    assert ran.code == 0 and re.match(r"compiled and kept: float32 \d+\.\d s", ran.out)
    assert json.loads(bertsmith("doctor", "--warm", "--json"))["seconds"]["float32"] > 0
