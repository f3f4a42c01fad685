"""What `predict` writes of the kinds whose answer is about a text."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from bertsmith.tasks.task import Layout, own_task
from bertsmith.training.finetuning.task_types.base import Purpose
from bertsmith.training.finetuning.task_types.texts import Classify, Labelled, MultiLabel, Regress

FIRST, SECOND = (0.123456, 0.876544), (0.5, 0.999999)
CLASSES = Labelled(np.array([1, 0]), np.array([FIRST, SECOND], np.float32))
SETS = Labelled(np.array([[False, True], [True, True]]), np.array([FIRST, SECOND], np.float32))
SCORES = Labelled(np.array([3.1, 0.123456], np.float32), None)
CASES = {
    "classify": (Classify(), CLASSES, [("war", "0.8765"), ("sea", "0.5")], ["probability"]),
    "multilabel": (
        MultiLabel(),
        SETS,
        [("war", "0.1235", "0.8765"), ("sea;war", "0.5", "1.0")],
        ["probability_sea", "probability_war"],
    ),
    "regress": (Regress(), SCORES, [("3.1",), ("0.123456",)], []),
}


def purpose(kind, label="genre"):
    other = {"separator": ";"} if kind == "multilabel" else {}
    names = () if kind == "regress" else ("sea", "war")
    return Purpose(own_task(kind, "plot", None, label, **other), names, Layout(max_length=16))


def written(out, kind, source, label="genre"):
    of, answers = CASES[kind][:2]
    data = of.read_input(str(source), purpose(kind, label))
    of.check_output(data, out, purpose(kind, label))
    of.write_answers(out, answers, data, purpose(kind, label))
    if out.suffix == ".jsonl":
        return [json.loads(line) for line in out.read_text().splitlines()]
    with out.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="," if out.suffix == ".csv" else "\t"))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_of_answers(tmp_path, kind, suffix):
    """The answer is called as training's labels; of several labels each has its probability."""
    (tmp_path / "new.csv").write_text("plot\na\nb\n")
    rows = written(tmp_path / f"out{suffix}", kind, tmp_path / "new.csv")
    *_, values, beside = CASES[kind]
    assert list(rows[0]) == ["plot", "genre", *beside]
    assert [tuple(row.values())[1:] for row in rows] == values

    (tmp_path / "old.csv").write_text("plot,genre\na,x\nb,y\n")
    rows = written(tmp_path / f"out{suffix}", kind, tmp_path / "old.csv")
    assert list(rows[0]) == ["plot", "genre", "predicted_genre", *beside]
    assert [row["genre"] for row in rows] == ["x", "y"]


def test_lines_of_json(tmp_path):
    (tmp_path / "new.csv").write_text("plot\na\nb\n")
    out = tmp_path / "out.jsonl"
    each = {"sea": 0.1235, "war": 0.8765}
    first = {"plot": "a", "genre": "war", "probability": 0.8765, "probabilities": each}
    assert written(out, "classify", tmp_path / "new.csv")[0] == first
    first = {"plot": "a", "genre": ["war"], "probabilities": each}
    assert written(out, "multilabel", tmp_path / "new.csv")[0] == first
    assert written(out, "regress", tmp_path / "new.csv")[0] == {"plot": "a", "genre": 3.1}


def test_columns_of_one_name(tmp_path):
    """Of the answer itself, and of the input: before the work where there is no way out."""
    (tmp_path / "new.csv").write_text("plot,probabilities\na,1\nb,2\n")
    rows = written(tmp_path / "out.csv", "classify", tmp_path / "new.csv", "probability")
    assert rows[0]["predicted_probability"] == "war" and rows[0]["probability"] == "0.8765"
    (tmp_path / "new.csv").write_text("plot,probabilities,predicted_probabilities\na,1,2\n")
    data = Classify().read_input(str(tmp_path / "new.csv"), purpose("classify"))
    with pytest.raises(ValueError, match="'probabilities' and 'predicted_probabilities': rename"):
        Classify().check_output(data, tmp_path / "out.jsonl", purpose("classify"))
    Classify().check_output(data, tmp_path / "out.csv", purpose("classify"))


@pytest.mark.parametrize(
    ("kind", "part"), [("classify", "label"), ("multilabel", "label"), ("multilabel", "separator")]
)
def test_labels_that_a_tsv_cannot_hold_are_refused_before_the_work(tmp_path, kind, part):
    (tmp_path / "new.csv").write_text("plot\na\n")
    asked = replace(purpose(kind), label_names=("sea", "war\tfilm"))
    if part == "separator":
        asked = replace(purpose(kind), task=replace(purpose(kind).task, separator="\t"))
    of = CASES[kind][0]
    data = of.read_input(str(tmp_path / "new.csv"), asked)
    of.check_output(data, tmp_path / "out.csv", asked)
    with pytest.raises(ValueError, match=r"holds a tab .* end --out in \.csv or \.jsonl"):
        of.check_output(data, tmp_path / "out.tsv", asked)
