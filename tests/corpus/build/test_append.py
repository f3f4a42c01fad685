"""Appending: a new generation beside the old one, which stays what it was."""

from contextlib import contextmanager

import numpy as np
import pytest

from bertsmith.base.files import locked_folder
from bertsmith.cli.main import main
from bertsmith.corpus.build import build as appending
from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish, verify_store


def write(path, first, documents=30):
    path.write_text(
        "\n\n".join(
            "\n".join(f"w{first + n} w{k} w{n}" for k in range(4)) for n in range(documents)
        )
    )
    return path


@pytest.fixture
def folder(tmp_path, tokenizer):
    text = write(tmp_path / "a.txt", 100)
    out = tmp_path / "store"
    build_store(
        [text],
        tokenizer,
        out,
        BuildSettings(sentence_per_line=True, held_out=0.2, shard_tokens=100),
    )
    return out


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def documents(split):
    return [
        [sentence.tolist() for sentence in split.document(number)]
        for number in range(split.num_documents)
    ]


def test_new_text_follows_the_old_and_nothing_is_rewritten(folder, tmp_path, tokenizer):
    before, first = contents(folder), TokenStore.open(folder)
    text = write(tmp_path / "b.txt", 500)
    assert main(["corpus", "append", str(text), "--store", str(folder), "--workers", "1"]) == 0
    after, second = contents(folder), TokenStore.open(folder)
    assert after.pop("manifest-0001.json") == before["manifest.json"]
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    build_store(
        [text], tokenizer, tmp_path / "alone", BuildSettings(sentence_per_line=True, held_out=0.2)
    )
    alone = TokenStore.open(tmp_path / "alone")
    for name in ("train", "held_out"):
        old, new, added = (getattr(store, name) for store in (first, second, alone))
        assert documents(new) == documents(old) + documents(added)
        assert new.num_tokens == old.num_tokens + added.num_tokens
    assert (second.unigram_counts == first.unigram_counts + alone.unigram_counts).all()
    assert second.generation == 2 and second.tokenizer.fingerprint == tokenizer.fingerprint
    assert list(verify_store(folder)) == []


def test_what_is_appended_is_built_as_it_is_asked_for(folder, tmp_path):
    text = write(tmp_path / "b.txt", 500)
    listed = tmp_path / "duplicates.jsonl"
    assert main(["corpus", "dedup", str(text), str(text), "--out", str(listed), "--exact"]) == 2
    assert main(["corpus", "dedup", str(text), "--out", str(listed), "--exact"]) == 0
    words = ["corpus", "append", str(text), "--store", str(folder), "--memory-mb", "300"]
    assert main([*words, "--exclude", str(listed), "--workers", "2"]) == 0
    assert TokenStore.open(folder).generation == 2


def test_the_old_generation_is_opened_by_its_fingerprint(folder, tmp_path):
    prints = [TokenStore.open(folder).fingerprint]
    sizes = [TokenStore.open(folder).train.num_documents]
    for number in (2, 3):
        append_text([write(tmp_path / f"{number}.txt", 500 * number)], folder)
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


def test_the_same_text_is_not_appended_twice(folder, tmp_path, capsys):
    text = write(tmp_path / "b.txt", 500)
    append_text([text], folder)
    before = contents(folder)
    whole, added = append_text([text], folder)
    assert (whole["generation"], added["documents"]) == (2, 30)
    assert f"{folder}: appended before" in capsys.readouterr().err
    with locked_folder(folder):
        assert append_text([text], folder) == (whole, added)
    assert f"{folder}: appended before" in capsys.readouterr().err
    for command in ([tmp_path / "a.txt"], [write(tmp_path / "c.txt", 900), text]):
        words = ["corpus", "append", *map(str, command), "--store", str(folder)]
        assert main(words) == 2
        assert "already, since its generation" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_file_by_another_path_is_not_appended_twice(folder, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.txt").symlink_to(tmp_path / "b.txt")
    write(tmp_path / "b.txt", 500)
    monkeypatch.chdir(tmp_path)
    append_text(["b.txt"], folder)
    before = contents(folder)
    for path in ("./elsewhere/../b.txt", tmp_path / "b.txt", "elsewhere/other.txt"):
        with pytest.raises(ValueError, match="txt: is in .* already, since its generation 2"):
            append_text([path], folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="b.txt: is in .* already, since its generation 2"):
        append_text([tmp_path / "b.txt"], folder)
    assert contents(folder) == before
    write(tmp_path / "elsewhere" / "b.txt", 700)
    append_text(["b.txt"], folder)  # another file of this name
    assert TokenStore.open(folder).generation == 3


def test_two_appends_at_once_lose_nothing(folder, tmp_path, monkeypatch):
    first, other = write(tmp_path / "b.txt", 500), write(tmp_path / "c.txt", 900)
    with locked_folder(folder), pytest.raises(ValueError, match=f"^{folder}: in use, another"):
        append_text([first], folder)
    assert TokenStore.open(folder).generation == 1

    @contextmanager
    def late(path):
        """Another process has appended before this one has the lock."""
        monkeypatch.setattr(appending, "locked_folder", locked_folder)
        append_text([other], folder)
        with locked_folder(path):
            yield

    monkeypatch.setattr(appending, "locked_folder", late)
    append_text([first], folder)
    store = TokenStore.open(folder)
    assert (store.generation, store.manifest["documents"]) == (3, 90)
    assert list(verify_store(folder)) == []


def test_a_killed_append_leaves_the_store_and_goes_on(folder, tmp_path, monkeypatch):
    text = write(tmp_path / "b.txt", 500)
    before = TokenStore.open(folder).fingerprint
    write_manifest = appending.write_manifest
    for place in ("manifest-0001.json", "manifest.json"):

        def killed(path, manifest, place=place):
            if path.name == place:
                raise KeyboardInterrupt
            write_manifest(path, manifest)

        monkeypatch.setattr(appending, "write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            append_text([text], folder)
        assert TokenStore.open(folder).fingerprint == before
        assert list(verify_store(folder)) == []
    monkeypatch.setattr(appending, "write_manifest", write_manifest)
    append_text([text], folder)
    assert TokenStore.open(folder).generation == 2
    assert list(verify_store(folder)) == []


@pytest.mark.parametrize("finished", [True, False])
def test_other_text_is_appended_after_a_kill(folder, tmp_path, monkeypatch, finished):
    """The killed append had finished its text, or had no record yet."""
    first, other = write(tmp_path / "b.txt", 500), write(tmp_path / "c.txt", 900)
    name = "write_manifest" if finished else "build_store"

    def killed(*_, **__):
        if not finished:
            (folder / "generation-0002").mkdir()
            (folder / "generation-0002" / "vocab.txt").write_text("a")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(appending, name, killed)
        append_text([first], folder)
    before = TokenStore.open(folder).train.num_documents
    (folder / ".partial-1-folder").mkdir()  # as corpus dedup leaves one
    _, added = append_text([other], folder)
    assert (TokenStore.open(folder).generation, added["documents"]) == (2, 30)
    assert TokenStore.open(folder).train.num_documents > before
    assert list(verify_store(folder)) == [] and not list(folder.glob(".partial-*"))
    with pytest.raises(ValueError, match="c.txt: is in .* already, since its generation 2"):
        append_text([first, other], folder)


def test_a_store_without_its_record_says_how_text_is_appended(folder, tmp_path, capsys):
    (folder / "corpus-build.json").unlink()
    append_text([write(tmp_path / "b.txt", 500)], folder)
    said = capsys.readouterr().err
    assert f"{folder}: no record of how it was built (corpus-build.json)" in said
    assert "2% of the documents held out" in said


def test_text_that_gives_nothing_leaves_the_store(folder, tmp_path, capsys):
    before = contents(folder)
    (tmp_path / "empty.txt").write_text("")
    words = ["corpus", "append", str(tmp_path / "empty.txt"), "--store"]
    assert main([*words, str(folder)]) == 2
    assert "empty.txt: no text" in capsys.readouterr().err
    assert contents(folder) == before
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "none: no finished token store" in capsys.readouterr().err


def test_a_damaged_old_manifest_is_named(folder, tmp_path):
    append_text([write(tmp_path / "b.txt", 500)], folder)
    fingerprint = TokenStore.open(folder).manifest["earlier"][0]
    (folder / "manifest-0001.json").write_bytes(b"{")
    with pytest.raises(ValueError, match=r"manifest-0001\.json: damaged"):
        TokenStore.open(folder, fingerprint)
    faults = list(verify_store(folder))
    assert len(faults) == 1 and "manifest-0001.json: damaged" in faults[0]
    (folder / "manifest-0001.json").unlink()
    assert "manifest-0001.json: missing" in next(verify_store(folder))
    with pytest.raises(ValueError, match=r"manifest-0001\.json: missing"):
        TokenStore.open(folder, fingerprint)
    (folder / "manifest-0001.json").write_bytes((folder / "manifest.json").read_bytes())
    assert "manifest-0001.json: of another store" in next(verify_store(folder))


def test_a_grown_store_is_published_again(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    url = "memory://grown/store"
    publish(folder, url)
    append_text([write(tmp_path / "b.txt", 500)], folder)
    publish(folder, url)
    local, remote = TokenStore.open(folder), TokenStore.open(url)
    assert remote.fingerprint == local.fingerprint
    assert list(verify_store(url)) == []
    old = TokenStore.open(url, local.manifest["earlier"][0])
    assert old.generation == 1 and documents(remote.train) == documents(local.train)
    assert np.array_equal(remote.unigram_counts, local.unigram_counts)
