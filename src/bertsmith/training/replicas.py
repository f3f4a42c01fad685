"""Rows on several cores: replicas for the passes of a step, workers for passes without gradients.

PyTorch splits every operator over the cores, with a barrier after each one; a small model's step
has thousands, and another busy process on the machine stretches every one ten to fifty times. Here
a core computes whole passes of its rows with one of PyTorch's threads, and the only barrier is the
end of the step.

In training each core has a replica: a thread, a share of the rows and gradients of its own. The
replicas share the model's weights. In bf16 on a CPU they share copies, in that type, of the weights
of matrix products, made once a step and not in every forward pass, and their gradients are bf16,
that of the token table too, a sum over its uses; the model itself, with the float32 weights that
are trained, measured and saved, then computes no gradients. Gradients are added in a fixed order,
so that a run is the same every time; another number of cores rounds differently. Each of several
ranks has replicas like these. Where one replica is the model itself, its backward pass adds the
other ranks' gradients as well (ranks.py); otherwise they are added after those of the replicas.

Without gradients (`computed`) all workers share the one model, and a free one takes the next
micro-batch, so that a core that is half busy does half as many. The caller decides which rows are
in a micro-batch, and with it the rounding; which core computes it changes no number.
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

from bertsmith.tasks.features import token_budget_batches
from bertsmith.training.engine import Engine
from bertsmith.training.ranks import Computation, JointPasses

SHARED_UPDATE = 30_000_000  # parameters of which all cores move the weights together
TOKENS_AT_ONCE = 2048  # of a worker on a CPU, about, padding too: more take memory, no less time

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")


class Trained(NamedTuple):
    """A weight of the model after the replicas' backward passes."""

    weight: nn.Parameter
    gradients: list[Tensor]
    """One of each replica that has any, in their order; all float32 or all bf16, dense."""
    copy: Tensor | None
    """The memory that the replicas compute with, where that is not the weight."""


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
        self._gradients = [_Gradients(model) for model in self.models]
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
            outcomes = []
            for number in range(worker, len(pieces), workers):
                outcomes.append(compute(self.models[worker], pieces[number], number))
                self._gradients[worker].end_of_pass(several)
            return outcomes

        if workers == 1:
            return share(0)
        shares = list(self._pool.map(share, range(workers)))
        return [shares[k % workers][k // workers] for k in range(len(pieces))]

    def passing(self, last: bool) -> AbstractContextManager[Computation]:
        """Around forward and backward pass of a piece, of which `last` is a worker's last.

        It gives the runner of the forward pass: computed(function, *arguments).
        """
        return self._joint.passing(last) if self._joint else nullcontext(_run)

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
            owned = (own.of_weight(number) for own in self._gradients)
            if gradients := [gradient for gradient in owned if gradient is not None]:
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
            self._gradients[0].sums[numbers[id(part.weight)]] = own.view_as(part.weight)

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
        for own in self._gradients:
            own.forget()

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

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _Gradients:
    """The gradients of one replica, by the number of the weight in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._lookups = _shared_table(model)
        self._output_table = getattr(model, "output_table", None)
        self._parameters: list[Tensor] = list(model.parameters())
        if self._output_table is not None:  # it stands for the table of lookups, whose rows it has
            self._parameters = [
                self._output_table if own is self._lookups else own for own in self._parameters
            ]
        self.sums: dict[int, Tensor] = {}
        """In float32, of the passes before or of all ranks."""

    def of_weight(self, number: int) -> Tensor | None:
        return self.sums.get(number, self._parameters[number].grad)

    def end_of_pass(self, several: bool) -> None:
        """Make the pass's gradients dense, and where several follow add them in float32.

        A sum in bf16 would lose the small ones.
        """
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
        """Add the gradient of looking pieces up, which has few rows, to the output table's."""
        table, lookups = self._output_table, self._lookups
        if table is None or lookups is None or lookups.grad is None:
            return
        gradient = lookups.grad.coalesce()
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        rows = gradient.indices()[0]
        table.grad[rows] = (table.grad[rows] + gradient.values()).to(table.dtype)
        lookups.grad = None

    def forget(self) -> None:
        self.sums.clear()
        for parameter in self._parameters:
            parameter.grad = None


def _run(compute: Callable[..., Outcome], *arguments: Any) -> Outcome:
    return compute(*arguments)


def _shared_table(model: Any) -> Tensor | None:
    """The table that a model both looks up and multiplies with, where it has one."""
    return model.shared_table() if hasattr(model, "shared_table") else None


def _bf16_copies(model: nn.Module) -> dict[Tensor, Tensor]:
    """Room for the weights that autocast would cast: of linear layers, and the shared table."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights: list[Tensor] = [
        weight for module in linear for weight in module.parameters(recurse=False)
    ]
    if (table := _shared_table(model)) is not None:
        weights.append(table)
    return {weight: torch.empty(weight.shape, dtype=torch.bfloat16) for weight in weights}


def _replica(model: nn.Module, copies: dict[Tensor, Tensor]) -> nn.Module:
    """A copy of the model whose parameters are the model's own memory, or the copies'."""
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
    # weights that are gathered for a pass must not stay, nor their casts
    cache_enabled = not engine.ranks.shard

    def measured(piece: Piece) -> Outcome:
        with (
            torch.inference_mode(),
            torch.autocast(
                engine.device.type,
                engine.products,
                enabled=engine.products is not None,
                cache_enabled=cache_enabled,
            ),
        ):
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
