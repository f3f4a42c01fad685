"""Optimizers against the formulas of google-research/bert optimization.py, written out in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.model.encoder import initialize
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.sizes import config_for
from bertsmith.training.optimizers import (
    build_optimizer,
    load_state_tensors,
    parameter_groups,
    state_tensors,
)


def trained(kind, steps=5):
    """A 3 x 2 linear layer after some steps on given gradients: (model, optimizer, gradients)."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) / 10)
        model.bias.fill_(0.5)
    optimizer = build_optimizer(model, kind, rate=0.01, weight_decay=0.1)
    gradients = np.random.default_rng(1).normal(size=(steps, 2, 3)).astype(np.float32)
    for gradient in gradients:
        model.weight.grad = torch.from_numpy(gradient)
        model.bias.grad = torch.from_numpy(gradient[:, 0].copy())
        optimizer.step()
    return model, optimizer, gradients


@pytest.mark.parametrize("kind", ["paper-adam", "adamw"])
def test_weights_after_five_steps(kind):
    model, _, gradients = trained(kind)
    weight = np.arange(6.0).reshape(2, 3) / 10
    first, second = np.zeros((2, 3)), np.zeros((2, 3))
    for step, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        m, v = first, second
        if kind == "adamw":  # bias correction, Kingma and Ba 2015
            m, v = first / (1 - 0.9**step), second / (1 - 0.999**step)
        weight = weight - 0.01 * (m / (np.sqrt(v) + 1e-6) + 0.1 * weight)
    np.testing.assert_allclose(model.weight.detach().numpy(), weight, rtol=2e-5)


def test_biases_and_norms_are_not_decayed_but_embeddings_are():
    model = PreTrainingModel(config_for("1x64", 50))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = (
        {names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.01)
    )
    assert all(name.endswith("bias") or "norm" in name for name in plain)
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)
    assert "encoder.embeddings.token.weight" in decayed
    assert {"encoder.embeddings.norm.weight", "mlm.norm.weight", "mlm.bias"} <= plain
    assert len(decayed) + len(plain) == len(names)


@pytest.mark.parametrize("kind", ["paper-adam", "adamw"])
def test_state_round_trip(kind):
    model, optimizer, _ = trained(kind)
    copy = nn.Linear(3, 2)
    copy.load_state_dict(model.state_dict())
    restored = build_optimizer(copy, kind, rate=0.01, weight_decay=0.1)
    load_state_tensors(copy, restored, state_tensors(model, optimizer))
    for one, chosen in ((model, optimizer), (copy, restored)):
        one.weight.grad = torch.ones(2, 3)
        one.bias.grad = torch.ones(2)
        chosen.step()
    assert torch.equal(model.weight, copy.weight)


def test_state_of_another_size_is_refused():
    model, optimizer, _ = trained("adamw")
    tensors = state_tensors(model, optimizer)
    other = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="the checkpoint is of another size"):
        load_state_tensors(other, build_optimizer(other, "adamw", 0.1, 0.0), tensors)


def test_unknown_optimizer():
    model = initialize(nn.Linear(2, 2), 0.02, torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="known are 'adamw' and 'paper-adam'"):
        build_optimizer(model, "lamb", 0.1, 0.0)
