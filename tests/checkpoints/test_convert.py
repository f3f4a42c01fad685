"""New folders out of old ones: converted, with more pieces, with more positions."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.base.files import read_json
from bertsmith.checkpoints import convert as conversion
from bertsmith.checkpoints.config_json import label_names
from bertsmith.checkpoints.convert import (
    OUTPUT_BIAS,
    POSITION_EMBEDDING,
    TOKEN_EMBEDDING,
    extend_model,
    extend_positions,
    longer_table,
    new_biases,
)
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.inference.embeddings.pooling import SimilarityTraining, similarity_training
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import OptionScorer, PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL
from bertsmith.text.vocabulary.extend import Addition

from ..tiny import cli, contents, piece_tokenizer, random_model, refused, write

NEW = [Addition("cats", 6), Addition("##son", 2), Addition("unseen", 0)]
COUNTS = np.array([0, 0, 0, 0, 0, 20, 9, 4, 9, 4, 4, 8])  # of the 12 pieces


def drawn(seed=1):
    return torch.Generator().manual_seed(seed)


def wider(folder, new):
    extend_model(folder, new, NEW, COUNTS)


def longer(folder, new, positions=60):
    assert extend_positions(folder, new, positions, drawn()) == 24


def tensors_of(*folders):
    return [load_file(folder / "model.safetensors") for folder in folders]


def in_all_ways(folder, parent, positions):
    """The folders converted, with more positions and with more pieces."""
    new = {name: parent / name for name in ("new", "longer", "wider")}
    conversion.convert(folder, new["new"])
    longer(folder, new["longer"], positions)
    wider(folder, new["wider"])
    return new


def test_a_folder_is_written_anew_and_proved_equal(folder, tmp_path):
    ran = cli("convert", folder, tmp_path / "new")
    before, after = tensors_of(folder, tmp_path / "new")
    numbers = sum(tensor.numel() for tensor in before.values())
    assert (ran.code, ran.err) == (0, "") and before.keys() == after.keys()
    assert f"BertForPreTraining, {len(before)} tensors, {numbers:,} parameters" in ran.out
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizers = [Tokenizer.from_pretrained(path) for path in (folder, tmp_path / "new")]
    assert tokenizers[0].fingerprint == tokenizers[1].fingerprint


def test_what_is_missing_or_unused_is_listed_and_not_invented(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "pooler" in name or "seq_relationship" in name]:
        del tensors[name]
    tensors["extra.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    ran = cli("convert", folder, tmp_path / "new")
    assert ran.code == 0 and "BertForMaskedLM" in ran.out
    listed = [line.split(": ")[-1] for line in ran.out.splitlines()[1:]]
    missing = ["pooler.dense.weight", "pooler.dense.bias", "nsp.weight", "nsp.bias"]
    assert listed == [*missing, "extra.weight"]
    assert len(load_model(tmp_path / "new", PreTrainingModel).missing) == 4


def test_the_labels_and_our_settings_of_a_classifier_travel_along(
    classifier_folder, tmp_path, change_config
):
    ours = change_config(classifier_folder, {})["bertsmith"]
    ours |= {"task": "classify", "max_length": 64}
    problem = "multi_label_classification"  # else its outputs would be one choice
    stored = change_config(classifier_folder, {"bertsmith": ours, "problem_type": problem})
    assert cli("convert", classifier_folder, tmp_path / "new").code == 0
    assert label_names(tmp_path / "new") == ["no", "maybe", "yes"]
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == stored


def test_what_cannot_be_converted_is_refused_in_one_line(folder, tmp_path):
    line = f"bertsmith convert: {folder}: not empty: name a folder that is not there yet"
    assert refused("convert", folder, folder) == line
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    ran = cli("convert", folder, tmp_path / "new")
    assert ran.code == 2 and "or with weights of another framework" in ran.err
    assert ran.err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_python_converts_as_the_command_and_replaces_no_folder(folder, tmp_path):
    done = bertsmith.convert(str(folder), str(tmp_path / "new"))
    tensors = load_file(folder / "model.safetensors").values()
    assert done.num_parameters == sum(tensor.numel() for tensor in tensors) and not done.missing
    assert cli("convert", folder, tmp_path / "other").code == 0
    before = contents(tmp_path / "new")
    assert before == contents(tmp_path / "other")
    with pytest.raises(ValueError, match="new: not empty: name a folder that is not there yet"):
        bertsmith.convert(folder, tmp_path / "new")
    assert contents(tmp_path / "new") == before


@pytest.mark.parametrize(
    ("writer", "to"), [("write_model", "hugging-face"), ("write_google_model", "tensorflow")]
)
def test_nothing_is_left_when_the_proof_fails(folder, tmp_path, monkeypatch, writer, to):
    write = getattr(conversion, writer)

    def worse(folder, tokenizer, entries, weights):
        weights["encoder.embeddings.norm.bias"][0] = -0.0  # equal to 0.0, but not the same bits
        write(folder, tokenizer, entries, weights)

    monkeypatch.setattr(conversion, writer, worse)
    with pytest.raises(RuntimeError, match="'bert.embeddings.LayerNorm.bias' was written, but"):
        conversion.convert(folder, tmp_path / "new", to)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_an_option_scorer_needs_no_names(config, tokenizer, tmp_path, change_config):
    """transformers leaves the labels of what it started from in config.json."""
    old = random_model(tmp_path / "old", tokenizer, OptionScorer, 1, config=config)
    change_config(old, {"id2label": {"0": "no", "1": "maybe", "2": "yes"}})
    assert cli("convert", old, tmp_path / "new").code == 0
    assert load_model(tmp_path / "new", OptionScorer).missing == []


def test_how_vectors_are_made_travels_along(folder, tmp_path):
    """In sentence-transformers' files."""
    write(folder / "1_Pooling" / "config.json", '{"pooling_mode": "cls"}')
    write(folder / "modules.json", "[]")
    write(folder / "sentence_bert_config.json", '{"max_seq_length": 9}')
    for path in (folder, *in_all_ways(folder, tmp_path, 99).values()):
        assert similarity_training(path) == SimilarityTraining("cls", 9)


def test_the_length_of_vectors_travels_along_out_of_the_tokenizer(folder, tmp_path, change_config):
    """Where sentence-transformers 6 has it, and prompts, Normalize and what else it follows."""
    settings = {
        "modules.json": [{"type": "a.Transformer"}, {"type": "b.Normalize", "path": "2_Normalize"}],
        "sentence_bert_config.json": {"do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"q": "q: "}, "default_prompt_name": "q"},
    }
    for name, stored in settings.items():
        write(folder / name, json.dumps(stored))
    change_config(folder, {"model_max_length": 9}, "tokenizer_config.json")
    expected = SimilarityTraining(
        None, 9, "q: ", normalize=True, lowercase=True, prompts={"q": "q: "}
    )
    for path in (folder, *in_all_ways(folder, tmp_path, 99).values()):
        assert similarity_training(path) == expected


def test_transformers_is_told_the_positions_of_the_model(folder, tmp_path, config):
    for name, path in in_all_ways(folder, tmp_path, 1024).items():
        stored = json.loads((path / "tokenizer_config.json").read_text())
        assert stored["model_max_length"] == (1024 if name == "longer" else config.max_positions)


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
    write(folder / file, json.dumps(stored))
    Tokenizer.from_pretrained(folder)
    warning = f"warning: {folder}: tokens were added to its tokenizer ([E1], [/E1]), which"
    assert capsys.readouterr().err.startswith(warning)
    Tokenizer.from_pretrained(folder)
    assert capsys.readouterr().err == ""  # once is enough
    line = refused("convert", folder, tmp_path / "new")
    assert "its tokenizer ([E1], [/E1]), which would be lost: keep" in line
    for change in (wider, longer):
        with pytest.raises(ValueError, match="which would be lost"):
            change(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "grown", "setting"),
    [
        (wider, {TOKEN_EMBEDDING: (15, 16), OUTPUT_BIAS: (15,)}, {"vocab_size": 15}),
        (
            longer,
            {f"bert.embeddings.{POSITION_EMBEDDING}": (60, 16)},
            {"max_position_embeddings": 60},
        ),
    ],
)
def test_old_rows_stay_and_all_else_is_written_as_it_was(change, grown, setting, folder, tmp_path):
    change(folder, tmp_path / "new")
    before, after = tensors_of(folder, tmp_path / "new")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)], tensor), name
        assert after[name].shape == grown.get(name, tensor.shape)
    old, new = (read_json(path / "config.json") for path in (folder, tmp_path / "new"))
    assert old | setting == new


@pytest.mark.parametrize("change", [wider, longer])
def test_a_classifier_keeps_its_head_and_labels(change, classifier_folder, tmp_path):
    change(classifier_folder, tmp_path / "new")
    folders = (classifier_folder, tmp_path / "new")
    before, after = (load_model(folder, SequenceClassifier).model for folder in folders)
    assert torch.equal(before.classifier.weight, after.classifier.weight)
    assert after.config.max_positions == (60 if change is longer else 24)
    assert after.config.vocab_size == (15 if change is wider else 12)
    labels = read_json(tmp_path / "new" / "config.json")["id2label"]
    assert list(labels.values()) == ["no", "maybe", "yes"]
    assert OUTPUT_BIAS not in tensors_of(tmp_path / "new")[0]


def test_a_new_row_is_the_mean_of_its_old_pieces(folder, tmp_path):
    wider(folder, new := tmp_path / "new")
    before, after = tensors_of(folder, new)
    pieces = Tokenizer.from_pretrained(new).vocabulary.pieces
    assert pieces[:5] == SPECIAL and pieces[12:] == ("cats", "##son", "unseen")
    cat, s = before[TOKEN_EMBEDDING][6], before[TOKEN_EMBEDDING][8]
    assert torch.equal(after[TOKEN_EMBEDDING][:12], before[TOKEN_EMBEDDING])
    torch.testing.assert_close(after[TOKEN_EMBEDDING][12], (cat + s) / 2)
    unknown = before[TOKEN_EMBEDDING][1]  # "##on" is no piece, nor is "unseen"
    torch.testing.assert_close(after[TOKEN_EMBEDDING][13:], torch.stack([unknown, unknown]))


def test_transformers_opens_more_pieces_and_computes_the_same(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    wider(folder, new := tmp_path / "new")
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
    monkeypatch.setattr(conversion, "RIDGE", 1e-9)
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
    old = piece_tokenizer(" ".join(f"a{k}" for k in range(pieces - 5)))
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


def test_half_precision_and_foreign_heads_are_kept(folder, tmp_path):
    tensors = {n: t.half() for n, t in load_file(folder / "model.safetensors").items()}
    tensors["cls.predictions.decoder.weight"] = tensors[TOKEN_EMBEDDING].clone()
    tensors["qa_outputs.weight"] = torch.ones(2, 16)
    save_file(tensors, folder / "model.safetensors")
    wider(folder, tmp_path / "new")
    (after,) = tensors_of(tmp_path / "new")
    assert after[TOKEN_EMBEDDING].dtype == after[OUTPUT_BIAS].dtype == torch.float16
    assert after["qa_outputs.weight"].shape == (2, 16)
    assert "cls.predictions.decoder.weight" not in after  # a copy of the table, which has grown


def test_a_tokenizer_of_too_many_pieces_is_refused(folder, tmp_path):
    with (folder / "vocab.txt").open("a") as file:
        file.write("dog\n")
    with pytest.raises(ValueError, match="vocabulary has 13 pieces, but its model 12"):
        extend_model(folder, tmp_path / "new", NEW, np.ones(13))
    assert not (tmp_path / "new").exists()


def test_new_positions_have_the_mean_and_spread_of_the_old():
    table = torch.tensor([[0.0, 5.0, 1.0], [2.0, 5.0, 3.0], [4.0, 5.0, -7.0]])
    new = longer_table(table, 4003, drawn())[3:]
    # of 4,000 draws: the standard error is 1.6% of the spread
    torch.testing.assert_close(new.mean(0), torch.tensor([2.0, 5.0, -1.0]), atol=0.3, rtol=0)
    torch.testing.assert_close(new.std(0), table.std(0, correction=0), atol=0.2, rtol=0)
    assert torch.equal(longer_table(table, 9, drawn()), longer_table(table, 9, drawn()))
    assert not torch.equal(longer_table(table, 9, drawn()), longer_table(table, 9, drawn(2)))


def test_short_rows_are_read_as_before_and_long_ones_can_be(folder, tmp_path):
    longer(folder, tmp_path / "new", 48)
    old, new = (
        load_model(path, PreTrainingModel, dropout=0.0, attention_dropout=0.0).model.eval()
        for path in (folder, tmp_path / "new")
    )
    ids = torch.randint(5, 12, (2, 48), generator=drawn())
    types = torch.zeros_like(ids)
    with torch.inference_mode():
        short = [model.encoder(ids[:, :24], types[:, :24]) for model in (old, new)]
        assert torch.equal(*short)
        assert new.encoder(ids, types).shape == (2, 48, 16)


def test_transformers_opens_more_positions_and_computes_the_same(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    longer(folder, tmp_path / "new", 48)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "new").eval()
    assert theirs.config.max_position_embeddings == 48
    ours = load_model(tmp_path / "new", PreTrainingModel).model.eval()
    ids = torch.randint(5, 12, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs(input_ids=ids).last_hidden_state
        torch.testing.assert_close(ours.encoder(ids), expected, atol=1e-5, rtol=1e-5)


def test_positions_in_half_precision_stay_so():
    assert longer_table(torch.ones(3, 2, dtype=torch.float16), 7, drawn()).dtype == torch.float16


@pytest.mark.parametrize("positions", [24, 5, -1])
def test_no_more_positions_than_there_are_is_refused(folder, tmp_path, positions):
    message = f"^{positions} positions: .* knows 24 already: ask for more"
    with pytest.raises(ValueError, match=message):
        extend_positions(folder, tmp_path / "new", positions, drawn())
    assert not (tmp_path / "new").exists()
