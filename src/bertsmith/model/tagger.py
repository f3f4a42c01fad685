"""A bidirectional LSTM over the states of a frozen encoder (paper section 5.3, Table 7).

Letters as in encoder.py; besides: N layers of the encoder, K classes; S counts words here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bertsmith.kernels.dropout import Dropout
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
        self.forwards = nn.ModuleList(nn.LSTM(n, hidden_size, batch_first=True) for n in sizes)
        self.backwards = nn.ModuleList(nn.LSTM(n, hidden_size, batch_first=True) for n in sizes)
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(2 * hidden_size, num_outputs)

    def initialize(self, generator: torch.Generator) -> FeatureTagger:
        """Weights as PyTorch draws them, uniform up to 1 / sqrt(hidden size), from a generator."""
        limit = 1 / math.sqrt(self.classifier.in_features / 2)
        for part in (self.forwards, self.backwards, self.classifier):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -limit, limit, generator=generator)
        return self

    def forward(self, states_BSNH: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits [B, S, K]; what stands at padding means nothing. States in any precision."""
        x_BSI = states_BSNH.float().flatten(2) if self.mix is None else self.mix(states_BSNH)
        turned_BS1 = _turned(lengths_B, x_BSI.shape[1])[:, :, None]
        for ahead, back in zip(self.forwards, self.backwards, strict=True):
            x_BSI = self.dropout(x_BSI)
            left_BSI = _run(ahead, x_BSI)
            right_BSI = _run(back, x_BSI.gather(1, turned_BS1.expand_as(x_BSI)))
            right_BSI = right_BSI.gather(1, turned_BS1.expand_as(right_BSI))
            x_BSI = torch.cat([left_BSI, right_BSI], dim=2)
        return self.classifier(self.dropout(x_BSI))


def _run(lstm: nn.Module, x_BSI: Tensor) -> Tensor:
    return lstm(x_BSI.float())[0]  # it looks at the type of its input before autocast does


def _turned(lengths_B: Tensor, length: int) -> Tensor:
    """Places that read the words of each row from the last to the first: int64 [B, S].

    >>> _turned(torch.tensor([2, 3]), 3).tolist()
    [[1, 0, 2], [2, 1, 0]]
    """
    places_S = torch.arange(length, device=lengths_B.device)
    turned_BS = lengths_B[:, None] - 1 - places_S
    return torch.where(turned_BS >= 0, turned_BS, places_S)
