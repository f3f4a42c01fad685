"""Attention over rows with padding by FlashAttention, through PyTorch's variable-length form.

A row is cut into two pieces, its real tokens and its padding, and each piece attends to itself
alone: real tokens see what a mask would show them, and what padding sees is read by nobody. So no
row is moved and all shapes stay static; a mask would send PyTorch to a slower kernel.

Letters as in model/encoder.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def has_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether PyTorch's FlashAttention runs there: bf16, heads of 8n <= 256.

    It also asks for Ampere or newer, as bf16 does: `choose_engine` refuses that elsewhere.
    """
    chip = device.type == "cuda" and torch.version.hip is None
    return chip and dtype == torch.bfloat16 and head_size % 8 == 0 and head_size <= 256


def row_pieces(lengths_B: Tensor, length: int) -> Tensor:
    """int32 [2B + 1]: where the pieces of rows of `length` tokens begin when rows lie end to end.

    >>> row_pieces(torch.tensor([3, 4]), 4).tolist()
    [0, 3, 4, 8, 8]
    """
    rows = len(lengths_B)
    starts_B = torch.arange(0, rows * length, length, device=lengths_B.device)
    pieces = torch.stack((starts_B, starts_B + lengths_B), dim=1).flatten()
    return F.pad(pieces, (0, 1), value=rows * length).to(torch.int32)


def attention_in_pieces(q_BASD: Tensor, k_BASD: Tensor, v_BASD: Tensor, pieces: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each piece, [B, A, S, D]; `pieces` is of `row_pieces`."""
    from torch.nn.attention.varlen import varlen_attn  # seconds; for a GPU alone

    batch, length = q_BASD.shape[0], q_BASD.shape[2]
    q_TAD, k_TAD, v_TAD = (x.transpose(1, 2).flatten(0, 1) for x in (q_BASD, k_BASD, v_BASD))
    context_TAD = varlen_attn(q_TAD, k_TAD, v_TAD, pieces, pieces, length, length)
    assert isinstance(context_TAD, Tensor)
    return context_TAD.unflatten(0, (batch, length)).transpose(1, 2)
