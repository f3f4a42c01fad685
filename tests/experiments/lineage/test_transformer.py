"""Our Transformer beside PyTorch's layers, its cached steps, and a task that it learns."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bertsmith.experiments.lineage.decode import DecodingSettings, Search, beam_search
from bertsmith.experiments.lineage.transformer import (
    EPSILON,
    DecoderLayer,
    Transformer,
    TransformerConfig,
    sinusoids,
)
from bertsmith.model.kernels.elementwise import seed_dropout
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.model.variants import Attend

V, H, F_SIZE, A = 23, 16, 24, 4
BOS, EOS = 1, 2
LENGTHS = torch.tensor([5, 1, 4])


def config(**changes):
    sizes = dict(hidden_size=H, num_layers=2, num_heads=A, intermediate_size=F_SIZE)
    given = dict(source_vocab_size=V, target_vocab_size=V, dropout=0.0, attention_dropout=0.0)
    return TransformerConfig(**{**given, **sizes, **changes})


def model(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    made = Transformer(config(**changes)).initialize(generator)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 1:  # biases and scales that are told apart
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return made


def rows(seed=1):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(3, V, (3, 5), generator=generator)
    source *= torch.arange(5) < LENGTHS[:, None]
    target = torch.randint(3, V, (3, 6), generator=generator)
    target[:, 0] = BOS
    return source, target


def torch_layer(kind, place):
    first = place == "pre"
    return kind(H, A, F_SIZE, 0.0, batch_first=True, layer_norm_eps=EPSILON, norm_first=first)


def pairs(ours, theirs, names):
    """(Our parameter, PyTorch's), some of which hold several of ours one below the other."""
    for name, other in names.items():
        for kind in ("weight", "bias"):
            joined = torch.cat([getattr(ours.get_submodule(own), kind) for own in name.split()])
            infix = "_" if other.endswith("in_proj") else "."
            yield name, kind, joined, theirs.get_parameter(f"{other}{infix}{kind}")


ENCODER = {
    "qkv": "self_attn.in_proj",
    "attention_output": "self_attn.out_proj",
    "attention_norm": "norm1",
    "intermediate": "linear1",
    "output": "linear2",
    "output_norm": "norm2",
}
DECODER = ENCODER | {
    "source_query source_key_value": "multihead_attn.in_proj",
    "source_output": "multihead_attn.out_proj",
    "source_norm": "norm2",
    "output_norm": "norm3",
}


def assert_like_pytorch(ours, theirs, names, run, run_theirs, inputs):
    """Results to 1e-5, gradients of inputs and weights to 1e-4 of their size."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        for name, kind, _, other in pairs(ours, theirs, names):
            sizes = [len(getattr(ours.get_submodule(own), kind)) for own in name.split()]
            for own, part in zip(name.split(), other.split(sizes), strict=True):
                getattr(ours.get_submodule(own), kind).copy_(part)
    found, gradients = [], []
    for function in (run, run_theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found.append(function(*leaves))
        found[-1].square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    for name, kind, _, other in pairs(ours, theirs, names):
        parts = [getattr(ours.get_submodule(own), kind).grad for own in name.split()]
        gradients[0].append(torch.cat(parts))
        gradients[1].append(other.grad)
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("place", ["pre", "post"])
def test_encoder_layer_is_pytorchs(place):
    torch.manual_seed(0)
    ours = Transformer(config(layer_norm=place)).encoder_layers[0]
    theirs = torch_layer(nn.TransformerEncoderLayer, place)
    seen_BS = torch.arange(5) < LENGTHS[:, None]
    attend = Attend(A, 0.0, seen_BS[:, None, None])

    def theirs_run(x):
        return theirs(x, src_key_padding_mask=~seen_BS) * seen_BS[:, :, None]

    def ours_run(x):
        return ours(x, attend) * seen_BS[:, :, None]

    assert_like_pytorch(ours, theirs, ENCODER, ours_run, theirs_run, [torch.randn(3, 5, H)])


@pytest.mark.parametrize("place", ["pre", "post"])
def test_decoder_layer_is_pytorchs(place):
    torch.manual_seed(0)
    ours = DecoderLayer(config(layer_norm=place).layer)
    theirs = torch_layer(nn.TransformerDecoderLayer, place)
    seen_BS = torch.arange(5) < LENGTHS[:, None]
    left = nn.Transformer.generate_square_subsequent_mask(6)

    def theirs_run(x, memory):
        return theirs(x, memory, tgt_mask=left, memory_key_padding_mask=~seen_BS)

    def ours_run(x, memory):
        attends = Attend(A, 0.0, causal=True), Attend(A, 0.0, seen_BS[:, None, None])
        read = ours.source_key_value(memory)
        return ours.decode(x, *attends, read, read[:, :0])[0]

    inputs = [torch.randn(3, 6, H), torch.randn(3, 5, H)]
    assert_like_pytorch(ours, theirs, DECODER, ours_run, theirs_run, inputs)


def test_positions_are_the_papers():
    found = sinusoids(3, 4, torch.empty(0, 6))
    for row, position in zip(found.tolist(), range(3, 7), strict=True):
        for number, value in enumerate(row):
            angle = position / 10_000 ** (2 * (number // 2) / 6)
            assert value == pytest.approx((math.cos if number % 2 else math.sin)(angle), abs=1e-6)


def test_embeddings_are_scaled_and_shared():
    made, apart = model(), model(source_vocab_size=9, shared=False)
    assert made.source_table is None and "source_table.weight" not in made.state_dict()
    assert made.output_weight is made.target_table.weight
    assert apart.source_table.weight.shape == (9, H)
    assert apart.output_weight is apart.target_table.weight
    found = made._embed(made.target_table, torch.tensor([[7, 7]]))
    expected = 4 * made.output_weight[7] + sinusoids(0, 2, found)  # 4 is the root of 16
    torch.testing.assert_close(found[0], expected)


def test_one_table_of_two_vocabularies_is_refused():
    with pytest.raises(ValueError, match="9 source and 23 target pieces cannot share one table"):
        config(source_vocab_size=9)
    with pytest.raises(ValueError, match="hidden_size 16 is not a multiple of num_heads 3"):
        config(num_heads=3)
    with pytest.raises(ValueError, match="`dropout=1.0`"):
        config(dropout=1.0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", ["pre", "post"])
def test_cached_steps_are_decode(training, place):
    made, (source, target) = model(layer_norm=place).train(training), rows()
    memory = made.encode(source, LENGTHS)
    whole_BTH, state = made.decode(memory, target), made.start(memory)
    for place in range(target.shape[1]):
        hidden_BH, state = made.step(memory, state, target[:, place])
        torch.testing.assert_close(hidden_BH, whole_BTH[:, place], atol=1e-5, rtol=1e-5)


def test_future_and_padding_are_not_seen():
    made, (source, target) = model(), rows()
    hidden_BTH = made.decode(made.encode(source, LENGTHS), target)
    other = target.clone()
    other[:, 4:] = 5
    changed_BTH = made.decode(made.encode(source, LENGTHS), other)
    assert torch.equal(changed_BTH[:, :4], hidden_BTH[:, :4])
    assert not torch.allclose(changed_BTH[:, 4:], hidden_BTH[:, 4:])
    longer = F.pad(source.where(source > 0, 9), (0, 3), value=8)  # other ids behind the end
    padded_BTH = made.decode(made.encode(longer, LENGTHS), target)
    torch.testing.assert_close(padded_BTH, hidden_BTH, atol=1e-5, rtol=1e-5)
    alone_1TH = made.decode(made.encode(source[1:2, :1], LENGTHS[1:2]), target[1:2])
    torch.testing.assert_close(alone_1TH, hidden_BTH[1:2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_alignments_are_the_last_layers_attention(place):
    made, (source, target) = model(layer_norm=place), rows()
    last, given = made.decoder_layers[-1], {}
    for name in ("source_query", "source_key_value"):
        part = last.get_submodule(name)
        part.register_forward_pre_hook(lambda _, inputs, name=name: given.update({name: inputs[0]}))
    found_BTS = made.alignments(made.encode(source, LENGTHS), target)
    theirs = nn.MultiheadAttention(H, A, batch_first=True)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            parts = [getattr(last.get_submodule(name), kind) for name in given]
            getattr(theirs, f"in_proj_{kind}").copy_(torch.cat(parts[::-1]))
    x_BTH, states_BSH = given["source_query"], given["source_key_value"]
    padding_BS = torch.arange(5) >= LENGTHS[:, None]
    _, expected_BTS = theirs(x_BTH, states_BSH, states_BSH, key_padding_mask=padding_BS)
    torch.testing.assert_close(found_BTS, expected_BTS)


def test_all_weights_come_from_the_generator():
    first, second = (
        Transformer(config()).initialize(torch.Generator().manual_seed(3)) for _ in range(2)
    )
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert ("norm.weight" in name) == bool((one == 1).all())
        assert name.endswith("bias") == bool((one == 0).all())
    assert first.output_weight.std().item() == pytest.approx(H**-0.5, rel=0.1)


def test_a_split_table_has_the_gradients_of_both_uses():
    """As replicas use it: lookups of one tensor, products with another."""
    source, target = rows()
    gradients = []
    for split in (False, True):
        made = model()
        table = made.shared_table()
        assert table is made.target_table.weight
        if split:
            made.split_table(table.detach().clone().requires_grad_())
        hidden = made.decode(made.encode(source, LENGTHS), target).flatten(0, 1)
        labels = target.flatten()
        masked_lm_loss(hidden, made.output_weight, made.output_bias, labels)[0].backward()
        gradients.append(table.grad.to_dense())
        if split:
            gradients[-1] = gradients[-1] + made.output_weight.grad
    torch.testing.assert_close(gradients[0], gradients[1])


def test_dropout_is_that_of_its_seed_and_off_in_evaluation():
    made, (source, target) = model(dropout=0.3, attention_dropout=0.2), rows()

    def hidden(seed):
        seed_dropout(seed)
        return made.decode(made.encode(source, LENGTHS), target)

    assert torch.equal(hidden(1), hidden(1)) and not torch.allclose(hidden(1), hidden(2))
    made.eval()
    assert torch.equal(hidden(1), hidden(2))


def test_bf16_is_near_float32():
    made, (source, target) = model(), rows()
    expected = made.decode(made.encode(source, LENGTHS), target)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        memory = made.encode(source, LENGTHS)
        found, state = made.decode(memory, target), made.start(memory)
        step, state = made.step(memory, state, target[:, 0])
        step, _ = made.step(memory, state, target[:, 1])
    assert found.dtype == step.dtype == torch.bfloat16
    # numbers of size 1 with 8 bits, through 6 sublayers
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0)
    torch.testing.assert_close(step.float(), expected[:, 1], atol=0.1, rtol=0)


def test_it_learns_to_reverse():
    """A task that needs positions, both attentions and the causal mask."""
    generator = torch.Generator().manual_seed(0)
    made = model(hidden_size=32, num_layers=1, intermediate_size=64, layer_norm="post")
    optimizer = torch.optim.Adam(made.parameters(), lr=5e-3, betas=(0.9, 0.98))
    lengths = torch.full((32,), 6)

    def drawn():
        words = torch.randint(3, V, (32, 5), generator=generator)
        return F.pad(words, (0, 1), value=EOS), F.pad(words.flip(1), (0, 1), value=EOS)

    for step in range(160):
        source, target = drawn()
        hidden = made.decode(made.encode(source, lengths), F.pad(target[:, :-1], (1, 0), value=BOS))
        loss, _ = masked_lm_loss(
            hidden.flatten(0, 1), made.output_weight, made.output_bias, target.flatten()
        )
        (loss / target.numel()).backward()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min((step + 1) / 50, (50 / (step + 1)) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    made.eval()
    source, target = drawn()
    with torch.inference_mode():
        found = beam_search(Search(made, BOS, EOS, DecodingSettings(beam=3)), source, lengths)
    right = sum(own[0].ids == row[:-1].tolist() for own, row in zip(found, target, strict=True))
    assert right >= 30, right
