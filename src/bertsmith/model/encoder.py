"""BERT's encoder, one forward pass (paper section 3; google-research/bert modeling.py).

Shape letters, used as suffixes where a shape changes:
    B rows in a batch        S positions in a row      H hidden size
    A attention heads        D head size, H / A        F intermediate size, usually 4 H
    Q positions whose output is wanted (all S unless `positions` is given)

Post-layer-norm, the paper's: x = LayerNorm(x + dropout(sublayer(x))). With `pre_norm`
(Xiong et al. 2020, arXiv 2002.04745): x = x + dropout(sublayer(LayerNorm(x))), and a last LayerNorm
over the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.model.config import ModelConfig
from bertsmith.model.kernels.attention import attention, has_flash, row_pieces
from bertsmith.model.kernels.elementwise import (
    Dropout,
    dropout_state,
    kernels_left_out,
    seed_dropout,
)
from bertsmith.model.kernels.fused_layers import linear_gelu, residual_norm


class LayerNorm(nn.LayerNorm):
    """Its result has the input's type: autocast on a GPU would widen what all layers read."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(input.dtype)


class Embeddings(nn.Module):
    """Sum of token, segment and position embedding, then LayerNorm, then dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, input_ids_BS: Tensor, token_types_BS: Tensor) -> Tensor:
        length = input_ids_BS.shape[1]
        if length > self.position.num_embeddings:
            raise ValueError(
                f"a row of {length} tokens, but the model knows {self.position.num_embeddings} "
                "positions: lower the length"
            )
        x_BSH = self.token(input_ids_BS) + self.segment(token_types_BS)
        return self.dropout(self.norm(x_BSH + self.position.weight[:length]))


class Layer(nn.Module):
    """Self-attention and feed-forward, each with residual and LayerNorm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.pre_norm = config.pre_norm
        self.gated = config.gated
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.qkv = nn.Linear(size, 3 * size)  # rows: all queries, all keys, all values
        self.attention_output = nn.Linear(size, size)
        self.attention_norm = LayerNorm(size, eps=config.layer_norm_eps)
        if config.gated:
            self.gate_up = nn.Linear(size, 2 * config.intermediate_size)  # rows: gate, up
        else:
            self.intermediate = nn.Linear(size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, size)
        self.output_norm = LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x_BSH: Tensor,
        mask: Tensor | None,
        causal: bool,
        positions_BQ: Tensor | None = None,
        pieces: Tensor | None = None,
    ) -> Tensor:
        """[B, S, H] -> [B, Q, H]; keys and values always come from all S positions.

        `pieces`, of kernels.cuda_attention, stand for the mask where Q = S.
        """
        if positions_BQ is None:
            q_BQH, k_BSH, v_BSH = self.qkv(self._read(x_BSH)).chunk(3, dim=-1)
        else:
            size = x_BSH.shape[2]
            weight_q, weight_kv = self.qkv.weight.split((size, 2 * size))
            bias_q, bias_kv = self.qkv.bias.split((size, 2 * size))
            k_BSH, v_BSH = F.linear(self._read(x_BSH), weight_kv, bias_kv).chunk(2, dim=-1)
            x_BSH = x_BSH.gather(1, positions_BQ[:, :, None].expand(-1, -1, size))  # -> [B, Q, H]
            q_BQH = F.linear(self._read(x_BSH), weight_q, bias_q)
        context_BAQD = attention(
            self._heads(q_BQH),
            self._heads(k_BSH),
            self._heads(v_BSH),
            mask,
            causal,
            self.attention_dropout if self.training else 0.0,
            pieces,
        )
        context_BQH = context_BAQD.transpose(1, 2).flatten(2)
        if self.pre_norm:
            x_BQH = x_BSH + self.dropout(self.attention_output(context_BQH))
            wide_BQF = self._widened(self.output_norm(x_BQH))
            return x_BQH + self.dropout(self.output(wide_BQF))
        x_BQH = residual_norm(
            x_BSH, self.attention_output, context_BQH, self.dropout, self.attention_norm
        )
        wide_BQF = self._widened(x_BQH)
        return residual_norm(x_BQH, self.output, wide_BQF, self.dropout, self.output_norm)

    def _read(self, x_BSH: Tensor) -> Tensor:
        """What attention reads of the residual stream."""
        return self.attention_norm(x_BSH) if self.pre_norm else x_BSH

    def _widened(self, x_BQH: Tensor) -> Tensor:
        """[B, Q, H] -> [B, Q, F], what the output layer reads."""
        if self.gated:
            gate_BQF, up_BQF = self.gate_up(x_BQH).chunk(2, dim=-1)
            return F.gelu(gate_BQF, approximate=self.approximate) * up_BQF
        return linear_gelu(self.intermediate, x_BQH, self.approximate)

    def _heads(self, x_BSH: Tensor) -> Tensor:
        return x_BSH.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # [B, A, S, D]


@contextmanager
def _dropout_again(state: tuple[int, int]) -> Iterator[None]:
    """Drop what was dropped from `state` on, whatever this thread has drawn since."""
    now = dropout_state()
    seed_dropout(*state)
    try:
        yield
    finally:
        seed_dropout(*now)


class Encoder(nn.Module):
    """Token ids in, one vector of size H for each position out."""

    checkpoint_activations = False
    """In training keep only each layer's input and compute the rest again in the backward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        size, eps = config.hidden_size, config.layer_norm_eps
        self.final_norm = LayerNorm(size, eps=eps) if config.pre_norm else nn.Identity()

    def forward(
        self,
        input_ids_BS: Tensor,
        token_types_BS: Tensor | None = None,
        lengths_B: Tensor | None = None,
        positions_BQ: Tensor | None = None,
        all_layers: bool = False,
    ) -> Tensor | list[Tensor]:
        """Hidden states [B, S, H], or [B, Q, H] at `positions_BQ` (int64) alone.

        `lengths_B` counts the real tokens of each row; keys behind them are not attended to (None:
        all rows are full). With `positions_BQ` the last layer is computed only there, which changes
        no result. With `all_layers` a list of num_layers + 1 tensors, the embeddings' output first;
        the last is what is returned without it, that is with `pre_norm` after the final LayerNorm.
        """
        if token_types_BS is None:
            token_types_BS = torch.zeros_like(input_ids_BS)
        x_BSH = self.embeddings(input_ids_BS, token_types_BS)
        if torch.is_autocast_enabled(x_BSH.device.type):
            x_BSH = x_BSH.to(torch.get_autocast_dtype(x_BSH.device.type))
        mask, causal = self._mask(input_ids_BS.shape[1], lengths_B)
        pieces = self._pieces(x_BSH, lengths_B)
        states = [x_BSH]
        for layer in self.layers[:-1]:
            x_BSH = states[-1] if all_layers else states.pop()
            states.append(self._run(layer, x_BSH, mask, causal, None, pieces))
        if positions_BQ is not None and self.config.causal:
            mask, causal = self._causal_rows(mask, positions_BQ, input_ids_BS.shape[1]), False
        if positions_BQ is not None:
            pieces = None
        last = self._run(self.layers[-1], states[-1], mask, causal, positions_BQ, pieces)
        last = self.final_norm(last)
        return [*states, last] if all_layers else last

    def _run(self, layer: nn.Module, *arguments: Tensor | bool | None) -> Tensor:
        if not (self.checkpoint_activations and self.training):
            return layer(*arguments)
        if torch.compiler.is_compiling():  # all dropout is then PyTorch's, which it replays itself
            return checkpoint(layer, *arguments, use_reentrant=False)
        state = dropout_state()

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _dropout_again(state)

        return checkpoint(layer, *arguments, use_reentrant=False, context_fn=contexts)

    def _mask(self, length: int, lengths_B: Tensor | None) -> tuple[Tensor | None, bool]:
        """What attention may look at: (True = look, [B, 1, 1 or S, S] or None; plain causal?)."""
        if lengths_B is None:
            return None, self.config.causal
        columns = torch.arange(length, device=lengths_B.device)
        mask = (columns < lengths_B[:, None])[:, None, None, :]
        if self.config.causal:
            mask = mask & (columns <= columns[:, None])
        return mask, False

    def _pieces(self, x_BSH: Tensor, lengths_B: Tensor | None) -> Tensor | None:
        """Rows cut into text and padding, where a kernel for them can replace the mask."""
        config = self.config
        dropped = self.training and config.attention_dropout > 0  # that kernel has no dropout
        head_size = config.hidden_size // config.num_heads
        if lengths_B is None or config.causal or dropped or kernels_left_out():
            return None
        if not has_flash(x_BSH.device, x_BSH.dtype, head_size):
            return None
        return row_pieces(lengths_B, x_BSH.shape[1])

    @staticmethod
    def _causal_rows(mask: Tensor | None, positions_BQ: Tensor, length: int) -> Tensor:
        columns = torch.arange(length, device=positions_BQ.device)
        rows = (columns <= positions_BQ[:, :, None])[:, None]
        return rows if mask is None else rows & mask[:, :, -1:]  # the last row looks furthest
