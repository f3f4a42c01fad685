"""The ranks of a run, a process each, as torchrun starts them; only this file knows how they talk.

Start: `joined`, then `Ranks`. Gradients are summed as the backward pass makes them
(`DistributedGradients`: DDP, or FSDP2 with sharded weights), or afterwards (`Ranks.all_reduce_`).
A process that torchrun did not start is rank 0 of 1, for which all of this does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore
from torch.nn.parallel import DistributedDataParallel

from bertsmith.model.encoder import Layer

PAUSE, PAUSE_PER_RANK = 0.02, 0.001  # seconds between two looks into the store

Computation = Callable[..., Any]


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number among the ranks of this machine."""
    local_size: int = 1
    shard: bool = False
    """Each rank keeps only its part of weights, gradients and optimizer state."""
    restarted: bool = False
    """torchrun has started these ranks again after one of them died."""
    timeout: float = 0.0
    """Seconds that a rank waits for the others."""
    store: Store | None = field(default=None, repr=False, compare=False)

    def sharding(self, shard: bool) -> Ranks:
        """These ranks, each with its own part of the weights if `shard`."""
        if shard and self.size == 1:
            print("shard = true has no effect: there is one process", file=sys.stderr)
        return replace(self, shard=shard and self.size > 1)

    def share(self, rows: int, setting: str = "batch_size") -> range:
        """This rank's rows of a batch.

        Errors: ValueError, which names the `setting`, for a batch that cannot be cut so.

        >>> [Ranks(rank, size=3).share(16) for rank in range(3)]
        [range(0, 5), range(5, 10), range(10, 16)]
        """
        if rows < self.size:
            raise ValueError(
                f"{setting} = {rows}: too few for {self.size} ranks: raise it or start fewer"
            )
        if self.shard and rows % self.size:  # every rank must make as many passes
            raise ValueError(
                f"{setting} = {rows}: with shard = true it is a multiple of the {self.size} ranks"
            )
        return range(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    def all_reduce(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Each number summed over the ranks; tensors stay on their device, for nobody to wait."""
        if self.size == 1:
            return dict(numbers)
        devices = (value.device for value in numbers.values() if isinstance(value, Tensor))
        device = next(devices, torch.device("cpu"))
        sums = torch.stack([_float64(number, device) for number in numbers.values()])
        dist.all_reduce(sums)
        on_cpu = device.type == "cpu"
        return dict(zip(numbers, sums.tolist() if on_cpu else sums.unbind(), strict=True))

    def all_reduce_(self, numbers: Tensor) -> None:
        """Replace each rank's numbers by their sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(numbers)

    def texts(self, key: str, text: str) -> list[str]:
        """Every rank's text, in their order; a key serves once.

        Errors: TimeoutError that names the ranks whose text has not come in time.
        """
        if self.store is None:
            return [text]
        self.store.set(f"{key}/{self.rank}", text)
        deadline = time.monotonic() + self.timeout
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]:
            if time.monotonic() >= deadline:
                raise absent(missing, self.size, self.timeout)
            time.sleep(PAUSE + PAUSE_PER_RANK * self.size)
        return [_read(self.store, f"{key}/{rank}") for rank in range(self.size)]

    def broadcast(self, key: str, text: str) -> str:
        """Rank 0's text, at every rank; a key serves once."""
        return self.texts(key, text)[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Wait for all ranks and check that they have the same facts.

        Errors: ValueError, at every rank, that names the first difference from rank 0.
        """
        texts = self.texts("facts", json.dumps(dict(facts)))
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            for name, value in json.loads(text).items():
                if value != first[name]:
                    raise ValueError(
                        f"{name} is {value} at rank {rank} and {first[name]} at rank 0: every rank "
                        "needs the same command, and a `corpus` and `out` that all of them share"
                    )

    def device(self, named: torch.device) -> torch.device:
        """This rank's device, which becomes the process' current one.

        Errors: ValueError for a device named by its number, or too few devices.
        """
        if self.size == 1 or named.type != "cuda":
            return named
        if named.index is not None:
            raise ValueError(
                f"`device='{named}'`: each of {self.size} ranks takes its own GPU: use "
                "`device='cuda'`"
            )
        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {self.rank} is number {self.local_rank} on a machine with "
                f"{torch.cuda.device_count()} GPUs: lower torchrun's --nproc-per-node"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full tensors at rank 0; empty at the others, which must call it too."""
        complete: dict[str, Tensor] = {}
        for name, value in tensors.items():
            value = full_tensor(value)
            if self.rank == 0:
                complete[name] = value.cpu() if self.shard else value
        return complete


SINGLE_PROCESS = Ranks()


@contextmanager
def process_group(timeout: float) -> Iterator[Ranks]:
    """This process among the ranks that torchrun started, once all are there.

    Errors: TimeoutError that names the ranks which do not come within `timeout` seconds;
    ConnectionError when one is lost on the way, or does not answer for as long.
    """
    size, rank = _environment("WORLD_SIZE", 1), _environment("RANK", 0)
    starts = _environment("TORCHELASTIC_RESTART_COUNT", 0)
    if size == 1:
        yield replace(SINGLE_PROCESS, restarted=starts > 0)
        return
    local = _environment("LOCAL_RANK", 0), _environment("LOCAL_WORLD_SIZE", 1)
    ranks = Ranks(rank, size, *local, timeout=timeout)
    store = _connect(ranks)
    start = PrefixStore(rendezvous(replace(ranks, store=store)), store)
    ranks = replace(ranks, store=start)
    # a machine's torchrun counts only the ends of its own ranks
    restarted = any(int(count) for count in ranks.texts("restarts", str(starts)))
    ranks = replace(ranks, restarted=restarted)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend, store=start, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        yield ranks
        dist.destroy_process_group()  # after an error the others may wait in there: leave it be
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ConnectionError(
            f"rank {rank} of {size} lost another one, which failed or did not answer for "
            f"{timeout:g} s (`dist_timeout`); see what the others print, then go on with "
            f"`resume=True` ({str(error).strip().partition(chr(10))[0]})"
        ) from error


def _connect(ranks: Ranks) -> TCPStore:
    """The store in which the ranks find each other: torchrun's own, or else rank 0's."""
    address, port = os.environ.get("MASTER_ADDR", ""), _environment("MASTER_PORT", 0)
    if not address or not port:
        raise ValueError(
            f"WORLD_SIZE = {ranks.size} without MASTER_ADDR and MASTER_PORT: use torchrun"
        )
    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            address,
            port,
            is_master=ranks.rank == 0 and not torchruns,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=ranks.timeout),
        )
    except dist.DistError as error:
        raise absent([0], ranks.size, ranks.timeout) from error


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name}={text} in the environment: torchrun gives a number")
    return int(text)


@contextmanager
def rank_zero_output() -> Iterator[None]:
    """Silence all ranks but rank 0; errors pass through."""
    if _environment("RANK", 0) == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def run_computation(compute: Computation, *arguments: Any) -> Any:
    """compute(*arguments), where no other rank takes part."""
    return compute(*arguments)


class _Computation(nn.Module):
    """The module that DDP wraps: any computation with a model as its forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Computation, *arguments: Any) -> Any:
        return compute(*arguments)


class DistributedGradients:
    """Passes of one model on every rank; the last one sums its gradients over the ranks."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._replica = model, None
        if not ranks.shard:
            self._replica = DistributedDataParallel(
                _Computation(model), gradient_as_bucket_view=True
            )
            self._replica.register_comm_hook(None, _sum_of_bucket)

    @contextmanager
    def synced(self, last: bool) -> Iterator[Computation]:
        """Run a forward and a backward pass in here, the forward one by what this yields.

        Gradients are sent with the `last` pass of a step only.
        """
        if self._replica is None:
            self._model.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield run_computation
        elif last:
            yield self._replica
        else:
            with self._replica.no_sync():
                yield self._replica


def _sum_of_bucket(state, bucket):  # DDP refuses annotations that are strings, as ours are
    """DDP's own would divide: our losses are parts of the whole batch's already."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def shard_(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Leave this rank its part of the weights; FSDP2 gathers layers as they are computed.

    The model must be complete, on its device, and the same on all ranks.
    """
    if not ranks.shard:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (ranks.size,))
    layers = [part for part in model.modules() if isinstance(part, Layer)]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model, "losses")
    for part in model.modules():
        if isinstance(part, FSDPModule):  # sums, not means
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of which ranks may have parts; all of them must call it."""
    return tensor.full_tensor() if _has_parts(tensor) else tensor  # type: ignore[operator]


def like(weight: Tensor, value: Tensor) -> Tensor:
    """A full tensor on the weight's device, or this rank's part where the weight has parts."""
    value = value.to(weight.device)
    if not _has_parts(weight):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = weight.device_mesh, weight.placements  # pyright: ignore
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _has_parts(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose module takes seconds to import


def _float64(number: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.float64)
    # part of what is sent to the device, where the copy of a tensor would be waited for
    return torch.full((), number, dtype=torch.float64, device=device)


def rendezvous(ranks: Ranks) -> str:
    """Wait until every rank is there; returns a word that only this start of them has.

    torchrun starts all ranks again when one has died, and their store still holds what the dead
    ones wrote. So every process has a new name, and all agree on the list of names:

        rank r      here/r   its name
        rank 0      list     the names it has found, written again whenever one changes
        rank r      seen/r   the list's digest, once r's own name is in it
        rank 0      all      the list's digest, once every rank has seen it

    Errors: TimeoutError that names the ranks which are not there in time.
    """
    store, rank, size = ranks.store, ranks.rank, ranks.size
    assert store is not None

    def unseen() -> list[int]:
        return [other for other in range(size) if _read(store, f"seen/{other}") != digest]

    name = uuid.uuid4().hex[:12]
    store.set(f"here/{rank}", name)
    deadline = time.monotonic() + ranks.timeout
    while True:
        if rank == 0:
            found = " ".join(_read(store, f"here/{other}") for other in range(size))
            if found != _read(store, "list"):
                store.set("list", found)
        names = _read(store, "list")
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        listed = names.split(" ")[rank : rank + 1] == [name]
        if listed and _read(store, f"seen/{rank}") != digest:
            store.set(f"seen/{rank}", digest)
        if rank == 0 and not unseen():
            store.set("all", digest)
        if listed and _read(store, "all") == digest:
            return digest
        if time.monotonic() >= deadline:
            missing = [other for other in unseen() if other != rank] if listed else []
            raise absent(missing or [0], size, ranks.timeout)
        time.sleep(PAUSE + PAUSE_PER_RANK * size)


def absent(missing: list[int], size: int, timeout: float) -> TimeoutError:
    """
    >>> print(absent([1, 3], size=4, timeout=60))
    ranks 1, 3 of 4 did not come within 60 s: see what they print, and whether their machines
    reach MASTER_ADDR; `dist_timeout` gives slow ones more time
    """
    what = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return TimeoutError(
        f"{what} of {size} did not come within {timeout:g} s: see what they print, and whether "
        "their machines reach MASTER_ADDR; `dist_timeout` gives slow ones more time"
    )


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""  # empty: nobody has set it
