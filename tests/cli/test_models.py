"""`bertsmith extend-positions`, and that training goes on from what it writes."""

import json
import random

import pytest

from bertsmith.checkpoints.config_json import read_config
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.inference.predictor import load
from bertsmith.model.config import ModelConfig
from bertsmith.text.readers.documents import Document

from ..tiny import bertsmith, piece_tokenizer, random_model, refused, write

WORDS = "the cat dog sat ran on mat ."
TOKENIZER = piece_tokenizer(WORDS)


@pytest.fixture
def model(tmp_path):
    return random_model(tmp_path / "model", TOKENIZER, std=0.1)


def test_pre_training_goes_on_with_longer_rows(model, tmp_path):
    draw = random.Random(1)
    lines = [" ".join([*draw.choices(WORDS.split()[:-1], k=6), "."]) for _ in range(480)]
    documents = [Document("made", n, lines[n::12]) for n in range(12)]
    store, new, run = tmp_path / "store", tmp_path / "new", tmp_path / "run"
    build_store([], TOKENIZER, store, BuildSettings(held_out=0.5), documents=documents)
    pretrain = ["pretrain", "--corpus", store, "--out", run, "--max-length", 48, "--steps", 2]
    pretrain += ["--batch-size", 4, "--warmup-steps", 1, "--threads", 1, "--model"]
    assert "`bertsmith extend-positions`" in refused(*pretrain, model)
    line = refused("extend-positions", model, "--positions", 10**8, "--out", new)
    assert "--positions 100000000: must be 1 to 10,000,000" in line
    out = bertsmith("extend-positions", model, "--positions", 48, "--out", new)
    assert f"{new}: 48 positions, 32 before; train it on with" in out
    bertsmith(*pretrain, new)
    assert read_config(run).max_positions == 48
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 2 and result["held_out"]["mlm_loss"] > 0


def test_a_task_whose_texts_are_longer_than_512(tmp_path):
    config = ModelConfig(len(TOKENIZER.vocabulary), 16, 1, 2, 32, max_positions=128)
    model = random_model(tmp_path / "model", TOKENIZER, config=config, std=0.1)
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS.split(), k=1000)) for _ in range(8)]
    rows = [f"{text},{k % 2}" for k, text in enumerate(texts)]
    data = write(tmp_path / "long.csv", ["text,label", *rows])
    new, run = tmp_path / "new", tmp_path / "run"
    train = ["finetune", "classify", "--data", data, "--out", run, "--max-length", 1024]
    train += ["--epochs", 1, "--batch-size", 4, "--threads", 1, "--max-retries", 0, "--model"]
    assert "--max-length 1024: the model knows 128 positions" in refused(*train, model)
    bertsmith("extend-positions", model, "--positions", 1024, "--out", new)
    bertsmith(*train, new)
    assert json.loads((run / "result.json").read_text())["cut_examples"] == 0
    text = " ".join(["cat"] * 1000)
    answers = load(run).classify([text, text[: -len("cat")] + "dog"])
    first, other = (answer.probabilities["0"] for answer in answers)
    assert first != other  # the thousandth word is read


def test_what_cannot_be_is_refused(model, tmp_path):
    extend = ("extend-positions", model, "--positions")
    assert "knows 32 already: ask for more" in refused(*extend, 32, "--out", tmp_path / "new")
    for seed in (-1, 10**30):
        error = refused(*extend, 64, "--seed", seed, "--out", tmp_path / "new")
        assert f"--seed {seed}: must be at least 0 and at most 2**63 - 1" in error
    assert not (tmp_path / "new").exists()
    error = refused(*extend, 64, "--out", model)
    assert "not empty: name a folder that is not there yet" in error
