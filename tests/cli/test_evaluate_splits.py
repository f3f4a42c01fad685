"""`bertsmith evaluate` on a data set with two dev sets, and the task that a run remembers."""

import json

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.main import main
from bertsmith.inference.model_task import read_model_task
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.task import find_task, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

HEADER = "index\tsentence1\tsentence2\tgold_label\n"
MATCHED = "0\ta\tb\tneutral\n1\tb\ta\tentailment\n2\tb\tb\tcontradiction\n"
MISMATCHED = "0\tb\ta\tneutral\n"


@pytest.fixture
def run(tmp_path):
    config = ModelConfig(
        vocab_size=7, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32
    )
    model = initialize(SequenceClassifier(config, 3), 0.7, torch.Generator().manual_seed(5))
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, "a", "b"]))
    labels = find_task("mnli").labels
    save_model(model, tokenizer, tmp_path / "run", label_names=labels)
    settings = {"task": "mnli"}
    RunFolder(tmp_path / "run").write_settings({"kind": "finetune", "settings": settings})
    return tmp_path / "run"


def test_mnli_is_scored_on_both_dev_sets(capsys, tmp_path, run):
    data = tmp_path / "MNLI"
    data.mkdir()
    results = {}
    for split, name, rows in (
        ("dev", "dev_matched.tsv", MATCHED),
        ("dev_mismatched", "dev_mismatched.tsv", MISMATCHED),
    ):
        (data / name).write_text(HEADER + rows)
        assert main(["evaluate", str(run), "--data", str(data / name), "--json"]) == 0
        results[split] = json.loads(capsys.readouterr().out)
        assert "splits" not in results[split]
    assert main(["evaluate", str(run), "--data", str(data), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both.pop("splits") == {split: one["metrics"] for split, one in results.items()}
    assert both == results["dev"]
    assert main(["evaluate", str(run), "--data", str(data)]) == 0
    accuracy = results["dev_mismatched"]["metrics"]["accuracy"]
    assert f"dev_mismatched: accuracy {accuracy:.4f}\n" in capsys.readouterr().out


def described(folder, kind, **settings):
    """A model whose run.json and config.json say such a task; what the head is does not matter."""
    config = ModelConfig(
        vocab_size=7, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32
    )
    model = initialize(SequenceClassifier(config, 2), 0.7, torch.Generator().manual_seed(5))
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, "a", "b"]))
    save_model(model, tokenizer, folder, extra_config={"kind": kind})
    RunFolder(folder).write_settings({"kind": "finetune", "settings": {"task": kind} | settings})
    return folder


def test_a_run_remembers_its_task(tmp_path, run):
    assert read_model_task(run).task == find_task("mnli")
    assert read_model_task(run, label="label").task.label == "label"
    choice = {"text": "q", "label": "a", "options": ["x", "y"], "separator": ","}
    task = read_model_task(described(tmp_path / "own", "choice", **choice)).task
    assert task == own_task("choice", "q", None, "a", options=("x", "y"))
    sets = {"text": "t", "label": "tags", "separator": "|"}
    task = read_model_task(described(tmp_path / "sets", "multilabel", **sets)).task
    assert task == own_task("multilabel", "t", None, "tags", separator="|")


def test_a_run_remembers_the_metric_it_was_made_for(tmp_path, run):
    RunFolder(run).write_settings(
        {"kind": "finetune", "settings": {"task": "mnli", "metrics": ["macro_f1", "accuracy"]}}
    )
    assert read_model_task(run).task.metrics == ("macro_f1", "accuracy")
