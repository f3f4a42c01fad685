"""Each objective has its rows, its loss and its figures; `ltr` cannot see what it predicts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.base.files import read_json
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.pretraining.objectives import micro_arrays
from bertsmith.training.pretraining.task import Pretraining, start_model

from ..runs import CPU, NO_DROPOUT, lines, train_stream, weights

FIGURES = {
    "mlm+nsp": {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"},
    "mlm": {"mlm_loss", "mlm_accuracy"},
    "mlm+sop": {"mlm_loss", "mlm_accuracy", "sop_loss", "sop_accuracy"},
    "ltr": {"ltr_loss", "ltr_accuracy"},
}


@pytest.fixture
def task_of(store_folder, settings):
    """The task of an objective, from random weights."""

    def make(objective, **changes):
        made = replace(settings, objective=objective, **NO_DROPOUT, **changes)
        model = start_model(Tokenizer.from_pretrained(store_folder), made, None)
        return Pretraining(model, train_stream(store_folder, made), None, made, CPU)

    return make


@pytest.mark.parametrize("objective", FIGURES)
def test_it_learns_and_names_its_figures(train, objective):
    # 80 steps at a high rate take this store, with two words to guess in a sentence, well below
    # (the paper's pairs, since clean ones are cut so that words have no places of their own)
    start = {"learning_rate": 1e-2, "initializer_range": 0.05, "nsp_sampling": "paper"}
    result = train(objective=objective, steps=80, **NO_DROPOUT, **start)
    out, held_out = result.folder, result.eval_metrics
    shares = {name for name in FIGURES[objective] if name.endswith("_accuracy")}
    few = {name for name in shares if name[:3] in ("nsp", "sop")}  # the store has some 40 pairs
    told = {"unigram_entropy", *(name.replace("accuracy", "cases") for name in shares - few)}
    assert set(held_out) == (FIGURES[objective] - few) | told
    loss = held_out["ltr_loss" if objective == "ltr" else "mlm_loss"]
    assert loss < held_out["unigram_entropy"] - 1.0
    line = lines(out)[-1]
    assert FIGURES[objective] <= line.keys()
    assert not {"nsp_loss", "sop_loss", "mlm_loss"} - FIGURES[objective] & line.keys()
    if objective in ("mlm", "ltr"):  # packed
        assert line["padding_ratio"] == 0.0
    else:
        assert 0 < line["padding_ratio"] < 0.6
    # a head that was not trained is not in the files
    assert ("cls.seq_relationship.weight" in weights(out)) == ("+" in objective)
    assert read_json(out / "config.json")["is_decoder"] == (objective == "ltr")


def unmasked(batch, row) -> list[int]:
    """A row as it was before tokens were masked."""
    ids = batch.input_ids[row].tolist()
    for slot in np.flatnonzero(batch.masked_weights[row]):
        ids[batch.masked_positions[row, slot]] = int(batch.masked_labels[row, slot])
    return ids


@pytest.mark.parametrize("objective", FIGURES)
def test_the_loss_is_that_of_the_logits(store_folder, task_of, objective):
    task = task_of(objective, batch_size=4)
    batch, _ = task.stream.batch(Position(), 4)
    made, _ = task.batch(Position())
    loss, _ = task.loss(task.model, made.micro_batches[0], made.counts)
    given = (batch.input_ids, batch.token_types, batch.lengths)
    hidden = task.model.encoder(*map(torch.from_numpy, given))
    logits = task.model.mlm(hidden, task.model.encoder.embeddings.token.weight)
    log_shares = logits.log_softmax(-1).detach().numpy()
    rows, slots = np.nonzero(batch.masked_weights)
    positions, labels = batch.masked_positions[rows, slots], batch.masked_labels[rows, slots]
    expected = -log_shares[rows, positions, labels].mean()
    if "+" in objective:
        pairs = task.model.nsp(task.model.pooler(hidden[:, 0])).log_softmax(-1).detach().numpy()
        expected -= pairs[np.arange(4), batch.next_labels].mean()
        vocabulary = TokenStore.open(store_folder).tokenizer.vocabulary
        specials = {vocabulary.cls_id, vocabulary.sep_id}
        words = [
            log_shares[row, 0, word]
            for row, length in enumerate(batch.lengths)
            for word in unmasked(batch, row)[:length]
            if word not in specials
        ]
        expected -= np.mean(words)
    # float32 sums in another order
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "bag_of_words", "weight"),
    [("mlm+nsp", None, 1.0), ("mlm", None, 0.0), ("mlm+sop", 0.0, 0.0), ("mlm", 0.5, 0.5)],
)
def test_the_weight_of_the_bag_of_words(task_of, objective, bag_of_words, weight):
    task = task_of(objective, batch_size=2, bag_of_words=bag_of_words)
    batch, _ = task.batch(Position())
    loss, sums = task.loss(task.model, batch.micro_batches[0], batch.counts)
    without = sums["mlm_loss"] / batch.counts["masked"]
    if "+" in objective:
        without = without + sums["nsp_loss"] / batch.counts["rows"]
    assert ("bow_loss" in sums) == bool(weight)
    extra = weight * sums["bow_loss"] / batch.counts["words"] if weight else 0.0
    assert loss.item() == pytest.approx(float(without + extra), rel=1e-6)


def test_ltr_predicts_the_next_token_and_cannot_see_it(task_of):
    task = task_of("ltr", batch_size=2)
    batch, _ = task.stream.batch(Position(), 2)
    micro = micro_arrays(batch, "ltr", 0, 2)
    shifted = batch.input_ids[:, 1:-1]  # but for the [SEP] where the row was cut
    assert (micro["labels"] == shifted.flatten()).all()
    ids = torch.from_numpy(batch.input_ids)
    place = 20
    other = ids.clone()
    other[:, place:] = (ids[:, place:] + 7) % task.model.config.vocab_size
    with torch.no_grad():
        before, after = task.model.encoder(ids), task.model.encoder(other)
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place:], after[:, place:])


def test_one_model_goes_on_with_another_objective(train):
    mlm = train("mlm", objective="mlm", steps=2).folder
    nsp = train("nsp", objective="mlm+nsp", steps=2, model=mlm)
    assert "nsp_loss" in nsp.eval_metrics
    ltr = train("ltr", objective="ltr", steps=2, model=nsp.folder).folder
    assert read_json(ltr / "config.json")["is_decoder"]
