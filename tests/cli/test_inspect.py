"""`bertsmith compare`: the table, the JSON object, refusals in one line."""

import json

import pytest

from bertsmith.cli.inspect import show
from bertsmith.cli.main import main


@pytest.fixture
def run(tmp_path):
    def make(name, right, seeds, task="classify"):
        folder = tmp_path / name
        folder.mkdir()
        items = [
            {"text": f"t{k}", "label": "a", "predicted": "a" if k < right else "b"}
            for k in range(100)
        ]
        metrics = [{"accuracy": value} for value in seeds]
        files = {
            "run.json": {"kind": "finetune", "settings": {}},
            "log.jsonl": {"event": "train"},
            "result.json": {
                "metrics": metrics[0],
                "main_metric": "accuracy",
                "seeds": dict(enumerate(metrics)),
            },
            "dev_scores.json": {"task": task, "kind": "classify", "examples": items},
        }
        for file, value in files.items():
            (folder / file).write_text(json.dumps(value))
        return str(folder)

    return make


def test_table(run, capsys):
    first, second = run("x", 60, [0.5, 0.6]), run("y", 65, [0.75, 0.75])
    assert main(["compare", first, second, "--resamples", "1000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("classify, 100 dev examples, 1,000 resamples\n")
    assert "accuracy            0.6000    0.6500     +0.0500  +0.0" in out
    assert "the second run answers 5 examples better, 95 alike, 0 worse" in out
    assert "accuracy            0.5500    0.7500     +0.2000  2 seeds: no interval\n" in out


def test_from_three_seeds_on_there_is_an_interval(run, capsys):
    first, second = run("x", 60, [0.5, 0.6, 0.7]), run("y", 65, [0.75, 0.75, 0.75])
    assert main(["compare", first, second, "--resamples", "100"]) == 0
    # t(2) = 4.303 times 0.1 / sqrt(3)
    assert "0.6000    0.7500     +0.1500  -0.0984 to +0.3984\n" in capsys.readouterr().out


def test_json_is_the_same_every_time(run, capsys):
    first, second = run("x", 60, [0.6]), run("y", 65, [0.65])
    results = []
    for _ in range(2):
        command = ["compare", first, second, "--json", "--resamples", "500"]
        assert main(command) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1] and results[0]["seed"] == 0
    assert results[0]["metrics"]["accuracy"]["difference"] == pytest.approx(0.05)
    assert results[0]["seeds"] == {}


def test_refusal_is_one_line(run, capsys):
    first, second = run("x", 60, [0.6]), run("y", 65, [0.65], task="sst2")
    assert main(["compare", first, second]) == 2
    error = capsys.readouterr().err
    assert "different tasks, classify and sst2" in error and error.count("\n") == 1
    assert main(["compare", first, f"{first}-gone"]) == 2
    assert "no such run directory" in capsys.readouterr().err


def test_small_errors_are_not_shown_as_0(capsys):
    mse = {"first": 4e-12, "second": 1.5e-12, "interval": [-2.75e-12, -2.25e-12], "p": 0.01}
    rho = {"first": 0.5, "second": 0.5 + 1e-16, "interval": [-0.25, 0.25], "p": 1.0}
    figures = {"pearson": rho, "mse": mse}
    metrics = {
        name: figure | {"difference": figure["second"] - figure["first"]}
        for name, figure in figures.items()
    }
    counts = {"better": 3, "equal": 0, "worse": 1}
    show({"task": "t", "examples": 4, "resamples": 100, "metrics": metrics, "seeds": {}} | counts)
    head, first, second = capsys.readouterr().out.splitlines()[2:5]
    shown = [" ".join(line.split()) for line in (first, second)]
    assert shown[0] == "pearson 0.5000 0.5000 +0.0000 -0.2500 to +0.2500 1.0000"
    assert shown[1] == "mse 4e-12 1.5e-12 -2.5e-12 -2.75e-12 to -2.25e-12 0.0100"
    assert head.index(" p") == first.index(" 1.0000") == second.index(" 0.0100")


def test_less_error_is_said_to_be_better(capsys):
    mse = {"first": 0.5, "second": 0.25, "difference": -0.25, "interval": [-0.4, -0.1], "p": 0.01}
    counts = {"better": 3, "equal": 0, "worse": 1}
    metrics = {"mse": mse | {"less_is_better": True}}
    show({"task": "t", "examples": 4, "resamples": 100, "metrics": metrics, "seeds": {}} | counts)
    assert "-0.4000 to -0.1000   0.0100  (less is better)" in capsys.readouterr().out
