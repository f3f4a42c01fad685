"""Attention of a CPU and of a GPU beside float64 and beside a mask."""

import contextlib
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from bertsmith.base.processes import keep_freed_memory
from bertsmith.model import variants
from bertsmith.model.config import config_for
from bertsmith.model.encoder import Encoder
from bertsmith.model.kernels import attention as attention_module
from bertsmith.model.kernels.attention import (
    attention,
    has_flash,
    row_pieces,
    softmax_gradient_rows,
)
from bertsmith.model.kernels.elementwise import rows, without_kernels

from .harness import assert_as_float64, assert_is_share, assert_near, run, to

# Norm of the error over the norm of the float64 result. float32: its rounding, some sums long.
# bf16: 2^-9 a rounding; scores, probabilities and their gradient are each rounded once more than
# in a fused kernel, and the scores here reach 20, where a rounding moves a probability by 4%.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
B, A, D = 3, 2, 64


def inputs(queries, keys, size=1.5):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, A, queries, D), (B, A, keys, D), (B, A, keys, D), (B, A, queries, D)
    return [size * torch.randn(shape, generator=generator) for shape in shapes]


def masks(queries, keys):
    lengths = torch.tensor([keys, keys // 2, 1])
    padded = (torch.arange(keys) < lengths[:, None])[:, None, None, :]
    first = keys - queries
    causal = (torch.arange(keys) <= first + torch.arange(queries)[:, None])[None, None]
    return {"none": None, "padded": padded, "causal": causal, "both": padded & causal}


def exact(mask=None, causal=False):
    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["none", "padded", "causal", "both"])
@pytest.mark.parametrize("shape", [(32, 32), (7, 33), (1, 5)])
def test_forward_and_backward_equal_float64(dtype, kind, shape):
    *tensors, above = to(dtype, inputs(*shape))
    mask = masks(*shape)[kind]
    ours = functools.partial(attention, mask=mask)
    assert_as_float64(TOLERANCE[dtype], ours, exact(mask), tensors, above)


def test_causal_without_a_mask_and_strided_inputs():
    *tensors, above = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(16, 16))
    ours = functools.partial(attention, causal=True)
    assert_as_float64(TOLERANCE[torch.float32], ours, exact(causal=True), tensors, above)


def dropped_attention(kept, rate, mask=None):
    """By operators, with the probabilities that were kept given."""

    def compute(q, k, v):
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) * kept / (1 - rate)) @ v

    return compute


# PyTorch's own drop otherwise: float32 has their exponential's error too.
PYTORCHS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("device", "kernels", "tolerance"),
    [
        ("cpu", contextlib.nullcontext, TOLERANCE),
        ("cpu", without_kernels, PYTORCHS),
        pytest.param("cuda", without_kernels, PYTORCHS, marks=pytest.mark.gpu),
    ],
    ids=["ours", "PyTorch's", "a GPU's"],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_forward_and_backward_with_dropout_are_those_of_the_probabilities_kept(
    device, kernels, tolerance, masked, dtype
):
    """Values that are one unit vector for each key show which probabilities a kernel dropped."""
    rate, keys = 0.25, D  # as many keys as numbers of a head
    q, k, _, above = to(dtype, inputs(keys, keys, size=1.0))
    values = torch.eye(keys, dtype=dtype).expand(B, A, -1, -1)
    mask = masks(keys, keys)["padded"] if masked else None
    on_device = None if mask is None else mask.to(device)
    torch.manual_seed(1)
    with kernels():
        ours = functools.partial(attention, mask=on_device, dropout=rate)
        found = run(ours, to(device, (q, k, values)), above.to(device))
    found = to("cpu", found)
    kept = found[0] != 0
    exact = to(torch.float64, (q, k, values))
    assert_near(found, run(dropped_attention(kept, rate, mask), exact, above), tolerance[dtype])
    seen = torch.ones_like(kept) if mask is None else mask.expand_as(kept)
    assert not (kept & ~seen).any()
    assert_is_share(~kept[seen], rate)


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


# --- rows in pieces, on a GPU ---

S, LENGTHS = 16, torch.tensor([16, 9, 1])


def attention_of_pieces(q_TAD, k_TAD, v_TAD, begins_q, begins_k, longest_q, longest_k):
    """What varlen_attn promises, piece by piece (its own kernel is for CUDA devices alone)."""
    assert (longest_q, longest_k) == (S, S) and torch.equal(begins_q, begins_k)
    pieces = []
    for begin, end in zip(begins_q[:-1].tolist(), begins_q[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (q_TAD, k_TAD, v_TAD))
        pieces.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))
    return torch.cat(pieces)


def heads(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, 3 * A * 8, generator=generator).to(device, dtype)
    return [part.unflatten(2, (A, 8)).transpose(1, 2) for part in x.chunk(3, dim=2)]


def test_real_tokens_see_in_pieces_what_the_mask_shows_them(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", attention_of_pieces)
    q, k, v = heads()
    mask = torch.arange(S) < LENGTHS[:, None]
    found = attention(q, k, v, pieces=row_pieces(LENGTHS, S))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    assert found.isfinite().all()
    found, expected = (x.transpose(1, 2)[mask] for x in (found, expected))  # real queries
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # float32 sums of 16


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "takes_pieces"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.bfloat16, 60, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_a_gpu_takes_pieces_in_bf16_alone(device, dtype, head_size, takes_pieces):
    assert has_flash(torch.device(device), dtype, head_size) == takes_pieces


@pytest.mark.slow
def test_the_model_takes_pieces_and_can_be_traced_whole(monkeypatch):
    """The kernel itself is not on a CPU: the way there is traced, forward and backward."""
    monkeypatch.setattr(variants, "has_flash", lambda *given: True)
    monkeypatch.setattr(attention_module, "has_kernels", lambda x: False)
    torch._dynamo.reset()
    net = Encoder(config_for("2x64", 100, dropout=0.0, attention_dropout=0.0)).train()
    traced = torch.compile(net, dynamic=False, fullgraph=True, backend="aot_eager")
    ids = torch.randint(5, 100, (B, S))
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        pytest.raises(NotImplementedError, match="_flash_attention_forward"),
    ):
        traced(ids, lengths_B=LENGTHS)


@pytest.mark.gpu
def test_forward_and_backward_equal_the_mask_on_a_gpu():
    lengths = LENGTHS.cuda()
    mask = torch.arange(S, device="cuda") < lengths[:, None]
    results = []
    for pieces, dtype in ((row_pieces(lengths, S), torch.bfloat16), (None, torch.float32)):
        leaves = [x.detach().requires_grad_() for x in heads("cuda", dtype)]
        out = attention(*leaves, None if pieces is not None else mask[:, None, None], pieces=pieces)
        real = out.transpose(1, 2)[mask].float()
        real.square().sum().backward()
        results.append([real.detach(), *(leaf.grad for leaf in leaves)])
    assert_near(*results, 2e-2)  # bf16: inputs, softmax, output rounded
