"""What pretrain, finetune and evaluate say to a person who looks on."""

import csv
import json
import random
import re
import shlex

import pytest

from bertsmith.cli.main import main
from bertsmith.cli.outputs import after_pretraining

ANIMALS = ("cat", "dog", "crane", "owl")
TINY = ("--size", "1x64", "--max-length", "16", "--batch-size", "8", "--threads", "1")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("made"), random.Random(7)
    sentences = [f"The {animal} sleeps." for animal in ANIMALS]
    documents = [" ".join(draw.choices(sentences, k=40)) for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    text, vocab, out = (str(folder / name) for name in ("text.txt", "vocab", "store"))
    assert main(["vocab", text, "--out", vocab, "--size", "40", "--workers", "1"]) == 0
    words = ["corpus", text, "--vocab", vocab, "--out", out, "--workers", "1"]
    assert main([*words, "--held-out", "0.2"]) == 0
    return out


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run") / "my run")
    words = ["pretrain", "--corpus", store, "--out", folder, *TINY, "--steps", "20"]
    assert main(words) == 0
    return folder


@pytest.fixture
def said(capsys):
    """Run a command that must succeed: (what it printed, what it said on stderr), in lines."""

    def said(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        printed = capsys.readouterr()
        return printed.out.splitlines(), printed.err.splitlines()

    return said


def test_pretrain(store, said, tmp_path):
    words = ("pretrain", "--corpus", store, "--out", tmp_path / "run", *TINY, "--steps", 20)
    out, told = said(*words, "--num-evals", 4)
    assert not any("compil" in line for line in told)
    explained = next(k for k, line in enumerate(told) if "losses are in nats" in line)
    assert re.search(r"; a guess among \d+ pieces has 3\.\d\d$", told[explained])
    known = r"knowing only their counts has \d\.\d\d, the unigram entropy of the training text"
    assert re.fullmatch(known, told[explained + 1])
    assert not any("nats" in line or "entropy" in line for line in told[:explained])
    steps = [line for line in told if line.startswith("pretrain, step")]
    figures = r"held-out MLM loss \d\.\d{3}, \d+\.\d% of \d+ right, NSP \d+\.\d% of 256"
    assert len(steps) == 3 and max(map(len, steps)) <= 80
    for step, line in zip((5, 10, 15), steps, strict=True):
        assert re.fullmatch(f"pretrain, step {step}: {figures}", line), line
    assert re.fullmatch(r"held-out MLM loss .* nats \(unigram entropy .*, NSP .* of 256", out[1])
    assert out[2] == "try next:" and len(out) == 5
    assert out[3].startswith("  bertsmith fill ") and out[4].startswith("  bertsmith finetune ")
    again, told = said(*words, "--resume")
    assert not any("losses are in nats" in line for line in told)


def test_what_is_proposed_can_be_done(run, said, tmp_path, monkeypatch):
    """The commands that runs end with, as they stand, in a folder with the files they name."""
    monkeypatch.chdir(tmp_path)
    rows = [[f"The {animal} sleeps {n}.", animal] for animal in ANIMALS for n in range(60)]
    for name, header, width in (("labelled", ["text", "label"], 2), ("new", ["text"], 1)):
        with open(f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows([header, *(row[:width] for row in rows)])
    fill, finetune = after_pretraining(run).splitlines()[1:]
    assert len(said(*shlex.split(fill)[1:])[0]) > 1
    out, told = said(*shlex.split(finetune)[1:], "--epochs", 2, "--threads", 1)
    assert "finetune: 2 epochs of 7 steps, 14 in all; batch 32, rate 0.0006; dev measured once" in (
        "\n".join(told)
    )
    lines = [line for line in told if line.startswith("finetune seed 1, step")]
    assert [line.split(":")[0] for line in lines] == [
        "finetune seed 1, step 7", "finetune seed 1, step 14",
    ]  # fmt: skip
    number = json.loads((tmp_path / "tuned" / "result.json").read_text())["dev_examples"]
    assert all(re.search(rf": dev accuracy \d\.\d{{4}} of {number} examples$", x) for x in lines)
    assert any(
        re.search(r"^finetune seed 1: kept step (7|14) of 14 \(dev accuracy", x) for x in told
    )
    assert re.search(
        r"tuned: the model of seed \d after step (7|14) of 14, the best on dev", out[-4]
    )
    assert out[-3] == "try next:"
    for command in out[-2:]:
        said(*shlex.split(command)[1:])
    assert (tmp_path / "answers.csv").exists() and (tmp_path / "tuned" / "report.html").exists()

    out, _ = said("evaluate", "tuned", "--data", "labelled.csv")
    assert re.fullmatch(r"accuracy +\d\.\d{4} of 240 examples", out[0])
    out, _ = said("finetune", "classify", "--model", run, "--data", "labelled.csv", "--epochs", 1,
                  "--threads", 1, "--out", "two", "--seeds", "1,2", "--max-retries", 0)  # fmt: skip
    mean = next(line for line in out if line.startswith("mean of 2 seeds: "))
    assert "interval" not in mean and "+-" not in mean
    assert mean.endswith(f" ({number} dev examples)")


def test_evaluate_of_a_language_model_has_the_number_of_pairs(run, store, said):
    out, _ = said("evaluate", run, "--data", store)
    assert any(re.fullmatch(r"nsp_accuracy +\d\.\d{4} of 256", line) for line in out), out
    assert not any("_cases" in line for line in out)
