"""Linear layers that train with low-precision products: int8 on a CPU, float8 on a GPU.

int8, with AVX-512 twice as fast as bf16: results and gradients by the input, as in SwitchBack
(Wortsman et al. 2023, arXiv 2304.13013). Each row is scaled so that its largest element is 127;
sums are exact integers. SwitchBack leaves the weight's gradient, a sum over all tokens, in 16 bits;
here it is int8, too, with scales for some tokens at a time: `llvm/weight_gradient.py`.

float8: all three products, of e4m3 for input and weight, e5m2 (more range) for the gradient, as in
Micikevicius et al. 2022 (arXiv 2209.05433). Each tensor is scaled at every use so that its largest
element is the format's largest. Master weights stay float32.

Letters: N rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, _int_mm, nn  # pyright: ignore[reportPrivateImportUsage]

from bertsmith.model.kernels.elementwise import has_kernels, rows
from bertsmith.model.kernels.llvm.weight_gradient import int8_weight_gradient
from bertsmith.model.kernels.numbers import (
    LARGEST_BYTE,
    MAGNITUDE,
    ROUND,
    SMALLEST,
    bits_to_float,
    float_to_bits,
    load,
    store,
    vectorized,
)

NO_FACTORS = np.zeros(0, np.float32)

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension, which the product asks for


def use_int8(model: nn.Module) -> None:
    """Train the encoder's linear layers in int8, but not the model's sensitive first and last."""
    for linear in _inner_linears(model):
        linear.__class__ = Int8Linear


def use_float8(model: nn.Module) -> None:
    """Train the same layers in float8, where their sizes allow it."""
    for linear in _inner_linears(model):
        if linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0:
            linear.__class__ = Float8Linear


def _inner_linears(model: nn.Module) -> list[nn.Linear]:
    named = model.named_modules()
    return [m for name, m in named if type(m) is nn.Linear and ".layers." in f".{name}"]


def has_int8(device: torch.device) -> bool:
    """True for a CPU that multiplies and adds int8, and bf16, in one instruction."""
    has_vnni, has_bf16 = torch.cpu._is_vnni_supported(), torch.cpu._is_avx512_bf16_supported()
    return device.type == "cpu" and has_vnni and has_bf16


@vectorized
def quantized_rows(matrix, factors, values, scales):
    """values = matrix x factors / scales, rounded; a row's scale makes its largest element 127.

    matrix [N, C], factors [C] or none: [0], values int8 [N, C], scales float32 [N]. The scale of a
    row that is not finite is not finite either.
    """
    line = np.empty(matrix.shape[1], np.float32)
    for row in range(len(matrix)):
        source, target = matrix[row], values[row]
        if len(factors):
            for column in range(len(line)):
                line[column] = load(source[column]) * factors[column]
        else:
            for column in range(len(line)):
                line[column] = load(source[column])
        bits = np.int32(0)
        for column in range(len(line)):  # as integers, see `largest`
            bits = max(bits, float_to_bits(line[column]) & MAGNITUDE)
        top = bits_to_float(bits)
        top = SMALLEST if top < SMALLEST else top  # not a number stays so
        inverse = LARGEST_BYTE / top
        scales[row] = top / LARGEST_BYTE
        for column in range(len(line)):
            target[column] = np.int8(float_to_bits(line[column] * inverse + ROUND))


@vectorized
def scaled_rows(sums, row_scales, column_scales, outputs):
    """outputs = sums (int32 [N, C]) x scales of rows [N] and of columns ([C], or [0] for none)."""
    for row in range(len(sums)):
        line, target, scale = sums[row], outputs[row], row_scales[row]
        if len(column_scales):
            for column in range(len(line)):
                value = np.float32(line[column]) * (scale * column_scales[column])
                target[column] = store(value, target[column])
        else:
            for column in range(len(line)):
                target[column] = store(np.float32(line[column]) * scale, target[column])


def quantized(matrix: Tensor, factors: np.ndarray = NO_FACTORS) -> tuple[Tensor, np.ndarray]:
    """(int8 [N, C], the scales of its rows, float32 [N]) of a matrix whose columns get `factors`.

    >>> values, scales = quantized(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> values.tolist(), round(float(scales[0]) * 127, 3)
    ([[64, -127], [0, 0]], 2.0)
    """
    values, scales = torch.empty(matrix.shape, dtype=torch.int8), np.empty(len(matrix), np.float32)
    quantized_rows(rows(matrix), factors, values.numpy(), scales)
    return values, scales


def _int8_matmul(
    left: Tensor, right: Tensor, row_scales: np.ndarray, column_scales: np.ndarray = NO_FACTORS
) -> Tensor:
    """left @ right, int8, with their scales, in bf16."""
    sums = _int_mm(left, right)
    result = torch.empty(sums.shape, dtype=torch.bfloat16)
    scaled_rows(sums.numpy(), row_scales, column_scales, rows(result))
    return result


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        x, x_scales = quantized(x_NI)
        weight, ctx.weight_scales = quantized(weight_OI)
        ctx.save_for_backward(x_NI, weight)
        return _int8_matmul(x, weight.t(), x_scales, ctx.weight_scales)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_NI, weight = ctx.saved_tensors
        gradient_NO = gradients[0].contiguous()
        # of the weight's scales, which this sum runs over, the gradient's columns take theirs
        gradient, scales = quantized(gradient_NO, ctx.weight_scales)
        x_gradient = _int8_matmul(gradient, weight, scales)
        return x_gradient, int8_weight_gradient(gradient_NO, x_NI)


class Int8Linear(nn.Linear):
    """A linear layer that trains in int8; without gradients as it was."""

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and has_kernels(input)):
            return super().forward(input)
        return self.product(input) + self.bias.to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        """x @ weight^T in bf16, [..., I] -> [..., O]."""
        flat_NI = x.flatten(0, -2).to(torch.bfloat16).contiguous()
        # a float32 weight is copied here: NumPy would hold its memory, which sharding must free
        return _Int8Linear.apply(flat_NI, self.weight.to(torch.bfloat16)).unflatten(0, x.shape[:-1])


def has_float8(device: torch.device) -> bool:
    """True if the device multiplies float8 matrices: Ada, Hopper and newer."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale as float32 []): the largest element becomes the largest number.

    >>> values, scale = scaled(torch.tensor([1.0, -2.0]), torch.float8_e4m3fn)
    >>> values.tolist(), round(scale.item() * 448, 3)
    ([224.0, -448.0], 2.0)
    """
    limit = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=float(SMALLEST)) / limit
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


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
        g_t, weight_t, x_t = (part.t().contiguous() for part in (g, weight, x))
        x_gradient = _float8_matmul(g, weight_t, scale, weight_scale, gradient_NO.dtype)
        weight_gradient = _float8_matmul(g_t, x_t, scale, x_scale, ctx.weight_dtype)
        return x_gradient, weight_gradient, gradient_NO.sum(0, dtype=torch.float32)


def _float8_matmul(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """left @ right^T, both with contiguous rows."""
    fast = bias is not None  # the forward pass bears the chip's faster sums, of fewer bits
    scales = left_scale, right_scale
    matmul = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return matmul(left, right.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=fast)


class Float8Linear(nn.Linear):
    """A linear layer that trains in float8; without gradients, and for odd shapes, as it was."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.shape[:-1].numel()
        if not torch.is_grad_enabled() or rows % MULTIPLE:
            return super().forward(input)
        flat_NI = input.flatten(0, -2).to(torch.bfloat16)
        return _Float8Linear.apply(flat_NI, self.weight, self.bias).unflatten(0, input.shape[:-1])


def check_float8(width: int, tokens: int) -> None:
    """Errors: ValueError for a hidden size, or tokens at once, of which no product is float8."""
    for what, number, hint in (
        ("hidden size", width, ""),
        ("tokens at once (rows x length)", tokens, ", or another `micro_batch_size`"),
    ):
        if number % MULTIPLE:
            raise ValueError(
                f"`precision='float8'`: the {what}, {number:,}, must be a multiple of {MULTIPLE}:"
                f" else the products would be bf16: use `precision='bf16'`{hint}"
            )
