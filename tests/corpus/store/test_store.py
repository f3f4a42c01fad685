"""Reading a store: faults are named, and only what is read is verified."""

import json
import os
import sys

import numpy as np
import pytest

from bertsmith.corpus.store import blocks
from bertsmith.corpus.store.blocks import read_manifest, sealed, write_manifest
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import verify_store
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer

from ...tiny import bertsmith, cli, refused, word_tokenizer
from ..made import TOKENIZER, damage, write_shards

NO_STORE = r"manifest\.json: (damaged|a token store of format)"


@pytest.fixture
def folder(make_store, monkeypatch):
    """A store of 20 documents with blocks of 64 bytes, so that every file has several."""
    monkeypatch.setattr(blocks, "BLOCK", 64)
    return make_store([[[word, word + 1], [word + 2] * 3] for word in range(20)]).folder


@pytest.mark.parametrize("kind", ["tokens", "sentences", "documents"])
def test_a_truncated_file_is_named_when_its_shard_is_opened(folder, kind):
    file = folder / f"train-00000.{kind}"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}: .* bytes where .*build it again"):
        TokenStore.open(folder).train.open()


@pytest.mark.parametrize("kind", ["tokens", "checksums"])
def test_a_missing_file_is_named(folder, kind):
    (folder / f"train-00000.{kind}").unlink()
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}: missing"):
        TokenStore.open(folder).train.open()


def test_a_damaged_block_is_named_when_it_is_read(folder):
    damage(folder / "train-00000.tokens", 100)  # in the second block
    tokens = TokenStore.open(folder).train.shards[0].tokens
    assert tokens.read(0, 3).tolist() == [5, 6, 7]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"train-00000\.tokens: block 1 .*byte 64\).*damaged"):
            tokens.read(31, 33)


@pytest.mark.parametrize(
    ("name", "offset", "says", "read"),
    [
        ("train-00000.sentences", 8, "block 0", lambda store: store.train.document(0)),
        ("train-00000.documents", 8, "block 0", lambda store: store.train.document(0)),
        ("train-00000.checksums", 0, "damaged", lambda store: store.train.open()),
        ("unigram_counts.bin", 100, "block 1", lambda store: store.unigram_counts),
        ("vocab.txt", 70, "block 1 .* is damaged", lambda store: store.tokenizer),
        ("tokenizer.json", 70, "block 1 .* is damaged", lambda store: store.tokenizer),
        ("tokenizer_config.json", 70, "block 1 .* is damaged", lambda store: store.tokenizer),
    ],
)
def test_a_damaged_file_is_named(folder, name, offset, says, read):
    damage(folder / name, offset)
    with pytest.raises(ValueError, match=rf"{name}: {says}"):
        read(TokenStore.open(folder))


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_of_the_tokenizer_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: missing"):
        _ = TokenStore.open(folder).tokenizer


def test_no_byte_of_the_manifest_changes_unseen(folder):
    content = (folder / "manifest.json").read_bytes()
    dice = np.random.default_rng(0)
    for offset in {0, len(content) - 1, *dice.integers(0, len(content), 150).tolist()}:
        for value in {content[offset] ^ 1, ord(" "), ord("0")} - {content[offset]}:
            changed = content[:offset] + bytes([value]) + content[offset + 1 :]
            with pytest.raises(ValueError, match=f"^{NO_STORE}"):
                read_manifest(changed, "manifest.json")
        with pytest.raises(ValueError, match=f"^{NO_STORE}"):
            read_manifest(content[:offset], "manifest.json")
    assert read_manifest(content, "m.json")["generation"] == 1


def test_opening_reads_no_shard(folder):
    for file in folder.glob("*-00000.*"):
        file.unlink()
    assert TokenStore.open(folder).train.num_documents == 20


def test_a_folder_that_is_no_store_is_named(tmp_path, folder):
    with pytest.raises(ValueError, match=r"absent: no finished token store"):
        TokenStore.open(tmp_path / "absent")
    for content in ("{", "[]", '{"format": 1}', '{"splits": {}}'):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match=NO_STORE):
            TokenStore.open(folder)
    (folder / "manifest.json").write_text('{"format": 1, "splits": {}}')
    said = refused("corpus", "verify", folder)
    assert "of format 1, not 2; remove the folder and build it again" in said
    # such as a checkpoint, which must not be removed
    (folder / "manifest.json").write_text('{"format": 1, "step": 600, "files": {}}')
    said = refused("corpus", "verify", folder)
    assert "manifest.json: damaged, or not of a token store: name one made by" in said
    assert "remove" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is raised on Linux alone")
def test_a_store_of_more_shards_than_open_files_is_opened(tmp_path, monkeypatch):
    import resource

    store = write_shards(tmp_path / "many", [[[[1, 2], [3]], [[4]]] for _ in range(40)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 60, hard))
        store.train.open()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        assert store.train.document(79)[0].tolist() == [9]
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 60, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        with pytest.raises(OSError, match="too many open files: raise the limit") as error:
            TokenStore.open(store.folder).train.open()
        assert str(store.folder) in error.value.filename
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_verify_names_every_bad_block_and_file(folder):
    assert "sound" in bertsmith("corpus", "verify", folder)
    for offset in (3, 70, 100):
        damage(folder / "train-00000.tokens", offset)
    damage(folder / "held_out-00000.documents", 0)
    (folder / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes() + b"x")
    (folder / "train-00000.sentences").unlink()
    size = (folder / "vocab.txt").stat().st_size
    code, out, _ = cli("corpus", "verify", folder)
    faults = [line.split("; ")[0].removeprefix(f"{folder}/") for line in out.splitlines()]
    assert code == 1 and [fault.split(" (")[0] for fault in faults] == [
        f"vocab.txt: {size:,} bytes where the manifest says {size - 1:,}",
        "train-00000.tokens: block 0",
        "train-00000.tokens: block 1",
        "train-00000.sentences: missing",
        "held_out-00000.documents: block 0",
    ]
    code, out, _ = cli("corpus", "verify", folder, "--json")
    assert code == 1 and len(json.loads(out)["faults"]) == 5
    damage(folder / "held_out-00000.checksums", 0)
    assert any("held_out-00000.checksums: damaged" in fault for fault in verify_store(folder))


def test_a_manifest_is_sealed(tmp_path):
    manifest = sealed({"generation": 1, "splits": {"b": 1, "a": "ä"}})
    write_manifest(tmp_path / "m.json", manifest)
    assert read_manifest((tmp_path / "m.json").read_bytes(), "m.json") == manifest
    with pytest.raises(AssertionError):
        write_manifest(tmp_path / "m.json", manifest | {"generation": 2})


def test_a_store_of_another_vocabulary_is_refused(folder):
    opened = TokenStore.open(folder)
    opened.check_tokenizer(TOKENIZER, "vocab")
    other = word_tokenizer("a")
    both = rf"{TOKENIZER.fingerprint[:12]}.*other/vocab has {other.fingerprint[:12]} \(6 pieces\)"
    with pytest.raises(ValueError, match=both):
        opened.check_tokenizer(other, "other/vocab")
    with pytest.raises(ValueError, match="built with tokenizer"):
        opened.check_tokenizer(Tokenizer(TOKENIZER.vocabulary, GOOGLE_CASED), "vocab")


def test_ids_are_read_only(folder):
    sentence = TokenStore.open(folder).train.document(0)[0]
    assert sentence.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        sentence[0] = 1
