"""What a step's batch is made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.corpus.examples.stream import Position
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.tasks.squad.questions import Question, Questions
from bertsmith.tasks.squad.windows import featurize_questions
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning import task as fine_tuning
from bertsmith.training.finetuning.fit import Batches
from bertsmith.training.finetuning.task import FineTuning
from bertsmith.training.finetuning.task_types.base import Objective


def pieces(trainer, settings, device="cpu", threads=1, batch=40):
    """Of the first batch: the pieces; the examples in it."""
    engine = Engine(torch.device(device), "float32", threads)
    model, teacher = (
        trainer.fresh_model(settings, 1),
        np.arange(len(trainer.train), dtype=np.float32),
    )
    batches = Batches(trainer.train.unit_lengths, batch, 1)
    task = FineTuning(
        trainer.task_type, model, trainer.train, batches, dict, Objective(), engine, teacher
    )
    step, _ = task.batch(Position(0, 0))
    assert step.counts["labels"] == batch
    return step.micro_batches, batches.epoch(0)[0]


@pytest.mark.parametrize(
    ("threads", "tokens", "sizes"),
    [
        (1, 9999, [40]),
        (2, 9999, [20, 20]),
        (1, 128, [14, 13, 13]),  # rows of 8: 320 tokens, of which 128 are 16 rows
        (2, 128, [10, 10, 10, 10]),  # both workers have as many
        (2, 1, [1] * 40),
    ],
)
def test_no_piece_of_a_batch_is_large(trainer, toy, monkeypatch, threads, tokens, sizes):
    monkeypatch.setattr(fine_tuning, "TOKENS_AT_ONCE", tokens)
    found, units = pieces(trainer, toy.settings, threads=threads)
    assert [piece["ids"].shape for piece in found] == [(size, 8) for size in sizes]
    assert np.concatenate([piece["teacher"] for piece in found]).tolist() == units.tolist()
    labels = np.concatenate([piece["labels"] for piece in found])
    assert labels.tolist() == trainer.train.labels[units].tolist()


def test_an_accelerator_has_a_batch_whole(trainer, toy, monkeypatch):
    monkeypatch.setattr(fine_tuning, "TOKENS_AT_ONCE", 1)
    (piece,), _ = pieces(trainer, toy.settings, device="cuda")
    assert len(piece["ids"]) == 40


@pytest.mark.parametrize(
    ("precision", "threads", "tolerance"),
    [
        ("float32", 1, 1e-5),  # sums in another order, over 36 steps that follow each other
        ("bf16", 2, 0.05),  # 8 bits of mantissa: an output of 2 in steps of 0.008
    ],
)
def test_pieces_train_as_a_batch(
    trainer, toy, tmp_path, monkeypatch, precision, threads, tolerance
):
    settings = replace(
        toy.settings, dropout=0.0, attention_dropout=0.0,
        precision=precision, threads=threads,
    )  # fmt: skip
    dev = trainer.dev[0].features
    whole = trainer.run(settings, 1, tmp_path / "whole").outputs(dev)
    monkeypatch.setattr(fine_tuning, "TOKENS_AT_ONCE", 40)
    cut = trainer.run(settings, 1, tmp_path / "cut").outputs(dev)
    assert not np.array_equal(cut, whole)
    assert np.abs(whole).max() > 0.3  # it has learned something
    np.testing.assert_allclose(cut, whole, atol=tolerance)


@pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")
def test_int8_learns_what_float32_learns(trainer, toy, tmp_path):
    exact = replace(toy.settings, dropout=0.0, attention_dropout=0.0, precision="float32")
    dev = trainer.dev[0].features
    expected = trainer.run(exact, 1, tmp_path / "exact").outputs(dev)
    trained = trainer.run(replace(exact, precision="int8"), 1, tmp_path / "int8")
    found = trained.outputs(dev)
    assert not np.array_equal(found, expected)
    assert np.abs(expected).max() > 0.3  # it has learned something
    # 0.8% a product (tests/kernels/test_int8.py), 36 steps that follow each other
    np.testing.assert_allclose(found, expected, atol=0.15)


def test_questions_about_one_context_meet_by_chance_alone():
    # 8 questions about each of 16 contexts of 1 to 16 words: a context's are as long as each other
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, "a", "?"]))
    asked = [Question(str(k), "a?", k // 8, ["a"], (0, 1)) for k in range(128)]
    questions = Questions.of(asked, ["a " * n for n in range(1, 17)], "mem")
    windows = featurize_questions(tokenizer, questions, EncodingSettings(max_length=64))
    every = Batches(windows.unit_lengths, 8, 1, windows.sorted_together)
    batches = every.epoch(0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(128))
    contexts = [len(set(batch // 8)) for batch in batches]
    # 8 of 128 without order: 16 * (1 - (15/16)^8) = 6.5; sorted over several batches: 1 to 2
    assert np.mean(contexts) == pytest.approx(6.5, abs=0.5)
    assert all((np.diff(windows.unit_lengths[batch]) >= 0).all() for batch in batches)
    assert [x.tolist() for x in every.epoch(1)] != [x.tolist() for x in batches]
