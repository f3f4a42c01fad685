"""Two directions see nothing of each other, and each is an encoder alone; a BiLSTM sees both."""

import copy

import pytest
import torch

from bertsmith.model.config import ModelConfig, config_for, training_flops
from bertsmith.model.directions import TwoDirections, encoders
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import (
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
    Targets,
    TokenClassifier,
)
from bertsmith.model.initialization import initialize

B, S, H = 3, 7, 24
LENGTHS = torch.tensor([7, 4, 2])
CONFIG = ModelConfig(
    50, 2 * H, 2, 4, 64, max_positions=16, dropout=0.0, attention_dropout=0.0,
    causal=True, directions=2,
)  # fmt: skip


def made(kind, *outputs, **changes):
    config = ModelConfig(**vars(CONFIG) | changes)
    return initialize(kind(config, *outputs), 0.3, torch.Generator().manual_seed(0))


@pytest.fixture
def rows():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (B, S), generator=draw)
    return ids, torch.randint(2, (B, S), generator=draw), LENGTHS


def test_a_direction_sees_what_lies_before_it_alone(rows):
    encoder = made(TwoDirections)
    ids, types, _ = rows
    left, right = encoder(ids, types).chunk(2, dim=2)
    other_ids, other_types = ids.clone(), types.clone()
    other_ids[:, 3], other_types[:, 3] = (ids[:, 3] + 1) % 50, 1 - types[:, 3]
    other_left, other_right = encoder(other_ids, other_types).chunk(2, dim=2)
    assert torch.equal(left[:, :3], other_left[:, :3])
    assert torch.equal(right[:, 4:], other_right[:, 4:])
    assert not torch.isclose(left[:, 3:], other_left[:, 3:]).all(2).any()
    assert not torch.isclose(right[:, :4], other_right[:, :4]).all(2).any()


def test_no_gradient_comes_from_what_a_direction_does_not_see(rows):
    encoder = made(TwoDirections)
    vectors = encoder.embeddings.token(rows[0]).detach().requires_grad_()
    encoder.embeddings.token = torch.nn.Identity()
    left, right = encoder(vectors, rows[1]).chunk(2, dim=2)
    for states, seen in ((left[:, 3], slice(0, 4)), (right[:, 3], slice(3, S))):
        (gradient,) = torch.autograd.grad(states.square().sum(), vectors, retain_graph=True)
        is_seen = torch.zeros(S, dtype=torch.bool)
        is_seen[seen] = True
        assert torch.equal(gradient.abs().sum(dim=(0, 2)) > 0, is_seen)
    # nor do the weights of one have any part in the other
    left.sum().backward()
    assert not any(weight.grad.any() for weight in encoder.right.parameters())


def test_each_is_an_encoder_alone_and_right_to_left_is_its_mirror(rows):
    encoder = made(TwoDirections)
    swapped = copy.deepcopy(encoder)
    swapped.left, swapped.right = swapped.right, swapped.left
    ids, types, lengths = rows
    mirrored = [
        torch.stack(
            [
                torch.cat([row[:n].flip(0), row[n:]])
                for row, n in zip(x, lengths.tolist(), strict=True)
            ]
        )
        for x in (ids, types)
    ]
    there, back = encoder(*rows), swapped(*mirrored, lengths)
    alone = Encoder(CONFIG.one_direction)
    alone.load_state_dict(
        encoder.left.state_dict() | {"embeddings.token.weight": encoder.embeddings.token.weight}
    )
    by_itself = alone(*rows)
    for row, n in enumerate(lengths.tolist()):
        left, right = there[row, :n].chunk(2, dim=1)
        other_left, other_right = back[row, :n].flip(0).chunk(2, dim=1)
        torch.testing.assert_close(left, by_itself[row, :n])
        torch.testing.assert_close(left, other_right)
        torch.testing.assert_close(right, other_left)


@pytest.mark.parametrize(
    ("kind", "outputs"), [(SequenceClassifier, 3), (TokenClassifier, 3), (SpanPredictor, 2)]
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"bilstm": True}, {"bilstm": True, "directions": 1}, {"bilstm": True, "causal": False,
     "directions": 1}],
    ids=["two directions", "both", "LTR + BiLSTM", "BiLSTM"],
)  # fmt: skip
def test_padding_changes_nothing(rows, kind, outputs, changes):
    model = made(kind, outputs, **changes)
    logits = model(*rows)
    for row, n in enumerate(LENGTHS.tolist()):
        alone = model(rows[0][row : row + 1, :n], rows[1][row : row + 1, :n], None)
        found = logits[row : row + 1] if logits.dim() == 2 else logits[row : row + 1, :n]
        # sums of longer rows are cut otherwise
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_a_class_is_read_where_each_direction_has_seen_the_row(rows):
    model = made(SequenceClassifier, 3)
    states = model.encoder(*rows)
    expected = torch.stack(
        [torch.cat([x[n - 1, :H], x[0, H:]]) for x, n in zip(states, LENGTHS.tolist(), strict=True)]
    )
    ids, types, lengths = rows
    read = model.encoder(ids, types, lengths, model.positions(ids, lengths))[:, 0]
    torch.testing.assert_close(read, expected)
    # every token matters, from either end
    table = model.encoder.embeddings.token
    vectors = table(rows[0]).detach().requires_grad_()
    model.encoder.embeddings.token = torch.nn.Identity()
    model(vectors, *rows[1:]).square().sum().backward()
    is_token = torch.arange(S) < LENGTHS[:, None]
    assert torch.equal(vectors.grad.abs().sum(2) > 0, is_token)


def test_a_bilstm_shows_a_left_to_right_model_what_follows(rows):
    ids, types, _ = rows
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 50
    for bilstm in (False, True):
        model = made(TokenClassifier, 3, directions=1, bilstm=bilstm)
        changed = model(ids, types, None) != model(other, types, None)
        assert bool(changed[:, 0].any()) == bilstm


def test_the_loss_is_that_of_both_neighbours_of_a_token(rows):
    model = made(PreTrainingModel)
    ids, types, lengths = rows
    places = torch.tensor([0, 1, 2, 3, 4, S, S + 1])  # each predicts the token behind it
    labels = ids.flatten()[places + 1]
    found = model.losses(ids, types, lengths, Targets(None, places, labels, next_sentence=False))
    left, right = model.encoder(*rows).flatten(0, 1).chunk(2, dim=1)
    for (loss, correct), states in (
        ((found.mlm_loss, found.mlm_right), left[places]),
        ((found.rtl_loss, found.rtl_right), right[places + 2]),
    ):
        logits = model.mlm(states, model.shared_table())
        expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        torch.testing.assert_close(loss, expected)
        assert correct == (logits.argmax(1) == labels).sum()


def test_they_share_the_token_table_and_the_output_and_nothing_else():
    config = config_for("2x64", 100, causal=True, directions=2)
    one = config_for("2x64", 100, causal=True)
    count = {
        name: sum(weight.numel() for weight in PreTrainingModel(made).parameters())
        for name, made in (("two", config), ("one", one))
    }
    alone = PreTrainingModel(one)
    own = sum(
        weight.numel()
        for name, weight in alone.encoder.named_parameters()
        if name != "embeddings.token.weight"
    )
    pairs = 128 * 128 + 128 + 2 * 128 + 2 - (64 * 64 + 64 + 2 * 64 + 2)  # pooler and NSP, untrained
    assert count["two"] == count["one"] + own + pairs
    assert len(encoders(PreTrainingModel(config).encoder)) == 2
    assert (config.one_direction.hidden_size, config.one_direction.num_heads) == (64, 1)
    work = {"rows": 3, "length": 32, "outputs": 32, "predictions": 31}
    assert training_flops(config, **work) == 2 * training_flops(one, **work)


def test_flops_of_a_bilstm_are_those_of_its_products():
    plain, more = (made(TokenClassifier, 3, directions=1, bilstm=with_it) for with_it in (0, 1))
    weights = 2 * 4 * H * (2 * H + H)  # both directions, four gates, of inputs and states
    biases = 2 * 4 * H
    assert more.flops(2, 5) - plain.flops(2, 5) == 6 * 2 * 5 * (weights + biases)
    whole = training_flops(plain.config, 2, 5, outputs=5, predictions=0)
    assert plain.flops(2, 5) == whole
    assert made(SequenceClassifier, 3, directions=1).flops(2, 5) < whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"directions": 3}, "directions 3: known are 1 and 2"),
        ({"causal": False}, "directions 2: not for causal False"),
        ({"num_heads": 3}, "directions 2: not for .* 3, "),
        ({"directions": 1, "hidden_size": 9, "num_heads": 3, "bilstm": True}, "no half"),
    ],
)
def test_what_cannot_be_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig(**vars(CONFIG) | changes)
