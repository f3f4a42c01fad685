"""Work on a Ray cluster: connected to, its machines compared with this one, errors told apart."""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

from bertsmith.base import VERSION

# Every node must share them: Python decides about characters, bertsmith about the rest.
VERSIONS = {"Python": platform.python_version(), "bertsmith": VERSION}
UNDER_WAY = 3  # items for each core (or GPU) that are computed, or wait for their turn


@contextmanager
def cluster() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS; without one, to Ray on this machine, which is started
    and ended here.

    Errors: ModuleNotFoundError without Ray; ValueError for a cluster of other versions.
    """
    import ray  # type: ignore[import-not-found]

    was_connected = ray.is_initialized()
    if not was_connected:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(log_to_driver=False, logging_level="critical")  # errors come as such
        except (RuntimeError, ConnectionError) as error:
            # Ray compares its own version and Python's when it connects.
            address, text = os.environ.get("RAY_ADDRESS", "this machine"), str(error).split()
            raise ValueError(f"the Ray cluster at {address}: {' '.join(text)}") from error
    try:
        check_versions(_versions_of_nodes())
        yield
    finally:
        if not was_connected:
            ray.shutdown()


def check_versions(nodes: dict[str, dict[str, str]]) -> None:
    """Refuse a cluster of which a node has other `VERSIONS`.

    >>> check_versions({"node 10.0.0.2": VERSIONS | {"bertsmith": "absent"}})
    Traceback (most recent call last):
    ValueError: node 10.0.0.2 of the Ray cluster: bertsmith absent, here ...: install the same ...
    """
    for node, versions in nodes.items():
        for name, version in VERSIONS.items():
            if versions[name] != version:
                raise ValueError(
                    f"{node} of the Ray cluster: {name} {versions[name]}, here {version}: "
                    "install the same on every machine and start the cluster again"
                )


def _versions_of_nodes() -> dict[str, dict[str, str]]:
    import ray  # type: ignore[import-not-found]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]

    def versions() -> dict[str, str]:  # sent as code: a node may be without bertsmith
        import platform

        try:
            from bertsmith.base import VERSION as version
        except ModuleNotFoundError:
            version = "absent"
        return {"Python": platform.python_version(), "bertsmith": version}

    remote: Any = ray.remote(num_cpus=0)(versions)
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = remote.options(scheduling_strategy=there).remote()
            found[f"node {node['NodeManagerAddress']}"] = task
    return dict(zip(found, ray.get(list(found.values())), strict=True))


def capacity(kind: Literal["CPU", "GPU"]) -> int:
    """Cores or GPUs of the cluster that is connected. Errors: ValueError where there are none."""
    import ray  # type: ignore[import-not-found]

    if not (number := int(ray.cluster_resources().get(kind, 0))):
        raise ValueError(f"the Ray cluster has no {kind}: add a machine with one (`ray start`)")
    return number


def map_in_order(
    work: Callable[[Any], Any], items: Iterable[tuple[Any, Any]], kind: Literal["CPU", "GPU"]
) -> Generator[tuple[Any, Any], None, None]:
    """Map (label, item) to (label, `work(item)`), in order, on the cluster that is connected.

    A core (with kind GPU a core and a GPU) computes an item at a time. `UNDER_WAY` of them for each
    are sent at most; labels stay here. What a process or machine had when it was lost is computed
    again, three times at most.

    Errors: those of the items and of the work, each when all before it are yielded; OSError when
    the cluster failed.
    """
    import ray  # type: ignore[import-not-found]
    from ray.exceptions import RayError  # type: ignore[import-not-found]

    most = UNDER_WAY * capacity(kind)
    # max_calls: a process stays, also with a GPU, and what the work keeps in it
    options = {"num_cpus": 1, "num_gpus": int(kind == "GPU"), "max_calls": 0, "max_retries": 3}
    task: Any = ray.remote(**options)(_call)
    sent, under_way, items, end = ray.put(work), deque(), iter(items), None
    while end is None:
        try:
            label, item = next(items)
        except (StopIteration, ValueError, OSError) as error:
            end = error
        else:
            under_way.append((label, task.remote(sent, item)))
        while len(under_way) >= (1 if end else most):
            label, result = under_way.popleft()
            try:
                made = ray.get(result)
            except RayError as error:
                raise_cause(error)
            yield label, made
    if not isinstance(end, StopIteration):
        raise end


def _call(work: Callable[[Any], Any], item: Any) -> Any:
    return work(item)


def raise_cause(error: Exception) -> NoReturn:
    """Raise the error of the input or the machine that ended a task, or that the cluster failed."""
    from ray.exceptions import RayError  # type: ignore[import-not-found]

    cause: BaseException | None = error
    while cause is not None:
        # An error of Ray's is also of the class that it stands for, but has another text.
        if isinstance(cause, ValueError) and not isinstance(cause, RayError):
            raise ValueError(str(cause)) from error
        if isinstance(cause, OSError) and not isinstance(cause, RayError):
            message = f"a machine of the Ray cluster: {cause}; run again, it goes on where it was"
            raise OSError(message) from error
        cause = getattr(cause, "cause", None) or cause.__cause__
    raise OSError(
        f"the Ray cluster failed ({type(error).__name__}): run again, it goes on where it was"
    ) from error
