"""pytorch_model.bin: read like safetensors, refused where it wants to run something."""

import json
import os
import pickle
import random
import re
import zipfile

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.convert import convert
from bertsmith.checkpoints.formats.pickled import read_pickled
from bertsmith.checkpoints.model_folder import load_model, model_class
from bertsmith.checkpoints.reading import open_tensors
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.model.heads import PreTrainingModel

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
FORMATS = pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before 1.6"])


def to_pickled(folder, is_archive=True, shards=1):
    """Put the weights of a folder into pickled files, as transformers wrote them in its time."""
    tensors = read_tensor_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, index = list(tensors), {}
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        file = PICKLED if shards == 1 else f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save(part, folder / file, _use_new_zipfile_serialization=is_archive)
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / f"{PICKLED}.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors


class Asks:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@FORMATS
@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_are_read(is_archive, shards, folder, pretrained, tmp_path):
    to_pickled(folder, is_archive, shards)
    loaded = load_model(folder, PreTrainingModel)
    assert loaded.missing == loaded.unused == []
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, pretrained.state_dict()[name]), name
        assert tensor.data_ptr() % 64 == 0  # memory of torch's own: no map of the file
    assert convert(folder, tmp_path / "new").missing == []
    assert (tmp_path / "new" / WEIGHTS).exists()


def test_a_folder_of_2018_is_no_google_s(folder, pretrained):
    """pytorch-pretrained-bert has Google's bert_config.json, but its own weights and exact GELU."""
    tensors = to_pickled(folder)
    old = {"weight": "gamma", "bias": "beta"}
    renamed = {
        re.sub(r"(?<=LayerNorm\.)(weight|bias)$", lambda one: old[one[0]], name): tensor
        for name, tensor in tensors.items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in renamed
    torch.save(renamed, folder / PICKLED, _use_new_zipfile_serialization=False)
    entries = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in entries.items() if isinstance(value, int | float)}
    (folder / "bert_config.json").write_text(json.dumps(sizes | {"hidden_act": "gelu"}))
    (folder / "config.json").unlink()
    assert model_class(folder) is PreTrainingModel
    loaded = load_model(folder, PreTrainingModel)
    assert loaded.model.config.activation == "gelu"
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, pretrained.state_dict()[name]), name


def test_parameters_are_read_as_the_tensors_they_are(folder, pretrained):
    """Of a file that somebody made of `named_parameters` in place of `state_dict`."""
    tensors = to_pickled(folder)
    table = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.weight"] = table.clone()
    torch.save({n: torch.nn.Parameter(x) for n, x in tensors.items()}, folder / PICKLED)
    state = load_model(folder, PreTrainingModel).model.state_dict()
    assert all(torch.equal(state[name], x) for name, x in pretrained.state_dict().items())
    assert np.array_equal(open_tensors(folder, "Encoder")["encoder.embeddings.token.weight"], table)


def test_safetensors_come_first(folder):
    (folder / PICKLED).write_bytes(b"not a pickle")
    assert load_model(folder, PreTrainingModel).missing == []


@pytest.mark.parametrize("kind", ["archive", "before 1.6", "raw", "in a tensor's place"])
def test_a_pickle_that_asks_for_more_than_tensors_runs_nothing(kind, folder, tmp_path):
    tensors, made = to_pickled(folder), tmp_path / "made"
    asking = tensors | {"a": Asks(made)} if kind.startswith("in") else Asks(made)
    if kind == "raw":
        (folder / PICKLED).write_bytes(pickle.dumps(asking, protocol=2))
    else:
        torch.save(asking, folder / PICKLED, _use_new_zipfile_serialization=kind != "before 1.6")
    message = r"pytorch_model.bin: it asks Python for 'posix.mkdir', .* nothing of it was run: take"
    with pytest.raises(ValueError, match=message):
        load_model(folder, PreTrainingModel)
    assert not made.exists()
    if kind == "raw":
        pickle.loads((folder / PICKLED).read_bytes())
        assert made.exists()  # it was a real danger


@pytest.mark.parametrize(
    "stored",
    [
        [torch.ones(2)],
        {"model": {"weight": torch.ones(2)}},
        {1: torch.ones(2)},
        {"weight": torch.eye(2).to_sparse()},
        {"weight": torch.ones(2, device="meta")},
    ],
)
def test_another_thing_than_a_table_of_tensors_is_named(stored, tmp_path):
    torch.save(stored, tmp_path / PICKLED)
    with pytest.raises(ValueError, match="pytorch_model.bin: not a table of plain tensors"):
        read_pickled(tmp_path / PICKLED)


def test_a_packed_archive_is_not_unfolded(folder):
    to_pickled(folder)
    with zipfile.ZipFile(folder / PICKLED) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / PICKLED, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match=r"pytorch_model.bin: trunc.* is compressed\): copy or"):
        load_model(folder, PreTrainingModel)


@FORMATS
def test_a_damaged_file_is_named(is_archive, folder):
    to_pickled(folder, is_archive)
    data = (folder / PICKLED).read_bytes()
    draw = random.Random(1)
    for length in [0, 1, 100, len(data) // 2, len(data) - 1]:
        (folder / PICKLED).write_bytes(data[:length])
        with pytest.raises(ValueError, match="pytorch_model.bin: truncated or damaged") as caught:
            load_model(folder, PreTrainingModel)
        assert "weights_only" not in str(caught.value) and "\n" not in str(caught.value)
    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(3):  # mostly where the pickle is
            damaged[draw.randrange(min(len(data), 3000))] = draw.randrange(256)
        (folder / PICKLED).write_bytes(damaged)
        try:
            load_model(folder, PreTrainingModel)
        except ValueError as error:
            assert str(folder) in str(error)
