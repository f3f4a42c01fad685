"""Our LSTM and taggers against PyTorch's LSTMs; the arithmetic of mixed layers."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bertsmith.model import heads
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import FrozenTagger
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels import recurrence
from bertsmith.model.recurrent import GRU, LSTM, FeatureTagger, ScalarMix

from .kernels.harness import assert_as_float64, assert_near, error, run, run_in

LENGTHS = torch.tensor([5, 1, 7])


def pair(size=5, hidden=6):
    torch_lstm = nn.LSTM(size, hidden)
    ours = LSTM(size, hidden)
    with torch.no_grad():
        torch_lstm.bias_hh_l0.zero_()
        ours.inputs.weight.copy_(torch_lstm.weight_ih_l0)
        ours.inputs.bias.copy_(torch_lstm.bias_ih_l0)
        ours.state.weight.copy_(torch_lstm.weight_hh_l0)
    return ours, torch_lstm


@pytest.mark.parametrize("form", [LSTM.forward, LSTM.in_one_call])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_states_and_gradients_are_those_of_pytorch(steps, form):
    torch.manual_seed(steps)
    ours, other = pair()
    x, above = torch.randn(steps, 3, 5), torch.randn(steps, 3, 6)
    found = run(form, [x], above, ours)
    wanted = run(lambda lstm, x: lstm(x)[0], [x], above, other)
    states, by_x, by_inputs, by_state, by_bias, _ = wanted
    torch.testing.assert_close(found, [states, by_x, by_inputs, by_bias, by_state])


@pytest.mark.gpu
def test_the_call_of_a_gpu_is_the_steps():
    torch.manual_seed(3)
    ours, x, above = LSTM(5, 6), torch.randn(9, 3, 5), torch.randn(9, 3, 6)
    wanted = run(LSTM.forward, [x], above, ours)
    found = run(LSTM.forward, [x.cuda()], above.cuda(), deepcopy(ours).cuda())
    # cuDNN may take TF32, of 10 bits
    torch.testing.assert_close([one.cpu() for one in found], wanted, atol=5e-3, rtol=5e-3)
    with torch.autocast("cuda", torch.bfloat16):  # float16 would have no gradients so small
        small = run(LSTM.forward, [x.cuda()], 1e-7 * above.cuda(), deepcopy(ours).cuda())
    found, wanted = (1e7 * part[1].cpu() for part in (small, (None, 1e-7 * wanted[1])))
    torch.testing.assert_close(found, wanted, atol=5e-2, rtol=5e-2)


def test_gradients_by_differences():
    """Of PyTorch's operators, which compute in float64."""
    lstm = LSTM(3, 2).double()
    x, h, c = (
        torch.randn(*shape, 2, size).double() for shape, size in (((4,), 3), ((), 2), ((), 2))
    )
    leaves = [part.requires_grad_() for part in (x, h, c)]
    assert torch.autograd.gradcheck(lstm.run, leaves)


@pytest.mark.parametrize(("steps", "start"), [(1, torch.randn), (9, torch.randn), (9, torch.zeros)])
@pytest.mark.parametrize("read", ["both", "states", "cells"])
def test_states_and_cells_from_given_ones_are_those_of_float64(steps, start, read):
    """What is read goes on to a loss, and the gradient reaches what was given."""
    torch.manual_seed(steps)
    x, h, c = torch.randn(steps, 3, 5), start(3, 40), torch.randn(3, 40)

    def outputs(lstm, *given):
        states, cells = lstm.run(*given)
        return {"both": torch.cat([states, cells]), "states": states, "cells": cells}[read]

    above = torch.randn((2 if read == "both" else 1) * steps, 3, 40)
    assert_as_float64(1e-5, outputs, outputs, [x, h, c], above, LSTM(5, 40))


@pytest.mark.parametrize("rows", [3, 8, 11])  # our products take eight at once
@pytest.mark.parametrize("blocks", [True, False])
def test_states_in_bf16_are_those_of_float64_by_either_product(rows, blocks, monkeypatch):
    if blocks and not recurrence.has_bf16_vectors():
        pytest.skip("PyTorch multiplies bf16 on this processor")
    monkeypatch.setattr(recurrence, "has_bf16_vectors", lambda: blocks)
    torch.manual_seed(rows)
    given = torch.randn(9, rows, 64), torch.randn(rows, 64), torch.randn(rows, 64)
    exact = [part.bfloat16().float() for part in (*given, torch.randn(9, rows, 64))]
    lstm = LSTM(64, 64).bfloat16().float()
    found, wanted = (
        run_in(dtype, lambda lstm, *given: lstm.run(*given)[0], exact[:3], exact[3], lstm)
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert_near(found, wanted, 5e-3)  # states have 8 bits; 0.002 to 0.003 was seen


def gru_by_hand(model, x, h, reset):
    """The equations of `GRU` in NumPy, float64."""
    weights = (model.inputs.weight, model.inputs.bias, model.gates.weight, model.new.weight)
    w, b, u, v = (part.detach().double().numpy() for part in weights)
    bias = 0.0 if reset == "before" else model.new.bias.detach().double().numpy()
    states = []
    for x_s in x.double().numpy():
        a, i, d = np.split(x_s @ w.T + b, 3, axis=1)
        u_r, u_z = np.split(u, 2)
        r, z = 1 / (1 + np.exp(-a - h @ u_r.T)), 1 / (1 + np.exp(-i - h @ u_z.T))
        n = np.tanh(d + ((r * h) @ v.T if reset == "before" else r * (h @ v.T + bias)))
        h = z * h + (1 - z) * n
        states.append(h)
    return torch.tensor(np.stack(states)).float()


@pytest.mark.parametrize("reset", ["before", "after"])
@pytest.mark.parametrize("steps", [1, 9])
def test_a_gru_is_its_equations(reset, steps):
    torch.manual_seed(steps)
    gru, x, h = GRU(5, 40, reset), torch.randn(steps, 3, 5), torch.randn(3, 40)
    states = gru_by_hand(gru, x, h.double().numpy(), reset)
    torch.testing.assert_close(gru(x, h), states, atol=1e-5, rtol=0)
    torch.testing.assert_close(gru(x), gru_by_hand(gru, x, np.zeros((3, 40)), reset))
    above = torch.randn(steps, 3, 40)
    assert_as_float64(1e-5, GRU.__call__, GRU.__call__, [x, h], above, gru)


@pytest.mark.parametrize("reset", ["before", "after"])
def test_gradients_of_a_gru_by_differences(reset):
    gru = GRU(3, 2, reset).double()
    x, h = torch.randn(4, 2, 3).double().requires_grad_(), torch.randn(2, 2).double()
    assert torch.autograd.gradcheck(gru, (x, h.requires_grad_()))


@pytest.mark.parametrize("steps", [1, 9])
def test_reset_after_the_product_is_pytorchs_gru(steps):
    torch.manual_seed(steps)
    other, ours = nn.GRU(5, 6), GRU(5, 6, "after")
    with torch.no_grad():
        other.bias_hh_l0[:12] = 0.0  # ours has it once
        ours.inputs.weight.copy_(other.weight_ih_l0)
        ours.inputs.bias.copy_(other.bias_ih_l0)
        ours.gates.weight.copy_(other.weight_hh_l0[:12])
        ours.new.weight.copy_(other.weight_hh_l0[12:])
        ours.new.bias.copy_(other.bias_hh_l0[12:])
    x, h, above = torch.randn(steps, 3, 5), torch.randn(3, 6), torch.randn(steps, 3, 6)
    found = run(lambda gru, x, h: gru(x, h), [x, h], above, ours)
    wanted = run(lambda gru, x, h: gru(x, h[None])[0], [x, h], above, other)
    states, by_x, by_h, by_inputs, by_state, by_bias, by_state_bias = wanted
    by_ours = [by_inputs, by_bias, by_state[:12], by_state[12:], by_state_bias[12:]]
    torch.testing.assert_close(found, [states, by_x, by_h, *by_ours], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lstm", "before", "after"])
def test_states_and_gradients_in_bf16_are_near_float32(kind):
    torch.manual_seed(1)
    model = pair(32, 32)[0] if kind == "lstm" else GRU(32, 32, kind)
    x, h, above = torch.randn(12, 4, 32), torch.randn(4, 32), torch.randn(12, 4, 32)
    given = [x] if kind == "lstm" else [x, h]

    def low(model, *given):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(*given)

    found, wanted = (run(form, given, above, model) for form in (low, type(model).__call__))
    # bf16 keeps 8 bits; states are below 1, and errors go through 12 steps
    torch.testing.assert_close(found[0].float(), wanted[0], atol=0.02, rtol=0)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 0.03


def test_a_mix_is_elmos_equation_1():
    mix = ScalarMix(2)
    mix.scores.data = torch.tensor([0.0, np.log(3.0)]).float()  # softmax: 1/4 and 3/4
    mix.gamma.data.fill_(2.0)
    layers = torch.tensor([[[1.0, 0.0], [0.0, 4.0]]])
    torch.testing.assert_close(mix(layers), torch.tensor([[0.5, 6.0]]))


def test_a_mix_learns_which_layer_is_wanted():
    layers = torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(2))
    mix = ScalarMix(4)
    optimizer = torch.optim.Adam(mix.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (mix(layers) - 2.0 * layers[:, 1]).square().mean().backward()
        optimizer.step()
    weights = mix.scores.softmax(dim=0)
    assert weights.argmax() == 1 and weights[1] > 0.95
    assert abs(mix.gamma.item() - 2.0) < 0.1


def states(num_read, size=6):
    return torch.randn(3, 7, num_read, size, generator=torch.Generator().manual_seed(2)).half()


def tagger(**settings):
    size = {"size": 6, "num_outputs": 3, "hidden_size": 4, "dropout": 0.0}
    return FeatureTagger(**{**size, **settings}).initialize(torch.Generator().manual_seed(1))


def packed_reference(model, x):
    """The same weights in one nn.LSTM of two directions, and PyTorch's own packing."""
    reader = model.reader
    layers, hidden = len(reader.forwards), model.classifier.in_features // 2
    lstm = nn.LSTM(x.shape[2], hidden, layers, batch_first=True, bidirectional=True)
    for number in range(layers):
        for ending, part in (("", reader.forwards[number]), ("_reverse", reader.backwards[number])):
            values = {"weight_ih": part.inputs.weight, "weight_hh": part.state.weight}
            values |= {"bias_ih": part.inputs.bias, "bias_hh": torch.zeros(4 * hidden)}
            for name, value in values.items():
                getattr(lstm, f"{name}_l{number}{ending}").data.copy_(value)
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    return model.classifier(pad_packed_sequence(lstm(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("num_read", [1, 4])
def test_as_a_packed_bidirectional_lstm(num_read):
    model, x = tagger(num_read=num_read, mixed=False), states(num_read)
    wanted = packed_reference(model, x.float().flatten(2))
    assert_real_close(model(x, LENGTHS), wanted)


def assert_real_close(given, wanted):
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(given[row, :length], wanted[row, :length])


def test_what_is_padding_changes_nothing():
    model, x = tagger(num_read=2, mixed=True).eval(), states(2)
    real = torch.arange(7) < LENGTHS[:, None]
    other = torch.where(real[..., None, None], x, 9.0)
    assert torch.equal(model(x, LENGTHS)[real], model(other, LENGTHS)[real])


def test_a_mixture_begins_as_the_mean_and_is_learned():
    model, x = tagger(num_read=3, mixed=True), states(3)
    wanted = packed_reference(model, x.float().mean(2))
    given = model(x, LENGTHS)
    torch.testing.assert_close(given[2], wanted[2])
    given[2].sum().backward()
    assert model.mix.scores.grad.abs().sum() > 0
    assert model.reader.forwards[0].inputs.in_features == 6


def test_a_generator_gives_the_same_weights_again():
    one, two = (tagger(num_read=1, mixed=False).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert max(value.abs().max() for value in one.values()) <= 0.5  # 1 / sqrt(4)


def test_dropout_only_in_training():
    model, x = tagger(num_read=1, mixed=False, dropout=0.5), states(1)
    model.eval()
    assert torch.equal(model(x, LENGTHS), model(x, LENGTHS))
    model.train()
    assert not torch.equal(model(x, LENGTHS), model(x, LENGTHS))


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="no bf16 products")
def test_bf16_is_near_float32():
    model, x = tagger(num_read=4, mixed=True, hidden_size=32), states(4)
    wanted = model(x, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        given = model(x, LENGTHS)
    # bf16 keeps 8 bits; logits are below 1 here
    torch.testing.assert_close(given.float(), wanted, atol=0.02, rtol=0)


@pytest.fixture
def frozen(monkeypatch):
    """A tagger with its encoder of 3, whose layers drop half of everything in training."""
    monkeypatch.setattr(heads, "HIDDEN_SIZE", 4)
    sizes = {"hidden_size": 8, "num_layers": 3, "num_heads": 2, "intermediate_size": 16}
    config = ModelConfig(30, **sizes, max_positions=16, dropout=0.0, attention_dropout=0.5)
    return initialize(FrozenTagger(config, 5), 0.5, torch.Generator().manual_seed(1))


def tokens(rows):
    ids = torch.randint(1, 30, (rows, 7), generator=torch.Generator().manual_seed(2))
    return ids, torch.zeros_like(ids)


def test_a_frozen_encoder_with_its_tagger(frozen):
    ids, types = tokens(3)
    frozen.train()
    given = frozen(ids, types, LENGTHS)
    with torch.no_grad():
        layers = frozen.encoder(ids, types, LENGTHS, all_layers=True)
    wanted = packed_reference(frozen, torch.cat(layers[1:], dim=2))  # 0 is that of the embeddings
    assert_real_close(given, wanted)
    given[2].sum().backward()
    learned = {name for name, weight in frozen.named_parameters() if weight.grad is not None}
    assert learned == {n for n, _ in frozen.named_parameters() if not n.startswith("encoder.")}


def test_full_rows_need_no_lengths(frozen):
    ids, types = tokens(2)
    lengths = torch.tensor([7, 7], dtype=torch.int32)
    torch.testing.assert_close(frozen(ids, types, None), frozen(ids, types, lengths))


def test_the_flops_of_a_frozen_tagger(frozen):
    """By hand for 2 rows of 7: 6 of each weight of the LSTM, 2 of each of the encoder's layers."""
    encoder = 3 * (4 * 8 * 8 + 2 * 8 * 16 + 2 * 7 * 8)
    reader = 2 * ((24 * 16 + 4 * 16 + 16) + (8 * 16 + 4 * 16 + 16))
    assert frozen.flops(2, 7) == 2 * 7 * (2 * encoder + 6 * reader)
