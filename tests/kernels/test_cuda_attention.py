import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from bertsmith.model import variants
from bertsmith.model.config import config_for
from bertsmith.model.encoder import Encoder
from bertsmith.model.kernels import attention as attention_module
from bertsmith.model.kernels.attention import attention, has_flash, row_pieces
from bertsmith.model.kernels.elementwise import without_kernels

B, A, S, D = 3, 2, 16, 8
LENGTHS = torch.tensor([16, 9, 1])


def attention_of_pieces(q_TAD, k_TAD, v_TAD, begins_q, begins_k, longest_q, longest_k):
    """What varlen_attn promises, piece by piece (its own kernel is for CUDA devices alone)."""
    assert (longest_q, longest_k) == (S, S) and torch.equal(begins_q, begins_k)
    pieces = []
    for begin, end in zip(begins_q[:-1].tolist(), begins_q[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (q_TAD, k_TAD, v_TAD))
        pieces.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))
    return torch.cat(pieces)


def rows(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, 3 * A * D, generator=generator).to(device, dtype)
    return [part.unflatten(2, (A, D)).transpose(1, 2) for part in x.chunk(3, dim=2)]


def test_real_tokens_see_in_pieces_what_the_mask_shows_them(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", attention_of_pieces)
    q, k, v = rows()
    mask = torch.arange(S) < LENGTHS[:, None]
    found = attention(q, k, v, pieces=row_pieces(LENGTHS, S))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    assert found.isfinite().all()
    found, expected = (x.transpose(1, 2)[mask] for x in (found, expected))  # real queries
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # float32 sums of 16


@pytest.mark.parametrize(
    ("device", "dtype", "head_size"),
    [("cpu", torch.bfloat16, 64), ("cuda", torch.float32, 64), ("cuda", torch.bfloat16, 60)],
)
def test_other_cases_keep_the_mask(device, dtype, head_size):
    assert not has_flash(torch.device(device), dtype, head_size)


def test_a_gpu_in_bf16_has_it():
    assert has_flash(torch.device("cuda"), torch.bfloat16, 64)


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
        leaves = [x.detach().requires_grad_() for x in rows("cuda", dtype)]
        out = attention(*leaves, None if pieces is not None else mask[:, None, None], pieces=pieces)
        real = out.transpose(1, 2)[mask].float()
        real.square().sum().backward()
        results.append([real.detach(), *(leaf.grad.float() for leaf in leaves)])
    for found, expected in zip(*results, strict=True):  # bf16: inputs, softmax, output rounded
        assert (found - expected).norm() / expected.norm() < 2e-2


# Norm of the error over the norm of the float64 result, of equal inputs. float32: its sums (and the
# CPU's kernels their exponential). bf16: probabilities, their gradient and the results are rounded.
DROPPED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DROPPED)
def test_forward_and_backward_with_dropout_are_those_of_the_probabilities_kept(
    device, masked, dtype
):
    """Values that are one unit vector for each key show which probabilities a kernel dropped."""
    size, rate = 64, 0.25  # keys, and numbers of a head
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(3, B, A, size, size, generator=generator).to(dtype)
    values = torch.eye(size, dtype=dtype).expand(B, A, -1, -1)
    lengths = torch.tensor([size, size // 2, 9])
    mask = (torch.arange(size) < lengths[:, None])[:, None, None] if masked else None
    leaves = [x.to(device, copy=True).requires_grad_() for x in (draws[0], draws[1], values)]
    torch.manual_seed(1)
    on_device = None if mask is None else mask.to(device)
    with without_kernels():  # PyTorch's on a CPU too; tests/kernels/test_attention.py has ours
        out = attention(*leaves, on_device, dropout=rate)
    out.backward(draws[2].to(device))
    kept = out.detach().cpu() != 0
    q, k, v = (x.double().requires_grad_() for x in (draws[0], draws[1], values))
    scores = q @ k.transpose(2, 3) / size**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) * kept / (1 - rate)) @ v
    expected.backward(draws[2].double())
    real = torch.ones_like(kept) if mask is None else mask.expand_as(kept)
    count, dropped = int(real.sum()), int((real & ~kept).sum())
    assert not (kept & ~real).any()
    assert abs(dropped - rate * count) < 5 * (count * rate * (1 - rate)) ** 0.5
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    for one, other in zip(found, [expected.detach(), q.grad, k.grad, v.grad], strict=True):
        assert (one.cpu().double() - other).norm() / other.norm() < DROPPED[dtype]
