"""LSTMs, and taggers of them over the states of a frozen encoder (paper section 5.3, Table 7).

oneDNN's LSTM in bf16 brings its weights into another order in every backward pass, which takes as
long as a batch of 1,000 words. Here the products are plain ones of whole matrices: those of the
inputs for all words at once, those of the state a step at a time, and the gradient of the state's
weights for all steps at once.

Letters as in encoder.py; besides: N layers of the encoder, I inputs, K classes, G the size of one
direction; S counts steps: words, or whatever else is read. In an LSTM H is the size of its state;
its four gates, each of H, are those of PyTorch in its order: input, forget, cell, output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig, training_operations
from bertsmith.model.heads import TaskModel
from bertsmith.model.kernels.elementwise import Dropout


class LSTM(nn.Module):
    """[S, B, I] -> [S, B, H], from a state of zeros (Hochreiter and Schmidhuber 1997).

    With g = W x_s + U h_(s-1) + b in four parts:
    c_s = sigmoid(g_forget) c_(s-1) + sigmoid(g_input) tanh(g_cell)
    h_s = sigmoid(g_output) tanh(c_s)
    """

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(size, 4 * hidden_size)
        self.state = nn.Linear(hidden_size, 4 * hidden_size, bias=False)

    def forward(self, x_SBI: Tensor) -> Tensor:
        return _Recurrence.apply(self.inputs(x_SBI), self.state.weight)


CURVES = torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid  # of the gates, in their order


class _Recurrence(torch.autograd.Function):
    """The steps: gates of the inputs [S, B, 4H] and U [4H, H] -> states [S, B, H].

    Products and states have the type of the gates; cells and what is computed of them are float32.
    """

    @staticmethod
    def forward(ctx: Any, gates_SBG: Tensor, weight_GH: Tensor) -> Tensor:
        steps, rows, size = gates_SBG.shape[0], gates_SBG.shape[1], weight_GH.shape[1]
        weight = weight_GH.to(gates_SBG.dtype)
        opened_SBG = torch.empty_like(gates_SBG, dtype=torch.float32)  # after sigmoid and tanh
        cells_SBH = opened_SBG.new_empty(steps, rows, size)
        states_SBH = gates_SBG.new_empty(steps, rows, size)
        for step in range(steps):
            gates_BG = gates_SBG[step].float()
            if step:
                gates_BG = gates_BG + F.linear(states_SBH[step - 1], weight)
            entered, kept, new, shown = parts = opened_SBG[step].chunk(4, dim=1)
            for curve, gate, part in zip(CURVES, gates_BG.chunk(4, dim=1), parts, strict=True):
                curve(gate, out=part)
            cells_BH = entered * new
            if step:
                cells_BH.addcmul_(kept, cells_SBH[step - 1])
            cells_SBH[step] = cells_BH
            states_SBH[step] = shown * cells_BH.tanh()
        ctx.save_for_backward(opened_SBG, cells_SBH, states_SBH, weight_GH)
        return states_SBH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        opened_SBG, cells_SBH, states_SBH, weight_GH = ctx.saved_tensors
        weight = weight_GH.to(states_SBH.dtype)
        change_SBG = torch.empty_like(opened_SBG, dtype=states_SBH.dtype)
        of_cells_BH = torch.zeros_like(cells_SBH[0])
        for step in reversed(range(len(cells_SBH))):
            of_states_BH = gradients[0][step].float()
            if step + 1 < len(cells_SBH):
                of_states_BH = of_states_BH + change_SBG[step + 1] @ weight
            entered, kept, new, shown = opened_SBG[step].chunk(4, dim=1)
            to_entered, to_kept, to_new, to_shown = change_SBG[step].chunk(4, dim=1)
            bent_BH = cells_SBH[step].tanh()
            of_cells_BH = of_cells_BH + of_states_BH * shown * (1 - bent_BH * bent_BH)
            to_shown.copy_(of_states_BH * bent_BH * shown * (1 - shown))
            to_entered.copy_(of_cells_BH * new * entered * (1 - entered))
            to_new.copy_(of_cells_BH * entered * (1 - new * new))
            if step:
                to_kept.copy_(of_cells_BH * cells_SBH[step - 1] * kept * (1 - kept))
                of_cells_BH = of_cells_BH * kept
            else:
                to_kept.zero_()
        change_NG, before_NH = change_SBG[1:].flatten(0, 1), states_SBH[:-1].flatten(0, 1)
        return change_SBG, (change_NG.t() @ before_NH).to(weight_GH.dtype)


class ScalarMix(nn.Module):
    """gamma * sum_k softmax(scores)_k * layer_k (Peters et al. 2018, ELMo, equation 1).

    It begins as the plain mean of the layers. The letter N stands for layers here.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(num_layers))  # [N], before the softmax
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, layers_XNH: Tensor) -> Tensor:
        """[..., N, H] -> [..., H]; float16, as features are stored, is computed in float32."""
        weights_N = self.scores.softmax(dim=0)
        return self.gamma * torch.einsum("n,...nh->...h", weights_N, layers_XNH.to(weights_N.dtype))


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
        """States of both directions; those at padding mean nothing."""
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
        """Operations of a training step; the encoder's forward pass is a third of its training."""
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
