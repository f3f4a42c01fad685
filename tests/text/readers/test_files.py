"""Inputs behind URLs, in fsspec's memory storage: the same documents as on a disk."""

import gzip
import importlib.util
import io
import lzma
import sys
import types

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from bertsmith.text.readers.documents import input_files, input_fingerprint, read_documents
from bertsmith.text.readers.files import RemoteFile, storage_errors

from ...tiny import refused, write

TEXT = "one\ntwo\n\nthree é\n"


@pytest.fixture
def storage():
    system, text = fsspec.filesystem("memory"), TEXT.encode()
    texts = {"b.txt": text, "a/c.txt.gz": gzip.compress(text), "a/d.txt.xz": lzma.compress(text)}
    for name, data in {**texts, ".hidden/e.txt": b"no", "f.pdf": b"no"}.items():
        system.pipe(f"/books/{name}", data)
    yield system
    system.rm("/books", recursive=True)


def names():
    return [str(file).rpartition("books/")[2] for file in input_files(["memory://books"])]


def documents(*inputs, **options):
    return [document.lines for document in read_documents(list(inputs), **options)]


def test_a_folder_is_its_text_files_and_they_read_as_on_a_disk(storage, tmp_path):
    assert names() == ["a/c.txt.gz", "a/d.txt.xz", "b.txt"]
    local = documents(write(tmp_path / "b.txt", TEXT))
    assert documents("memory://books") == 3 * local
    assert documents("memory://books/b.txt", tmp_path / "b.txt") == 2 * local


def test_the_vocabulary_of_a_model_in_a_folder_is_no_text(storage):
    storage.pipe("/books/model/vocab.txt", b"[PAD]")
    storage.pipe("/books/model/tokenizer.json", b"{}")
    storage.pipe("/books/words/vocab.txt", TEXT.encode())  # a text of that name
    assert names() == ["a/c.txt.gz", "a/d.txt.xz", "b.txt", "words/vocab.txt"]


def test_rows_of_parquet_jsonl_and_zstandard(storage, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "t.parquet")
    storage.pipe("/books/t.parquet", (tmp_path / "t.parquet").read_bytes())
    packed = pyarrow.compress(b'{"text": "a"}\n{"text": "b"}\n', "zstd", asbytes=True)
    storage.pipe("/books/t.jsonl.zst", packed)
    for name in ("t.parquet", "t.jsonl.zst"):
        assert documents(f"memory://books/{name}") == [["a"], ["b"]]


def test_a_changed_file_has_another_fingerprint(storage):
    path = ["memory://books/b.txt"]
    before = input_fingerprint(path)
    assert before == input_fingerprint(path) and before[0]["bytes"] == len(TEXT.encode())
    storage.pipe("/books/b.txt", TEXT.upper().encode())
    assert input_fingerprint(path) != before


class Told(fsspec.AbstractFileSystem):
    """A storage that tells this of each of its files."""

    cachable = False

    def __init__(self, **told):
        super().__init__()
        self.told = told

    def info(self, path, **_):
        return self.told


def test_a_fingerprint_is_of_the_version_not_of_when_and_how_it_was_read():
    def mark(**told):
        return RemoteFile("sftp://host/a.txt", Told(**told), "/a.txt").fingerprint()

    assert mark(mtime=3, time=5) == mark(mtime=3, time=6) != mark(mtime=4, time=5)
    assert mark(ETag="a", mtime=3) == mark(ETag="a", Key="a.txt") != mark(ETag="b", mtime=3)
    assert mark(size=1, created=3) == mark(size=1, created=3) != mark(size=1, created=4)


def test_the_password_of_a_url_is_used_and_not_told(storage):
    storage.pipe("/me:secret@host/b.txt", TEXT.encode())
    url = "memory://me:secret@host/b.txt"
    (recorded,) = input_fingerprint([url])
    assert documents(url) == documents("memory://books/b.txt")
    assert recorded["path"] == "memory://me:***@host/b.txt"
    storage.rm("/me:secret@host", recursive=True)


def test_a_port_is_no_password(storage):
    urls = [f"memory://host:9000/{name}@2026/b.txt" for name in ("books", "news")]
    for url in urls:
        storage.pipe(url.removeprefix("memory:/"), TEXT.encode())
    assert [file["path"] for file in input_fingerprint(urls)] == urls
    storage.rm("/host:9000", recursive=True)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere", "memory://nowhere: no such file or folder"),
        ("memory://books/f.pdf", "unknown file type '.pdf'"),
        ("memory://books/.hidden", "no text files in this folder"),
        ("nothing://a", "nothing://a: Protocol not known"),
        ("gs://bucket/a", r"gs://bucket/a: .*install gcsfs to access Google Storage$"),
    ],
)
def test_what_is_not_there_is_named(storage, url, message):
    if url == "memory://books/.hidden":
        storage.pipe("/books/.hidden/.e.txt", b"no")
        storage.rm("/books/.hidden/e.txt")
    if url.startswith("gs:") and importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(ValueError, match=message):
        input_files([url])


def test_a_damaged_file_is_named_with_its_url(storage):
    storage.pipe("/books/a/c.txt.gz", gzip.compress(TEXT.encode() * 100)[:-9])
    with pytest.raises(ValueError, match=r"books/a/c.txt.gz:\d+: damaged .gz file"):
        documents("memory://books/a/c.txt.gz")


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "txt.xz", "txt.zst", "parquet"])
def test_a_storage_that_is_too_slow_is_not_called_a_damaged_file(
    storage, tmp_path, monkeypatch, ending
):
    class Slow(io.BytesIO):
        def read(self, *_):
            raise TimeoutError("no answer")

        readinto = read1 = read

    url = f"memory://books/slow.{ending}"
    storage.pipe(f"/books/slow.{ending}", TEXT.encode())
    monkeypatch.setattr(type(storage), "_open", lambda *_, **__: Slow(TEXT.encode()))
    with pytest.raises(OSError, match=f"^{url}: TimeoutError: no answer$"):
        documents(url)


def test_a_damaged_page_of_a_parquet_file_is_named_with_its_url(storage, damaged_parquet):
    storage.pipe("/books/t.parquet", damaged_parquet)
    with pytest.raises(OSError, match=r"^memory://books/t\.parquet: OSError: Corrupt snappy"):
        documents("memory://books/t.parquet")


def test_a_storage_without_permission_is_an_error_that_names_it(storage, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(storage), "isfile", forbidden)
    said = refused("corpus", "report", "memory://books", "--exact")
    assert "memory://books: no permission: check the credentials" in said
    monkeypatch.undo()
    monkeypatch.setattr(type(storage), "_open", forbidden)
    with pytest.raises(PermissionError, match="credentials"):
        documents("memory://books/b.txt")


class HTTPError(Exception):
    pass


class HttpError(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        ("httpx2", HTTPError("no answer"), "HTTPError: no answer"),
        ("gcsfs.retry", HttpError("no answer"), "HttpError: no answer"),
        ("builtins", TimeoutError("too\n late"), "TimeoutError: too late"),
    ],
)
def test_trouble_of_a_storage_is_one_line_with_its_url(monkeypatch, module, error, says):
    """Errors of libraries are known by their names."""
    if module != "builtins":
        found = types.ModuleType(module)
        setattr(found, type(error).__name__, type(error))
        monkeypatch.setitem(sys.modules, module, found)
    with pytest.raises(OSError, match=f"^hf://a: {says}$"), storage_errors("hf://a"):
        raise error
