"""`bertsmith convert`: what it writes, what it says, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints import convert as conversion
from bertsmith.checkpoints.folder import load_model
from bertsmith.checkpoints.model_config import label_names
from bertsmith.cli.main import main
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.wordpiece import Tokenizer


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
