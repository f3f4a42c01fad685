"""`bertsmith convert`: what it writes, what it says, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints import convert as conversion
from bertsmith.checkpoints.config_json import label_names
from bertsmith.checkpoints.convert import extend_model, extend_positions
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.cli.main import main
from bertsmith.inference.embeddings import SimilarityTraining, similarity_training
from bertsmith.model.heads import OptionScorer, PreTrainingModel
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.extend import Addition


def call(capsys, *words):
    code = main(["convert", *map(str, words)])
    return code, *capsys.readouterr()


def test_a_folder_is_written_anew_and_proved_equal(folder, tmp_path, capsys):
    before = load_file(folder / "model.safetensors")
    code, out, err = call(capsys, folder, tmp_path / "new")
    assert (code, err) == (0, "")
    numbers = sum(tensor.numel() for tensor in before.values())
    assert f"BertForPreTraining, {len(before)} tensors, {numbers:,} parameters" in out
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizers = [Tokenizer.from_pretrained(path) for path in (folder, tmp_path / "new")]
    assert tokenizers[0].fingerprint == tokenizers[1].fingerprint


def test_what_is_missing_or_unused_is_listed_and_not_invented(folder, tmp_path, capsys):
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "pooler" in name or "seq_relationship" in name]:
        del tensors[name]
    tensors["extra.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    code, out, _ = call(capsys, folder, tmp_path / "new")
    assert code == 0 and "BertForMaskedLM" in out
    listed = [line.split(": ")[-1] for line in out.splitlines()[1:]]
    assert listed == [
        "pooler.dense.weight",
        "pooler.dense.bias",
        "nsp.weight",
        "nsp.bias",
        "extra.weight",
    ]
    assert len(load_model(tmp_path / "new", PreTrainingModel).missing) == 4


def test_the_labels_and_our_settings_of_a_classifier_travel_along(
    classifier_folder, tmp_path, capsys
):
    stored = json.loads((classifier_folder / "config.json").read_text())
    stored["bertsmith"] |= {"task": "classify", "max_length": 64}
    stored["problem_type"] = "multi_label_classification"  # else its outputs would be one choice
    (classifier_folder / "config.json").write_text(json.dumps(stored))
    assert call(capsys, classifier_folder, tmp_path / "new")[0] == 0
    assert label_names(tmp_path / "new") == ["no", "maybe", "yes"]
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == stored


def test_what_cannot_be_converted_is_refused_in_one_line(folder, tmp_path, capsys):
    code, out, err = call(capsys, folder, folder)
    assert (code, out) == (2, "")
    assert err == f"bertsmith convert: {folder}: not empty: name a folder that is not there yet\n"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    code, out, err = call(capsys, folder, tmp_path / "new")
    assert code == 2 and "is never opened: convert it with transformers" in err
    assert err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_nothing_is_left_when_the_proof_fails(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "save_model", worse(conversion.save_model))
    with pytest.raises(RuntimeError, match="'bert.embeddings.LayerNorm.bias' was written, but"):
        conversion.convert(folder, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def worse(save_model):
    def save(model, *arguments, **options):
        model.encoder.embeddings.norm.bias.data[0] = -0.0  # equal to 0.0, but not the same bits
        save_model(model, *arguments, **options)

    return save


def test_an_option_scorer_needs_no_names(config, tokenizer, tmp_path, capsys):
    """transformers leaves the labels of what it started from in config.json."""
    save_model(OptionScorer(config, 1), tokenizer, tmp_path / "old")
    stored = json.loads((tmp_path / "old" / "config.json").read_text())
    stored["id2label"] = {"0": "no", "1": "maybe", "2": "yes"}
    (tmp_path / "old" / "config.json").write_text(json.dumps(stored))
    assert call(capsys, tmp_path / "old", tmp_path / "new")[0] == 0
    assert load_model(tmp_path / "new", OptionScorer).missing == []


def test_how_vectors_are_made_travels_along(folder, tmp_path, capsys):
    """Also where a vocabulary or positions are added: these are sentence-transformers' files."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    (folder / "modules.json").write_text("[]")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    assert call(capsys, folder, tmp_path / "new")[0] == 0
    extend_positions(folder, tmp_path / "longer", 99, torch.Generator())
    extend_model(folder, tmp_path / "wider", [Addition("catsat", 3)], np.ones(12, np.int64))
    for name in ("new", "longer", "wider"):
        assert similarity_training(tmp_path / name) == similarity_training(folder)
    assert similarity_training(folder) == SimilarityTraining("cls", 9)


def test_the_length_of_vectors_travels_along_out_of_the_tokenizer(folder, tmp_path, capsys):
    """Where sentence-transformers 6 has it, and prompts, Normalize and what else it follows."""
    settings = {
        "modules.json": [{"type": "a.Transformer"}, {"type": "b.Normalize", "path": "2_Normalize"}],
        "sentence_bert_config.json": {"do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"q": "q: "}, "default_prompt_name": "q"},
        "tokenizer_config.json": {
            **json.loads((folder / "tokenizer_config.json").read_text()),
            "model_max_length": 9,
        },
    }
    for name, stored in settings.items():
        (folder / name).write_text(json.dumps(stored))
    expected = SimilarityTraining(None, 9, "q: ", normalize=True, lowercase=True)
    assert similarity_training(folder) == expected
    assert call(capsys, folder, tmp_path / "new")[0] == 0
    extend_positions(folder, tmp_path / "longer", 99, torch.Generator())
    extend_model(folder, tmp_path / "wider", [Addition("catsat", 3)], np.ones(12, np.int64))
    for name in ("new", "longer", "wider"):
        assert similarity_training(tmp_path / name) == expected


def test_transformers_is_told_the_positions_of_the_model(folder, tmp_path, capsys, config):
    assert call(capsys, folder, tmp_path / "new")[0] == 0
    extend_positions(folder, tmp_path / "longer", 1024, torch.Generator())
    extend_model(folder, tmp_path / "wider", [Addition("catsat", 3)], np.ones(12, np.int64))
    for name, positions in (("new", None), ("wider", None), ("longer", 1024)):
        stored = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert stored["model_max_length"] == (positions or config.max_positions)


@pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json"])
def test_tokens_that_were_added_to_a_tokenizer_are_told_and_not_lost(
    file, folder, tmp_path, capsys
):
    tokens = ["[E1]", "[/E1]"]
    if file == "tokenizer.json":
        stored = json.loads((folder / file).read_text())
        stored["added_tokens"] += [{"id": 12 + k, "content": t} for k, t in enumerate(tokens)]
    else:
        stored = {token: 12 + k for k, token in enumerate(tokens)}
    (folder / file).write_text(json.dumps(stored))
    Tokenizer.from_pretrained(folder)
    warning = f"warning: {folder}: tokens were added to its tokenizer ([E1], [/E1]), which"
    assert capsys.readouterr().err.startswith(warning)
    Tokenizer.from_pretrained(folder)
    assert capsys.readouterr().err == ""  # once is enough
    code, _, err = call(capsys, folder, tmp_path / "new")
    assert code == 2 and "its tokenizer ([E1], [/E1]), which would be lost: keep" in err
    with pytest.raises(ValueError, match="which would be lost"):
        extend_positions(folder, tmp_path / "new", 99, torch.Generator())
    with pytest.raises(ValueError, match="which would be lost"):
        extend_model(folder, tmp_path / "new", [Addition("catsat", 3)], np.ones(12, np.int64))
    assert not (tmp_path / "new").exists()
