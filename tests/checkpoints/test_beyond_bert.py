"""Models that transformers' BERT cannot compute: exact for us, refused there."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertsmith.checkpoints.config_json import label_names, read_config
from bertsmith.checkpoints.convert import extend_model, extend_positions
from bertsmith.checkpoints.model_folder import load_model, model_class, save_model
from bertsmith.model.heads import BareModel, OptionScorer, PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.text.vocabulary.extend import Addition

from ..tiny import refused

WEIGHTS = "model.safetensors"
OPTIONS = [("pre_norm",), ("gated",), ("pre_norm", "gated")]
VARIANTS = pytest.mark.parametrize("options", OPTIONS, ids="+".join)


def model_of(config, options, kind=PreTrainingModel, *arguments):
    """Every tensor is random, biases and LayerNorms too."""
    model = kind(replace(config, **dict.fromkeys(options, True)), *arguments)
    generator = torch.Generator().manual_seed(6)
    for parameter in initialize(model, 0.1, generator).parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


@pytest.mark.parametrize("causal", [False, True])
@VARIANTS
def test_a_model_comes_back_bit_for_bit(options, causal, config, tokenizer, tmp_path):
    before = model_of(replace(config, causal=causal, activation="gelu_tanh"), options)
    save_model(before, tokenizer, tmp_path)
    assert read_config(tmp_path) == before.config
    loaded = load_model(tmp_path, model_class(tmp_path))
    assert type(loaded.model) is PreTrainingModel and loaded.missing == loaded.unused == []
    torch.testing.assert_close(loaded.model.state_dict(), before.state_dict(), rtol=0, atol=0)
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    first, second = (model.eval().encoder(ids) for model in (before, loaded.model))
    assert torch.equal(first, second)
    changed = load_model(tmp_path, BareModel, dropout=0.5).model.config
    assert changed == replace(before.config, dropout=0.5)


def test_the_added_tensors_have_names_of_their_own(config, tokenizer, tmp_path):
    model = model_of(config, ("pre_norm", "gated"))
    save_model(model, tokenizer, tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    assert torch.equal(stored["bert.encoder.final_norm.bias"], model.encoder.final_norm.bias)
    gate, up = model.encoder.layers[1].gate_up.weight.chunk(2)
    assert torch.equal(stored["bert.encoder.layer.1.intermediate.gate.weight"], gate)
    assert torch.equal(stored["bert.encoder.layer.1.intermediate.up.weight"], up)
    assert not any("intermediate.dense" in name for name in stored)


def test_a_classifier_keeps_its_kind_and_labels(config, tokenizer, tmp_path):
    model = model_of(config, ("pre_norm",), SequenceClassifier, 2)
    save_model(model, tokenizer, tmp_path, label_names=["no", "yes"])
    assert model_class(tmp_path) is SequenceClassifier and label_names(tmp_path) == ["no", "yes"]
    loaded = load_model(tmp_path, SequenceClassifier)
    torch.testing.assert_close(loaded.model.state_dict(), model.state_dict(), rtol=0, atol=0)


@VARIANTS
def test_transformers_refuses_it(options, config, tokenizer, tmp_path):
    """Through the automatic classes, and through those of BERT, which only warn of a model_type."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    save_model(model_of(config, options), tokenizer, tmp_path)
    for kind in (transformers.AutoConfig, transformers.AutoModel):
        with pytest.raises(ValueError, match="model type `bertsmith`"):
            kind.from_pretrained(tmp_path)
    for kind in (transformers.BertModel, transformers.BertForPreTraining):
        with pytest.raises(KeyError, match="bertsmith"):
            kind.from_pretrained(tmp_path)
    architectures = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert not hasattr(transformers, architectures[0])


@VARIANTS
def test_it_is_not_converted_and_the_reason_given(options, config, tokenizer, tmp_path):
    save_model(model_of(config, options), tokenizer, tmp_path / "own")
    line = refused("convert", tmp_path / "own", tmp_path / "new")
    assert f"a model with {' and '.join(options)}, which transformers' BERT does not" in line
    assert not (tmp_path / "new").exists()


def test_its_vocabulary_is_extended(config, tokenizer, tmp_path):
    model = model_of(config, ("pre_norm", "gated"))
    save_model(model, tokenizer, tmp_path / "old")
    additions = [Addition("catsat", 3)]
    extend_model(tmp_path / "old", tmp_path / "new", additions, np.ones(12, np.int64))
    loaded = load_model(tmp_path / "new", PreTrainingModel)
    assert loaded.model.config == replace(model.config, vocab_size=13)
    assert loaded.missing == loaded.unused == []
    norms = (each.encoder.final_norm.weight for each in (loaded.model, model))
    assert torch.equal(*norms)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "config.json: no 'model' with the settings of the model"),
        ({"rotary": True}, "config.json: unknown setting 'rotary'"),
        ({"num_layers": 0}, "`num_layers=0`: must be 1 to 10,000,000"),
        ({"num_layers": 3}, "config.json says 3 layers, but the weights hold 2"),
        ({"gated": "yes"}, "config.json: gated = 'yes': expected"),
        ({"pre_norm": True}, "the weights lack 'bert.encoder.final_norm.weight'"),
        ({"gated": False}, "the weights lack 'bert.encoder.layer.0.intermediate.dense.weight'"),
        ({"intermediate_size": 48}, r"gate.weight' has shape \[32, 16\], but by config.json it"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(
    change, message, config, tokenizer, tmp_path, change_config
):
    save_model(model_of(config, ("gated",)), tokenizer, tmp_path)
    model = change_config(tmp_path, {})["model"]
    change_config(tmp_path, {"model": None if "model" in change else model | change})
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path, PreTrainingModel)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [SequenceClassifier, OptionScorer])
def test_a_causal_models_class_is_read_where_transformers_does_not_look(
    kind, config, tokenizer, tmp_path
):
    transformers = pytest.importorskip("transformers")
    outputs = 2 if kind is SequenceClassifier else 1
    model = model_of(replace(config, causal=True), (), kind, outputs).eval()
    save_model(model, tokenizer, tmp_path / "own")
    with pytest.raises(ValueError, match="model type `bertsmith`"):
        transformers.AutoModel.from_pretrained(tmp_path / "own")
    assert model_class(tmp_path / "own") is kind
    line = refused("convert", tmp_path / "own", tmp_path / "new")
    assert "a model with a class read at the last token, which" in line
    longer = 2 * config.max_positions
    extend_positions(tmp_path / "own", tmp_path / "longer", longer, torch.Generator())
    ids, types = torch.tensor([[2, 5, 6, 3, 0], [2, 5, 7, 6, 3]]), torch.zeros(2, 5).long()
    for folder in (tmp_path / "own", tmp_path / "longer"):
        loaded = load_model(folder, kind).model.eval()
        with torch.no_grad():
            given, expected = (one(ids, types, torch.tensor([4, 5])) for one in (loaded, model))
        assert torch.equal(given, expected) and not torch.allclose(given[0], given[1])
    # beside a forward pass of its own: the state of the last real token, pooled
    with torch.no_grad():
        last = model.encoder(ids[:1, :4], types[:1, :4])[:, -1]
        alone = model.classifier(model.pooler(last))
        torch.testing.assert_close(alone[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(ids[:1, :4], types[:1, :4], None)[0], expected[0])
