"""The device's form of the loss runs on any device; here on the CPU, beside float64."""

import pytest
import torch
import torch.nn.functional as F

from bertsmith.model.kernels import masked_lm_loss as module
from bertsmith.model.kernels.masked_lm_loss import UNUSED, masked_lm_loss

H, V = 32, 700  # 700 is not a multiple of 64
# Error norm over norm. bf16: logits, gradient of the logits and products are rounded to 2^-9 each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def inputs(count, dtype):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, H, generator=generator).to(dtype).double()
    table = (0.5 * torch.randn(V, H, generator=generator)).to(dtype).double()
    bias = torch.randn(V, generator=generator).double()
    labels = torch.randint(V, (count,), generator=generator)
    labels[:5] = (hidden[:5] @ table.t() + bias).argmax(1)  # some that are right
    labels[3::4] = UNUSED
    return hidden, table, bias, labels


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def check(function, dtype):
    hidden, table, bias, labels = inputs(40, dtype)
    exact = [tensor.clone().requires_grad_() for tensor in (hidden, table, bias)]
    logits = exact[0] @ exact[1].t() + exact[2]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    (loss / 3).backward()
    master = torch.promote_types(dtype, torch.float32)
    leaves = [hidden.to(dtype), table.to(master), bias.to(master)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    found, right = function(*leaves, labels)
    (found / 3).backward()
    assert found.item() == pytest.approx(loss.item(), rel=TOLERANCE[dtype])
    assert right.item() == (logits.argmax(1) == labels).sum().item()
    for leaf, expected in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, expected.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block", [8192, 7])
def test_loss_and_gradients_equal_plain_cross_entropy_in_float64(dtype, block, monkeypatch):
    monkeypatch.setattr(module, "CUDA_BLOCK", block)
    check(masked_lm_loss, dtype)


def test_without_any_prediction_the_loss_is_zero():
    hidden, table, bias, labels = inputs(8, torch.float32)
    table.requires_grad_()
    for some in (0, 8):
        loss, right = masked_lm_loss(
            hidden[:some], table, bias, torch.full_like(labels[:some], UNUSED)
        )
        loss.backward()
        assert loss == 0 and right == 0 and not table.grad.any()


@pytest.mark.parametrize("measuring", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("block", [8192, 7])
def test_when_it_is_only_measured_no_gradient_is_made(measuring, block, monkeypatch):
    monkeypatch.setattr(module, "CUDA_BLOCK", block)
    made, real = [], module._softmax

    def noting(*given):
        made.append((found := real(*given))[2] is not None)
        return found

    monkeypatch.setattr(module, "_softmax", noting)
    hidden, table, bias, labels = inputs(40, torch.float64)
    weights = table.requires_grad_(), bias.requires_grad_()
    loss, right = masked_lm_loss(hidden, *weights, labels)  # float64 takes the device's way
    assert made and all(made)
    made.clear()
    with measuring():
        found, count = masked_lm_loss(hidden, *weights, labels)
    assert made and not any(made)
    assert not found.requires_grad
    assert (found.item(), count.item()) == (loss.item(), right.item())


@pytest.mark.slow
def test_the_measuring_form_can_be_compiled_whole():
    torch._dynamo.reset()
    hidden, table, bias, labels = inputs(40, torch.float64)
    expected = [part.item() for part in masked_lm_loss(hidden, table, bias, labels)]
    compiled = torch.compile(masked_lm_loss, fullgraph=True, dynamic=False)
    with torch.no_grad():
        found = compiled(hidden, table.requires_grad_(), bias.requires_grad_(), labels)
    assert [part.item() for part in found] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("block", [8192, 7])
def test_it_can_be_compiled_whole(block, monkeypatch):
    monkeypatch.setattr(module, "CUDA_BLOCK", block)
    torch._dynamo.reset()
    check(torch.compile(masked_lm_loss, fullgraph=True, dynamic=False), torch.float32)
