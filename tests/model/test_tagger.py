"""The taggers over frozen states against PyTorch's bidirectional LSTM over packed sequences."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bertsmith.model import lstm as taggers
from bertsmith.model.config import ModelConfig
from bertsmith.model.initialization import initialize
from bertsmith.model.lstm import FeatureTagger, FrozenTagger

LENGTHS = torch.tensor([5, 1, 7])


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
            for name, value in (
                ("weight_ih", part.inputs.weight),
                ("weight_hh", part.state.weight),
                ("bias_ih", part.inputs.bias),
                ("bias_hh", torch.zeros_like(part.inputs.bias)),
            ):
                getattr(lstm, f"{name}_l{number}{ending}").data.copy_(value)
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    return model.classifier(pad_packed_sequence(lstm(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("num_read", [1, 4])
def test_as_a_packed_bidirectional_lstm(num_read):
    model, x = tagger(num_read=num_read, mixed=False), states(num_read)
    wanted = packed_reference(model, x.float().flatten(2))
    given = model(x, LENGTHS)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(given[row, :length], wanted[row, :length])


def test_what_is_padding_changes_nothing():
    model, x = tagger(num_read=2, mixed=True).eval(), states(2)
    other = x.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 9.0
    for row, length in enumerate(LENGTHS):
        assert torch.equal(model(x, LENGTHS)[row, :length], model(other, LENGTHS)[row, :length])


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
    monkeypatch.setattr(taggers, "HIDDEN_SIZE", 4)
    sizes = {"hidden_size": 8, "num_layers": 3, "num_heads": 2, "intermediate_size": 16}
    config = ModelConfig(30, **sizes, max_positions=16, dropout=0.0, attention_dropout=0.5)
    return initialize(FrozenTagger(config, 5), 0.5, torch.Generator().manual_seed(1))


def test_a_frozen_encoder_with_its_tagger(frozen):
    ids = torch.randint(1, 30, (3, 7), generator=torch.Generator().manual_seed(2))
    types = torch.zeros_like(ids)
    frozen.train()
    given = frozen(ids, types, LENGTHS)
    with torch.no_grad():
        layers = frozen.encoder(ids, types, LENGTHS, all_layers=True)
    wanted = packed_reference(frozen, torch.cat(layers[1:], dim=2))  # 0 is that of the embeddings
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(given[row, :length], wanted[row, :length])
    given[2].sum().backward()
    learned = {name for name, weight in frozen.named_parameters() if weight.grad is not None}
    assert learned == {n for n, _ in frozen.named_parameters() if not n.startswith("encoder.")}


def test_full_rows_need_no_lengths(frozen):
    ids = torch.randint(1, 30, (2, 7), generator=torch.Generator().manual_seed(2))
    types = torch.zeros_like(ids)
    lengths = torch.tensor([7, 7], dtype=torch.int32)
    torch.testing.assert_close(frozen(ids, types, None), frozen(ids, types, lengths))


def test_the_operations_of_a_frozen_tagger(frozen):
    """By hand for 2 rows of 7: 6 of each weight of the LSTM, 2 of each of the encoder's layers."""
    encoder = 3 * (4 * 8 * 8 + 2 * 8 * 16 + 2 * 7 * 8)
    reader = 2 * ((24 * 16 + 4 * 16 + 16) + (8 * 16 + 4 * 16 + 16))
    assert frozen.operations(2, 7) == 2 * 7 * (2 * encoder + 6 * reader)
