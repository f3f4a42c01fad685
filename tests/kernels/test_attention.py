import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bertsmith.base.processes import keep_freed_memory
from bertsmith.model.kernels.attention import _Attention, attention, softmax_gradient_rows
from bertsmith.model.kernels.elementwise import rows, seed_dropout

# Norm of the error over the norm of the float64 result. float32: its rounding, some sums long.
# bf16: 2^-9 a rounding; scores, probabilities and their gradient are each rounded once more than
# in a fused kernel, and the scores here reach 20, where a rounding moves a probability by 4%.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
B, A, D = 3, 2, 64


def inputs(queries, keys, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, A, queries, D), (B, A, keys, D), (B, A, keys, D), (B, A, queries, D)
    return [1.5 * torch.randn(shape, generator=generator) for shape in shapes]


def masks(queries, keys):
    lengths = torch.tensor([keys, keys // 2, 1])
    padded = (torch.arange(keys) < lengths[:, None])[:, None, None, :]
    first = keys - queries
    causal = (torch.arange(keys) <= first + torch.arange(queries)[:, None])[None, None]
    return {"none": None, "padded": padded, "causal": causal, "both": padded & causal}


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def run(function, tensors, dtype):
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors[:3]]
    result = function(*leaves)
    result.backward(tensors[3].to(dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["none", "padded", "causal", "both"])
@pytest.mark.parametrize("shape", [(32, 32), (7, 33), (1, 5)])
def test_forward_and_backward_equal_float64(dtype, kind, shape):
    tensors = [tensor.to(dtype).float() for tensor in inputs(*shape)]  # the same rounded inputs
    mask = masks(*shape)[kind]

    def exact(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = run(lambda q, k, v: attention(q, k, v, mask), tensors, dtype)
    for actual, expected in zip(found, run(exact, tensors, torch.float64), strict=True):
        assert error(actual, expected) < TOLERANCE[dtype]


def test_causal_without_a_mask_and_strided_inputs():
    tensors = inputs(16, 16)
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    found = run(lambda q, k, v: attention(q, k, v, causal=True), strided, torch.float32)
    exact = run(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tensors,
        torch.float64,
    )
    for actual, expected in zip(found, exact, strict=True):
        assert error(actual, expected) < TOLERANCE[torch.float32]


def test_dropout_drops_its_share_and_its_gradient_is_that_of_the_same_mask():
    rate, (q, k, v, gradient) = 0.25, inputs(24, 40)
    identity = torch.eye(40).expand(B, A, -1, -1).contiguous()  # D = 40: values that show p
    seed_dropout(7)
    shares = _Attention.apply(q, k, identity, None, rate)
    plain = _Attention.apply(q, k, identity, None, 0.0)
    kept = shares != 0
    torch.testing.assert_close(shares[kept], plain[kept] / (1 - rate))
    count = kept.numel()
    dropped = count - kept.sum().item()
    assert abs(dropped - count * rate) < 5 * (count * rate * (1 - rate)) ** 0.5
    # the same key once more: as if the mask had been a constant
    weights = torch.softmax(q.double() @ k.double().transpose(2, 3) / D**0.5, -1)
    assert error(plain, weights) < TOLERANCE[torch.float32]

    def exact(q, k, v):
        p = torch.softmax(q @ k.transpose(2, 3) / D**0.5, -1)
        return (p * kept / (1 - rate)) @ v

    def ours(q, k, v):
        seed_dropout(7)
        return attention(q, k, v, dropout=rate)

    tensors = [q, k, v, gradient]
    found = run(ours, tensors, torch.float32)
    for actual, expected in zip(found, run(exact, tensors, torch.float64), strict=True):
        assert error(actual, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_score_that_is_not_a_number_is_not_hidden(sign, rate):
    q, k, v, _ = inputs(8, 8)
    q[1, 0, 3, 5] = sign * float("nan")
    result = attention(q.requires_grad_(), k, v, dropout=rate)
    assert result[1, 0, 3].isnan().all() and not result[0].isnan().any()


def test_without_a_gradient_pytorch_computes():
    q, k, v, _ = inputs(8, 8)
    assert attention(q, k, v).grad_fn is None
    np.testing.assert_array_equal(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_a_gradient_does_not_hang_on_where_arrays_lie():
    keep_freed_memory()  # as training does: arrays come to lie side by side
    random, held = np.random.default_rng(0), []
    for length in (9, 17):  # at these a few in thousands differed when a sum shared its loop
        scores = torch.randn(3, length, generator=torch.Generator().manual_seed(1))
        found = set()
        for _ in range(4000):
            held.append(np.empty(int(random.integers(1, 60)), np.float32))
            if len(held) > 60:
                held.pop(int(random.integers(len(held))))
            gradient, shares = scores.clone(), scores.softmax(-1)
            softmax_gradient_rows(rows(gradient), rows(shares), np.float32(0.125), np.float32(1))
            found.add(gradient.numpy().tobytes())
        assert len(found) == 1
