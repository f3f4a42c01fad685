import pytest
import torch
import torch.nn.functional as F

from bertsmith.model.kernels import masked_lm_loss as module
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss

H, V = 32, 700
# Error norm over norm. bf16: logits, softmax and products are rounded to 2^-9 each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def inputs(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, H, generator=generator).to(dtype).float()
    table = (0.5 * torch.randn(V, H, generator=generator)).to(dtype).float()
    bias = torch.randn(V, generator=generator)
    return hidden, table, bias, torch.randint(V, (count,), generator=generator)


def exact(hidden, table, bias, labels, scale):
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, table, bias)]
    logits = leaves[0] @ leaves[1].t() + leaves[2]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    (scale * loss).backward()
    return loss.item(), (logits.argmax(1) == labels).sum().item(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block", [512, 7])
def test_loss_and_gradients_equal_float64(dtype, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    hidden, table, bias, labels = inputs(40, dtype)
    labels[:5] = (hidden[:5] @ table.t() + bias).argmax(1)  # some that are right
    loss, right, gradients = exact(hidden, table, bias, labels, 1 / 3)
    leaves = [hidden.to(dtype).requires_grad_(), table.requires_grad_(), bias.requires_grad_()]
    found, count = masked_lm_loss(*leaves, labels)
    (found / 3).backward()
    assert found.item() == pytest.approx(loss, rel=TOLERANCE[dtype]) and count.item() == right
    for leaf, expected in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        error = (leaf.grad.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]


def test_under_autocast_products_are_bf16_and_the_bias_is_not_rounded():
    hidden, table, bias, labels = inputs(8)
    bias += 1000  # bf16 has steps of 4 here
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = masked_lm_loss(hidden, table, bias, labels)
    expected = F.cross_entropy(hidden @ table.t() + bias, labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)


def test_no_masked_position_is_no_loss():
    hidden, table, bias, _ = inputs(3)
    table.requires_grad_()
    loss, right = masked_lm_loss(hidden[:0], table, bias, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss == 0 and right == 0 and not table.grad.any()


@pytest.mark.parametrize("measuring", [torch.no_grad, torch.inference_mode])
def test_when_it_is_only_measured_no_gradient_is_made(measuring, monkeypatch):
    hidden, table, bias, labels = inputs(40)
    weights = table.requires_grad_(), bias.requires_grad_()
    loss, right = masked_lm_loss(hidden, *weights, labels)
    monkeypatch.setattr(torch, "mm", None)  # which makes those of the hidden vectors
    with measuring():
        found, count = masked_lm_loss(hidden, *weights, labels)
    assert not found.requires_grad
    assert (found.item(), count.item()) == (loss.item(), right.item())


def test_what_is_not_finite_shows_in_the_loss():
    for value in (float("nan"), -float("nan"), float("inf")):
        hidden, table, bias, labels = inputs(4)
        hidden[2, 3] = value
        loss, _ = masked_lm_loss(hidden, table, bias, labels)
        assert not loss.isfinite()


def test_other_types_take_the_plain_way():
    hidden, table, bias, labels = inputs(16)
    loss, right, _ = exact(hidden, table, bias, labels, 1.0)
    found, count = masked_lm_loss(hidden.double(), table.double(), bias.double(), labels)
    assert found.item() == pytest.approx(loss) and count.item() == right


def test_the_kept_gradient_is_given_once():
    """It is scaled where it lies; a second backward pass would scale it again, and is refused."""
    hidden, table, bias, labels = inputs(4)
    loss, _ = masked_lm_loss(hidden, table.requires_grad_(), bias, labels)
    (loss / 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss / 2).backward()
