"""Documents out of every kind of file, and a clear refusal of what is not text."""

import bz2
import contextlib
import csv
import errno
import gzip
import json
import lzma
import os
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bertsmith.text.readers import documents as readers
from bertsmith.text.readers.documents import (
    Document,
    input_files,
    input_fingerprint,
    read_documents,
    sample_lines,
)

from ...tiny import write

TEXT = "Erster Absatz: schön.\n  Zweiter Absatz. \n\n\n \n두 번째 문서입니다.\n"
DOCUMENTS = [(1, ["Erster Absatz: schön.", "Zweiter Absatz."]), (6, ["두 번째 문서입니다."])]


def found(*paths, **options):
    return [(d.line, d.lines) for d in read_documents(list(paths), **options)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", TEXT),
        ("bom.txt", b"\xef\xbb\xbf" + TEXT.encode()),
        ("crlf.TXT", TEXT.replace("\n", "\r\n")),
        ("no_last_newline.txt", TEXT.rstrip()),
        ("a.txt.gz", gzip.compress(TEXT.encode(), mtime=0)),
        ("a.txt.bz2", bz2.compress(TEXT.encode())),
        ("a.txt.xz", lzma.compress(TEXT.encode())),
        ("a.txt.zst", zstandard.compress(TEXT.encode())),
        ("two.txt.zst", b"".join(zstandard.compress(t.encode()) for t in (TEXT[:9], TEXT[9:]))),
    ],
)
def test_text_files(tmp_path, name, data):
    assert found(write(tmp_path / name, data)) == DOCUMENTS


def test_rows_are_documents_and_their_lines_paragraphs(tmp_path):
    texts = ['日本語の文。\n\n"二つ目", の段落。', "one\ttwo", None, "", "last"]
    expected = [['日本語の文。', '"二つ目", の段落。'], ["one\ttwo"], ["last"]]  # fmt: skip
    rows = [{"id": i, "body": text} for i, text in enumerate(texts)]
    jsonl = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    write(tmp_path / "a.jsonl", jsonl)
    write(tmp_path / "a.jsonl.gz", gzip.compress(jsonl.encode(), mtime=0))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["id", "body"])
        writer.writeheader()
        writer.writerows(rows)
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet", "a.csv"):
        assert [lines for _, lines in found(tmp_path / name, text_column="body")] == expected
    # Lines count from 1; the csv header is line 1 and its first row holds two line breaks.
    assert [line for line, _ in found(tmp_path / "a.csv", text_column="body")] == [2, 5, 8]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("quotes.tsv", 'label\ttext\n0\t"he said\n1\tb\n', [(2, ['"he said']), (3, ["b"])]),
        ("returns.csv", '\rtext,n\ra,1\r"b\rc",2\r', [(3, ["a"]), (4, ["b", "c"])]),
        ("short.csv", "text,note\r\na\r\nb,,\r\n", [(2, ["a"]), (3, ["b"])]),
        ("returns.tsv", "label\ttext\r\n0\ta\rb\r\n\r\n1\tc\n", [(2, ["a", "b"]), (4, ["c"])]),
        ("surrogate.jsonl", r'{"text": "a\ud83d b \ud83d\ude00"}', [(1, ["a\ufffd b \U0001f600"])]),
    ],
)
def test_unusual_characters_in_rows(tmp_path, name, data, expected):
    """Plain quotes, a line break and half a surrogate pair, which is replaced."""
    assert found(write(tmp_path / name, data)) == expected


def test_folders_are_read_in_order_without_what_is_not_text(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", ".hidden/x.txt", "b/picture.png", "._a.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "lost+found" / "x.txt", "of the disk")
    assert [d.lines for d in read_documents([tmp_path])] == [["a.txt"], ["b/1.txt"], ["b/2.txt"]]
    assert [file["bytes"] for file in input_fingerprint([tmp_path])] == [5, 7, 7]


def test_folders_behind_links_are_read_once_and_loops_end(tmp_path):
    for name in ("books/a.txt", "books/z/b.txt", "disk/c.txt", "disk/d/e.txt", "disk/.d/f.txt"):
        write(tmp_path / name, name)
    books = tmp_path / "books"
    assert [str(file.relative_to(books)) for file in input_files([books])] == ["a.txt", "z/b.txt"]
    for link, target in (("link", "disk"), ("a-loop", "books"), ("z/again", "disk/d")):
        (books / link).symlink_to(tmp_path / target)
    (books / "0").symlink_to(books / "z")  # what lies here keeps its own name
    (books / ".hidden").symlink_to(tmp_path / "disk")
    (books / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    names = [str(file.relative_to(books)) for file in input_files([books])]
    assert names == ["a.txt", "link/c.txt", "link/d/e.txt", "z/b.txt"]
    assert len(input_files([books / "link"])) == 2


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    for name in ("a.txt", "locked/b.txt", ".locked/c.txt"):
        write(tmp_path / name, b"a")
    scan = os.scandir

    def refused(path="."):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError) as error:
        input_files([tmp_path])
    assert error.value.filename == str(tmp_path / "locked")


def test_the_vocabulary_of_a_model_or_store_in_a_folder_is_no_text(tmp_path):
    for name in ("a.txt", "vocab.txt", "store/vocab.txt", "store/tokenizer_config.json"):
        write(tmp_path / name, "a")
    assert input_files([tmp_path]) == [tmp_path / "a.txt", tmp_path / "vocab.txt"]
    with pytest.raises(ValueError, match="store: no text files in this folder"):
        input_files([tmp_path / "store"])
    assert input_files([tmp_path / "store" / "vocab.txt"])  # who names it means it


@pytest.mark.parametrize(
    ("limit", "most", "text", "expected"),
    [
        ("MAX_LINES", 2, "a\nb\nc\nd\ne\n\nf\ng\n",
         [(1, ["a", "b"]), (3, ["c", "d"]), (5, ["e"]), (7, ["f", "g"])]),
        ("MAX_DOCUMENT", 10, "12345\n12345\n1234567\n12345678901234\n\n1",
         [(1, ["12345"] * 2), (3, ["1234567"]), (4, ["12345678901234"]), (6, ["1"])]),
    ],
)  # fmt: skip
def test_a_long_document_comes_in_parts(tmp_path, monkeypatch, limit, most, text, expected):
    monkeypatch.setattr(readers, limit, most)
    assert found(write(tmp_path / "a.txt", text)) == expected


def test_bad_inputs_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file"):
        list(read_documents([tmp_path / "nowhere"]))
    with pytest.raises(ValueError, match="no text files in this folder"):
        input_files([tmp_path])
    numbers = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), numbers)
    with pytest.raises(ValueError, match="row 1: 'text' is 1: expected a string"):
        found(numbers)
    with pytest.raises(ValueError, match=r"no column 'x' \(found: text, body\): .* rename it 'x'$"):
        found(numbers, text_column="x")


def test_two_columns_of_one_name_are_refused_in_parquet(tmp_path):
    columns = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'text' is there twice: rename one"):
        list(read_documents([tmp_path / "a.parquet"]))


def test_a_damaged_page_and_text_that_is_not_utf_8_are_named_in_parquet(tmp_path, damaged_parquet):
    path = write(tmp_path / "page.parquet", damaged_parquet)
    with pytest.raises(ValueError, match=r"page\.parquet: damaged parquet file.*: copy it again"):
        found(path)
    path = tmp_path / "latin1.parquet"
    cells = pa.array([b"ok"] * 300 + [b"sch\xf6n", b"ok"])
    texts = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    pq.write_table(pa.table({"text": texts}), path)
    with pytest.raises(ValueError, match=r"latin1\.parquet: row 301: not UTF-8 \(.*0xf6.*anew"):
        found(path)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (pa.ArrowNotImplementedError("codec\nmore"), ValueError, r"a\.parquet: .* \(codec\): copy"),
        (pa.ArrowMemoryError("no room"), MemoryError, "^no room$"),
        (OSError(errno.EIO, "Input/output error"), OSError, "Input/output error"),
    ],
)
def test_only_what_is_wrong_with_a_parquet_file_is_said_of_it(
    tmp_path, monkeypatch, error, kind, message
):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fails)
    with pytest.raises(kind, match=message):
        found(path)


@contextlib.contextmanager
def memory_below(limit):
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit


def test_a_line_of_ten_megabytes_is_refused_early(tmp_path):
    path = write(tmp_path / "long.txt", b"short\n" + b"x" * 10_000_000)
    message = "long.txt:2: line of more than 1,000,000 characters: put"
    with pytest.raises(ValueError, match=message), memory_below(4_000_000):
        found(path)
    row = write(tmp_path / "row.jsonl", json.dumps({"text": "x" * 2_000_000}))
    with pytest.raises(ValueError, match="row.jsonl:1: line of more than 1,000,000"):
        found(row)


def test_characters_are_counted_not_bytes(tmp_path):
    line = "字" * readers.MAX_LINE
    assert found(write(tmp_path / "a.txt", line)) == [(1, [line])]
    with pytest.raises(ValueError, match="more than 1,000,000"):
        found(write(tmp_path / "b.txt", line + "字"))


def test_memory_does_not_grow_with_the_file(tmp_path):
    data = (b"word " * 400 + b"\n\n") * 10_000  # 20 MB
    path = write(tmp_path / "a.txt.gz", gzip.compress(data, 1))
    del data
    with memory_below(2_000_000):
        assert sum(1 for _ in read_documents([path])) == 10_000


def test_a_document_is_plain_data(tmp_path):
    path = write(tmp_path / "a.txt", b"x")
    assert list(read_documents([path])) == [Document(str(path), 1, ["x"])]


def test_every_file_gives_an_equal_share(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "aaaa\naaaa\n\naaaa\n")
    write(tmp_path / "b.txt", "bb\n\nbb\n")
    write(tmp_path / "c.jsonl", '{"t": "cccccccc"}\n{"t": "c"}\n')
    everything = ["aaaa"] * 3 + ["bb"] * 2 + ["cccccccc", "c"]
    assert sample_lines([tmp_path], text_column="t") == everything
    monkeypatch.setattr(readers, "SAMPLE", 18)
    some = ["aaaa", "aa", "bb", "bb", "cccccc"]
    assert sample_lines([tmp_path], text_column="t") == some


def test_of_too_many_files_some_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_FILES", 3)
    for number in range(7):
        write(tmp_path / f"{number}.txt", str(number))
    assert sample_lines([tmp_path]) == ["0", "3", "6"]


BOOK = """\
The Project Gutenberg eBook of A Book

Title: A Book

*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***




CHAPTER I.

It was a dark night, and
the wind
blew.

\u201cWho is there?\u201d *** END of it.


*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***

Updated editions will replace the previous one.
"""
OLDER = """\
***START OF THIS PROJECT GUTENBERG EBOOK OTHER***
Line one
line two.
***END OF THIS PROJECT GUTENBERG EBOOK OTHER***
The licence.
"""
PARAGRAPHS = [
    "CHAPTER I.",
    "It was a dark night, and the wind blew.",
    "“Who is there?” *** END of it.",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOOK, [(10, PARAGRAPHS)]),
        (OLDER + BOOK, [(2, ["Line one line two."]), (15, PARAGRAPHS)]),
        (BOOK[: BOOK.index("blew")], [(10, ["CHAPTER I.", "It was a dark night, and the wind"])]),
        (BOOK.replace("*** START", "START"), None),
        ("\n" * 1000 + BOOK, None),
        ("x" * 1001 + "\n" + BOOK, None),
    ],
    ids=["book", "two books", "cut", "no mark", "mark far down", "other lines"],
)
def test_of_a_book_of_project_gutenberg_the_paragraphs_are_read(tmp_path, text, expected):
    """Without a mark in its head a file is read as any other: a line is a paragraph."""
    documents = found(write(tmp_path / "a.txt", text))
    if expected is not None:
        assert documents == expected
    else:
        assert ["It was a dark night, and", "the wind", "blew."] in [
            lines for _, lines in documents
        ]


def test_a_book_without_blank_lines_is_refused(tmp_path):
    mark = "*** START OF THE PROJECT GUTENBERG EBOOK A ***\n"
    path = write(tmp_path / "a.txt", mark + ("x" * 999 + "\n") * 1001)
    with pytest.raises(ValueError, match=r"a\.txt:2: line of more than 1,000,000 characters"):
        found(path)
