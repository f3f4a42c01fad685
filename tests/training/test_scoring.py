"""Logits in batches of a token budget against one example at a time."""

import numpy as np
import torch

from bertsmith.model.encoder import ModelConfig, initialize
from bertsmith.model.heads import SequenceClassifier
from bertsmith.tasks.features import Features
from bertsmith.training.scoring import logits


def test_logits_are_those_of_single_examples_whatever_the_budget():
    random = np.random.default_rng(1)
    lengths = random.integers(2, 30, 25)
    ids = random.integers(1, 50, lengths.sum()).astype(np.int32)
    types = random.integers(0, 2, lengths.sum()).astype(np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    features = Features(ids, types, boundaries, None, max_length=32, num_truncated=0)
    config = ModelConfig(50, 16, num_layers=2, num_heads=2, intermediate_size=32)
    model = SequenceClassifier(config, 3)
    initialize(model, 0.5, torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():
        expected = [
            model(torch.tensor(ids[a:b])[None], torch.tensor(types[a:b])[None], None)[0].numpy()
            for a, b in zip(boundaries[:-1], boundaries[1:], strict=True)
        ]
    model.train()  # as it is in the middle of a training run
    done = []
    for budget in (1, 64, 8192):
        scores = logits(model, features, pad_id=0, budget_tokens=budget, on_batch=done.append)
        np.testing.assert_allclose(scores, expected, atol=2e-5)
    assert sum(done) == 3 * 25 and model.training
