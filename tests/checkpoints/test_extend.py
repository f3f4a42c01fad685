"""A longer vocabulary's rows: hand-computed, against transformers, and nothing else touched."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints import convert as extend
from bertsmith.checkpoints.convert import extend_model, new_biases
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.extend import Addition

TABLE, BIAS = extend.TOKEN_EMBEDDING, extend.OUTPUT_BIAS
NEW = [Addition("cats", 6), Addition("##son", 2), Addition("unseen", 0)]
COUNTS = np.array([0, 0, 0, 0, 0, 20, 9, 4, 9, 4, 4, 8])  # of the 12 pieces


@pytest.fixture
def extended(folder, tmp_path):
    """(tensors before, tensors after, new folder)."""
    extend_model(folder, tmp_path / "new", NEW, COUNTS)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "new"))
    return before, after, tmp_path / "new"


def test_a_new_row_is_the_mean_of_its_old_pieces(extended):
    before, after, new = extended
    pieces = Tokenizer.from_pretrained(new).vocabulary.pieces
    assert pieces[:5] == SPECIAL and pieces[12:] == ("cats", "##son", "unseen")
    cat, s = before[TABLE][6], before[TABLE][8]
    assert torch.equal(after[TABLE][:12], before[TABLE])
    torch.testing.assert_close(after[TABLE][12], (cat + s) / 2)
    unknown = before[TABLE][1]  # "##on" is no piece, nor is "unseen"
    torch.testing.assert_close(after[TABLE][13:], torch.stack([unknown, unknown]))


def test_all_else_is_written_as_it_was(extended, folder):
    before, after, new = extended
    assert before.keys() == after.keys()
    for name in before.keys() - {TABLE, BIAS}:
        assert torch.equal(before[name], after[name]), name
    assert torch.equal(after[BIAS][:12], before[BIAS]) and after[BIAS].shape == (15,)
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, new)]
    assert configs[0] | {"vocab_size": 15} == configs[1]


def test_transformers_opens_it_and_computes_the_same(extended):
    transformers = pytest.importorskip("transformers")
    new = extended[2]
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(new).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(new)
    text = "the cats sat on the [MASK]."
    inputs = tokenizer(text, return_tensors="pt")
    ids = inputs["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[0])[2] == "cats"
    assert len(tokenizer) == theirs.config.vocab_size == 15
    ours = load_model(new, PreTrainingModel).model.eval()
    with torch.inference_mode():
        place = (ids[0] == tokenizer.mask_token_id).nonzero()
        logits = ours(ids, torch.zeros_like(ids), None, place.view(1, 1)).mlm_logits
        torch.testing.assert_close(theirs(**inputs).logits[0, place[0]], logits)


def test_the_bias_gives_a_new_piece_the_frequency_of_the_text(monkeypatch):
    """Frequencies that follow one state exactly: a piece left out and put in again gets its own."""
    monkeypatch.setattr(extend, "RIDGE", 1e-9)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(400, 8, generator=generator)
    bias = torch.randn(400, generator=generator)
    state = torch.randn(8, generator=generator)
    counts = (table.double() @ state.double() + bias.double()).exp().numpy() * 1000
    found = new_biases(table[:390], bias[:390], counts[:390], table[390:], counts[390:])
    torch.testing.assert_close(found, bias[390:], rtol=1e-3, atol=1e-3)
    twice = new_biases(table[:390], bias[:390], counts[:390], table[390:], 2 * counts[390:])
    torch.testing.assert_close(twice - found, torch.full((10,), 2.0).log(), rtol=1e-3, atol=1e-3)


def test_few_pieces_seen_still_give_finite_biases(pretrained):
    table, bias = pretrained.encoder.embeddings.token.weight.detach(), pretrained.mlm.bias.detach()
    for counts in (np.eye(1, 12, 5)[0], COUNTS):
        found = new_biases(table, bias, counts, table[:2], np.array([0, 3]))
        assert found.isfinite().all() and found[0] != found[1]


@pytest.mark.parametrize(("rows", "pieces", "after"), [(64, 64, 128), (65, 60, 66), (128, 60, 192)])
def test_rows_without_a_piece_are_kept_and_named(tmp_path, rows, pieces, after):
    config = ModelConfig(rows, 16, 1, 2, 32, 24)
    model = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(4))
    torch.nn.init.normal_(model.mlm.bias)
    old = Tokenizer(Vocabulary([*SPECIAL, *(f"a{k}" for k in range(pieces - 5))]))
    save_model(model, old, tmp_path / "old")
    counts = np.ones(pieces, np.int64)
    new = extend_model(tmp_path / "old", tmp_path / "new", [Addition("a1a2", 3)], counts).vocabulary
    assert len(new) == after and new.ids["a1a2"] == rows
    unused = [*new.pieces[pieces:rows], *new.pieces[rows + 1 :]]
    assert unused == [f"[unused{k}]" for k in range(after - pieces - 1)]
    loaded = load_model(tmp_path / "new", PreTrainingModel).model
    table, bias = loaded.encoder.embeddings.token.weight, loaded.mlm.bias
    assert table.shape == (after, 16) and bias.shape == (after,)
    assert torch.equal(table[:rows], model.encoder.embeddings.token.weight)
    assert torch.equal(bias[:rows], model.mlm.bias)
    assert (table[rows + 1 :] == table[0]).all() and (bias[rows + 1 :] == bias[0]).all()


def test_a_classifier_keeps_its_head_and_labels(classifier_folder, tmp_path):
    extend_model(classifier_folder, tmp_path / "new", NEW, COUNTS)
    before, after = (
        load_model(path, SequenceClassifier).model for path in (classifier_folder, tmp_path / "new")
    )
    assert torch.equal(before.classifier.weight, after.classifier.weight)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["no", "maybe", "yes"]
    assert BIAS not in load_file(tmp_path / "new" / "model.safetensors")


def test_half_precision_and_foreign_heads_are_kept(folder, tmp_path):
    tensors = {n: t.half() for n, t in load_file(folder / "model.safetensors").items()}
    tensors["cls.predictions.decoder.weight"] = tensors[TABLE].clone()
    tensors["qa_outputs.weight"] = torch.ones(2, 16)
    save_file(tensors, folder / "model.safetensors")
    extend_model(folder, tmp_path / "new", NEW, COUNTS)
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert after[TABLE].dtype == after[BIAS].dtype == torch.float16
    assert after["qa_outputs.weight"].shape == (2, 16)
    assert "cls.predictions.decoder.weight" not in after  # a copy of the table, which has grown


def test_a_tokenizer_of_too_many_pieces_is_refused(folder, tmp_path):
    with (folder / "vocab.txt").open("a") as file:
        file.write("dog\n")
    with pytest.raises(ValueError, match="vocabulary has 13 pieces, but its model 12"):
        extend_model(folder, tmp_path / "new", NEW, np.ones(13))
    assert not (tmp_path / "new").exists()
