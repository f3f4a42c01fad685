"""Pre-layer-norm, gated feed-forward and recomputed activations against forms written by hand.

Rows without padding against those with it.
"""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bertsmith.model import encoder as encoder_module
from bertsmith.model.encoder import Encoder
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels import unpadded
from bertsmith.model.kernels.elementwise import dropout_state, seed_dropout
from bertsmith.model.kernels.unpadded import (
    GroupedAttention,
    groups_of_rows,
    has_row_attention,
)

from .test_encoder import FULL_OR_PADDED, LENGTHS, VARIANTS, B, S, config, inputs

H, HEADS, F, LAYERS = 32, 4, 48, 3
MASKS = pytest.mark.parametrize(
    ("causal", "lengths"),
    list(itertools.product([False, True], [None, LENGTHS])),
    ids=["both ways", "padded", "causal", "causal padded"],
)


def encoder(dropout=0.0, **changes):
    """Every tensor is random, biases and LayerNorms too, so that none can be left out unseen."""
    settings = {"intermediate_size": F, "dropout": dropout, "attention_dropout": dropout}
    generator = torch.Generator().manual_seed(0)
    model = initialize(Encoder(config(**settings, **changes)), 0.2, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def norm(x, weights, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def dense(x, weights, name, rows=slice(None)):
    return x @ weights[f"{name}.weight"][rows].T + weights[f"{name}.bias"][rows]


def by_hand(weights, ids, types, lengths, causal, gelu, pre_norm=False, gated=False):
    """The whole encoder from its tensors alone, a row and a head at a time."""
    size = H // HEADS
    rows = []
    for row in range(B):
        x = weights["embeddings.token.weight"][ids[row]]
        x = x + weights["embeddings.segment.weight"][types[row]]
        x = norm(x + weights["embeddings.position.weight"][:S], weights, "embeddings.norm")
        hidden = torch.arange(S) >= (S if lengths is None else lengths[row])
        hidden = hidden.expand(S, S)
        if causal:
            hidden = hidden | torch.ones(S, S, dtype=torch.bool).triu(1)
        for number in range(LAYERS):
            at = f"layers.{number}"

            def attention(x, at=at, hidden=hidden):
                heads = []
                for head in range(HEADS):
                    q, k, v = (
                        dense(x, weights, f"{at}.qkv", slice(start, start + size))
                        for start in (head * size, H + head * size, 2 * H + head * size)
                    )
                    scores = (q @ k.T / math.sqrt(size)).masked_fill(hidden, -torch.inf)
                    heads.append(scores.softmax(1) @ v)
                return dense(torch.cat(heads, 1), weights, f"{at}.attention_output")

            def feed_forward(x, at=at):
                if gated:
                    up = dense(x, weights, f"{at}.gate_up", slice(F, 2 * F))
                    x = gelu(dense(x, weights, f"{at}.gate_up", slice(0, F))) * up
                else:
                    x = gelu(dense(x, weights, f"{at}.intermediate"))
                return dense(x, weights, f"{at}.output")

            if pre_norm:
                x = x + attention(norm(x, weights, f"{at}.attention_norm"))
                x = x + feed_forward(norm(x, weights, f"{at}.output_norm"))
            else:
                x = norm(x + attention(x), weights, f"{at}.attention_norm")
                x = norm(x + feed_forward(x), weights, f"{at}.output_norm")
        rows.append(norm(x, weights, "final_norm") if pre_norm else x)
    return torch.stack(rows)


GELU = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def gradients(model, hidden):
    """Of a random sum of the hidden states, by every parameter."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
    return torch.autograd.grad((hidden * weights).sum(), list(model.parameters()))


@MASKS
@VARIANTS
@pytest.mark.parametrize("activation", GELU)
def test_forward_and_backward_are_those_written_by_hand(activation, variant, causal, lengths):
    """In float64: what differs is the order of sums, about 1e-15 of a term, here up to 1e3."""
    settings = {"causal": causal, "activation": activation, **variant}
    model, (ids, types) = encoder(**settings).double(), inputs()
    hidden = model(ids, types, lengths)
    weights, gelu = dict(model.named_parameters()), GELU[activation]
    expected = by_hand(weights, ids, types, lengths, causal, gelu, **variant)
    torch.testing.assert_close(hidden, expected, rtol=1e-11, atol=1e-11)
    mine, theirs = gradients(model, hidden), gradients(model, expected)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@MASKS
@VARIANTS
@pytest.mark.parametrize("count", [1, 3, S])
def test_wanted_positions_and_all_layers_are_exact(count, variant, causal, lengths):
    model, (ids, types) = encoder(causal=causal, **variant).double(), inputs()
    positions = torch.randint(S, (B, count), generator=torch.Generator().manual_seed(2))
    rows = torch.arange(B)[:, None]
    everything = model(ids, types, lengths)
    states = model(ids, types, lengths, all_layers=True)
    assert len(states) == LAYERS + 1 and torch.equal(states[-1], everything)
    wanted = model(ids, types, lengths, positions)
    torch.testing.assert_close(wanted, everything[rows, positions], rtol=1e-12, atol=1e-12)
    mine = gradients(model, wanted)
    theirs = gradients(model, everything[rows, positions])
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    *_, last = model(ids, types, lengths, positions, all_layers=True)
    assert torch.equal(last, wanted)


@FULL_OR_PADDED
@VARIANTS
def test_a_causal_model_does_not_see_what_is_to_the_right(variant, lengths):
    """Bit by bit, at every position: other tokens and segments behind it change nothing."""
    model, (ids, types) = encoder(causal=True, **variant).eval(), inputs()
    other_ids, other_types = inputs(seed=8)
    with torch.no_grad():
        before = model(ids, types, lengths)
        for i in range(S):
            right = torch.arange(S) > i
            mixed = torch.where(right, other_ids, ids), torch.where(right, other_types, types)
            after = model(*mixed, lengths)
            assert torch.equal(after[:, : i + 1], before[:, : i + 1]), i
            asked = torch.full((B, 1), i)
            only = [model(*pair, lengths, asked) for pair in ((ids, types), mixed)]
            assert torch.equal(*only), i
        both_ways = encoder(**variant).eval()  # here such a change is seen
        mixed = torch.where(torch.arange(S) > 2, other_ids, ids)
        difference = (both_ways(mixed, types) - both_ways(ids, types)).abs().amax(2)
        assert (difference[:, :3] > 1e-4).all()


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@VARIANTS
def test_recomputed_activations_change_no_bit(variant, low):
    """With dropout as well: the second computation draws what the first has drawn."""
    model, (ids, types) = encoder(dropout=0.2, **variant).train(), inputs()
    positions = torch.tensor([[0, 3], [0, 2], [5, 0]])

    def run(wanted):
        torch.manual_seed(5)
        seed_dropout(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            hidden = model(ids, types, LENGTHS, wanted)
        drawn = dropout_state()
        result = [hidden, *gradients(model, hidden), torch.rand(1)]
        assert dropout_state() == drawn  # what comes after the backward pass draws on from here
        return result

    for wanted in (None, positions):
        model.activation_checkpointing = False
        expected = run(wanted)
        model.activation_checkpointing = True
        torch.testing.assert_close(run(wanted), expected, rtol=0, atol=0)


@VARIANTS
def test_recomputed_activations_keep_less_memory(variant):
    model, (ids, types) = encoder(dropout=0.1, **variant), inputs()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def kept():
        """Bytes of what the graph of a forward pass holds, parameters and their views left out."""
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(ids, types)
        return sum(storages.values()), hidden

    (plain, _), model.activation_checkpointing = kept(), True
    (less, _), states = kept(), B * S * H * 4
    # the inputs of the layers are what must be left, and the embeddings' own tensors
    assert LAYERS * states <= less < plain / 3
    model.eval()  # nothing to gain: evaluation keeps nothing
    with torch.no_grad():
        assert kept()[0] == 0


def test_what_a_model_does_not_use_it_does_not_have():
    names = {name for name, _ in encoder().named_parameters()}
    both = {name for name, _ in encoder(pre_norm=True, gated=True).named_parameters()}
    kinds = ("weight", "bias")
    gone = {name.split(".", 2)[-1] for name in names - both}
    assert gone == {f"intermediate.{kind}" for kind in kinds}
    gates = {f"layers.{n}.gate_up.{kind}" for n in range(LAYERS) for kind in kinds}
    assert both - names == gates | {f"final_norm.{kind}" for kind in kinds}
    assert encoder(gated=True).layers[0].gate_up.weight.shape == (2 * F, H)


# --- without padding -------------------------------------------------------------------------


@pytest.fixture
def taken_out(monkeypatch):
    """Padding is taken out of short rows too; with it a list of the tokens of each batch."""
    found, make = [], encoder_module.without_padding

    def without(*given):
        made = make(*given)
        found.append(made and ("all" if made.tokens_T is None else len(made.tokens_T)))
        return made

    monkeypatch.setattr(unpadded, "LEAST_LENGTH", 1)
    monkeypatch.setattr(encoder_module, "without_padding", without)
    return found


SOME = torch.tensor([[0, 2, 1], [1, 0, 0], [2, 5, 2]])
READ = pytest.mark.parametrize("positions", [None, SOME], ids=["all", "some"])


def states_and_gradients(model, lengths, positions, narrow=False):
    """Of real tokens, or of those at positions; without lengths rows have nine."""
    width = 9 if lengths is None else int(lengths.max())
    ids = torch.randint(50, (3, width), generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        states = model(ids, None, lengths, positions)
    real = torch.arange(width) < (width if lengths is None else lengths[:, None])
    states = states[real.expand(ids.shape)] if positions is None else states.flatten(0, 1)
    above = torch.randn(states.shape, generator=torch.Generator().manual_seed(4))
    (states.float() * above).sum().backward()
    return [states.detach().float(), *(parameter.grad for parameter in model.parameters())]


@VARIANTS
@READ
@pytest.mark.parametrize("lengths", [[9, 4, 6], [40, 3, 33], [70, 12, 64]], ids=str)
def test_without_padding_states_and_gradients_are_the_same(
    taken_out, monkeypatch, variant, positions, lengths
):
    """The rows make one, two and three groups of one width."""
    given = encoder(max_positions=80, **variant).train(), torch.tensor(lengths), positions
    found = states_and_gradients(*given)
    monkeypatch.setattr(unpadded, "LEAST_PADDING", 1.0)
    expected = states_and_gradients(*given)
    assert taken_out == [sum(lengths), None]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # sums in another order


@VARIANTS
@pytest.mark.parametrize(("by_rows", "causal"), [(True, False), (False, False), (True, True)])
@READ
@pytest.mark.parametrize("lengths", [[9, 4, 6], [40, 3, 33], [9, 9, 9], None], ids=str)
def test_states_without_padding_in_bf16_are_those_of_float32(
    taken_out, monkeypatch, variant, by_rows, causal, positions, lengths
):
    """By rows nothing is moved where there is no padding; else some fills up a multiple of 16."""
    if by_rows and not has_row_attention(torch.bfloat16, 32):
        pytest.skip("this processor's vectors multiply no bf16")
    if not by_rows:
        monkeypatch.setattr(unpadded, "has_row_attention", lambda *given: False)
    settings = {"hidden_size": 64, "num_heads": 2, "max_positions": 80, "causal": causal}
    model = encoder(**settings, **variant).train()
    given = model, None if lengths is None else torch.tensor(lengths), positions
    found, expected = (states_and_gradients(*given, narrow) for narrow in (True, False))
    if lengths is None or len(set(lengths)) == 1:
        assert taken_out[0] == ("all" if by_rows else None)
    else:
        total = sum(lengths)
        filled = min(-(-total // 16) * 16, 3 * max(lengths))
        assert taken_out[0] == (filled if by_rows else total)
    for ours, theirs in zip(found, expected, strict=True):
        # numbers of 8 bits in three layers; 0.031 was seen, in groups
        assert (ours - theirs).norm() < 0.05 * theirs.norm() + 1e-3


def test_without_padding_attention_has_the_gradient_of_the_probabilities_it_kept():
    """By differences: in a kept direction the loss changes as the gradients say."""
    lengths, heads, rate = np.array([9, 40, 5]), 4, 0.3
    groups = groups_of_rows(lengths, lengths, heads)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(54, 32, generator=generator) for _ in range(4)]
    *given, above = (tensor.requires_grad_(k < 3) for k, tensor in enumerate(tensors))

    def loss(*matrices):
        seed_dropout(7)  # the same probabilities are dropped
        return (GroupedAttention.apply(*matrices, groups, heads, rate) * above).sum()

    loss(*given).backward()
    for k, matrix in enumerate(given):
        along = torch.randn(matrix.shape, generator=generator)
        with torch.no_grad():
            moved = [
                loss(*(m + (step * along if n == k else 0) for n, m in enumerate(given)))
                for step in (-1e-2, 1e-2)
            ]
        by_difference = (moved[1] - moved[0]).item() / 2e-2
        assert (matrix.grad * along).sum().item() == pytest.approx(by_difference, rel=2e-2)
    plain = GroupedAttention.apply(*given, groups, heads, 0.0)
    seed_dropout(7)
    assert not torch.equal(GroupedAttention.apply(*given, groups, heads, rate), plain)


@pytest.mark.parametrize(
    "why", ["at rest", "causal", "little padding", "all layers", "short rows", "odd heads", "full"]
)
def test_padding_stays_where_taking_it_out_gains_nothing(taken_out, monkeypatch, why):
    lengths = torch.tensor([9, 9, 8]) if why == "little padding" else LENGTHS
    changes = {"causal": why == "causal"}
    if why == "odd heads":
        changes |= {"hidden_size": 24, "num_heads": 4}
    model = encoder(**changes)
    if why == "short rows":
        monkeypatch.setattr(unpadded, "LEAST_LENGTH", S + 1)
    ids, types = inputs()
    lengths = None if why == "full" else lengths
    with torch.no_grad() if why == "at rest" else contextlib.nullcontext():
        model(ids, types, lengths, all_layers=why == "all layers")
    assert taken_out == ([] if why == "all layers" else [None])


@pytest.mark.parametrize("narrow", [False, True])
def test_layers_computed_again_drop_the_same_without_padding(taken_out, narrow):
    model = encoder(hidden_size=64, num_heads=2, dropout=0.2).train()
    gradients = []
    for recomputed in (False, True):
        model.activation_checkpointing = recomputed
        model.zero_grad()
        seed_dropout(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            model(*inputs(), LENGTHS).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert taken_out == 2 * ([27] if narrow and has_row_attention(torch.bfloat16, 32) else [19])
    for once, again in zip(*gradients, strict=True):
        assert torch.equal(once, again)
