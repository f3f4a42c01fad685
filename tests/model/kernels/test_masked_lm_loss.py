"""The loss beside float64's plain cross-entropy: the kernel, and the device's form, here on a CPU.

The device's form runs wherever no kernel does: in `without_kernels`, compiled, or in float64.
"""

import pytest
import torch
import torch.nn.functional as F

from bertsmith.model.kernels import masked_lm_loss as module
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.model.kernels.masked_lm_loss import UNUSED, masked_lm_loss

from .harness import assert_as_float64

H, V = 32, 700  # 700 is not a multiple of 64
# Error norm over norm. bf16: logits, softmax or its gradient, and products are rounded to 2^-9.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
BLOCKS = pytest.mark.parametrize("block", [8192, 7])
MEASURING = pytest.mark.parametrize("measuring", [torch.no_grad, torch.inference_mode])


def device_loss(*given):
    with without_kernels():
        return masked_lm_loss(*given)


def inputs(count, dtype=torch.float32):
    """(hidden, table, bias, labels); numbers of so many digits, in float32 or float64."""
    generator = torch.Generator().manual_seed(count)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.randn(count, H, generator=generator).to(dtype).to(wide)
    table = (0.5 * torch.randn(V, H, generator=generator)).to(dtype).to(wide)
    bias = torch.randn(V, generator=generator).to(wide)
    labels = torch.randint(V, (count,), generator=generator)
    labels[:5] = (hidden[:5] @ table.t() + bias).argmax(1)  # some that are right
    return hidden, table, bias, labels


def check(function, dtype, unused=False, shares=None):
    """Loss, gradients of a third of it and right predictions are those of float64; `shares` are how
    much each loss counts."""
    hidden, *weights, labels = inputs(40, dtype)
    if unused:
        labels[3::4] = UNUSED
    rights = []

    def ours(*leaves):
        loss, right = function(*leaves, labels, shares)
        rights.append(right.item())
        return loss

    def exact(hidden, table, bias):
        logits = hidden @ table.t() + bias
        rights.append((logits.argmax(1) == labels).sum().item())
        if shares is None:
            return F.cross_entropy(logits, labels, reduction="sum")
        return (shares * F.cross_entropy(logits, labels, reduction="none")).sum()

    tensors, third = [hidden.to(dtype), *weights], torch.tensor(1 / 3, dtype=torch.float64)
    found = assert_as_float64(TOLERANCE[dtype], ours, exact, tensors, third)
    assert [part.dtype for part in found[1:]] == [part.dtype for part in tensors]
    assert rights[0] == rights[1] >= 4


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("function", "name", "block"),
    [
        (masked_lm_loss, "BLOCK", 512),
        (masked_lm_loss, "BLOCK", 7),
        (device_loss, "CUDA_BLOCK", 8192),
        (device_loss, "CUDA_BLOCK", 7),
    ],
    ids=["kernel", "kernel in blocks", "device", "device in blocks"],
)
def test_loss_and_gradients_equal_float64(function, name, block, dtype, monkeypatch):
    monkeypatch.setattr(module, name, block)
    check(function, dtype, unused=function is device_loss)


@pytest.mark.parametrize("function", [masked_lm_loss, device_loss], ids=["kernel", "device"])
def test_each_loss_counts_as_much_as_its_weight(function):
    check(function, torch.float32, function is device_loss, torch.rand(40))


@pytest.mark.slow
@BLOCKS
def test_the_devices_form_can_be_compiled_whole(block, monkeypatch):
    monkeypatch.setattr(module, "CUDA_BLOCK", block)
    torch._dynamo.reset()
    compiled = torch.compile(masked_lm_loss, fullgraph=True, dynamic=False)
    check(compiled, torch.float32, unused=True)


@pytest.mark.slow
def test_the_measuring_form_can_be_compiled_whole():
    torch._dynamo.reset()
    hidden, table, bias, labels = inputs(40, torch.float64)
    labels[3::4] = UNUSED
    expected = [part.item() for part in masked_lm_loss(hidden, table, bias, labels)]
    compiled = torch.compile(masked_lm_loss, fullgraph=True, dynamic=False)
    with torch.no_grad():
        found = compiled(hidden, table.requires_grad_(), bias.requires_grad_(), labels)
    assert [part.item() for part in found] == pytest.approx(expected, rel=1e-12)


def test_under_autocast_products_are_bf16_and_the_bias_is_not_rounded():
    hidden, table, bias, labels = inputs(8)
    bias += 1000  # bf16 has steps of 4 here
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = masked_lm_loss(hidden, table, bias, labels)
    expected = F.cross_entropy(hidden @ table.t() + bias, labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("function", "count"), [(masked_lm_loss, 0), (device_loss, 0), (device_loss, 8)]
)
def test_no_masked_position_is_no_loss(function, count):
    hidden, table, bias, labels = inputs(8)
    table.requires_grad_()
    labels = torch.full_like(labels[:count], UNUSED)
    loss, right = function(hidden[:count], table, bias, labels)
    loss.backward()
    assert loss == 0 and right == 0 and not table.grad.any()


def measure(measuring, given, before):
    """The loss as in training, then `before`, then only measured: the same, without a gradient."""
    hidden, table, bias, labels = given
    given = hidden, table.requires_grad_(), bias.requires_grad_(), labels
    expected = [part.item() for part in masked_lm_loss(*given)]
    before()
    with measuring():
        found = masked_lm_loss(*given)
    assert not found[0].requires_grad and [part.item() for part in found] == expected


@MEASURING
def test_when_it_is_only_measured_no_gradient_is_made(measuring, monkeypatch):
    # torch.mm makes those of the hidden vectors
    measure(measuring, inputs(40), lambda: monkeypatch.setattr(torch, "mm", None))


@MEASURING
@BLOCKS
def test_when_it_is_only_measured_the_device_makes_no_gradient(measuring, block, monkeypatch):
    monkeypatch.setattr(module, "CUDA_BLOCK", block)
    made, real = [], module._softmax

    def noting(*given):
        made.append((found := real(*given))[2] is not None)
        return found

    def before():
        assert made and all(made)
        made.clear()

    monkeypatch.setattr(module, "_softmax", noting)
    given = inputs(40, torch.float64)  # takes the device's way
    given[3][3::4] = UNUSED
    measure(measuring, given, before)
    assert made and not any(made)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_loss(value):
    hidden, table, bias, labels = inputs(4)
    hidden[2, 3] = value
    assert not masked_lm_loss(hidden, table, bias, labels)[0].isfinite()


def test_the_kept_gradient_is_given_once():
    """It is scaled where it lies; a second backward pass would scale it again, and is refused."""
    hidden, table, bias, labels = inputs(4)
    loss, _ = masked_lm_loss(hidden, table.requires_grad_(), bias, labels)
    (loss / 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss / 2).backward()
