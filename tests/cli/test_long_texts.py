"""`--long-texts` from fine-tuning to predictions."""

import json
import random

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import main
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "mat", "."]
TOKENIZER = Tokenizer(Vocabulary([*SPECIAL, *WORDS]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model of 32 positions, and texts of 60 words whose last says the label."""
    folder = tmp_path_factory.mktemp("made")
    config = ModelConfig(len(TOKENIZER.vocabulary), 16, 1, 2, 32, max_positions=32)
    network = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    save_model(network, TOKENIZER, folder / "model")
    draw = random.Random(1)
    for split, size in (("train", 24), ("dev", 8)):
        rows = [
            {"text": " ".join([*draw.choices(WORDS[3:], k=59), WORDS[1 + k % 2]]), "label": k % 2}
            for k in range(size)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def run(*words) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (
            ["--long-texts", "windows", "--doc-stride", "20", "--pool", "vote"],
            "24 examples are read in",
        ),
        (
            ["--long-texts", "head-tail"],
            "24 of 24 examples have more than 32 tokens and lose their middle: --long-texts win",
        ),
        ([], "24 of 24 examples have more than 32 tokens and lose their end: --long-texts head"),
    ],
)
def test_a_model_reads_as_it_was_trained(folder, tmp_path, capsys, flags, note):
    out = tmp_path / "out"
    words = ["finetune", "classify", "--model", folder / "model", "--data", folder, "--out", out]
    settings = ["--epochs", 1, "--batch-size", 8, "--max-length", 32, "--threads", 1]
    assert run(*words, *settings, *flags) == 0
    assert f"train: {note}" in capsys.readouterr().err
    stored = json.loads((out / "config.json").read_text())["bertsmith"]
    assert stored["long_texts"] == (flags[1] if flags else "cut")
    answers = tmp_path / "answers.jsonl"
    assert run("predict", out, folder / "dev.jsonl", "--out", answers) == 0
    predicted = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(predicted) == 8  # one a text, not one a window
    told = capsys.readouterr().err
    what = "8 examples are read in" if "windows" in flags else "8 of 8 examples have more than 32"
    assert what in told and ", as in training\n" in told and "--long-texts" not in told
    assert run("evaluate", out, "--data", folder / "dev.jsonl", "--json") == 0
    again = json.loads(capsys.readouterr().out)["metrics"]
    measured = json.loads((out / "result.json").read_text())["metrics"]
    assert again == pytest.approx(measured)
    assert capsys.readouterr().err == ""


def test_rows_longer_than_the_model_knows_are_refused_with_the_ways_out(folder, tmp_path, capsys):
    words = ["finetune", "classify", "--model", folder / "model", "--data", folder]
    assert run(*words, "--out", tmp_path / "out", "--max-length", 64) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--max-length 64: the model knows 32 positions: read longer texts with" in error
    assert "--long-texts windows" in error and "extend-positions" in error
