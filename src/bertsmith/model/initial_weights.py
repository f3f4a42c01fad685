"""A model's first weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)
STRETCH = 1 << 17  # numbers drawn at a time, which stay in the processor's cache


class WithoutInitialization(TorchFunctionMode):
    """New modules hold what the memory held, until `initialize` or a checkpoint fills them.

    (On "meta" random numbers import torch's compiler.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def initialize(model: Module, std: float, generator: torch.Generator) -> Module:
    """Fill a model in place: weights truncated normal (cut at 2 std), biases 0, LayerNorm 1 and 0.

    As google-research/bert modeling.py `create_initializer` and tf.contrib's layer norm. Each
    weight has a generator of its own, seeded by `generator`: however many threads draw, the numbers
    are the same. Model and generator are on the CPU.
    """
    weights = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            weights.append(module.weight)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    seeds = torch.randint(1 << 62, (len(weights),), generator=generator).tolist()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(partial(_truncated_normal, std=std), weights, seeds))
    torch.set_num_threads(threads)  # threads that start later have the number that was set last
    return model


@torch.inference_mode()  # which lets any tensor be filled, also one made in inference mode
def _truncated_normal(weight: Tensor, seed: int, std: float) -> None:
    """Normal numbers, those outside 2 std drawn again.

    PyTorch's `trunc_normal_` draws the whole tensor again for them.
    """
    generator = torch.Generator().manual_seed(seed)
    for flat in weight.view(-1).split(STRETCH):
        flat.normal_(0.0, std, generator=generator)
        outside = (flat.abs() > 2 * std).nonzero().squeeze(1)
        while len(outside):
            drawn = torch.empty(len(outside)).normal_(0.0, std, generator=generator)
            flat[outside] = drawn
            outside = outside[drawn.abs() > 2 * std]
