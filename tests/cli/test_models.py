"""`bertsmith extend-positions`, and that pre-training goes on from what it writes."""

import json
import random

import pytest
import torch

from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import main
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.inference.predictor import load
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "mat", "."]
TOKENIZER = Tokenizer(Vocabulary([*SPECIAL, *WORDS]))


@pytest.fixture
def model(tmp_path):
    config = ModelConfig(len(TOKENIZER.vocabulary), 16, 1, 2, 32, max_positions=32)
    network = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    save_model(network, TOKENIZER, tmp_path / "model")
    return tmp_path / "model"


def run(*words) -> int:
    return main([str(word) for word in words])


def test_pre_training_goes_on_with_longer_rows(model, tmp_path, capsys):
    draw = random.Random(1)
    lines = [" ".join([*draw.choices(WORDS[:-1], k=6), "."]) for _ in range(480)]
    documents = [Document("made", n, lines[n::12]) for n in range(12)]
    store, new = tmp_path / "store", tmp_path / "new"
    build_store([], TOKENIZER, store, BuildSettings(held_out=0.5), documents=documents)
    budget = [
        "--max-length",
        48,
        "--steps",
        2,
        "--batch-size",
        4,
        "--warmup-steps",
        1,
        "--threads",
        1,
    ]
    pretrain = ["pretrain", "--corpus", store, "--out", tmp_path / "run", *budget]
    assert run(*pretrain, "--model", model) == 2
    assert "`bertsmith extend-positions`" in capsys.readouterr().err
    assert run("extend-positions", model, "--positions", 48, "--out", new) == 0
    assert f"{new}: 48 positions, 32 before; train it on with" in capsys.readouterr().out
    assert run(*pretrain, "--model", new) == 0
    assert read_config(tmp_path / "run").max_positions == 48
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 2 and result["held_out"]["mlm_loss"] > 0


def test_a_task_whose_texts_are_longer_than_512(tmp_path, capsys):
    config = ModelConfig(len(TOKENIZER.vocabulary), 16, 1, 2, 32, max_positions=128)
    network = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    save_model(network, TOKENIZER, tmp_path / "model")
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=1000)) for _ in range(8)]
    rows = "".join(f"{text},{k % 2}\n" for k, text in enumerate(texts))
    (tmp_path / "long.csv").write_text("text,label\n" + rows)
    options = ["--epochs", 1, "--batch-size", 4, "--threads", 1, "--max-retries", 0]
    train = ["finetune", "classify", "--data", tmp_path / "long.csv", *options]
    train += ["--out", tmp_path / "run", "--max-length", 1024]
    assert run(*train, "--model", tmp_path / "model") == 2
    assert "--max-length 1024: the model knows 128 positions" in capsys.readouterr().err
    new = tmp_path / "new"
    assert run("extend-positions", tmp_path / "model", "--positions", 1024, "--out", new) == 0
    assert run(*train, "--model", new) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["cut_examples"] == 0
    predictor = load(tmp_path / "run")
    text = " ".join(["cat"] * 1000)
    answers = predictor.classify([text, text[: -len("cat")] + "dog"])
    first, other = (answer.probabilities["0"] for answer in answers)
    assert first != other  # the thousandth word is read


def test_what_cannot_be_is_refused(model, tmp_path, capsys):
    assert run("extend-positions", model, "--positions", 32, "--out", tmp_path / "new") == 2
    assert "knows 32 already: ask for more" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert run("extend-positions", model, "--positions", 64, "--out", model) == 2
    assert "not empty: name a folder that is not there yet" in capsys.readouterr().err
