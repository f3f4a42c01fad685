"""A layer's end as one function is that of its own functions, to the bit."""

import pytest
import torch
from torch import nn

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


def made(rate=0.1, kind=Layer, activation="gelu"):
    torch.manual_seed(1)
    config = config_for("tiny", 30, dropout=rate, activation=activation)
    layer = kind(config)
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
    layer, given = made(rate, activation=activation), states(tokens)
    found = through(layer, *given)
    monkeypatch.setattr(short_layer, "SHORT", 0)
    expected = through(layer, *given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


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
