import gzip
import json
import lzma
import re

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from bertsmith.text.readers.tables import column_names, read_columns

WANTED = {"text": "--text"}


def test_compressed_text_is_as_the_text(tmp_path):
    text = b'text\tlabel\n"a \t1\nb\t0\n'
    (tmp_path / "x.tsv").write_bytes(text)
    (tmp_path / "x.tsv.xz").write_bytes(lzma.compress(text))
    (tmp_path / "x.tsv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "x.tsv.zst").write_bytes(zstandard.compress(text))
    for name in ("x.tsv", "x.tsv.xz", "x.tsv.gz", "x.tsv.zst"):
        assert read_columns(tmp_path / name, WANTED) == ({"text": ['"a ', "b"]}, [2, 3])
        assert column_names(tmp_path / name) == ["text", "label"]
    for name, data in {
        "x.csv.xz": b"no xz",
        "x.csv.gz": b"no gz",
        "y.csv.gz": b"\x1f\x8b",
        "z.csv.gz": gzip.compress(text)[:10] + b"\xff" * 9,
        "x.csv.zst": b"no zst",
        "y.csv.zst": zstandard.compress(text * 9)[:-5],
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}: damaged '\.{name[6:]}' file"):
            read_columns(tmp_path / name, WANTED)
    (tmp_path / "x.parquet.xz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cannot read '\.xz'"):
        read_columns(tmp_path / "x.parquet.xz", WANTED)


def test_capital_letters_of_a_suffix_are_as_small_ones(tmp_path):
    (tmp_path / "A.CSV").write_text("text,label\na,1\n")
    (tmp_path / "A.TSV.GZ").write_bytes(gzip.compress(b"text\tlabel\na\t1\n"))
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "A.PARQUET")
    for name in ("A.CSV", "A.TSV.GZ", "A.PARQUET"):
        assert read_columns(tmp_path / name, WANTED)[0] == {"text": ["a"]}


def test_a_cell_may_hold_a_whole_document(tmp_path):
    (tmp_path / "x.csv").write_text("text,label\n" + "a " * 200_000 + ",1\n")
    assert read_columns(tmp_path / "x.csv", WANTED)[0]["text"] == ["a " * 200_000]


def test_a_file_without_header(tmp_path):
    names = ("source", "label", "star", "text")
    path = tmp_path / "train.tsv"
    path.write_text("gj04\t1\t\tA book.\ngj04\t0\t*\tBook a.\n")
    assert read_columns(path, WANTED, names) == ({"text": ["A book.", "Book a."]}, [1, 2])
    path.write_text("index\ttext\n0\tA book.\n")  # CoLA's test file has a header
    assert read_columns(path, WANTED, names) == ({"text": ["A book."]}, [2])
    path.write_text("gj04\t1\t\tA book.\ngj04\t0\tBook a.\n")
    with pytest.raises(ValueError, match=r"train.tsv:2: 3 cells, but the header has 4"):
        read_columns(path, WANTED, names)


def test_both_arrow_formats_and_their_faults(tmp_path):
    table = pyarrow.table({"text": ["a", "b"], "n": [1, 2]})
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("file.arrow", "stream.arrow"):
        assert read_columns(tmp_path / name, WANTED) == ({"text": ["a", "b"]}, [1, 2])
        assert column_names(tmp_path / name) == ["text", "n"]
        with pytest.raises(ValueError, match=rf"{name}: no column 'txt' for --text: did you mean"):
            read_columns(tmp_path / name, {"txt": "--text"})
    (tmp_path / "bad.arrow").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="bad.arrow: not a readable arrow file"):
        read_columns(tmp_path / "bad.arrow", WANTED)
    whole = (tmp_path / "stream.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut.arrow: not a readable arrow file"):
        read_columns(tmp_path / "cut.arrow", WANTED)
    with pytest.raises(ValueError, match=r"none-\*.arrow: no such file"):
        read_columns(tmp_path / "none-*.arrow", WANTED)


def test_class_labels_become_names(tmp_path):
    names = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}

    def write(values, metadata):
        table = pyarrow.table({"label": values}).replace_schema_metadata(metadata)
        parquet.write_table(table, tmp_path / "x.parquet")

    def read():
        return read_columns(tmp_path / "x.parquet", {"label": "--label"})[0]["label"]

    whole = {"huggingface": json.dumps({"info": {"features": names}})}
    write([1, 0, None, -1], whole)
    assert read() == ["yes", "no", None, None]
    write(
        [[1, 0], [], None],
        {"huggingface": json.dumps({"info": {"features": {"label": [names["label"]]}}})},
    )
    assert read() == [["yes", "no"], [], None]
    write([1, 2], whole)
    with pytest.raises(ValueError, match="label 2, but its classes are 0 to 1"):
        read()
    write([1, 2], {"huggingface": "{"})
    with pytest.raises(ValueError, match="damaged 'huggingface' entry"):
        read()
    write([1, 2], {"other": "x"})
    (tmp_path / "dataset_info.json").write_text("[]")
    assert read() == [1, 2]
    (tmp_path / "dataset_info.json").write_text('{"features": {"label": {"_type": "Value"}}}')
    assert read() == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "text;queue\na;b\n", "its header is one cell: are ';' its separators? a .csv"),
        ("x.csv", "text\tqueue\na\tb\n", "are tabs its separators? a .csv has commas, a .tsv"),
        ("x.tsv", "queue,text\na,b\n", "are commas its separators? a .csv has commas, a .tsv"),
        ("x.txt", "text|queue\na|b\n", "are '|' its separators? a .csv has commas, a .tsv"),
        ("x.csv", "texts;queue\na;b\n", "did you mean 'texts;queue'? (columns: texts;queue)"),
        ("x.csv", "I lost it,7\n", "own, or is the header line missing? (columns: I lost it, 7)"),
        ("x.jsonl", '{"id": 7}\n', "name one of its own (columns: id)"),
    ],
)
def test_what_may_be_wrong_with_a_header_is_said(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="no column 'text' for --text: .*" + re.escape(message)):
        read_columns(tmp_path / name, WANTED)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('"text";"queue"\n"a";"b"\n', "are ';' its separators"),
        ('"text"\t"queue"\n"a"\t"b"\n', "are tabs its separators"),
        ('"text" ,"queue"\n"a","b"\n', "put texts that hold"),
    ],
)
def test_quoted_names_with_something_else_between(tmp_path, text, remedy):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=f"x.csv:1: broken row .*: {remedy}"):
        read_columns(tmp_path / "x.csv", WANTED)
