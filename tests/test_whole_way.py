"""Vocabulary to fill and fine-tuning by the commands users type, in three languages."""

import json
import random

import pytest

from .tiny import bertsmith, write

# subject, place: who is where is always the same, so that a model can learn it
KOREAN = (("고양이", "마당"), ("강아지", "거실"), ("두루미", "강가"), ("부엉이", "나무"))
JAPANESE = (("猫", "庭"), ("犬", "家"), ("鶴", "川"), ("梟", "森"))
ENGLISH = (("cat", "milk"), ("dog", "meat"), ("crow", "corn"), ("owl", "mice"))
TEXTS = {  # pairs, sentence, space between sentences, vocabulary size, question, answer
    "korean": (KOREAN, "{0}는 {1}에서 잔다.", " ", 50, "고양이는 [MASK] 잔다.", "마당에서"),
    "japanese": (JAPANESE, "{0}は{1}で寝る。", "", 18, "猫は[MASK]で寝る。", "庭"),
    "english": (ENGLISH, "A {0} likes {1}.", " ", 48, "A cat likes [MASK].", "milk"),
}


def pretrained(folder, language, vocab_flags, store_flags, *flags):
    """From text to a run."""
    pairs, sentence, between, size, *_ = TEXTS[language]
    draw = random.Random(7)
    documents = [
        between.join(sentence.format(*draw.choice(pairs)) for _ in range(12)) for _ in range(60)
    ]
    text = write(folder / "text.txt", "\n\n".join(documents))
    vocab, store, run = (folder / name for name in ("vocab", "store", "run"))
    bertsmith("vocab", text, "--out", vocab, "--size", size, *vocab_flags, "--workers", 1)
    bertsmith("corpus", text, "--vocab", vocab, "--out", store, *store_flags, "--workers", 1)
    own = ("--batch-size", 16, "--threads", 1)
    bertsmith("pretrain", "--corpus", store, "--out", run, *own, *flags)
    return run


@pytest.mark.parametrize(
    "language",
    ["japanese", *(pytest.param(name, marks=pytest.mark.slow) for name in ("korean", "english"))],
)
def test_from_text_to_filled_masks(language, tmp_path):
    *_, question, answer = TEXTS[language]
    flags = ("--size", "tiny", "--max-length", 32, "--steps", 300, "--learning-rate", 0.003)
    flags += ("--initializer-range", 0.05, "--num-evals", 1)
    run = pretrained(tmp_path, language, ("--strip-accents", "none"), ("--held-out", 0.2), *flags)
    found = json.loads(bertsmith("fill", question, "--model", run, "--top", 3, "--json"))
    best = found["predictions"][0][0]
    assert best["token"].removeprefix("##") == answer and best["probability"] > 0.5


def test_from_a_run_to_a_classifier_on_own_files(tmp_path):
    flags = ("--size", "1x64", "--max-length", 48, "--steps", 20)
    run, tuned = pretrained(tmp_path, "english", (), (), *flags), tmp_path / "tuned"
    rows = [f'"The {animal} is here.",{animal}' for animal, _ in ENGLISH] * 30
    train = write(tmp_path / "animals.csv", ["body,animal", *rows])
    dev = write(tmp_path / "dev.csv", ["body,animal", *rows[:8]])
    bertsmith(
        "finetune", "classify", "--model", run, "--data", train, "--dev", dev, "--text", "body",
        "--label", "animal", "--out", tuned, "--seeds", "1,2", "--epochs", 12,
        "--learning-rate", 0.003, "--threads", 1,
    )  # fmt: skip
    found = json.loads(bertsmith("evaluate", tuned, "--data", dev, "--json"))
    assert found["metrics"]["accuracy"] == 1.0
    new = write(tmp_path / "new.csv", ["body", "The owl is here.", "The dog is here."])
    bertsmith("predict", tuned, new, "--out", tmp_path / "answers.csv")
    answers = (tmp_path / "answers.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[1] for line in answers] == ["animal", "owl", "dog"]
    bertsmith("report", run, tuned, "--out", tmp_path / "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
