"""A kernel and PyTorch's operators on the same tensors, forward and backward."""

import copy

import torch

from bertsmith.model.kernels.elementwise import seed_dropout
from bertsmith.model.kernels.llvm.blocks import stored, vector_block


def run(function, inputs, above, *modules):
    """[result, gradients by the inputs and the modules' parameters] of function(*modules, *inputs).

    `above` is the gradient of the result.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    seed_dropout(5)
    result = function(*modules, *leaves)
    result.backward(above.to(result.dtype))
    return [result.detach(), *(x.grad for x in [*leaves, *parameters])]


def run_in(dtype, function, inputs, above, *modules):
    """The same of copies in another type."""
    return run(function, to(dtype, inputs), above, *to(dtype, map(copy.deepcopy, modules)))


def to(dtype, parts):
    return [part.to(dtype) for part in parts]


def error(found, expected):
    """Norm of the error over the norm of what is expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(found, expected, tolerance):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert error(one, other) < tolerance, number


def assert_as_float64(tolerance, kernel, exact, inputs, above, *modules):
    """The kernel's result and gradients beside those of operators in float64; the kernel's."""
    found = run(kernel, inputs, above, *modules)
    assert_near(found, run_in(torch.float64, exact, inputs, above, *modules), tolerance)
    return found


def assert_is_share(dropped, rate):
    """Of a mask, within five standard deviations of a binomial count."""
    count = dropped.numel()
    deviation = (count * rate * (1 - rate)) ** 0.5
    assert abs(dropped.sum().item() - count * rate) < 5 * deviation


def stored_block(dtype):
    """A block in registers that stores its sums, as AMX's tiles do."""

    def make(builder, a, a_step, b, b_step, c, c_step, groups, rows):
        vector_block(dtype, stored(c, c_step))(builder, a, a_step, b, b_step, groups, rows)

    return make
