"""`bertsmith features ner`: from files to the table, and again."""

import json

import pytest

from bertsmith.cli.main import main

from ..training.finetuning.tagged import write_corpus, write_model

SMALL = "--epochs 2 --learning-rate 1e-2 --hidden-size 16 --max-length 48 "
SMALL += "--tokens-per-window 20 --threads 1"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "4x64")


def call(*words):
    return main(["features", "ner", *map(str, words), *SMALL.split(), "--precision", "float32"])


def test_a_table_of_two_rows_and_then_a_third(model_folder, tmp_path, capsys):
    data, out = write_corpus(tmp_path / "data", train=30), tmp_path / "run"
    wanted = ["--data", data, "--model", model_folder, "--out", out, "--rows"]
    assert call(*wanted, "last", "concat-last-four") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| features | dev F1 | test F1 | paper")
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| Last Hidden",
        "| Concat Last Four Hidden",
    ]
    record = json.loads((out / "run.json").read_text())["settings"]
    assert set(record["data_sha256"]) == {"train", "dev", "test"} and record["epochs"] == 2
    assert call(*wanted, "embeddings") == 0
    again = capsys.readouterr().out.splitlines()
    assert again[2].startswith("| Embeddings") and again[3:] == lines[2:]


def test_a_single_file_gives_its_own_dev_set(model_folder, tmp_path, capsys):
    data = write_corpus(tmp_path / "data", train=30) / "train.conll"
    wanted = ["--data", data, "--model", model_folder, "--out", tmp_path / "run"]
    assert call(*wanted, "--rows", "last") == 0
    assert capsys.readouterr().out.startswith("| features | dev F1 | paper")


def test_mistakes_are_one_line(model_folder, tmp_path, capsys):
    data = write_corpus(tmp_path / "data", train=30)
    (data / "test.conll").write_text("ann B-ORG\n", encoding="utf-8")
    wanted = ["--model", model_folder, "--out", tmp_path / "run"]
    for words, message in (
        (["--data", data], "test.conll:1: tag 'B-ORG' is unknown to the training data"),
        (["--data", tmp_path / "no"], "no such file or folder (--data)"),
        (["--data", data, "--seeds", "a"], "--seeds a: write 1,2,3 or 1..3"),
    ):
        assert call(*wanted, *words) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("bertsmith features ner: ") and message in error
    assert not (tmp_path / "run").exists()
