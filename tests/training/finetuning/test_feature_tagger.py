"""The feature-based tagger: states of words, training on them, the table and its resume."""

import errno
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.base.files import TEMPORARY_PREFIX
from bertsmith.checkpoints.model_folder import BareModel, load_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.tasks.tagging.features import IGNORED, featurize_sentences
from bertsmith.tasks.tagging.sentences import read_sentences
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import choose_engine
from bertsmith.training.finetuning import feature_tagger as table_module
from bertsmith.training.finetuning.feature_tagger import TaggedStates, feature_table, table
from bertsmith.training.finetuning.hidden_states import word_states
from bertsmith.training.finetuning.settings import ROWS, FrozenSettings, Provenance

from ...tiny import write
from .tagged import write_corpus, write_model

SETTINGS = FrozenSettings(
    sentences=0, epochs=8, batch_size=8, learning_rate=1e-2, dropout=0.0, hidden_size=16,
    max_length=48, tokens_per_window=20, precision="float32", threads=1,
)  # fmt: skip
ONCE = replace(SETTINGS, epochs=1)
ENGINE = choose_engine("cpu", "float32", 1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "4x64")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("data"))
    return {split: read_sentences(folder / f"{split}.conll") for split in ("train", "dev", "test")}


@pytest.fixture
def dev_states(model_folder, data, tmp_path):
    """What `word_states` wants: an encoder, features, and a file that is not there yet."""
    encoder = load_model(model_folder, BareModel).model.encoder.eval()
    encoding = EncodingSettings(max_length=48, document_context=False)
    tokenizer = Tokenizer.from_pretrained(model_folder)
    features = featurize_sentences(tokenizer, data["dev"], None, encoding)
    return encoder, features, tmp_path / "states" / "dev.npy"


def test_states_of_words_are_those_of_their_first_pieces(model_folder, data, dev_states):
    (encoder, features, path), sentences, seen = dev_states, data["dev"], []
    tokenizer = Tokenizer.from_pretrained(model_folder)
    states = word_states(encoder, features, path, ENGINE, 100, seen.append)
    assert isinstance(states, np.memmap) and states.dtype == np.float16
    assert states.shape == (5, len(sentences.words), 64) and sum(seen) == len(features)
    for k in (0, 7, len(sentences) - 1):
        begin, end = sentences.boundaries[k : k + 2]
        pieces = tokenizer.encode_batch(sentences.words[begin:end])
        ids = [tokenizer.vocabulary.cls_id, *pieces.ids, tokenizer.vocabulary.sep_id]
        with torch.inference_mode():
            layers = encoder(torch.tensor([ids]), all_layers=True)
        places = torch.from_numpy(pieces.boundaries[:-1]) + 1
        wanted = torch.stack(layers)[:, 0, places].numpy()
        # float16 has 11 bits, and states are below 8
        np.testing.assert_allclose(states[:, begin:end], wanted, atol=4e-3)
    before = path.stat().st_mtime_ns
    again = word_states(*dev_states, ENGINE)
    assert path.stat().st_mtime_ns == before and np.array_equal(again, states)


def test_a_state_that_does_not_fit_float16_is_refused(dev_states):
    encoder, _, path = dev_states
    torch.nn.init.constant_(encoder.layers[1].output_norm.bias, 7e4)
    with pytest.raises(ValueError, match=r"layer 2: a state of 7\S+ does not fit float16: .*ner"):
        word_states(*dev_states, ENGINE)
    assert list(path.parent.iterdir()) == []


def test_a_full_disk_is_found_before_the_first_state(dev_states, monkeypatch):
    path = dev_states[2]
    write(path.parent / f"{TEMPORARY_PREFIX}1-dev.npy", b"of a process that was killed")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            word_states(*dev_states, ENGINE)
        assert list(path.parent.iterdir()) == []
        patch.delattr("os.posix_fallocate")  # a system without it
        assert len(word_states(*dev_states, ENGINE)) == 5


def test_a_batch_by_hand(data):
    sentences = data["dev"]
    count = len(sentences.words)
    states = np.arange(3 * count * 2).reshape(3, count, 2).astype(np.float16)
    labels = np.arange(count)
    rows = TaggedStates(sentences, labels, states).batch(np.array([2, 0]), slice(-2, None))
    begin, end = sentences.boundaries[2:4]
    length = int(end - begin)
    assert rows["lengths"].tolist() == [length, sentences.boundaries[1]]
    assert rows["states"].shape == (2, rows["lengths"].max(), 2, 2)
    assert np.array_equal(rows["states"][0, :length, 0], states[1, begin:end])
    assert np.array_equal(rows["states"][0, :length, 1], states[2, begin:end])
    assert rows["labels"][0, :length].tolist() == list(range(begin, end))
    is_word = np.arange(rows["lengths"].max()) < rows["lengths"][:, None]
    assert (rows["labels"][~is_word] == IGNORED).all() and not rows["states"][~is_word].any()


def test_every_row_learns_and_a_second_call_does_nothing(model_folder, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    result = feature_table(model_folder, data, list(ROWS), [1], SETTINGS, out)
    assert list(result["rows"]) == list(ROWS)
    for row in result["rows"].values():
        assert row["seeds"]["1"]["dev"] > 0.9 and row["seeds"]["1"]["test"] > 0.9
    assert json.loads((out / "result.json").read_text()) == result
    lines = (out / "table.md").read_text().splitlines()
    assert lines == list(table(result)) and len(lines) == 8
    assert lines[6].startswith("| Concat Last Four Hidden | ") and " | 96.1 | 1 | " in lines[6]
    assert json.loads((out / "run.json").read_text())["kind"] == "features ner"

    def never(*arguments):
        raise AssertionError("it was done already")

    monkeypatch.setattr(table_module, "train_row", never)
    assert feature_table(model_folder, data, list(ROWS), [1], SETTINGS, out) == result


def test_a_stopped_run_goes_on(model_folder, data, tmp_path, monkeypatch):
    out, train_row, done = tmp_path / "run", table_module.train_row, []

    def stopped(row, *arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(row.title)
        return train_row(row, *arguments)

    monkeypatch.setattr(table_module, "train_row", stopped)
    wanted = data, ["last", "sum-all"], [1, 2], ONCE, out
    with pytest.raises(KeyboardInterrupt):
        feature_table(model_folder, *wanted, Provenance(data={"data": "here", "dev": "here"}))
    monkeypatch.setattr(table_module, "train_row", train_row)
    moved = shutil.copytree(model_folder, tmp_path / "moved")  # and the data too
    result = feature_table(moved, *wanted, Provenance(data={"data": "there", "dev": "there"}))
    assert done == ["Last Hidden"] * 2
    seeds = {name: list(row["seeds"]) for name, row in result["rows"].items()}
    assert seeds == {"last": ["1", "2"], "sum-all": ["1", "2"]}
    assert " ± " in list(table(result))[2]
    # the same seed gives the same tagger, whatever was trained before it
    other = feature_table(model_folder, data, ["sum-all"], [2], ONCE, tmp_path / "other")
    for split in ("dev", "test"):
        ours = result["rows"]["sum-all"]["seeds"]["2"][split]
        assert ours == other["rows"]["sum-all"]["seeds"]["2"][split]


def test_what_does_not_fit_is_refused(model_folder, data, tmp_path):
    def run(rows=("last",), folder=model_folder, out="run", record=None, **changes):
        settings, provenance = replace(ONCE, **changes), Provenance(data=record or {})
        feature_table(folder, data, rows, [1], settings, tmp_path / out, provenance)

    def refuses(message, **changes):
        with pytest.raises(ValueError, match=message):
            run(**changes)

    refuses("unknown row 'lats': known are embeddings, second", rows=("lats",))
    for length in (2, 96):
        message = f"`max_length={length}`: the model reads 3 to 64 tokens"
        refuses(message, max_length=length)
    shallow = write_model(tmp_path / "shallow")
    refuses("Table 7 reads 4 layers, and it has 1: take a deeper model", folder=shallow)
    refuses("shallow holds a run already", out="shallow")
    assert not (tmp_path / "run").exists()
    with RunFolder(tmp_path / "run").locked():
        refuses("run: another process is training here")
    run()
    refuses(r"was made with learning_rate = 0\.01, not 0\.1: give the same", learning_rate=0.1)
    refuses("was made with data_sha256 = None, not x", record={"data_sha256": "x"})
    deeper = write_model(tmp_path / "deeper", "5x64")
    refuses("was made with model_sha256 = ", folder=deeper)


def test_only_the_first_sentences_are_learned_from(model_folder, data, tmp_path):
    settings = replace(ONCE, sentences=9)
    result = feature_table(model_folder, data, ["last"], [1], settings, tmp_path / "run")
    assert result["sentences"] == {"train": 9, "dev": 15, "test": 15}
    states = np.load(tmp_path / "run" / "states" / "train.npy", mmap_mode="r")
    assert states.shape[1] == data["train"].boundaries[9]


def test_types_behind_the_first_sentences_are_known(model_folder, tmp_path):
    data = {}
    for split, text in (("train", "ann B-PER\n\nsees O\n\nrome B-LOC\n"), ("dev", "oslo B-LOC\n")):
        data[split] = read_sentences(write(tmp_path / f"{split}.conll", text))
    settings = replace(ONCE, sentences=2)
    result = feature_table(model_folder, data, ["last"], [1], settings, tmp_path / "run")
    assert result["sentences"] == {"train": 2, "dev": 1}
