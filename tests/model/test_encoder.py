"""The encoder against properties that hold for any weights: who sees whom, what may not matter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bertsmith.model import variants
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.model.variants import Attend

V, B, S = 50, 3, 9
LENGTHS = torch.tensor([9, 4, 6])
FULL_OR_PADDED = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
OPTIONS = [{}, {"pre_norm": True}, {"gated": True}, {"pre_norm": True, "gated": True}]
NAMES = ["plain", "pre_norm", "gated", "both"]
VARIANTS = pytest.mark.parametrize("variant", OPTIONS, ids=NAMES)


def config(**changes):
    shape = {"vocab_size": V, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
    shape |= {"intermediate_size": 64, "max_positions": 16, "dropout": 0.0}
    return ModelConfig(**(shape | {"attention_dropout": 0.0} | changes))


def encoder(**changes):
    return initialize(Encoder(config(**changes)), 0.2, torch.Generator().manual_seed(0))


def inputs(seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (B, S), generator=generator)
    return ids, torch.randint(2, (B, S), generator=generator)


@CAUSAL
def test_what_stands_in_the_padding_does_not_matter(causal):
    model, (ids, types) = encoder(causal=causal), inputs()
    real = torch.arange(S) < LENGTHS[:, None]
    other_ids, other_types = inputs(seed=7)
    expected = model(ids, types, LENGTHS)
    mixed = torch.where(real, ids, other_ids), torch.where(real, types, other_types)
    hidden = model(*mixed, LENGTHS)
    assert torch.equal(hidden[real], expected[real])
    alone = model(ids[1:2, : LENGTHS[1]], types[1:2, : LENGTHS[1]])
    torch.testing.assert_close(alone[0], expected[1, : LENGTHS[1]], rtol=1e-5, atol=1e-5)


def test_all_layers_are_the_embeddings_and_each_layer_in_turn():
    model, (ids, types) = encoder(), inputs()
    states = model(ids, types, all_layers=True)
    assert len(states) == 4
    assert torch.equal(states[0], model.embeddings(ids, types))
    attend = Attend(model.config.num_heads, dropout=0.0)
    for layer, before, after in zip(model.layers, states, states[1:], strict=False):
        assert torch.equal(layer(before, attend), after)
    assert torch.equal(states[-1], model(ids, types))


def test_segments_default_to_the_first():
    model, (ids, _) = encoder(), inputs()
    assert torch.equal(model(ids), model(ids, torch.zeros_like(ids)))


def test_dropout_acts_in_training_only_and_at_the_given_rate():
    model, (ids, types) = encoder(dropout=0.25), inputs()
    assert torch.equal(model.eval()(ids, types), model(ids, types))
    wide = torch.zeros(1, 16, dtype=torch.int64)
    dropped = torch.stack([model.train().embeddings(wide, wide) == 0 for _ in range(50)])
    assert abs(dropped.float().mean() - 0.25) < 0.02


def test_a_row_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="a row of 17 tokens, but the model knows 16 positions"):
        encoder()(torch.zeros(1, 17, dtype=torch.int64))


def test_the_language_model_head_reads_only_the_chosen_positions():
    """The whole way by hand: every position through the encoder, then the heads at the chosen."""
    model = initialize(PreTrainingModel(config()), 0.2, torch.Generator().manual_seed(0))
    nn.init.normal_(model.mlm.bias, generator=torch.Generator().manual_seed(1))
    ids, types = inputs()
    positions = torch.tensor([[1, 3], [2, 0], [5, 0]])
    chosen = torch.tensor([0, 1, 2, 4])  # the two real ones of row 0, the first of rows 1 and 2
    output = model(ids, types, LENGTHS, positions, chosen)

    hidden = model.encoder(ids, types, LENGTHS)
    at = torch.stack([hidden[0, 1], hidden[0, 3], hidden[1, 2], hidden[2, 5]])
    transformed = model.mlm.norm(F.gelu(model.mlm.dense(at)))
    logits = transformed @ model.encoder.embeddings.token.weight.T + model.mlm.bias
    torch.testing.assert_close(output.mlm_logits, logits, rtol=1e-5, atol=1e-5)
    pooled = torch.tanh(model.pooler.dense(hidden[:, 0]))
    torch.testing.assert_close(output.nsp_logits, model.nsp(pooled), rtol=1e-5, atol=1e-5)
    everything = model(ids, types, LENGTHS, positions)
    torch.testing.assert_close(everything.mlm_logits[chosen], logits, rtol=1e-5, atol=1e-5)


def test_pieces_of_rows_are_left_out_with_the_other_kernels(monkeypatch):
    """`doctor` measures PyTorch's paths, one by one, behind `without_kernels`."""
    asked = []
    monkeypatch.setattr(variants, "has_flash", lambda *arguments: asked.append(1))
    model, ids = Encoder(config()).eval(), torch.ones(B, S, dtype=torch.int64)
    model(ids, lengths_B=LENGTHS)
    assert asked == [1]
    with without_kernels():
        model(ids, lengths_B=LENGTHS)
    assert asked == [1]


def test_what_attends_is_hashed_as_an_object():
    """PyTorch 2.11 hashes it while it compiles, before it has its fields; tensors have no ==."""
    assert variants.Attend.__hash__ is object.__hash__
