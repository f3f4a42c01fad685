"""LSTMs and GRUs, and a tagger over the states of a frozen encoder (paper section 5.3, Table 7).

oneDNN's LSTM in bf16 reorders its weights in every backward pass, which takes as long as a batch of
1,000 words, and there is none of its GRU. Here the matrix products are plain ones, and all but
those of the state run for all steps at once. On a GPU an LSTM is cuDNN's.

Letters as in encoder.py; besides: N layers of the encoder, I inputs, K classes, S steps (words or
tokens), G the size of one direction; in an LSTM H is the size of its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.recurrence import gru_steps, lstm_steps
from bertsmith.model.variants import reversal

HIDDEN_SIZE, NUM_LAYERS = 768, 2  # of the LSTM: the paper's
LAYERS_READ = 4  # the encoder's last ones, side by side: the best row of Table 7
Reset = Literal["before", "after"]


class LSTM(nn.Module):
    """[S, B, I] -> [S, B, H] (Hochreiter and Schmidhuber 1997).

    With i, f, g, o = W x_s + U h_(s-1) + b in four parts, in PyTorch's order:
    c_s = sigmoid(f) c_(s-1) + sigmoid(i) tanh(g)
    h_s = sigmoid(o) tanh(c_s)
    """

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(size, 4 * hidden_size)
        self.state = nn.Linear(hidden_size, 4 * hidden_size, bias=False)

    def forward(self, x_SBI: Tensor) -> Tensor:
        """The states, from a state and a cell of zeros."""
        if x_SBI.is_cuda:
            return self.in_one_call(x_SBI)
        start_BH = x_SBI.new_zeros(x_SBI.shape[1], self.state.in_features)
        return self.run(x_SBI, start_BH, start_BH)[0]

    def in_one_call(self, x_SBI: Tensor) -> Tensor:
        """The same by PyTorch's operator, in float32: on a GPU all steps are one call of cuDNN."""
        bias_G = self.inputs.bias
        weights = self.inputs.weight, self.state.weight, bias_G, torch.zeros_like(bias_G)
        # side by side, as cuDNN wants them
        flat = torch.cat([one.flatten() for one in weights])
        parts = flat.split([one.numel() for one in weights])
        placed = [part.view(one.shape) for part, one in zip(parts, weights, strict=True)]
        start_1BH = flat.new_zeros(1, x_SBI.shape[1], self.state.in_features)
        layers, dropout, train = 1, 0.0, torch.is_grad_enabled()
        # autocast would take float16 here, whatever it takes elsewhere, and lose small gradients
        with torch.autocast(x_SBI.device.type, enabled=False):
            given = x_SBI.to(flat.dtype), (start_1BH, start_1BH), placed
            states = torch.lstm(*given, True, layers, dropout, train, False, False)[0]
        return states.to(x_SBI.dtype)

    def run(self, x_SBI: Tensor, h_BH: Tensor, c_BH: Tensor) -> tuple[Tensor, Tensor]:
        """States and cells, [S, B, H] each, from the state and the cell before the first step."""
        return lstm_steps(self.inputs(x_SBI), self.state.weight, h_BH, c_BH)


class GRU(nn.Module):
    """[S, B, I] -> [S, B, H] (Cho et al. 2014), in two forms, which are two functions.

    With a, b, d = W x_s + bias in three parts and h the state before:
    r = sigmoid(a + U_r h)
    z = sigmoid(b + U_z h)
    n = tanh(d + U (r h))           reset "before" the product: the papers'
    n = tanh(d + r (U h + bias'))   reset "after" it: PyTorch's, cuDNN's
    h_s = z h + (1 - z) n
    """

    def __init__(self, size: int, hidden_size: int, reset: Reset = "before") -> None:
        super().__init__()
        self.inputs = nn.Linear(size, 3 * hidden_size)
        self.gates = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.new = nn.Linear(hidden_size, hidden_size, bias=reset == "after")

    def forward(self, x_SBI: Tensor, h_BH: Tensor | None = None) -> Tensor:
        """The states, from the one before the first step, or from zeros."""
        if h_BH is None:
            h_BH = x_SBI.new_zeros(x_SBI.shape[1], self.new.in_features)
        return self.run(self.inputs(x_SBI), h_BH)

    def run(self, x_SBG: Tensor, h_BH: Tensor) -> Tensor:
        """The states, of W x + bias."""
        return gru_steps(x_SBG, self.gates.weight, self.new.weight, self.new.bias, h_BH)


class ScalarMix(nn.Module):
    """gamma * sum_k softmax(scores)_k * layer_k (Peters et al. 2018, ELMo); first a plain mean."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(num_layers))  # [N], before the softmax
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, layers_XNH: Tensor) -> Tensor:
        """[..., N, H] -> [..., H]; float16, as features are stored, is computed in float32."""
        weights_N = self.scores.softmax(dim=0)
        return self.gamma * torch.einsum("n,...nh->...h", weights_N, layers_XNH.to(weights_N.dtype))


class Bidirectional(nn.Module):
    """[B, S, I] -> [B, S, 2G] of LSTMs or GRUs, with dropout on the input of every layer.

    The second direction reads the words reversed and the padding last: nothing need be packed.
    """

    def __init__(
        self,
        cell: Callable[[int, int], nn.Module],
        size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        sizes = [size, *[2 * hidden_size] * (num_layers - 1)]
        self.forwards = nn.ModuleList(cell(size, hidden_size) for size in sizes)
        self.backwards = nn.ModuleList(cell(size, hidden_size) for size in sizes)
        self.dropout = Dropout(dropout)

    def forward(self, x_BSI: Tensor, lengths_B: Tensor) -> Tensor:
        """States of both directions; those at padding mean nothing."""
        x_SBI = x_BSI.transpose(0, 1)
        reversed_SB1 = reversal(lengths_B, len(x_SBI)).t()[:, :, None]
        for ahead, back in zip(self.forwards, self.backwards, strict=True):
            x_SBI = self.dropout(x_SBI)
            left_SBG = ahead(x_SBI)
            right_SBG = back(x_SBI.gather(0, reversed_SB1.expand_as(x_SBI)))
            right_SBG = right_SBG.gather(0, reversed_SB1.expand_as(right_SBG))
            x_SBI = torch.cat([left_SBG, right_SBG], dim=2)
        return x_SBI.transpose(0, 1)


BiLSTM = partial(Bidirectional, LSTM)


class FeatureTagger(nn.Module):
    """A BiLSTM over layers of a word, side by side or mixed, and a linear layer over every word."""

    def __init__(
        self,
        size: int,
        num_read: int,
        mixed: bool,
        num_outputs: int,
        hidden_size: int = HIDDEN_SIZE,
        dropout: float = 0.1,
    ) -> None:
        """For states [..., size] of `num_read` layers; `hidden_size` is that of one direction."""
        super().__init__()
        self.num_outputs = num_outputs
        self.mix = ScalarMix(num_read) if mixed else None
        size = size if mixed else size * num_read
        self.reader = BiLSTM(size, hidden_size, NUM_LAYERS, dropout)
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(2 * hidden_size, num_outputs)

    def initialize(self, generator: torch.Generator) -> FeatureTagger:
        """Uniform up to 1 / sqrt(hidden size), as PyTorch's LSTM; the mixture is left a mean."""
        limit = 1 / math.sqrt(self.classifier.in_features / 2)
        for parameter in (*self.reader.parameters(), *self.classifier.parameters()):
            nn.init.uniform_(parameter, -limit, limit, generator=generator)
        return self

    def forward(self, states_BSNH: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits [B, S, K], those at padding mean nothing; states in any precision."""
        x_BSI = states_BSNH.float().flatten(2) if self.mix is None else self.mix(states_BSNH)
        return self.classifier(self.dropout(self.reader(x_BSI, lengths_B)))
