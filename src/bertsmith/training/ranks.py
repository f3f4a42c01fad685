"""The processes of a run, a rank each, as torchrun starts them: no other file knows how they talk.

    joined         all ranks are there, or the missing ones are named
    share          the rows of a batch that are this rank's
    total          numbers, summed over the ranks
    JointPasses    backward passes whose gradients are summed over the ranks as they come: PyTorch's
                   DistributedDataParallel, or FSDP2 where the weights are sharded
    sum_           gradients, summed over the ranks once they are all there
    gathered       weights and optimizer state, whole, for a checkpoint

A process that torchrun did not start is rank 0 of 1, for which all of these do nothing.
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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore
from torch.nn.parallel import DistributedDataParallel

PAUSE, PAUSE_A_RANK = 0.02, 0.001  # seconds between two looks

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
        """The same, with each rank's own part of the weights if `shard`."""
        if shard and self.size == 1:
            print("shard = true has no effect: there is one process", file=sys.stderr)
        return replace(self, shard=shard and self.size > 1)

    def share(self, rows: int) -> range:
        """This rank's rows of a batch.

        Errors: ValueError for a batch that cannot be cut so.

        >>> [Ranks(rank, size=3).share(16) for rank in range(3)]
        [range(0, 5), range(5, 10), range(10, 16)]
        """
        if rows < self.size:
            raise ValueError(
                f"batch = {rows}: too few rows for {self.size} ranks: raise --batch, or start "
                "fewer processes"
            )
        if self.shard and rows % self.size:  # every rank must make as many passes
            raise ValueError(
                f"batch = {rows}: with shard = true it must be a multiple of the {self.size} ranks"
            )
        return range(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    def total(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Each number summed over the ranks; tensors on a device stay there, for nobody to wait."""
        if self.size == 1:
            return dict(numbers)
        devices = [value.device for value in numbers.values() if isinstance(value, Tensor)]
        device = devices[0] if devices else torch.device("cpu")
        sums = torch.stack([_float64(number, device) for number in numbers.values()])
        dist.all_reduce(sums)
        return dict(
            zip(numbers, sums.tolist() if device.type == "cpu" else sums.unbind(), strict=True)
        )

    def sum_(self, numbers: Tensor) -> None:
        """Put the sum over the ranks in place of each rank's numbers."""
        if self.size > 1:
            dist.all_reduce(numbers)

    def told_by_first(self, key: str, text: str) -> str:
        """Rank 0's text, at every rank; a key serves once."""
        if self.store is None:
            return text
        return gather(self.store, key, text, self.rank, self.size, self.timeout)[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks have the same facts; nobody goes on before all have come.

        Errors: ValueError, at every rank, where one has another than rank 0, with its name.
        """
        if self.store is None:
            return
        own = json.dumps(dict(facts))
        told = gather(self.store, "facts", own, self.rank, self.size, self.timeout)
        first = json.loads(told[0])
        for rank, text in enumerate(told):
            for name, value in json.loads(text).items():
                if value != first[name]:
                    raise ValueError(
                        f"{name} is {value} at rank {rank} and {first[name]} at rank 0: every rank "
                        "needs the same command, and a --corpus and --out that all of them share"
                    )

    def device(self, named: torch.device) -> torch.device:
        """The device of this rank, which becomes the process' current one.

        Errors: ValueError where a device is named by its number, or there are too few.
        """
        if self.size == 1 or named.type != "cuda":
            return named
        if named.index is not None:
            raise ValueError(
                f"--device {named}: each of the {self.size} ranks takes a GPU of its own: use "
                "--device cuda"
            )
        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {self.rank} is number {self.local_rank} on its machine, which has "
                f"{torch.cuda.device_count()} GPUs: lower torchrun's --nproc-per-node"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, whole, at rank 0; empty at the others, which must ask too."""
        whole_ones: dict[str, Tensor] = {}
        for name, value in tensors.items():
            value = whole(value)
            if self.rank == 0:
                whole_ones[name] = value.cpu() if self.shard else value
        return whole_ones


ALONE = Ranks()


@contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """This process among the ranks that torchrun started, once all are there.

    Errors: TimeoutError that names the ranks which do not come within `timeout` seconds;
    ConnectionError when one is lost on the way, or does not answer for as long.
    """
    size, rank = _of_environment("WORLD_SIZE", 1), _of_environment("RANK", 0)
    starts = _of_environment("TORCHELASTIC_RESTART_COUNT", 0)
    if size == 1:
        yield replace(ALONE, restarted=starts > 0)
        return
    local_rank, local_size = (
        _of_environment("LOCAL_RANK", 0),
        _of_environment("LOCAL_WORLD_SIZE", 1),
    )
    ranks = Ranks(rank, size, local_rank, local_size, timeout=timeout)
    store = _store(ranks)
    start = PrefixStore(roll_call(store, rank, size, timeout), store)
    # a machine's torchrun counts its own ranks' ends alone
    counts = gather(start, "restarts", str(starts), rank, size, timeout)
    ranks = replace(ranks, restarted=any(int(count) for count in counts), store=start)
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
            f"{timeout:g} s (--rank-timeout); see what the others print, then go on with --resume "
            f"({str(error).strip().partition(chr(10))[0]})"
        ) from error


def _store(ranks: Ranks) -> TCPStore:
    """The store in which the ranks find each other: torchrun's own, or else rank 0's."""
    address, port = os.environ.get("MASTER_ADDR", ""), _of_environment("MASTER_PORT", 0)
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


def _of_environment(name: str, otherwise: int) -> int:
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise ValueError(f"{name}={text} in the environment: torchrun gives a number")
    return int(text)


@contextmanager
def only_first_speaks() -> Iterator[None]:
    """Nothing is printed in here but by rank 0; errors pass through."""
    if _of_environment("RANK", 0) == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


class _Computation(nn.Module):
    """Any computation with a model as a module's forward pass, which is what DDP wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Computation, *arguments: Any) -> Any:
        return compute(*arguments)


class JointPasses:
    """Passes of one model on every rank; with the last its gradients are the sum over the ranks."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._replica = model, None
        if not ranks.shard:
            self._replica = DistributedDataParallel(
                _Computation(model), gradient_as_bucket_view=True
            )
            self._replica.register_comm_hook(None, _sum_of_bucket)

    @contextmanager
    def passing(self, last: bool) -> Iterator[Computation]:
        """Around a forward and a backward pass; yields what runs the forward one.

        Before the last one of a step nothing is sent.
        """
        if self._replica is None:
            self._model.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield lambda compute, *arguments: compute(*arguments)
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
    """Leave this rank its part of the weights; layers are gathered as they are computed (FSDP2).

    The model must be whole, on its device, and the same on all ranks.
    """
    if not ranks.shard:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (ranks.size,))
    layers: Any = model.encoder.layers  # pyright: ignore[reportAttributeAccessIssue]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model, "losses")
    for part in model.modules():
        if isinstance(part, FSDPModule):  # sums, not means
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which ranks may have parts, whole on each; all of them must ask."""
    return tensor.full_tensor() if _has_parts(tensor) else tensor  # type: ignore[operator]


def like(weight: Tensor, value: Tensor) -> Tensor:
    """A whole tensor on the device of a weight, or this rank's part where the weight has parts."""
    value = value.to(weight.device)
    if not _has_parts(weight):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, places = weight.device_mesh, weight.placements  # pyright: ignore
    return distribute_tensor(value, mesh, places, src_data_rank=None)


def _has_parts(tensor: Tensor) -> bool:
    """True for a DTensor, whose module takes seconds to import."""
    return hasattr(tensor, "full_tensor")


def _float64(number: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.float64)
    # part of what is sent to the device, where the copy of a tensor would be waited for
    return torch.full((), number, dtype=torch.float64, device=device)


class Store(Protocol):
    """A store of torch.distributed, as far as it is needed here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def roll_call(store: Store, rank: int, size: int, timeout: float) -> str:
    """Wait until every rank has said that it is there; a word that only this start of them has.

    torchrun starts all ranks again when one has died, and their store still holds what the dead
    ones wrote. So every process has a name that none had before, and all agree on the list of them:

        rank r      here/r   its name
        rank 0      list     the names it has found, written again whenever one is another
        rank r      seen/r   the list's digest, once r's own name is in it
        rank 0      all      the list's digest, once every rank has seen it

    Errors: TimeoutError that names the ranks which are not there after `timeout` seconds.
    """
    name = uuid.uuid4().hex[:12]
    store.set(f"here/{rank}", name)
    deadline = time.monotonic() + timeout
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
        if rank == 0 and not _unseen(store, digest, size):
            store.set("all", digest)
        if listed and _read(store, "all") == digest:
            return digest
        if time.monotonic() >= deadline:
            missing = _unseen(store, digest, size) if listed else []
            raise absent([other for other in missing if other != rank] or [0], size, timeout)
        time.sleep(PAUSE + PAUSE_A_RANK * size)


def gather(store: Store, key: str, text: str, rank: int, size: int, timeout: float) -> list[str]:
    """Every rank's text, in their order; a key serves once.

    Errors: TimeoutError that names the ranks whose text has not come after `timeout` seconds.
    """
    store.set(f"{key}/{rank}", text)
    deadline = time.monotonic() + timeout
    missing = list(range(size))
    while missing := [other for other in missing if not store.check([f"{key}/{other}"])]:
        if time.monotonic() >= deadline:
            raise absent(missing, size, timeout)
        time.sleep(PAUSE + PAUSE_A_RANK * size)
    return [_read(store, f"{key}/{other}") for other in range(size)]


def absent(missing: list[int], size: int, timeout: float) -> TimeoutError:
    """The error that names ranks which are not there.

    >>> print(absent([1, 3], size=4, timeout=60))
    ranks 1, 3 of 4 did not come within 60 s: see what they print, and whether their machines
    reach MASTER_ADDR; --rank-timeout gives slow ones more time
    """
    what = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return TimeoutError(
        f"{what} of {size} did not come within {timeout:g} s: see what they print, and whether "
        "their machines reach MASTER_ADDR; --rank-timeout gives slow ones more time"
    )


def _unseen(store: Store, digest: str, size: int) -> list[int]:
    return [rank for rank in range(size) if _read(store, f"seen/{rank}") != digest]


def _read(store: Store, key: str) -> str:
    """The text of a key, empty when nobody has set it."""
    return store.get(key).decode() if store.check([key]) else ""
