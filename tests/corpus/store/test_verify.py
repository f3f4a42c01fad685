"""A store sent to a URL: nothing of another one is left in it, and no half of one is read."""

import shutil

import fsspec
import numpy as np
import pytest

from bertsmith.cli.main import main
from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.store.storage import RemoteFolder
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import built_for, publish, verify_store

URL = "memory://bucket/store"


def write_text(path, seed):
    dice = np.random.default_rng(seed)
    documents = (" ".join(f"w{word}" for word in dice.integers(0, 4000, 20)) for _ in range(30))
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture
def make(tmp_path, tokenizer):
    """seed -> the folder of a store whose files have the sizes of any other one's."""

    def run(seed):
        text, folder = write_text(tmp_path / f"{seed}.txt", seed), tmp_path / f"store{seed}"
        build_store([text], tokenizer, folder, BuildSettings(sentence_per_line=True, held_out=0.0))
        return folder

    return run


def sent(monkeypatch, until=None):
    """The names that are sent from now on, up to a broken connection at `until`."""
    names, write = [], RemoteFolder.write

    def watched(self, file, blocks):
        if file == until:
            raise ConnectionError(104, "Connection reset by peer", file)
        names.append(file)
        write(self, file, blocks)

    monkeypatch.setattr(RemoteFolder, "write", watched)
    return names


def stored(name):
    return fsspec.filesystem("memory").cat_file(f"/bucket/store/{name}")


def replace(name, content):
    fsspec.filesystem("memory").pipe_file(f"/bucket/store/{name}", content)


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
    folder = make(1)
    publish(folder, URL)
    content = stored("train-00000.tokens")
    replace("train-00000.tokens", bytes([content[0] ^ 1]) + content[1:])
    (fault,) = verify_store(URL)
    assert "send it again with `bertsmith corpus publish`" in fault
    with monkeypatch.context() as patch:
        names = sent(patch)
        publish(folder, URL)
    assert names == ["train-00000.tokens", "manifest.json"]
    assert list(verify_store(URL)) == []


def test_of_a_grown_store_what_was_sent_before_is_not_read_again(make, tmp_path, monkeypatch):
    folder = make(1)
    publish(folder, URL)
    append_text([write_text(tmp_path / "more.txt", 3)], folder)
    read = []
    stream = RemoteFolder.stream
    monkeypatch.setattr(
        RemoteFolder, "stream", lambda self, file: read.append(file) or stream(self, file)
    )
    names = sent(monkeypatch)
    publish(folder, URL)
    assert read == [] and "manifest-0001.json" in names
    assert all(name.startswith(("generation-0002/", "manifest")) for name in names)
    assert list(verify_store(URL)) == []


@pytest.mark.parametrize("length", [0, 40])
def test_a_manifest_that_a_kill_cut_off_is_no_store_and_no_obstacle(make, length):
    folder = make(1)
    publish(folder, URL)
    replace("manifest.json", stored("manifest.json")[:length])
    with pytest.raises(ValueError, match=rf"{URL}/manifest.json: damaged.*corpus publish"):
        TokenStore.open(URL)
    publish(folder, URL)
    assert list(verify_store(URL)) == []


def test_a_manifest_that_cannot_be_told_is_not_written_over(make):
    folder = make(1)
    replace("manifest.json", b'{"of": "someone"}')
    with pytest.raises(ValueError, match=rf"{URL}/manifest.json: damaged, or not of a token store"):
        publish(folder, URL)
    replace("manifest.json", b'{"splits": {}, "format": 2}')
    with pytest.raises(ValueError, match="damaged.*remove it or choose another URL"):
        publish(folder, URL)
    assert stored("manifest.json") == b'{"splits": {}, "format": 2}'


def test_a_file_on_a_disk_is_whole_or_absent(make, tmp_path, monkeypatch):
    there = tmp_path / "there"
    target = RemoteFolder(f"file://{there}")

    def cut():
        yield b"half"
        raise ConnectionError(104, "Connection reset by peer", "a")

    with pytest.raises(ConnectionError):
        target.write("sub/a", cut())
    assert list((there / "sub").iterdir()) == []
    target.write("sub/a", [b"ha", b"lf"])
    assert (there / "sub" / "a").read_bytes() == b"half"


def corpus(tmp_path, tokenizer, out, seed=1):
    tokenizer.save(tmp_path / "vocab")
    text = tmp_path / f"text{seed}.txt"
    if not text.exists():
        write_text(text, seed)
    command = ["corpus", str(text), "--vocab", str(tmp_path / "vocab"), "--workers", "1"]
    return main([*command, "--sentence-per-line", "--out", out])


def test_a_finished_store_at_the_url_is_told_before_anything_is_built(
    make, tokenizer, tmp_path, cache, monkeypatch, capsys
):
    publish(make(2), URL)
    before = TokenStore.open(URL).fingerprint
    capsys.readouterr()
    assert corpus(tmp_path, tokenizer, URL) == 2
    said = capsys.readouterr().err
    assert said == (
        f"bertsmith corpus: {URL}: holds a finished token store: remove it or choose another URL\n"
    )
    assert not (cache / "builds").exists() and TokenStore.open(URL).fingerprint == before

    def forbidden(self, file):
        raise PermissionError(13, "no permission", self.name(file))

    monkeypatch.setattr(RemoteFolder, "size", forbidden)
    assert corpus(tmp_path, tokenizer, "memory://bucket/new") == 2
    assert "memory://bucket/new/manifest.json: no permission" in capsys.readouterr().err
    assert not (cache / "builds").exists()


def test_a_build_that_was_sent_whole_but_not_removed_is_gone_on_with(
    tokenizer, tmp_path, cache, monkeypatch, capsys
):
    def stopped(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.corpus.store.verify.remove_folder", stopped)
        assert corpus(tmp_path, tokenizer, URL) == 130
    assert list((cache / "builds").iterdir())
    assert corpus(tmp_path, tokenizer, URL) == 0
    assert "finished before" in capsys.readouterr().err
    assert list((cache / "builds").iterdir()) == []


def test_what_a_kill_left_of_a_sent_build_is_not_built_on(tmp_path, cache, monkeypatch, make):
    source = make(1)
    removed = shutil.rmtree

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


def test_urls_are_refused_where_folders_are_meant(make, tmp_path, capsys):
    assert main(["corpus", "publish", URL, "memory://bucket/other"]) == 2
    assert f"{URL}: a URL: name the folder of a store" in capsys.readouterr().err
    text = write_text(tmp_path / "more.txt", 3)
    assert main(["corpus", "append", str(text), "--store", URL]) == 2
    assert f"{URL}: a URL: append to the folder that was published" in capsys.readouterr().err
