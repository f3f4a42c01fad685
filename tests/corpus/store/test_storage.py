"""Stores behind a URL: fetched once, verified, in a cache that stays within its size."""

import io
import os
import shutil
import sys
import threading

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bertsmith.cli.main import main
from bertsmith.corpus.examples.stream import ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store import blocks, store
from bertsmith.corpus.store.storage import FileCache, RemoteFolder
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish, verify_store

URL = "memory://bucket/store"
SETTINGS = ExampleSettings(length=24)


@pytest.fixture(scope="module")
def local(tmp_path_factory, write_store):
    """5 shards of 12 documents; no test changes it."""
    dice = np.random.default_rng(0)
    shards = [
        [[dice.integers(0, 4000, n) for n in dice.integers(3, 9, 6)] for _ in range(12)]
        for _ in range(5)
    ]
    return write_store(tmp_path_factory.mktemp("store"), shards)


def replace(name, content):
    fsspec.filesystem("memory").pipe_file(f"/bucket/store/{name}", content)


def cached(cache):
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def epoch(store, settings=SETTINGS):
    stream = PretrainingStream(store.train, store.tokenizer.vocabulary, settings, seed=3)
    batch, _ = stream.batch(Position(), stream.examples_in_epoch(0))
    return batch.input_ids


def test_a_published_store_reads_as_the_local_one(local, cache):
    publish(local.folder, URL)
    remote = TokenStore.open(URL)
    assert remote.fingerprint == local.fingerprint
    assert remote.tokenizer.fingerprint == local.tokenizer_fingerprint
    assert (remote.unigram_counts == local.unigram_counts).all()
    assert not cached(cache)  # so far no shard was wanted
    assert (epoch(remote) == epoch(local)).all()
    assert len(cached(cache)) == 3 * len(local.train.shards)
    assert list(verify_store(URL)) == []


def test_a_file_url_is_a_copy_of_a_slow_disk(local, tmp_path):
    remote = TokenStore.open(f"file://{local.folder}")
    assert (epoch(remote) == epoch(local)).all()
    publish(local.folder, f"file://{tmp_path}/there/store")
    assert TokenStore.open(tmp_path / "there" / "store").fingerprint == local.fingerprint


def test_a_file_is_fetched_once_for_all_threads_and_later_processes(local, monkeypatch):
    publish(local.folder, URL)
    fetched = []
    fetch = RemoteFolder._fetch

    def counted(self, file, content, path):
        fetched.append(file)
        fetch(self, file, content, path)

    monkeypatch.setattr(RemoteFolder, "_fetch", counted)
    opened = [TokenStore.open(URL) for _ in range(4)]
    threads = [threading.Thread(target=one.train.open) for one in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched) == sorted(set(fetched))
    assert len(fetched) == 3 * len(local.train.shards)


def test_the_least_recently_used_file_leaves_the_cache(tmp_path):
    cache = FileCache(tmp_path / "small", limit=250)

    def open_file(key):
        with cache.open(key, 100, lambda path: path.write_bytes(key.encode() * 100)) as file:
            return file.read()

    times = iter(range(1_000, 2_000))

    def used(key):
        assert open_file(key) == key.encode() * 100
        os.utime(cache.folder / key, (now := next(times), now))

    for key in ("a", "b", "a", "c"):
        used(key)
    assert {path.name for path in cached(cache.folder)} == {"a", "c"}
    with pytest.raises(ValueError, match="no room for a file of .*BERTSMITH_CACHE_GB"):
        cache.open("d", 251, lambda path: None)


def test_nothing_but_what_was_fetched_leaves_the_folder(local, cache, monkeypatch):
    (cache / "mine").mkdir(parents=True)
    (cache / "mine" / "file").write_bytes(b"x" * 10_000)
    publish(local.folder, URL)
    size = sum(shard.num_bytes for shard in local.train.shards)
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str(size / 1e9))
    TokenStore.open(URL).train.open()
    assert (cache / "mine" / "file").exists()


def test_a_file_that_left_the_cache_stays_readable_and_comes_again(local, cache):
    publish(local.folder, URL)
    remote = TokenStore.open(URL)
    expected = epoch(local)
    remote.train.open()
    for path in cached(cache):
        path.unlink()
    assert (epoch(remote) == expected).all() and not cached(cache)
    assert (epoch(TokenStore.open(URL)) == expected).all() and cached(cache)


def test_a_cache_smaller_than_what_is_read_together_is_refused(local, monkeypatch):
    publish(local.folder, URL)
    monkeypatch.setenv("BERTSMITH_CACHE_GB", "0.000001")
    with pytest.raises(ValueError, match=r"memory://bucket/store: .* GB are read together, the"):
        epoch(TokenStore.open(URL))
    monkeypatch.setenv("BERTSMITH_CACHE_GB", "much")
    with pytest.raises(ValueError, match="BERTSMITH_CACHE_GB = much: expected a number"):
        TokenStore.open(URL)


def test_a_cache_too_small_for_the_store_but_not_for_its_sections_is_enough(
    local, cache, monkeypatch
):
    publish(local.folder, URL)
    monkeypatch.setattr(store, "SECTION_TOKENS", local.train.num_tokens // 5)
    remote = TokenStore.open(URL)
    size = sum(shard.num_bytes for shard in remote.train.shards)
    assert remote.train.num_sections == 5
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str(0.8 * size / 1e9))
    assert len(epoch(TokenStore.open(URL))) == len(epoch(TokenStore.open(local.folder)))
    assert sum(path.stat().st_size for path in cached(cache)) <= 0.8 * size


@pytest.mark.parametrize("fault", ["flip", "cut", "longer"])
def test_what_arrives_damaged_is_named_and_not_kept(local, cache, fault):
    publish(local.folder, URL)
    content = local.storage.read("train-00001.tokens")
    flipped = bytes([content[0] ^ 1]) + content[1:]
    replace(
        "train-00001.tokens",
        {"flip": flipped, "cut": content[:-2], "longer": content + b"xx"}[fault],
    )
    with pytest.raises(ValueError, match=rf"{URL}/train-00001\.tokens: .*(damaged|bytes where)"):
        TokenStore.open(URL).train.open()
    assert not [path for path in cached(cache) if "train-00001.tokens" in path.name]
    faults = list(verify_store(URL))
    assert faults and all(f"{URL}/train-00001.tokens" in fault for fault in faults)


def test_a_transfer_that_failed_once_is_repeated(local, monkeypatch):
    publish(local.folder, URL)
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
    publish(local.folder, URL)
    TokenStore.open(URL).train.open()
    for path in cached(cache):
        if "train-00001.tokens" in path.name:
            content = path.read_bytes()
            path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    with pytest.raises(ValueError, match=rf"{cache}/.*-00001\.tokens.*: block 0 .*damaged.*cache"):
        epoch(TokenStore.open(URL))


def test_what_is_not_there_is_named(local):
    with pytest.raises(ValueError, match=rf"{URL}: no finished token store"):
        TokenStore.open(URL)
    publish(local.folder, URL)
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

    def open(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError("Access Denied"), 2, "no permission: check the credentials"),
        (TimeoutError("no answer\nfor long"), 1, "TimeoutError: no answer for long"),
    ],
)
def test_trouble_of_the_storage_is_one_line(local, monkeypatch, capsys, error, code, message):
    fsspec.register_implementation("forbidden", Forbidden, clobber=True)
    monkeypatch.setattr(Forbidden, "error", error)
    assert main(["corpus", "verify", "forbidden://bucket/store"]) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "forbidden://bucket/store/manifest.json" in said
    assert message in said
    monkeypatch.setattr(Forbidden, "info", lambda *args, **kwargs: {"size": 0})
    assert main(["corpus", "publish", str(local.folder), "forbidden://bucket/store"]) == code
    assert message in capsys.readouterr().err


def test_without_fsspec_a_url_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"memory://b: .*pip install 'bertsmith\[storage\]'"):
        TokenStore.open("memory://b")


def test_publishing_goes_on_where_it_was(local, monkeypatch, capsys):
    write, sent = RemoteFolder.write, []

    def broken(self, file, content):
        sent.append(file)
        if len(sent) == 9:
            raise ConnectionError(104, "Connection reset by peer", f"{URL}/{file}")
        write(self, file, content)

    monkeypatch.setattr(RemoteFolder, "write", broken)
    assert main(["corpus", "publish", str(local.folder), URL]) == 1
    assert "Connection reset by peer" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(URL)
    assert main(["corpus", "publish", str(local.folder), URL]) == 0
    assert f"{local.train.num_tokens:,} tokens" in capsys.readouterr().out
    assert sent[-1] == "manifest.json" and len(set(sent)) == len(sent) - 1
    assert list(verify_store(URL)) == []


def test_a_store_is_built_for_a_url(tmp_path, tokenizer, monkeypatch, capsys):
    tokenizer.save(tmp_path / "vocab")
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{k} w{k + 1}\nw{k}" for k in range(30)))
    command = ["corpus", str(tmp_path / "a.txt"), "--vocab", str(tmp_path / "vocab")]
    command += ["--sentence-per-line", "--workers", "1"]

    def refused(self, file, content):
        raise PermissionError(13, "no permission", self.name(file))

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write", refused)
        assert main([*command, "--out", URL]) == 2
    assert f"{URL}/vocab.txt: no permission" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(URL)
    assert main([*command, "--out", URL]) == 0
    assert "finished before" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "builds").iterdir())
    assert main([*command, "--out", str(tmp_path / "local")]) == 0
    assert TokenStore.open(URL).fingerprint == TokenStore.open(tmp_path / "local").fingerprint


def test_no_damaged_block_and_no_other_store_is_published(local, write_store, tmp_path, capsys):
    publish(write_store(tmp_path / "other", [[[[1, 2], [3]], [[4]]]]).folder, URL)
    with pytest.raises(ValueError, match=rf"{URL}: holds another finished token store"):
        publish(local.folder, URL)
    copy = shutil.copytree(local.folder, tmp_path / "copy")
    (copy / "train-00002.sentences").write_bytes(
        b"x" * (copy / "train-00002.sentences").stat().st_size
    )
    with pytest.raises(ValueError, match=r"train-00002\.sentences: block 0"):
        publish(copy, "memory://bucket/third")
    assert main(["corpus", "publish", str(local.folder), "folder"]) == 2
    assert "folder: no URL" in capsys.readouterr().err


def test_the_next_section_is_fetched_while_one_is_read(local, monkeypatch):
    publish(local.folder, URL)
    monkeypatch.setattr(store, "SECTION_TOKENS", local.train.num_tokens // 5)
    remote = TokenStore.open(URL)
    stream = PretrainingStream(remote.train, remote.tokenizer.vocabulary, SETTINGS, seed=3)
    _, _ = stream.batch(Position(), 1)
    ahead = stream._ahead[0, 1]
    for thread in threading.enumerate():
        if thread.name == "fetch":
            thread.join()
    assert all("files" in vars(shard) for shard in ahead.shards)
    assert stream.epoch(0, 1).section is ahead


def test_blocks_are_read_whole():
    content = blocks.Content(10, np.array([1], np.uint32))
    with pytest.raises(ValueError, match="f: 3 bytes where the manifest says 10"):
        list(blocks.checked_blocks(io.BytesIO(b"abc"), content, "f", "again"))
