"""Training with a part of the token table gives the weights that training with all of it gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import BareModel, load_model
from bertsmith.inference.predictor import load
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.features import Features
from bertsmith.training.finetuning import trainer as trainers
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.task import TrimmedEmbeddings


class AllPieces(TrimmedEmbeddings):
    """The whole table, as if every piece were used."""

    def __init__(self, features, table, pad_id):
        every = np.arange(len(table), dtype=np.int32)
        whole = replace(features[0], ids=every, boundaries=np.array([0, len(table)]))
        super().__init__([whole], table, pad_id)


@pytest.mark.parametrize("optimizer", ["adamw", "paper-adam"])
def test_the_weights_are_those_of_the_whole_table(trainer, toy, tmp_path, monkeypatch, optimizer):
    settings = replace(toy.settings, epochs=2, optimizer=optimizer, weight_decay=0.3)
    part = trainer.run(settings, 1, tmp_path / "part")
    monkeypatch.setattr(trainers, "TrimmedEmbeddings", AllPieces)
    whole = trainer.run(settings, 1, tmp_path / "whole")
    assert part.model.config == whole.model.config
    for (name, one), two in zip(
        part.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        # rounding alone: gradients of rows are summed in the same order, decay is a product of 12
        # factors here and 12 roundings there
        torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-7, msg=name)
    table = part.model.encoder.embeddings.token.weight
    used = TrimmedEmbeddings([trainer.train, trainer.dev[0].features], table, 0)
    assert used.witness is not None and len(used.rows) < 54


def features(ids):
    ids = np.array(ids, np.int32)
    return Features(ids, np.zeros_like(ids), np.array([0, len(ids)]), None, 8, 0)


def model_of(vocab_size):
    config = ModelConfig(vocab_size, 8, num_layers=1, num_heads=2, intermediate_size=8, pad_id=3)
    return initialize(SequenceClassifier(config, 2), 0.1, torch.Generator().manual_seed(1))


def test_rows_by_hand():
    model = model_of(9)
    with torch.no_grad():
        model.encoder.embeddings.token.weight[0] = 0  # says nothing of decay
        model.encoder.embeddings.token.weight[2] *= 9
    table = model.encoder.embeddings.token.weight.detach().clone()
    used = TrimmedEmbeddings([features([7, 5]), features([5, 8])], table, pad_id=3)
    assert used.rows.tolist() == [2, 3, 5, 7, 8] and used.witness == 2
    assert used.renumbered(features([7, 5, 8])).ids.tolist() == [3, 2, 4]
    used.shrink(model)
    assert model.config.vocab_size == 5 and model.config.pad_id == 1
    assert torch.equal(model.encoder.embeddings.token.weight, table[[2, 3, 5, 7, 8]])
    with torch.no_grad():
        model.encoder.embeddings.token.weight *= 0.5
    used.grow(model)
    assert model.config.vocab_size == 9 and model.config.pad_id == 3
    torch.testing.assert_close(model.encoder.embeddings.token.weight.detach(), table * 0.5)


def test_nothing_is_left_out_where_every_piece_is_used():
    model = model_of(4)
    table = model.encoder.embeddings.token.weight.detach().clone()
    used = TrimmedEmbeddings([features([0, 1, 2, 3])], table, pad_id=3)
    assert used.witness is None
    used.shrink(model)
    used.grow(model)
    assert torch.equal(model.encoder.embeddings.token.weight.detach(), table)


def test_rows_of_zeros_stay_zeros():
    model = model_of(5)
    with torch.no_grad():
        model.encoder.embeddings.token.weight[:3] = 0
    used = TrimmedEmbeddings([features([4])], model.encoder.embeddings.token.weight, pad_id=3)
    used.shrink(model)
    used.grow(model)
    assert not model.encoder.embeddings.token.weight[:3].any()


def test_a_piece_unseen_in_training_is_read_by_its_published_vector(
    trainer, toy, model_folder, tmp_path
):
    """After training without decay; a text that has it is answered as with the whole table."""
    settings = replace(toy.settings, epochs=1, weight_decay=0.0)
    train_seeds(trainer, tmp_path / "run", settings, [1])
    published = load_model(model_folder, BareModel).model.encoder.embeddings.token.weight
    trained = load(tmp_path / "run")
    table = trained.encoder.embeddings.token.weight
    seen = np.unique(np.concatenate([trainer.train.ids, trainer.dev[0].features.ids]))
    unseen = np.setdiff1d(np.arange(5, len(table)), seen)
    assert len(unseen) > 3 and torch.equal(table[unseen], published[unseen])
    pieces = trained.tokenizer.vocabulary.pieces
    text = next(pieces[k] for k in unseen if not pieces[k].startswith("##"))
    (answer,) = trained.classify([text])
    ids = [trained.tokenizer.vocabulary.cls_id, *trained.tokenizer.encode_batch([text]).ids]
    ids.append(trained.tokenizer.vocabulary.sep_id)
    with torch.inference_mode():
        logits = trained.task_model(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=int), None)
    wanted = dict(zip(trained.model_task.label_names, logits.softmax(1)[0].tolist(), strict=True))
    assert answer.probabilities == pytest.approx(wanted, abs=1e-6)
