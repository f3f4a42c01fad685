"""One step on several cores: each has a thread, a share of the rows and gradients of its own.

PyTorch splits every operator over the cores, with a barrier after each one; a small model's step
has thousands, and another busy process on the machine stretches every one. Here a core computes
forward and backward of its rows alone, and there is one barrier a step.

The replicas share the model's weights. In bf16 they share copies of the linear layers' weights in
that type, made once a step rather than in every forward pass; the model itself then keeps to the
side and has the float32 weights, which are trained, measured and saved. Gradients are added in a
fixed order, so that a run is the same every time; another number of cores rounds differently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, _foreach_add_, nn  # pyright: ignore[reportPrivateImportUsage]

from bertsmith.training.engine import Engine

SHARED_UPDATE = 30_000_000  # parameters of which all cores move the weights together

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")


class Trained(NamedTuple):
    """A weight of the model after the replicas' backward passes."""

    weight: nn.Parameter
    gradients: list[Tensor]
    """Of the replicas that have one, in their order; all float32 or all bf16, dense."""
    copy: Tensor | None
    """What the replicas compute with, where that is not the weight."""


class Replicas:
    """`engine.workers` models in step: the first is the model itself, unless they have copies."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.has_copies = engine.device.type == "cpu" and engine.precision == "bf16"
        self.weights = list(model.parameters())
        self._copies = _bf16_copies(model) if self.has_copies else {}
        self._seen = dict.fromkeys(self._copies, -1)  # versions of the weights that were copied
        own = [] if self.has_copies else [model]
        others = (_replica(model, self._copies) for _ in range(engine.workers - len(own)))
        self.models = [*own, *others]
        self._parameters = [list(model.parameters()) for model in self.models]
        self._sums: list[dict[int, Tensor]] = [{} for _ in self.models]
        numbers = sum(weight.numel() for weight in self.weights)
        self._update_threads = 1 if numbers < SHARED_UPDATE else engine.workers
        self._pool = ThreadPoolExecutor(
            engine.workers, "replica", initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(
        self, compute: Callable[[nn.Module, Piece, int], Outcome], pieces: Sequence[Piece]
    ) -> list[Outcome]:
        """compute(model, piece, its number) for every piece; replica k has pieces k, k + W, ..."""
        workers = len(self.models)
        several = len(pieces) > workers
        self._renew_copies()

        def share(worker: int) -> list[Outcome]:
            model, outcomes = self.models[worker], []
            for number in range(worker, len(pieces), workers):
                outcomes.append(compute(model, pieces[number], number))
                if several:
                    self._add_in_float32(worker)
            return outcomes

        if workers == 1:
            return share(0)
        shares = list(self._pool.map(share, range(workers)))
        return [shares[k % workers][k // workers] for k in range(len(pieces))]

    def each(self, compute: Callable[[Piece], Outcome], pieces: Sequence[Piece]) -> list[Outcome]:
        """compute(piece) of every piece by whichever core is free next; in the pieces' order."""
        results: dict[int, Outcome] = {}
        left = iter(enumerate(pieces))  # one for all threads

        def work(worker: int) -> None:
            for number, piece in left:
                results[number] = compute(piece)

        list(self._pool.map(work, range(len(self.models))))
        return [results[number] for number in range(len(pieces))]

    def trained(self) -> list[Trained]:
        """The weights that have gradients, in the model's order."""
        found = []
        for number, weight in enumerate(self.weights):
            gradients = [
                gradient
                for parameters, sums in zip(self._parameters, self._sums, strict=True)
                if (gradient := sums.get(number, parameters[number].grad)) is not None
            ]
            if gradients:
                found.append(Trained(weight, gradients, self._copies.get(weight)))
        return found

    def gather(self) -> None:
        """Make the sum of the replicas' gradients the model's own, and forget them."""
        trained = self.trained()
        self.forget()
        for weight, gradients, _ in trained:
            weight.grad = gradients[0].to(weight.dtype)
        for k in range(1, len(self.models)):
            more = [(weight.grad, of[k]) for weight, of, _ in trained if len(of) > k]
            if more:
                _foreach_add_([own for own, _ in more], [other for _, other in more])

    def forget(self) -> None:
        """Forget all gradients."""
        for parameters, sums in zip(self._parameters, self._sums, strict=True):
            sums.clear()
            for parameter in parameters:
                parameter.grad = None

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

    def _renew_copies(self) -> None:
        """Copy the weights that PyTorch's operators have changed since."""
        for weight, version in self._seen.items():
            if weight._version != version:
                self._copies[weight].copy_(weight.detach())
                self._seen[weight] = weight._version

    def _add_in_float32(self, worker: int) -> None:
        """Gradients of several pieces are not added in bf16, which would lose the small ones."""
        sums = self._sums[worker]
        for number, parameter in enumerate(self._parameters[worker]):
            if parameter.dtype != torch.bfloat16 or parameter.grad is None:
                continue
            if number in sums:
                sums[number].add_(parameter.grad)
            else:
                sums[number] = parameter.grad.float()
            parameter.grad = None

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _bf16_copies(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Room for the weights that autocast would make bf16: those of the linear layers."""
    return {
        weight: torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
        for module in model.modules()
        if isinstance(module, nn.Linear)
        for weight in module.parameters(recurse=False)
    }


def _replica(model: nn.Module, copies: dict[nn.Parameter, Tensor]) -> nn.Module:
    """A copy of the model whose parameters are the model's own memory, or the copies'."""
    replica = copy.deepcopy(model)
    for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
        own.data = copies.get(shared, shared.data)
    return replica
