"""One step on several cores: each has a thread, a share of the rows and gradients of its own.

PyTorch splits every operator over the cores, with a barrier after each one; a small model's step
has thousands, and another busy process on the machine stretches every one. Here a core computes
forward and backward of its rows alone, and there is one barrier a step.

The replicas share the model's weights. In bf16 on a CPU they share copies, in that type, of the
weights of matrix products, made once a step and not in every forward pass, and their gradients are
bf16, that of the token table too, a sum over its uses; the model itself, with the float32 weights
that are trained, measured and saved, then computes no gradients. Gradients are added in a fixed
order, so that a run is the same every time; another number of cores rounds differently.

Of several ranks each has replicas like these. Where one replica is the model itself, its backward
pass adds the other ranks' gradients as well (ranks.py); otherwise they are added once those of the
replicas are.

Forward passes on several cores: rows in micro-batches, dealt to one worker a core.

As in a training step (replicas.py) a worker computes whole passes with one of PyTorch's threads.
PyTorch's own threads wait for one another after every operator, and beside a busy process each of
them waits for the core which that process has: ten to fifty times as long as the operator takes.

A worker that is free takes the next micro-batch, so that a core that is half busy does half as
many. All share the one model. What is in a micro-batch, and with it the rounding, is for the
caller to say: who computes it when changes no number.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, _foreach_add_, nn  # pyright: ignore[reportPrivateImportUsage]

from bertsmith.model.heads import PreTrainingModel
from bertsmith.tasks.features import token_budget_batches
from bertsmith.training.engine import Engine
from bertsmith.training.ranks import Computation, JointPasses

TOKENS_AT_ONCE = 2048  # of a worker on a CPU, about, padding too: more take memory, no less time

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")


def row_batches(engine: Engine, lengths: np.ndarray, budget: int = 8192) -> list[np.ndarray]:
    """`token_budget_batches`, on a CPU of no more tokens than a worker computes at once."""
    on_cpu = engine.device.type == "cpu"
    return token_budget_batches(lengths, min(budget, TOKENS_AT_ONCE) if on_cpu else budget)


def computed(
    engine: Engine, compute: Callable[[Piece], Outcome], pieces: Sequence[Piece]
) -> Iterator[Outcome]:
    """compute(piece) of every micro-batch without gradients, in the micro-batches' order.

    It runs in the engine's precision, on several cores side by side where there are several
    pieces; those that are made ahead are two a worker at most.
    """

    def measured(piece: Piece) -> Outcome:
        with torch.inference_mode(), _autocast(engine):
            return compute(piece)

    workers = min(engine.workers, len(pieces))
    with _casts_kept():
        if workers <= 1:
            yield from map(measured, pieces)
            return
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(workers, "rows", initializer=_begin)
        waiting: deque[Future[Outcome]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(measured, piece))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # threads that start later have the number set last


def _begin() -> None:
    """In a worker's thread, which never leaves the outermost autocast: see `_casts_kept`."""
    torch.set_num_threads(1)
    torch.autocast_increment_nesting()


def _autocast(engine: Engine) -> torch.autocast:
    # weights that are gathered for a pass must not stay, nor their casts
    kind, kept = engine.device.type, not engine.ranks.shard
    return torch.autocast(
        kind, engine.products, enabled=engine.products is not None, cache_enabled=kept
    )


@contextmanager
def _casts_kept() -> Iterator[None]:
    """Weights are cast once, not in every pass: PyTorch forgets casts, which all threads share,
    when any thread leaves its outermost autocast. None is older than this: weights move."""
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


SHARED_UPDATE = 30_000_000  # parameters of which all cores move the weights together


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
        self._ranks = engine.ranks
        on_cpu = engine.device.type == "cpu" and not engine.ranks.shard
        self.has_copies = on_cpu and engine.precision in ("bf16", "int8")
        self.weights = list(model.parameters())
        self._copies = _bf16_copies(model) if self.has_copies else {}
        self.renew_copies()
        own = [] if self.has_copies else [model]
        others = (_replica(model, self._copies) for _ in range(engine.workers - len(own)))
        self.models = [*own, *others]
        self._joint = None
        if engine.ranks.size > 1 and engine.workers == 1 and not self.has_copies:
            self._joint = JointPasses(model, engine.ranks)
        self._parameters = [_trained_parameters(model) for model in self.models]
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

        def share(worker: int) -> list[Outcome]:
            model, outcomes = self.models[worker], []
            for number in range(worker, len(pieces), workers):
                outcomes.append(compute(model, pieces[number], number))
                _add_lookups(model)
                if several:
                    self._add_in_float32(worker)
            return outcomes

        if workers == 1:
            return share(0)
        shares = list(self._pool.map(share, range(workers)))
        return [shares[k % workers][k // workers] for k in range(len(pieces))]

    def passing(self, last: bool) -> AbstractContextManager[Computation]:
        """Around forward and backward pass of a piece, of which `last` is a worker's last.

        It gives what runs the forward pass: computed(function, *arguments).
        """
        return self._joint.passing(last) if self._joint else nullcontext(_computed)

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

    def add_ranks(self) -> None:
        """Make the sum over all ranks the first replica's, where the passes have not done so."""
        if self._ranks.size == 1 or self._joint:
            return
        numbers = {id(weight): number for number, weight in enumerate(self.weights)}
        trained = self.trained()
        sizes = [part.weight.numel() for part in trained]
        sums = torch.zeros(sum(sizes))
        for part, own in zip(trained, sums.split(sizes), strict=True):
            for gradient in part.gradients:
                own.add_(gradient.flatten())
        self._ranks.sum_(sums)
        self.forget()
        for part, own in zip(trained, sums.split(sizes), strict=True):
            self._sums[0][numbers[id(part.weight)]] = own.view_as(part.weight)

    def gather(self) -> None:
        """Make the sum of the replicas' gradients the model's own, and forget them."""
        trained = self.trained()
        self.forget()
        sums = [gradients[0].to(weight.dtype) for weight, gradients, _ in trained]
        for k in range(1, len(self.models)):
            pairs = [(own, part.gradients) for own, part in zip(sums, trained, strict=True)]
            more = [(own, gradients[k]) for own, gradients in pairs if len(gradients) > k]
            if more:
                _foreach_add_([own for own, _ in more], [other for _, other in more])
        for part, own in zip(trained, sums, strict=True):
            part.weight.grad = own

    def renew_copies(self) -> None:
        """Make the copies again from the weights, which have moved."""
        for weight, narrow in self._copies.items():
            narrow.copy_(weight.detach())

    def forget(self) -> None:
        """Forget all gradients."""
        for parameters, sums in zip(self._parameters, self._sums, strict=True):
            sums.clear()
            for parameter in parameters:
                parameter.grad = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In here PyTorch's operators move the weights of a small model by one thread alone.

        They are so short that barriers between them cost more than a second core gives,
        and many times as much when another process has that core.
        """
        before = torch.get_num_threads()
        if len(self.models) > 1:
            torch.set_num_threads(self._update_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

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


def _computed(compute: Callable[..., Outcome], *arguments: Any) -> Outcome:
    return compute(*arguments)


def _bf16_copies(model: nn.Module) -> dict[Tensor, Tensor]:
    """Room for the weights that autocast would make bf16.

    Those of the linear layers, and of pre-training's table as the head multiplies with it.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights: list[Tensor] = [
        weight for module in linear for weight in module.parameters(recurse=False)
    ]
    if isinstance(model, PreTrainingModel):
        weights.append(model.encoder.embeddings.token.weight)
    return {weight: torch.empty(weight.shape, dtype=torch.bfloat16) for weight in weights}


def _replica(model: nn.Module, copies: dict[Tensor, Tensor]) -> nn.Module:
    """A copy of the model whose parameters are the model's own memory, or the copies'."""
    table = model.encoder.embeddings.token.weight if isinstance(model, PreTrainingModel) else None
    own = {  # in place of the copies that deepcopy would make
        id(shared): nn.Parameter(
            shared.data if shared is table else copies.get(shared, shared.data),
            requires_grad=shared.requires_grad,
        )
        for shared in model.parameters()
    }
    replica = copy.deepcopy(model, own)
    if copies and table is not None:
        assert isinstance(replica, PreTrainingModel)
        replica.encoder.embeddings.token.sparse = True
        replica.output_table = copies[table].detach().requires_grad_(table.requires_grad)
    return replica


def _trained_parameters(replica: nn.Module) -> list[Tensor]:
    """In the model's order; the output table, where there is one, for the table of lookups."""
    parameters: list[Tensor] = list(replica.parameters())
    if isinstance(replica, PreTrainingModel) and replica.output_table is not None:
        lookups = replica.encoder.embeddings.token.weight
        return [replica.output_table if own is lookups else own for own in parameters]
    return parameters


def _add_lookups(replica: nn.Module) -> None:
    """Add the gradient of looking pieces up, which has few rows, to the output table's."""
    if not isinstance(replica, PreTrainingModel) or replica.output_table is None:
        return
    table, lookups = replica.output_table, replica.encoder.embeddings.token.weight
    if lookups.grad is None:
        return
    gradient = lookups.grad.coalesce()
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    rows = gradient.indices()[0]
    table.grad[rows] = (table.grad[rows] + gradient.values()).to(table.dtype)
    lookups.grad = None
