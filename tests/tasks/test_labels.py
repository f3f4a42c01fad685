"""Labels of every kind: read from cells and from lists, refused where they are none."""

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from bertsmith.tasks.answer_files import read_rows
from bertsmith.tasks.choice import read_choices
from bertsmith.tasks.examples import read_examples
from bertsmith.tasks.task import find_task, own_task
from bertsmith.training.finetuning.contrastive import read_pairs

from ..tiny import write
from .made import lines, refused

KINDS = "classify", "regress", "multilabel"
CLASSES, SCORES, SETS = (own_task(kind, "text", None, "label") for kind in KINDS)
STSB = find_task("sts-b")


def cells(*labels):
    """A table of texts with these labels."""
    return "x.csv", "text,label\n" + "".join(f"t{k},{one}\n" for k, one in enumerate(labels))


def values(*labels):
    """The same as lines of JSON."""
    return "x.jsonl", lines(*({"text": f"t{k}", "label": one} for k, one in enumerate(labels)))


def pair(score):
    return "x.tsv", f"sentence1\tsentence2\tscore\na\tb\t{score}\n"


@pytest.fixture
def read(tmp_path):
    """((name, content) of a file, task, known labels) -> its examples."""

    def read(file, task, known=None):
        return read_examples(write(tmp_path / file[0], file[1]), task, known)

    return read


def test_scores(read):
    found = read(cells("1.5", " -2 ", "1e3"), SCORES)
    assert (found.labels.dtype, found.labels.tolist()) == (np.float32, [1.5, -2.0, 1000.0])
    assert found.label_names == ()
    assert read(values(4), SCORES, ()).labels.tolist() == [4.0]  # one value is no mistake in dev


@pytest.mark.parametrize(
    ("file", "separator"),
    [
        (cells('"red, blue"', "", "blue"), ","),
        (values(["red", "blue", "red"], [], ["blue"]), ","),
        (cells("red|blue", "", "blue"), "|"),
    ],
    ids=["cells", "lists", "bars"],
)
def test_sets_from_cells_and_lists(read, file, separator):
    found = read(file, replace(SETS, separator=separator))
    assert found.label_names == ("blue", "red")
    assert found.labels.dtype == bool
    assert found.labels.tolist() == [[True, True], [False, False], [True, False]]
    assert found.select([2, 0]).labels.tolist() == [[True, False], [True, True]]
    assert read(cells("red"), SETS, ("blue", "red")).labels.tolist() == [[False, True]]


NO_CLASS = r"x\.jsonl:2: empty label in column 'label'"
NO_SCORE = r"x\.csv:3: '{}' in column 'label' is not a number"
NO_NUMBER = r"x\.jsonl:1: .* is not a number"
NO_SET = r"x\.jsonl:2: {} in column 'label' is not a list of labels"
NO_LABEL = r"x\.jsonl:2: {} in column 'label' is not a label of a list"
NONE_OF_TWO = r"no example has two .*: is ',' what separates them\? With"
REFUSED = [
    (CLASSES, values("nan", None), NO_CLASS),  # the word is a name
    (CLASSES, values("nan", float("nan")), NO_CLASS),
    (CLASSES, values("nan", " "), NO_CLASS),
    (SCORES, cells(1, "good"), NO_SCORE.format("good") + ": write it such as 3.5"),
    (SCORES, cells(1, '"4,5"'), NO_SCORE.format("4,5")),
    (SCORES, cells(1, ""), NO_SCORE.format("")),
    (SCORES, cells(1, "nan"), NO_SCORE.format("nan")),
    (SCORES, cells(1, "-inf"), r"x\.csv:3: -inf in column 'label' is outside"),
    (SCORES, cells(1, "1e39"), r"x\.csv:3: 1e\+39 in column 'label' is outside"),
    (SCORES, cells(1, "1_0"), NO_SCORE.format("1_0")),
    (SCORES, values(True), NO_NUMBER),
    (SCORES, values(None), NO_NUMBER),
    (SCORES, values([1]), NO_NUMBER),
    (SCORES, values(10**400), NO_NUMBER),
    (SCORES, values(float("nan")), NO_NUMBER),
    (SCORES, cells(2, 2.0), r"every example has the score 2 in column 'label': there is nothing"),
    (SCORES, cells(16777216, 16777217), r"1\.67772e\+07 in float32 in column 'label': .* subtract"),
    (STSB, pair("5.2"), r":2: 5.2 in column 'score' is outside 0 to 5: correct"),
    # the flag is named where there is one: not of a data set
    (STSB, pair(""), r":2: .*: give it one, or leave the row out$"),
    (SETS, values(["a", "b"], None), NO_SET.format("None") + r": .* none is \[\] or ''"),
    (SETS, values(["a", "b"], 3), NO_SET.format("3")),
    (SETS, values(["a", "b"], ["a", [1]]), NO_LABEL.format(r"\[1\]")),
    (SETS, values(["a", "b"], ["a", " "]), NO_LABEL.format("' '")),
    (SETS, values(["a", "b"], ["a", None]), NO_LABEL.format("None")),
    (SETS, values(["a", "b"], ["a", float("nan")]), NO_LABEL.format("nan")),
    (SETS, cells("red;blue", "blue"), NONE_OF_TWO),
    (SETS, cells("red;blue", "blue", ""), NONE_OF_TWO),
    (SETS, cells(""), "no example has a label in column 'label'"),
    (SETS, values(["red;blue"], ["blue"]), "no example has two labels in column 'label'"),
]


@pytest.mark.parametrize(("task", "file", "message"), REFUSED)
def test_what_is_no_label(read, task, file, message):
    with refused(match=message):
        read(file, task)


def test_an_unknown_label_of_a_set_in_a_dev_file(read):
    with refused(match=r"x.csv:3: unknown label 'green' \(known: red\)"):
        read(cells("", "green"), SETS, ("red",))


@pytest.mark.parametrize("cell", ["['war', 'sea']", "[]", ' ["war"]'])
@pytest.mark.parametrize("known", [None, ("blue", "red")])
def test_a_list_written_as_a_text(read, cell, known):
    quoted = cell.replace('"', '""')
    with refused(match=r"x\.csv:3: .* is a list written as a text: .* ',' betw"):
        read(cells('"red,blue"', f'"{quoted}"'), SETS, known)


def test_a_whole_float_is_the_class_of_its_integer(read):
    found = read(values(1, 1.0, 0.0, 0, 2.5), CLASSES)
    assert found.label_names == ("0", "1", "2.5") and found.labels.tolist() == [1, 1, 0, 0, 2]
    sets = read(values([1, 2], [1.0]), SETS)
    assert sets.label_names == ("1", "2") and sets.labels.tolist() == [[1, 1], [1, 0]]
    known = read(values(1.0, 0.0), CLASSES, ("0.0", "1.0"))  # of a model that took them apart
    assert known.labels.tolist() == [1, 0]
    csv = read(cells("1.0", "0", "0.0"), CLASSES, ("0", "1"))  # as pandas writes them
    assert csv.labels.tolist() == [1, 0, 0]
    with refused(match=r"x\.csv:2: unknown label '9007199254740993'"):
        read(cells("9007199254740993"), CLASSES, ("0", "9007199254740992"))  # one float64 of both
    named = read(values(1.0, 0.0), replace(CLASSES, positive="0.0"))
    assert named.label_names == ("1", "0")
    assert read(cells("1", "1.0"), CLASSES).label_names == ("1", "1.0")  # texts are as they stand


def test_decimals_of_a_database_are_numbers(tmp_path):
    amounts = pa.array([Decimal("1.00"), Decimal("2.50"), Decimal("3.00")])  # decimal128(3, 2)
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b", "c"], "label": amounts}), path)
    assert read_examples(path, SCORES).labels.tolist() == [1, 2.5, 3]
    assert read_examples(path, CLASSES).label_names == ("1", "2.50", "3")


def test_numbers_written_two_ways_and_nothing_written_out_are_told(read, capsys):
    assert read(cells("1", "1.0", "0", "NaN"), CLASSES).label_names == ("0", "1", "1.0", "NaN")
    told = capsys.readouterr().err
    assert "'1' and '1.0' are two classes: write a number one way" in told
    assert "'NaN' is a class: leave the cell empty where the label is not known" in told
    read(cells("1", "0"), CLASSES)
    assert not capsys.readouterr().err


def test_one_label_or_none_is_a_set(read):
    # no separator could be wrong in lists, nor where a text has two words
    assert read(values(["red;blue"], ["blue"], []), SETS).labels.sum() == 2
    assert read(cells("red", "", "deep blue"), SETS).labels.sum() == 2


@pytest.mark.parametrize("task", [CLASSES, SETS], ids=lambda task: task.task_type)
def test_labels_that_differ_in_case_only(read, tmp_path, task, capsys):
    last = '"Sales,billing"' if task is SETS else "Sales"
    file = cells("Billing", "Sales", "billing", last)
    found = read(file, task)
    assert found.label_names == ("Billing", "Sales", "billing")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / 'x.csv'}: labels that differ in case only are taken as different:"
        " Billing, billing\n"
    )
    read(file, task, found.label_names)  # said once, of the training file
    assert capsys.readouterr().err == ""


SCORES_12 = [f"{number / 4}" for number in range(12)]
EIGHT, ADVICE = "0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75", "regress learns numbers"
NAMES_12 = [f"ticket {number}" for number in range(12)]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (SCORES_12 * 3, f"numbers are taken as 12 classes ({EIGHT} and 4 more): {ADVICE}\n"),
        (NAMES_12, "12 classes in 12 rows: does column 'label' hold the label?\n"),
        (NAMES_12 * 2, ""),
        (["0.5", "1", "0.5"], ""),  # few may be meant
        (["a", "b"], ""),
        ([*map(str, range(12))] * 2, ""),
    ],
)
def test_numbers_and_identifiers_taken_for_classes(read, tmp_path, capsys, labels, said):
    """People who meant `regress`, or named another column."""
    read(cells(*labels), CLASSES)
    assert capsys.readouterr().err.removeprefix(f"warning: {tmp_path / 'x.csv'}: ") == said


@pytest.mark.parametrize(
    ("kind", "header", "without", "rows"),
    [
        ("classify", "text,label", "b,", ("a,x", "c,y")),
        ("regress", "text,label", "b, ", ("a,1", "c,2")),
        ("choice", "text,x,y,label", "b,one,two,", ("a,one,two,0", "c,one,two,y")),
    ],
)
def test_rows_without_a_label_may_be_left_out(tmp_path, capsys, kind, header, without, rows):
    path = write(tmp_path / "x.csv", [header, rows[0], without, rows[1]])
    task = own_task(kind, "text", None, "label", options=("x", "y") * (kind == "choice"))
    skipping = replace(task, skip_unlabelled=True)
    read = read_choices if kind == "choice" else read_examples
    with refused(match=r"x\.csv:3: .* leave such rows out with `skip_unlabelled=True`"):
        read(path, task)
    found = read(path, skipping)
    assert found.lines == [2, 4] and len(found.labels) == 2
    assert capsys.readouterr().err == f"{path}: 1 of 3 rows have no label and are left out\n"
    assert len(list(read_rows(str(path), skipping))) == 3
    with refused(match=r"x\.csv: no row has a label in column 'label'"):
        read(write(path, [header, without]), skipping)


def test_an_empty_cell_of_several_labels_is_one(read, capsys):
    file = values("x,y", "", None)
    with refused(match=r":3: .* or leave such rows out with `skip_unlabelled=True`"):
        read(file, SETS)
    found = read(file, replace(SETS, skip_unlabelled=True))
    assert found.labels.tolist() == [[True, True], [False, False]] and found.lines == [1, 2]
    assert "1 of 3 rows have no label" in capsys.readouterr().err


def test_the_flag_is_not_named_of_the_pairs_of_embed_train(tmp_path):
    with refused(match=r":2: .*: give it one, or leave the row out$"):
        read_pairs(write(tmp_path / "x.tsv", pair("")[1]), "sentence1", "sentence2", "score")
