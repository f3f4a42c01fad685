"""BERT's encoder, one forward pass (paper section 3; google-research/bert modeling.py).

Attention and feed-forward have no classes of their own: the fused kernels span their border. Who
sees whom, and what may differ from the paper, is in variants.py.

Shape letters, used as suffixes where a shape changes:
    B rows in a batch        S positions in a row      H hidden size
    A attention heads        D head size, H / A        F intermediate size, usually 4 H
    Q positions whose output is wanted (all S unless `positions_BQ` is given)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.fused_layers import linear_gelu, residual_norm
from bertsmith.model.kernels.quantized_linear import Int8Linear
from bertsmith.model.kernels.short_layer import after_attention
from bertsmith.model.kernels.unpadded import Unpadded, without_padding
from bertsmith.model.variants import (
    Attend,
    attention_for,
    layer_class,
    project,
    projection,
    recomputed,
    segment_table,
)


class LayerNorm(nn.LayerNorm):
    """Keeps the input's dtype: autocast on a GPU would widen what all layers read."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(input.dtype)


class Embeddings(nn.Module):
    """Token, segment and position embeddings, summed; then LayerNorm (not GPT) and dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.table_size)
        self.position = nn.Embedding(config.max_positions, config.table_size)
        self.segment = segment_table(config)
        norm = LayerNorm(config.table_size, eps=config.layer_norm_eps)
        self.norm = nn.Identity() if config.family == "gpt" else norm
        self.dropout = Dropout(config.dropout)
        self.project = projection(config)

    def forward(self, ids_BS: Tensor, types_BS: Tensor) -> Tensor:
        length, limit = ids_BS.shape[1], self.position.num_embeddings
        if length > limit:
            raise ValueError(
                f"a row of {length} tokens, but the model knows {limit} positions: lower the length"
            )
        x_BSH = self.token(ids_BS) + self.segment(types_BS)
        return self.project(self.dropout(self.norm(x_BSH + self.position.weight[:length])))


class Layer(nn.Module):
    """Self-attention, then feed-forward, each as x = LayerNorm(x + dropout(sublayer(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.qkv = nn.Linear(size, 3 * size)  # rows: all queries, all keys, all values
        self.attention_output = nn.Linear(size, size)
        self.attention_norm = LayerNorm(size, eps=eps)
        self.add_widening(size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, size)
        self.output_norm = LayerNorm(size, eps=eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x_BSH: Tensor, attend: Attend | Unpadded, positions_BQ: Tensor | None = None
    ) -> Tensor:
        """[B, S, H] -> [B, Q, H]; keys and values always come from all S positions."""
        x_BQH, qkv = project(self.qkv, x_BSH, positions_BQ)
        context_BQH = attend(*qkv)
        if (output_BQH := after_attention(self, x_BQH, context_BQH)) is not None:
            return output_BQH
        x_BQH = residual_norm(
            x_BQH, self.attention_output, context_BQH, self.dropout, self.attention_norm
        )
        return residual_norm(x_BQH, self.output, self.widen(x_BQH), self.dropout, self.output_norm)

    def add_widening(self, size: int, wide: int) -> None:
        self.intermediate = nn.Linear(size, wide)

    def widen(self, x_BQH: Tensor) -> Tensor:
        """[B, Q, H] -> [B, Q, F]."""
        return linear_gelu(self.intermediate, x_BQH, self.approximate)


class Encoder(nn.Module):
    """Token ids in, one vector of size H for each position out."""

    # True: in training each layer keeps its input alone and is computed again
    activation_checkpointing = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        make_layer = layer_class(Layer, config.pre_norm, config.gated)
        self.layers = nn.ModuleList(make_layer(config) for _ in range(config.num_layers))
        size, eps = config.hidden_size, config.layer_norm_eps
        self.final_norm = LayerNorm(size, eps=eps) if config.pre_norm else nn.Identity()

    def forward(
        self,
        ids_BS: Tensor,
        types_BS: Tensor | None = None,
        lengths_B: Tensor | None = None,
        positions_BQ: Tensor | None = None,
        all_layers: bool = False,
    ) -> Tensor | list[Tensor]:
        """Hidden states [B, S, H], or [B, Q, H] at `positions_BQ` (int64) alone.

        `lengths_B` counts the real tokens of each row: no key after them is seen. `positions_BQ`
        spares the last layer work and changes no result. `all_layers` gives a list of num_layers +
        1 tensors: the embeddings' output, then each layer's, the last as without `all_layers`.
        """
        if types_BS is None:
            types_BS = torch.zeros_like(ids_BS)
        x_BSH = self.embeddings(ids_BS, types_BS)
        if torch.is_autocast_enabled(x_BSH.device.type):
            x_BSH = x_BSH.to(torch.get_autocast_dtype(x_BSH.device.type))
        (rows, length), places = x_BSH.shape[:2], positions_BQ
        config, unpadded = self.config, None
        dropout = config.attention_dropout if self.training else 0.0
        how = lengths_B, config.num_heads, dropout, config.causal
        if not all_layers:
            any_number = isinstance(self.layers[0].qkv, Int8Linear)
            unpadded = without_padding(x_BSH, *how, any_number)
        attend = unpadded or attention_for(x_BSH, *how)
        if unpadded:
            x_BSH = unpadded.flat(x_BSH)  # [1, T, H]
            places = None if positions_BQ is None else unpadded.places(positions_BQ)
        run = recomputed if self.activation_checkpointing and self.training else nn.Module.__call__
        states = []
        for layer in self.layers[:-1]:
            if all_layers:
                states.append(x_BSH)
            x_BSH = run(layer, x_BSH, attend)
        if positions_BQ is not None:
            attend = attend.at(positions_BQ, length)
        x_BQH = self.final_norm(run(self.layers[-1], x_BSH, attend, places))
        if unpadded and positions_BQ is not None:
            return x_BQH.view(*positions_BQ.shape, -1)
        if unpadded:
            return unpadded.padded(x_BQH, rows, length)
        return [*states, x_BSH, x_BQH] if all_layers else x_BQH
