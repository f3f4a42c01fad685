"""The pieces of a batch, the outputs of a head, and training with a part of the token table."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import BareModel, load_model
from bertsmith.corpus.examples.stream import Position
from bertsmith.inference.predictor import load
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import OptionScorer, SequenceClassifier, SpanPredictor, TokenClassifier
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.tasks.features import Features
from bertsmith.tasks.squad.questions import Question, Questions
from bertsmith.tasks.squad.windows import featurize_questions
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training import replicas
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning import task as fine_tuning
from bertsmith.training.finetuning import trainer as trainers
from bertsmith.training.finetuning.fit import Batches
from bertsmith.training.finetuning.hidden_states import head_outputs
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.task import FineTuning, TrimmedEmbeddings
from bertsmith.training.finetuning.task_types.losses import Objective

# --- the pieces of a batch ---------------------------------------------------------------------


def pieces(trainer, settings, device="cpu", threads=1, batch=40):
    """Of the first batch: the pieces; the examples in it."""
    engine = Engine(torch.device(device), "float32", threads)
    model = trainer.fresh_model(settings, 1)
    teacher = np.arange(len(trainer.train), dtype=np.float32)
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
        (2, 64, [7, 7, 7, 7, 6, 6]),
        (2, 1, [1] * 40),
    ],
)
def test_no_piece_of_a_batch_is_large(trainer, toy, monkeypatch, threads, tokens, sizes):
    monkeypatch.setattr(fine_tuning, "TOKENS_AT_ONCE", tokens)
    found, units = pieces(trainer, toy.settings, threads=threads)
    assert [piece["ids"].shape for piece in found] == [(size, 8) for size in sizes]
    taught = np.concatenate([piece["teacher"] for piece in found]).astype(int)
    assert sorted(taught) == sorted(units)
    labels = np.concatenate([piece["labels"] for piece in found])
    assert labels.tolist() == trainer.train.labels[taught].tolist()


def test_both_workers_have_as_many_tokens(trainer, toy, monkeypatch):
    lengths = 8 + 8 * (np.arange(len(trainer.train)) // 10)
    monkeypatch.setattr(type(trainer.train), "unit_lengths", lengths)
    found, _ = pieces(trainer, toy.settings, threads=2)
    units = [piece["teacher"].astype(int) for piece in found]
    tokens = [len(part) * lengths[part].max() for part in units]
    assert len(units[0]) < len(units[1])
    assert abs(tokens[0] - tokens[1]) <= lengths[units[0]].max()  # one row


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
    settings = replace(toy.still, precision=precision, threads=threads)
    dev = trainer.dev[0].features
    whole = trainer.run(settings, 1, tmp_path / "whole").outputs(dev)
    monkeypatch.setattr(fine_tuning, "TOKENS_AT_ONCE", 40)
    cut = trainer.run(settings, 1, tmp_path / "cut").outputs(dev)
    assert not np.array_equal(cut, whole)
    assert np.abs(whole).max() > 0.3  # it has learned something
    np.testing.assert_allclose(cut, whole, atol=tolerance)


@pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")
def test_int8_learns_what_float32_learns(trainer, toy, tmp_path):
    dev = trainer.dev[0].features
    expected = trainer.run(toy.still, 1, tmp_path / "exact").outputs(dev)
    found = trainer.run(replace(toy.still, precision="int8"), 1, tmp_path / "int8").outputs(dev)
    assert not np.array_equal(found, expected)
    assert np.abs(expected).max() > 0.3  # it has learned something
    # 0.8% a product (tests/model/kernels/test_quantized_linear.py), 36 steps that follow each other
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


# --- outputs in batches of a token budget against one row at a time ----------------------------

CONFIG = ModelConfig(50, 16, num_layers=2, num_heads=2, intermediate_size=32)


def engine(precision="float32", threads=1):
    return Engine(torch.device("cpu"), precision, threads)


def made(lengths) -> Features:
    random = np.random.default_rng(1)
    ids = random.integers(1, 50, lengths.sum()).astype(np.int32)
    types = random.integers(0, 2, lengths.sum()).astype(np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    return Features(ids, types, boundaries, None, max_length=32, num_truncated=0)


def uneven_rows() -> Features:
    return made(np.random.default_rng(1).integers(2, 30, 25))


def initial(head, num_outputs):
    return initialize(head(CONFIG, num_outputs), 0.5, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("head", "num_outputs"),
    [(SequenceClassifier, 3), (OptionScorer, 1), (TokenClassifier, 5), (SpanPredictor, 2)],
)
def test_outputs_are_those_of_single_rows_whatever_the_budget(monkeypatch, head, num_outputs):
    features, model = uneven_rows(), initial(head, num_outputs).eval()
    ids, types = torch.tensor(features.ids), torch.tensor(features.token_types)
    boundaries = features.boundaries
    with torch.no_grad():
        rows = [
            model(ids[a:b][None], types[a:b][None], None)[0].numpy().reshape(-1, num_outputs)
            for a, b in zip(boundaries[:-1], boundaries[1:], strict=True)
        ]
    expected = np.concatenate(rows)  # [R, K], or of tokens [T, K]
    model.train()  # as it is in the middle of a training run
    done = []
    for budget in (1, 64, 8192):
        monkeypatch.setattr(replicas, "TOKENS_AT_ONCE", budget)
        found = head_outputs(model, features, engine(), done.append)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert sum(done) == 3 * 25 and model.training


def test_autocast_is_near_and_still_float32():
    features, model = made(np.full(4, 8)), initial(SequenceClassifier, 3)
    exact = head_outputs(model, features, engine())
    near = head_outputs(model, features, engine("bf16"))
    assert near.dtype == np.float32
    assert 0 < np.abs(near - exact).max() < 0.1 * np.abs(exact).max()


def test_no_rows_have_no_outputs():
    features = made(np.empty(0, np.int64))
    assert head_outputs(SequenceClassifier(CONFIG, 3), features, engine()).shape == (0, 3)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_who_computes_a_batch_changes_no_bit(monkeypatch, precision):
    monkeypatch.setattr(replicas, "TOKENS_AT_ONCE", 64)
    features, model = uneven_rows(), initial(TokenClassifier, 5)
    alone, shared = (
        head_outputs(model, features, engine(precision, threads)) for threads in (1, 2)
    )
    assert np.array_equal(alone, shared)


# --- a part of the token table gives the weights that all of it gives ---------------------------


class AllPieces(TrimmedEmbeddings):
    """The whole table, as if every piece were used."""

    def __init__(self, features, table, pad_id, whole=False):
        every = np.arange(len(table), dtype=np.int32)
        whole = replace(features[0], ids=every, boundaries=np.array([0, len(table)]))
        super().__init__([whole], table, pad_id)


@pytest.mark.parametrize("optimizer", ["adamw", "paper-adam"])
def test_the_weights_are_those_of_the_whole_table(trainer, toy, tmp_path, monkeypatch, optimizer):
    settings = replace(toy.settings, epochs=2, optimizer=optimizer, weight_decay=0.3)
    part = trainer.run(settings, 1, tmp_path / "part").model
    monkeypatch.setattr(trainers, "TrimmedEmbeddings", AllPieces)
    whole = trainer.run(settings, 1, tmp_path / "whole").model
    assert part.config == whole.config
    expected = whole.state_dict()
    assert part.state_dict().keys() == expected.keys()
    for name, weight in part.state_dict().items():
        # rounding alone: gradients of rows are summed in the same order, decay is a product of 12
        # factors here and 12 roundings there
        torch.testing.assert_close(weight, expected[name], rtol=2e-6, atol=1e-7, msg=name)
    table = part.encoder.embeddings.token.weight
    used = TrimmedEmbeddings([trainer.train, trainer.dev[0].features], table, 0)
    assert used.decay_id is not None and len(used.rows) < 54


def features(*ids):
    numbers = np.array(ids, np.int32)
    return Features(numbers, np.zeros_like(numbers), np.array([0, len(ids)]), None, 8, 0)


def model_and_table(vocab_size, zeros=()):
    config = ModelConfig(vocab_size, 8, num_layers=1, num_heads=2, intermediate_size=8, pad_id=3)
    model = initialize(SequenceClassifier(config, 2), 0.1, torch.Generator().manual_seed(1))
    table = model.encoder.embeddings.token.weight.detach()
    table[list(zeros)] = 0
    return model, table


def test_rows_by_hand():
    model, table = model_and_table(9, zeros=[0])  # which say nothing of decay
    table[2] *= 9
    table = table.clone()
    used = TrimmedEmbeddings([features(7, 5), features(5, 8)], table, pad_id=3)
    assert used.rows.tolist() == [2, 3, 5, 7, 8] and used.decay_id == 2
    assert used.renumbered(features(7, 5, 8)).ids.tolist() == [3, 2, 4]
    used.shrink(model)
    assert model.config.vocab_size == 5 and model.config.pad_id == 1
    assert torch.equal(model.encoder.embeddings.token.weight, table[[2, 3, 5, 7, 8]])
    with torch.no_grad():
        model.encoder.embeddings.token.weight *= 0.5
    used.grow(model)
    assert model.config.vocab_size == 9 and model.config.pad_id == 3
    torch.testing.assert_close(model.encoder.embeddings.token.weight.detach(), table * 0.5)


@pytest.mark.parametrize(
    ("size", "zeros", "used"),
    [
        (4, (), (0, 1, 2, 3)),  # nothing is left out where every piece is used
        (5, (0, 1, 2), (4,)),  # rows of zeros stay zeros
    ],
)
def test_an_untrained_table_comes_back_as_it_was(size, zeros, used):
    model, table = model_and_table(size, zeros)
    trimmed, table = TrimmedEmbeddings([features(*used)], table, pad_id=3), table.clone()
    assert (trimmed.decay_id is None) == (zeros == ())
    trimmed.shrink(model)
    trimmed.grow(model)
    weight = model.encoder.embeddings.token.weight.detach()
    assert torch.equal(weight, table)


def test_a_piece_unseen_in_training_is_read_by_its_published_vector(
    trainer, toy, model_folder, tmp_path
):
    """After training without decay; a text that has it is answered as with the whole table."""
    settings = replace(toy.settings, epochs=1, weight_decay=0.0)
    train_seeds(trainer, tmp_path / "run", settings, [1])
    published = load_model(model_folder, BareModel).model.encoder.embeddings.token.weight
    trained = load(tmp_path / "run")
    model, vocabulary = trained.pytorch(trained.task_kind).model, trained.tokenizer.vocabulary
    table = model.encoder.embeddings.token.weight
    seen = np.unique(np.concatenate([trainer.train.ids, trainer.dev[0].features.ids]))
    unseen = np.setdiff1d(np.arange(5, len(table)), seen)
    assert len(unseen) > 3 and torch.equal(table[unseen], published[unseen])
    found = (vocabulary.pieces[k] for k in unseen)
    text = next(piece for piece in found if not piece.startswith("##"))
    (answer,) = trained.classify([text])
    ids = [vocabulary.cls_id, *trained.tokenizer.encode_batch([text]).ids, vocabulary.sep_id]
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=int), None)
    wanted = dict(zip(trained.model_task.label_names, logits.softmax(1)[0].tolist(), strict=True))
    assert answer.probabilities == pytest.approx(wanted, abs=1e-6)
