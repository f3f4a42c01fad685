"""What a tidy user has, made once: text, vocabulary, store, a run, a classifier and its files."""

import random

import pytest

from ..tiny import bertsmith, cli, write

ANIMALS = ("cat", "dog", "crane", "owl")
TINY = ("--size", "1x64", "--max-length", 16, "--batch-size", 8, "--threads", 1, "--eval-rows", 8)
PROGRESS = ("compiling, ", "counting words: ", "merging pieces: ", "pretrain: ", "predict: ")
SUMMARY = ("finetune", "train: ", "dev: ", "exact duplicates: ", "no held-out figures", "warning: ")
LOSSES = ("losses are in nats", "knowing only their counts")  # what they are measured in


class Made:
    """The folder of all that, and the words of the commands that write it or more of it."""

    def __init__(self, folder):
        self.folder = folder

    def __truediv__(self, name):
        return self.folder / name

    def words(self, command, out, text="text.txt"):
        """A command that would write `out`."""
        data = ("--data", self / "train.csv", "--dev", self / "dev.csv")
        return {
            "vocab": ("vocab", self / text, "--size", 40, "--workers", 1, "--out", out),
            "corpus": ("corpus", self / text, "--vocab", self / "vocab", "--held-out", 0.2)
            + ("--workers", 1, "--out", out),
            "pretrain": ("pretrain", "--corpus", self / "store", *TINY, "--steps", 2)
            + ("--num-evals", 1, "--out", out),
            "finetune": ("finetune", "classify", "--model", self / "run", *data)
            + ("--epochs", 1, "--threads", 1, "--out", out),
            "predict": ("predict", self / "tuned", self / "dev.csv", "--out", out / "answers.csv"),
            "report": ("report", self / "run", "--out", out / "report.html"),
            "convert": ("convert", self / "run", out),
        }[command]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    made, draw = Made(tmp_path_factory.mktemp("made")), random.Random(7)
    sentences = [f"The {animal} sleeps." for animal in ANIMALS]
    documents = [" ".join(draw.choices(sentences, k=40)) for _ in range(40)]
    write(made / "text.txt", "\n\n".join(documents))
    rows = [f"The {animal} sleeps well.,{animal}" for animal in ANIMALS]
    write(made / "train.csv", ["text,label", *rows * 3])
    write(made / "dev.csv", ["text,label", *rows])
    parts = {"vocab": "vocab", "corpus": "store", "pretrain": "run", "finetune": "tuned"}
    for command, name in parts.items():
        bertsmith(*made.words(command, made / name))
    return made


@pytest.fixture(scope="session")
def refuse():
    """Runs a command that must fail in one line, which holds the parts asked for.

    Before it stand only progress ("label: figures"), the summary of the data, what was decided."""

    def refuse(*words, says, code=2):
        ran = cli(*words)
        *before, line = ran.err.splitlines()
        assert ran.code == code and line.startswith(f"bertsmith {words[0]}: "), ran
        assert all(other.startswith((*PROGRESS, *SUMMARY, *LOSSES)) for other in before), before
        for part in [says] if isinstance(says, str) else says:
            assert str(part) in line, line
        return line

    return refuse
