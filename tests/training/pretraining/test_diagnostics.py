"""Signs of health, said once and only where true; a bad batch, told row by row and by tensor."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.checkpoints.tensors import write_tensors
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.encoder import Embeddings
from bertsmith.tasks.metrics import count_entropy
from bertsmith.training.engine import Engine
from bertsmith.training.pretraining import diagnostics
from bertsmith.training.pretraining.diagnostics import (
    EntropyWatch,
    RepeatWatch,
    check_corpus,
    check_result,
    replay,
)

from ...tiny import cli, contents
from ..runs import train_stream, weights

COUNTS = SimpleNamespace(unigram_counts=np.array([4, 4, 4, 4]))  # entropy: log 4 = 1.386


class Notes(list):
    """A log that keeps its messages."""

    message = list.append


@pytest.fixture
def notes():
    return Notes()


def test_the_entropy_of_equal_counts_is_their_logarithm():
    assert count_entropy(np.array([3, 0, 3, 3])) == pytest.approx(np.log(3))


def test_the_watch_warns_once_after_warmup_and_only_near_the_entropy(notes, capsys):
    watch = EntropyWatch(COUNTS, "mlm", 0.2, notes)
    watch(0.15, {"mlm_loss": 1.4})  # warming up
    watch(0.25, {"mlm_loss": 1.14})  # a quarter of a nat of context
    watch(0.25, {"mlm_loss": 3.0})  # far above: another trouble
    watch(0.25, {"mlm_loss": float("nan")})
    assert notes == []
    watch(0.30, {"mlm_loss": 1.3})
    watch(0.35, {"mlm_loss": 1.3})
    assert len(notes) == 1
    assert "30% of the budget the training MLM loss 1.30 still sits at" in notes[0]
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_short_warmup_does_not_make_the_watch_look_early(notes):
    watch = EntropyWatch(COUNTS, "ltr", 0.01, notes)
    watch(0.2, {"ltr_loss": 1.4})  # a good run of a minute is here
    assert notes == []
    watch(0.25, {"ltr_loss": 1.4})
    assert "LTR loss" in notes[0]


@pytest.mark.parametrize(
    ("loss", "says"), [(2.85, None), (3.05, "is at the unigram"), (9.0, "is above the unigram")]
)
def test_the_result_is_judged_by_what_is_true(notes, loss, says):
    check_result({"mlm_loss": loss, "unigram_entropy": 3.1}, "mlm", notes)
    assert (says is None and not notes) or says in notes[0]


@pytest.mark.parametrize(
    ("shares", "warnings"),
    [
        ({"duplicate_sentences": 0.3, "duplicate_tokens": 0.09}, []),
        ({"duplicate_sentences": 0.3, "duplicate_tokens": 0.25}, ["25% of the tokens"]),
        (
            {"duplicate_tokens": 0.0, "nsp_own_document": 0.04, "nsp_true_next": 0.02},
            ["6% of the random next sentences are no random ones: use the clean sampling of next"],
        ),
    ],
    ids=["fine", "duplicates", "pairs"],
)
def test_the_corpus_is_told_and_high_shares_are_warned_of(notes, monkeypatch, shares, warnings):
    monkeypatch.setattr(diagnostics, "corpus_health", lambda stream: shares)
    check_corpus(SimpleNamespace(settings=SimpleNamespace(nsp_sampling="paper")), notes)
    assert notes[0].startswith("corpus: duplicate ")
    assert len(notes) == 1 + len(warnings)
    for text, start in zip(notes[1:], warnings, strict=True):
        assert text.startswith(start)


def test_a_repeat_is_said_at_the_first_time_and_at_every_doubling(store_folder, notes):
    store = TokenStore.open(store_folder)
    watch = RepeatWatch(store, Position(0, 3), notes)
    for epoch in (0, 1, 1, 2, 3, 4, 5, 9, 0, 1):
        watch(Position(epoch, 0))
    times = [line.split("read ")[1].split(",")[0] for line in notes]
    assert times == ["once", "2 times", "4 times", "9 times", "once"]
    notes.clear()
    RepeatWatch(store, Position(5, 0), notes)(Position(6, 1))  # resumed
    assert notes == []


SHORT = {"batch_size": 4, "steps": 6, "num_evals": 1}


@pytest.fixture
def replayed(train, store_folder, settings):
    """A run of so many steps, and a function that replays its next batch."""

    def begin(steps=1):
        out = train(**SHORT | {"steps": steps}).folder
        return out, lambda: replay(store_folder, out, settings)

    return begin


def poisoned(token):
    """Embeddings that overflow wherever a token stands."""
    real = Embeddings.forward

    def forward(self, input_ids_BS, token_types_BS):
        states = real(self, input_ids_BS, token_types_BS)
        bad = (input_ids_BS == token).any(1)[:, None, None]
        return states.masked_fill(bad, float("inf"))

    return forward


def test_the_failed_batch_is_named_and_replayed(
    train, replayed, store_folder, settings, monkeypatch
):
    out, again = replayed(steps=3)
    before = contents(out)
    found = again()
    assert (found.step, found.rows, found.faults) == (3, 4, [])
    assert "all 4 rows have finite" in found.text()

    # poison what stands in the third row of the next batch, and see who has it
    ids = train_stream(store_folder, settings).batch(Position(0, 12), 4)[0].input_ids
    rows_with = {int(token): [r for r in range(4) if token in ids[r]] for token in ids[2]}
    token, expected = min(rows_with.items(), key=lambda item: len(item[1]))
    monkeypatch.setattr(Embeddings, "forward", poisoned(token))
    found = again()
    assert [fault.row for fault in found.faults] == expected
    fault = found.faults[0]
    assert fault.module == "encoder.embeddings"
    assert fault.position == Position(0, 12 + expected[0])
    assert "encoder.layers.0.qkv.weight" in fault.gradients
    assert f"row {fault.row} (epoch 0, index {fault.position.index})" in found.text()
    assert before == contents(out)

    with pytest.raises(FloatingPointError, match=r"phase 1, step 3: .*--out .*run --replay`$"):
        train(resume=True, steps=6)
    assert RunFolder(out).latest().name == "step-00000003"
    ran = cli("pretrain", "--corpus", store_folder, "--out", out, "--replay", "--json")
    assert ran.code == 1 and json.loads(ran.out)


def test_a_gradient_alone_can_be_at_fault(replayed, monkeypatch):
    _, again = replayed()
    real = Embeddings.forward

    def forward(self, *given):
        states = real(self, *given)
        states.register_hook(lambda gradient: gradient * float("nan"))
        return states

    monkeypatch.setattr(Embeddings, "forward", forward)
    found = again()
    assert [fault.row for fault in found.faults] == [0, 1, 2, 3]
    assert {fault.module for fault in found.faults} == {None}
    assert all("encoder.embeddings" in name for name in found.faults[0].gradients)
    assert "activations finite" in found.text()


def test_a_module_inside_a_layer_is_named(train, replayed, monkeypatch):
    """Where the step itself computes several modules by one kernel."""
    _, again = replayed()
    real = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        narrows = weight.shape[1] == 4 * weight.shape[0]  # a layer's output
        return real(x, weight, bias) * (float("inf") if narrows else 1)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert {fault.module for fault in again().faults} == {"encoder.layers.0.output"}
    with pytest.raises(FloatingPointError, match="phase 1, step 1"):
        train(resume=True, steps=6)


def test_a_replay_computes_as_the_run_does(replayed, monkeypatch):
    prepared = []
    monkeypatch.setattr(Engine, "prepare", lambda self, model: prepared.append(model))
    _, again = replayed()
    again()
    assert len(prepared) == 2


def test_there_must_be_something_to_replay(store_folder, tmp_path, settings):
    with pytest.raises(ValueError, match="nowhere: no checkpoint of a pre-training run"):
        replay(store_folder, tmp_path / "nowhere", settings)


def test_a_weight_that_is_not_finite_is_refused_at_the_start(train, tmp_path):
    run = train(**SHORT | {"steps": 1}).folder
    tensors = weights(run)
    name = "bert.encoder.layer.1.output.dense.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 4] = float("nan")
    write_tensors(run / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=name) as error:
        train("new", model=run)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("copy or download the model again")
    assert not (tmp_path / "new").exists()
