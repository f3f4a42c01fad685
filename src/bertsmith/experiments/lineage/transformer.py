"""The Transformer, encoder and decoder (Vaswani et al. 2017, arXiv 1706.03762).

No recurrence: every position reads all others at once, by attention. BERT is its encoder, learned
without the decoder, and its layer is used here as it is, with ReLU in place of GELU. The decoder's
layer has a second attention between the two parts, in which the target reads the source.

Letters as in model/encoder.py; besides: B sentences, S source and T target positions, V pieces of
the target, W of the source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.experiments.lineage.rnn import Tables
from bertsmith.experiments.lineage.settings import TransformerShape
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import Layer, LayerNorm
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.fused_layers import residual_norm
from bertsmith.model.variants import Attend, layer_class

EPSILON = 1e-6  # of every LayerNorm, as in tensor2tensor
LONGEST_WAVE = 10_000  # of the positions, in units of 2 pi


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Tables, TransformerShape):
    """The shape with its vocabularies.

    The paper's base model has 6 layers, hidden size 512, 8 heads and intermediate size 2048.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.layer  # checks the number of heads

    @property
    def layer(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.target_vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            layer_norm_eps=EPSILON,
            pre_norm=self.layer_norm == "pre",
        )


class Memory(NamedTuple):
    """The source as the decoder reads it."""

    seen_BS: Tensor  # bool: no padding
    keys_values: tuple[Tensor, ...]  # of each decoder layer, [B, S, 2H]


# the target so far as its next position reads it: keys and values of each decoder layer, [B, T, 2H]
State = tuple[Tensor, ...]


class EncoderLayer(Layer):
    """Self-attention, then feed-forward; BERT's with ReLU: max(0, x W_1 + b_1) W_2 + b_2."""

    def widen(self, x_BQH: Tensor) -> Tensor:
        return F.relu(self.intermediate(x_BQH))


class DecoderLayer(EncoderLayer):
    """Self-attention to the left, attention to the source, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pre_norm, size = config.pre_norm, config.hidden_size
        self.source_query = nn.Linear(size, size)
        self.source_key_value = nn.Linear(size, 2 * size)
        self.source_output = nn.Linear(size, size)
        self.source_norm = LayerNorm(size, eps=config.layer_norm_eps)

    def decode(
        self, x_BTH: Tensor, left: Attend, source: Attend, memory_BSG: Tensor, past_BPG: Tensor
    ) -> tuple[Tensor, Tensor]:
        """([B, T, H], keys and values so far): T positions after the P that `past_BPG` holds."""
        x_BTH, past_BPG = self.read_target(x_BTH, left, past_BPG)
        q_BTH = self.source_query(self.before(x_BTH, self.source_norm))
        context_BTH = source(q_BTH, *memory_BSG.chunk(2, dim=-1))
        x_BTH = self.behind(x_BTH, self.source_output, context_BTH, self.source_norm)
        wide_BTF = self.widen(self.before(x_BTH, self.output_norm))
        return self.behind(x_BTH, self.output, wide_BTF, self.output_norm), past_BPG

    def read_target(self, x_BTH: Tensor, left: Attend, past_BPG: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's first third, and the keys and values of the target so far."""
        read_BTH = self.before(x_BTH, self.attention_norm)
        q_BTH, own_BTG = self.qkv(read_BTH).tensor_split((x_BTH.shape[2],), dim=-1)
        past_BPG = torch.cat((past_BPG, own_BTG), dim=1) if past_BPG.shape[1] else own_BTG
        context_BTH = left(q_BTH, *past_BPG.chunk(2, dim=-1))
        return self.behind(x_BTH, self.attention_output, context_BTH, self.attention_norm), past_BPG

    def before(self, x_BTH: Tensor, norm: LayerNorm) -> Tensor:
        """The input of a sublayer."""
        return norm(x_BTH) if self.pre_norm else x_BTH

    def behind(self, x_BTH: Tensor, linear: nn.Linear, y_BTF: Tensor, norm: LayerNorm) -> Tensor:
        """The sum with a sublayer's output, linear(y)."""
        if self.pre_norm:
            return x_BTH + self.dropout(linear(y_BTF))
        return residual_norm(x_BTH, linear, y_BTF, self.dropout, norm)


class Transformer(nn.Module):
    """Source and target ids in, one vector of size H for each target position out."""

    # [V, H], in place of the target's table as output matrix: training/replicas.py puts a copy in
    # bf16 here, with a gradient of its own
    output_table: Tensor | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        size, layers, layer = config.hidden_size, range(config.num_layers), config.layer
        self.target_table = nn.Embedding(config.target_vocab_size, size)
        self.source_table = None if config.shared else nn.Embedding(config.source_vocab_size, size)
        encoder_layer = layer_class(EncoderLayer, layer.pre_norm, gated=False)
        self.encoder_layers = nn.ModuleList(encoder_layer(layer) for _ in layers)
        self.decoder_layers = nn.ModuleList(DecoderLayer(layer) for _ in layers)
        self.encoder_norm, self.decoder_norm = (
            LayerNorm(size, eps=EPSILON) if layer.pre_norm else nn.Identity() for _ in range(2)
        )
        self.output_bias = nn.Parameter(torch.zeros(config.target_vocab_size))
        self.dropout = Dropout(config.dropout)

    @property
    def output_weight(self) -> Tensor:
        """[V, H]: logits are hidden @ output_weight^T + output_bias (section 3.4)."""
        return self.target_table.weight if self.output_table is None else self.output_table

    def shared_table(self) -> Tensor:
        """The target's table, also the output matrix."""
        return self.target_table.weight

    def split_table(self, output_VH: Tensor) -> None:
        """Let the output multiply with `output_VH`; the gradient of lookups is then sparse."""
        self.target_table.sparse = True
        self.output_table = output_VH

    def initialize(self, generator: torch.Generator) -> Transformer:
        """Fill all weights: matrices as Glorot and Bengio 2010, tables with variance 1 / H."""
        for name, weight in self.named_parameters():
            if "table" in name:
                nn.init.normal_(weight, std=self.config.hidden_size**-0.5, generator=generator)
            elif weight.dim() == 2:
                nn.init.xavier_uniform_(weight, generator=generator)
            else:  # biases, and the LayerNorms' scales
                nn.init.constant_(weight, float(name.endswith("norm.weight")))
        return self

    def encode(self, source_BS: Tensor, lengths_B: Tensor) -> Memory:
        """The source as the decoder reads it; rows have `lengths_B` pieces, then padding."""
        seen_BS = torch.arange(source_BS.shape[1], device=source_BS.device) < lengths_B[:, None]
        table = self.target_table if self.source_table is None else self.source_table
        x_BSH, attend = self._embed(table, source_BS), self._attend(seen_BS)
        for layer in self.encoder_layers:
            x_BSH = layer(x_BSH, attend)
        x_BSH = self.encoder_norm(x_BSH)
        return Memory(seen_BS, tuple(own.source_key_value(x_BSH) for own in self._decoder()))

    def decode(self, memory: Memory, target_BT: Tensor) -> Tensor:
        """Hidden states [B, T, H] behind a target that is known: all positions at once."""
        hidden_BTH, _ = self._decode(memory, self.start(memory), target_BT)
        return hidden_BTH

    def start(self, memory: Memory) -> State:
        """Nothing is translated yet."""
        return tuple(own_BSG[:, :0] for own_BSG in memory.keys_values)

    def step(self, memory: Memory, state: State, token_B: Tensor) -> tuple[Tensor, State]:
        """(Hidden states [B, H], state) behind one piece more: only its position is computed."""
        hidden_B1H, state = self._decode(memory, state, token_B[:, None])
        return hidden_B1H[:, 0], state

    def alignments(self, memory: Memory, target_BT: Tensor) -> Tensor:
        """The last layer's attention [B, T, S] to the source, the mean of its heads."""
        *layers, last = self._decoder()
        x_BTH, left, source = self._begin(memory, target_BT, 0)
        *pasts, past_BPG = self.start(memory)
        *memories, last_BSG = memory.keys_values
        for layer, memory_BSG, own_BPG in zip(layers, memories, pasts, strict=True):
            x_BTH, _ = layer.decode(x_BTH, left, source, memory_BSG, own_BPG)
        x_BTH, _ = last.read_target(x_BTH, left, past_BPG)
        heads = (self.config.num_heads, -1)
        q_BTH = last.source_query(last.before(x_BTH, last.source_norm))
        q_BTAD = q_BTH.unflatten(2, heads)
        k_BSAD = last_BSG.chunk(2, dim=-1)[0].unflatten(2, heads)
        scores_BATS = torch.einsum("btad,bsad->bats", q_BTAD, k_BSAD) / math.sqrt(q_BTAD.shape[3])
        scores_BATS = scores_BATS.masked_fill(~memory.seen_BS[:, None, None], -math.inf)
        return scores_BATS.float().softmax(dim=3).mean(dim=1)

    def _decode(self, memory: Memory, state: State, target_BT: Tensor) -> tuple[Tensor, State]:
        x_BTH, left, source = self._begin(memory, target_BT, state[0].shape[1])
        states = []
        for layer, memory_BSG, past_BPG in zip(
            self._decoder(), memory.keys_values, state, strict=True
        ):
            x_BTH, past_BPG = layer.decode(x_BTH, left, source, memory_BSG, past_BPG)
            states.append(past_BPG)
        return self.decoder_norm(x_BTH), tuple(states)

    def _begin(
        self, memory: Memory, target_BT: Tensor, first: int
    ) -> tuple[Tensor, Attend, Attend]:
        """(Embeddings of positions from `first` on, who sees the target, who the source)."""
        x_BTH = self._embed(self.target_table, target_BT, first)
        # a single position sees all before it
        return x_BTH, self._attend(causal=target_BT.shape[1] > 1), self._attend(memory.seen_BS)

    def _embed(self, table: nn.Embedding, ids_BS: Tensor, first: int = 0) -> Tensor:
        x_BSH = table(ids_BS) * math.sqrt(table.embedding_dim)
        x_BSH = x_BSH + sinusoids(first, ids_BS.shape[1], x_BSH)
        if torch.is_autocast_enabled(x_BSH.device.type):
            x_BSH = x_BSH.to(torch.get_autocast_dtype(x_BSH.device.type))
        return self.dropout(x_BSH)

    def _attend(self, seen_BS: Tensor | None = None, causal: bool = False) -> Attend:
        config = self.config
        dropout = config.attention_dropout if self.training else 0.0
        mask = None if seen_BS is None else seen_BS[:, None, None]
        return Attend(config.num_heads, dropout, mask, causal)

    def _decoder(self) -> list[DecoderLayer]:
        return list(self.decoder_layers)  # pyright: ignore[reportReturnType]


def sinusoids(first: int, count: int, like: Tensor) -> Tensor:
    """Position vectors [count, H] of `first` and those behind it (section 3.5).

    Numbers 2i and 2i + 1 are sine and cosine of position / 10,000^(2i / H).

    >>> sinusoids(1, 2, torch.empty(0, 4))
    tensor([[ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    """
    size = like.shape[-1]
    places = torch.arange(first, first + count, device=like.device, dtype=torch.float32)
    powers = torch.arange(0, size, 2, device=like.device) / size
    angles = places[:, None] / LONGEST_WAVE**powers
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)[:, :size].to(like.dtype)
