"""int8 and float8 layers beside plain ones, as far as their digits go."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit
from torch import nn

from bertsmith.base.processes import Helpers
from bertsmith.model.config import ModelConfig, config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.kernels import quantized_linear
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.model.kernels.fused_layers import linear_gelu, replaceable, without_bias
from bertsmith.model.kernels.llvm import blocks, weight_gradient
from bertsmith.model.kernels.llvm.blocks import packed
from bertsmith.model.kernels.quantized_linear import (
    Float8Linear,
    Int8Linear,
    has_float8,
    has_int8,
    packed_weight,
    scaled,
    use_float8,
    use_int8,
)
from bertsmith.model.variants import project

from .harness import assert_near, error, run, stored_block

# A number is off by half a step, 1 / 254 of its row's largest or 1 / 510 of its range, and evenly
# so: over sqrt(3). Of normal numbers the largest of some 100 is 2.7 deviations: 0.6% of a
# deviation, twice, and once more 2^-9 of bf16 give 0.8%. The bias' gradient is a sum of bf16.
PRODUCT, BF16 = 0.012, 0.005
# e4m3 rounds to 2^-4 of a number at most, 2.2% on average over the interval; two operands and a
# result in bf16 give 4%. The gradient in e5m2 has half the digits.
FORWARD, BACKWARD = 0.05, 0.08
ROWS, INPUTS, OUTPUTS = 157, 128, 192  # twice as many rows: more than are quantized at once
CPU = torch.device("cpu")
# where sums of products saturate at 16 bits they are not exact
multiplies = pytest.mark.skipif(not has_int8(CPU), reason="no int8 products")


def layers(dtype=torch.float32):
    torch.manual_seed(1)
    plain = nn.Linear(INPUTS, OUTPUTS)
    nn.init.normal_(plain.bias)
    ours = nn.Linear(INPUTS, OUTPUTS).to(dtype)
    ours.load_state_dict(plain.state_dict())
    ours.__class__ = Int8Linear
    return plain, ours, torch.randn(2, ROWS, INPUTS), torch.randn(2, ROWS, OUTPUTS)


def through(layer, x, above, function=lambda layer, x: layer(x)):
    return run(function, [x], above, layer)


@multiplies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_equal_float32_as_far_as_eight_bits_go(dtype):
    plain, ours, x, above = layers(dtype)
    expected, found = through(plain, x, above), through(ours, x.to(dtype), above)
    assert [part.dtype for part in found] == [torch.bfloat16, dtype, dtype, dtype]
    assert_near(found[:3], expected[:3], PRODUCT)
    assert_near(found[3:], expected[3:], BF16)
    assert error(found[0], expected[0]) > BF16 / 2  # it is not the plain layer


@multiplies
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 33, 256, 257])
def test_any_number_of_rows(rows):
    plain, ours, *_ = layers()
    x, above = torch.randn(rows, INPUTS), torch.randn(rows, OUTPUTS)
    assert_near(through(ours, x, above)[:3], through(plain, x, above)[:3], 1.5 * PRODUCT)


@multiplies
def test_keys_and_values_of_a_last_layer_are_those_of_the_whole_layer():
    qkv = nn.Linear(INPUTS, 3 * INPUTS)
    x, positions = torch.randn(2, 20, INPUTS), torch.tensor([[3, 0], [7, 19]])
    plain = project(qkv, x, positions)[1]
    qkv.__class__ = Int8Linear
    x_part, (query, keys_values) = project(qkv, x, positions)
    (expected,) = project(qkv, x, None)[1]
    assert torch.equal(x_part, x.gather(1, positions[:, :, None].expand(-1, -1, INPUTS)))
    assert torch.equal(query, plain[0])
    assert torch.equal(keys_values, expected[:, :, INPUTS:])
    assert not torch.equal(keys_values, plain[1].bfloat16())


@multiplies
def test_sums_of_tiles_go_through_memory(monkeypatch):
    _, ours, x, above = layers()
    expected = through(ours, x, above)
    monkeypatch.setattr(blocks, "in_tiles", lambda dtype: True)
    monkeypatch.setattr(blocks, "_tile_block", stored_block)
    for name in ("begin", "end"):  # which would set the tiles up
        monkeypatch.setattr(quantized_linear, name, njit(lambda like: None))
    monkeypatch.setattr(quantized_linear, "product", njit(quantized_linear.product.py_func))
    multiply = njit(quantized_linear.multiply_rows.py_func)
    monkeypatch.setattr(quantized_linear, "multiply_rows", multiply)
    for found, wanted in zip(through(ours, x, above), expected, strict=True):
        assert torch.equal(found, wanted)


@multiplies
def test_other_rows_change_no_bit():
    _, ours, x, above = layers()
    whole, part = through(ours, x, above), through(ours, x[:, 30:45], above[:, 30:45])
    for found, expected in zip(part[:2], whole[:2], strict=True):
        assert torch.equal(found, expected[:, 30:45])


def count_calls(function, name, calls):
    def counted(*given):
        calls.append(name)
        return function(*given)

    return counted


@multiplies
def test_threads_that_help_change_no_bit(monkeypatch):
    _, ours, x, above = layers()
    alone, calls = through(ours, x, above), []
    for module, name in ((quantized_linear, "multiply_rows"), (weight_gradient, "multiply_tokens")):
        counted = count_calls(getattr(module, name), name, calls)
        monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr(weight_gradient, "LEAST_SHARE", 1)
    with ThreadPoolExecutor(2) as pool:
        helpers = Helpers(pool)

        def helped(compute):
            with helpers.working():
                return compute()

        pool.submit(helped, lambda: None).result()
        found = pool.submit(helped, lambda: through(ours, x, above)).result()
    assert sorted(calls) == ["multiply_rows"] * 4 + ["multiply_tokens"] * 2  # halves of three
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one, other)


@multiplies
def test_rows_and_columns_of_any_size_are_as_exact():
    plain, ours, x, above = layers()
    powers = torch.logspace(-9, 9, ROWS)[:, None]
    x, above = x * powers, above * powers.flip(0)
    with torch.no_grad():
        for layer in (plain, ours):
            layer.weight.mul_(torch.logspace(-6, 6, OUTPUTS)[:, None])
    product, found = F.linear(x, plain.weight), without_bias(ours, x).float()
    sizes = x.norm(dim=2)[:, :, None] * plain.weight.norm(dim=1)
    assert ((found - product).abs() / sizes).max() < PRODUCT
    x_gradient, found_gradient = through(plain, x, above)[1], through(ours, x, above)[1]
    # a gradient times these weights has a few large numbers, beside which the others round to 0
    assert_near(found_gradient[0], x_gradient[0], 1.5 * PRODUCT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_rounded_to_255_numbers_and_packed_both_ways(dtype):
    weight = torch.randn(OUTPUTS, INPUTS, dtype=dtype)
    weight[3] = 0
    *packings, scale, total, output_total = packed_weight(weight)
    wide = weight.double().numpy()
    expected = np.abs(wide).max(1) / 127
    assert scale == pytest.approx(expected, rel=1e-6, abs=1e-30)
    numbers = np.rint(wide / np.maximum(expected, 1e-30)[:, None]).astype(np.int8)
    bytes_of = np.dtype(np.uint8)
    for found, matrix in zip(packings, (numbers, numbers.T), strict=True):
        wanted = packed(np.ascontiguousarray(matrix), bytes_of).astype(int)
        off = found.view(torch.int8).numpy().ravel() - wanted
        # halves, of which bf16 has more, go either way
        assert (off != 0).mean() < 0.01 and np.abs(off).max() <= 1
    assert total == pytest.approx(numbers.sum(1) * expected, abs=2 * expected.max())
    assert output_total == pytest.approx(numbers.sum(0), abs=2)


@multiplies
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so_both_ways():
    _, ours, x, above = layers()
    x[0, 0], above[0, 1] = 0, 0
    x[1, 2, 3], x[1, 4, 5], above[1, 6, 7] = math.nan, math.inf, -math.inf
    out, x_gradient, weight_gradient, bias_gradient = through(ours, x, above)
    assert torch.equal(out[0, 0], ours.bias.bfloat16()) and not x_gradient[0, 1].any()
    lost = (~out.isfinite()).any(2).nonzero().tolist()
    assert lost == [[1, 2], [1, 4]] and not out[1, 2].isfinite().any()
    assert not x_gradient[1, 6].isfinite().any() and x_gradient[0].isfinite().all()
    assert not weight_gradient[7].isfinite().any() and not bias_gradient[7].isfinite()


@multiplies
def test_a_weight_that_is_not_finite_makes_its_outputs_so():
    _, ours, x, above = layers()
    with torch.no_grad():
        ours.weight[5, 6] = math.nan
    out, x_gradient, *_ = through(ours, x, above)
    lost = ~out.isfinite()
    assert lost[..., 5].all() and lost.sum() == lost[..., 5].sum()
    assert not x_gradient.isfinite().any()


def test_without_gradients_and_without_kernels_it_is_the_plain_layer():
    plain, ours, x, _ = layers()
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))
    with without_kernels():
        assert torch.equal(ours(x), plain(x))
    assert torch.equal(without_bias(plain, x), F.linear(x, plain.weight))


@multiplies
def test_kernels_behind_it_add_its_bias():
    plain, ours, x, above = layers(torch.bfloat16)
    x = x.bfloat16()
    assert replaceable(ours)
    watched = copy.deepcopy(ours)
    watched.register_forward_hook(lambda *call: None)
    assert not replaceable(watched)  # and calls the layer, as --replay needs

    def gelu(layer, x):
        return F.gelu(layer(x))

    def fused_gelu(layer, x):
        return linear_gelu(layer, x, "none")

    fused, apart = (through(ours, x, above, by) for by in (fused_gelu, gelu))
    called = through(watched, x, above, fused_gelu)
    assert all(torch.equal(one, other) for one, other in zip(called, apart, strict=True))
    assert_near(fused, through(plain, x.float(), above, gelu), 2 * PRODUCT)
    assert_near(fused, apart, PRODUCT)


@pytest.mark.parametrize(("use", "kind"), [(use_int8, Int8Linear), (use_float8, Float8Linear)])
def test_only_the_layers_of_the_encoder_change_and_no_parameter_does(use, kind):
    model = PreTrainingModel(config_for("2x64", 100))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use(model)
    changed = {name for name, m in model.named_modules() if isinstance(m, kind)}
    assert len(changed) == 2 * 4 and all(name.startswith("encoder.layers.") for name in changed)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)


def test_layers_of_other_sizes_than_multiples_of_64_stay_plain():
    model = PreTrainingModel(config_for("1x64", 100))
    model.encoder.layers[0].intermediate = nn.Linear(64, 96)
    use_int8(model)
    kinds = [type(m) for m in model.encoder.layers.modules() if isinstance(m, nn.Linear)]
    assert kinds.count(Int8Linear) == 3 and kinds.count(nn.Linear) == 1
    with pytest.raises(ValueError, match=r"sizes, 128 x 96, .*, are no multiples of 64; use bf16"):
        use_int8(PreTrainingModel(ModelConfig(100, 96, 1, 3, 128)))


@pytest.mark.parametrize("name", ["avx512vnni", "avx512bf16"])
def test_it_takes_a_processor_that_has_both(monkeypatch, name):
    both = frozenset(["avx512vnni", "avx512bf16"])
    monkeypatch.setattr(quantized_linear, "cpu_features", lambda: both)
    assert has_int8(CPU) and not has_int8(torch.device("cuda"))
    monkeypatch.setattr(quantized_linear, "cpu_features", lambda: both - {name})
    assert not has_int8(CPU)


def float8_layers(device="cpu"):
    torch.manual_seed(1)
    plain = nn.Linear(64, 48).to(device)
    ours = copy.deepcopy(plain)
    ours.__class__ = Float8Linear
    return plain, ours


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float8_forward_and_backward_equal_float32_as_far_as_three_bits_go(device):
    plain, ours = float8_layers(device)
    x, above = torch.randn(2, 16, 64, device=device), torch.randn(2, 16, 48, device=device)
    out, *gradients = through(plain, x, above)
    found, *found_gradients = through(ours, x, above)
    assert found.dtype == torch.bfloat16 and error(found, out) < FORWARD
    assert all(part.dtype == torch.float32 for part in found_gradients)
    assert_near(found_gradients, gradients, BACKWARD)


def test_without_gradients_or_with_odd_rows_float8_is_the_plain_layer():
    plain, ours = float8_layers()
    x = torch.randn(16, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours(x[:15]), plain(x[:15]))


def test_float8_zeros_have_a_scale_and_what_is_not_finite_stays_so():
    values, scale = scaled(torch.zeros(4), torch.float8_e5m2)
    assert not values.float().any() and scale > 0
    values, _ = scaled(torch.tensor([1.0, torch.nan]), torch.float8_e4m3fn)
    assert values.float().isnan().any()


def test_a_cpu_has_no_float8():
    assert not has_float8(CPU)
