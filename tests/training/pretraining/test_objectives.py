"""Each objective has its rows, its loss and its figures; `ltr` cannot see what it predicts."""

import json
from dataclasses import replace
from hashlib import blake2b
from string import ascii_letters

import numpy as np
import pytest
import torch

from bertsmith.base.files import read_json
from bertsmith.checkpoints.config_json import read_config
from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.settings import NEXT_TOKEN, PAIR_NAMES
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.kernels.masked_lm_loss import UNUSED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.pretraining.objectives import (
    micro_arrays,
    pretraining_sums,
)
from bertsmith.training.pretraining.task import Pretraining, start_model

from ...tiny import animal_sentences, bertsmith, refused, write_store
from ..runs import (
    CPU,
    NO_DROPOUT,
    Killed,
    assert_same_run,
    killed_at,
    lines,
    random_model,
    train_stream,
    weights,
)

FIGURES = {
    "mlm+nsp": {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"},
    "mlm": {"mlm_loss", "mlm_accuracy"},
    "mlm+sop": {"mlm_loss", "mlm_accuracy", "sop_loss", "sop_accuracy"},
    "ltr": {"ltr_loss", "ltr_accuracy"},
    "ltr+rtl": {"ltr_loss", "ltr_accuracy", "rtl_loss", "rtl_accuracy"},
}


def is_held_out(text):
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little") < 2**48 / 5


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
    counted = shares - few - {"rtl_accuracy"}  # of as many cases as the other direction
    told = {"unigram_entropy", *(name.replace("accuracy", "cases") for name in counted)}
    assert set(held_out) == (FIGURES[objective] - few) | told
    losses = {name for name in FIGURES[objective] if name[:3] in ("mlm", "ltr", "rtl")}
    for name in losses - shares:
        assert held_out[name] < held_out["unigram_entropy"] - 1.0
    line = lines(out)[-1]
    assert FIGURES[objective] <= line.keys()
    assert not {"nsp_loss", "sop_loss", "mlm_loss"} - FIGURES[objective] & line.keys()
    if objective not in PAIR_NAMES:  # packed
        assert line["padding_ratio"] == 0.0
    else:
        assert 0 < line["padding_ratio"] < 0.6
    # a head that was not trained is not in the files
    assert ("cls.seq_relationship.weight" in weights(out)) == (objective in PAIR_NAMES)
    config = read_config(out)
    assert config.causal == (objective in NEXT_TOKEN)
    assert config.directions == 1 + (objective == "ltr+rtl")


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
    rows, slots = np.nonzero(batch.masked_weights)
    positions, labels = batch.masked_positions[rows, slots], batch.masked_labels[rows, slots]
    found = []
    for states, step in zip(
        hidden.chunk(task.model.config.directions, dim=2), (0, 2), strict=False
    ):
        logits = task.model.mlm(states, task.model.encoder.embeddings.token.weight)
        log_shares = logits.log_softmax(-1).detach().numpy()
        found.append(-log_shares[rows, positions + step, labels].mean())
    expected = np.mean(found)
    if objective in PAIR_NAMES:
        pairs = task.model.nsp(task.model.pooler(hidden[:, 0])).log_softmax(-1).detach().numpy()
        expected -= 0.1 * pairs[np.arange(4), batch.next_labels].mean()
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
        without = without + 0.1 * sums["nsp_loss"] / batch.counts["rows"]
    assert ("bow_loss" in sums) == bool(weight)
    extra = weight * sums["bow_loss"] / batch.counts["words"] if weight else 0.0
    assert loss.item() == pytest.approx(float(without + extra), rel=1e-6)


@pytest.mark.parametrize(("objective", "weight"), [("mlm+nsp", 1.0), ("mlm+sop", 0.3)])
def test_the_weight_of_next_sentences(task_of, objective, weight):
    task = task_of(objective, batch_size=2, bag_of_words=0.0, nsp_weight=weight)
    batch, _ = task.batch(Position())
    loss, sums = task.loss(task.model, batch.micro_batches[0], batch.counts)
    tokens, pairs = (sums[f"{name}_loss"] for name in ("mlm", "nsp"))
    expected = tokens / batch.counts["masked"] + weight * pairs / batch.counts["rows"]
    assert loss.item() == pytest.approx(float(expected), rel=1e-6)


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


PIECES, S, P = 60, 12, 4


def batch(objective="mlm+nsp"):
    """Three rows with 4, 2 and 0 predictions; or with the next token of each as one."""
    random = np.random.default_rng(1)
    made = PretrainingBatch.empty(3, S, S - 1 if objective == "ltr" else P, pad_id=0)
    made.input_ids[:] = random.integers(5, PIECES, (3, S))
    made.lengths[:] = [S, 9, 3]
    if objective == "ltr":
        made.masked_positions[:] = np.arange(S - 1)
        made.masked_labels[:] = made.input_ids[:, 1:]
        made.masked_weights[:] = np.arange(1, S) < made.lengths[:, None]
        return made
    for row, count in enumerate((4, 2, 0)):
        made.masked_positions[row, :count] = np.arange(1, count + 1)
        made.masked_labels[row, :count] = random.integers(5, PIECES, count)
        made.masked_weights[row, :count] = 1.0
    return made


def without(kernels, monkeypatch):
    for name in kernels:
        monkeypatch.setattr(f"bertsmith.model.kernels.{name}.has_kernels", lambda x: False)


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm", "ltr"])
def test_static_shapes_give_the_same_sums_and_gradients(objective, monkeypatch):
    without(["masked_lm_loss"], monkeypatch)
    results = []
    for static in (False, True):
        net = random_model(PIECES, **NO_DROPOUT)
        micro = micro_arrays(batch(objective), objective, 0, 3, static)
        sums = pretraining_sums(net, micro, CPU)
        sums["mlm_loss"].backward()
        results.append((sums, net.encoder.layers[0].qkv.weight.grad))
    slots = 3 * (S if objective == "ltr" else P)
    assert len(micro["labels"]) == slots and (micro["labels"] == UNUSED).any()
    assert "masked" not in micro
    for name, value in results[0][0].items():
        both = [torch.as_tensor(found).item() for found in (value, results[1][0][name])]
        assert both[0] == pytest.approx(both[1], rel=1e-5), name
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_whole_step_can_be_compiled_for_static_shapes(dropout, monkeypatch):
    """As on a GPU, but for the kernels: the CPU's own cannot be traced, PyTorch's can."""
    without(["masked_lm_loss", "attention", "elementwise", "unpadded"], monkeypatch)
    torch._dynamo.reset()
    micro = micro_arrays(batch(), "mlm+nsp", 0, 3, static=True)
    micro["words"] = batch().words(UNUSED)
    net = random_model(PIECES, dropout=dropout, attention_dropout=dropout)
    compiled = torch.compile(net.losses, dynamic=False, fullgraph=True)
    losses = []
    for function in (net.losses, compiled):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            sums = pretraining_sums(net, micro, CPU, function)
        (sums["mlm_loss"] + sums["nsp_loss"] + sums["bow_loss"]).backward()
        losses.append((sums["mlm_loss"] + sums["bow_loss"]).item())
    # bf16; with dropout two draws are compared: the loss of an untrained model hardly moves
    assert losses[0] == pytest.approx(losses[1], rel=0.02 if dropout == 0 else 0.2)
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_a_killed_run_of_two_directions_goes_on_bit_for_bit(train, tmp_path, monkeypatch):
    recipe = {"objective": "ltr+rtl", "size": "1x64", "steps": 6, "checkpoint_every": 2}
    whole = train("whole", **recipe).folder
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(5, patch)
        train(**recipe)
    train(base=None, resume=True)
    assert_same_run(whole, tmp_path / "run")


def test_two_directions_are_measured_again_also_without_a_record(train, store_folder, tmp_path):
    result = train(objective="ltr+rtl", steps=1, max_length=128, eval_rows=512)
    measured = json.loads(
        bertsmith("evaluate", result.folder, "--held-out", store_folder, "--json")
    )
    (result.folder / "run.json").rename(tmp_path / "run.json")
    again = json.loads(bertsmith("evaluate", result.folder, "--held-out", store_folder, "--json"))
    for found in (measured, again):
        assert found["metrics"] == pytest.approx(result.eval_metrics, rel=1e-5)
    assert "left-to-right model" in refused("fill", "a [MASK]", "--model", result.folder)


def test_a_model_of_one_direction_does_not_go_on_in_two(train):
    one = train("one", objective="ltr", steps=1).folder
    with pytest.raises(ValueError, match="reads in one direction, not in two"):
        train("two", objective="ltr+rtl", steps=1, model=one)
    two = train("two", objective="ltr+rtl", steps=1).folder
    train("more", objective="ltr+rtl", steps=1, model=two)
    with pytest.raises(ValueError, match="`objective='mlm'`: .* two directions: use ltr.rtl"):
        train("less", objective="mlm", steps=1, model=two)


def test_held_out_documents_without_a_pair_are_told_at_the_start(train, tmp_path, capsys):
    texts = [" ".join(animal_sentences(12, n)) for n in range(40)]
    kept = [[text] for text in texts if not is_held_out(text)]
    kept += [[letter] for letter in ascii_letters if is_held_out(letter)]  # a token each
    store = write_store(tmp_path / "store", kept)
    result = train(corpus=store, objective="mlm+sop", steps=2, num_evals=2)
    told = capsys.readouterr().err
    assert result.finished and not result.eval_metrics
    assert f"no held-out figures: {store}: no document of the held_out split can be cut" in told
