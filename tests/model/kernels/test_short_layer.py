"""A layer's end as one function is that of its own functions, to the bit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bertsmith.model import encoder as encoder_module
from bertsmith.model.config import config_for
from bertsmith.model.encoder import Layer
from bertsmith.model.kernels import short_layer
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.model.kernels.quantized_linear import has_int8, use_int8
from bertsmith.model.kernels.short_layer import after_attention
from bertsmith.model.variants import Attend, layer_class, recomputed

from .harness import run

HIDDEN = 128
multiplies = pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList([layer])


def made(rate=0.1, kind=Layer, activation="gelu", wide=512):
    torch.manual_seed(1)
    config = config_for("tiny", 30, dropout=rate, activation=activation)
    layer = kind(replace(config, intermediate_size=wide))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, float(parameter.dim() == 1), 0.1)
    use_int8(Model(layer))
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            part.to(torch.bfloat16)
    return layer


def states(tokens, number=2):
    torch.manual_seed(tokens)
    return list(torch.randn(number, 1, tokens, HIDDEN).bfloat16())


def through(layer, x, above):
    return run(lambda layer, x: layer(x, Attend(2, 0.0)), [x], above, layer)


@multiplies
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 5, 128, 301])
def test_it_is_the_layers_own_functions(tokens, activation, rate, monkeypatch):
    assert_own_functions(monkeypatch, made(rate, activation=activation), *states(tokens))


def assert_own_functions(monkeypatch, layer, x, above, positions=None):
    def both_ways():
        if positions is not None:
            return run(lambda layer, x: layer(x, Attend(2, 0.0), positions), [x], above, layer)
        return through(layer, x, above)

    outputs, make = [], encoder_module.after_attention
    monkeypatch.setattr(
        encoder_module,
        "after_attention",
        lambda *given: outputs.append(make(*given)) or outputs[-1],
    )
    found = both_ways()
    monkeypatch.setattr(short_layer, "SHORT", 0)
    expected = both_ways()
    assert outputs[0] is not None and outputs[1] is None
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.dtype == other.dtype and torch.equal(one, other)


@multiplies
@pytest.mark.parametrize("wide", [64, 128, 192])
def test_the_wide_layer_may_have_any_width(wide, monkeypatch):
    assert_own_functions(monkeypatch, made(wide=wide), *states(37))


@multiplies
def test_gathered_positions_frozen_weights_evaluation_and_float32(monkeypatch):
    x, above = states(37)
    with monkeypatch.context() as patch:
        assert_own_functions(patch, made(), x, above[:, :2], torch.tensor([[0, 36]]))
    layer = made()
    layer.intermediate.requires_grad_(False)
    layer.attention_norm.requires_grad_(False)
    with monkeypatch.context() as patch:
        assert_own_functions(patch, layer, x, above)
    with monkeypatch.context() as patch:
        assert_own_functions(patch, made().eval(), x, above)
    with monkeypatch.context() as patch:
        assert_own_functions(patch, made(), x.float(), above)
    layer = made()
    layer.output_norm.eps = 1e-3
    assert_own_functions(monkeypatch, layer, x, above)


@multiplies
def test_a_layer_that_is_computed_again_has_the_same_gradients():
    layer, given = made(), states(40)
    again = run(lambda layer, x: recomputed(layer, x, Attend(2, 0.0)), given[:1], given[1], layer)
    for one, other in zip(again, through(layer, *given), strict=True):
        assert torch.equal(one, other)


def is_used(layer, tokens=40):
    x, context = states(tokens)
    return after_attention(layer, x, context) is not None


@multiplies
def test_where_the_layers_own_functions_stay(monkeypatch):
    layer = made()
    assert is_used(layer)
    assert not is_used(layer, tokens=0)
    assert not is_used(made(kind=layer_class(Layer, False, True)))
    with torch.no_grad():
        assert not is_used(layer)
    with without_kernels():
        assert not is_used(layer)
    hook = layer.output_norm.register_forward_hook(lambda *given: None)
    assert not is_used(layer)
    hook.remove()
    monkeypatch.setattr(short_layer, "SHORT", 40 * HIDDEN * 4 * HIDDEN)
    assert not is_used(layer) and is_used(layer, tokens=39)
    layer.output.float()
    assert not is_used(layer, tokens=39)
    plain = made()
    plain.intermediate.__class__ = nn.Linear
    assert not is_used(plain, tokens=39)
