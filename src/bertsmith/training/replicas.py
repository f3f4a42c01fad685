"""Rows on several cores: replicas for a step's passes, workers for passes without gradients.

PyTorch splits every operator over the cores, with a barrier after each one; a small model's step
has thousands, and another busy process stretches every one ten to fifty times. Here a core computes
whole passes of its rows with one thread, and the only barrier is the end of the step.

Each core has a replica: a thread, a share of the rows and gradients of its own. Replicas share the
model's weights; in bf16 on a CPU they share bf16 copies of the matrices, made once a step, and have
bf16 gradients, that of the token table too, while the model itself, with the float32 weights that
are trained, measured and saved, computes none. Gradients are added in a fixed order, so a run
repeats itself; another number of cores rounds differently. Several ranks have replicas each: where
one replica is the model itself its backward pass also sums over the ranks (ranks.py), otherwise
that sum follows the replicas' own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, _foreach_add_, nn  # pyright: ignore[reportPrivateImportUsage]

from bertsmith.base.processes import Helpers, in_order
from bertsmith.tasks.features import token_budget_batches
from bertsmith.training.engine import Engine
from bertsmith.training.ranks import Computation, DistributedGradients, run_computation

SHARED_UPDATE = 30_000_000  # parameters from which on all cores together move the weights
TOKENS_AT_ONCE = 2048  # of a worker on a CPU, with padding: more take memory, no less time

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Trained(NamedTuple):
    """A weight of the model after the replicas' backward passes."""

    weight: nn.Parameter
    gradients: list[Tensor]
    """One from each replica that has any, in their order; all float32 or all bf16, dense."""
    copy: Tensor | None
    """The bf16 memory that the replicas compute with; None: they use the weight."""


class Replicas(AbstractContextManager["Replicas"]):
    """`engine.workers` models in step: the first is the model itself, unless they have copies."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._ranks = engine.ranks
        on_cpu = engine.device.type == "cpu" and not engine.ranks.shard
        self.has_copies = on_cpu and engine.precision in ("bf16", "int8")
        self.weights = list(model.parameters())
        self._copies = _bf16_copies(model) if self.has_copies else {}
        self.refresh_copies()
        own = [] if self.has_copies else [model]
        others = (_replica(model, self._copies) for _ in range(engine.workers - len(own)))
        self.models = [*own, *others]
        self._joint = None
        if engine.ranks.size > 1 and engine.workers == 1 and not self.has_copies:
            self._joint = DistributedGradients(model, engine.ranks)
        self._gradients = [_Gradients(model) for model in self.models]
        numbers = sum(weight.numel() for weight in self.weights)
        self._update_threads = 1 if numbers < SHARED_UPDATE else engine.workers
        self._pool = ThreadPoolExecutor(engine.workers, "replica", initializer=use_one_thread)

    def map(
        self, compute: Callable[[nn.Module, Item, int], Outcome], items: Sequence[Item]
    ) -> list[Outcome]:
        """compute(model, item, its number) of each; replica k of W has items k, k + W, ...

        A replica that has no more takes parts of what others compute: see `share`.
        """
        workers, helpers = len(self.models), Helpers(self._pool)
        several = len(items) > workers

        def work(worker: int) -> list[Outcome]:
            outcomes = []
            with helpers.working():
                for number in range(worker, len(items), workers):
                    outcomes.append(compute(self.models[worker], items[number], number))
                    self._gradients[worker].end_of_pass(several)
            return outcomes

        if workers == 1:
            return work(0)
        outcomes = list(self._pool.map(work, range(workers)))
        return [outcomes[k % workers][k // workers] for k in range(len(items))]

    def synced(self, last: bool) -> AbstractContextManager[Computation]:
        """Around a forward and a backward pass, the `last` of a worker's step or an earlier one.

        Yields the runner of the forward pass: run(function, *arguments).
        """
        return self._joint.synced(last) if self._joint else nullcontext(run_computation)

    def each(self, compute: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
        """compute(item) of each by whichever core is free next; in the items' order."""
        results: dict[int, Outcome] = {}
        left = iter(enumerate(items))  # one for all threads

        def work(worker: int) -> None:
            for number, item in left:
                results[number] = compute(item)

        list(self._pool.map(work, range(len(self.models))))
        return [results[number] for number in range(len(items))]

    def trained(self) -> list[Trained]:
        """The weights that have gradients, in the model's order."""
        found = []
        for number, weight in enumerate(self.weights):
            owned = (own.of_weight(number) for own in self._gradients)
            if gradients := [gradient for gradient in owned if gradient is not None]:
                found.append(Trained(weight, gradients, self._copies.get(weight)))
        return found

    def add_ranks(self) -> None:
        """Make the first replica's gradients the sum over all ranks, unless the passes did so."""
        if self._ranks.size == 1 or self._joint:
            return
        numbers = {id(weight): number for number, weight in enumerate(self.weights)}
        trained = self.trained()
        sizes = [part.weight.numel() for part in trained]
        sums = torch.zeros(sum(sizes))
        for part, own in zip(trained, sums.split(sizes), strict=True):
            for gradient in part.gradients:
                own.add_(gradient.flatten())
        self._ranks.all_reduce_(sums)
        self.zero_grad()
        for part, own in zip(trained, sums.split(sizes), strict=True):
            self._gradients[0].sums[numbers[id(part.weight)]] = own.view_as(part.weight)

    def gather(self) -> None:
        """Move the sum of the replicas' gradients to the model."""
        trained = self.trained()
        self.zero_grad()
        sums = [gradients[0].to(weight.dtype) for weight, gradients, _ in trained]
        for k in range(1, len(self.models)):
            pairs = zip(sums, trained, strict=True)
            more = [(own, part.gradients[k]) for own, part in pairs if len(part.gradients) > k]
            if more:
                _foreach_add_([own for own, _ in more], [other for _, other in more])
        for part, own in zip(trained, sums, strict=True):
            part.weight.grad = own

    def refresh_copies(self) -> None:
        """Copy the weights, which have moved, into the bf16 copies."""
        for weight, narrow in self._copies.items():
            narrow.copy_(weight.detach())

    def zero_grad(self) -> None:
        for own in self._gradients:
            own.zero_grad()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update a small model by one thread: barriers between its short operators cost more than
        a second core gives, many times as much when another process has that core."""
        before = torch.get_num_threads()
        if len(self.models) > 1:
            torch.set_num_threads(self._update_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        self._pool.shutdown()

    def __exit__(self, *error: Any) -> None:
        self.close()


class _Gradients:
    """One replica's gradients, by the number of the weight in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._lookups = _shared_table(model)
        self._output_table = getattr(model, "output_table", None)
        self._parameters: list[Tensor] = list(model.parameters())
        if self._output_table is not None:  # it stands for the table of lookups, whose rows it has
            stands_in = {id(self._lookups): self._output_table}
            self._parameters = [stands_in.get(id(own), own) for own in self._parameters]
        self.sums: dict[int, Tensor] = {}
        """Float32 sums over earlier passes, or over all ranks."""

    def of_weight(self, number: int) -> Tensor | None:
        return self.sums.get(number, self._parameters[number].grad)

    def end_of_pass(self, several: bool) -> None:
        """Make the pass's gradients dense; `several`: sum them in float32, as bf16 loses digits."""
        self._add_lookups()
        if not several:
            return
        for number, parameter in enumerate(self._parameters):
            if parameter.dtype != torch.bfloat16 or parameter.grad is None:
                continue
            if number in self.sums:
                self.sums[number].add_(parameter.grad)
            else:
                self.sums[number] = parameter.grad.float()
            parameter.grad = None

    def _add_lookups(self) -> None:
        """Add the token table's sparse gradient from lookups to the output table's."""
        table, lookups = self._output_table, self._lookups
        if table is None or lookups is None or lookups.grad is None:
            return
        gradient = lookups.grad.coalesce()
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        rows = gradient.indices()[0]
        table.grad[rows] = (table.grad[rows] + gradient.values()).to(table.dtype)
        lookups.grad = None

    def zero_grad(self) -> None:
        self.sums.clear()
        for parameter in self._parameters:
            parameter.grad = None


def _shared_table(model: Any) -> Tensor | None:
    """The table that a model both looks up and multiplies with, if any."""
    return model.shared_table() if hasattr(model, "shared_table") else None


def _bf16_copies(model: nn.Module) -> dict[Tensor, Tensor]:
    """Empty bf16 tensors for the weights that autocast would cast: linear layers, shared table."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights: list[Tensor] = [weight for part in linear for weight in part.parameters(recurse=False)]
    if (table := _shared_table(model)) is not None:
        weights.append(table)
    return {weight: torch.empty(weight.shape, dtype=torch.bfloat16) for weight in weights}


def _replica(model: nn.Module, copies: dict[Tensor, Tensor]) -> nn.Module:
    """A copy of the model whose parameters share the model's memory, or the copies'."""
    table = _shared_table(model)
    own = {  # in place of the copies that deepcopy would make
        id(shared): nn.Parameter(
            shared.data if shared is table else copies.get(shared, shared.data),
            requires_grad=shared.requires_grad,
        )
        for shared in model.parameters()
    }
    replica: Any = copy.deepcopy(model, own)
    if copies and table is not None:
        replica.split_table(copies[table].detach().requires_grad_(table.requires_grad))
    return replica


def row_batches(engine: Engine, lengths: np.ndarray, budget: int = 8192) -> list[np.ndarray]:
    """`token_budget_batches`, on a CPU of at most the tokens that a worker computes at once."""
    on_cpu = engine.device.type == "cpu"
    return token_budget_batches(lengths, min(budget, TOKENS_AT_ONCE) if on_cpu else budget)


def computed(
    engine: Engine, compute: Callable[[Item], Outcome], items: Sequence[Item]
) -> Iterator[Outcome]:
    """compute(item) of every micro-batch without gradients, in their order.

    All workers share the one model, in the engine's precision, and a free one takes the next
    micro-batch, at most two a worker ahead. Which core computes it changes no number.
    """

    def measured(item: Item) -> Outcome:
        # weights that are gathered for a pass must not stay, nor their casts
        with torch.inference_mode(), engine.autocast(cache=not engine.ranks.shard):
            return compute(item)

    def begin() -> None:
        use_one_thread()
        torch.autocast_increment_nesting()  # a worker never leaves its outermost autocast

    workers = min(engine.workers, len(items))
    with _casts_kept():
        if workers <= 1:
            yield from map(measured, items)
            return
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(workers, "rows", initializer=begin)
        try:
            yield from in_order(pool, measured, items, 2 * workers + 1)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # threads that start later have the number set last


def use_one_thread() -> None:
    """Compute PyTorch's operators in this thread alone, from now on.

    At its first parallel operator a thread takes the number that any thread set last, even after a
    `set_num_threads` of its own: a sum is then split otherwise and rounds otherwise. Asking for the
    number counts as that first operator.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def _casts_kept() -> Iterator[None]:
    """Cast weights once, not in every pass: PyTorch forgets casts, which all threads share, when
    any thread leaves its outermost autocast. None is older than this: weights move."""
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
