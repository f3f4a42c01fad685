"""Question answering from the command line: one model, several together, rows of a table."""

import csv
import json

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import main
from bertsmith.inference.predictor import load
from bertsmith.model.config import config_for
from bertsmith.model.heads import SpanPredictor
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

WORDS = ["ann", "met", "bob", "in", "rome", "who", "where", "left"]
CONTEXT = "Ann met Bob in Rome"
LAYOUT = {"max_length": 8, "doc_stride": 2}  # several windows


@pytest.fixture
def runs(tmp_path):
    """Three models of random weights; the last was not tuned for questions without an answer."""
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, *WORDS]))
    names = []
    for seed, threshold in ((1, 0.5), (2, -1.5), (3, None)):
        model = SpanPredictor(config_for("1x64", len(tokenizer.vocabulary), max_positions=16))
        model = initialize(model, 0.5, torch.Generator().manual_seed(seed))
        decision = {} if threshold is None else {"null_threshold": threshold}
        extra = {"task": "answer", "kind": "answer", "thresholds": decision, **LAYOUT}
        save_model(model, tokenizer, tmp_path / f"run{seed}", extra_config=extra)
        names.append(str(tmp_path / f"run{seed}"))
    return names


@pytest.fixture
def questions(tmp_path):
    qas = [{"id": f"q{k}", "question": text} for k, text in enumerate(["who left", "where"])]
    path = tmp_path / "new.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]}))
    return str(path)


def test_runs_answer_together_by_their_mean_logits(runs, questions, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["predict", runs[0], questions, "--out", str(out), "--ensemble", runs[1]]) == 0
    assert f"2 answers written to {out}" in capsys.readouterr().out

    models = [load(run) for run in runs[:2]]
    kind, model_task = models[0].task_type, models[0].model_task
    data = kind.read_input(questions, model_task)
    rows = kind.featurize(models[0].tokenizer, data, model_task.encoding, ())
    assert len(rows) > 2
    outputs = np.mean([model.outputs(rows) for model in models], axis=0)
    expected = kind.answers(outputs, rows, data, model_task).found
    odds = json.loads((tmp_path / "out.null_odds.json").read_text())
    assert odds == {answer.id: pytest.approx(answer.null_odds) for answer in expected}
    texts = {answer.id: answer.chosen(-0.5).text for answer in expected}  # the mean threshold
    assert json.loads(out.read_text()) == texts

    bad = ["predict", runs[0], questions, "--out", str(out), "--ensemble", runs[2]]
    assert main(bad) == 2
    assert "has another tuned thresholds than" in capsys.readouterr().err


def test_rows_of_a_table_keep_their_columns(runs, tmp_path, capsys):
    table, out = tmp_path / "new.csv", tmp_path / "out.csv"
    table.write_text(f"ask,about\nwho left,{CONTEXT}\nwhere,{CONTEXT}\n")
    columns = ["--text", "ask", "--text-pair", "about"]
    assert main(["predict", runs[2], str(table), "--out", str(out), *columns]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ask"] for row in rows] == ["who left", "where"]
    for row in rows:
        begin = int(row["answer_start"])
        assert row["answer"] == CONTEXT[begin : begin + len(row["answer"])] != ""
        assert 0 < float(row["probability"]) <= 1

    assert main(["predict", runs[2], str(table), "--out", str(out), "--text", "ask"]) == 2
    assert "name the column of the contexts with --text-pair" in capsys.readouterr().err


def test_figures_of_questions_with_and_without_an_answer(runs, tmp_path, capsys):
    table = tmp_path / "dev.csv"
    table.write_text(f"ask,about,right\nwho left,{CONTEXT},Bob\nwhere,{CONTEXT},\n")
    columns = ["--text", "ask", "--text-pair", "about", "--label", "right"]
    assert main(["evaluate", runs[0], "--data", str(table), *columns, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert list(metrics)[:2] == ["answer_f1", "exact_match"]
    parts = metrics["has_answer_f1"] + metrics["no_answer_exact_match"]
    assert metrics["answer_f1"] == pytest.approx(parts / 2)
