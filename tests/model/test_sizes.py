"""Named sizes against the published numbers of parameters."""

import pytest
import torch

from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import Pooler
from bertsmith.model.sizes import config_for


def parameters(size):
    """Encoder and pooler with the published vocabulary, as shapes without memory."""
    config = config_for(size, 30522)
    with torch.device("meta"):
        parts = [Encoder(config), Pooler(config)]
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


@pytest.mark.parametrize(
    ("size", "millions"),
    # google-research/bert README, "smaller BERT models"; the table there says 11.3 for mini, whose
    # weights have 11.17
    [("tiny", 4.4), ("mini", 11.2), ("small", 28.8), ("medium", 41.4), ("12x768", 109.5)],
)
def test_the_small_models_have_the_published_sizes(size, millions):
    assert round(parameters(size) / 1e6, 1) == millions


def test_base_and_large_have_the_published_sizes():
    assert parameters("base") == 109_482_240
    assert parameters("large") == 335_141_888


def test_heads_are_64_wide_and_feed_forward_4_times_the_hidden_size():
    large = config_for("large", 1000, causal=True)
    assert (large.num_layers, large.num_heads, large.intermediate_size) == (24, 16, 4096)
    assert large.causal


@pytest.mark.parametrize("size", ["huge", "6x", "0x128", "2x100", "2x0", "-2x128"])
def test_an_unknown_size_is_refused_by_name(size):
    with pytest.raises(ValueError, match=f"size '{size}'"):
        config_for(size, 1000)
