"""The int8 loss beside float64's cross-entropy: its drawn gradient on average and by the piece."""

import math

import pytest
import torch
import torch.nn.functional as F
from numba import njit

from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.kernels import masked_lm_loss as module
from bertsmith.model.kernels.elementwise import seed_dropout, without_kernels
from bertsmith.model.kernels.llvm import blocks, int8_masked_lm
from bertsmith.model.kernels.llvm.int8_masked_lm import UNITS
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.model.kernels.quantized_linear import has_int8, use_int8

from ..harness import error, stored_block

pytestmark = pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")
SHAPES = pytest.mark.parametrize(
    ("count", "size", "pieces"),
    [(1, 64, 33), (2, 64, 20), (5, 64, 320), (40, 128, 1000), (301, 192, 515)],
)


def inputs(count, size, pieces, dtype=torch.bfloat16):
    """([hidden, table, bias], labels, weights): normalized states, logits up to 10; all but the
    weights in that dtype."""
    generator = torch.Generator().manual_seed(count)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, table = normal(count, size).bfloat16(), (0.2 * normal(pieces, size)).bfloat16()
    labels = torch.randint(pieces, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    weights[1::7] = 0
    return [hidden.to(dtype), table.to(dtype), normal(pieces).to(dtype)], labels, weights


def ours(leaves, labels, weights, key=1, scale=0.3):
    """[loss, correct predictions, gradients of `scale` times the loss]."""
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    seed_dropout(key)
    loss, correct = masked_lm_loss(*own, labels, weights, int8=True)
    (scale * loss).backward()
    return [loss.item(), correct.item(), *(leaf.grad for leaf in own)]


def exact(leaves, labels, weights, scale=0.3):
    own = [leaf.double().requires_grad_() for leaf in leaves]
    logits = own[0] @ own[1].t() + own[2]
    loss = (weights * F.cross_entropy(logits, labels, reduction="none")).sum()
    (scale * loss).backward()
    correct = (logits.argmax(1) == labels).sum().item()
    return [loss.item(), correct, *(leaf.grad for leaf in own)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@SHAPES
def test_loss_equals_float64s_and_gradients_do_on_average(count, size, pieces, dtype):
    leaves, labels, weights = inputs(count, size, pieces, dtype)
    labels[:3] = (leaves[0].double() @ leaves[1].double().t() + leaves[2]).argmax(1)[:3]
    for scale in (0.3, -2.0):
        expected = exact(leaves, labels, weights, scale)
        draws = [ours(leaves, labels, weights, key, scale) for key in range(100)]
        loss, correct, *_, by_bias = draws[0]
        assert by_bias.dtype == leaves[2].dtype
        # int8 makes logits, of deviation 2 to 3, off by 1%: some 0.03, evenly so
        assert loss == pytest.approx(expected[0], rel=1e-2) and abs(correct - expected[1]) <= 1
        assert error(by_bias, expected[4]) < 0.03  # of softmax, which is not drawn
        for found, one in zip(zip(*draws, strict=True), expected, strict=True):
            if isinstance(one, torch.Tensor):
                assert found[0].dtype == dtype
                # one draw is off by up to 1 / sqrt(UNITS), 6%; the mean of 100 by a tenth of that
                assert error(found[0], one) < 0.09
                assert error(torch.stack(found).double().mean(0), one) < 0.03


@SHAPES
def test_a_pieces_probabilities_are_off_by_less_than_a_unit_in_all(count, size, pieces):
    leaves, labels, _ = inputs(count, size, pieces, torch.float32)
    leaves[0][:, 0] = 1  # so that the table's gradient there is the sum of what was drawn
    *_, by_table, by_bias = ours(leaves, labels, None, scale=1)
    drawn = by_table[:, 0]
    rounding = by_bias.abs() * 2**-8  # of bf16
    assert ((drawn - by_bias).abs() <= 1 / UNITS + rounding + 1e-4).all()
    assert not torch.equal(drawn, by_bias)
    units = UNITS * drawn  # whole numbers, to what bf16 has of them
    assert ((units - units.round()).abs() <= units.abs() * 2**-8).all()


def test_the_gradient_depends_on_the_passs_key_alone():
    given = inputs(40, 64, 700)
    one, again, other = (ours(*given, key=key) for key in (1, 1, 2))
    assert all(torch.equal(*pair) for pair in zip(one[2:], again[2:], strict=True))
    assert not torch.equal(one[3], other[3]) and one[:2] == other[:2]
    assert torch.equal(one[4], other[4])  # the bias's is not drawn


def test_a_late_piece_may_be_far_above_the_first_ones():
    leaves, labels, weights = inputs(40, 64, 700)
    leaves[2][650] += 300  # e^300 is beyond float32
    labels[5], weights[5] = 650, 1
    found, expected = ours(leaves, labels, weights), exact(leaves, labels, weights)
    assert found[0] == pytest.approx(expected[0], rel=1e-3) and found[1] == expected[1] == 1
    assert all(error(*pair) < 1e-2 for pair in zip(found[2:], expected[2:], strict=True))


def test_a_label_may_be_far_below_all():
    leaves, labels, weights = inputs(40, 64, 700)
    leaves[2][labels[5]] -= 200  # its power of two is 0
    weights[5] = 1
    found, expected = ours(leaves, labels, weights), exact(leaves, labels, weights)
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert all(error(*pair) < 0.09 for pair in zip(found[2:], expected[2:], strict=True))


def test_sums_of_tiles_go_through_memory(monkeypatch):
    given = inputs(40, 64, 700)
    expected = ours(*given)
    monkeypatch.setattr(blocks, "in_tiles", lambda dtype: True)
    monkeypatch.setattr(blocks, "_tile_block", stored_block)
    for name in ("begin", "end"):  # which would set the tiles up
        monkeypatch.setattr(int8_masked_lm, name, njit(lambda like: None))
    find = njit(int8_masked_lm.find_powers.py_func)
    monkeypatch.setattr(int8_masked_lm, "find_powers", find)
    found = ours(*given)
    assert found[:2] == expected[:2]
    assert all(torch.equal(*pair) for pair in zip(found[2:], expected[2:], strict=True))


def test_other_losses_are_not_drawn(monkeypatch):
    (leaves, *given), narrow = inputs(40, 64, 700), inputs(40, 96, 700)

    def is_drawn(leaves, labels, weights):
        one, other = (ours(leaves, labels, weights, key) for key in (1, 2))
        return not torch.equal(one[3], other[3])

    assert is_drawn(leaves, *given) and not is_drawn(*narrow)  # 96 is no multiple of 64
    nothing = [leaves[0][:0], *leaves[1:]], given[0][:0], given[1][:0]
    assert ours(*nothing)[0] == 0
    with without_kernels():
        assert not is_drawn(leaves, *given)
    monkeypatch.setattr(module, "INT8_LOGITS", 40 * 700 - 1)
    assert not is_drawn(leaves, *given)


@pytest.mark.parametrize("wrong", [-100, 700])
def test_labels_are_pieces(wrong):
    leaves, labels, weights = inputs(40, 64, 700)
    labels[7] = wrong
    with pytest.raises(AssertionError):
        ours(leaves, labels, weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", range(3))
def test_what_is_not_finite_is_not_hidden(bad, where):
    leaves, labels, weights = inputs(40, 64, 700)
    leaves[where][3], weights[3], labels[labels == 3] = bad, 1, 4
    loss, _, *gradients = ours(leaves, labels, weights)
    assert not math.isfinite(loss)
    assert not any(gradient.isfinite().all() for gradient in gradients)


def test_a_model_in_int8_draws_and_is_measured_exactly():
    config = config_for("tiny", vocab_size=300, dropout=0.0, attention_dropout=0.0)
    model = PreTrainingModel(config)
    assert not model.int8_loss
    use_int8(model)
    assert model.int8_loss
    states = torch.randn(50, config.hidden_size, dtype=torch.bfloat16)
    labels = torch.randint(300, (50,))

    def gradient(key):
        seed_dropout(key)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model._token_loss(states, labels)
        loss.backward()
        return model.shared_table().grad

    assert not torch.equal(gradient(1), gradient(2))
    with torch.no_grad():
        hidden = model.mlm.transform(states.float())
        plain = F.cross_entropy(hidden @ model.shared_table().t() + model.mlm.bias, labels)
        assert (model._token_loss(states.float(), labels)[0] / 50).item() == pytest.approx(
            plain.item(), rel=1e-5
        )


def test_the_language_model_of_a_task_in_int8_draws_too():
    config = config_for("tiny", 300, causal=True, dropout=0.0, attention_dropout=0.0)
    model = SequenceClassifier(config, 2)
    ids = torch.randint(300, (8, 30), generator=torch.Generator().manual_seed(1))
    rows = ids, torch.zeros_like(ids), torch.arange(23, 31)
    exact = model.with_next_tokens(*rows)[1].item()
    use_int8(model)

    def gradient(key):
        seed_dropout(key)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.with_next_tokens(*rows)[1]
        loss.backward()
        assert loss.item() == pytest.approx(exact, rel=1e-3)  # layers in int8; 1e-4 was seen
        return model.encoder.embeddings.token.weight.grad

    assert not torch.equal(gradient(1), gradient(2))
