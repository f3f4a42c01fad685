"""Linear layers whose three products run in float8, with one scale a tensor made at every use.

Input and weight are e4m3 (3 bits of fraction), the gradient e5m2 (more range), as in Micikevicius
et al. 2022 (arXiv 2209.05433); a tensor is scaled so that its largest element is the format's
largest. Sums and results are not float8. Master weights stay float32.

Letters: N rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension, which the product asks for
FLOAT8_SMALLEST = 1e-30  # a tensor of zeros has this scale


def has_float8(device: torch.device) -> bool:
    """Whether the device multiplies float8 matrices: Ada, Hopper and newer."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale as float32 []): the largest element becomes the largest number.

    >>> values, scale = scaled(torch.tensor([1.0, -2.0]), torch.float8_e4m3fn)
    >>> values.tolist(), round(scale.item() * 448, 3)
    ([224.0, -448.0], 2.0)
    """
    most = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=FLOAT8_SMALLEST) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        x, x_scale = scaled(x_NI, FORWARD)
        weight, weight_scale = scaled(weight_OI, FORWARD)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        ctx.weight_dtype = weight_OI.dtype
        return _float8_matmul(x, weight, x_scale, weight_scale, x_NI.dtype, bias_O.to(x_NI.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        gradient_NO = gradients[0]
        g, scale = scaled(gradient_NO, BACKWARD)
        x_gradient = _float8_matmul(
            g, weight.t().contiguous(), scale, weight_scale, gradient_NO.dtype
        )
        weight_gradient = _float8_matmul(
            g.t().contiguous(), x.t().contiguous(), scale, x_scale, ctx.weight_dtype
        )
        return x_gradient, weight_gradient, gradient_NO.sum(0, dtype=torch.float32)


def _float8_matmul(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """left @ right^T, both with rows of contiguous elements, as the chip's product asks for."""
    forward = bias is not None  # which bears the chip's faster sums, of fewer bits
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left,
        right.t(),
        left_scale,
        right_scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=forward,
    )


class Float8Linear(nn.Linear):
    """A linear layer that trains in float8; without gradients, and for odd shapes, as it was."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.shape[:-1].numel()
        if not torch.is_grad_enabled() or rows % MULTIPLE:
            return super().forward(input)
        flat_NI = input.flatten(0, -2).to(torch.bfloat16)
        return _Float8Linear.apply(flat_NI, self.weight, self.bias).unflatten(0, input.shape[:-1])


def check_float8(width: int, tokens: int) -> None:
    """Whether a model of that hidden size, with so many tokens at once, trains in float8 at all.

    Errors: ValueError.
    """
    for what, number, remedy in (
        ("hidden size", width, ""),
        ("tokens at once (rows x length)", tokens, ", or another --micro-batch"),
    ):
        if number % MULTIPLE:
            raise ValueError(
                f"--precision float8: the {what}, {number:,}, must be a multiple of {MULTIPLE}:"
                f" else the products would be bf16: use --precision bf16{remedy}"
            )


def use_float8(model: nn.Module) -> None:
    """Let the linear layers of the encoder's layers train in float8; the parameters stay theirs.

    The first and the last products of a model, which are the most sensitive, are not among them.
    """
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or ".layers." not in f".{name}":
            continue
        if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
            module.__class__ = Float8Linear
