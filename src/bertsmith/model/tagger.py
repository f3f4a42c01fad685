"""Taggers of a bidirectional LSTM over the states of a frozen encoder (paper section 5.3, Table 7).

Letters as in encoder.py; besides: N layers of the encoder, I inputs, K classes, G the size of one
direction; S counts words, or whatever else is read.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bertsmith.kernels.dropout import Dropout
from bertsmith.model.encoder import ModelConfig
from bertsmith.model.heads import TaskModel
from bertsmith.model.lstm import LSTM
from bertsmith.model.operations import training_operations
from bertsmith.model.scalar_mix import ScalarMix

HIDDEN_SIZE, NUM_LAYERS = 768, 2  # of the LSTM: the paper's
LAYERS_READ = 4  # the last ones of the encoder, side by side: the best row of Table 7


class BiLSTM(nn.Module):
    """[B, S, I] -> [B, S, 2G], with dropout on what every layer reads.

    Each direction is an LSTM by itself, the second over the words from the last to the first: both
    then have their padding at the end, where it changes nothing, and nothing need be packed.
    """

    def __init__(self, size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [size, *[2 * hidden_size] * (num_layers - 1)]
        self.forwards = nn.ModuleList(LSTM(size, hidden_size) for size in sizes)
        self.backwards = nn.ModuleList(LSTM(size, hidden_size) for size in sizes)
        self.dropout = Dropout(dropout)

    def forward(self, x_BSI: Tensor, lengths_B: Tensor) -> Tensor:
        """What stands at padding means nothing."""
        x_SBI = x_BSI.transpose(0, 1)
        turned_SB1 = _turned(lengths_B, len(x_SBI)).t()[:, :, None]
        for ahead, back in zip(self.forwards, self.backwards, strict=True):
            x_SBI = self.dropout(x_SBI)
            left_SBG = ahead(x_SBI)
            right_SBG = back(x_SBI.gather(0, turned_SB1.expand_as(x_SBI)))
            right_SBG = right_SBG.gather(0, turned_SB1.expand_as(right_SBG))
            x_SBI = torch.cat([left_SBG, right_SBG], dim=2)
        return x_SBI.transpose(0, 1)


class FeatureTagger(nn.Module):
    """Layers of a word side by side or mixed, a BiLSTM, and a linear layer over every word."""

    def __init__(
        self,
        size: int,
        num_read: int,
        mixed: bool,
        num_outputs: int,
        hidden_size: int = HIDDEN_SIZE,
        num_layers: int = NUM_LAYERS,
        dropout: float = 0.1,
    ) -> None:
        """`size` of the encoder's states, of which `num_read` layers are read. `hidden_size` is
        that of one direction."""
        super().__init__()
        self.num_outputs = num_outputs
        self.mix = ScalarMix(num_read) if mixed else None
        size = size if mixed else size * num_read
        self.reader = BiLSTM(size, hidden_size, num_layers, dropout)
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(2 * hidden_size, num_outputs)

    def initialize(self, generator: torch.Generator) -> FeatureTagger:
        """Uniform up to 1 / sqrt(hidden size), as PyTorch's LSTM; the mixture is left a mean."""
        limit = 1 / math.sqrt(self.classifier.in_features / 2)
        for part in (self.reader, self.classifier):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -limit, limit, generator=generator)
        return self

    def forward(self, states_BSNH: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits [B, S, K]; what stands at padding means nothing. States in any precision."""
        x_BSI = states_BSNH.float().flatten(2) if self.mix is None else self.mix(states_BSNH)
        return self.classifier(self.dropout(self.reader(x_BSI, lengths_B)))


class FrozenTagger(TaskModel):
    """A frozen encoder, a BiLSTM over every token of its last layers, a linear layer: [B, S, K].

    The encoder is without dropout and without gradients. `config.dropout` is that of the BiLSTM.
    """

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        self.num_read = min(LAYERS_READ, config.num_layers)
        size = config.hidden_size * self.num_read
        self.reader = BiLSTM(size, HIDDEN_SIZE, NUM_LAYERS, config.dropout)
        self.dropout = Dropout(config.dropout)
        self.classifier = nn.Linear(2 * HIDDEN_SIZE, num_outputs)
        self.encoder.eval()

    def train(self, mode: bool = True) -> FrozenTagger:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(
        self, input_ids_BS: Tensor, token_types_BS: Tensor, lengths_B: Tensor | None
    ) -> Tensor:
        """Logits [B, S, K]; what stands at padding means nothing."""
        with torch.no_grad():
            layers = self.encoder(input_ids_BS, token_types_BS, lengths_B, all_layers=True)
        x_BSI = torch.cat(layers[-self.num_read :], dim=2)
        if lengths_B is None:
            lengths_B = x_BSI.new_full(x_BSI.shape[:1], x_BSI.shape[1], dtype=torch.int64)
        return self.classifier(self.dropout(self.reader(x_BSI, lengths_B)))

    def operations(self, rows: int, length: int) -> float:
        """Of a training step: the encoder's forward pass is a third of what training it takes."""
        encoder = training_operations(self.config, rows, length, outputs=length, predictions=0) / 3
        weights = sum(parameter.numel() for parameter in self.reader.parameters())
        return encoder + 6.0 * weights * rows * length


def _turned(lengths_B: Tensor, length: int) -> Tensor:
    """Places that read the words of each row from the last to the first: int64 [B, S].

    >>> _turned(torch.tensor([2, 3]), 3).tolist()
    [[1, 0, 2], [2, 1, 0]]
    """
    places_S = torch.arange(length, device=lengths_B.device)
    turned_BS = lengths_B[:, None] - 1 - places_S
    return torch.where(turned_BS >= 0, turned_BS, places_S)
