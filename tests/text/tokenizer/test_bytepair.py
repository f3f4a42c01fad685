"""Byte pairs beside transformers' tokenizer of GPT: ids, offsets, words; files, there and back."""

import json
import pickle

import numpy as np
import pytest

from bertsmith.text.tokenizer.bytepair import BytePairTokenizer, BytePairVocabulary, is_byte_pair
from bertsmith.text.tokenizer.wordpiece import BORDERS

from ...gpt import TEXTS, library

HARD = [
    "The OLD cats, and the new dogs!", "Café naïve NEAR", "", "  ", "a\tb\nc", "green中文small",
    "don't e.g. 3.14", "\x00small\u200b large\ufffd", "ünïcode ☃ snowman", "<unk> </w> _start_",
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    library().model.save(str(folder))  # vocab.json and merges.txt
    return folder


@pytest.fixture
def tokenizer(files):
    return BytePairTokenizer.from_pretrained(files)


def test_texts_become_what_transformers_makes_of_them(files, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.OpenAIGPTTokenizer.from_pretrained(files)
    texts = TEXTS + [text for text in HARD if "<unk>" not in text]  # which theirs takes as a token
    encoded = tokenizer.encode_batch(texts)
    assert len(encoded) == len(texts)
    for text, mine in zip(texts, map(encoded.__getitem__, range(len(texts))), strict=True):
        expected = theirs(text, return_offsets_mapping=True)
        assert mine.ids.tolist() == expected["input_ids"], text
        assert list(map(tuple, mine.offsets.tolist())) == expected["offset_mapping"], text
        assert mine.word_ids.tolist() == expected.word_ids(), text
    theirs.save_pretrained(tmp_path)
    assert BytePairTokenizer.from_pretrained(tmp_path).fingerprint == tokenizer.fingerprint


def test_an_encoding_is_as_every_tokenizer_of_ours_gives_it(tokenizer):
    encoded = tokenizer.encode_batch(HARD)
    assert [encoded.ids.dtype, encoded.offsets.dtype, encoded.word_ids.dtype] == [np.int32] * 3
    assert encoded.offsets.shape == (len(encoded.ids), 2)
    bare = tokenizer.encode_batch(HARD, offsets=False, max_pieces=2)
    assert bare.offsets.shape == (0, 2) and len(bare.word_ids) == 0
    cut = [encoded[k].ids[:2].tolist() for k in range(len(HARD))]
    assert [bare[k].ids.tolist() for k in range(len(HARD))] == cut
    twin = pickle.loads(pickle.dumps(tokenizer))
    assert twin.fingerprint == tokenizer.fingerprint
    assert len(tokenizer.encode_batch([])) == 0
    surrogate = tokenizer.encode_batch(["small \ud800 large"])
    assert surrogate.ids.tolist() == tokenizer.encode_batch(["small   large"]).ids.tolist()
    with pytest.raises(ValueError, match="text 1 of the batch is int, not str"):
        tokenizer.encode_batch(["a", 1])
    with pytest.raises(ValueError, match="text 0 of the batch is bytes, not str"):
        tokenizer.encode_batch([b"a"])


def test_its_folder_is_opened_again(tokenizer, tmp_path):
    for number, saved in enumerate((tokenizer, tokenizer.with_borders())):
        folder = tmp_path / str(number)
        folder.mkdir()
        saved.save(folder)
        back = BytePairTokenizer.from_pretrained(folder)
        assert is_byte_pair(folder) and back.fingerprint == saved.fingerprint
        assert back.vocabulary.borders == saved.vocabulary.borders
    assert back.vocabulary.pieces[-3:] == BORDERS and back.with_borders().merges == back.merges
    assert back.vocabulary.with_borders() is back.vocabulary
    surrounded = "_start_ old cats _delimiter_ green _classify_"
    assert back.decode(back.encode("Old cats", "green")) == surrounded
    assert tokenizer.decode(tokenizer.encode_batch(["Old cats"]).ids) == "old cats"
    with pytest.raises(ValueError, match="has no pieces to stand around a text"):
        tokenizer.encode("old")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "type of the pre_tokenizer is 'ByteLevel', not"),
        ({"normalizer": None}, "type of the normalizer is None, not 'BertNormalizer'"),
        ({"added_tokens": [{"content": "x", "id": 999}]}, r"no piece has the id \d+ \('x' has 999"),
        ({"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}, "no vocabulary in it"),
    ],
)
def test_another_tokenizer_of_byte_pairs_is_named(change, message, tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as caught:
        BytePairTokenizer.from_pretrained(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("merges", "message"),
    [(5, "merges is 5: it must be a list"), ([["a", "b"], 5], "merge 2 is 5: it has two pieces")],
)
def test_what_are_no_merges_is_named(merges, message, tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["model"]["merges"] = merges
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        BytePairTokenizer.from_pretrained(tmp_path)


def test_merges_of_unknown_pieces_are_named(tmp_path):
    (tmp_path / "vocab.json").write_text('{"<unk>": 0, "a": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\nb c\n")
    with pytest.raises(ValueError, match=r"merges.txt: merge 1, 'b' and 'c': not all are pieces"):
        BytePairTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="2 pieces lacks <unk>"):
        BytePairVocabulary(["a", "b"])
