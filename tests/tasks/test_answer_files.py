"""Rows in, rows with answers out, read back by other readers; files for GLUE's server."""

import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet
import pytest

from bertsmith.tasks.answer_files import (
    FILES,
    answer_names,
    read_rows,
    write_rows,
    write_submission,
)
from bertsmith.tasks.task import GLUE, find_task, own_task

SINGLE = own_task("classify", "text", None, "label")
PAIR = own_task("classify", "text", "second", "label")
ROWS = [{"id": "7", "text": 'He said "hi",\nand left'}, {"id": "8", "text": "고양이\tsat"}]
ANSWERS = [
    {"label": "good", "probability": 0.75, "probabilities": {"bad": 0.25, "good": 0.75}},
    {"label": "bad", "probability": 0.5, "probabilities": {"bad": 0.5, "good": 0.5}},
]


ANSWERS_OF_A_TABLE = [{k: a[k] for k in ("label", "probability")} for a in ANSWERS]


def answered(rows, out):
    write_rows(rows, ANSWERS if out.suffix == ".jsonl" else ANSWERS_OF_A_TABLE, out)
    return out


def test_csv_keeps_quotes_commas_and_line_breaks(tmp_path):
    source = tmp_path / "in.csv"
    source.write_text('id,text\n7,"He said ""hi"",\nand left"\n8,고양이\tsat\n', encoding="utf-8")
    rows = read_rows(str(source), SINGLE)
    assert rows == ROWS
    text = answered(rows, tmp_path / "out.csv").read_bytes().decode()
    assert list(csv.DictReader(io.StringIO(text, newline=""))) == [
        {**ROWS[0], "label": "good", "probability": "0.75"},
        {**ROWS[1], "label": "bad", "probability": "0.5"},
    ]


def test_jsonl_keeps_rows_of_unequal_keys_and_has_all_probabilities(tmp_path):
    source = tmp_path / "in.jsonl"
    rows = [{"text": "a", "tags": ["x", None]}, {"text": "half \ud83d", "id": 3}]
    source.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = answered(read_rows(str(source), SINGLE), tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in out.read_bytes().decode("utf-8").splitlines()]
    assert lines == [row | answer for row, answer in zip(rows, ANSWERS, strict=True)]


def test_rows_of_unequal_keys_make_one_table(tmp_path):
    rows = [{"text": "a"}, {"text": "b", "id": 3}]
    out = answered(rows, tmp_path / "out.csv")
    assert out.read_text() == "text,id,label,probability\na,,good,0.75\nb,3,bad,0.5\n"


def test_parquet_in_tsv_out(tmp_path):
    table = pa.table({"text": ["a", "b"], "day": pa.array([1, None], pa.date32())})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    out = answered(read_rows(str(tmp_path / "in.parquet"), SINGLE), tmp_path / "out.tsv")
    assert out.read_text() == (
        "text\tday\tlabel\tprobability\na\t1970-01-02\tgood\t0.75\nb\t\tbad\t0.5\n"
    )


def test_compressed_input_is_as_the_text(tmp_path):
    (tmp_path / "in.tsv.xz").write_bytes(lzma.compress(b'text\tid\n"a\t1\n'))
    assert read_rows(str(tmp_path / "in.tsv.xz"), SINGLE) == [{"text": '"a', "id": "1"}]
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a", "id": 1}\n'))
    assert read_rows(str(tmp_path / "in.jsonl.gz"), SINGLE) == [{"text": "a", "id": 1}]


def test_tsv_has_no_quotes(tmp_path):
    (tmp_path / "in.tsv").write_text('text\nsay "hi"\n"open\n')
    rows = read_rows(str(tmp_path / "in.tsv"), SINGLE)
    assert [row["text"] for row in rows] == ['say "hi"', '"open']
    out = answered(rows, tmp_path / "out.tsv")
    assert out.read_text().splitlines()[2] == '"open\tbad\t0.5'


def test_txt_is_a_text_a_line_blank_ones_too(tmp_path, standard_input):
    (tmp_path / "in.txt").write_text('one\n\nthree, "3"\n')
    expected = [{"text": "one"}, {"text": ""}, {"text": 'three, "3"'}]
    assert read_rows(str(tmp_path / "in.txt"), SINGLE) == expected
    for text in (b'one\n\nthree, "3"\n', b'\xef\xbb\xbfone\r\n\r\nthree, "3"'):
        standard_input(text)
        assert read_rows("-", SINGLE) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ok\ncaf\xe9 late\n", "^standard input:2: not UTF-8 text: convert it to UTF-8"),
        (b"\xef\xbb\xbfa\n\xe9\n", "^standard input:2: not UTF-8 text"),
        (b"ok\nok\na\0b\n", "^standard input:3: a NUL byte: this is not text"),
        (b"", "-: no text in it"),
    ],
)
def test_bad_standard_input_is_named(standard_input, data, message):
    standard_input(data)
    with pytest.raises(ValueError, match=message):
        read_rows("-", SINGLE)


@pytest.mark.parametrize("name", ["in.txt.gz", "in.txt.xz", "IN.TXT"])
def test_a_packed_txt_is_a_text_a_line_too(tmp_path, name):
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(name[-3:], bytes)
    (tmp_path / name).write_bytes(pack(b"one\n\ntwo\n"))
    assert read_rows(str(tmp_path / name), SINGLE) == [{"text": t} for t in ("one", "", "two")]


def test_a_txt_whose_first_line_names_the_text_is_a_table(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("label\ttext\n1\tone\n")
    assert read_rows(str(path), SINGLE) == [{"label": "1", "text": "one"}]
    path.write_text("label\ta text\n")
    assert read_rows(str(path), SINGLE) == [{"text": "label\ta text"}]


@pytest.mark.parametrize(
    ("first", "ending"),
    [
        ("id,text", ".csv"),
        ('"text","id"', ".csv"),
        ("text\tid", ".tsv"),
        ('{"text": "a"}', ".jsonl"),
    ],
)
def test_a_table_as_standard_input_is_refused(standard_input, first, ending):
    standard_input(f"{first}\n7,one\n".encode())
    message = rf"standard input:1: a table with the column 'text', .* ends in {ending}$"
    with pytest.raises(ValueError, match=message):
        read_rows("-", SINGLE)


@pytest.mark.parametrize("first", ["some text, and more", '{"body": "text"}', '["text"]', "{text"])
def test_a_first_line_that_only_looks_like_a_table_is_a_text(standard_input, first):
    standard_input(first.encode())
    assert read_rows("-", SINGLE) == [{"text": first}]


def test_columns_of_other_use_that_share_a_name_are_left_out(tmp_path, capsys):
    path = tmp_path / "in.csv"
    path.write_text("id,text,,\n7,one,,\n")  # so Excel writes a table with empty columns beside it
    assert read_rows(str(path), SINGLE) == [{"id": "7", "text": "one"}]
    warning = "in.csv: the columns that share a name ('') are left out: rename them\n"
    assert capsys.readouterr().err.endswith(warning)
    path.write_text(",text\n0,one\n")  # pandas: an index without a name
    assert read_rows(str(path), SINGLE) == [{"": "0", "text": "one"}]
    assert capsys.readouterr().err == ""
    path.write_text("text,id,text\none,7,two\n")
    with pytest.raises(ValueError, match="column 'text' .* is there twice: rename one"):
        read_rows(str(path), SINGLE)


def test_txt_of_a_choice_is_a_table(tmp_path):
    choice = own_task("choice", "text", None, "label", options=("a", "b"))
    (tmp_path / "in.txt").write_text("text\ta\tb\nit\tsat\tran\n")
    assert read_rows(str(tmp_path / "in.txt"), choice) == [{"text": "it", "a": "sat", "b": "ran"}]


def test_the_start_of_a_sentence_may_be_missing_and_a_second_text_may_not(tmp_path):
    row = {"text": "it", "second": None, "a": "sat", "b": "ran"}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(row))
    assert read_rows(str(path), own_task("choice", "text", "second", "l", options=("a", "b"))) == [
        row
    ]
    with pytest.raises(ValueError, match=r"in\.jsonl:1: column 'second' holds None, not a text"):
        read_rows(str(path), PAIR)


def test_txt_of_pairs_is_a_table(tmp_path):
    (tmp_path / "in.txt").write_text("text\tsecond\na\tb\n")
    assert read_rows(str(tmp_path / "in.txt"), PAIR) == [{"text": "a", "second": "b"}]
    with pytest.raises(ValueError, match="pairs of texts are read from a file"):
        read_rows("-", PAIR)


def test_a_file_of_a_task_without_header_may_have_one(tmp_path):
    cola = find_task("cola")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tAnn sings.\n")  # as GLUE has it
    assert read_rows(str(tmp_path / "test.tsv"), cola) == [{"index": "0", "sentence": "Ann sings."}]
    (tmp_path / "dev.tsv").write_text("gj04\t1\t\tAnn sings.\n")
    row = {"source": "gj04", "label": "1", "star": "", "sentence": "Ann sings."}
    assert read_rows(str(tmp_path / "dev.tsv"), cola) == [row]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.csv", "txt,id\na,1\n", "in.csv: no column 'text' for --text: did you mean 'txt'"),
        ("in.jsonl", '{"text": "a"}\n{"text": 5}\n', "in.jsonl:2: column 'text' holds 5"),
        ("in.jsonl", '{"text": "a"}\n{"text": \n', "in.jsonl:2: not valid JSON"),
        ("in.txt", "", "in.txt: no text in it"),
        ("in.pdf", "x", "cannot read '.pdf'"),
        ("in.csv", "text,id\na,1\nb\n", "in.csv:3: 1 cells, but the header has 2"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(str(tmp_path / name), SINGLE)


def test_absent_input_is_named(tmp_path):
    for name in ("in.txt", "in.csv"):
        with pytest.raises(ValueError, match=f"{name}: no such file"):
            read_rows(str(tmp_path / name), SINGLE)


def test_answers_never_replace_a_column(tmp_path):
    rows = [{"text": "a", "label": "1", "probabilities": None}]
    assert answer_names(rows, list(ANSWERS[0]), tmp_path / "out.jsonl") == {
        "label": "predicted_label",
        "probability": "probability",
        "probabilities": "predicted_probabilities",
    }
    with pytest.raises(ValueError, match="'label' and 'predicted_label': rename one"):
        answer_names([rows[0] | {"predicted_label": "1"}], ["label"], tmp_path / "out.csv")


def test_outputs_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write '.xlsx': end --out in .csv, .tsv, .jsonl"):
        answer_names(ROWS, ["label"], tmp_path / "out.xlsx")
    with pytest.raises(ValueError, match="row 1: 'text' holds a tab or a line break"):
        answer_names(ROWS, ["label"], tmp_path / "out.tsv")
    tabbed = ["label", "probability_a\tb"]
    with pytest.raises(ValueError, match="column of the answer 2: 'probability_a\tb' holds a tab"):
        answer_names([{"text": "good"}], tabbed, tmp_path / "out.tsv")
    assert len(answer_names([{"text": "good"}], tabbed, tmp_path / "out.csv")) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("old")
    with pytest.raises(ValueError):
        write_rows(ROWS, ANSWERS[:1], out)
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"] and out.read_text() == "old"


def test_lists_are_joined_as_the_task_separates_them(tmp_path):
    write_rows([{"text": "a"}], [{"labels": ["x, y", "z"]}], tmp_path / "out.csv", "|")
    assert (tmp_path / "out.csv").read_text() == 'text,labels\na,"x, y|z"\n'


def test_a_carriage_return_alone_stays_in_its_cell(tmp_path):
    rows = [{"text": "one\rtwo", "id": "1"}]
    write_rows(rows, [{"label": "x"}], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"text": "one\rtwo", "id": "1", "label": "x"}]


COLA, STSB, WNLI = (find_task(name) for name in ("cola", "stsb", "wnli"))


def test_every_glue_task_has_its_files(tmp_path):
    """Names and sizes as in jiant's guide to GLUE's server (`wc -l`, less the header)."""
    written = {}
    for task in GLUE:
        for split in task.files:
            if not split.startswith("test"):
                split = "diagnostic"
            if (task.name, split) not in FILES:
                continue
            name, count = FILES[task.name, split]
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


BAD = [
    (WNLI, "test", {}, "WNLI.tsv: the server wants 146 answers, 146 are missing, .* index 0"),
    (WNLI, "test", {145: None}, "WNLI.tsv: .* 1 are missing, the first for index 145"),
    (WNLI, "test", {200: "1"}, "WNLI.tsv: .* not 147: index 200 is not in the official test file"),
    (WNLI, "test", {7: "entailment"}, "WNLI.tsv: index 7: label 'entailment' is not one of 0, 1"),
    (WNLI, "dev", {}, "no submission for wnli/dev: did you mean 'wnli/test'?"),
    (find_task("swag"), "test", {}, "no submission for swag/test"),
]


@pytest.mark.parametrize(("task", "split", "changes", "message"), BAD)
def test_a_bad_submission_is_refused_before_a_file_is_written(
    tmp_path, task, split, changes, message
):
    answers = dict.fromkeys(range(146), "0") | changes if changes else {}
    answers = {index: answer for index, answer in answers.items() if answer is not None}
    with pytest.raises(ValueError, match=message) as error:
        write_submission(task, split, answers, tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_score_must_be_finite(tmp_path):
    answers = dict.fromkeys(range(1_379), 1.0) | {3: float("nan")}
    with pytest.raises(ValueError, match="STS-B.tsv: index 3: nan is not a finite score"):
        write_submission(STSB, "test", answers, tmp_path)
