"""Reading a store: faults are named, and only what is read is verified."""

import numpy as np
import pytest

from bertsmith.corpus import shards, store
from bertsmith.corpus.store import TokenStore
from bertsmith.text.normalize import GOOGLE_CASED
from bertsmith.text.vocabulary import SPECIAL, Vocabulary
from bertsmith.text.wordpiece import Tokenizer


@pytest.fixture
def folder(make_store, monkeypatch):
    """A store of 20 documents with blocks of 64 bytes, so that every file has several."""
    monkeypatch.setattr(store, "BLOCK", 64)
    monkeypatch.setattr(shards, "BLOCK", 64)
    return make_store([[[word, word + 1], [word + 2] * 3] for word in range(20)]).folder


def damage(file, offset):
    content = bytearray(file.read_bytes())
    content[offset] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["tokens", "sentences", "documents"])
def test_a_truncated_file_is_named_at_opening(folder, kind):
    file = folder / f"train-00000.{kind}"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}: .* bytes where .*build it again"):
        TokenStore.open(folder)


@pytest.mark.parametrize("kind", ["tokens", "checksums"])
def test_a_missing_file_is_named(folder, kind):
    (folder / f"train-00000.{kind}").unlink()
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}: missing"):
        TokenStore.open(folder)


def test_a_damaged_block_is_named_when_it_is_read(folder):
    damage(folder / "train-00000.tokens", 100)  # in the second block
    tokens = TokenStore.open(folder).train.shards[0].tokens
    assert tokens.read(0, 3).tolist() == [5, 6, 7]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"train-00000\.tokens: block 1 .*byte 64\).*damaged"):
            tokens.read(31, 33)


@pytest.mark.parametrize("kind", ["sentences", "documents"])
def test_a_damaged_index_is_named(folder, kind):
    damage(folder / f"train-00000.{kind}", 8)
    opened = TokenStore.open(folder)
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}: block 0"):
        opened.train.document(0)


def test_damaged_counts_and_checksums_are_named(folder):
    damage(folder / "unigram_counts.bin", 100)
    with pytest.raises(ValueError, match=r"unigram_counts\.bin: block 1"):
        _ = TokenStore.open(folder).unigram_counts
    damage(folder / "train-00000.checksums", 0)
    with pytest.raises(ValueError, match=r"train-00000\.checksums: damaged"):
        TokenStore.open(folder)


def test_a_folder_that_is_no_store_is_named(tmp_path, folder):
    with pytest.raises(ValueError, match=r"absent: no finished token store"):
        TokenStore.open(tmp_path / "absent")
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"manifest\.json: not a token store of format 1"):
        TokenStore.open(folder)


def test_a_store_of_another_vocabulary_is_refused(folder, tokenizer):
    opened = TokenStore.open(folder)
    opened.check_tokenizer(tokenizer, "vocab")
    other = Tokenizer(Vocabulary([*SPECIAL, "a"]))
    both = rf"{tokenizer.fingerprint[:12]}.*other/vocab has {other.fingerprint[:12]} \(6 pieces\)"
    with pytest.raises(ValueError, match=both):
        opened.check_tokenizer(other, "other/vocab")
    with pytest.raises(ValueError, match="built with tokenizer"):
        opened.check_tokenizer(Tokenizer(tokenizer.vocabulary, GOOGLE_CASED), "vocab")


def test_ids_are_read_only(folder):
    sentence = TokenStore.open(folder).train.document(0)[0]
    assert sentence.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        sentence[0] = 1
