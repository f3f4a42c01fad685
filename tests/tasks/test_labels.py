import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertsmith.tasks.answer_files import read_rows
from bertsmith.tasks.choice import read_choices
from bertsmith.tasks.examples import read_examples
from bertsmith.tasks.task import find_task, own_task
from bertsmith.training.finetuning.contrastive import read_pairs

SCORES = own_task("regress", "text", None, "label")
SETS = own_task("multilabel", "text", None, "label")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_scores(tmp_path):
    read = read_examples(write(tmp_path / "x.csv", "text,label\na,1.5\nb, -2 \nc,1e3\n"), SCORES)
    assert (read.labels.dtype, read.labels.tolist()) == (np.float32, [1.5, -2.0, 1000.0])
    assert read.label_names == ()
    dev = write(tmp_path / "dev.jsonl", '{"text": "a", "label": 4}\n')
    assert read_examples(dev, SCORES, ()).labels.tolist() == [4.0]  # one value is no mistake in dev


def test_sets_from_cells_and_lists(tmp_path):
    cells = write(tmp_path / "x.csv", 'text,label\na,"red, blue"\nb,\nc,blue\n')
    lists = write(
        tmp_path / "x.jsonl",
        '{"text": "a", "label": ["red", "blue", "red"]}\n{"text": "b", "label": []}\n'
        '{"text": "c", "label": ["blue"]}\n',
    )
    bars = write(tmp_path / "x.tsv", "text\tlabel\na\tred|blue\nb\t\nc\tblue\n")
    other = own_task("multilabel", "text", None, "label", separator="|")
    for path, task in ((cells, SETS), (lists, SETS), (bars, other)):
        read = read_examples(path, task)
        assert read.label_names == ("blue", "red")
        assert read.labels.dtype == bool
        assert read.labels.tolist() == [[True, True], [False, False], [True, False]]
        assert read.select([2, 0]).labels.tolist() == [[True, False], [True, True]]
    dev = write(tmp_path / "dev.csv", "text,label\nd,red\n")
    assert read_examples(dev, SETS, ("blue", "red")).labels.tolist() == [[False, True]]


BAD_SCORES = [
    ("good", r":3: 'good' in column 'label' is not a number: write it such as 3.5"),
    ('"4,5"', r":3: '4,5' in column 'label' is not a number"),
    ("", r":3: '' in column 'label' is not a number"),
    ("nan", r":3: 'nan' in column 'label' is not a number"),
    ("-inf", r":3: -inf in column 'label' is outside"),
    ("1e39", r":3: 1e\+39 in column 'label' is outside"),
]


@pytest.mark.parametrize(("cell", "message"), BAD_SCORES)
def test_what_is_no_score(tmp_path, cell, message):
    with pytest.raises(ValueError, match=r"x\.csv" + message) as error:
        read_examples(write(tmp_path / "x.csv", f"text,label\na,1\nb,{cell}\n"), SCORES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [True, None, [1], 10**400, float("nan")])
def test_what_is_no_score_in_json(tmp_path, value):
    path = write(tmp_path / "x.jsonl", json.dumps({"text": "a", "label": value}) + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1: .* is not a number"):
        read_examples(path, SCORES)


@pytest.mark.parametrize("value", [None, float("nan"), " "])
def test_what_is_no_class(tmp_path, value):
    rows = [{"text": "a", "label": "nan"}, {"text": "b", "label": value}]  # the word is a name
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"x\.jsonl:2: empty label in column 'label'"):
        read_examples(path, own_task("classify", "text", None, "label"))


def test_the_row_bounds_the_scores(tmp_path):
    path = write(tmp_path / "train.tsv", "sentence1\tsentence2\tscore\na\tb\t5.2\n")
    with pytest.raises(ValueError, match=r":2: 5.2 in column 'score' is outside 0 to 5: correct"):
        read_examples(path, find_task("sts-b"))


def test_scores_that_teach_nothing(tmp_path):
    path = write(tmp_path / "x.csv", "text,label\na,2\nb,2\n")
    with pytest.raises(ValueError, match=r"every example has the score 2 in column 'label'"):
        read_examples(path, SCORES)


BAD_SETS = [
    ({"label": None}, r":2: None in column 'label' is not a list of labels: .* none is \[\] or ''"),
    ({"label": 3}, r":2: 3 in column 'label' is not a list of labels"),
    ({"label": ["a", [1]]}, r":2: \[1\] in column 'label' is not a label of a list"),
    ({"label": ["a", " "]}, r":2: ' ' in column 'label' is not a label of a list"),
    ({"label": ["a", None]}, r":2: None in column 'label' is not a label of a list"),
    ({"label": ["a", float("nan")]}, r":2: nan in column 'label' is not a label of a list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_SETS)
def test_what_is_no_set(tmp_path, row, message):
    lines = [{"text": "a", "label": ["a", "b"]}, {"text": "b", **row}]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=message):
        read_examples(path, SETS)


@pytest.mark.parametrize("cell", ["['war', 'sea']", "[]", ' ["war"]'])
@pytest.mark.parametrize("known", [None, ("blue", "red")])
def test_a_list_written_as_a_text(tmp_path, cell, known):
    quoted = cell.replace('"', '""')
    path = write(tmp_path / "x.csv", f'text,label\na,"red,blue"\nb,"{quoted}"\n')
    with pytest.raises(ValueError, match=r"x\.csv:3: .* is a list written as a text: .* ',' betw"):
        read_examples(path, SETS, known)


def test_sets_that_teach_nothing(tmp_path):
    for more in ("", "c,\n"):  # a row without labels
        path = write(tmp_path / "x.csv", f"text,label\na,red;blue\nb,blue\n{more}")
        with pytest.raises(
            ValueError, match=r"no example has two .*: is ',' what separates them\? With"
        ):
            read_examples(path, SETS)
    with pytest.raises(ValueError, match="no example has a label in column 'label'"):
        read_examples(write(tmp_path / "none.csv", "text,label\na,\n"), SETS)
    rows = [{"text": "a", "label": ["red;blue"]}, {"text": "b", "label": ["blue"]}]
    lists = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="no example has two labels in column 'label'"):
        read_examples(lists, SETS)
    rows.append({"text": "c", "label": []})  # no separator could be wrong in lists
    lists = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_examples(lists, SETS).labels.sum() == 2
    few = write(tmp_path / "few.csv", "text,label\na,red\nb,\nc,deep blue\n")  # one or none
    assert read_examples(few, SETS).labels.sum() == 2
    dev = write(tmp_path / "dev.csv", "text,label\na,\nb,green\n")
    with pytest.raises(ValueError, match=r"dev.csv:3: unknown label 'green' \(known: red\)"):
        read_examples(dev, SETS, ("red",))


@pytest.mark.parametrize("kind", ["classify", "multilabel"])
def test_labels_that_differ_in_case_only(tmp_path, kind, capsys):
    task = own_task(kind, "text", None, "label")
    cells = ("Billing", "Sales", "billing", '"Sales,billing"' if kind == "multilabel" else "Sales")
    path = write(tmp_path / "x.csv", "text,label\n" + "".join(f"t,{cell}\n" for cell in cells))
    read = read_examples(path, task)
    assert read.label_names == ("Billing", "Sales", "billing")
    assert capsys.readouterr().err == (
        f"warning: {path}: labels that differ in case only are taken as different:"
        " Billing, billing\n"
    )
    read_examples(path, task, read.label_names)  # said once, of the training file
    assert capsys.readouterr().err == ""


def test_numbers_and_identifiers_taken_for_classes(tmp_path, capsys):
    """People who meant `regress`, or named another column."""
    task = own_task("classify", "text", None, "label")

    def said_of(*cells: str) -> str:
        path = write(tmp_path / "x.csv", "text,label\n" + "".join(f"t,{cell}\n" for cell in cells))
        read_examples(path, task)
        return capsys.readouterr().err.removeprefix(f"warning: {path}: ")

    scores = [f"{number / 4}" for number in range(12)]
    assert said_of(*scores, *scores, *scores) == (
        "numbers are taken as 12 classes (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75 and 4 more):"
        " regress learns numbers\n"
    )
    names = [f"ticket {number}" for number in range(12)]
    assert said_of(*names) == "12 classes in 12 rows: does column 'label' hold the label?\n"
    assert said_of(*names, *names) == ""
    assert said_of("0.5", "1", "0.5") == said_of("a", "b") == ""  # few may be meant
    assert said_of(*map(str, range(12)), *map(str, range(12))) == ""


OWN = {
    "classify": ("text,label", "b,", "a,x", "c,y"),
    "regress": ("text,label", "b, ", "a,1", "c,2"),
    "choice": ("text,x,y,label", "b,one,two,", "a,one,two,0", "c,one,two,y"),
}


@pytest.mark.parametrize("kind", OWN)
def test_rows_without_a_label_are_left_out_on_request(tmp_path, capsys, kind):
    header, without, *rows = OWN[kind]
    path = write(tmp_path / "x.csv", "\n".join([header, rows[0], without, rows[1]]) + "\n")
    task = own_task(kind, "text", None, "label", options=("x", "y") * (kind == "choice"))
    read = read_choices if kind == "choice" else read_examples
    with pytest.raises(
        ValueError, match=r"x\.csv:3: .* leave such rows out with --skip-unlabelled"
    ):
        read(path, task)
    found = read(path, replace(task, skip_unlabelled=True))
    assert found.lines == [2, 4] and len(found.labels) == 2
    assert capsys.readouterr().err == f"{path}: 1 of 3 rows have no label and are left out\n"
    assert len(read_rows(str(path), replace(task, skip_unlabelled=True))) == 3
    write(path, f"{header}\n{without}\n")
    with pytest.raises(ValueError, match=r"x\.csv: no row has a label in column 'label'"):
        read(path, replace(task, skip_unlabelled=True))


def test_an_empty_cell_of_several_labels_is_one(tmp_path, capsys):
    rows = [{"text": "a", "label": "x,y"}, {"text": "b", "label": ""}, {"text": "c", "label": None}]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r":3: .* or leave such rows out with --skip-unlabelled"):
        read_examples(path, SETS)
    read = read_examples(path, replace(SETS, skip_unlabelled=True))
    assert read.labels.tolist() == [[True, True], [False, False]] and read.lines == [1, 2]
    assert "1 of 3 rows have no label" in capsys.readouterr().err


def test_the_flag_is_named_where_there_is_one(tmp_path):
    """Not of a data set, nor of the pairs of embed train."""
    path = write(tmp_path / "train.tsv", "sentence1\tsentence2\tscore\na\tb\t\n")
    with pytest.raises(ValueError, match=r":2: .*: give it one, or leave the row out$"):
        read_examples(path, find_task("sts-b"))
    with pytest.raises(ValueError, match=r":2: .*: give it one, or leave the row out$"):
        read_pairs(path, "sentence1", "sentence2", "score")
