"""The quickstart on made text, small enough to run in seconds."""

import json
import random

import pytest

from bertsmith.experiments import quickstart as module
from bertsmith.experiments.quickstart import quickstart, verdict
from bertsmith.experiments.settings import QuickstartSettings
from bertsmith.reports.pages import write_report

SETTINGS = QuickstartSettings(minutes=0.02, size="1x64", vocabulary=100, epochs=1, workers=1)
WORDS = {
    "farm": ("cow", "barn", "field", "milk", "hay", "tractor", "fence", "goat"),
    "sea": ("boat", "wave", "sail", "fish", "harbour", "anchor", "storm", "gull"),
}


@pytest.fixture
def corpus(tmp_path):
    """Two files of twenty documents with eight paragraphs each."""
    draw = random.Random(3)
    for name, words in WORDS.items():
        paragraphs = [
            "It was said that the {} and the {} came before the {} of the old {} again. "
            "Then a {} was seen near the {}.".format(*draw.choices(words, k=6))
            for _ in range(160)
        ]
        documents = ["\n".join(paragraphs[k : k + 8]) for k in range(0, 160, 8)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return [tmp_path / "farm.txt", tmp_path / "sea.txt"]


def test_the_whole_way_on_own_text(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SET_SIZES", ((20, 8, 10),))
    out = tmp_path / "out"
    summary = quickstart(out, SETTINGS, corpus)
    assert summary == json.loads((out / "quickstart.json").read_text())
    task = summary["classification"]
    assert task["labels"] == ["farm.txt", "sea.txt"]
    for side in ("pretrained", "scratch"):
        assert len(task[side]["accuracies"]) == 3
        assert max(task[side]["rates"].values()) == task[side]["rates"][task[side]["best_rate"]]
    assert "teps of pre-training" in task["verdict"] or "helps by" in task["verdict"]
    assert sum(map(sum, task["confusion"])) == task["test_examples"] == 20
    assert summary["fill"] and all("[MASK]" in row["text"] for row in summary["fill"])
    write_report([out], out / "report.html")
    assert task["verdict"] in (out / "report.html").read_text()

    (out / "mine.txt").write_text("a file of the user")  # a second run replaces its own files only
    monkeypatch.setattr(module, "SET_SIZES", ((2000, 80, 80),))
    assert "classification" not in quickstart(out, SETTINGS, corpus)  # too few labelled texts
    assert (out / "mine.txt").exists() and not (out / "report.html").exists()


def test_mistakes_are_said_before_minutes_are_spent(corpus, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("not ours")
    with pytest.raises(ValueError, match="holds something that no quickstart wrote"):
        quickstart(tmp_path / "foreign", SETTINGS, corpus)
    (tmp_path / ".quickstart").touch()  # as if an earlier one had been written around the corpus
    with pytest.raises(ValueError, match="which is written anew: name another --out"):
        quickstart(tmp_path, SETTINGS, corpus)
    for inside in (corpus[0].parent / "farm" / "new", corpus[0].parent / "farm"):
        (corpus[0].parent / "farm").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"{inside} lies in the corpus .*: name an --out out"):
            quickstart(inside, SETTINGS, [corpus[1], corpus[0].parent / "farm"])
    for wrong in ({"size": "bas"}, {"minutes": 0.0}, {"epochs": -1}, {"workers": 0}):
        values = {**vars(SETTINGS), **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            quickstart(tmp_path / "new", QuickstartSettings(**values), corpus)
    (tmp_path / "blank.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"blank\.txt: no text in it"):
        quickstart(tmp_path / "new", SETTINGS, [tmp_path / "blank.txt"])
    assert not (tmp_path / "new").exists()


def test_the_verdict_says_when_a_budget_is_too_small():
    scratch = {"mean": 0.5, "spread": 0.02, "accuracies": {"1": 0.48, "2": 0.5, "3": 0.52}}
    worse = verdict({**scratch, "mean": 0.3}, scratch, 90)
    assert worse.startswith("The 90 steps of pre-training cost 20.0 points: too few")
    assert "no difference beyond chance (-1.0 points)" in verdict(
        {**scratch, "mean": 0.49}, scratch, 90
    )
    assert verdict({**scratch, "mean": 0.6}, scratch, 90) == "Pre-training helps by 10.0 points."
