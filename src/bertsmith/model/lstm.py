"""LSTMs, and a tagger of them over the states of a frozen encoder (paper section 5.3, Table 7).

oneDNN's LSTM in bf16 reorders its weights in every backward pass, which takes as long as a batch of
1,000 words. Here the matrix products are plain ones, and all but those of the state run for all
steps at once.

Letters as in encoder.py; besides: N layers of the encoder, I inputs, K classes, S steps (words or
tokens), G the size of one direction; in an LSTM H is the size of its state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.variants import reversal

HIDDEN_SIZE, NUM_LAYERS = 768, 2  # of the LSTM: the paper's
LAYERS_READ = 4  # the encoder's last ones, side by side: the best row of Table 7
ACTIVATIONS = torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid  # of the gates, in order


class LSTM(nn.Module):
    """[S, B, I] -> [S, B, H], from a state of zeros (Hochreiter and Schmidhuber 1997).

    With i, f, g, o = W x_s + U h_(s-1) + b in four parts, in PyTorch's order:
    c_s = sigmoid(f) c_(s-1) + sigmoid(i) tanh(g)
    h_s = sigmoid(o) tanh(c_s)
    """

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(size, 4 * hidden_size)
        self.state = nn.Linear(hidden_size, 4 * hidden_size, bias=False)

    def forward(self, x_SBI: Tensor) -> Tensor:
        return _Recurrence.apply(self.inputs(x_SBI), self.state.weight)


class _Recurrence(torch.autograd.Function):
    """The steps: W x + b [S, B, 4H] and U [4H, H] -> states [S, B, H].

    Products and states have the dtype of W x + b; cells and what is computed of them are float32.
    """

    @staticmethod
    def forward(ctx: Any, x_SBG: Tensor, weight_GH: Tensor) -> Tensor:
        steps, rows, size = x_SBG.shape[0], x_SBG.shape[1], weight_GH.shape[1]
        weight = weight_GH.to(x_SBG.dtype)
        gates_SBG = torch.empty_like(x_SBG, dtype=torch.float32)  # after sigmoid and tanh
        cells_SBH = gates_SBG.new_empty(steps, rows, size)
        states_SBH = x_SBG.new_empty(steps, rows, size)
        for step in range(steps):
            x_BG = x_SBG[step].float()
            if step:
                x_BG = x_BG + F.linear(states_SBH[step - 1], weight)
            i, f, g, o = gates = gates_SBG[step].chunk(4, dim=1)
            for activation, x, gate in zip(ACTIVATIONS, x_BG.chunk(4, dim=1), gates, strict=True):
                activation(x, out=gate)
            cells_BH = i * g
            if step:
                cells_BH.addcmul_(f, cells_SBH[step - 1])
            cells_SBH[step] = cells_BH
            states_SBH[step] = o * cells_BH.tanh()
        ctx.save_for_backward(gates_SBG, cells_SBH, states_SBH, weight_GH)
        return states_SBH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gates_SBG, cells_SBH, states_SBH, weight_GH = ctx.saved_tensors
        weight = weight_GH.to(states_SBH.dtype)
        d_x_SBG = torch.empty_like(gates_SBG, dtype=states_SBH.dtype)
        d_cells_BH = torch.zeros_like(cells_SBH[0])
        for step in reversed(range(len(cells_SBH))):
            d_states_BH = gradients[0][step].float()
            if step + 1 < len(cells_SBH):
                d_states_BH = d_states_BH + d_x_SBG[step + 1] @ weight
            i, f, g, o = gates_SBG[step].chunk(4, dim=1)
            d_i, d_f, d_g, d_o = d_x_SBG[step].chunk(4, dim=1)
            tanh_BH = cells_SBH[step].tanh()
            d_cells_BH = d_cells_BH + d_states_BH * o * (1 - tanh_BH * tanh_BH)
            d_o.copy_(d_states_BH * tanh_BH * o * (1 - o))
            d_i.copy_(d_cells_BH * g * i * (1 - i))
            d_g.copy_(d_cells_BH * i * (1 - g * g))
            if step:
                d_f.copy_(d_cells_BH * cells_SBH[step - 1] * f * (1 - f))
                d_cells_BH = d_cells_BH * f
            else:
                d_f.zero_()
        d_weight_GH = d_x_SBG[1:].flatten(0, 1).t() @ states_SBH[:-1].flatten(0, 1)
        return d_x_SBG, d_weight_GH.to(weight_GH.dtype)


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


class BiLSTM(nn.Module):
    """[B, S, I] -> [B, S, 2G], with dropout on the input of every layer.

    The second direction reads the words reversed and the padding last: nothing need be packed.
    """

    def __init__(self, size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [size, *[2 * hidden_size] * (num_layers - 1)]
        self.forwards = nn.ModuleList(LSTM(size, hidden_size) for size in sizes)
        self.backwards = nn.ModuleList(LSTM(size, hidden_size) for size in sizes)
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
