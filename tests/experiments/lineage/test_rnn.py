"""The recurrent translators: step and whole, padding, reading order, the papers' equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.experiments.lineage.attention import AttentionConfig, AttentionTranslator
from bertsmith.experiments.lineage.rnn import RNNConfig, rnn
from bertsmith.model.kernels.elementwise import seed_dropout, without_kernels

SIZES = {"embedding_size": 6, "hidden_size": 6, "dropout": 0.0}
PIECES = {"source_vocab_size": 20, "target_vocab_size": 20}
GRU_SHAPE = RNNConfig(**PIECES, **{**SIZES, "hidden_size": 8})
LSTM_SHAPE = RNNConfig(**PIECES, form="lstm", num_layers=3, **SIZES)
ATTENTION = AttentionConfig(**PIECES, **{**SIZES, "hidden_size": 8})
SHAPES = {
    "gru": GRU_SHAPE,
    "gru, two layers, reset after": replace(GRU_SHAPE, num_layers=2, reset="after"),
    "gru, two tables": replace(GRU_SHAPE, shared=False, target_vocab_size=15),
    "lstm": LSTM_SHAPE,
    "lstm, reversed": replace(LSTM_SHAPE, reversed_source=True),
    "lstm, two tables": replace(LSTM_SHAPE, shared=False, target_vocab_size=15, hidden_size=8),
    "attention": ATTENTION,
    "attention, reset after": replace(ATTENTION, reset="after"),
    "attention, two tables": replace(ATTENTION, shared=False, target_vocab_size=15),
}
LENGTHS = torch.tensor([4, 6, 1])
SOURCE = torch.tensor([[5, 6, 7, 3, 0, 0], [8, 9, 10, 11, 12, 3], [3, 0, 0, 0, 0, 0]])
TARGET = torch.tensor([[2, 5, 6, 0], [2, 7, 8, 9], [2, 3, 0, 0]])


def build(config, seed=1):
    make = AttentionTranslator if isinstance(config, AttentionConfig) else rnn
    return make(config).initialize(torch.Generator().manual_seed(seed))


def logits(model, source=SOURCE, lengths=LENGTHS, target=TARGET):
    hidden = model.decode(model.encode(source, lengths), target)
    return hidden @ model.output_weight.T + model.output_bias


@pytest.fixture(params=SHAPES)
def model(request):
    return build(SHAPES[request.param])


def test_a_step_at_a_time_is_the_whole(model):
    model.eval()
    with torch.no_grad():
        memory = model.encode(SOURCE, LENGTHS)
        whole, state = model.decode(memory, TARGET), model.start(memory)
        for number, token in enumerate(TARGET.t()):
            hidden, state = model.step(memory, state, token)
            torch.testing.assert_close(hidden, whole[:, number], atol=1e-6, rtol=0)
    for held in (memory, state):
        for part in held if isinstance(held, tuple) else (held,):
            assert len(part) == len(SOURCE)  # beams are chosen by the first dimension


def test_padding_of_the_source_changes_nothing(model):
    wanted = logits(model)
    torch.testing.assert_close(logits(model, SOURCE.where(SOURCE > 0, 13)), wanted)
    wide = nn.functional.pad(SOURCE, (0, 3))
    torch.testing.assert_close(logits(model, wide), wanted, atol=1e-6, rtol=0)


def test_no_word_sees_those_after_it(model):
    wanted = logits(model)
    other = TARGET.clone()
    other[:, 2] = 13
    found = logits(model, target=other)
    assert torch.equal(found[:, :2], wanted[:, :2])
    assert not torch.equal(found[:, 2], wanted[:, 2])


def test_gradients_reach_all_weights_and_are_those_of_the_operators(model):
    found = gradients(model)
    with without_kernels():
        wanted = gradients(model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert gradient.norm() > 0 and error < 1e-4, name


def gradients(model):
    model.zero_grad()
    loss = nn.functional.cross_entropy(logits(model).flatten(0, 1), TARGET.flatten() % 15)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_a_generator_gives_the_same_weights_again(model):
    other = build(model.config).state_dict()
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    assert not torch.equal(build(model.config, seed=2).source.weight, model.source.weight)


@pytest.mark.parametrize("name", ["gru", "lstm", "attention"])
def test_a_model_learns_to_copy(name):
    """Three words of 11, which are guessed with a loss of 2.4 nats."""
    torch.manual_seed(1)
    model = build(SHAPES[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        words = torch.randint(4, 15, (16, 3))
        source = nn.functional.pad(words, (0, 1), value=3)
        target = nn.functional.pad(words[:, :-1], (1, 0), value=2)
        found = logits(model, source, torch.full((16,), 4), target)
        loss = nn.functional.cross_entropy(found.flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2.1


def weights(model):
    return {name: value.detach().double().numpy() for name, value in model.named_parameters()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(w, prefix, x, h):
    """One step of the papers' GRU on what goes into its gates."""
    a, b, d = np.split(x, 3)
    r, z = np.split(sigmoid(np.r_[a, b] + w[f"{prefix}.gates.weight"] @ h), 2)
    return z * h + (1 - z) * np.tanh(d + w[f"{prefix}.new.weight"] @ (r * h))


def lstm(w, prefix, x, h, c):
    i, f, g, o = np.split(linear(w, f"{prefix}.inputs", x) + linear(w, f"{prefix}.state", h), 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def linear(w, name, x):
    return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)


def maxout(w, state, word, context):
    given = {"state": state, "token": word, "context": context}
    first, second = np.split(sum(linear(w, f"readout.{name}", x) for name, x in given.items()), 2)
    return np.maximum(first, second)


def cho(w, source, target):
    """Hidden states [T, E] of one sentence, by the equations of rnn.py."""
    table = w["source.weight"] * np.sqrt(6)  # E
    h = np.zeros(8)
    for word in source:
        h = gru(w, "encoder.0", linear(w, "encoder.0.inputs", table[word]), h)
    c = np.tanh(linear(w, "summary", h))
    h, hidden = np.tanh(linear(w, "starts", c)), []
    for word in target:
        y = table[word]
        h = gru(w, "decoder.0", linear(w, "decoder.0.inputs", y) + linear(w, "context", c), h)
        hidden.append(maxout(w, h, y, c))
    return np.stack(hidden)


def sutskever(w, source, target):
    table = w["source.weight"] * np.sqrt(6)  # E
    states = [(np.zeros(6), np.zeros(6))] * 3
    for side, words in (("encoder", source[::-1]), ("decoder", target)):
        hidden = []
        for word in words:
            x = table[word]
            for layer in range(3):
                states[layer] = lstm(w, f"{side}.{layer}", x, *states[layer])
                x = states[layer][0]
            hidden.append(x)
    return np.stack(hidden)


def bahdanau(w, source, target):
    table = w["source.weight"] * np.sqrt(6)  # E
    directions = []
    for side, words in (("forwards", source), ("backwards", source[::-1])):
        name, h, states = f"encoder.{side}.0", np.zeros(8), []
        for word in words:
            h = gru(w, name, linear(w, f"{name}.inputs", table[word]), h)
            states.append(h)
        directions.append(states)
    annotations = [
        np.r_[left, right] for left, right in zip(directions[0], directions[1][::-1], strict=True)
    ]
    s, hidden = np.tanh(linear(w, "start_state", directions[1][-1])), []
    for word in target:
        keys = [linear(w, "keys", h) for h in annotations]
        e = np.array([w["score"] @ np.tanh(linear(w, "query", s) + k) for k in keys])
        c = (np.exp(e) / np.exp(e).sum()) @ annotations
        y = table[word]
        hidden.append(maxout(w, s, y, c))
        s = gru(w, "decoder", linear(w, "decoder.inputs", y) + linear(w, "context", c), s)
    return np.stack(hidden)


BY_HAND = {"gru": cho, "lstm, reversed": sutskever, "attention": bahdanau}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_papers_equations(name):
    model = build(SHAPES[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)  # biases, too
        hidden = model.decode(model.encode(SOURCE, LENGTHS), TARGET).double().numpy()
    for row, length in enumerate(LENGTHS.tolist()):
        wanted = BY_HAND[name](weights(model), SOURCE[row, :length].tolist(), TARGET[row].tolist())
        np.testing.assert_allclose(hidden[row], wanted, atol=1e-5)


def test_reversal_is_of_real_tokens_alone():
    """As the model that reads forwards, given rows turned by hand."""
    backwards, forwards = build(SHAPES["lstm, reversed"]), build(SHAPES["lstm"])
    turned = torch.tensor([[3, 7, 6, 5, 0, 0], [3, 12, 11, 10, 9, 8], [3, 0, 0, 0, 0, 0]])
    assert torch.equal(logits(backwards), logits(forwards, turned))


def test_alignments_are_shares_of_the_real_tokens():
    model = build(ATTENTION)
    shares = model.alignments(model.encode(SOURCE, LENGTHS), TARGET)
    torch.testing.assert_close(shares.sum(2), torch.ones(3, 4))
    assert shares.shape == (3, 4, 6) and (shares[0, :, :4] > 0).all()
    assert not shares[0, :, 4:].any() and not shares[2, :, 1:].any()
    assert build(GRU_SHAPE).alignments(None, TARGET) is None


def test_dropout_is_the_same_by_the_same_key_and_only_in_training():
    for config in (GRU_SHAPE, LSTM_SHAPE, ATTENTION):
        model = build(replace(config, dropout=0.5))
        outputs = []
        for _ in range(2):
            seed_dropout(3)
            outputs.append(logits(model))
        assert torch.equal(*outputs)
        assert not torch.equal(logits(model), outputs[0])
        model.eval()
        assert torch.equal(logits(model), logits(build(config)))


def test_in_bf16_it_is_near_float32(model):
    with torch.no_grad():
        wanted = logits(model)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found = logits(model)
    # bf16 keeps 8 bits; logits are below 4
    torch.testing.assert_close(found.float(), wanted, atol=0.06, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_vocab_size": 19}, "20 source and 19 target pieces"),
        ({"form": "tree"}, "`form='tree'`: known are gru, lstm"),
        ({"form": "lstm"}, "`embedding_size=6` and `hidden_size=8`"),
    ],
)
def test_shapes_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(GRU_SHAPE, **change)
    if "target_vocab_size" in change:
        with pytest.raises(ValueError, match=message):
            replace(ATTENTION, **change)
