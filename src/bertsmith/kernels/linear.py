"""A linear layer without its bias, which the kernels behind it add."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.kernels.int8 import Int8Linear


def replaceable(linear: nn.Linear, *others: nn.Module) -> bool:
    """Whether a kernel may compute what these modules would: nobody waits for a call of theirs.

    `pretrain --replay` does, with hooks; so may what a user puts in place of a linear layer.
    """
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    waits = any(getattr(module, name) for module in (linear, *others) for name in hooks)
    return type(linear) in (nn.Linear, Int8Linear) and linear.bias is not None and not waits


def without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    """x @ weight^T, as this layer trains."""
    return linear.product(x) if isinstance(linear, Int8Linear) else F.linear(x, linear.weight)
