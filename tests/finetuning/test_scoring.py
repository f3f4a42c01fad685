"""Outputs in batches of a token budget against one row at a time."""

import numpy as np
import pytest
import torch

from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import OptionScorer, SequenceClassifier, SpanPredictor, TokenClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.features import Features
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.task import head_outputs

CONFIG = ModelConfig(50, 16, num_layers=2, num_heads=2, intermediate_size=32)


def engine(precision="float32", threads=1):
    return Engine(torch.device("cpu"), precision, threads)


def made(lengths, seed=1) -> Features:
    random = np.random.default_rng(seed)
    ids = random.integers(1, 50, lengths.sum()).astype(np.int32)
    types = random.integers(0, 2, lengths.sum()).astype(np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    return Features(ids, types, boundaries, None, max_length=32, num_truncated=0)


@pytest.mark.parametrize(
    ("kind", "num_outputs"),
    [(SequenceClassifier, 3), (OptionScorer, 1), (TokenClassifier, 5), (SpanPredictor, 2)],
)
def test_outputs_are_those_of_single_rows_whatever_the_budget(kind, num_outputs):
    features = made(np.random.default_rng(1).integers(2, 30, 25))
    model = kind(CONFIG, num_outputs)
    initialize(model, 0.5, torch.Generator().manual_seed(1)).eval()
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
        found = head_outputs(
            model, features, 0, engine(), budget_tokens=budget, on_batch=done.append
        )
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert sum(done) == 3 * 25 and model.training


def test_autocast_is_near_and_still_float32():
    features = made(np.full(4, 8))
    model = initialize(SequenceClassifier(CONFIG, 3), 0.5, torch.Generator().manual_seed(1))
    exact = head_outputs(model, features, 0, engine())
    near = head_outputs(model, features, 0, engine("bf16"))
    assert near.dtype == np.float32
    assert 0 < np.abs(near - exact).max() < 0.1 * np.abs(exact).max()


def test_no_rows_have_no_outputs():
    features = made(np.empty(0, np.int64))
    found = head_outputs(SequenceClassifier(CONFIG, 3), features, 0, engine())
    assert found.shape == (0, 3)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_who_computes_a_batch_changes_no_bit(precision):
    features = made(np.random.default_rng(1).integers(2, 30, 25))
    model = initialize(TokenClassifier(CONFIG, 5), 0.5, torch.Generator().manual_seed(1))
    alone, shared = (
        head_outputs(model, features, 0, engine(precision, threads), budget_tokens=64)
        for threads in (1, 2)
    )
    assert np.array_equal(alone, shared)
