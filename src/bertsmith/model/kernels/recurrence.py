"""The steps of an LSTM, of one with projected outputs, and of a GRU in both its forms, with their
gradients.

All products of the inputs are taken before the first step; a step multiplies the state alone, and
compiled passes do what is left of it. The gradient by a weight of the state is one product over all
steps. Products and states have the dtype of the inputs; gates, cells and what is computed of them
are float32. Where no kernel runs, PyTorch's operators do the same and record the gradient.

Letters: S steps, B rows, H size of the state, G all gates: 4 H or 3 H; of a projected LSTM C cells,
P outputs, G = 4 C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import Kernel, flat, has_kernels, rows
from bertsmith.model.kernels.llvm.blocks import COLUMNS, LANES, address, block, has_bf16_vectors
from bertsmith.model.kernels.llvm.packing import PAIR, pack_columns, pack_rows, packed_rows
from bertsmith.model.kernels.numbers import ONE, load, sigmoid, store, tanh, vectorized


def lstm_steps(
    x_SBG: Tensor, weight_GH: Tensor, h_BH: Tensor, c_BH: Tensor
) -> tuple[Tensor, Tensor]:
    """W x + b, U, and the state and cell before the first step -> states and cells [S, B, H]."""
    if has_kernels(x_SBG):
        return _LSTMSteps.apply(x_SBG, weight_GH, h_BH, c_BH)
    weight_GH = weight_GH.to(x_SBG.dtype)
    states, cells = [], []
    for x_BG in x_SBG:
        i, f, g, o = (x_BG + F.linear(h_BH, weight_GH)).chunk(4, dim=1)
        c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
        h_BH = (o.sigmoid() * c_BH.tanh()).to(x_BG.dtype)
        states.append(h_BH)
        cells.append(c_BH)
    return torch.stack(states), torch.stack(cells)


def projected_lstm_steps(
    x_SBG: Tensor,
    weights: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor],
    clips: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """W x + b, (U [G, P], V [P, C]), the output and cells before the first step, which have no
    gradient, and the largest cell and output -> outputs [S, B, P], and cells [S, B, C] to read.

    c = clip(sigmoid(f + 1) c + sigmoid(i) tanh(g)), h = clip(V sigmoid(o) tanh(c))
    """
    if has_kernels(x_SBG):
        return _ProjectedLSTMSteps.apply(x_SBG, *weights, *before, *clips)
    dtype, (cell_clip, output_clip) = x_SBG.dtype, clips
    state_GP, project_PC = (weight.to(dtype) for weight in weights)
    output_BP, cells_BC = before[0].to(dtype), before[1]
    outputs, cells = [], []
    for x_BG in x_SBG:
        i, f, g, o = (x_BG + F.linear(output_BP, state_GP)).to(cells_BC.dtype).chunk(4, dim=1)
        cells_BC = (f + 1).sigmoid() * cells_BC + i.sigmoid() * g.tanh()
        cells_BC = cells_BC.clamp(-cell_clip, cell_clip)
        hidden_BC = (o.sigmoid() * cells_BC.tanh()).to(dtype)
        output_BP = F.linear(hidden_BC, project_PC).clamp(-output_clip, output_clip)
        outputs.append(output_BP)
        cells.append(cells_BC.detach())
    return torch.stack(outputs), torch.stack(cells)


def gru_steps(
    x_SBG: Tensor, gates_2HH: Tensor, new_HH: Tensor, bias_H: Tensor | None, h_BH: Tensor
) -> Tensor:
    """W x + b, the state's weights, and the state before the first step -> states [S, B, H].

    Without `bias_H` the reset gate multiplies the state, with it the state's product.
    """
    if has_kernels(x_SBG):
        return _GRUSteps.apply(x_SBG, gates_2HH, new_HH, bias_H, h_BH)
    states = []
    for x_BG in x_SBG:
        h_BH = gru_step(x_BG, gates_2HH, new_HH, bias_H, h_BH)
        states.append(h_BH)
    return torch.stack(states)


def gru_step(
    x_BG: Tensor, gates_2HH: Tensor, new_HH: Tensor, bias_H: Tensor | None, h_BH: Tensor
) -> Tensor:
    """One step of `gru_steps` by PyTorch's operators."""
    size, dtype = h_BH.shape[1], x_BG.dtype
    x_B2H, x_BH = x_BG.split([2 * size, size], dim=1)
    r, z = (x_B2H + F.linear(h_BH, gates_2HH.to(dtype))).sigmoid().chunk(2, dim=1)
    if bias_H is None:
        product_BH = F.linear(r * h_BH, new_HH.to(dtype))
    else:
        product_BH = r * F.linear(h_BH, new_HH.to(dtype), bias_H.to(dtype))
    return z * h_BH + (1 - z) * (x_BH + product_BH).tanh()


class _LSTMSteps(Kernel):
    @staticmethod
    def forward(
        ctx: Any, x_SBG: Tensor, weight_GH: Tensor, h_BH: Tensor, c_BH: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_SBG, weight = x_SBG.contiguous(), weight_GH.to(x_SBG.dtype)
        gates_SBG = torch.empty_like(x_SBG, dtype=torch.float32)  # after sigmoid and tanh
        states, cells = begun(x_SBG, h_BH), begun(gates_SBG, c_BH)
        product_BG, multiply = step_product(weight, len(h_BH))
        x, gates, h, c = map(matrices, (x_SBG, gates_SBG, states, cells))
        product = rows(product_BG)
        for step, before_BH in enumerate(states[:-1]):
            if step or h_BH.any():
                multiply(before_BH)
            lstm_rows(x[step], product, c[step], gates[step], c[step + 1], h[step + 1], None)
        ctx.save_for_backward(gates_SBG, cells, states, weight_GH)
        ctx.set_materialize_grads(False)  # cells are seldom read
        return states[1:], cells[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gates_SBG, cells, states, weight_GH = ctx.saved_tensors
        weight = weight_GH.to(states.dtype)
        d_x_SBG = torch.empty_like(gates_SBG, dtype=states.dtype)
        d_h_BH, multiply = step_product(weight.t(), states.shape[1])
        d_c_BH = torch.zeros_like(cells[0])
        gates, c, d_x = map(matrices, (gates_SBG, cells, d_x_SBG))
        by_states, by_cells = (
            [rows(torch.zeros_like(like[0]))] * len(d_x)
            if each is None
            else matrices(each.contiguous())
            for each, like in zip(gradients, (states, cells), strict=True)
        )
        d_h, d_c = rows(d_h_BH), rows(d_c_BH)
        for step, d_x_BG in reversed(list(enumerate(d_x_SBG))):
            given = d_h, by_states[step], by_cells[step], gates[step], c[step], c[step + 1]
            lstm_gradient_rows(*given, d_c, d_x[step], None)
            if step or ctx.needs_input_grad[2]:
                multiply(d_x_BG)
        return d_x_SBG, over_steps(d_x_SBG, states[:-1]), d_h_BH, d_c_BH


class _ProjectedLSTMSteps(Kernel):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x_SBG, state_GP, project_PC, output_BP, cells_BC, *ctx.clips = given
        x_SBG, dtype, (cell_clip, output_clip) = x_SBG.contiguous(), x_SBG.dtype, ctx.clips
        gates_SBG = torch.empty_like(x_SBG, dtype=torch.float32)  # after sigmoid and tanh
        outputs, cells = begun(x_SBG, output_BP), begun(gates_SBG, cells_BC)
        hidden_SBC = torch.empty_like(cells[1:], dtype=dtype)
        product_BG, multiply = step_product(state_GP.to(dtype), len(output_BP))
        projected_BP, project = step_product(project_PC.to(dtype), len(output_BP))
        x, gates, c, hidden = map(matrices, (x_SBG, gates_SBG, cells, hidden_SBC))
        product, clip = rows(product_BG), np.float32(cell_clip)
        for step, before_BP in enumerate(outputs[:-1]):
            if step or before_BP.any():
                multiply(before_BP)
            lstm_rows(x[step], product, c[step], gates[step], c[step + 1], hidden[step], clip)
            project(hidden_SBC[step])
            outputs[step + 1] = projected_BP.clamp_(-output_clip, output_clip)
        ctx.save_for_backward(gates_SBG, cells, hidden_SBC, outputs, state_GP, project_PC)
        ctx.mark_non_differentiable(read := cells[1:])
        return outputs[1:], read

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gates_SBG, cells, hidden_SBC, outputs, state_GP, project_PC = ctx.saved_tensors
        dtype, (cell_clip, output_clip) = outputs.dtype, ctx.clips
        d_x_SBG = torch.empty_like(gates_SBG, dtype=dtype)
        is_free_SBP = outputs[1:].abs() < output_clip
        d_outputs_SBP = gradients[0] * is_free_SBP  # by what is clipped
        d_output_BP, multiply = step_product(state_GP.to(dtype).t(), outputs.shape[1])
        d_hidden_BC, project = step_product(project_PC.to(dtype).t(), outputs.shape[1])
        nothing, d_cells = np.zeros(cells.shape[1:], np.float32), np.zeros_like(rows(cells[0]))
        gates, c, d_x, d_hidden = *map(matrices, (gates_SBG, cells, d_x_SBG)), rows(d_hidden_BC)
        for step, d_x_BG in reversed(list(enumerate(d_x_SBG))):
            if step + 1 < len(d_x):
                d_outputs_SBP[step] += d_output_BP * is_free_SBP[step]
            project(d_outputs_SBP[step])
            given = d_hidden, nothing, nothing, gates[step], c[step], c[step + 1], d_cells
            lstm_gradient_rows(*given, d_x[step], np.float32(cell_clip))
            if step:
                multiply(d_x_BG)
        weights = over_steps(d_x_SBG, outputs[:-1]), over_steps(d_outputs_SBP, hidden_SBC)
        return d_x_SBG, *weights, None, None, None, None


class _GRUSteps(Kernel):
    @staticmethod
    def forward(ctx: Any, x_SBG: Tensor, *given: Any) -> Tensor:
        tape = GRUTape.begin(x_SBG, *given)
        for step, x_BG in enumerate(x_SBG.contiguous()):
            tape.forward(step, x_BG)
        ctx.save_for_backward(*tape)
        return tape.states[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tape = GRUTape(*ctx.saved_tensors)
        d_x_SBG, d_operands_SBH = tape.gradients()
        d_h_BH = torch.zeros_like(tape.states[0])
        for step in reversed(range(len(d_x_SBG))):
            d_h_BH = tape.backward(step, d_h_BH + gradients[0][step], d_x_SBG, d_operands_SBH)
        return d_x_SBG, *tape.weight_gradients(d_x_SBG, d_operands_SBH), d_h_BH


class GRUTape(NamedTuple):
    """Left by a GRU's forward steps for its backward steps; its weights."""

    gates_SBG: Tensor  # float32: r, z, n
    states: Tensor  # [S + 1, B, H]; the first is that before the first step
    operands_SBH: Tensor  # what r multiplies: the state before, or its product
    scaled_SBH: Tensor  # r times that
    gates_2HH: Tensor
    new_HH: Tensor
    bias_H: Tensor | None

    @classmethod
    def begin(
        cls,
        x_SBG: Tensor,
        gates_2HH: Tensor,
        new_HH: Tensor,
        bias_H: Tensor | None,
        h_BH: Tensor,
    ) -> GRUTape:
        states = begun(x_SBG, h_BH)
        dtype = x_SBG.dtype
        if bias_H is not None:
            bias_H = bias_H.to(dtype)
        operands_SBH = states[:-1] if bias_H is None else torch.empty_like(states[1:])
        gates_SBG = torch.empty(x_SBG.shape)
        scaled_SBH = torch.empty_like(states[1:])
        weights = gates_2HH.to(dtype), new_HH.to(dtype), bias_H
        return cls(gates_SBG, states, operands_SBH, scaled_SBH, *weights)

    def forward(self, step: int, x_BG: Tensor) -> None:
        """Fill in the state after a step."""
        h_BH, gates, operand = self.states[step], self.gates_SBG[step], self.operands_SBH[step]
        scaled = product = self.scaled_SBH[step]
        if self.bias_H is not None:
            torch.addmm(self.bias_H, h_BH, self.new_HH.t(), out=operand)
        given = x_BG, F.linear(h_BH, self.gates_2HH), operand
        gru_reset_rows(*map(rows, (*given, gates, scaled)))
        if self.bias_H is None:
            product = F.linear(scaled, self.new_HH)
        gru_state_rows(*map(rows, (x_BG, product, h_BH, gates, self.states[step + 1])))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Room for the gradients by W x + b [S, B, 3H] and by what r multiplies [S, B, H]."""
        dtype = self.states.dtype
        return torch.empty_like(self.gates_SBG, dtype=dtype), torch.empty_like(self.scaled_SBH)

    def backward(
        self, step: int, d_h_BH: Tensor, d_x_SBG: Tensor, d_operands_SBH: Tensor
    ) -> Tensor:
        """The gradient by the state before a step, from that by the state after it."""
        gates, d_x_BG, d_operand_BH = self.gates_SBG[step], d_x_SBG[step], d_operands_SBH[step]
        size = d_operand_BH.shape[1]
        d_before_BH = torch.empty_like(d_h_BH)
        given = d_h_BH, self.states[step], gates
        gru_state_gradient_rows(*map(rows, (*given, d_x_BG, d_before_BH)))
        d_scaled_BH = d_x_BG[:, 2 * size :]
        if self.bias_H is None:
            d_scaled_BH = d_scaled_BH @ self.new_HH
        given = d_scaled_BH.contiguous(), self.operands_SBH[step], gates
        gru_reset_gradient_rows(*map(rows, (*given, d_x_BG, d_operand_BH)))
        if self.bias_H is None:
            d_before_BH += d_operand_BH
        else:
            d_before_BH.addmm_(d_operand_BH, self.new_HH)
        return d_before_BH.addmm_(d_x_BG[:, : 2 * size], self.gates_2HH)

    def weight_gradients(
        self, d_x_SBG: Tensor, d_operands_SBH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients by the two weights of the state and by the bias, in the weights' own order."""
        size, before_SBH = d_operands_SBH.shape[2], self.states[:-1]
        d_gates_2HH = over_steps(d_x_SBG[..., : 2 * size], before_SBH)
        if self.bias_H is None:
            return d_gates_2HH, over_steps(d_x_SBG[..., 2 * size :], self.scaled_SBH), None
        d_bias_H = d_operands_SBH.float().sum((0, 1))
        return d_gates_2HH, over_steps(d_operands_SBH, before_SBH), d_bias_H


def step_product(weight_NK: Tensor, count: int) -> tuple[Tensor, Callable[[Tensor], object]]:
    """Zeros [count, N], and what fills them with the product of rows [count, K] and a weight.

    The weight is contiguous, or the transpose of one that is. It is packed once for all steps;
    PyTorch packs it for each: 64 rows and 256 x 1,024 take 84 us there and 61 here (Zen 5).
    """
    size, inputs = weight_NK.shape
    fits = weight_NK.dtype == torch.bfloat16 and size % COLUMNS == 0 and inputs % COLUMNS == 0
    if not (fits and has_bf16_vectors()):
        result = weight_NK.new_zeros(count, size)
        return result, lambda x_BK: torch.mm(x_BK, weight_NK.t(), out=result)
    if weight_NK.is_contiguous():
        packed = np.empty((size // COLUMNS, inputs // 2, COLUMNS), np.uint32)
        few = np.empty((LANES, inputs), np.uint16)
        pack_columns(rows(weight_NK), 0, size, 0, few, packed)
    else:
        packed, nothing = packed_rows(inputs, size), np.zeros((1, size), np.uint16)
        pack_rows(rows(weight_NK.t()), 0, inputs, 0, nothing, packed, 0)
    result = torch.zeros(count, size)
    filled = rows(result)
    return result, lambda x_BK: multiply_packed(rows(x_BK), packed, filled)


@compiled
def multiply_packed(x, packed, result):
    """Rows [B, K] of bf16 times a packed weight [N / 32, at least K / 2, 32] -> float32 [B, N]."""
    count, inputs = x.shape
    whole = count // 8 * 8  # `block` takes eight at once
    rest, sums = np.zeros((8, inputs), x.dtype), np.empty((8, COLUMNS), np.float32)
    rest[: count - whole] = x[whole:]
    row, pairs = 2 * inputs, inputs // 2  # bytes, number
    for panel in range(len(packed)):
        weight, first = address(packed, panel * packed.shape[1] * COLUMNS), panel * COLUMNS
        target, wide = address(result, first), 4 * result.shape[1]
        block(x, address(x, 0), row, weight, PAIR, target, wide, pairs, whole)
        if whole < count:
            block(x, address(rest, 0), row, weight, PAIR, address(sums, 0), PAIR, pairs, 8)
            result[whole:, first : first + COLUMNS] = sums[: count - whole]


def begun(like_SBX: Tensor, h_BH: Tensor) -> Tensor:
    """Room for what is before S steps and after each, [S + 1, B, H]; the first is filled."""
    states = like_SBX.new_empty(len(like_SBX) + 1, *h_BH.shape)
    states[0] = h_BH
    return states


def matrices(tensor_SBX: Tensor) -> np.ndarray:
    """A contiguous tensor as an array of a matrix a step, for kernels; memory is shared."""
    return flat(tensor_SBX).reshape(tensor_SBX.shape)


def over_steps(d_x_SBG: Tensor, inputs_SBI: Tensor) -> Tensor:
    """The gradient [G, I] by a weight, of all steps at once."""
    return d_x_SBG.flatten(0, 1).t() @ inputs_SBI.flatten(0, 1)


# LLVM makes vectors of a loop only where few pairs of arrays could overlap: hence short loops.


@vectorized
def lstm_rows(x, product, before, gates, cells, states, clip):
    """W x + b and U h [B, 4H], and the cells before -> gates, cells and states after.

    With a clip: the largest cell, and 1 is added to what opens the forget gate.
    """
    size = cells.shape[1]
    for row in range(len(cells)):
        line = gates[row]
        i, f, g, o = line[:size], line[size : 2 * size], line[2 * size : 3 * size], line[3 * size :]
        for column in range(4 * size):
            line[column] = load(x[row, column]) + load(product[row, column])
        if clip is not None:
            for column in range(size):
                f[column] += ONE
        for column in range(2 * size):
            line[column] = sigmoid(line[column])
        for column in range(size):
            g[column] = tanh(g[column])
        for column in range(size):
            o[column] = sigmoid(o[column])
        for column in range(size):
            cells[row, column] = f[column] * before[row, column] + i[column] * g[column]
        if clip is not None:
            for column in range(size):  # not a number stays so
                cell = cells[row, column]
                cell = clip if cell > clip else cell
                cells[row, column] = -clip if cell < -clip else cell
        for column in range(size):
            value = o[column] * tanh(cells[row, column])
            states[row, column] = store(value, states[row, column])


@vectorized
def lstm_gradient_rows(d_states, by_states, by_cells, gates, before, cells, d_cells, d_x, clip):
    """Gradients by states and cells, of the steps after and of others -> by W x + b.

    `d_cells` becomes the gradient by the cells before. Through a clipped cell passes none.
    """
    size = cells.shape[1]
    made = np.empty(4 * size, np.float32)
    for row in range(len(cells)):
        line, d_c = gates[row], d_cells[row]
        for column in range(size):
            forget, new, out = column + size, column + 2 * size, column + 3 * size
            i, f, g, o = line[column], line[forget], line[new], line[out]
            d_h = (load(d_states[row, column]) + load(by_states[row, column])) * o
            t = tanh(cells[row, column])
            d = d_c[column] + by_cells[row, column] + d_h * (ONE - t * t)
            if clip is not None:
                d = d if abs(cells[row, column]) < clip else np.float32(0)
            made[column] = d * i * g * (ONE - i)
            made[new] = d * i * (ONE - g * g)
            made[out] = d_h * t * (ONE - o)
            d *= f
            made[forget] = d * before[row, column] * (ONE - f)
            d_c[column] = d
        for column in range(4 * size):
            d_x[row, column] = store(made[column], d_x[row, column])


@vectorized
def gru_reset_rows(x, product, operand, gates, scaled):
    """Gates r and z of W x + b [B, 3H] and U h [B, 2H]; r times the operand."""
    size = scaled.shape[1]
    for row in range(len(scaled)):
        for column in range(2 * size):
            gates[row, column] = sigmoid(load(x[row, column]) + load(product[row, column]))
        for column in range(size):
            value = gates[row, column] * load(operand[row, column])
            scaled[row, column] = store(value, operand[row, column])


@vectorized
def gru_state_rows(x, product, before, gates, states):
    """n of W x + b [B, 3H] and the product [B, H]; the states after."""
    size = states.shape[1]
    for row in range(len(states)):
        for column in range(size):
            update, new = column + size, column + 2 * size
            z, n = gates[row, update], tanh(load(x[row, new]) + load(product[row, column]))
            gates[row, new] = n
            value = z * load(before[row, column]) + (ONE - z) * n
            states[row, column] = store(value, before[row, column])


@vectorized
def gru_state_gradient_rows(d_states, before, gates, d_x, d_before):
    """Gradients by states -> by the inputs of z and n, and by the states before."""
    size = before.shape[1]
    for row in range(len(before)):
        for column in range(size):
            update, new = column + size, column + 2 * size
            z, n = gates[row, update], gates[row, new]
            d_h = load(d_states[row, column])
            like = d_x[row, update]
            d_x[row, update] = store(d_h * (load(before[row, column]) - n) * z * (ONE - z), like)
            d_x[row, new] = store(d_h * (ONE - z) * (ONE - n * n), like)
            d_before[row, column] = store(d_h * z, like)


@vectorized
def gru_reset_gradient_rows(d_scaled, operand, gates, d_x, d_operand):
    """The gradient by r times the operand -> by the input of r, and by the operand."""
    size = operand.shape[1]
    for row in range(len(operand)):
        for column in range(size):
            r, d = gates[row, column], load(d_scaled[row, column])
            value = d * load(operand[row, column]) * r * (ONE - r)
            d_x[row, column] = store(value, d_scaled[row, column])
            d_operand[row, column] = store(d * r, d_scaled[row, column])
