"""Rows of every kind of file, and one table of what is refused, by either reader."""

import gzip
import json
import lzma
from datetime import datetime

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from bertsmith.text.readers.documents import read_documents
from bertsmith.text.readers.tables import column_names, read_columns, stream_rows, stream_texts

from ...tiny import write

WANTED = {"text": "`text`"}


PACKED = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("ending", PACKED)
def test_compressed_text_is_as_the_text(tmp_path, ending):
    path = write(tmp_path / f"x.tsv{ending}", PACKED[ending](b'text\tlabel\n"a \t1\nb\t0\n'))
    assert read_columns(path, WANTED) == ({"text": ['"a ', "b"]}, [2, 3])
    assert column_names(path) == ["text", "label"]


def test_capital_letters_of_a_suffix_are_as_small_ones(tmp_path):
    write(tmp_path / "A.CSV", "text,label\na,1\n")
    write(tmp_path / "A.TSV.GZ", gzip.compress(b"text\tlabel\na\t1\n"))
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "A.PARQUET")
    for name in ("A.CSV", "A.TSV.GZ", "A.PARQUET"):
        assert read_columns(tmp_path / name, WANTED)[0] == {"text": ["a"]}


def test_a_cell_may_hold_a_whole_document(tmp_path):
    path = write(tmp_path / "x.csv", "text,label\n" + "a " * 200_000 + ",1\n")
    assert read_columns(path, WANTED)[0]["text"] == ["a " * 200_000]


def test_a_file_without_header(tmp_path):
    names, path = ("source", "label", "star", "text"), tmp_path / "train.tsv"
    write(path, "gj04\t1\t\tA book.\ngj04\t0\t*\tBook a.\n")
    assert read_columns(path, WANTED, names) == ({"text": ["A book.", "Book a."]}, [1, 2])
    write(path, "index\ttext\n0\tA book.\n")  # CoLA's test file has a header
    assert read_columns(path, WANTED, names) == ({"text": ["A book."]}, [2])
    write(path, "gj04\t1\t\tA book.\ngj04\t0\tBook a.\n")
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
        with pytest.raises(ValueError, match=rf"{name}: no column 'txt' for `text`: did you mean"):
            read_columns(tmp_path / name, {"txt": "`text`"})
    write(tmp_path / "bad.arrow", "nothing of the kind")
    whole = (tmp_path / "stream.arrow").read_bytes()
    write(tmp_path / "cut.arrow", whole[: len(whole) // 2])
    for name in ("bad.arrow", "cut.arrow"):
        with pytest.raises(ValueError, match=f"{name}: damaged arrow file"):
            read_columns(tmp_path / name, WANTED)
    with pytest.raises(ValueError, match=r"none-\*.arrow: no such file"):
        read_columns(tmp_path / "none-*.arrow", WANTED)


def test_damaged_pages_and_text_that_is_not_utf_8_are_named(tmp_path, damaged_parquet):
    path = write(tmp_path / "page.parquet", damaged_parquet)
    with pytest.raises(ValueError, match=r"page\.parquet: damaged parquet file.*: copy it again"):
        read_columns(path, WANTED)
    cells = pyarrow.array([b"ok", b"sch\xf6n"])
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, cells.buffers())
    parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(ValueError, match=r"page\.parquet: column 'text': not UTF-8 \(.*: write"):
        read_columns(path, WANTED)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_nanoseconds_become_text_and_what_python_cannot_hold_is_named(tmp_path, ending):
    path = tmp_path / f"x.{ending}"

    def read(values, kind):
        table = pyarrow.table({"text": ["a", "b"], "when": pyarrow.array(values, kind)})
        if ending == "parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        return [row["when"] for _, row in stream_rows(path, WANTED)]

    assert read([1, None], pyarrow.timestamp("ns")) == ["1970-01-01 00:00:00.000000001", None]
    assert read([1, None], pyarrow.time64("ns")) == ["00:00:00.000000001", None]
    whole = read([1000, None], pyarrow.timestamp("ns"))
    assert whole == [datetime(1970, 1, 1, 0, 0, 0, 1), None]
    where = rf"x\.{ending}: column 'when': "
    with pytest.raises(ValueError, match=where + r"list<.*> that Python cannot .*: write the col"):
        read([[1], None], pyarrow.list_(pyarrow.timestamp("ns")))
    with pytest.raises(ValueError, match=where + r"timestamp\[ms\] that Python cannot hold"):
        read([10**15, None], pyarrow.timestamp("ms"))
    if ending == "parquet":
        with pytest.raises(ValueError, match=r"x.parquet: row 1: 'when' is <.*: expected a string"):
            list(stream_texts(path, "when"))
    assert read_columns(path, WANTED)[0] == {"text": ["a", "b"]}  # where nobody asks for it


CLASSES = {"names": ["no", "yes"], "_type": "ClassLabel"}


def hugging_face(label):
    return {"huggingface": json.dumps({"info": {"features": {"label": label}}})}


@pytest.fixture
def labels(tmp_path):
    """What is read of a column of labels and the metadata beside it."""

    def read(values, metadata):
        table = pyarrow.table({"label": values}).replace_schema_metadata(metadata)
        parquet.write_table(table, tmp_path / "x.parquet")
        return read_columns(tmp_path / "x.parquet", {"label": "`label`"})[0]["label"]

    return read


@pytest.mark.parametrize("info", [None, "[]", '{"features": {"label": {"_type": "Value"}}}'])
def test_labels_without_classes_stay_numbers(labels, tmp_path, info):
    if info:
        write(tmp_path / "dataset_info.json", info)
    assert labels([1, 2], {"other": "x"}) == [1, 2]


def test_class_labels_become_names(labels):
    assert labels([1, 0, None, -1], hugging_face(CLASSES)) == ["yes", "no", None, None]
    lists = labels([[1, 0], [], None], hugging_face([CLASSES]))
    assert lists == [["yes", "no"], [], None]
    with pytest.raises(ValueError, match="label 2, but its classes are 0 to 1"):
        labels([1, 2], hugging_face(CLASSES))
    with pytest.raises(ValueError, match="damaged 'huggingface' entry"):
        labels([1, 2], {"huggingface": "{"})


TEXT = "Erster Absatz: schön.\n  Zweiter Absatz. \n\n\n \n두 번째 문서입니다.\n" * 99
# File, its bytes, how it is refused as text of a corpus and as labelled rows; None: it is taken.
REFUSED = [
    ("latin1.txt", "text\nsch\u00f6n\n".encode("latin1"),
     "{}:2: not UTF-8 (byte 0xf6 at offset 8)", "{}:2: not UTF-8 (byte 0xf6 at offset 8)"),
    ("binary.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
     "{}:1: NUL byte, looks like a binary file", "{}:1: NUL byte, looks like a binary file"),
    ("latin1.txt.gz", gzip.compress(b"a" * ((1 << 18) - 2) + b"\xf6\nb", mtime=0)[:-4],
     "{}:1: not UTF-8", "{}:1: not UTF-8"),  # the cut is in the next block
    ("nul.txt", b"text\nmore\0text\n", "{}:2: NUL byte", "{}:2: NUL byte"),
    ("utf16.txt", "text\n".encode("utf-16"), "iconv -f UTF-16", "iconv -f UTF-16"),
    ("cut.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:-20],
     "damaged .gz file", "{}:1: damaged .gz file"),
    ("cut.txt.xz", lzma.compress(TEXT.encode())[:-20],
     "damaged .xz file", "{}:1: damaged .xz file"),
    ("cut.txt.zst", zstandard.compress(TEXT.encode())[:-5],
     "damaged .zst file", "{}:1: damaged .zst file"),
    ("plain.txt.gz", TEXT.encode(), "damaged .gz file", "{}:1: damaged .gz file"),
    ("plain.csv.xz", b"no xz", "damaged .xz file", "{}:1: damaged .xz file"),
    ("plain.csv.zst", b"no zst", "damaged .zst file", "{}:1: damaged .zst file"),
    ("start.csv.gz", b"\x1f\x8b", "damaged .gz file", "{}:1: damaged .gz file"),
    ("middle.csv.gz", gzip.compress(TEXT.encode(), mtime=0)[:10] + b"\xff" * 9,
     "damaged .gz file", "{}:1: damaged .gz file"),
    ("array.jsonl", b'{"text": "a"}\n[1]\n',
     "{}:2: expected an object", "{}:2: expected a JSON object, one a line"),
    ("cut.jsonl", b'{"text": "a"}\n{"text": "b\n', "{}:2: not valid JSON", "{}:2: not valid JSON"),
    ("deep.jsonl", b"[" * 100_000,
     "{}:1: JSON nested too deeply", "{}:1: JSON nested too deeply"),
    ("number.jsonl", b'{"text": 5}', "{}:1: 'text' is 5: expected a string", None),
    ("twice.jsonl", b'{"text": "a", "text": "b"}',
     "{}:1: 'text' is there twice: keep one", "{}:1: 'text' is there twice: keep one"),
    ("column.jsonl", b'{"body": "a", "id": 1}', "(found: body, id)",
     "{}:1: no column 'text' for `text`: name one of its own (columns: body, id)"),
    ("column.csv", b"body,id\na,1\n",
     "{}: no column 'text' for `text_column`: name one of its own, or is the header line missing?",
     "{}: no column 'text' for `text`: name one of its own, or is the header line missing?"),
    ("near.csv", b"texts;queue\na;b\n", "for `text_column`: did you mean 'texts;queue'?",
     "no column 'text' for `text`: did you mean 'texts;queue'? (columns: texts;queue)"),
    ("bare.csv", b"I lost it,7\n", "is the header line missing? (columns: I lost it, 7)",
     "own, or is the header line missing? (columns: I lost it, 7)"),
    ("semicolons.csv", b"text;queue\na;b\n", "its header is one cell: are ';' its separators?",
     "no column 'text' for `text`: its header is one cell: are ';' its separators? a .csv"),
    ("tabs.csv", b"text\tqueue\na\tb\n", "are tabs its separators?",
     "its header is one cell: are tabs its separators? a .csv has commas, a .tsv"),
    ("commas.tsv", b"queue,text\na,b\n", "are commas its separators?",
     "its header is one cell: are commas its separators? a .csv has commas, a .tsv"),
    ("bars.txt", b"text|queue\na|b\n", None,
     "its header is one cell: are '|' its separators? a .csv has commas, a .tsv"),
    ("quoted-semicolons.csv", b'"text";"queue"\n"a";"b"\n',
     "{}:1: broken row", "{}:1: broken row (',' expected after '\"'): are ';' its separators"),
    ("quoted-tabs.csv", b'"text"\t"queue"\n"a"\t"b"\n',
     "{}:1: broken row", "{}:1: broken row (',' expected after '\"'): are tabs its separators"),
    ("quoted-space.csv", b'"text" ,"queue"\n"a","b"\n',
     "{}:1: broken row", "{}:1: broken row (',' expected after '\"'): put texts that hold"),
    ("quote.csv", b'id,text\n1,a\n2,"b\n3,c\n', "{}:3: broken row",
     "{}:3: broken row (unexpected end of data): put texts that hold the separator"),
    ("short.csv", b"id,text\n1,a\n2\n",
     "{}:3: 1 cells, but the header has 2", "{}:3: 1 cells, but the header has 2"),
    ("long.csv", b"text,id\na, b,1\n",
     "{}:2: 3 cells, but the header has 2", "{}:2: 3 cells, but the header has 2"),
    ("twice.csv", b"text,text\na,b\n", "{}: column 'text' (`text_column`) is there twice",
     "{}: column 'text' (`text`) is there twice: rename one"),
    ("text.parquet", TEXT.encode(),
     "{}: damaged parquet file", "{}: damaged parquet file"),
    ("packed.parquet.xz", lzma.compress(b"PAR1"), "{}: unknown file type", "cannot read '.xz'"),
    ("paper.pdf", b"%PDF", "{}: unknown file type '.pdf': known are .txt",
     "{}: cannot read '.pdf': use one of .csv"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "as_corpus", "as_rows"), REFUSED, ids=[name for name, *_ in REFUSED]
)
def test_refused_files_are_named_with_a_remedy(tmp_path, name, data, as_corpus, as_rows):
    path = write(tmp_path / name, data)
    readers = (lambda: list(read_documents([path])), lambda: read_columns(path, WANTED))
    for read, message in zip(readers, (as_corpus, as_rows), strict=True):
        if message is None:
            assert read()
            continue
        with pytest.raises(ValueError) as error:
            read()
        assert message.format(path) in str(error.value)
        assert "\n" not in str(error.value)
