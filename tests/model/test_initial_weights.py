"""A model's first weights."""

import pytest
import torch
from torch import nn

from bertsmith.model import initialization as initial_weights
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import WithoutInitialization, initialize


def test_initialisation_is_a_truncated_normal_of_the_generator():
    shape = ModelConfig(2000, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128)
    model = SequenceClassifier(shape, num_outputs=3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    initialize(model, 0.02, torch.Generator().manual_seed(3))
    weight = model.encoder.embeddings.token.weight
    # cut at 2 std a normal has 0.8796 of its standard deviation
    assert abs(weight.std() / (0.02 * 0.8796) - 1) < 0.01
    assert abs(weight.mean()) < 1e-4 and weight.abs().max() <= 0.04
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.abs().max() <= 0.04 and parameter.std() > 0.01, name
    with WithoutInitialization():
        undrawn = SequenceClassifier(shape, 3)
    again = initialize(undrawn, 0.02, torch.Generator().manual_seed(3))
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_those_of_the_seed_alone(monkeypatch, threads):
    """Not of the threads; and no two weights, or stretches of one, are alike."""
    monkeypatch.setattr(initial_weights, "STRETCH", 1000)
    shape = ModelConfig(500, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = initialize(SequenceClassifier(shape, 3), 0.02, torch.Generator().manual_seed(3))
    finally:
        torch.set_num_threads(before)
    weights = [w for w in model.parameters() if w.ndim == 2]
    firsts = torch.stack([w.flatten()[:100] for w in weights if w.numel() >= 1000])
    assert len(firsts.unique(dim=0)) == len(firsts)
    table = model.encoder.embeddings.token.weight.flatten()
    assert len(table.unique()) > 0.95 * len(table)
    # the same in both cases, of one thread and of three
    one = torch.Generator().manual_seed(3)
    again = initialize(SequenceClassifier(shape, 3), 0.02, one)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_weights_are_drawn_in_inference_mode_too():
    """The threads that draw are not in the caller's mode; load_model draws heads a folder lacks."""
    shape = ModelConfig(50, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
    outside = initialize(SequenceClassifier(shape, 3), 0.02, torch.Generator().manual_seed(3))
    with torch.inference_mode():
        inside = initialize(SequenceClassifier(shape, 3), 0.02, torch.Generator().manual_seed(3))
        torch.testing.assert_close(inside.state_dict(), outside.state_dict(), rtol=0, atol=0)
    outside.encoder.embeddings.token.weight.sum().backward()  # still a parameter that learns
