"""The loss in tiles beside float64's plain cross-entropy, and beside the kernel of other CPUs."""

import math

import pytest
import torch
import torch.nn.functional as F

from bertsmith.model.kernels import masked_lm_loss as module
from bertsmith.model.kernels.llvm.tiled_masked_lm import has_tiled_loss, pieces_at_once
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss

from ..harness import error

pytestmark = pytest.mark.skipif(
    not has_tiled_loss(torch.zeros(1, 32, dtype=torch.bfloat16)), reason="no tiles of bf16"
)


def inputs(count, size, pieces, bias=torch.float32):
    generator = torch.Generator().manual_seed(count)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, table = normal(count, size).bfloat16(), (0.3 * normal(pieces, size)).bfloat16()
    labels = torch.randint(pieces, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    weights[1::7] = 0
    return [hidden, table, normal(pieces).to(bias)], labels, weights


def found_and_expected(leaves, labels, weights, scale=0.3):
    """(Loss, right predictions, gradients of `scale` times the loss), ours and float64's."""
    outcomes = []
    for dtype in (None, torch.float64):
        own = [leaf.clone().to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
        if dtype is None:
            loss, right = masked_lm_loss(*own, labels, weights)
        else:
            logits = own[0] @ own[1].t() + own[2]
            loss = (weights * F.cross_entropy(logits, labels, reduction="none")).sum()
            right = (logits.argmax(1) == labels).sum()
        (loss * scale).backward()
        outcomes.append([loss.item(), right.item(), *(leaf.grad for leaf in own)])
    return outcomes


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "size", "pieces"),
    [(1, 32, 33), (5, 64, 300), (33, 96, 515), (307, 128, 1000), (700, 32, 256), (5000, 32, 90)],
)
def test_loss_and_gradients_equal_float64(count, size, pieces, bias):
    leaves, labels, weights = inputs(count, size, pieces, bias)
    labels[:3] = (leaves[0].double() @ leaves[1].double().t() + leaves[2]).argmax(1)[:3]
    for scale in (0.3, -2.0):
        found, expected = found_and_expected(leaves, labels, weights, scale)
        # products are float32 sums of exact products, the exponential is right to 4e-6
        assert found[0] == pytest.approx(expected[0], rel=2e-5) and found[1] == expected[1]
        # softmax and results are rounded to 2^-9
        assert all(error(*pair) < 5e-3 for pair in zip(found[2:], expected[2:], strict=True))
        assert [part.dtype for part in found[2:]] == [part.dtype for part in leaves]


def test_a_late_piece_may_be_far_above_the_first_ones():
    leaves, labels, weights = inputs(40, 32, 700)
    leaves[2][650] += 300  # e^300 is beyond float32
    labels[5], weights[5] = 650, 1
    found, expected = found_and_expected(leaves, labels, weights)
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and found[1] == expected[1] == 1
    assert all(error(*pair) < 5e-3 for pair in zip(found[2:], expected[2:], strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", range(3))
def test_what_is_not_finite_is_not_hidden(bad, where):
    leaves, labels, weights = inputs(40, 32, 700)
    leaves[where][3], weights[3], labels[labels == 3] = bad, 1, 4
    leaves = [leaf.requires_grad_() for leaf in leaves]
    loss, _ = masked_lm_loss(*leaves, labels, weights)
    assert not math.isfinite(loss.item())
    loss.backward()
    assert not leaves[0].grad.isfinite().all()


@pytest.mark.parametrize("label", [-100, 700])
def test_a_label_is_a_piece(label):
    leaves, labels, weights = inputs(40, 32, 700)
    labels[7] = label
    with pytest.raises(AssertionError):
        masked_lm_loss(*leaves, labels, weights)


def test_a_float32_table_has_a_float32_gradient():
    leaves, labels, weights = inputs(40, 32, 700)
    exact = [leaves[0], leaves[1].float(), leaves[2]]
    found, expected = found_and_expected(exact, labels, weights)
    assert found[3].dtype == torch.float32 and error(found[3], expected[3]) < 5e-3


def test_other_cpus_have_the_other_kernel(monkeypatch):
    leaves, labels, weights = inputs(40, 64, 700)
    here, _ = found_and_expected(leaves, labels, weights)
    monkeypatch.setattr(module, "has_tiled_loss", lambda hidden: False)
    other, _ = found_and_expected(leaves, labels, weights)
    assert here[0] != other[0] and here[0] == pytest.approx(other[0], rel=5e-3)
    assert all(error(*pair) < 1e-2 for pair in zip(here[2:], other[2:], strict=True))


def test_many_positions_take_fewer_pieces_at_once():
    assert [pieces_at_once(count) for count in (32, 512, 1024, 5024, 1 << 20)] == [
        *(256, 256, 128, 32, 32)
    ]
