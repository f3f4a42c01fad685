"""The masked-LM loss with its gradient, a block of masked positions at a time.

The logits of a block become their own gradient in place: one product makes them, one pass over
them takes softmax and loss, two products carry them back. So the logits of all positions, by far
the largest tensor of a small model's step, are not stored. With AMX `llvm/tiled_masked_lm.py` does
it instead, and in int8 `llvm/int8_masked_lm.py`, which keeps them in 16 bits up to a limit.

Elsewhere than on a CPU PyTorch's operators do the same. There shapes do not depend on how many
positions were masked (an unused slot has the label -100), and the vocabulary is padded to whole
vectors: products of a matrix of odd rows (30,522 pieces of 2 bytes) miss the fast kernels.

Letters: N masked positions, or slots for them, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.model.kernels.elementwise import Kernel, has_kernels, next_key, rows, vector
from bertsmith.model.kernels.llvm.blocks import LINE
from bertsmith.model.kernels.llvm.int8_masked_lm import Int8MaskedLMLoss
from bertsmith.model.kernels.llvm.tiled_masked_lm import TiledMaskedLMLoss, has_tiled_loss
from bertsmith.model.kernels.numbers import exp, largest, load, store, vectorized
from bertsmith.model.kernels.unpadded import SHAPES

UNUSED = -100  # PyTorch's own label for what does not count
BLOCK = 512  # masked positions at once: 31 MB of bf16 logits at 30,522 pieces
INT8_LOGITS = 1 << 28  # kept by the loss in int8, in 2 bytes each: of 8,795 positions
CUDA_BLOCK = 8192  # slots at once: 0.5 GB of bf16 logits at 30,522 pieces
ALIGNMENT = 64  # pieces


def masked_lm_loss(
    hidden_NH: Tensor,
    table_VH: Tensor,
    bias_V: Tensor,
    labels_N: Tensor,
    weights_N: Tensor | None = None,
    int8: bool = False,
) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy in nats, number of correct predictions) of hidden @ table^T + bias.

    Each loss counts `weights_N` times (float32; None: once). Products have the dtype of autocast,
    else of `hidden_NH`; the rest is float32 (float64 where hidden is). Labels are int64; where no
    kernel runs, -100 is a slot that does not count. `int8`, on a CPU that has it: all is computed
    as in `llvm/int8_masked_lm.py` where a gradient is wanted, kernels run, H is a multiple of 64
    and there are at most INT8_LOGITS logits.
    """
    if not torch.is_grad_enabled():  # or the weights would ask for gradients even so
        hidden_NH, table_VH, bias_V = hidden_NH.detach(), table_VH.detach(), bias_V.detach()
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(device))
    if weights_N is None:
        weights_N = torch.ones(labels_N.shape, device=labels_N.device)
    kind = _DeviceMaskedLMLoss
    if has_kernels(hidden_NH):
        fits = 0 < len(hidden_NH) * len(table_VH) <= INT8_LOGITS and hidden_NH.shape[1] % LINE == 0
        if int8 and fits and torch.is_grad_enabled():
            given = hidden_NH, table_VH, bias_V, labels_N, weights_N, next_key()
            return Int8MaskedLMLoss.apply(*given)
        kind = TiledMaskedLMLoss if has_tiled_loss(hidden_NH) else _MaskedLMLoss
    return kind.apply(hidden_NH, table_VH, bias_V, labels_N, weights_N)


class _MaskedLMLoss(Kernel):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        hidden_NH, table_VH, bias_V, labels_N, weights_N = given
        count = len(labels_N)
        hidden_NH = F.pad(hidden_NH, (0, 0, 0, -count % SHAPES))  # of zeros, as are their logits
        table, bias = table_VH.to(hidden_NH.dtype), vector(bias_V)
        hidden_gradient, bias_gradient = torch.empty_like(hidden_NH), torch.zeros(len(bias_V))
        table_gradient = None
        loss, correct = 0.0, 0
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            logits = hidden_NH[block] @ table.t()
            labels, weights = labels_N[block].numpy(), weights_N[block].numpy()
            sums = bias_gradient.numpy()
            found = cross_entropy_rows(rows(logits), bias, labels, weights, sums)
            loss, correct = loss + found[0], correct + found[1]
            if not any(ctx.needs_input_grad):  # only measured
                continue
            torch.mm(logits, table, out=hidden_gradient[block])
            part = logits.t() @ hidden_NH[block]
            table_gradient = part if table_gradient is None else table_gradient.float().add_(part)
        if table_gradient is None:  # nothing was masked, or no gradient is wanted
            table_gradient = torch.zeros(table_VH.shape)
        ctx.table_type = table_VH.dtype
        ctx.save_for_backward(hidden_gradient[:count], table_gradient, bias_gradient)
        ctx.mark_non_differentiable(right := torch.tensor(correct))
        return torch.tensor(loss, dtype=torch.float32), right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_gradient, table_gradient, bias_gradient = ctx.saved_tensors
        scale = gradients[0]
        if table_gradient.dtype not in (torch.float32, ctx.table_type):
            table_gradient = table_gradient.float()
        table_gradient = table_gradient.mul_(scale).to(ctx.table_type)  # the step's largest tensor
        return hidden_gradient * scale, table_gradient, bias_gradient * scale, None, None


@vectorized
def cross_entropy_rows(logits, bias, labels, weights, bias_gradient):
    """Logits without bias [at least N, V] to weight * (softmax - one-hot of the label) in place.

    Their sum over the rows is added to `bias_gradient` [V]. Returns (weighted sum of the losses in
    nats, how many labels had the largest logit).
    """
    columns = len(bias)
    exponentials = np.empty(columns, np.float32)
    loss, correct = 0.0, 0
    for row in range(len(labels)):
        line, label, weight = logits[row], labels[row], weights[row]
        for column in range(columns):
            exponentials[column] = load(line[column]) + load(bias[column])
        top, own = largest(exponentials), exponentials[label]
        total = np.float32(0)
        for column in range(columns):
            exponentials[column] = exp(exponentials[column] - top)
            total += exponentials[column]
        loss += weight * (np.log(np.float64(total)) - (own - top))
        correct += own == top
        inverse = weight / total
        for column in range(columns):
            probability = exponentials[column] * inverse
            bias_gradient[column] += probability
            line[column] = store(probability, line[column])
        bias_gradient[label] -= weight
        line[label] = store(exponentials[label] * inverse - weight, line[label])
    return loss, correct


class _DeviceMaskedLMLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        table_VH: Tensor,
        bias_V: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        size = len(bias_V)
        spare = -size % ALIGNMENT
        table = F.pad(table_VH.to(hidden_NH.dtype), (0, 0, 0, spare))
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        bias = F.pad(bias_V.to(exact), (0, spare), value=-torch.inf)
        losses, counts, hidden_gradients, table_gradients, bias_gradients = [], [], [], [], []
        wanted = any(ctx.needs_input_grad)  # else it is only measured
        for start in range(0, max(1, len(labels_N)), CUDA_BLOCK):
            block = slice(start, start + CUDA_BLOCK)
            hidden, labels, weights = hidden_NH[block], labels_N[block], weights_N[block]
            logits = hidden @ table.t()
            loss, correct, gradient = _softmax(logits, bias, labels, weights, wanted)
            losses.append(loss)
            counts.append(correct)
            if gradient is not None:
                bias_gradients.append(gradient.sum(0))
                gradient = gradient.to(hidden.dtype)
                hidden_gradients.append(gradient @ table)
                table_gradients.append(gradient.t() @ hidden)
        if wanted:
            table_gradient = _sum(table_gradients, exact)[:size]
            bias_gradient = _sum(bias_gradients, exact)[:size]
            ctx.save_for_backward(torch.cat(hidden_gradients), table_gradient, bias_gradient)
        ctx.mark_non_differentiable(count := torch.stack(counts).sum())
        return torch.stack(losses).sum(), count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_gradient, table_gradient, bias_gradient = ctx.saved_tensors
        scale = gradients[0]
        hidden_gradient = hidden_gradient * scale.to(hidden_gradient.dtype)
        table_gradient = table_gradient.to(scale.dtype) * scale
        return hidden_gradient, table_gradient, bias_gradient * scale, None, None


def _softmax(
    logits_NV: Tensor, bias_V: Tensor, labels_N: Tensor, weights_N: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(summed loss, number of correct predictions, gradient [N, V] if wanted)."""
    logits_NV = logits_NV.to(bias_V.dtype) + bias_V
    used_N, labels_N1 = labels_N != UNUSED, labels_N.clamp(min=0)[:, None]
    own_N = logits_NV.gather(1, labels_N1)[:, 0]
    log_total_N = logits_NV.logsumexp(1)
    loss = torch.where(used_N, weights_N * (log_total_N - own_N), 0.0).sum()
    correct = (used_N & (own_N == logits_NV.amax(1))).sum()
    if not wanted:
        return loss, correct, None
    # a comparison, not a scatter, so that one pass writes the gradient
    is_label_NV = torch.arange(len(bias_V), device=labels_N.device) == labels_N1
    gradient_NV = (logits_NV - log_total_N[:, None]).exp() - is_label_NV.to(bias_V.dtype)
    return loss, correct, gradient_NV * (used_N * weights_N)[:, None]


def _sum(parts: list[Tensor], exact: torch.dtype) -> Tensor:
    return parts[0] if len(parts) == 1 else sum(parts[1:], parts[0].to(exact))
