"""The masked-LM loss with its gradient, a block of masked positions at a time.

The logits of a block become their own gradient where they lie: one product makes them, one pass
over them takes softmax and loss, two products carry them back. Whole logits, which are the largest
thing of a small model's step by far, are never stored, and nothing is computed twice.

Letters: N masked positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.kernels.cuda_masked_lm_loss import device_masked_lm_loss
from bertsmith.kernels.numbers import (
    exp,
    has_kernels,
    largest,
    load,
    rows,
    store,
    vector,
    vectorised,
)

BLOCK = 512  # masked positions at once: 31 MB of bf16 logits at 30,522 pieces


@vectorised
def cross_entropy_rows(logits, bias, labels, bias_gradient):
    """Logits without bias [N, V] to (softmax - one-hot of the label) in place.

    The rows' sum is added to `bias_gradient` [V]. Returns (sum of the losses in nats, how many
    labels had the largest logit).
    """
    columns = len(bias)
    exponentials = np.empty(columns, np.float32)
    loss, right = 0.0, 0
    for row in range(len(logits)):
        line, label = logits[row], labels[row]
        for column in range(columns):
            exponentials[column] = load(line[column]) + load(bias[column])
        top, own = largest(exponentials), exponentials[label]
        total = np.float32(0)
        for column in range(columns):
            exponentials[column] = exp(exponentials[column] - top)
            total += exponentials[column]
        loss += np.log(np.float64(total)) - (own - top)
        right += own == top
        inverse = np.float32(1) / total
        for column in range(columns):
            share = exponentials[column] * inverse
            bias_gradient[column] += share
            line[column] = store(share, line[column])
        bias_gradient[label] -= np.float32(1)
        line[label] = store(exponentials[label] * inverse - np.float32(1), line[label])
    return loss, right


class _MaskedLMLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, table_VH: Tensor, bias_V: Tensor, labels_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        size, width = table_VH.shape
        table = table_VH.to(hidden_NH.dtype)
        bias_gradient = torch.zeros(size)
        bias = vector(bias_V)
        hidden_gradient = torch.empty_like(hidden_NH)
        table_gradient = None
        loss, right = 0.0, 0
        for start in range(0, len(labels_N), BLOCK):
            block = slice(start, start + BLOCK)
            logits = hidden_NH[block] @ table.t()
            found = cross_entropy_rows(
                rows(logits),
                bias,
                labels_N[block].numpy(),
                bias_gradient.numpy(),
            )
            loss, right = loss + found[0], right + found[1]
            if not any(ctx.needs_input_grad):  # only measured
                continue
            torch.mm(logits, table, out=hidden_gradient[block])
            part = logits.t() @ hidden_NH[block]
            table_gradient = part if table_gradient is None else table_gradient.float().add_(part)
        if table_gradient is None:  # nothing was masked, or no gradient is wanted
            table_gradient = torch.zeros(size, width)
        ctx.table_type = table_VH.dtype
        ctx.save_for_backward(hidden_gradient, table_gradient, bias_gradient)
        ctx.mark_non_differentiable(count := torch.tensor(right))
        return torch.tensor(loss, dtype=torch.float32), count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_gradient, table_gradient, bias_gradient = ctx.saved_tensors
        scale = gradients[0]
        if table_gradient.dtype not in (torch.float32, ctx.table_type):
            table_gradient = table_gradient.float()
        table_gradient = table_gradient.mul_(scale).to(ctx.table_type)  # the step's largest tensor
        return hidden_gradient * scale, table_gradient, bias_gradient * scale, None


def masked_lm_loss(
    hidden_NH: Tensor, table_VH: Tensor, bias_V: Tensor, labels_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy in nats, number of right predictions) of hidden @ table^T + bias.

    Under autocast products are made in its type, otherwise in that of `hidden_NH`; the rest is
    float32. Labels are int64; on an accelerator -100 is a slot that does not count.
    """
    if not torch.is_grad_enabled():  # or the weights would ask for gradients even so
        hidden_NH, table_VH, bias_V = hidden_NH.detach(), table_VH.detach(), bias_V.detach()
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(device))
    if has_kernels(hidden_NH):
        return _MaskedLMLoss.apply(hidden_NH, table_VH, bias_V, labels_N)
    return device_masked_lm_loss(hidden_NH, table_VH, bias_V, labels_N)
