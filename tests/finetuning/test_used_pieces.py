"""Training with a part of the token table gives the weights that training with all of it gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.finetuning import job as jobs
from bertsmith.finetuning.used_pieces import UsedPieces
from bertsmith.model.encoder import ModelConfig, initialize
from bertsmith.model.heads import SequenceClassifier
from bertsmith.tasks.features import Features


class AllPieces(UsedPieces):
    """The whole table, as if every piece were used."""

    def __init__(self, features, vocab_size, pad_id):
        every = np.arange(vocab_size, dtype=np.int32)
        whole = replace(features[0], ids=every, boundaries=np.array([0, vocab_size]))
        super().__init__([whole], vocab_size, pad_id)


@pytest.mark.parametrize("optimizer", ["adamw", "paper-adam"])
def test_the_weights_are_those_of_the_whole_table(job, toy, tmp_path, monkeypatch, optimizer):
    settings = replace(toy.settings, epochs=2, optimizer=optimizer, weight_decay=0.3)
    part = job.run(settings, 1, tmp_path / "part")
    monkeypatch.setattr(jobs, "UsedPieces", AllPieces)
    whole = job.run(settings, 1, tmp_path / "whole")
    assert part.model.config == whole.model.config
    for (name, one), two in zip(
        part.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        # rounding alone: gradients of rows are summed in the same order, decay is a product of 12
        # factors here and 12 roundings there
        torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-7, msg=name)
    used = UsedPieces([job.train, job.dev[0].features], 54, 0)
    assert used.witness is not None and len(used.rows) < 54


def features(ids):
    ids = np.array(ids, np.int32)
    return Features(ids, np.zeros_like(ids), np.array([0, len(ids)]), None, 8, 0)


def model_of(vocab_size):
    config = ModelConfig(vocab_size, 8, num_layers=1, num_heads=2, intermediate_size=8, pad_id=3)
    return initialize(SequenceClassifier(config, 2), 0.1, torch.Generator().manual_seed(1))


def test_rows_by_hand():
    model = model_of(9)
    table = model.encoder.embeddings.token.weight.detach().clone()
    used = UsedPieces([features([7, 5]), features([5, 8])], 9, pad_id=3)
    assert used.rows.tolist() == [0, 3, 5, 7, 8] and used.witness == 0
    assert used.renumbered(features([7, 5, 8])).ids.tolist() == [3, 2, 4]
    used.shrink(model)
    assert model.config.vocab_size == 5 and model.config.pad_id == 1
    assert torch.equal(model.encoder.embeddings.token.weight, table[[0, 3, 5, 7, 8]])
    with torch.no_grad():
        model.encoder.embeddings.token.weight *= 0.5
    used.grow(model)
    assert model.config.vocab_size == 9 and model.config.pad_id == 3
    torch.testing.assert_close(model.encoder.embeddings.token.weight.detach(), table * 0.5)


def test_nothing_is_left_out_where_every_piece_is_used():
    model = model_of(4)
    table = model.encoder.embeddings.token.weight.detach().clone()
    used = UsedPieces([features([0, 1, 2, 3])], 4, pad_id=3)
    assert used.witness is None
    used.shrink(model)
    used.grow(model)
    assert torch.equal(model.encoder.embeddings.token.weight.detach(), table)
