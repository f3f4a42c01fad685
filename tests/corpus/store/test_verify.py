"""A store sent to a URL: nothing of another one is left in it, and no half of one is read."""

import re
import shutil

import numpy as np
import pytest

from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.store.storage import RemoteFolder
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import built_for, publish, verify_store

from ...tiny import bertsmith, cli, refused, write
from ..made import TOKENIZER, URL, replace_stored, stored, write_shards

pytestmark = pytest.mark.usefixtures("cache")
RESET = ConnectionError(104, "Connection reset by peer", "a file")


@pytest.fixture
def text(tmp_path):
    """seed -> a file of texts."""

    def text(seed):
        dice = np.random.default_rng(seed)
        documents = (" ".join(f"w{word}" for word in dice.integers(0, 4000, 20)) for _ in range(30))
        return write(tmp_path / f"{seed}.txt", "\n\n".join(documents))

    return text


@pytest.fixture
def make(tmp_path, text):
    """seed -> the folder of a store whose files have the sizes of any other one's."""

    def make(seed):
        folder = tmp_path / f"store{seed}"
        settings = BuildSettings(sentence_per_line=True, held_out=0.0)
        build_store([text(seed)], TOKENIZER, folder, settings)
        return folder

    return make


@pytest.fixture
def corpus(text, tmp_path):
    """out -> the end of a command that builds a store there."""
    TOKENIZER.save(tmp_path / "vocab")
    words = ["corpus", text(1), "--vocab", tmp_path / "vocab", "--workers", 1]
    return lambda out: cli(*words, "--sentence-per-line", "--out", out)


def sent(monkeypatch, until=None, error=RESET):
    """The names that are sent from now on, up to an error at `until`."""
    names, write = [], RemoteFolder.write

    def watched(self, file, blocks):
        if file == until:
            raise error
        names.append(file)
        write(self, file, blocks)

    monkeypatch.setattr(RemoteFolder, "write", watched)
    return names


def test_nothing_of_an_unfinished_copy_of_another_store_stays(make, monkeypatch):
    first, second = make(1), make(2)
    with monkeypatch.context() as patch:
        sent(patch, until="manifest.json")
        with pytest.raises(ConnectionError):
            publish(first, URL)
    publish(second, URL)
    assert len(stored("unigram_counts.bin")) == (first / "unigram_counts.bin").stat().st_size
    assert list(verify_store(URL)) == []


def test_a_damaged_copy_is_mended_by_the_same_command(make, monkeypatch):
    publish(folder := make(1), URL)
    content = stored("train-00000.tokens")
    replace_stored("train-00000.tokens", bytes([content[0] ^ 1]) + content[1:])
    (fault,) = verify_store(URL)
    assert "send it again with `bertsmith corpus publish`" in fault
    names = sent(monkeypatch)
    publish(folder, URL)
    assert names == ["train-00000.tokens", "manifest.json"]
    assert list(verify_store(URL)) == []


def test_publishing_goes_on_where_it_was(make, monkeypatch):
    folder = make(1)
    with monkeypatch.context() as patch:
        first = sent(patch, until="train-00000.sentences")
        ran = cli("corpus", "publish", folder, URL)
    assert ran.code == 1 and "Connection reset by peer" in ran.err and len(first) > 1
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(URL)
    names = sent(monkeypatch)
    tokens = TokenStore.open(folder).train.num_tokens
    assert f"{tokens:,} tokens" in bertsmith("corpus", "publish", folder, URL)
    assert names[-1] == "manifest.json" and len({*first, *names}) == len(first) + len(names)
    assert list(verify_store(URL)) == []


def test_of_a_grown_store_what_was_sent_before_is_not_read_again(make, text, monkeypatch):
    publish(folder := make(1), URL)
    append_text([text(3)], folder)
    read, stream = [], RemoteFolder.stream
    monkeypatch.setattr(
        RemoteFolder, "stream", lambda self, file: read.append(file) or stream(self, file)
    )
    names = sent(monkeypatch)
    publish(folder, URL)
    assert read == [] and "manifest-0001.json" in names
    assert all(name.startswith(("generation-0002/", "manifest")) for name in names)
    assert list(verify_store(URL)) == []


def test_a_later_generation_is_kept_and_nobody_is_told_to_remove_it(make, text, tmp_path):
    older = shutil.copytree(folder := make(1), tmp_path / "older")
    append_text([text(3)], folder)
    publish(folder, URL)
    holds = rf"{URL}: holds generation 2 of this store, {older} is generation 1: publish the folder"
    with pytest.raises(ValueError, match=holds):
        publish(older, URL)
    assert list(verify_store(URL)) == [] and TokenStore.open(URL).generation == 2


@pytest.mark.parametrize("length", [0, 40])
def test_a_manifest_that_a_kill_cut_off_is_no_store_and_no_obstacle(make, length):
    publish(folder := make(1), URL)
    replace_stored("manifest.json", stored("manifest.json")[:length])
    with pytest.raises(ValueError, match=rf"{URL}/manifest.json: damaged.*corpus publish"):
        TokenStore.open(URL)
    publish(folder, URL)
    assert list(verify_store(URL)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"of": "someone"}', rf"{URL}/manifest.json: damaged, or not of a token store"),
        (b'{"splits": {}, "format": 2}', "damaged.*remove it or choose another URL"),
    ],
)
def test_a_manifest_that_cannot_be_told_is_not_written_over(make, content, message):
    replace_stored("manifest.json", content)
    with pytest.raises(ValueError, match=message):
        publish(make(1), URL)
    assert stored("manifest.json") == content


def test_the_password_of_a_url_is_used_and_not_told(make):
    url, shown = "memory://me:secret@bucket/store", "memory://me:***@bucket/store"
    assert bertsmith("corpus", "publish", make(1), url).startswith(f"{shown}: 30 documents")
    assert bertsmith("corpus", "verify", url).startswith(f"{shown}: sound")
    with pytest.raises(ValueError, match=re.escape(f"{shown}2: no finished token store")):
        TokenStore.open(f"{url}2")


def test_no_damaged_block_and_no_other_store_is_published(make, tmp_path):
    publish(write_shards(tmp_path / "other", [[[[1, 2], [3]], [[4]]]]).folder, URL)
    folder = make(1)
    with pytest.raises(ValueError, match=rf"{URL}: holds another finished token store"):
        publish(folder, URL)
    copy = shutil.copytree(folder, tmp_path / "copy") / "train-00000.sentences"
    copy.write_bytes(b"x" * copy.stat().st_size)
    with pytest.raises(ValueError, match=r"train-00000\.sentences: block 0"):
        publish(copy.parent, "memory://bucket/third")
    assert "folder: no URL" in refused("corpus", "publish", folder, "folder")


def test_a_store_is_built_for_a_url(corpus, tmp_path, cache, monkeypatch):
    error = PermissionError(13, "no permission", f"{URL}/vocab.txt")
    with monkeypatch.context() as patch:
        sent(patch, "vocab.txt", error)
        ran = corpus(URL)
    assert ran.code == 2 and f"{URL}/vocab.txt: no permission" in ran.err
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(URL)
    ran = corpus(URL)
    assert ran.code == 0 and "finished before" in ran.err
    assert not list((cache / "builds").iterdir())
    assert corpus(tmp_path / "local").code == 0
    assert TokenStore.open(URL).fingerprint == TokenStore.open(tmp_path / "local").fingerprint


def test_a_finished_store_at_the_url_is_told_before_a_build(make, corpus, cache, monkeypatch):
    publish(make(2), URL)
    before = TokenStore.open(URL).fingerprint
    ran = corpus(URL)
    assert ran.code == 2 and ran.err == (
        f"bertsmith corpus: {URL}: holds a finished token store: remove it or choose another URL\n"
    )
    assert not (cache / "builds").exists() and TokenStore.open(URL).fingerprint == before

    def forbidden(self, file):
        raise PermissionError(13, "no permission", self.name(file))

    monkeypatch.setattr(RemoteFolder, "size", forbidden)
    ran = corpus("memory://bucket/new")
    assert ran.code == 2 and "memory://bucket/new/manifest.json: no permission" in ran.err
    assert not (cache / "builds").exists()


def test_a_build_that_was_sent_whole_but_not_removed_is_gone_on_with(corpus, cache, monkeypatch):
    def stopped(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.corpus.store.verify.remove_folder", stopped)
        assert corpus(URL).code == 130
    assert list((cache / "builds").iterdir())
    ran = corpus(URL)
    assert ran.code == 0 and "finished before" in ran.err
    assert list((cache / "builds").iterdir()) == []


def test_what_a_kill_left_of_a_sent_build_is_not_built_on(make, monkeypatch):
    source, removed = make(1), shutil.rmtree

    def killed(path, *rest, **more):
        if not more:  # of the build itself
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt
        removed(path, *rest, **more)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt), built_for(URL) as folder:
        shutil.copytree(source, folder)
    assert not folder.exists() and TokenStore.open(URL).fingerprint
    with pytest.raises(ValueError, match="holds a finished token store"), built_for(URL):
        pass


def test_urls_are_refused_where_folders_are_meant(text):
    said = refused("corpus", "publish", URL, "memory://bucket/other")
    assert f"{URL}: a URL: name the folder of a store" in said
    said = refused("corpus", "append", text(3), "--store", URL)
    assert f"{URL}: a URL: append to the folder that was published" in said
