"""Held-out figures: their rows, what is told of them, and who computes them."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.training.engine import Engine
from bertsmith.training.pretraining import evaluation
from bertsmith.training.pretraining.evaluation import (
    describe_evaluation,
    eval_stream,
    evaluate_pretraining,
    num_rows,
)
from bertsmith.training.pretraining.settings import PretrainSettings
from bertsmith.training.ranks import Ranks

from ..runs import CPU, random_model


@pytest.fixture
def vocabulary(store_folder):
    return TokenStore.open(store_folder).tokenizer.vocabulary


@pytest.fixture
def stream_of(store_folder, vocabulary):
    store = TokenStore.open(store_folder)
    return lambda length, kind: eval_stream(
        store, vocabulary, length, PretrainSettings(objective=kind)
    )


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm", "mlm+sop"])
def test_held_out_rows_have_the_papers_masks_whatever_the_recipes(stream_of, objective):
    settings = stream_of(48, objective).settings
    assert settings.objective == objective
    assert settings.nsp_sampling == ("paper" if objective == "mlm" else "clean")  # as in training
    assert (settings.mlm_probability, settings.masking) == (0.15, "token")
    assert (settings.mask_replace_prob, settings.random_replace_prob) == (0.8, 0.1)


def test_held_out_pairs_are_those_of_training(store_folder, vocabulary):
    paper = PretrainSettings(nsp_sampling="paper", short_seq_prob=0.1)
    settings = eval_stream(TokenStore.open(store_folder), vocabulary, 48, paper).settings
    assert (settings.nsp_sampling, settings.short_seq_prob) == ("paper", 0.1)


@pytest.mark.parametrize(
    ("in_text", "wanted", "measured"),
    [
        (5000, 2048, 2048),
        (1085, 2048, 1085),
        (108, 2048, 256),  # read up to three times
        (108, 128, 128),
        (64, 2048, 256),
        (40, 2048, 160),  # four times, and no more
    ],
)
def test_a_short_held_out_text_is_read_again(in_text, wanted, measured):
    stream = SimpleNamespace(examples_in_epoch=lambda epoch: in_text)
    assert num_rows(stream, wanted) == measured


@pytest.mark.parametrize(("wanted", "is_told"), [(255, False), (256, True), (400, True)])
def test_an_accuracy_of_few_pairs_is_not_told(stream_of, vocabulary, wanted, is_told):
    stream = stream_of(16, "mlm+nsp")
    assert 64 <= stream.examples_in_epoch(0) < 256
    model = random_model(len(vocabulary), "1x64", 0.02)
    figures = evaluate_pretraining(model, stream, CPU, wanted)
    assert ("nsp_accuracy" in figures) == is_told and "nsp_loss" in figures
    if is_told:
        assert figures["nsp_cases"] == num_rows(stream, wanted) == 256
        right = figures["nsp_accuracy"] * 256
        assert right == pytest.approx(round(right))
        assert describe_evaluation(figures).endswith(f", NSP {figures['nsp_accuracy']:.1%} of 256")
    labels = stream.batch(Position(), num_rows(stream, wanted))[0].masked_weights
    assert figures["mlm_cases"] == (labels > 0).sum()


@pytest.mark.parametrize("rows", [1, 12, 13, 16])
def test_the_ranks_share_the_rows(stream_of, vocabulary, monkeypatch, rows):
    stream, model = stream_of(48, "mlm+nsp"), random_model(len(vocabulary), deviation=0.02)
    passes, real = [], evaluation.pretraining_sums

    def counted(model, micro, engine):
        passes.append(engine.ranks.rank)
        return real(model, micro, engine)

    monkeypatch.setattr(evaluation, "pretraining_sums", counted)
    sums, some = [], {"masked": 1.0, "rows": 1.0}  # of the others, of whom there are none here
    monkeypatch.setattr(Ranks, "all_reduce", lambda ranks, own: sums.append(own) or {**own, **some})

    def evaluated(*ranks):
        engine = Engine(CPU.device, "float32", 1, *ranks)
        evaluate_pretraining(model, stream, engine, rows, batch=4)
        return sums.pop()

    whole = evaluated()
    assert whole["rows"] == rows and len(passes) == -(-rows // 4)
    passes.clear()
    parts = [evaluated(Ranks(rank, size=3)) for rank in range(3)]
    for name in whole:
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], rel=1e-5), name
    assert [passes.count(rank) for rank in range(3)] == [-(-rows // 12)] * 3  # as sharding needs


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_how_many_workers_compute_changes_no_bit(stream_of, vocabulary, precision):
    stream, model = stream_of(48, "mlm+nsp"), random_model(len(vocabulary))
    computers, real = set(), model.losses

    def losses(*arguments, **named):
        computers.add(threading.current_thread().name)
        time.sleep(0.01)
        return real(*arguments, **named)

    model.losses = losses
    engines = [Engine(torch.device("cpu"), precision, workers) for workers in (1, 2)]
    alone, shared = (evaluate_pretraining(model, stream, one, 16, batch=4) for one in engines)
    assert alone == shared and len(computers) == 3
