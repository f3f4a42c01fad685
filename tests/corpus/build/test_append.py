"""Appending: a new generation beside the old one, which stays what it was."""

import shutil
from contextlib import contextmanager

import numpy as np
import pytest

import bertsmith as library
from bertsmith.base.files import locked_folder
from bertsmith.corpus.build import build as appending
from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.settings import ExampleSettings
from bertsmith.corpus.examples.stream import Position, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish, verify_store

from ...tiny import bertsmith, contents, refused, write
from ..made import TOKENIZER, documents_of


@pytest.fixture
def text(tmp_path):
    """(name, number) -> a file of 30 documents that begin with the words from this number on."""

    def text(name, first):
        documents = ("\n".join(f"w{first + n} w{k} w{n}" for k in range(4)) for n in range(30))
        return write(tmp_path / name, "\n\n".join(documents))

    return text


@pytest.fixture
def more(text):
    return text("b.txt", 500)


@pytest.fixture
def folder(tmp_path, text):
    settings = BuildSettings(sentence_per_line=True, held_out=0.2, shard_tokens=100)
    build_store([text("a.txt", 100)], TOKENIZER, tmp_path / "store", settings)
    return tmp_path / "store"


def generation(folder):
    """The generation of a store that is sound."""
    assert list(verify_store(folder)) == []
    return TokenStore.open(folder).generation


def test_new_text_follows_the_old_and_nothing_is_rewritten(folder, tmp_path, more):
    before, first = contents(folder), TokenStore.open(folder)
    bertsmith("corpus", "append", more, "--store", folder, "--workers", 1)
    after, second = contents(folder), TokenStore.open(folder)
    assert after.pop("manifest-0001.json") == before["manifest.json"]
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    settings = BuildSettings(sentence_per_line=True, held_out=0.2)
    build_store([more], TOKENIZER, tmp_path / "alone", settings)
    alone = TokenStore.open(tmp_path / "alone")
    for name in ("train", "held_out"):
        old, new, added = (getattr(store, name) for store in (first, second, alone))
        assert documents_of(new) == documents_of(old) + documents_of(added)
        assert new.num_tokens == old.num_tokens + added.num_tokens
    assert (second.unigram_counts == first.unigram_counts + alone.unigram_counts).all()
    assert generation(folder) == 2 and second.tokenizer.fingerprint == TOKENIZER.fingerprint


def test_python_appends_as_the_command(folder, tmp_path, more):
    other = shutil.copytree(folder, tmp_path / "other")
    whole, added = library.append_text(str(more), str(other))
    assert (whole["generation"], whole["documents"], added["documents"]) == (2, 60, 30)
    bertsmith("corpus", "append", more, "--store", folder, "--workers", 1)
    assert contents(other) == contents(folder)


def test_what_is_appended_is_built_as_it_is_asked_for(folder, tmp_path, more):
    listed = ["--out", tmp_path / "duplicates.jsonl", "--exact"]
    refused("corpus", "dedup", more, more, *listed)
    bertsmith("corpus", "dedup", more, *listed)
    settings = ["--memory-mb", 300, "--exclude", listed[1], "--workers", 2]
    bertsmith("corpus", "append", more, "--store", folder, *settings)
    assert TokenStore.open(folder).generation == 2
    bertsmith("corpus", "append", more, "--store", folder, *settings)
    for otherwise in ([], ["--text-column", "body", *settings], ["--exclude", tmp_path / "none"]):
        said = refused("corpus", "append", more, "--store", folder, *otherwise)
        assert "already, since its generation 2: leave it out" in said


def test_single_documents_are_appended_to_either_side(folder, tmp_path):
    before = TokenStore.open(folder)
    for number in range(8):
        lines = (f"w{number} w{k} w{k + 1}" for k in range(4))
        append_text([write(tmp_path / f"{number}.txt", lines)], folder)
    store = TokenStore.open(folder)
    grown = [
        getattr(store, side).num_documents - getattr(before, side).num_documents
        for side in ("train", "held_out")
    ]
    assert sum(grown) == 8 and all(grown) and generation(folder) == 9
    settings = ExampleSettings(16)
    stream = PretrainingStream(store.train, store.tokenizer.vocabulary, settings, seed=1)
    rows = stream.examples_in_epoch(0)
    assert (stream.batch(Position(), rows)[0].lengths > 3).all()


def test_the_old_generation_is_opened_by_its_fingerprint(folder, text):
    prints = [TokenStore.open(folder).fingerprint]
    sizes = [TokenStore.open(folder).train.num_documents]
    for number in (2, 3):
        append_text([text(f"{number}.txt", 500 * number)], folder)
        store = TokenStore.open(folder)
        assert store.generation == number
        prints.append(store.fingerprint)
        sizes.append(store.train.num_documents)
    assert sizes == sorted(set(sizes))
    for generation, (fingerprint, size) in enumerate(zip(prints, sizes, strict=True), 1):
        store = TokenStore.open(folder, fingerprint)
        assert (store.fingerprint, store.generation) == (fingerprint, generation)
        assert store.train.num_documents == size
    assert TokenStore.open(folder, "of another store").generation == 3


def test_the_same_text_is_not_appended_twice(folder, tmp_path, text, more, capsys):
    append_text([more], folder)
    before = contents(folder)
    whole, added = append_text([more], folder)
    assert (whole["generation"], added["documents"]) == (2, 30)
    assert f"{folder}: appended before" in capsys.readouterr().err
    with locked_folder(folder):
        assert append_text([more], folder) == (whole, added)
    assert f"{folder}: appended before" in capsys.readouterr().err
    for files in ([tmp_path / "a.txt"], [text("c.txt", 900), more]):
        said = refused("corpus", "append", *files, "--store", folder)
        assert "already, since its generation" in said
    assert contents(folder) == before


def test_a_file_by_another_path_is_not_appended_twice(folder, tmp_path, text, more, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.txt").symlink_to(more)
    monkeypatch.chdir(tmp_path)
    append_text(["b.txt"], folder)
    before = contents(folder)
    for path in ("./elsewhere/../b.txt", more, "elsewhere/other.txt"):
        with pytest.raises(ValueError, match="txt: is in .* already, since its generation 2"):
            append_text([path], folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="b.txt: is in .* already, since its generation 2"):
        append_text([more], folder)
    assert contents(folder) == before
    text("elsewhere/b.txt", 700)
    append_text(["b.txt"], folder)  # another file of this name
    assert TokenStore.open(folder).generation == 3


def test_two_appends_at_once_lose_nothing(folder, text, more, monkeypatch):
    other = text("c.txt", 900)
    with locked_folder(folder), pytest.raises(ValueError, match=f"^{folder}: in use, another"):
        append_text([more], folder)
    assert TokenStore.open(folder).generation == 1

    @contextmanager
    def late(path):
        """Another process has appended before this one has the lock."""
        monkeypatch.setattr(appending, "locked_folder", locked_folder)
        append_text([other], folder)
        with locked_folder(path):
            yield

    monkeypatch.setattr(appending, "locked_folder", late)
    append_text([more], folder)
    assert (generation(folder), TokenStore.open(folder).manifest["documents"]) == (3, 90)


def test_a_killed_append_leaves_the_store_and_goes_on(folder, more, monkeypatch):
    before = TokenStore.open(folder).fingerprint
    write_manifest = appending.write_manifest
    for place in ("manifest-0001.json", "manifest.json"):

        def killed(path, manifest, place=place):
            if path.name == place:
                raise KeyboardInterrupt
            write_manifest(path, manifest)

        monkeypatch.setattr(appending, "write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            append_text([more], folder)
        assert TokenStore.open(folder).fingerprint == before and generation(folder) == 1
    monkeypatch.setattr(appending, "write_manifest", write_manifest)
    append_text([more], folder)
    assert generation(folder) == 2


@pytest.mark.parametrize("finished", [True, False])
def test_other_text_is_appended_after_a_kill(folder, text, more, monkeypatch, finished):
    """The killed append had finished its text, or had no record yet."""
    other = text("c.txt", 900)
    name = "write_manifest" if finished else "build_store"

    def killed(*_, **__):
        if not finished:
            write(folder / "generation-0002" / "vocab.txt", "a")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(appending, name, killed)
        append_text([more], folder)
    before = TokenStore.open(folder).train.num_documents
    (folder / ".partial-1-folder").mkdir()  # as corpus dedup leaves one
    _, added = append_text([other], folder)
    assert (generation(folder), added["documents"]) == (2, 30)
    assert TokenStore.open(folder).train.num_documents > before
    assert not list(folder.glob(".partial-*"))
    with pytest.raises(ValueError, match="c.txt: is in .* already, since its generation 2"):
        append_text([more, other], folder)


def test_a_store_without_its_record_says_how_text_is_appended(folder, more, capsys):
    (folder / "corpus-build.json").unlink()
    append_text([more], folder)
    said = capsys.readouterr().err
    assert f"{folder}: no record of how it was built (corpus-build.json)" in said
    assert "2% of the documents held out" in said


def test_text_that_gives_nothing_leaves_the_store(folder, tmp_path):
    before = contents(folder)
    words = ["corpus", "append", write(tmp_path / "empty.txt", ""), "--store"]
    assert "empty.txt: no text" in refused(*words, folder)
    assert contents(folder) == before
    assert "none: no finished token store" in refused(*words, tmp_path / "none")


def test_a_damaged_old_manifest_is_named(folder, more):
    append_text([more], folder)
    fingerprint = TokenStore.open(folder).manifest["earlier"][0]
    old = folder / "manifest-0001.json"
    for fault in ("damaged", "missing"):
        old.write_bytes(b"{") if fault == "damaged" else old.unlink()
        with pytest.raises(ValueError, match=rf"manifest-0001\.json: {fault}"):
            TokenStore.open(folder, fingerprint)
        (found,) = verify_store(folder)
        assert f"manifest-0001.json: {fault}" in found
    old.write_bytes((folder / "manifest.json").read_bytes())
    assert "manifest-0001.json: of another store" in next(verify_store(folder))


def test_a_grown_store_is_published_again(folder, more, cache):
    url = "memory://grown/store"
    publish(folder, url)
    append_text([more], folder)
    publish(folder, url)
    local, remote = TokenStore.open(folder), TokenStore.open(url)
    assert remote.fingerprint == local.fingerprint and generation(url) == 2
    old = TokenStore.open(url, local.manifest["earlier"][0])
    assert old.generation == 1 and documents_of(remote.train) == documents_of(local.train)
    assert np.array_equal(remote.unigram_counts, local.unigram_counts)
