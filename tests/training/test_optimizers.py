"""Optimizers against the formulas of their papers, written out in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier, TokenClassifier
from bertsmith.training.optimizers import (
    OPTIMIZERS,
    READER_RATE,
    build_optimizer,
    load_state_tensors,
    parameter_groups,
    state_tensors,
)

from .runs import random_model


def trained(kind, steps=5):
    """A 3 x 2 linear layer after some steps on given gradients: (model, optimizer, gradients)."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) / 10)
        model.bias.fill_(0.5)
    optimizer = build_optimizer(model, kind, learning_rate=0.01, weight_decay=0.1)
    gradients = np.random.default_rng(1).normal(size=(steps, 2, 3)).astype(np.float32)
    for gradient in gradients:
        model.weight.grad = torch.from_numpy(gradient)
        model.bias.grad = torch.from_numpy(gradient[:, 0].copy())
        optimizer.step()
    return model, optimizer, gradients


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


def expected(kind, weight, gradients, decay, adapted=True):
    """In float64. adamw: Kingma and Ba 2015 (bias correction), decay beside the step; paper-adam:
    without correction; lamb: You et al. 2019, algorithm 2."""
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, gradient in enumerate(gradients.astype(np.float64), start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        m, v = first, second
        if kind != "paper-adam":
            m, v = first / (1 - 0.9**step), second / (1 - 0.999**step)
        update = m / (np.sqrt(v) + 1e-6) + decay * weight
        ratio = 1.0
        if kind == "lamb" and adapted:
            norms = np.linalg.norm(weight), np.linalg.norm(update)
            ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
        weight = weight - 0.01 * ratio * update
    return weight


@pytest.mark.parametrize("kind", ["paper-adam", "adamw", "lamb"])
def test_five_steps_are_those_of_its_paper(kind):
    model, _, gradients = trained(kind)
    weight = expected(kind, np.arange(6.0).reshape(2, 3) / 10, gradients, 0.1)
    np.testing.assert_allclose(model.weight.detach().numpy(), weight, rtol=2e-5)
    bias = expected(kind, np.full(2, 0.5), gradients[:, :, 0], 0.0, adapted=False)
    np.testing.assert_allclose(model.bias.detach().numpy(), bias, rtol=2e-5)


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 1.0), (0.5, 0.0)])
def test_lamb_where_a_norm_is_zero(weight, gradient):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, weight)
    optimizer = build_optimizer(model, "lamb", learning_rate=0.01, weight_decay=0.0)
    model.weight.grad = torch.full((2, 3), gradient)
    model.bias.grad = torch.zeros(2)
    optimizer.step()
    # the ratio is 1: Adam's first step is the rate times the gradient's sign, and 0 stays 0
    expected = np.full((2, 3), weight - 0.01 * np.sign(gradient))
    np.testing.assert_allclose(model.weight.detach().numpy(), expected, rtol=1e-5)


def small_model():
    return random_model(50, "1x64")


def generator():
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("products", [None, torch.bfloat16])
def test_muon_moves_the_layers_and_adamw_the_rest(products):
    model, plain = small_model(), small_model()
    optimizers = [
        build_optimizer(one, kind, 0.01, 0.1, products=products)
        for one, kind in ((model, "muon"), (plain, "adamw"))
    ]
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        draws = generator()
        for parameter in one.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * group.get("rate_scale", 1.0)  # as the loop does
        optimizer.step()
    theirs, start = dict(plain.named_parameters()), dict(small_model().named_parameters())
    for name, parameter in model.named_parameters():
        if "layers" not in name or parameter.ndim != 2:
            assert torch.equal(parameter, theirs[name]), name
            continue
        # w (1 - rate decay) - rate 0.2 sqrt(longer side) U p(p(p(S / |S|))) V^T, at twice the rate
        left, values, right = np.linalg.svd(parameter.grad.double().numpy(), full_matrices=False)
        values /= np.linalg.norm(values)
        for _ in range(3):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        step = 0.04 * 0.2 * max(parameter.shape) ** 0.5 * (left * values) @ right
        wanted = start[name].detach().numpy() * (1 - 0.04 * 0.1) - step
        # bf16 has 8 bits: 1% of a step; weights that float32 holds to 1e-8
        error = np.linalg.norm(parameter.detach().numpy() - wanted) / np.linalg.norm(step)
        assert error < (0.01 if products else 1e-5), name
        assert parameter.dtype == torch.float32


def test_the_momentum_of_muon_looks_ahead():
    """The singular values of a diagonal gradient are its diagonal, and U V^T is its signs."""
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(2, 2, bias=False))})
    nn.init.zeros_(model["layers"][0].weight)
    optimizer = build_optimizer(model, "muon", learning_rate=1.0, weight_decay=0.0)
    weight, momentum, wanted = model["layers"][0].weight, np.zeros(2), np.zeros(2)
    for gradient in ([3.0, 1.0], [0.5, 2.0], [-1.0, 0.1]):
        weight.grad = torch.diag(torch.tensor(gradient))
        optimizer.step()
        momentum = 0.95 * momentum + gradient
        values = gradient + 0.95 * momentum
        values /= np.linalg.norm(values)
        for _ in range(3):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        wanted -= 0.2 * 2**0.5 * values
        np.testing.assert_allclose(weight.detach().diag().numpy(), wanted, rtol=1e-5)


def depths(name):
    """How far a parameter of a three-layer classifier is from the head, by its name."""
    if name.startswith("encoder.embeddings."):
        return 4
    return {"0": 3, "1": 2, "2": 1}[name.split(".")[2]] if ".layers." in name else 0


@pytest.mark.parametrize("kind", ["adamw", "paper-adam"])
def test_a_layer_has_its_share_of_the_rate_of_the_one_above(kind):
    model = random_model(50, "3x64", kind=SequenceClassifier, labels=(2,))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = build_optimizer(model, kind, learning_rate=0.01, weight_decay=0.0, layer_decay=0.5)
    names = {id(weight): name for name, weight in model.named_parameters()}
    seen = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            name = names[id(weight)]
            assert group["rate_scale"] == 0.5 ** depths(name), name
            weight.grad = torch.ones_like(weight)
            seen.append(name)
        group["lr"] = 0.01 * group["rate_scale"]  # as the loop sets it
    assert sorted(seen) == sorted(before)  # each once
    optimizer.step()
    # g = 1: Adam's step is 1 with correction; without, (1 - b1) / sqrt(1 - b2)
    size = 1.0 if kind == "adamw" else 0.1 / 0.001**0.5
    for name, weight in model.named_parameters():
        moved = (before[name] - weight.detach()).mean().item()
        assert moved == pytest.approx(0.01 * size * 0.5 ** depths(name), rel=1e-3), name


def test_layer_shares_keep_the_decay_of_the_groups():
    model = SequenceClassifier(config_for("2x64", 50), 2)
    plain = build_optimizer(model, "adamw", learning_rate=0.01, weight_decay=0.1)
    shared = build_optimizer(model, "adamw", learning_rate=0.01, weight_decay=0.1, layer_decay=0.9)

    def decays(optimizer):
        groups = optimizer.param_groups
        return {id(weight): group["weight_decay"] for group in groups for weight in group["params"]}

    assert decays(plain) == decays(shared) and set(decays(plain).values()) == {0.0, 0.1}
    assert len(plain.param_groups) == 2 and "rate_scale" not in plain.param_groups[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_round_trip_is_exact(kind):
    model = small_model()
    optimizer = build_optimizer(model, kind, learning_rate=0.01, weight_decay=0.1)
    draws = generator()

    def step(*pairs):
        gradients = [torch.randn(p.shape, generator=draws) for p in model.parameters()]
        for one, chosen in pairs:
            for parameter, gradient in zip(one.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            chosen.step()

    for _ in range(3):
        step((model, optimizer))
    copy = small_model()
    copy.load_state_dict(model.state_dict())
    restored = build_optimizer(copy, kind, learning_rate=0.01, weight_decay=0.1)
    load_state_tensors(copy, restored, state_tensors(model, optimizer))
    for _ in range(2):
        step((model, optimizer), (copy, restored))
    for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_on_a_gpu(kind):
    model, there, draws = small_model(), small_model().cuda(), generator()
    optimizers = [build_optimizer(one, kind, 0.01, 0.1) for one in (model, there)]
    for _ in range(3):
        for ours, theirs in zip(model.parameters(), there.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=draws)
            theirs.grad = ours.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    restored = build_optimizer(there, kind, 0.01, 0.1)
    load_state_tensors(there, restored, state_tensors(there, optimizers[1]))
    restored.step()
    optimizers[0].step()
    for ours, theirs in zip(model.parameters(), there.parameters(), strict=True):
        np.testing.assert_allclose(ours.detach(), theirs.detach().cpu(), atol=1e-5)


def test_state_of_another_size_is_refused():
    model, optimizer, _ = trained("adamw")
    tensors = state_tensors(model, optimizer)
    other = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="the checkpoint is of another size"):
        load_state_tensors(other, build_optimizer(other, "adamw", 0.1, 0.0), tensors)


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="'adam': known are adamw, paper-adam, lamb, muon"):
        build_optimizer(nn.Linear(2, 2), "adam", 0.1, 0.0)


def test_a_bilstm_below_the_head_has_ten_times_the_rate():
    config = config_for("1x64", 20, bilstm=True)
    model = TokenClassifier(config, 3)
    optimizer = build_optimizer(model, "adamw", 1.0, 0.1, 0.5, READER_RATE)
    scales = {id(w): g["rate_scale"] for g in optimizer.param_groups for w in g["params"]}
    wanted = {"reader": 10.0, "classifier": 1.0, "encoder.layers": 0.5, "encoder.embeddings": 0.25}
    for name, weight in model.named_parameters():
        assert scales[id(weight)] == next(x for part, x in wanted.items() if name.startswith(part))
