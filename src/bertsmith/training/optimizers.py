"""AdamW, the paper's Adam, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class PaperAdam(torch.optim.Optimizer):
    """Adam without bias correction, decay decoupled: google-research/bert optimization.py.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w - rate (m / (sqrt(v) + eps) + decay w)
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                first, second = state["exp_avg"], state["exp_avg_sq"]
                first.lerp_(weight.grad, 1 - beta1)
                second.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
                # decay reads the weight from before the update, as the original does
                weight.mul_(1 - rate * group["weight_decay"])
                weight.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-rate)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: biases and LayerNorm are not decayed, all else is, embeddings too (paper A.2)."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        exempt = name.endswith("bias") or ".norm." in name or "_norm." in name
        (plain if exempt else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, kind: str, rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """kind "adamw" (bias-corrected, the default everywhere) or "paper-adam"."""
    groups = parameter_groups(model, weight_decay)
    if kind == "paper-adam":
        return PaperAdam(groups, lr=rate)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-6, fused=True)
    raise ValueError(f"optimizer '{kind}': known are 'adamw' and 'paper-adam'")


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as flat named tensors: "exp_avg:encoder.layers.0.qkv.weight", ..."""
    return {
        f"{kind}:{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `state_tensors` gave.

    Errors: ValueError when a tensor belongs to no parameter or has another shape.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        kind, name = key.split(":", 1)
        if name not in parameters or (kind != "step" and value.shape != parameters[name].shape):
            raise ValueError(
                f"the optimizer state holds '{key}' of shape {tuple(value.shape)}, "
                "which does not fit this model: the checkpoint is of another size"
            )
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device).clone()
