"""Models read without torch: shapes, names and numbers are those that `load_model` gives."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints.config_json import KINDS
from bertsmith.checkpoints.model_folder import CLASSES, load_model, model_class
from bertsmith.checkpoints.reading import model_shapes, open_tensors
from bertsmith.model.config import ModelConfig

from ..tiny import piece_tokenizer, random_model

TOKENIZER = piece_tokenizer("the cat sat")
CONFIG = ModelConfig(len(TOKENIZER.vocabulary), 32, 3, 4, 48, max_positions=20)
READ = ["SequenceClassifier", "OptionScorer", "TokenClassifier", "SpanPredictor"]
READ += ["PreTrainingModel", "BareModel"]
NOT_ASKED = "pooler.", "nsp."  # no answer of these models needs them


def saved(folder, kind):
    outputs = {"OptionScorer": [1], "BareModel": [], "PreTrainingModel": []}.get(kind, [2])
    return random_model(folder, TOKENIZER, CLASSES[kind], *outputs, config=CONFIG)


@pytest.mark.parametrize("kind", READ)
def test_the_tensors_are_those_of_load_model(tmp_path, kind):
    folder = saved(tmp_path / "model", kind)
    expected = load_model(folder, CLASSES[kind]).model.state_dict()
    if kind in ("PreTrainingModel", "BareModel"):
        expected = {n: x for n, x in expected.items() if not n.startswith(NOT_ASKED)}
    found = open_tensors(folder, kind)
    assert set(found) == set(expected) and len(found) == len(expected) and not found.missing
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], tensor.numpy())
    outputs = 1 if kind == "OptionScorer" else 2
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert model_shapes(CONFIG, kind, outputs) == shapes


def test_every_architecture_has_a_class():
    assert set(KINDS.values()) == set(CLASSES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_widened(tmp_path, dtype):
    folder = saved(tmp_path / "model", "BareModel")
    tensors = load_file(folder / "model.safetensors")
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    found = open_tensors(folder, "BareModel")
    expected = stored["bert.embeddings.word_embeddings.weight"].float()
    np.testing.assert_array_equal(found["encoder.embeddings.token.weight"], expected.numpy())


def test_a_head_that_the_folder_lacks_is_missing(tmp_path):
    folder = saved(tmp_path / "model", "BareModel")
    missing = {"mlm.dense.weight", "mlm.dense.bias", "mlm.norm.weight", "mlm.norm.bias", "mlm.bias"}
    assert set(open_tensors(folder, "PreTrainingModel").missing) == missing


def with_tensor(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    kept = {n: x for n, x in tensors.items() if x is not None}
    save_file(kept, folder / "model.safetensors")


ROW = "bert.encoder.layer.2.output.dense.bias"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (ROW, lambda x: x * torch.nan, f"'{ROW}' holds NaN or infinity"),
        (ROW, lambda x: x / 0, f"'{ROW}' holds NaN or infinity"),
        (ROW, lambda x: x.int(), f"'{ROW}' holds I32 numbers, not weights"),
        (ROW, lambda x: x[1:].clone(), rf"'{ROW}' has shape \[31\], but by config.json .* \[32\]"),
        (ROW, lambda x: None, f"the weights lack '{ROW}' of the encoder"),
    ],
    ids=["nan", "infinity", "integers", "shape", "missing"],
)
def test_what_does_not_fit_is_named(tmp_path, name, change, message):
    folder = saved(tmp_path / "model", "BareModel")
    with_tensor(folder, name, change)
    with pytest.raises(ValueError, match=message):
        dict(open_tensors(folder, "BareModel"))


def test_a_wrong_number_of_layers_and_another_task_are_refused(tmp_path):
    folder = saved(tmp_path / "model", "TokenClassifier")
    with pytest.raises(ValueError, match="not a fine-tuned classifier but a TokenClassifier"):
        open_tensors(folder, "SequenceClassifier")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(ValueError, match="says 9 layers, but the weights hold 3"):
        open_tensors(folder, "TokenClassifier")
    assert model_class(folder) is CLASSES["TokenClassifier"]
