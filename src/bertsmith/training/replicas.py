"""One step on several cores: each has a thread, a share of the rows and gradients of its own.

PyTorch splits every operator over the cores, with a barrier after each one; a small model's step
has thousands, and another busy process on the machine stretches every one. Here a core computes
forward and backward of its rows alone, and there is one barrier a step.

The replicas share the model's weights. Their gradients are added in a fixed order, so that a run
is the same every time; another number of cores rounds differently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import _foreach_add_, nn  # pyright: ignore[reportPrivateImportUsage]

from bertsmith.training.engine import Engine

SHARED_UPDATE = 30_000_000  # parameters of which all cores move the weights together

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")


class Replicas:
    """`engine.workers` models in step: the first is the model itself."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.models = [model, *(_replica(model) for _ in range(engine.workers - 1))]
        numbers = sum(parameter.numel() for parameter in model.parameters())
        self._update_threads = 1 if numbers < SHARED_UPDATE else engine.workers
        self._pool = ThreadPoolExecutor(
            engine.workers, "replica", initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(
        self, compute: Callable[[nn.Module, Piece, int], Outcome], pieces: Sequence[Piece]
    ) -> list[Outcome]:
        """compute(model, piece, its number) for every piece; replica k has pieces k, k + W, ..."""
        workers = len(self.models)
        if workers == 1:
            return [compute(self.models[0], piece, k) for k, piece in enumerate(pieces)]

        def share(worker: int) -> list[Outcome]:
            model = self.models[worker]
            numbers = range(worker, len(pieces), workers)
            return [compute(model, pieces[number], number) for number in numbers]

        shares = list(self._pool.map(share, range(workers)))
        return [shares[k % workers][k // workers] for k in range(len(pieces))]

    def gather(self) -> None:
        """Add the other replicas' gradients to the model's own, and forget them."""
        first, *others = (list(model.parameters()) for model in self.models)
        for parameters in others:
            pairs = list(zip(first, parameters, strict=True))
            both = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
            if both:
                _foreach_add_([a for a, _ in both], [b for _, b in both])
            for own, other in pairs:
                if own.grad is None:
                    own.grad = other.grad
                other.grad = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In here gradients are added and weights moved, of a small model by one thread alone.

        Its operators are so short that barriers between them cost more than a second core gives,
        and many times as much when another process has that core.
        """
        before = torch.get_num_threads()
        if len(self.models) > 1:
            torch.set_num_threads(self._update_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _replica(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are the model's own memory."""
    replica = copy.deepcopy(model)
    for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
        own.data = shared.data
    return replica
