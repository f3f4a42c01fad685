"""The learned weights of layers: their arithmetic, their start, what can be learned."""

import numpy as np
import torch

from bertsmith.model.lstm import ScalarMix


def test_it_begins_as_the_mean_of_the_layers():
    layers = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ScalarMix(3)(layers), layers.mean(dim=1))


def test_it_is_elmos_equation_1():
    mix = ScalarMix(2)
    with torch.no_grad():
        mix.scores.copy_(torch.tensor([0.0, np.log(3.0)]))  # softmax: 1/4 and 3/4
        mix.gamma.fill_(2.0)
    layers = torch.tensor([[[1.0, 0.0], [0.0, 4.0]]])
    torch.testing.assert_close(mix(layers), torch.tensor([[0.5, 6.0]]))


def test_layers_stored_in_half_precision_and_further_dimensions():
    layers = torch.full((2, 7, 3, 4), 0.5, dtype=torch.float16)
    mixed = ScalarMix(3)(layers)
    assert mixed.shape == (2, 7, 4) and mixed.dtype == torch.float32


def test_it_learns_which_layer_is_wanted():
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
