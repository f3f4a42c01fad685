"""Folders of google-research/bert: models, settings, names, optimizer; against float64 NumPy."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.convert import convert
from bertsmith.checkpoints.formats.google import checkpoint_prefix
from bertsmith.checkpoints.formats.tensorflow_bundle import Bundle, write_bundle
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.model_folder import load_model, model_class
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.checkpoints.tensors import google_optimizer
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
)
from bertsmith.training.optimizers import PaperAdam, load_state_tensors

from ...tiny import bertsmith, contents, random_model, refused, write
from .make_golden import (
    PIECES,
    SHAPE,
    google_bert,
    main,
    save_bert,
    with_slots,
)
from .reference import Reference

GOLDEN = Path(__file__).parent / "golden"
ONE_LAYER = SHAPE | {"num_hidden_layers": 1}
SIZES = {  # layers, hidden size, pieces
    "tiny": (2, 128, 30_522),
    "8x512": (8, 512, 30_522),
    "base": (12, 768, 30_522),
}


def logits(model, ids, types, lengths):
    """What the heads of a model say, as float64 arrays."""
    rows = (torch.tensor(ids), torch.tensor(types), torch.tensor(lengths))
    with torch.no_grad():
        if isinstance(model, PreTrainingModel):
            everywhere = torch.arange(ids.shape[1]).expand(ids.shape)
            mlm, nsp = model.eval()(*rows, everywhere)
            return [mlm.double().numpy().reshape(*ids.shape, -1), nsp.double().numpy()]
        return [model.eval()(*rows).double().numpy()]


def expected(head, reference, ids, types, lengths):
    hidden = reference.hidden(ids, types, lengths)
    if head == "pretraining":
        pairs = reference.head(reference.pooled(hidden), "cls/seq_relationship/")
        return [reference.masked_lm(hidden), pairs]
    if head == "classifier":
        return [reference.head(reference.pooled(hidden), "")]
    return [reference.head(hidden, "cls/squad/")]


def difference(folder, head, arrays, config, ids):
    """The largest between the logits of a folder's model and the reference; padding apart."""
    types, lengths = (np.arange(ids.shape[1]) > 4) * np.ones_like(ids), np.array([ids.shape[1], 6])
    model = load_model(folder, model_class(folder)).model
    found = logits(model, ids, types, lengths)
    wanted = expected(head, Reference(arrays, config), ids, types, lengths)
    real = np.arange(ids.shape[1]) < lengths[:, None]
    pairs = [(a[real], b[real]) if a.ndim == 3 else (a, b)
             for a, b in zip(found, wanted, strict=True)]  # fmt: skip
    return max(np.abs(a - b).max() for a, b in pairs)


@pytest.mark.parametrize(
    ("head", "kind", "config"),
    [
        ("pretraining", PreTrainingModel, SHAPE),
        ("classifier", SequenceClassifier, ONE_LAYER),
        ("squad", SpanPredictor, ONE_LAYER),
    ],
)
def test_a_released_folder_is_a_model(head, kind, config, tmp_path):
    folder, arrays = GOLDEN / head, google_bert(config, head)
    assert open_model_folder(folder) == folder and model_class(folder) is kind
    bundle = Bundle(checkpoint_prefix(folder))
    for name, values in arrays.items():
        assert bundle.read(name).tobytes() == values.tobytes()
    loaded = load_model(folder, kind)
    pooler = ["bert/pooler/dense/bias", "bert/pooler/dense/kernel"]
    assert not loaded.missing and loaded.unused == (pooler if head == "squad" else [])
    ids = np.random.default_rng(1).integers(0, len(PIECES), (2, 12))
    # float32 sums of 16 terms of size 1 err by 1e-6
    assert difference(folder, head, arrays, config, ids) < 1e-5

    there, back = tmp_path / "there", tmp_path / "back"
    convert(folder, there)
    convert(there, back, to="tensorflow")
    assert (there / "model.safetensors").exists() and (back / "bert_config.json").exists()
    again = Bundle(back / "bert_model.ckpt")
    assert sorted(again.names) == sorted(arrays.keys() - loaded.unused)
    for name in again.names:
        assert again.read(name).tobytes() == arrays[name].tobytes()
    assert difference(back, head, arrays, config, ids) < 1e-5


def test_every_command_takes_such_a_folder(tmp_path):
    folder = GOLDEN / "pretraining"
    assert "cat" in bertsmith("fill", "the [MASK] sat", "--model", folder, "--top", 12)
    text = write(tmp_path / "text.txt", ["the cat sat", "the mat"])
    bertsmith("embed", text, "--model", folder, "--out", tmp_path / "vectors.npy")
    assert np.load(tmp_path / "vectors.npy").shape == (2, 8)
    longer = tmp_path / "longer"
    bertsmith("extend-positions", folder, "--positions", 20, "--out", longer)
    assert load_model(longer, PreTrainingModel).model.config.activation == "gelu_tanh"
    said = bertsmith("convert", GOLDEN / "squad", tmp_path / "out", "--to", "tensorflow")
    assert "23 tensors" in said and "unused, not written: bert/pooler/dense/bias" in said


def test_unknown_tensors_are_listed_and_the_optimizers_not(tmp_path):
    arrays = with_slots(google_bert(SHAPE, "pretraining"), 3)
    folder = google_folder(tmp_path, arrays | {"my/own": np.ones(2), "loss_scale": np.int64(1)})
    assert load_model(folder, PreTrainingModel).unused == ["loss_scale", "my/own"]
    bertsmith("convert", folder, tmp_path / "out")


def google_folder(folder, arrays, config=SHAPE, prefix="bert_model.ckpt"):
    """A folder of Google's, written by us."""
    folder.mkdir(exist_ok=True)
    write_bundle(folder / prefix, {name: np.asarray(values) for name, values in arrays.items()})
    write(folder / "bert_config.json", json.dumps(config))
    write(folder / "vocab.txt", PIECES)
    return folder


def test_a_bare_encoder_a_masked_lm_alone_and_what_is_no_bert(tmp_path):
    arrays = google_bert(SHAPE, "pretraining")
    pairs = {name: values for name, values in arrays.items() if "seq_rel" not in name}
    folder = google_folder(tmp_path / "mlm", pairs)
    assert load_model(folder, model_class(folder)).missing == ["nsp.weight", "nsp.bias"]
    bare = {name: values for name, values in arrays.items() if name.startswith("bert")}
    assert model_class(google_folder(tmp_path / "bare", bare)) is BareModel
    name = "bert/encoder/layer_1/output/dense/kernel"
    folder = google_folder(tmp_path / "turned", bare | {name: bare[name].T})
    with pytest.raises(
        ValueError, match=r"kernel' has shape \[16, 8\], .* bert_config.json .*8, 1"
    ):
        load_model(folder, BareModel)
    folder = google_folder(tmp_path / "whole", bare | {name: bare[name].astype(np.int32)})
    with pytest.raises(ValueError, match="kernel' holds int32 numbers, not weights"):
        load_model(folder, BareModel)
    folder = google_folder(tmp_path / "less", {n: x for n, x in bare.items() if n != name})
    with pytest.raises(ValueError, match=r"the weights lack 'bert.encoder.layer.1.output.dense.w"):
        load_model(folder, BareModel)
    folder = google_folder(tmp_path / "layers", bare, SHAPE | {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"bert_config.json says 3 layers, but the weights hold 2"):
        load_model(folder, BareModel)


def test_googles_default_is_its_own_gelu(tmp_path):
    config = {name: value for name, value in SHAPE.items() if name != "hidden_act"}
    folder = google_folder(tmp_path / "model", google_bert(SHAPE, "pretraining"), config)
    assert load_model(folder, PreTrainingModel).model.config.activation == "gelu_tanh"


def test_the_exact_gelu_comes_back(tmp_path, folder):
    """Google's code has no name for it: the model is BERT of Hugging Face."""
    said = bertsmith("convert", folder, tmp_path / "there", "--to", "tensorflow")
    assert "its GELU is exact: google-research/bert computes" in said
    stored = json.loads((tmp_path / "there/bert_config.json").read_text())
    assert (stored["hidden_act"], stored["gelu"]) == ("gelu", "erf")
    assert load_model(tmp_path / "there", PreTrainingModel).model.config.activation == "gelu"
    convert(tmp_path / "there", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


def test_labels_and_settings_come_back(tmp_path, classifier_folder):
    convert(classifier_folder, tmp_path / "there", to="tensorflow")
    convert(tmp_path / "there", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(classifier_folder)


def test_models_that_google_does_not_have_are_refused(tmp_path, tokenizer):
    config = ModelConfig(len(tokenizer.vocabulary), 16, 1, 2, 32, causal=True)
    folder = random_model(tmp_path / "ltr", tokenizer, config=config)
    line = refused("convert", folder, tmp_path / "out", "--to", "tensorflow")
    assert "a left-to-right model, which google-research/bert does not have" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "lowercase"),
    [
        ("uncased_L-2_H-128_A-2", True),
        ("wwm_cased_L-24_H-1024_A-16", False),
        ("multi_cased_L-12_H-768_A-12", False),
        ("multilingual_L-12_H-768_A-12", True),
        ("chinese_L-12_H-768_A-12", True),
        ("mine", True),  # no piece has a capital
    ],
)
def test_case_by_the_folders_name(tmp_path, name, lowercase):
    folder = shutil.copytree(GOLDEN / "classifier", tmp_path / name)
    assert load_tokenizer(folder).normalization.lowercase is lowercase
    write(folder / "tokenizer_config.json", json.dumps({"do_lower_case": not lowercase}))
    assert load_tokenizer(folder).normalization.lowercase is not lowercase


def test_which_checkpoint_of_a_folder(tmp_path):
    assert checkpoint_prefix(tmp_path) is None
    for step in (5, 10):
        write_bundle(tmp_path / f"model.ckpt-{step}", {"x": np.ones(1)})
    with pytest.raises(ValueError, match=r"several checkpoints \(model.ckpt-10, model.ckpt-5\)"):
        checkpoint_prefix(tmp_path)
    named = 'model_checkpoint_path: "/elsewhere/model.ckpt-5"\nall_model_checkpoint_paths: "x"\n'
    latest = write(tmp_path / "checkpoint", named)
    assert checkpoint_prefix(tmp_path) == tmp_path / "model.ckpt-5"
    latest.write_text('model_checkpoint_path: "model.ckpt-7"\n')
    with pytest.raises(ValueError, match="names 'model.ckpt-7', but model.ckpt-7.index is not"):
        checkpoint_prefix(tmp_path)
    latest.write_text("nothing")
    with pytest.raises(ValueError, match="no model_checkpoint_path in it"):
        checkpoint_prefix(tmp_path)


def test_v1_and_tf2_have_errors_of_their_own(tmp_path):
    magic = (GOLDEN / "shards.index").read_bytes()[-8:]  # V1 files are such tables, too
    write(tmp_path / "bert_config.json", json.dumps(SHAPE))
    write(tmp_path / "bert_model.ckpt", bytes(100) + magic)
    with pytest.raises(ValueError, match=r"bert_model.ckpt: a V1 checkpoint of TensorFlow"):
        load_model(tmp_path, BareModel)
    write(tmp_path / "checkpoint", 'model_checkpoint_path: "bert_model.ckpt"')
    with pytest.raises(ValueError, match=r"bert_model.ckpt: a V1 checkpoint of TensorFlow"):
        load_model(tmp_path, BareModel)
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "bert_model.ckpt").unlink()
    for file in GOLDEN.glob("objects.*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ValueError, match=r"objects.index: a TF2 checkpoint of objects"):
        load_model(tmp_path, BareModel)


def test_a_fine_tuned_folder_without_its_settings(tmp_path):
    write_bundle(tmp_path / "model.ckpt-5", {"x": np.ones(1)})
    line = refused("fill", "the [MASK]", "--model", tmp_path)
    assert "no bert_config.json: copy it, and vocab.txt, from the folder of the model" in line


def test_adams_state_goes_on_as_in_google_s_code():
    """A step of ours from Google's slots is Google's step: optimization.py in float64."""
    folder, arrays = GOLDEN / "pretraining", with_slots(google_bert(SHAPE, "pretraining"), 20)
    model = load_model(folder, PreTrainingModel).model
    decay = [name for name, _ in model.named_parameters() if "layers.1.qkv.weight" in name]
    optimizer = PaperAdam(model.parameters(), lr=0.01, eps=1e-6, weight_decay=0.01)
    state, step = google_optimizer(folder)
    assert step == 20 and len(state) == 2 * len(list(model.parameters())) and decay
    load_state_tensors(model, optimizer, state)
    draws, gradients = np.random.default_rng(3), {}
    for name, parameter in model.named_parameters():
        gradients[name] = draws.standard_normal(parameter.shape).astype(np.float32) * 1e-3
        parameter.grad = torch.tensor(gradients[name])
    optimizer.step()
    rows = {"query": 0, "key": 1, "value": 2}
    for part, row in rows.items():
        name = f"bert/encoder/layer_1/attention/self/{part}/kernel"
        weight, m, v = (np.float64(arrays[name + slot]) for slot in ("", "/adam_m", "/adam_v"))
        gradient = gradients["encoder.layers.1.qkv.weight"][8 * row : 8 * row + 8].T
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * np.float64(gradient) ** 2
        wanted = weight - 0.01 * (m / (np.sqrt(v) + 1e-6) + 0.01 * weight)
        found = model.encoder.layers[1].qkv.weight[8 * row : 8 * row + 8].T.detach()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_released_models_have_no_optimizer(tmp_path):
    assert google_optimizer(GOLDEN / "classifier") is None
    assert google_optimizer(tmp_path) is None


@pytest.fixture(scope="module")
def tensorflow():
    return pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


@pytest.mark.slow
def test_the_golden_files_are_what_tensorflow_writes(tmp_path, tensorflow):
    main(tmp_path)
    made, stored = contents(tmp_path), contents(GOLDEN)
    assert made.keys() == stored.keys()
    for name in made:
        if not name.startswith("objects"):  # has a date or a random number in it
            assert made[name] == stored[name], name


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_models_of_real_sizes(tmp_path, tensorflow, size):
    layers, hidden, pieces = SIZES[size]
    config = SHAPE | {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden, "vocab_size": pieces, "max_position_embeddings": 512,
    }  # fmt: skip
    arrays = google_bert(config, "pretraining", std=0.02)
    save_bert(tmp_path / "tf", config, arrays)
    bundle = Bundle(tmp_path / "tf/bert_model.ckpt")
    assert sorted(bundle.names) == sorted(arrays)
    for name, values in arrays.items():
        assert bundle.read(name).tobytes() == values.tobytes()
    ids = np.random.default_rng(1).integers(0, pieces, (2, 24))
    largest = difference(tmp_path / "tf", "pretraining", arrays, config, ids)
    print(f"{size}: largest difference of a logit {largest:.2g}")
    assert largest < 1e-5

    convert(tmp_path / "tf", tmp_path / "ours", to="tensorflow")
    reader = tensorflow.train.load_checkpoint(str(tmp_path / "ours/bert_model.ckpt"))
    assert reader.get_variable_to_shape_map().keys() == arrays.keys()
    for name, values in arrays.items():
        assert reader.get_tensor(name).tobytes() == values.tobytes()


@pytest.mark.slow
def test_tensorflow_opens_every_type_that_we_write(tmp_path, tensorflow):
    from .make_golden import various

    write_bundle(tmp_path / "x", various())
    reader = tensorflow.train.load_checkpoint(str(tmp_path / "x"))
    for name, values in various().items():
        found = reader.get_tensor(name)
        assert (found.dtype, found.tobytes()) == (values.dtype, values.tobytes())
