"""A longer position table: by hand, against transformers, and nothing else touched."""

import json

import pytest
import torch
from safetensors.torch import load_file

from bertsmith.checkpoints.convert import POSITION_EMBEDDING, extend_positions, longer_table
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier


def drawn(seed=1):
    return torch.Generator().manual_seed(seed)


def test_old_rows_stay_and_all_else_is_as_it_was(folder, tmp_path):
    assert extend_positions(folder, tmp_path / "new", 60, drawn()) == 24
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert after[POSITION_EMBEDDING].shape == (60, 16)
    assert torch.equal(after[POSITION_EMBEDDING][:24], before[POSITION_EMBEDDING])
    for name in before.keys() - {POSITION_EMBEDDING}:
        assert torch.equal(before[name], after[name]), name
    configs = [
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "new")
    ]
    assert configs[0] | {"max_position_embeddings": 60} == configs[1]


def test_new_rows_have_the_mean_and_spread_of_the_old(folder, tmp_path):
    table = torch.tensor([[0.0, 5.0, 1.0], [2.0, 5.0, 3.0], [4.0, 5.0, -7.0]])
    new = longer_table(table, 4003, drawn())[3:]
    # of 4,000 draws: the standard error is 1.6% of the spread
    torch.testing.assert_close(new.mean(0), torch.tensor([2.0, 5.0, -1.0]), atol=0.3, rtol=0)
    torch.testing.assert_close(new.std(0), table.std(0, correction=0), atol=0.2, rtol=0)
    assert torch.equal(longer_table(table, 9, drawn()), longer_table(table, 9, drawn()))
    assert not torch.equal(longer_table(table, 9, drawn()), longer_table(table, 9, drawn(2)))


def test_short_rows_are_read_as_before_and_long_ones_can_be(folder, tmp_path):
    extend_positions(folder, tmp_path / "new", 48, drawn())
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


def test_transformers_opens_it_and_computes_the_same(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    extend_positions(folder, tmp_path / "new", 48, drawn())
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "new").eval()
    assert theirs.config.max_position_embeddings == 48
    ours = load_model(tmp_path / "new", PreTrainingModel).model.eval()
    ids = torch.randint(5, 12, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs(input_ids=ids).last_hidden_state
        torch.testing.assert_close(ours.encoder(ids), expected, atol=1e-5, rtol=1e-5)


def test_a_classifier_keeps_its_head_and_labels(classifier_folder, tmp_path):
    extend_positions(classifier_folder, tmp_path / "new", 30, drawn())
    before, after = (
        load_model(path, SequenceClassifier).model for path in (classifier_folder, tmp_path / "new")
    )
    assert torch.equal(before.classifier.weight, after.classifier.weight)
    assert after.config.max_positions == 30
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["no", "maybe", "yes"]


def test_half_precision_stays():
    assert longer_table(torch.ones(3, 2, dtype=torch.float16), 7, drawn()).dtype == torch.float16


@pytest.mark.parametrize("positions", [24, 5, -1])
def test_no_more_positions_than_there_are_is_refused(folder, tmp_path, positions):
    with pytest.raises(
        ValueError, match=f"^{positions} positions: .* knows 24 already: ask for more"
    ):
        extend_positions(folder, tmp_path / "new", positions, drawn())
    assert not (tmp_path / "new").exists()
