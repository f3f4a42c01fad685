"""Stores behind a URL: fetched once, verified, in a cache that stays within its size."""

import io
import os
import sys
import threading

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bertsmith.base.files import TEMPORARY_PREFIX
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store import blocks, storage, store
from bertsmith.corpus.store.storage import FileCache, RemoteFolder
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish, verify_store

from ...tiny import cli
from ..made import URL, replace_stored, stored, stream_of, write_shards

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """5 shards of 12 documents; no test changes it."""
    dice = np.random.default_rng(0)
    shards = [
        [[dice.integers(0, 4000, n) for n in dice.integers(3, 9, 6)] for _ in range(12)]
        for _ in range(5)
    ]
    return write_shards(tmp_path_factory.mktemp("store"), shards)


@pytest.fixture
def local(original, cache):
    """It is published."""
    publish(original.folder, URL)
    return original


def cached(cache):
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def epoch(store):
    stream = stream_of(store)
    batch, _ = stream.batch(Position(), stream.examples_in_epoch(0))
    return batch.input_ids


def test_a_published_store_reads_as_the_local_one(local, cache):
    remote = TokenStore.open(URL)
    assert remote.fingerprint == local.fingerprint
    assert remote.tokenizer.fingerprint == local.tokenizer_fingerprint
    assert (remote.unigram_counts == local.unigram_counts).all()
    assert not cached(cache)  # so far no shard was wanted
    assert (epoch(remote) == epoch(local)).all()
    assert len(cached(cache)) == 3 * len(local.train.shards)
    assert list(verify_store(URL)) == []


def test_a_file_url_is_a_copy_of_a_slow_disk(original, tmp_path):
    remote = TokenStore.open(f"file://{original.folder}")
    assert (epoch(remote) == epoch(original)).all()
    publish(original.folder, f"file://{tmp_path}/there/store")
    assert TokenStore.open(tmp_path / "there" / "store").fingerprint == original.fingerprint


def test_a_file_is_fetched_once_for_all_threads_and_later_processes(local, monkeypatch):
    fetched, fetch = [], RemoteFolder._fetch

    def counted(self, file, content, path):
        fetched.append(file)
        fetch(self, file, content, path)

    monkeypatch.setattr(RemoteFolder, "_fetch", counted)
    threads = [threading.Thread(target=TokenStore.open(URL).train.open) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched) == sorted(set(fetched))
    assert len(fetched) == 3 * len(local.train.shards)


def test_the_least_recently_used_file_leaves_the_cache(tmp_path):
    cache = FileCache(tmp_path / "small", limit=250)
    for now, key in enumerate(("a", "b", "a", "c"), 1_000):
        content = key.encode() * 100
        with cache.open(key, 100, lambda path, content=content: path.write_bytes(content)) as file:
            assert file.read() == content
        os.utime(cache.folder / key, (now, now))
    assert {path.name for path in cached(cache.folder)} == {"a", "c"}
    with pytest.raises(ValueError, match="no room for a file of .*BERTSMITH_CACHE_GB"):
        cache.open("d", 251, lambda path: None)


def test_a_file_under_way_counts_with_its_full_size(local, cache, monkeypatch):
    sizes, honest = [], storage.checked_blocks

    def watched(source, content, *names):
        under_way = {path.stat().st_size for path in cache.rglob(f"{TEMPORARY_PREFIX}*")}
        sizes.append(content.num_bytes in under_way)
        return honest(source, content, *names)

    monkeypatch.setattr(storage, "checked_blocks", watched)
    TokenStore.open(URL).train.open()
    assert sizes and all(sizes)


def test_nothing_of_a_failed_attempt_is_kept(local, cache, monkeypatch):
    """The first answer for each file is too long."""
    honest, seen = RemoteFolder.stream, set()

    def stream(folder, file):
        with honest(folder, file) as source:
            content = source.read()
        surplus = b"" if file in seen or not file.startswith("train") else b"more"
        seen.add(file)
        return io.BytesIO(content + surplus)

    monkeypatch.setattr(RemoteFolder, "stream", stream)
    assert (epoch(TokenStore.open(URL)) == epoch(local)).all() and seen
    assert (epoch(TokenStore.open(URL)) == epoch(local)).all()  # what the cache has kept


def test_nothing_but_what_was_fetched_leaves_the_folder(local, cache, monkeypatch):
    (cache / "mine").mkdir(parents=True)
    (cache / "mine" / "file").write_bytes(b"x" * 10_000)
    size = sum(shard.num_bytes for shard in local.train.shards)
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str(size / 1e9))
    TokenStore.open(URL).train.open()
    assert (cache / "mine" / "file").exists()


def test_a_file_that_left_the_cache_stays_readable_and_comes_again(local, cache):
    remote = TokenStore.open(URL)
    expected = epoch(local)
    remote.train.open()
    for path in cached(cache):
        path.unlink()
    assert (epoch(remote) == expected).all() and not cached(cache)
    assert (epoch(TokenStore.open(URL)) == expected).all() and cached(cache)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("0.000001", r"memory://bucket/store: .* GB are read together, the"),
        ("much", "BERTSMITH_CACHE_GB = much: expected a number"),
    ],
)
def test_a_cache_smaller_than_what_is_read_together_is_refused(local, monkeypatch, limit, message):
    monkeypatch.setenv("BERTSMITH_CACHE_GB", limit)
    with pytest.raises(ValueError, match=message):
        epoch(TokenStore.open(URL))


@pytest.fixture
def sectioned(local, monkeypatch):
    monkeypatch.setattr(store, "SECTION_TOKENS", local.train.num_tokens // 5)
    remote = TokenStore.open(URL)
    assert remote.train.num_sections == 5
    return remote


def test_a_cache_for_the_sections_of_a_store_is_enough(sectioned, local, cache, monkeypatch):
    size = sum(shard.num_bytes for shard in sectioned.train.shards)
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str(0.8 * size / 1e9))
    assert len(epoch(TokenStore.open(URL))) == len(epoch(TokenStore.open(local.folder)))
    assert sum(path.stat().st_size for path in cached(cache)) <= 0.8 * size


def test_the_next_section_is_fetched_while_one_is_read(sectioned):
    stream = stream_of(sectioned)
    _, _ = stream.batch(Position(), 1)
    ahead = stream._ahead[0, 1]
    for thread in threading.enumerate():
        if thread.name == "fetch":
            thread.join()
    assert all("files" in vars(shard) for shard in ahead.shards)
    assert stream.epoch(0, 1).section is ahead


@pytest.mark.parametrize(
    "spoilt",
    [lambda c: bytes([c[0] ^ 1]) + c[1:], lambda c: c[:-2], lambda c: c + b"xx"],
    ids=["flip", "cut", "longer"],
)
def test_what_arrives_damaged_is_named_and_not_kept(local, cache, spoilt):
    name = "train-00001.tokens"
    replace_stored(name, spoilt(stored(name)))
    with pytest.raises(ValueError, match=rf"{URL}/train-00001\.tokens: .*(damaged|bytes where)"):
        TokenStore.open(URL).train.open()
    assert not [path for path in cached(cache) if name in path.name]
    faults = list(verify_store(URL))
    assert faults and all(f"{URL}/{name}" in fault for fault in faults)


def test_a_transfer_that_failed_once_is_repeated(local, monkeypatch):
    stream, cut = RemoteFolder.stream, []

    def cut_once(self, file):
        if file.endswith(".tokens") and file not in cut:
            cut.append(file)
            return io.BytesIO(stream(self, file).read()[:-1])
        return stream(self, file)

    monkeypatch.setattr(RemoteFolder, "stream", cut_once)
    assert (epoch(TokenStore.open(URL)) == epoch(local)).all()
    assert len(cut) == len(local.train.shards)


def test_a_file_damaged_in_the_cache_is_named(local, cache):
    TokenStore.open(URL).train.open()
    for path in cached(cache):
        if "train-00001.tokens" in path.name:
            content = path.read_bytes()
            path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    with pytest.raises(ValueError, match=rf"{cache}/.*-00001\.tokens.*: block 0 .*damaged.*cache"):
        epoch(TokenStore.open(URL))


def test_what_is_not_there_is_named(original):
    with pytest.raises(ValueError, match=rf"{URL}: no finished token store"):
        TokenStore.open(URL)
    publish(original.folder, URL)
    del MemoryFileSystem.store["/bucket/store/train-00000.documents"]
    with pytest.raises(ValueError, match=r"train-00000\.documents: missing"):
        TokenStore.open(URL).train.open()
    with pytest.raises(ValueError, match="nosuch://bucket/store: .*nosuch"):
        TokenStore.open("nosuch://bucket/store")


class Forbidden(MemoryFileSystem):
    """A storage whose credentials are wrong."""

    protocol = "forbidden"
    error: OSError = PermissionError("Forbidden")

    def cat_file(self, *args, **kwargs):
        raise self.error

    open = cat_file


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError("Access Denied"), 2, "no permission: check the credentials"),
        (TimeoutError("no answer\nfor long"), 1, "TimeoutError: no answer for long"),
    ],
)
def test_trouble_of_the_storage_is_one_line(original, monkeypatch, error, code, message):
    fsspec.register_implementation("forbidden", Forbidden, clobber=True)
    monkeypatch.setattr(Forbidden, "error", error)
    ran = cli("corpus", "verify", "forbidden://bucket/store")
    assert ran.code == code and ran.err.count("\n") == 1 and message in ran.err
    assert "forbidden://bucket/store/manifest.json" in ran.err
    monkeypatch.setattr(Forbidden, "info", lambda *args, **kwargs: {"size": 0})
    ran = cli("corpus", "publish", original.folder, "forbidden://bucket/store")
    assert ran.code == code and message in ran.err


def test_without_fsspec_a_url_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"memory://b: .*pip install 'bertsmith\[storage\]'"):
        TokenStore.open("memory://b")


def test_a_file_on_a_disk_is_whole_or_absent(tmp_path):
    folder = tmp_path / "there" / "sub"
    target = RemoteFolder(f"file://{tmp_path}/there")

    def cut():
        yield b"half"
        raise ConnectionError(104, "Connection reset by peer", "a")

    with pytest.raises(ConnectionError):
        target.write("sub/a", cut())
    assert list(folder.iterdir()) == []
    target.write("sub/a", [b"ha", b"lf"])
    assert (folder / "a").read_bytes() == b"half"


def test_blocks_are_read_whole():
    content = blocks.Content(10, np.array([1], np.uint32))
    with pytest.raises(ValueError, match="f: 3 bytes where the manifest says 10"):
        list(blocks.checked_blocks(io.BytesIO(b"abc"), content, "f", "again"))
