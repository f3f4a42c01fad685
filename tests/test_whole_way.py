"""Vocabulary to fill and fine-tuning by the commands users type, in three languages."""

import json
import random

import pytest

from bertsmith.cli.main import main

# subject, place: who is where is always the same, so that a model can learn it
KOREAN = (("고양이", "마당"), ("강아지", "거실"), ("두루미", "강가"), ("부엉이", "나무"))
JAPANESE = (("猫", "庭"), ("犬", "家"), ("鶴", "川"), ("梟", "森"))
ENGLISH = (("cat", "milk"), ("dog", "meat"), ("crow", "corn"), ("owl", "mice"))
TEXTS = {  # pairs, sentence, space between sentences, vocabulary size, question, answer
    "korean": (KOREAN, "{0}는 {1}에서 잔다.", " ", 50, "고양이는 [MASK] 잔다.", "마당에서"),
    "japanese": (JAPANESE, "{0}は{1}で寝る。", "", 18, "猫は[MASK]で寝る。", "庭"),
    "english": (ENGLISH, "A {0} likes {1}.", " ", 48, "A cat likes [MASK].", "milk"),
}


def documents(pairs, sentence, between, count=60):
    draw = random.Random(7)
    return [
        between.join(sentence.format(*draw.choice(pairs)) for _ in range(12)) for _ in range(count)
    ]


def bertsmith(*words):
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize(
    "language",
    ["japanese", *(pytest.param(name, marks=pytest.mark.slow) for name in ("korean", "english"))],
)
def test_from_text_to_filled_masks(language, tmp_path, capsys):
    pairs, sentence, between, size, question, answer = TEXTS[language]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(documents(pairs, sentence, between)), encoding="utf-8")
    vocab, store, run = tmp_path / "vocab", tmp_path / "store", tmp_path / "run"
    bertsmith(
        "vocab", text, "--out", vocab, "--size", size, "--strip-accents", "none", "--workers", 1
    )
    bertsmith("corpus", text, "--vocab", vocab, "--out", store, "--held-out", 0.2, "--workers", 1)
    flags = (
        "--size",
        "tiny",
        "--max-length",
        32,
        "--batch-size",
        16,
        "--steps",
        300,
        "--learning-rate",
        0.003,
    )
    other = ("--initializer-range", 0.05, "--threads", 1, "--num-evals", 1)
    bertsmith("pretrain", "--corpus", store, "--out", run, *flags, *other)
    capsys.readouterr()
    bertsmith("fill", question, "--model", run, "--top", 3, "--json")
    best = json.loads(capsys.readouterr().out)["predictions"][0][0]
    assert best["token"].removeprefix("##") == answer and best["probability"] > 0.5


def test_from_a_run_to_a_classifier_on_own_files(tmp_path, capsys):
    pairs, sentence, between, size, _, _ = TEXTS["english"]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(documents(pairs, sentence, between)), encoding="utf-8")
    vocab, store, run = tmp_path / "vocab", tmp_path / "store", tmp_path / "run"
    bertsmith("vocab", text, "--out", vocab, "--size", size, "--workers", 1)
    bertsmith("corpus", text, "--vocab", vocab, "--out", store, "--workers", 1)
    flags = (
        "--size",
        "1x64",
        "--max-length",
        48,
        "--batch-size",
        16,
        "--steps",
        20,
        "--threads",
        1,
    )
    bertsmith("pretrain", "--corpus", store, "--out", run, *flags)
    animals = [animal for animal, _ in ENGLISH]
    rows = [f'"The {animal} is here.",{animal}\n' for animal in animals] * 30
    train = tmp_path / "animals.csv"
    train.write_text("body,animal\n" + "".join(rows), encoding="utf-8")
    dev = tmp_path / "dev.csv"
    dev.write_text("body,animal\n" + "".join(rows[:8]), encoding="utf-8")
    bertsmith(
        "finetune", "classify", "--model", run, "--data", train, "--dev", dev, "--text", "body",
        "--label", "animal", "--out", tmp_path / "tuned", "--seeds", "1,2", "--epochs", 12,
        "--learning-rate", 0.003, "--threads", 1,
    )  # fmt: skip
    capsys.readouterr()
    bertsmith("evaluate", tmp_path / "tuned", "--data", dev, "--json")
    assert json.loads(capsys.readouterr().out)["metrics"]["accuracy"] == 1.0
    new = tmp_path / "new.csv"
    new.write_text("body\nThe owl is here.\nThe dog is here.\n", encoding="utf-8")
    bertsmith("predict", tmp_path / "tuned", new, "--out", tmp_path / "answers.csv")
    answers = (tmp_path / "answers.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[1] for line in answers] == ["animal", "owl", "dog"]
    bertsmith("report", run, tmp_path / "tuned", "--out", tmp_path / "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
