"""Word vectors against transformers' hidden states, one text at a time."""

import errno
import gzip
import json
import shutil

import numpy as np
import pyarrow
import pytest
import torch
import transformers
from pyarrow import parquet
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.inference.features import Extraction, extract_features, parse_layers
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.tagging.sentences import read_words

from ..tiny import piece_tokenizer, random_model, write

TOKENIZER = piece_tokenizer("the a cat dog sat on mat . ##s ##ed ##ing play")
NUM_LAYERS = 3
# float16 has 11 bits; the states are of size 1 to 4, and the two programs differ by far less
CLOSE = {"rtol": 1e-3, "atol": 2e-3}

TEXTS = ["the cats sat on the mat .", "", "playing dogs played", "cat", "a zebra sat . . ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = ModelConfig(len(TOKENIZER.vocabulary), 16, NUM_LAYERS, 2, 32, max_positions=32)
    path = tmp_path_factory.mktemp("models") / "model"
    return random_model(path, TOKENIZER, config=config, std=0.3)


@pytest.fixture(scope="module")
def states(folder):
    """words -> (states [layers + 1, pieces, H], the word of each piece), by transformers."""
    model = transformers.BertModel.from_pretrained(folder, output_hidden_states=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def of(words):
        inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = torch.stack(model(**inputs).hidden_states)[:, 0, 1:-1].numpy()
        return hidden, np.array(inputs.word_ids()[1:-1])

    return of


@pytest.fixture
def text_file(tmp_path):
    return write(tmp_path / "texts.txt", TEXTS)


def extracted(folder, path, out, layers="last", max_length=32, context=False, **settings):
    model = bertsmith.load(folder)
    settings |= {"max_length": max_length, "document_context": context}
    extraction = Extraction(model.config, layers, **settings)
    extract_features(model, *read_words(path), extraction, out)
    return bertsmith.open_features(out)


@pytest.mark.parametrize("align", ["first", "mean", "pieces"])
@pytest.mark.parametrize("pool", ["none", "sum", "concatenate"])
def test_features_are_transformers_hidden_states(tmp_path, folder, states, text_file, align, pool):
    found = extracted(folder, text_file, tmp_path / "out", "0,-2..-1", pool=pool, align=align)
    assert len(found) == len(TEXTS) and found.vectors.dtype == np.float16
    assert isinstance(found.vectors, np.memmap)
    assert found.words == [text.split() for text in TEXTS]
    for k, text in enumerate(TEXTS):
        if not text:
            assert len(found[k]) == 0
            continue
        hidden, word_of = states(text.split())
        chosen = hidden[[0, NUM_LAYERS - 1, NUM_LAYERS]].transpose(1, 0, 2)  # [pieces, layers, H]
        if align != "pieces":
            groups = [chosen[word_of == word] for word in range(len(text.split()))]
            chosen = np.stack([g[0] if align == "first" else g.mean(axis=0) for g in groups])
        if pool != "none":
            chosen = chosen.sum(axis=1) if pool == "sum" else chosen.reshape(len(chosen), -1)
        np.testing.assert_allclose(found[k], chosen, **CLOSE)
        if align == "pieces":
            begin, end = found.boundaries[k : k + 2]
            assert found.word_ids[begin:end].tolist() == word_of.tolist()
        else:
            assert found.word_ids is None


def test_long_texts_are_read_in_windows_and_every_word_has_one_vector(tmp_path, folder, states):
    words = ["the", "cats", "played", "on", "a", "mat"] * 8
    long = write(tmp_path / "long.txt", " ".join(words))
    found = extracted(folder, long, tmp_path / "out", max_length=16)
    assert found[0].shape == (48, 16)
    # the first window shows the words that fit into 14 pieces, of which half a row is kept
    hidden, word_of = states(words[:10])
    np.testing.assert_allclose(found[0][:3], hidden[-1][[0, 1, 3]], **CLOSE)
    assert (word_of[:4] == [0, 1, 1, 2]).all()


def test_document_context_is_what_stands_around(tmp_path, folder, states):
    lines = "-DOCSTART- O\n\nthe O\ncat O\n\nsat O\non O\n\n-DOCSTART- O\n\na O\n\n"
    path = write(tmp_path / "ner.conll", lines)
    alone = extracted(folder, path, tmp_path / "alone")
    inside = extracted(folder, path, tmp_path / "inside", context=True)
    document, _ = states(["the", "cat", "sat", "on"])
    np.testing.assert_allclose(inside[1], document[-1][2:], **CLOSE)
    sentence, _ = states(["sat", "on"])
    np.testing.assert_allclose(alone[1], sentence[-1], **CLOSE)
    np.testing.assert_allclose(inside[2], alone[2], **CLOSE)  # a document of its own
    assert np.abs(inside[1].astype(float) - alone[1]).max() > 0.05


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("in.csv", 'id,body\n1,the cats\n2,"on  mat"\n', "body"),
        ("in.tsv", "text\nthe cats\non mat\n", None),
        ("in.jsonl", '{"tokens": ["the", "cats"]}\n{"tokens": ["on", "mat"]}\n', None),
        ("in.jsonl", '{"text": "the cats"}\n{"text": "on mat"}\n', "text"),
        ("in.conll", "the DT O\ncats NN O\n\non IN O\nmat NN O\n", None),
        ("eng.testa", "the\ncats\n\non\nmat\n", None),
        ("in.conll.gz", "the O\ncats O\n\non O\nmat O\n", None),
        ("in.jsonl.gz", '{"tokens": ["the", "cats"]}\n{"tokens": ["on", "mat"]}\n', None),
        ("in.jsonl.gz", '{"text": "the cats"}\n{"text": "on mat"}\n', "text"),
        ("in.txt.gz", "the cats\non mat", None),
        ("in.txt", "the cats\non mat", None),
        ("in.txt", "-DOCSTART- -X- O\n\nthe DT O\ncats NN B-X\n\non IN O\nmat NN O\n", None),
    ],
)
def test_words_of_every_format(tmp_path, name, content, column):
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(content.encode()))
    sentences, counts = read_words(tmp_path / name, column)
    assert sentences.words == ["the", "cats", "on", "mat"] and counts.tolist() == [2, 2]
    assert sentences.boundaries.tolist() == [0, 2, 4]


@pytest.mark.parametrize("text", ["World War I\n", "Vitamin B\nthey took the I-95\n"])
def test_a_text_that_ends_like_a_tag_is_a_text(tmp_path, text):
    assert read_words(write(tmp_path / "in.txt", text))[0].words == text.split()


@pytest.mark.parametrize("name", ["in.arrow", "in.parquet", "in.jsonl"])
def test_words_of_tables(tmp_path, name):
    columns = {"tokens": [["the", "cats"], ["on"]], "body": ["the", "cats on"]}
    columns["split"] = [["the"], ["cats", "on"]]
    table, path = pyarrow.table(columns), tmp_path / name
    if name == "in.arrow":
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    elif name == "in.parquet":
        parquet.write_table(table, path)
    else:
        path.write_text("\n".join(map(json.dumps, table.to_pylist())))
    for column, sizes in ((None, [2, 1]), ("body", [1, 2]), ("split", [1, 2])):
        sentences, counts = read_words(path, column)
        assert sentences.words == ["the", "cats", "on"] and counts.tolist() == sizes


def test_a_row_without_words_is_counted(tmp_path):
    """Or the vectors behind it would belong to the row before theirs."""
    rows = ['{"tokens": ["Ann", "sings"]}', '{"tokens": []}', "", '{"tokens": ["Bob"]}']
    sentences, counts = read_words(write(tmp_path / "words.jsonl", rows))
    assert counts.tolist() == [2, 0, 1] and sentences.words == ["Ann", "sings", "Bob"]


def test_a_parquet_without_tokens_has_texts(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["the cats"]}), tmp_path / "in.parquet")
    assert read_words(tmp_path / "in.parquet")[0].words == ["the", "cats"]


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("in.txt", "\n \n", None, "in.txt: no text in it"),
        ("in.csv", "text\n \n", None, "in.csv: no text in it"),
        ("in.conll", "", None, "in.conll: no words in this file"),
        ("in.txt", "the cat", "body", "`text='body'`: .*in.txt is no table"),
        ("in.conll", "the O", "body", "`text='body'`: .*in.conll is read as CoNLL columns"),
        ("in.csv", "texts\nthe\n", None, "no column 'text' for `text`: did you mean 'texts'"),
        ("in.jsonl", '{"text": 3}\n', "text", "in.jsonl:1: column 'text' holds 3, not a text"),
        ("in.jsonl", '{"words": []}\n', None, "in.jsonl:1: no column 'tokens'"),
    ],
)
def test_files_without_words_are_refused(tmp_path, name, content, column, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_words(path, column)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("13", r"has the layers 0 \(embeddings\) to 12, from behind -1 to -13, but no 13"),
        ("-14..-1", "but no -14"),
        ("first", "`layers='first'`: write last, all"),
        ("", "write last, all"),
        ("1,,2", "write last, all"),
        ("4..2", "4..2 begins behind its end"),
        ("-1,12", "a layer is named twice"),
    ],
)
def test_layers_that_are_not_there(layers, message):
    with pytest.raises(ValueError, match=message):
        parse_layers(layers, 12)


@pytest.mark.parametrize("align", ["first", "mean", "pieces"])
def test_of_a_word_longer_than_a_row_the_first_pieces_are_read(tmp_path, folder, capsys, align):
    long, fits = "cat" + "s" * 40, "cat" + "s" * 29  # 41 pieces, and the 30 of a row
    texts = [
        write(tmp_path / name, [f"the {word} sat"])
        for name, word in (("long.txt", long), ("fits.txt", fits))
    ]
    found, expected = (extracted(folder, text, tmp_path / text.stem, align=align) for text in texts)
    assert found.words == [["the", long, "sat"]]
    assert np.array_equal(found.vectors, expected.vectors)
    note = "1 of 3 words have more than 30 pieces and lose their end"
    assert capsys.readouterr().err.count(note) == 1


def test_what_extraction_refuses(tmp_path, folder, text_file):
    with pytest.raises(ValueError, match="`pool='max'`: known are none, sum, concatenate"):
        Extraction(bertsmith.load(folder).config, pool="max")
    with pytest.raises(ValueError, match="`max_length=0`: no room for a piece"):
        extracted(folder, text_file, tmp_path / "out", max_length=0)
    with pytest.raises(ValueError, match="`max_length=64`: the model knows 32 positions"):
        extracted(folder, text_file, tmp_path / "out", max_length=64)
    assert not (tmp_path / "out").exists()


def test_a_value_too_large_for_float16_is_refused(tmp_path, folder, text_file):
    shutil.copytree(folder, large := tmp_path / "large")
    weights = load_file(large / "model.safetensors")
    weights[f"bert.encoder.layer.{NUM_LAYERS - 1}.output.LayerNorm.bias"] += 1e5
    save_file(weights, large / "model.safetensors")
    predictor = bertsmith.load(large)
    words, extraction = read_words(text_file), Extraction(predictor.config)
    with pytest.raises(ValueError, match="a value of 1000.* does not fit float16"):
        extract_features(predictor, *words, extraction, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_found_before_the_first_vector(monkeypatch, tmp_path, folder, text_file):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as error:
        extracted(folder, text_file, tmp_path / "out")
    assert error.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [text_file]
    monkeypatch.delattr("os.posix_fallocate")  # a system without it
    assert len(extracted(folder, text_file, tmp_path / "out")) == len(TEXTS)


def test_a_damaged_folder_is_named(tmp_path, folder, text_file):
    out = tmp_path / "out"
    found = extracted(folder, text_file, out)
    assert found.description["layers"] == [NUM_LAYERS]
    with pytest.raises(IndexError, match="text 5 of 5"):
        found[5]
    np.testing.assert_array_equal(found[-1], found[4])
    np.save(out / "boundaries.npy", np.array([0, 3]))
    with pytest.raises(ValueError, match="out: its files do not fit one another"):
        bertsmith.open_features(out)
    data = (out / "vectors.npy").read_bytes()
    (out / "vectors.npy").write_bytes(data[:-40])
    with pytest.raises(ValueError, match="vectors.npy: damaged"):
        bertsmith.open_features(out)
    (out / "index.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(ValueError, match="index.json: not of format 1"):
        bertsmith.open_features(out)
    with pytest.raises(ValueError, match="no index.json, so not a folder of"):
        bertsmith.open_features(tmp_path)
