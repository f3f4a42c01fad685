"""An LSTM in one direction, whose products are as quick as the machine's.

oneDNN's LSTM in bf16 brings its weights into another order in every backward pass, which takes as
long as a batch of 1,000 words. Here the products are plain ones of whole matrices: those of the
inputs for all words at once, those of the state a step at a time, and the gradient of the state's
weights for all steps at once.

B rows, S steps, I inputs, H the size of the state; the four gates, each of H, are those of PyTorch
in its order: input, forget, cell, output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
            entered, kept, new, shown = opened_SBG[step].chunk(4, dim=1)
            for opened, gate in zip((entered, kept, shown), _of_sigmoid(gates_BG), strict=True):
                torch.sigmoid(gate, out=opened)
            torch.tanh(gates_BG[:, 2 * size : 3 * size], out=new)
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


def _of_sigmoid(gates_BG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    entered, kept, _, shown = gates_BG.chunk(4, dim=1)
    return entered, kept, shown
