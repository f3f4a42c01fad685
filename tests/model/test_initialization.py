"""First weights: those of a seed, and where the local start's heads look in a real forward pass."""

import math

import pytest
import torch
from torch import nn

from bertsmith.model import initialization
from bertsmith.model.config import ModelConfig, config_for
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import WithoutInitialization, initialize, local_start

from .test_encoder import NAMES, OPTIONS

CLS = 2
SHAPE = ModelConfig(2000, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128)


def drawn(model=None):
    model = model or SequenceClassifier(SHAPE, num_outputs=3)
    return initialize(model, 0.02, torch.Generator().manual_seed(3))


def assert_same(model, other):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_initialisation_is_a_truncated_normal_of_the_generator():
    model = SequenceClassifier(SHAPE, num_outputs=3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    drawn(model)
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
        undrawn = SequenceClassifier(SHAPE, 3)
    assert_same(drawn(undrawn), model)


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_those_of_the_seed_alone(monkeypatch, threads):
    """Not of the threads; and no two weights, or chunks of one, are alike."""
    monkeypatch.setattr(initialization, "CHUNK", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = drawn()
    finally:
        torch.set_num_threads(before)
    weights = [w for w in model.parameters() if w.ndim == 2]
    firsts = torch.stack([w.flatten()[:100] for w in weights if w.numel() >= 1000])
    assert len(firsts.unique(dim=0)) == len(firsts)
    table = model.encoder.embeddings.token.weight.flatten()
    assert len(table.unique()) > 0.95 * len(table)
    assert_same(drawn(), model)  # the same in both cases, of one thread and of three


def test_weights_are_drawn_in_inference_mode_too():
    """The threads that draw are not in the caller's mode; load_model draws heads a folder lacks."""
    outside = drawn()
    with torch.inference_mode():
        assert_same(drawn(), outside)
    outside.encoder.embeddings.token.weight.sum().backward()  # still a parameter that learns


def random_encoder(size, **changes):
    """An encoder of a thousand pieces, and the deviation of its weights."""
    config = config_for(size, 1000, max_positions=256, **changes)
    std = 1 / math.sqrt(3 * config.hidden_size)
    return initialize(Encoder(config), std, torch.Generator().manual_seed(1)).eval(), std


def random_ids(*shape, seed=2):
    return torch.randint(5, 1000, shape, generator=torch.Generator().manual_seed(seed))


def assert_look(encoder, layer, distances):
    """Where heads of a layer look, by positions alone: {head: distance}."""
    table = encoder.embeddings.position.weight
    query, key, _ = encoder.layers[layer].qkv.weight.chunk(3)
    for head, distance in distances.items():
        rows = slice(64 * head, 64 * (head + 1))
        scores = (table @ query[rows].T) @ (table @ key[rows].T).T
        assert scores[10:50].argmax(1).tolist() == [i + distance for i in range(10, 50)]


@pytest.fixture(scope="module", params=OPTIONS, ids=NAMES)
def encoder(request):
    """Of four heads: 0 and 2 look at their neighbours, 1 and 3 for equal pieces."""
    encoder, std = random_encoder("2x256", **request.param)
    local_start(encoder, std, special_ids=[CLS])
    return encoder


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_heads_of_a_causal_model_look_to_the_left_alone(family):
    """What they would look at on the right is hidden from them."""
    changes = {"family": "gpt", "type_vocab_size": 0} if family == "gpt" else {}
    encoder, std = random_encoder("2x256", causal=True, **changes)
    local_start(encoder, std)
    with torch.no_grad():
        _, query, key, _ = first_layer(encoder, random_ids(4, 128))
        for head, distance in enumerate((-1, -2, -3, -4)):
            scores = query[:, :, head] @ key[:, :, head].transpose(1, 2) / 8
            hidden = torch.ones(128, 128, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=2)
            on_it = weights[:, range(5, 128), range(5 + distance, 128 + distance)]
            assert on_it.mean() > 0.25  # uniform attention: a few hundredths
    assert_look(encoder, 1, {0: -5, 1: -6, 2: -7, 3: -8})


def test_of_less_than_four_heads_all_look_at_their_neighbours():
    encoder, std = random_encoder("tiny")
    tokens = encoder.embeddings.token.weight.clone()
    local_start(encoder, std, special_ids=[CLS])
    assert not encoder.embeddings.segment.weight.any()
    assert torch.equal(encoder.embeddings.token.weight, tokens)
    for layer in (0, 1):
        assert_look(encoder, layer, {0: -1 - layer, 1: 1 + layer})


def first_layer(encoder, ids, types=None):
    """The rows that its attention reads, their queries, keys and values by heads."""
    types = torch.zeros_like(ids) if types is None else types
    hidden, layer = encoder.embeddings(ids, types), encoder.layers[0]
    read = layer.attention_norm(hidden) if encoder.config.pre_norm else hidden
    return read, *layer.qkv(read).unflatten(2, (-1, 64)).chunk(3, dim=2)


@pytest.mark.parametrize(("head", "distance"), [(0, -1), (2, 1)])
def test_heads_of_the_first_layer_look_at_their_neighbours(encoder, head, distance):
    with torch.no_grad():
        _, query, key, _ = first_layer(encoder, random_ids(4, 128))
        scores = query[:, :, head] @ key[:, :, head].transpose(1, 2) / 8
    weights = scores.softmax(dim=2)
    inner = range(2, 126)
    on_neighbour = torch.stack([weights[:, i, i + distance] for i in inner])
    # uniform attention would give each position 1 / 128
    assert on_neighbour.mean() > 0.25
    found = torch.stack([weights[:, i].argmax(1) == i + distance for i in inner])
    assert found.float().mean() > 0.8  # tokens and segments, as large as positions, disturb some


@pytest.mark.parametrize("head", [1, 3])
def test_the_other_heads_find_a_piece_of_the_other_text(encoder, head):
    """Two texts without a piece in common but one; positions are drawn, and so are all pieces."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(995, generator=draw)[:64] + 5 for _ in range(64)])
    types = (torch.arange(64) >= 32).long().expand(64, 64)
    asks, answers = (torch.randint(1, 32, (64,), generator=draw) + start for start in (0, 32))
    every = torch.arange(64)
    ids[every, answers] = ids[every, asks]
    with torch.no_grad():
        _, query, key, _ = first_layer(encoder, ids, types)
        scores = query[:, :, head] @ key[:, :, head].transpose(1, 2) / 8
    weights = scores.softmax(dim=2)[every, asks]
    on_equal = weights[every, answers]
    others = weights.index_fill(1, torch.arange(32), 0.0)
    others[every, answers] = 0.0
    assert (on_equal > others.max(1).values).float().mean() > 0.9
    assert on_equal.mean() > 0.25  # uniform attention: 1 / 64


def test_a_segment_moves_no_head_but_is_passed_on(encoder):
    ids = random_ids(4, 64)
    with torch.no_grad():
        one, other = (first_layer(encoder, ids, torch.full_like(ids, kind)) for kind in (0, 1))
    assert encoder.embeddings.segment.weight.std() > 0.5 / math.sqrt(3 * 256)
    for head in range(4):
        similar = torch.cosine_similarity(one[1][:, :, head], other[1][:, :, head], dim=2)
        assert similar.min() > 0.95  # LayerNorm of all dimensions moves them a little
    values = torch.cosine_similarity(one[3].flatten(2), other[3].flatten(2), dim=2)
    assert values.mean() < 0.85  # a quarter of each vector is another segment's


def test_cls_looks_at_no_neighbour_and_gathers_the_tokens(encoder):
    ids = random_ids(256, 64, seed=3)
    ids[:, 0] = CLS
    with torch.no_grad():
        read, query, key, value = first_layer(encoder, ids)
        scores = torch.einsum("bhd,bshd->bhs", query[:, 0], key) / 8
        weights = scores.softmax(dim=2)
        context = torch.einsum("bhs,bshd->bhd", weights, value).flatten(1)
        gathered = encoder.layers[0].attention_output(context)
    assert weights.mean(0).max() < 0.15  # elsewhere a neighbour has 0.8
    similar = torch.cosine_similarity(gathered, read.mean(1), dim=1)
    assert similar.mean() > 0.4  # random values and outputs would give 0


def test_everything_stays_an_ordinary_trainable_encoder(encoder):
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    assert all(parameter.isfinite().all() for parameter in encoder.parameters())
    table = encoder.embeddings.position.weight
    held = table.any(0)  # dimensions that hold positions
    assert held.sum() == 128
    assert not (encoder.embeddings.segment.weight[:, held]).any()
    root_mean_square = table[1:, held].square().mean().sqrt().item()
    assert root_mean_square == pytest.approx(1 / math.sqrt(3 * 256), rel=0.01)
    assert not table[0].any()


def test_distances_grow_through_heads_and_layers(encoder):
    """In layer 1 the two that look at neighbours look two to the left and two to the right."""
    assert_look(encoder, 1, {0: -2, 2: 2})


@pytest.mark.parametrize("size", ["2x64", "4x64", "12x64"])
def test_a_token_keeps_a_quarter_of_itself_however_deep_the_model(size):
    config = config_for(size, 100, max_positions=64)
    encoder = initialize(Encoder(config), 0.05, torch.Generator().manual_seed(1))
    local_start(encoder, 0.05)
    kept = 1.0
    for layer in encoder.layers:
        through = layer.attention_output.weight @ layer.qkv.weight.chunk(3)[2]
        gain = through.diagonal().mean().item()
        torch.testing.assert_close(through, gain * torch.eye(64), atol=1e-5, rtol=0)
        kept /= 1 + gain**2  # the residual's share, once the LayerNorm has made both one again
    assert kept == pytest.approx(0.25, rel=1e-4)
