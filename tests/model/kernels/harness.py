"""A kernel and PyTorch's operators on the same tensors, forward and backward."""

from bertsmith.model.kernels.elementwise import seed_dropout


def run(function, inputs, above, *modules):
    """[result, gradients by the inputs, gradients by the modules' parameters], given that above."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    seed_dropout(5)
    result = function(*leaves)
    result.backward(above.to(result.dtype))
    return [result.detach(), *(x.grad for x in [*leaves, *parameters])]


def to(dtype, tensors):
    return [tensor.to(dtype) for tensor in tensors]


def error(found, expected):
    """Norm of the error over the norm of what is expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(found, expected, tolerance):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert error(one, other) < tolerance, number
