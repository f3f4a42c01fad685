"""The quickstart on made text, small enough to run in seconds."""

import json
import random
from dataclasses import replace

import pytest

from bertsmith.base.files import locked_folder
from bertsmith.experiments import quickstart as module
from bertsmith.experiments.quickstart import quickstart, verdict
from bertsmith.experiments.settings import QuickstartSettings
from bertsmith.reports.pages import write_report
from bertsmith.text.readers.documents import read_documents

from ..tiny import contents, write

SETTINGS = QuickstartSettings(minutes=0.02, size="1x64", vocab_size=100, epochs=1, workers=1)
WORDS = {
    "farm": ("cow", "barn", "field", "milk", "hay", "tractor", "fence", "goat"),
    "sea": ("boat", "wave", "sail", "fish", "harbour", "anchor", "storm", "gull"),
}
TEXT = "It was said that the {} and the {} came before the {} of the old {} again. "
TEXT += "Then a {} was seen near the {}."


@pytest.fixture
def corpus(tmp_path):
    """Two files of twenty documents with eight paragraphs each."""
    draw = random.Random(3)
    for name, words in WORDS.items():
        paragraphs = [TEXT.format(*draw.choices(words, k=6)) for _ in range(160)]
        documents = ["\n".join(paragraphs[k : k + 8]) for k in range(0, 160, 8)]
        write(tmp_path / f"{name}.txt", "\n\n".join(documents))
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


def test_files_of_one_name_in_several_folders_are_classes_of_their_own(tmp_path):
    for folder in ("farm", "sea"):
        write(tmp_path / folder / "text.txt", "a cow\n\na boat")
    found = module._passages(read_documents([tmp_path]))
    assert [one.package for one in found] == ["farm/text.txt"] * 2 + ["sea/text.txt"] * 2


def test_books_are_classes_though_each_is_one_document(tmp_path):
    draw = random.Random(3)
    for name, words in WORDS.items():
        lines = [TEXT.format(*draw.choices(words, k=6)) for _ in range(400)]
        write(tmp_path / f"{name}.txt", lines)
    books = list(read_documents([tmp_path]))
    assert len(books) == 2
    origin = module._labelled(module._passages(books), seed=1)
    assert origin is not None and origin.train.label_names == ("farm.txt", "sea.txt")
    assert [len(part) for part in origin] == [300, 100, 200]


def test_mistakes_are_said_before_minutes_are_spent(corpus, tmp_path):
    foreign = write(tmp_path / "foreign" / "thesis.txt", "not ours").parent
    with pytest.raises(ValueError, match="holds something that no quickstart wrote"):
        quickstart(foreign, SETTINGS, corpus)
    (tmp_path / ".quickstart").touch()  # as if an earlier one had been written around the corpus
    with pytest.raises(ValueError, match="which is written anew: name another `out`"):
        quickstart(tmp_path, SETTINGS, corpus)
    farm = tmp_path / "farm"
    farm.mkdir()
    for inside in (farm / "new", farm):
        with pytest.raises(ValueError, match=f"{inside} lies in the corpus .*: name an `out` out"):
            quickstart(inside, SETTINGS, [corpus[1], farm])
    for wrong in ({"size": "bas"}, {"minutes": 0.0}, {"epochs": -1}, {"workers": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            quickstart(tmp_path / "new", replace(SETTINGS, **wrong), corpus)
    blank = write(tmp_path / "blank.txt", "\n\n")
    with pytest.raises(ValueError, match=r"blank\.txt: no text in it"):
        quickstart(tmp_path / "new", SETTINGS, [blank])
    assert not (tmp_path / "new").exists()


def test_an_earlier_quickstart_is_kept_until_the_text_is_known_to_do(corpus, tmp_path):
    out = tmp_path / "out"
    for name in (".quickstart", "quickstart.json", "report.html", "vocab/a", "store/a"):
        write(out / name, "earlier")
    write(out / "pretrain" / "model.safetensors", "earlier")
    before = contents(out)
    few = write(tmp_path / "few.txt", "A short text of mine. It has two sentences.\n")
    gives = "gives only 27 of 100 pieces: use `size=27` or less, give more text$"
    with pytest.raises(ValueError, match=gives):
        quickstart(out, SETTINGS, [few])
    with pytest.raises(ValueError, match=r"characters need `size=\d+` or more$"):
        quickstart(out, replace(SETTINGS, vocab_size=20), corpus)
    with locked_folder(out), pytest.raises(ValueError, match=f"^{out}: in use, another process"):
        quickstart(out, SETTINGS, corpus)
    assert contents(out) == before
    new = tmp_path / "new"
    with locked_folder(new), pytest.raises(ValueError, match=f"^{new}: in use"):
        quickstart(new, SETTINGS, corpus)


def test_a_text_without_enough_passages_is_told_what_a_classifier_needs(corpus, capsys):
    few = module._passages(list(read_documents(corpus))[:3])
    assert module._labelled(few, seed=1) is None
    told = "no two files, or documents of one file, with 120 passages of 8 words or more each"
    assert told in capsys.readouterr().out


def test_the_verdict_says_when_a_budget_is_too_small():
    scratch = {"mean": 0.5, "spread": 0.02, "accuracies": {"1": 0.48, "2": 0.5, "3": 0.52}}
    worse = verdict({**scratch, "mean": 0.3}, scratch, 90)
    assert worse.startswith("The 90 steps of pre-training cost 20.0 points: too few")
    alike = verdict({**scratch, "mean": 0.49}, scratch, 90)
    assert "no difference beyond chance (-1.0 points)" in alike
    assert verdict({**scratch, "mean": 0.6}, scratch, 90) == "Pre-training helps by 10.0 points."
