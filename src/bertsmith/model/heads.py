"""What sits on the encoder: masked-LM and next-sentence heads, the pooler, a classifier.

Letters as in encoder.py; besides: P masked positions in a row, N in the whole batch, V vocabulary
size, K classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.encoder import Encoder, ModelConfig


class Pooler(nn.Module):
    """dense + tanh on the [CLS] vector: [B, H] -> [B, H]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, cls_BH: Tensor) -> Tensor:
        return torch.tanh(self.dense(cls_BH))


class MaskedLMHead(nn.Module):
    """dense + gelu + LayerNorm, then the tied token-embedding matrix plus a bias of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_NH: Tensor, token_embedding_VH: Tensor) -> Tensor:
        hidden_NH = self.norm(F.gelu(self.dense(hidden_NH), approximate=self.approximate))
        return F.linear(hidden_NH, token_embedding_VH, self.bias)  # [N, V]


class PreTrainingOutput(NamedTuple):
    mlm_logits: Tensor  # [N, V], a row a masked position
    nsp_logits: Tensor  # [B, 2], column 0 = IsNext


class PreTrainingModel(nn.Module):
    """Encoder with both pre-training heads (paper section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        self.mlm = MaskedLMHead(config)
        self.nsp = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        input_ids_BS: Tensor,
        token_types_BS: Tensor,
        lengths_B: Tensor | None,
        masked_positions_BP: Tensor,
        masked_N: Tensor | None = None,
    ) -> PreTrainingOutput:
        """Logits at the masked positions only.

        `masked_N` picks the rows of [B * P] that hold a real prediction (int64); None: all of them.
        The last layer runs at [CLS] and the masked positions alone: nothing else is read from it.
        """
        positions_BQ = F.pad(masked_positions_BP, (1, 0))  # [CLS], at 0, and the masked positions
        hidden_BQH = self.encoder(input_ids_BS, token_types_BS, lengths_B, positions_BQ)
        masked_NH = hidden_BQH[:, 1:].flatten(0, 1)
        if masked_N is not None:
            masked_NH = masked_NH[masked_N]
        return PreTrainingOutput(
            self.mlm(masked_NH, self.encoder.embeddings.token.weight),
            self.nsp(self.pooler(hidden_BQH[:, 0])),
        )


class SequenceClassifier(nn.Module):
    """Encoder, pooler, dropout and a linear layer over [CLS] (paper section 4.1)."""

    def __init__(self, config: ModelConfig, num_labels: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(
        self, input_ids_BS: Tensor, token_types_BS: Tensor, lengths_B: Tensor | None
    ) -> Tensor:
        """Logits [B, K]; the last layer runs at [CLS] alone."""
        first_B1 = input_ids_BS.new_zeros((input_ids_BS.shape[0], 1), dtype=torch.int64)
        hidden_B1H = self.encoder(input_ids_BS, token_types_BS, lengths_B, first_B1)
        return self.classifier(self.dropout(self.pooler(hidden_B1H[:, 0])))
