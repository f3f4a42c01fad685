"""What a run reads: a mixture of stores, a store that has grown; resumed bit for bit."""

import dataclasses
import random

import pytest
import torch

from bertsmith.base.files import read_json, read_json_lines
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.cli.main import main
from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.mixture import open_corpus
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.pretraining.diagnostics import RepeatWatch, budget_tokens
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

from .steps import Killed, killed_at


@pytest.fixture
def settings(settings):
    return dataclasses.replace(settings, steps=14, num_evals=1, log_every=2)


@pytest.fixture
def other_folder(store_folder, tmp_path):
    """A smaller store of the same vocabulary, built from a file."""
    draw = random.Random(1)
    words = ("cat", "dog", "barn", "tree", "old", "near")
    text = "\n\n".join(
        "\n".join(" ".join(draw.choices(words, k=9)) for _ in range(6)) for _ in range(24)
    )
    (tmp_path / "other.txt").write_text(text)
    tokenizer = Tokenizer.from_pretrained(store_folder)
    build_store(
        [tmp_path / "other.txt"], tokenizer, tmp_path / "other", BuildSettings(held_out=0.2)
    )
    return tmp_path / "other"


def assert_same_weights(one, other):
    first, second = (read_tensor_file(run / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def messages(run):
    lines = read_json_lines(run / "log.jsonl")
    return [line["text"] for line in lines if line["event"] == "message"]


def test_a_mixture_resumes_bit_for_bit_and_says_what_it_repeats(
    store_folder, other_folder, tmp_path, settings, monkeypatch, capsys
):
    mixed = [f"{store_folder}=0.4", f"{other_folder}=0.6"]
    pretrain(mixed, tmp_path / "whole", settings)
    assert f"{other_folder}: read once, its rows begin again" in capsys.readouterr().err
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(11, patch)
        pretrain(mixed, tmp_path / "killed", settings)
    pretrain(mixed, tmp_path / "killed", settings, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    record = read_json(tmp_path / "whole" / "run.json")["corpus"]
    assert record["path"] == " ".join(mixed) and len(record["stores"]) == 2
    said = messages(tmp_path / "whole")
    assert sum(line.startswith("mixture: ") for line in said) == 1
    assert any(f"{store_folder} 40.0% of the rows" in line for line in said)
    assert read_json(tmp_path / "whole" / "result.json")["held_out"]["mlm_loss"] > 0
    repeats = [line for line in said if "begin again" in line]
    assert repeats and set(repeats) == {
        line for line in messages(tmp_path / "killed") if "begin again" in line
    }


def test_another_mixture_is_no_resume(store_folder, other_folder, tmp_path, settings):
    short = dataclasses.replace(settings, steps=2)
    pretrain([f"{store_folder}=1", f"{other_folder}=2"], tmp_path / "run", short)
    thirds = [f"{store_folder}={1 / 3}", f"{other_folder}={2 / 3}"]  # to the last figure
    printed = open_corpus(thirds).folder.split()
    assert open_corpus(printed).fingerprint == open_corpus(thirds).fingerprint
    for sources in ([f"{store_folder}=2", f"{other_folder}=1"], store_folder, other_folder):
        with pytest.raises(ValueError, match="trained on another corpus.*--corpus .*=1 .*=2"):
            pretrain(sources, tmp_path / "run", short, resume=True)


def test_a_run_goes_on_with_the_generation_on_which_it_began(
    other_folder, tmp_path, settings, monkeypatch, capsys
):
    pretrain(other_folder, tmp_path / "whole", settings)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(11, patch)
        pretrain(other_folder, tmp_path / "killed", settings)
    began = TokenStore.open(other_folder).fingerprint
    text = tmp_path / "new.txt"
    text.write_text("\n\n".join("the old owl sleeps near the tree\nin summer" for _ in range(9)))
    append_text([text], other_folder)
    assert TokenStore.open(other_folder).fingerprint != began
    pretrain(other_folder, tmp_path / "killed", settings, resume=True)
    assert "generation 1" in capsys.readouterr().err
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    assert read_json(tmp_path / "killed" / "run.json")["corpus"]["fingerprint"] == began
    pretrain(other_folder, tmp_path / "new", dataclasses.replace(settings, steps=1))
    assert read_json(tmp_path / "new" / "run.json")["corpus"]["fingerprint"] != began


def test_the_command_reads_a_mixture(store_folder, other_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    words = ["--size", "2x64", "--max-length", "48", "--batch-size", "8", "--threads", "1"]
    mixed = ["--corpus", f"{store_folder}=0.5", f"file://{other_folder}=0.5"]
    assert main(["pretrain", *mixed, "--steps", "1", "--dry-run", *words]) == 0
    assert "tokens" in capsys.readouterr().out
    run = ["--out", str(tmp_path / "run"), "--steps", "2"]
    assert main(["pretrain", *mixed, *run, *words]) == 0
    capsys.readouterr()
    assert main(["pretrain", *mixed, "--out", str(tmp_path / "run"), "--replay"]) == 0
    assert "finite" in capsys.readouterr().out
    assert main(["pretrain", "--corpus", *run]) == 2
    assert "corpus" in capsys.readouterr().err.lower()
    new = ["--out", str(tmp_path / "new"), "--steps", "2"]
    assert main(["pretrain", "--corpus", str(store_folder), str(other_folder), *new]) == 2
    assert "several stores need weights" in capsys.readouterr().err


class Log:
    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def test_a_repeat_is_said_at_the_first_time_and_at_every_doubling(store_folder):
    log = Log()
    watch = RepeatWatch(TokenStore.open(store_folder), Position(0, 3), log)
    for epoch in (0, 1, 1, 2, 3, 4, 5, 9, 0, 1):
        watch(Position(epoch, 0))
    times = [line.split("read ")[1].split(",")[0] for line in log.lines]
    assert times == ["once", "2 times", "4 times", "9 times", "once"]
    resumed = Log()
    RepeatWatch(TokenStore.open(store_folder), Position(5, 0), resumed)(Position(6, 1))
    assert resumed.lines == []


def test_the_tokens_of_a_budget():
    two = PretrainSettings(
        steps=100, batch_size=10, max_length=100, phase2_length=200, phase2_ratio=0.1
    )
    assert budget_tokens(two) == pytest.approx(90 * 1000 + 10 * 2000)
    assert budget_tokens(PretrainSettings(tokens=7)) == 7
    assert budget_tokens(PretrainSettings(minutes=1)) is None
