"""A bidirectional LSTM over the states of a frozen encoder (paper section 5.3, Table 7).

Letters as in encoder.py; besides: N layers of the encoder, I inputs, K classes; S counts words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bertsmith.kernels.dropout import Dropout
from bertsmith.model.lstm import LSTM
from bertsmith.model.scalar_mix import ScalarMix


class FeatureTagger(nn.Module):
    """Layers of a word side by side or mixed, a BiLSTM, and a linear layer over every word.

    Each direction is an LSTM by itself, the second over the words from the last to the first: both
    then have their padding at the end, where it changes nothing, and nothing need be packed.
    """

    def __init__(
        self,
        size: int,
        num_read: int,
        mixed: bool,
        num_outputs: int,
        hidden_size: int = 768,
        num_layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        """`size` of the encoder's states, of which `num_read` layers are read. `hidden_size` is
        that of one direction."""
        super().__init__()
        self.num_outputs = num_outputs
        self.mix = ScalarMix(num_read) if mixed else None
        sizes = [size if mixed else size * num_read, *[2 * hidden_size] * (num_layers - 1)]
        self.forwards = nn.ModuleList(LSTM(size, hidden_size) for size in sizes)
        self.backwards = nn.ModuleList(LSTM(size, hidden_size) for size in sizes)
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(2 * hidden_size, num_outputs)

    def initialize(self, generator: torch.Generator) -> FeatureTagger:
        """Uniform up to 1 / sqrt(hidden size), as PyTorch's LSTM; the mixture is left a mean."""
        limit = 1 / math.sqrt(self.classifier.in_features / 2)
        for part in (self.forwards, self.backwards, self.classifier):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -limit, limit, generator=generator)
        return self

    def forward(self, states_BSNH: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits [B, S, K]; what stands at padding means nothing. States in any precision."""
        x_BSI = states_BSNH.float().flatten(2) if self.mix is None else self.mix(states_BSNH)
        x_SBI = x_BSI.transpose(0, 1)
        turned_SB1 = _turned(lengths_B, len(x_SBI)).t()[:, :, None]
        for ahead, back in zip(self.forwards, self.backwards, strict=True):
            x_SBI = self.dropout(x_SBI)
            left_SBI = ahead(x_SBI)
            right_SBI = back(x_SBI.gather(0, turned_SB1.expand_as(x_SBI)))
            right_SBI = right_SBI.gather(0, turned_SB1.expand_as(right_SBI))
            x_SBI = torch.cat([left_SBI, right_SBI], dim=2)
        return self.classifier(self.dropout(x_SBI)).transpose(0, 1)


def _turned(lengths_B: Tensor, length: int) -> Tensor:
    """Places that read the words of each row from the last to the first: int64 [B, S].

    >>> _turned(torch.tensor([2, 3]), 3).tolist()
    [[1, 0, 2], [2, 1, 0]]
    """
    places_S = torch.arange(length, device=lengths_B.device)
    turned_BS = lengths_B[:, None] - 1 - places_S
    return torch.where(turned_BS >= 0, turned_BS, places_S)
