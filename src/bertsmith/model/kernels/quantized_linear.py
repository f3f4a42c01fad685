"""Linear layers that train with low-precision products: int8 on a CPU, float8 on a GPU.

int8: results and gradients by the input as in SwitchBack (Wortsman et al. 2023, arXiv 2304.13013),
which leaves the weight's gradient, a sum over all tokens, in 16 bits; here it is int8, too, with
scales for some tokens at a time: `llvm/weight_gradient.py`. The other two are the products of
answers, `llvm/unpadded_encoder.py`: a row of x, or of the gradient, is quantized by its range, a
row of the weight by its largest element, sums are exact integers.

float8: all three products, of e4m3 for input and weight, e5m2 (more range) for the gradient, as in
Micikevicius et al. 2022 (arXiv 2209.05433). Each tensor is scaled at every use so that its largest
element is the format's largest. Master weights stay float32.

Letters: N rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.base.jit import compiled
from bertsmith.model.kernels.elementwise import Kernel, has_kernels, rows
from bertsmith.model.kernels.llvm.blocks import (
    COLUMNS,
    LANES,
    LINE,
    ROWS,
    address,
    begin,
    cpu_features,
    end,
    transpose_words,
    zeros,
)
from bertsmith.model.kernels.llvm.unpadded_encoder import Linear, product
from bertsmith.model.kernels.llvm.vector_rows import PLAIN, quantize_row
from bertsmith.model.kernels.llvm.weight_gradient import int8_weight_gradient, like_rows, share_rows
from bertsmith.model.kernels.numbers import (
    LARGEST_BYTE,
    MAGNITUDE,
    SMALLEST,
    bits_to_float,
    float_to_bits,
    load,
    whole,
)

ROWS_AT_ONCE = 256  # quantized, and multiplied while they are in the second cache

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension, which the product of float8 asks for


def use_int8(model: nn.Module) -> None:
    """Train the encoder's linear layers in int8, but not the model's sensitive first and last.

    Of a head only the masked-LM loss is in int8 (`masked_lm_loss.py`). A layer whose sizes are no
    multiples of 64 stays as it is.

    Errors: ValueError if that is so of all.
    """
    linears = _inner_linears(model)
    chosen = [own for own in linears if not (own.in_features % LINE or own.out_features % LINE)]
    if linears and not chosen:
        sizes = ", ".join(sorted({f"{own.in_features} x {own.out_features}" for own in linears}))
        raise ValueError(
            f"`precision='int8'`: the layers' sizes, {sizes}, are no multiples of {LINE}; use bf16"
        )
    for linear in chosen:
        linear.__class__ = Int8Linear
    if hasattr(model, "int8_loss"):
        pretraining: Any = model
        pretraining.int8_loss = True


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
    return device.type == "cpu" and {"avx512vnni", "avx512bf16"} <= cpu_features()


@compiled
def quantize_columns(weight, panel, scale, total):
    """At most 32 rows of a weight [O, I], a column of the matmul each, as the bytes of `panel`.

    A row's `scale` float32 [O] makes its largest element 127; its `total` is as `Linear` has it.
    """
    inputs = weight.shape[1]
    for r in range(len(weight)):
        source, target, bits = weight[r], panel[r], np.int32(0)
        for column in range(inputs):  # as integers, see `largest`
            bits = max(bits, float_to_bits(load(source[column])) & MAGNITUDE)
        top = bits_to_float(bits)
        top = SMALLEST if top < SMALLEST else top  # not a number stays so
        inverse, own = LARGEST_BYTE / top, np.int32(0)
        for column in range(inputs):
            target[column] = np.int8(whole(load(source[column]) * inverse))
        for column in range(inputs):
            own += np.int32(target[column])
        scale[r] = top / LARGEST_BYTE
        total[r] = np.float32(own) * scale[r]


@compiled
def pack_inputs(panel, by_inputs, number):
    """The bytes [32, I] as the panel of that number, int32 [I / 4, 32]: four inputs in a word."""
    words, groups = panel.view(np.int32), panel.shape[1] // 4
    for r in range(0, COLUMNS, LANES):
        for k in range(0, groups, LANES):
            source = address(words, r * groups + k)
            target = address(by_inputs, (number * groups + k) * COLUMNS + r)
            transpose_words(source, 4 * groups, target, 4 * COLUMNS)


@compiled
def pack_weight(weight, scale, total, by_inputs, by_outputs, output_total):
    """int8 of a weight [O, I], packed for products over its inputs and over its outputs.

    A row's `scale` float32 [O] makes its largest element 127. by_inputs int32 [O / 32, I / 4, 32]
    has four inputs of an output in a word, by_outputs [I / 32, O / 4, 32] four outputs of an input
    (`packed` in blocks.py). The sums `total` float32 [O] are as `Linear` has them, `output_total`
    float32 [I] are those of the bytes, without scales.
    """
    outputs, inputs = weight.shape
    panel, sums = np.empty((COLUMNS, inputs), np.int8), np.zeros(inputs, np.int32)
    for first in range(0, outputs, COLUMNS):
        columns = slice(first, first + COLUMNS)
        quantize_columns(weight[columns], panel, scale[columns], total[columns])
        pack_inputs(panel, by_inputs, first // COLUMNS)
        for r in range(0, COLUMNS, 4):
            one, two, three, four = panel[r], panel[r + 1], panel[r + 2], panel[r + 3]
            for n in range(inputs // COLUMNS):
                line = by_outputs[n, (first + r) // 4]
                for c in range(COLUMNS):
                    column = COLUMNS * n + c
                    p, q = np.int32(one[column]), np.int32(two[column])
                    s, t = np.int32(three[column]), np.int32(four[column])
                    line[c] = (p & 255) | (q & 255) << 8 | (s & 255) << 16 | t << 24
                    sums[column] += p + q + s + t
    for column in range(inputs):
        output_total[column] = np.float32(sums[column])


@compiled
def multiply_rows(matrix, factors, linear, like, outputs):
    """outputs [N, C] = (bf16 matrix [N, K] x factors) times a layer's int8, in bf16.

    `factors` are [K] or None. `like` is an array of the dtype of quantized rows. A row that is not
    finite has such outputs.
    """
    count, inputs = matrix.shape
    at_once = max(ROWS, min(ROWS_AT_ONCE, (count + ROWS - 1) // ROWS * ROWS))
    quantized, sums = zeros(at_once, inputs, like), zeros(ROWS, COLUMNS, np.empty(1, np.int32))
    ranges, likes = np.empty((2, at_once), np.float32), (matrix, like)
    begin(like)
    for first in range(0, count, at_once):
        here = min(at_once, count - first)
        for r in range(here):
            source, target = address(matrix, (first + r) * inputs), address(quantized, r * inputs)
            if factors is None:
                found = quantize_row(likes, source, None, target, inputs)
            else:
                found = quantize_row(likes, source, address(factors, 0), target, inputs)
            ranges[0, r], ranges[1, r] = found
        product(quantized, ranges, 0, here, linear, 0, PLAIN, outputs, first, sums)
    end(like)


def packed_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """A weight as `pack_weight` has it: (by_inputs, by_outputs, scale, total, output_total)."""
    outputs, inputs = weight_OI.shape
    assert outputs % LINE == 0 and inputs % LINE == 0, weight_OI.shape
    by_inputs, by_outputs = (  # PyTorch's memory begins with a line of the cache, for AMX
        torch.empty((columns // COLUMNS, depth // 4, COLUMNS), dtype=torch.int32)
        for columns, depth in ((outputs, inputs), (inputs, outputs))
    )
    scale, total = np.empty((2, outputs), np.float32)
    output_total = np.empty(inputs, np.float32)
    packings = by_inputs.numpy(), by_outputs.numpy()
    pack_weight(rows(weight_OI), scale, total, *packings, output_total)
    return by_inputs, by_outputs, scale, total, output_total


def int8_product(
    matrix: Tensor,
    packing: Tensor,
    scale: np.ndarray,
    total: np.ndarray,
    factors: np.ndarray | None = None,
) -> Tensor:
    """(matrix [N, K] x factors) times a packed weight of C columns, bf16 [N, C]."""
    outputs = torch.empty((len(matrix), len(scale)), dtype=torch.bfloat16)
    weight, no_bias = packing.numpy().view(np.int8).reshape(1, -1), np.zeros_like(scale)
    linear = Linear(weight, *(vector[None] for vector in (scale, total, no_bias)))
    like, source, target = like_rows(matrix.shape[1]), rows(matrix), rows(outputs)

    def multiply(start: int, stop: int) -> None:
        part = slice(start, stop)
        multiply_rows(source[part], factors, linear, like, target[part])

    share_rows(multiply, len(source), outputs.shape[1] * matrix.shape[1])
    return outputs


class _Int8Linear(Kernel):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        by_inputs, by_outputs, scale, total, output_total = packed_weight(weight_OI)
        ctx.save_for_backward(x_NI, by_outputs)
        ctx.scale, ctx.output_total = scale, output_total
        return int8_product(x_NI, by_inputs, scale, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_NI, by_outputs = ctx.saved_tensors
        gradient_NO = gradients[0].contiguous()
        # of the weight's scales, which this sum runs over, the gradient's columns take theirs
        total, ones = ctx.output_total, np.ones_like(ctx.output_total)
        x_gradient = int8_product(gradient_NO, by_outputs, ones, total, factors=ctx.scale)
        return x_gradient, int8_weight_gradient(gradient_NO, x_NI)


class Int8Linear(nn.Linear):
    """A linear layer that trains in int8; without gradients as it was."""

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input, self.weight, self.bias)

    @staticmethod
    def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """x @ weight^T + bias, as of a layer with that weight."""
        if not (torch.is_grad_enabled() and has_kernels(x)):
            return F.linear(x, weight_OI, bias_O)
        return int8_matmul(x, weight_OI) + bias_O.to(torch.bfloat16)


def int8_matmul(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight^T in int8 with its gradients, as bf16: [..., I] -> [..., O]."""
    flat_NI = x.flatten(0, -2).to(torch.bfloat16).contiguous()
    # a float32 weight is copied here: NumPy would hold its memory, which sharding must free
    return _Int8Linear.apply(flat_NI, weight_OI.to(torch.bfloat16)).unflatten(0, x.shape[:-1])


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
