"""All that may differ from plain BERT: who sees whom, where layers are read, how they are made.

`segment_table` and `projection` are the borders of DistilBERT, ELECTRA and GPT.

`Attend` is the attention of one batch. `PreNorm` and `GeGLU` are mixed into the encoder's layer
where the configuration asks for them. `recomputed` trades time for memory. Letters: encoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.model.config import ModelConfig
from bertsmith.model.kernels.attention import (
    attention,
    has_flash,
    queries_keys_values,
    row_pieces,
)
from bertsmith.model.kernels.elementwise import dropout_state, kernels_left_out, seed_dropout
from bertsmith.model.kernels.quantized_linear import Int8Linear
from bertsmith.model.kernels.unpadded import Unpadded

LayerType = TypeVar("LayerType", bound=nn.Module)
IDENTITY = nn.Identity()  # made once: a module costs microseconds, in every layer of every pass


@dataclass(frozen=True, eq=False)  # compared as an object: PyTorch 2.11 hashes it while it compiles
class Attend:
    """Attention of one batch: parts as `queries_keys_values` has them -> [B, Q, H]."""

    num_heads: int
    dropout: float
    mask: Tensor | None = None  # bool [B, 1, 1 or Q, S], True = seen; None: all are
    causal: bool = False  # without a mask
    pieces: Tensor | None = None  # of `row_pieces`, in place of the mask

    def __call__(self, *parts: Tensor) -> Tensor:
        heads = (self.num_heads, -1)
        q, k, v = (x.unflatten(2, heads).transpose(1, 2) for x in queries_keys_values(*parts))
        context_BAQD = attention(q, k, v, self.mask, self.causal, self.dropout, self.pieces)
        return context_BAQD.transpose(1, 2).flatten(2)

    def at(self, positions_BQ: Tensor, length: int) -> Attend:
        """The same for the queries of these positions in rows of `length` tokens."""
        is_causal = self.causal or (self.mask is not None and self.mask.shape[2] > 1)
        if not is_causal:
            return replace(self, pieces=None)
        columns = torch.arange(length, device=positions_BQ.device)
        mask = (columns <= positions_BQ[:, :, None])[:, None]
        if self.mask is not None:
            mask = mask & self.mask[:, :, -1:]  # the last row sees all that is not padding
        return replace(self, mask=mask, causal=False)


def attention_for(
    x_BSH: Tensor, lengths_B: Tensor | None, num_heads: int, dropout: float, causal: bool
) -> Attend:
    """The attention of rows of which `lengths_B` tokens are real; None: all are."""
    if lengths_B is None:
        return Attend(num_heads, dropout, causal=causal)
    length, head_size, pieces = x_BSH.shape[1], x_BSH.shape[2] // num_heads, None
    columns = torch.arange(length, device=lengths_B.device)
    mask = (columns < lengths_B[:, None])[:, None, None, :]
    if causal:
        mask = mask & (columns <= columns[:, None])
    # the kernel for pieces has no dropout
    elif not (dropout or kernels_left_out()) and has_flash(x_BSH.device, x_BSH.dtype, head_size):
        pieces = row_pieces(lengths_B, length)
    return Attend(num_heads, dropout, mask, pieces=pieces)


def row_lengths(ids_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
    """The real tokens of each row, int64 [B]; None: all are."""
    if lengths_B is None:
        return ids_BS.new_full(ids_BS.shape[:1], ids_BS.shape[1], dtype=torch.int64)
    return lengths_B.long()


def reversal(lengths_B: Tensor, length: int) -> Tensor:
    """The columns int64 [B, S] of rows read backwards, their padding last; its own inverse.

    >>> reversal(torch.tensor([3, 4]), 4).tolist()
    [[2, 1, 0, 3], [3, 2, 1, 0]]
    """
    columns_S = torch.arange(length, device=lengths_B.device)
    columns_BS = lengths_B[:, None] - 1 - columns_S
    return torch.where(columns_BS >= 0, columns_BS, columns_S)


def at_columns(x_BSH: Tensor, columns_BQ: Tensor) -> Tensor:
    """The vectors [B, Q, H] at some columns (int64) of each row."""
    return x_BSH.gather(1, columns_BQ[:, :, None].expand(-1, -1, x_BSH.shape[2]))


def project(
    qkv: nn.Linear, x_BSH: Tensor, positions_BQ: Tensor | None, norm: nn.Module = IDENTITY
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x [B, Q, H] at the positions, and of norm(x) the queries there, all keys and all values.

    The latter as `queries_keys_values` takes them: in one tensor where all positions are wanted.
    """
    if positions_BQ is None:
        return x_BSH, (qkv(norm(x_BSH)),)
    size = x_BSH.shape[2]
    weight_q, weight_kv = qkv.weight.split((size, 2 * size))
    bias_q, bias_kv = qkv.bias.split((size, 2 * size))
    linear = Int8Linear.linear if isinstance(qkv, Int8Linear) else F.linear
    keys_values = linear(norm(x_BSH), weight_kv, bias_kv)
    x_BQH = at_columns(x_BSH, positions_BQ)
    # so few rows are not quicker in int8
    return x_BQH, (F.linear(norm(x_BQH), weight_q, bias_q), keys_values)


class PreNorm:
    """x = x + dropout(sublayer(LayerNorm(x))), Xiong et al. 2020, arXiv 2002.04745."""

    def forward(
        self: Any, x_BSH: Tensor, attend: Attend | Unpadded, positions_BQ: Tensor | None = None
    ) -> Tensor:
        x_BQH, qkv = project(self.qkv, x_BSH, positions_BQ, self.attention_norm)
        x_BQH = x_BQH + self.dropout(self.attention_output(attend(*qkv)))
        return x_BQH + self.dropout(self.output(self.widen(self.output_norm(x_BQH))))


class GeGLU:
    """Feed-forward of GELU(gate(x)) * up(x), Shazeer 2020, arXiv 2002.05202."""

    def add_widening(self: Any, size: int, wide: int) -> None:
        self.gate_up = nn.Linear(size, 2 * wide)  # rows: gate, up

    def widen(self: Any, x_BQH: Tensor) -> Tensor:
        gate_BQF, up_BQF = self.gate_up(x_BQH).chunk(2, dim=-1)
        return F.gelu(gate_BQF, approximate=self.approximate) * up_BQF


class NoSegments(nn.Module):
    """In place of the segment embedding: first and second text look alike."""

    def forward(self, types_BS: Tensor) -> float:
        return 0.0


def segment_table(config: ModelConfig) -> nn.Module:
    """The segment embedding; DistilBERT (Sanh et al. 2019, arXiv 1910.01108) and GPT have none."""
    rows = config.type_vocab_size
    return nn.Embedding(rows, config.table_size) if rows else NoSegments()


def projection(config: ModelConfig) -> nn.Module:
    """Embeddings -> hidden size, which differ in ELECTRA (Clark et al. 2020, arXiv 2003.10555)."""
    sizes = config.table_size, config.hidden_size
    return nn.Linear(*sizes) if sizes[0] != sizes[1] else nn.Identity()


@cache
def layer_class(plain: type[LayerType], pre_norm: bool, gated: bool) -> type[LayerType]:
    """The plain layer with the configuration's variants mixed in."""
    mixins = (PreNorm,) * pre_norm + (GeGLU,) * gated
    name = "".join(mixin.__name__ for mixin in mixins) + "Layer"
    made: Any = type(name, (*mixins, plain), {}) if mixins else plain
    return made


def recomputed(layer: nn.Module, *inputs: Any) -> Tensor:
    """The layer's output; of what led there only the inputs are kept for the backward pass."""
    if torch.compiler.is_compiling():  # all dropout is then PyTorch's, which it replays itself
        return checkpoint(layer, *inputs, use_reentrant=False)
    state = dropout_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _dropout_from(state)

    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _dropout_from(state: tuple[int, int]) -> Iterator[None]:
    """Draw the masks that follow `state` again, whatever this thread has drawn since."""
    now = dropout_state()
    seed_dropout(*state)
    try:
        yield
    finally:
        seed_dropout(*now)
