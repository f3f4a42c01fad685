"""Rows in, rows with answers out, read back by other readers; files for GLUE's server."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from bertsmith.tasks import answer_files
from bertsmith.tasks.answer_files import read_texts, write_submission
from bertsmith.tasks.answer_tables import AnswerTable, answer_names, write_rows
from bertsmith.tasks.task import GLUE, find_task, own_task

from ..tiny import write
from .made import jsonl, refused, write_packed

SINGLE = own_task("classify", "text", None, "label")
PAIR = own_task("classify", "text", "second", "label")
CHOICE = own_task("choice", "text", None, "label", options=("a", "b"))
START = own_task("choice", "text", "second", "l", options=("a", "b"))
COLA, STSB, WNLI = (find_task(name) for name in ("cola", "stsb", "wnli"))
ROWS = [{"id": "7", "text": 'He said "hi",\nand left'}, {"id": "8", "text": "고양이\tsat"}]
ANSWERS = [
    {"label": "good", "probability": 0.75, "probabilities": {"bad": 0.25, "good": 0.75}},
    {"label": "bad", "probability": 0.5, "probabilities": {"bad": 0.5, "good": 0.5}},
]
IN_CELLS = [{k: a[k] for k in ("label", "probability")} for a in ANSWERS]


def read_rows(path, task=SINGLE):
    return [row for _, row in answer_files.read_rows(str(path), task)]


def answered(rows, out):
    write_rows(rows, ANSWERS if out.suffix == ".jsonl" else IN_CELLS, out, "in")
    return out.read_bytes().decode()


def test_csv_keeps_quotes_commas_and_line_breaks(tmp_path):
    source = 'id,text\n7,"He said ""hi"",\nand left"\n8,고양이\tsat\n'
    rows = read_rows(write(tmp_path / "in.csv", source))
    assert rows == ROWS
    text = answered(rows, tmp_path / "out.csv")
    assert list(csv.DictReader(io.StringIO(text, newline=""))) == [
        {**ROWS[0], "label": "good", "probability": "0.75"},
        {**ROWS[1], "label": "bad", "probability": "0.5"},
    ]


def test_csv_has_lists_and_mappings_as_json(tmp_path):
    rows = [{"text": "é", "tags": ["x", "ÿ"], "ok": True, "more": {"k": None}, "none": None}]
    out = tmp_path / "out.csv"
    write_rows(rows, [{"label": "1"}], out, "in.jsonl")
    with out.open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: json.loads(row[name]) for name in ("tags", "ok", "more")} == {
        name: rows[0][name] for name in ("tags", "ok", "more")
    }
    assert "ÿ" in row["tags"] and row["none"] == "" and row["label"] == "1"


def test_jsonl_keeps_rows_of_unequal_keys_and_has_all_probabilities(tmp_path):
    rows = [{"text": "a", "tags": ["x", None]}, {"text": "half \ud83d", "id": 3}]
    source = write(tmp_path / "in.jsonl", "\n\n".join(map(json.dumps, rows)))
    out = answered(read_rows(source), tmp_path / "out.jsonl")
    expected = [row | answer for row, answer in zip(rows, ANSWERS, strict=True)]
    assert [json.loads(line) for line in out.splitlines()] == expected


def test_rows_of_unequal_keys_make_one_table(tmp_path):
    out = answered([{"text": "a"}, {"text": "b", "id": 3}], tmp_path / "out.csv")
    assert out == "text,id,label,probability\na,,good,0.75\nb,3,bad,0.5\n"


def test_parquet_in_tsv_out(tmp_path):
    table = pa.table({"text": ["a", "b"], "day": pa.array([1, None], pa.date32())})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    out = answered(read_rows(tmp_path / "in.parquet"), tmp_path / "out.tsv")
    assert out == "text\tday\tlabel\tprobability\na\t1970-01-02\tgood\t0.75\nb\t\tbad\t0.5\n"


def test_tsv_has_no_quotes(tmp_path):
    rows = read_rows(write(tmp_path / "in.tsv", 'text\nsay "hi"\n"open\n'))
    assert [row["text"] for row in rows] == ['say "hi"', '"open']
    assert answered(rows, tmp_path / "out.tsv").splitlines()[2] == '"open\tbad\t0.5'


COLA_ROW = {"source": "gj04", "label": "1", "star": "", "sentence": "Ann sings."}
LINES, THREE = b'one\n\nthree, "3"\n', [{"text": "one"}, {"text": ""}, {"text": 'three, "3"'}]


@pytest.mark.parametrize(
    ("name", "content", "task", "rows"),
    [
        ("in.tsv.xz", 'text\tid\n"a\t1\n', SINGLE, [{"text": '"a', "id": "1"}]),
        ("in.jsonl.gz", '{"text": "a", "id": 1}\n', SINGLE, [{"text": "a", "id": 1}]),
        # a .txt is a text a line, blank ones too
        ("in.txt", LINES, SINGLE, THREE),
        ("IN.TXT", LINES, SINGLE, THREE),
        ("in.txt.gz", LINES, SINGLE, THREE),
        ("in.txt.xz", LINES, SINGLE, THREE),
        ("in.txt", "label\ta text\n", SINGLE, [{"text": "label\ta text"}]),
        # unless its first line names the columns, or it cannot be one
        ("in.txt", "label\ttext\n1\tone\n", SINGLE, [{"label": "1", "text": "one"}]),
        ("in.txt", "text\ta\tb\nit\tsat\tran\n", CHOICE, [{"text": "it", "a": "sat", "b": "ran"}]),
        ("in.txt", "text\tsecond\na\tb\n", PAIR, [{"text": "a", "second": "b"}]),
        # a file of a task without header may have one, as GLUE's test file has
        ("dev.tsv", "gj04\t1\t\tAnn sings.\n", COLA, [COLA_ROW]),
        ("test.tsv", "index\tsentence\n0\tHi.\n", COLA, [{"index": "0", "sentence": "Hi."}]),
    ],
)
def test_rows_of_a_file(tmp_path, name, content, task, rows):
    assert read_rows(write_packed(tmp_path / name, content), task) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (LINES, THREE),
        (b'\xef\xbb\xbfone\r\n\r\nthree, "3"', THREE),
        # a first line that only looks like a table's
        (b"some text, and more", [{"text": "some text, and more"}]),
        (b'{"body": "text"}', [{"text": '{"body": "text"}'}]),
        (b'["text"]', [{"text": '["text"]'}]),
        (b"{text", [{"text": "{text"}]),
    ],
)
def test_rows_of_standard_input(standard_input, text, rows):
    standard_input(text)
    assert read_rows("-") == rows


TABLE = r"standard input:1: a table with the column 'text', .* ends in {}$"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ok\ncaf\xe9 late\n", "^standard input:2: not UTF-8 .*: convert it"),
        (b"\xef\xbb\xbfa\n\xe9\n", "^standard input:2: not UTF-8 "),
        (b"ok\nok\na\0b\n", "^standard input:3: NUL byte, looks like a binary file"),
        (b"", "-: no text in it"),
        (b"id,text\n7,one\n", TABLE.format(".csv")),
        (b'"text","id"\n7,one\n', TABLE.format(".csv")),
        (b"text\tid\n7,one\n", TABLE.format(".tsv")),
        (b'{"text": "a"}\n7,one\n', TABLE.format(".jsonl")),
    ],
)
def test_bad_standard_input_is_named(standard_input, data, message):
    standard_input(data)
    with refused(match=message):
        read_rows("-")


def test_columns_of_other_use_that_share_a_name_are_left_out(tmp_path, capsys):
    path = write(tmp_path / "in.csv", "id,text,,\n7,one,,\n")  # Excel's empty columns beside it
    assert read_rows(path) == [{"id": "7", "text": "one"}]
    warning = "in.csv: the columns that share a name ('') are left out: rename them\n"
    assert capsys.readouterr().err.endswith(warning)
    write(path, ",text\n0,one\n")  # pandas: an index without a name
    assert read_rows(path) == [{"": "0", "text": "one"}]
    assert capsys.readouterr().err == ""


def test_the_start_of_a_sentence_may_be_missing_and_a_second_text_may_not(tmp_path):
    row = {"text": "it", "second": None, "a": "sat", "b": "ran"}
    path = jsonl(tmp_path / "in.jsonl", row)
    assert read_rows(path, START) == [row]
    with refused(match=r"in\.jsonl:1: column 'second' holds None, not a text"):
        read_rows(path, PAIR)


def test_pairs_are_not_read_from_standard_input():
    with refused(match="pairs of texts are read from a file"):
        read_rows("-", PAIR)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.csv", "txt,id\na,1\n", "in.csv: no column 'text' for `text`: did you mean 'txt'"),
        ("in.jsonl", '{"text": "a"}\n{"text": 5}\n', "in.jsonl:2: column 'text' holds 5"),
        ("in.txt", "", "in.txt: no text in it"),
        ("in.csv", "text,id,text\na,7,b\n", "column 'text' .* is there twice: rename one"),
        ("in.txt", None, "in.txt: no such file"),
        ("in.csv", None, "in.csv: no such file"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message):
    if content is not None:
        write(tmp_path / name, content)
    with refused(match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("name, content", [("in.txt", "\n  \n"), ("in.csv", "text,id\n,1\n  ,2\n")])
def test_a_file_of_blank_texts_has_no_text(tmp_path, name, content):
    with refused(match=rf"{name}: no text in it$"):
        list(read_texts(write(tmp_path / name, content)))


@pytest.mark.parametrize("name", ["in", "in.csv", "in.txt"])
def test_a_folder_as_input_is_said(tmp_path, name):
    (tmp_path / name).mkdir()
    with refused(match=rf"{name}: no such file \(it is a folder: name a file in it\)$"):
        read_rows(tmp_path / name)


def test_answers_never_replace_a_column(tmp_path):
    rows = [{"text": "a", "label": "1", "probabilities": None}]
    assert answer_names(rows, list(ANSWERS[0]), tmp_path / "out.jsonl") == {
        "label": "predicted_label",
        "probability": "probability",
        "probabilities": "predicted_probabilities",
    }
    with refused(match="'label' and 'predicted_label': rename one"):
        answer_names([rows[0] | {"predicted_label": "1"}], ["label"], tmp_path / "out.csv")


TABBED = ["label", "probability_a\tb"]
GOOD = [{"text": "good"}]


@pytest.mark.parametrize(
    ("rows", "names", "out", "message"),
    [
        (ROWS, ["label"], "out.xlsx", r"cannot write '.xlsx': end `out` in .csv, .tsv, .jsonl"),
        (ROWS, ["label"], "out.tsv", "row 1: 'text' holds a tab or a line break"),
        (GOOD, TABBED, "out.tsv", "column of the answer 2: 'probability_a\tb' holds a tab"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(tmp_path, rows, names, out, message):
    with pytest.raises(ValueError, match=message):
        answer_names(rows, names, tmp_path / out)
    assert len(answer_names(GOOD, TABBED, tmp_path / "out.csv")) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path):
    out = write(tmp_path / "out.csv", "old")
    with pytest.raises(ValueError):
        write_rows(ROWS, ANSWERS[:1], out, "in")
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"] and out.read_text() == "old"


def test_lists_are_joined_as_the_task_separates_them(tmp_path):
    rows = [{"text": "a"}]
    table = AnswerTable(rows, ["labels"], tmp_path / "out.csv", "in", "|")
    assert table.part(rows, [{"labels": ["x, y", "z"]}]) == b'a,"x, y|z"\n'


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("out.csv", {"text": "b", "id": 1}, "in:9: column 'id' is not in the first rows, whose"),
        ("out.parquet", {"text": "b", "id": 1}, "in:9: column 'id' is not in the first rows"),
        ("out.jsonl", {"text": "b", "label": "x"}, "in:9: 'label' is a column of the answer"),
        ("out.tsv", {"text": "b\tc"}, "in: line 9: 'text' holds a tab or a line break"),
    ],
)
def test_later_rows_that_do_not_fit_the_first_are_refused(tmp_path, name, row, message):
    table = AnswerTable([{"text": "a"}], ["label"], tmp_path / name, "in")
    table.check([{"text": "a"}, {}], [7, 8])
    with refused(match=message):
        table.check([{"text": "a"}, row], [7, 9])


@pytest.mark.parametrize(
    ("name", "line"), [("out.jsonl", b'{"id": 1, "label": "x"}\n'), ("out.txt", b"x\n")]
)
def test_some_formats_may_have_new_columns_in_later_rows(tmp_path, name, line):
    out, row = tmp_path / name, {"id": 1}
    table = AnswerTable([{"text": "a"}], ["label"], out, "in")
    table.check([row], [2])
    table.write([table.part([row], [{"label": "x"}])])
    assert out.read_bytes() == line


def test_a_txt_has_the_answers_alone_a_line_each(tmp_path):
    rows = [{"text": "a\nb"}, {"text": "c"}, {"text": "d"}]
    answers = [{"answer": "two\r\nlines", "start": 3}, {"answer": "", "start": 0}, {"answer": 2.5}]
    write_rows(rows, answers, out := tmp_path / "out.txt", "in")
    assert out.read_bytes() == b"two lines\n\n2.5\n"


PARTS = [
    ([{"text": "a", "id": 3}, {"text": "half \ud83d"}], [["x"], []], [{"x": 0.75}, {"x": 0.5}]),
    ([{"id": [1, "b"]}], [[]], [{"x": 0.25}]),  # its lists alone do not tell what is in them
]


def test_a_parquet_has_typed_answers_and_a_row_group_a_part(tmp_path):
    table = AnswerTable(PARTS[0][0], ["labels", "p"], out := tmp_path / "out.parquet", "in.jsonl")
    answers = [
        [dict(zip(("labels", "p"), row, strict=True)) for row in zip(*part[1:], strict=True)]
        for part in PARTS
    ]
    table.write(table.part(part[0], found) for part, found in zip(PARTS, answers, strict=True))
    with pyarrow.parquet.ParquetFile(out) as file:
        assert file.num_row_groups == 2
        assert file.schema_arrow.types == [
            *[pa.string(), pa.string(), pa.list_(pa.string())],
            pa.struct([("x", pa.float64())]),
        ]
        assert file.read().to_pylist() == [
            {"text": "a", "id": "3", "labels": ["x"], "p": {"x": 0.75}},
            {"text": "half \\ud83d", "id": None, "labels": [], "p": {"x": 0.5}},
            {"text": None, "id": '[1, "b"]', "labels": [], "p": {"x": 0.25}},
        ]


def test_half_a_character_of_an_answer_is_written_as_its_escape(tmp_path):
    answers = [{"answer": "half \ud83d", "labels": ["\ud83d"], "p": {"\ud83d": 0.5}}]
    write_rows([{"text": "a"}], answers, out := tmp_path / "out.parquet", "in.jsonl")
    [row] = pyarrow.parquet.read_table(out).to_pylist()
    half = "\\ud83d"
    assert row == {"text": "a", "answer": f"half {half}", "labels": [half], "p": {half: 0.5}}


def test_a_parquet_keeps_the_types_of_a_parquet(tmp_path):
    columns = {
        "text": pa.array(["a", "b"], pa.large_string()),
        "day": pa.array([1, None], pa.date32()),
        "points": pa.array([[1], []], pa.list_(pa.int8())),
        "kind": pa.array([1, -1]),
        "kinds": pa.array([[0], [1, 0]]),
    }
    label = {"_type": "ClassLabel", "names": ["no", "yes"]}
    described = {"info": {"features": {"kind": label, "kinds": {"feature": label}}}}
    given = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(described)})
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pyarrow.parquet.write_table(given, source)
    write_rows(read_rows(source), IN_CELLS, out, str(source))
    found = pyarrow.parquet.read_table(out)
    assert found.select([0, 1, 2]).equals(given.select([0, 1, 2]).replace_schema_metadata())
    assert found.drop(["text", "day", "points"]).to_pydict() == {
        "kind": ["yes", None],
        "kinds": [["no"], ["yes", "no"]],
        "label": ["good", "bad"],
        "probability": [0.75, 0.5],
    }
    assert found.schema.field("probability").type == pa.float64()
    odd = [{**row, "day": "never"} for row in read_rows(source)]  # as another part may have it
    with refused(match=r"in\.parquet: column 'day' is not date32\[day\] in all rows .* \.jsonl"):
        write_rows(odd, IN_CELLS, out, str(source))


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata"])
def test_a_parquet_keeps_nanoseconds(tmp_path, zone):
    """Also where the first rows, which are read together, have none, so that times are no texts."""
    when = pa.array([None, *(1000 * k for k in range(298)), 10**18 + 1], pa.timestamp("ns", zone))
    given = pa.table({"text": ["a"] * 300, "when": when})
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pyarrow.parquet.write_table(given, source)
    write_rows(read_rows(source), [{"label": "x"}] * 300, out, str(source))
    assert pyarrow.parquet.read_table(out).select(["text", "when"]).equals(given)


def test_a_carriage_return_alone_stays_in_its_cell(tmp_path):
    rows = [{"text": "one\rtwo", "id": "1"}]
    write_rows(rows, [{"label": "x"}], tmp_path / "out.csv", "in")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"text": "one\rtwo", "id": "1", "label": "x"}]


def test_every_glue_task_has_its_files(tmp_path):
    """Names and sizes as in jiant's guide to GLUE's server (`wc -l`, less the header)."""
    written = {}
    for task in GLUE:
        for split in task.files:
            if not split.startswith("test"):
                split = "diagnostic"
            if (task.name, split) not in answer_files.FILES:
                continue
            name, count = answer_files.FILES[task.name, split]
            answer = task.labels[-1] if task.labels else 2.5
            path = write_submission(task, split, dict.fromkeys(range(count), answer), tmp_path)
            assert path == tmp_path / name
            written[name] = path.read_text().splitlines()
            assert len(written[name]) == count + 1 and written[name][0] == "index\tprediction"
    assert {name: rows[-1] for name, rows in written.items()} == {
        "CoLA.tsv": "1062\t1",
        "SST-2.tsv": "1820\t1",
        "MRPC.tsv": "1724\t1",
        "STS-B.tsv": "1378\t2.500",
        "QQP.tsv": "390964\t1",
        "MNLI-m.tsv": "9795\tneutral",
        "MNLI-mm.tsv": "9846\tneutral",
        "AX.tsv": "1103\tneutral",
        "QNLI.tsv": "5462\tnot_entailment",
        "RTE.tsv": "2999\tnot_entailment",
        "WNLI.tsv": "145\t1",
    }


def test_scores_are_clipped_and_the_order_is_that_of_the_index(tmp_path):
    answers = dict.fromkeys(reversed(range(1_379)), 2.0) | {0: -0.3, 1: 5.01, 2: 3.14159}
    rows = write_submission(STSB, "test", answers, tmp_path).read_text().splitlines()
    assert rows[1:5] == ["0\t0.000", "1\t5.000", "2\t3.142", "3\t2.000"]


NAN = {3: float("nan")}
BAD = [
    (STSB, "test", NAN, "STS-B.tsv: index 3: nan is not a finite score"),
    (WNLI, "test", {}, "WNLI.tsv: the server wants 146 answers, 146 are missing, .* index 0"),
    (WNLI, "test", {145: None}, "WNLI.tsv: .* 1 are missing, the first for index 145"),
    (WNLI, "test", {200: "1"}, "WNLI.tsv: .* not 147: index 200 is not in the official test file"),
    (WNLI, "test", {7: "entailment"}, "WNLI.tsv: index 7: label 'entailment' is not one of 0, 1"),
    (WNLI, "dev", {}, "no submission for wnli/dev: did you mean 'wnli/test'?"),
    (find_task("swag"), "test", {}, "no submission for swag/test"),
]


@pytest.mark.parametrize(("task", "split", "changes", "message"), BAD)
def test_a_bad_submission_is_refused_and_not_written(tmp_path, task, split, changes, message):
    answers = dict.fromkeys(range(1_379), 1.0) if task is STSB else dict.fromkeys(range(146), "0")
    answers = {index: answer for index, answer in (answers | changes).items() if answer is not None}
    with refused(match=message):
        write_submission(task, split, answers if changes else {}, tmp_path)
    assert not list(tmp_path.iterdir())
