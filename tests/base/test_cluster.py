"""A Ray cluster: clusters that do not fit are named; work comes back whole and in its order."""

import os
import signal
import sys

import pytest

from bertsmith.base import cluster as clusters
from bertsmith.base.cluster import (
    UNDER_WAY,
    VERSIONS,
    check_versions,
    cluster,
    map_in_order,
    raise_cause,
)


def doubled(item):
    if item == 13:
        raise ValueError("a.txt:13: bad luck")
    return 2 * item


def numbered(*numbers):
    return ((f"item {number}", number) for number in numbers)


def test_items_come_back_in_their_order_and_few_are_under_way(fake_ray):
    items = numbered(*range(20, 60))
    found = map_in_order(doubled, items, "CPU")
    assert next(found) == ("item 20", 40)
    assert next(items)[1] == 20 + UNDER_WAY * 2  # no more was read ahead
    rest = [number for number in range(21, 60) if number != 20 + UNDER_WAY * 2]
    assert list(found) == [(f"item {number}", 2 * number) for number in rest]
    assert fake_ray.most == UNDER_WAY * 2 and not fake_ray.under_way
    assert list(map_in_order(doubled, numbered(), "CPU")) == []


@pytest.mark.parametrize("place", [0, 4, 30])
def test_an_error_of_the_work_comes_in_its_turn(fake_ray, place):
    found = map_in_order(doubled, numbered(*range(20, 20 + place), 13, *range(100)), "CPU")
    for number in range(20, 20 + place):
        assert next(found)[1] == 2 * number
    with pytest.raises(ValueError, match="^a.txt:13: bad luck$"):
        next(found)


@pytest.mark.parametrize("place", [0, 4, 30])
def test_an_error_of_the_items_comes_behind_what_stands_before_it(fake_ray, place):
    def items():
        yield from numbered(*range(20, 20 + place))
        raise ValueError("a.txt:99: not UTF-8")

    found = map_in_order(doubled, items(), "CPU")
    for number in range(20, 20 + place):
        assert next(found)[1] == 2 * number
    with pytest.raises(ValueError, match="^a.txt:99: not UTF-8$"):
        next(found)


def test_a_process_of_a_gpu_stays(fake_ray):
    with pytest.raises(ValueError, match="the Ray cluster has no GPU: add a machine"):
        next(map_in_order(doubled, numbered(1), "GPU"))
    fake_ray.resources["GPU"] = 1.0
    assert list(map_in_order(doubled, numbered(*range(9)), "GPU"))[-1] == ("item 8", 16)
    assert fake_ray.most == UNDER_WAY
    assert fake_ray.options["num_gpus"] == 1 and fake_ray.options["max_calls"] == 0


def test_a_cluster_of_another_version_is_named(fake_ray, monkeypatch):
    def init(**_):
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 1.0\n")

    monkeypatch.setattr(fake_ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    message = "Ray cluster at head:6379: Version mismatch: .* started with: Ray: 1.0$"
    with pytest.raises(ValueError, match=message), cluster():
        pytest.fail("connected")


def test_a_node_with_another_python_or_bertsmith_is_named(fake_ray, monkeypatch):
    own = VERSIONS
    check_versions({"node a": own, "node b": dict(own)})
    for name in own:
        with pytest.raises(ValueError, match=f"node b of the Ray cluster: {name} 0.1, here"):
            check_versions({"node a": own, "node b": own | {name: "0.1"}})
    with cluster():
        assert fake_ray.connected == [True]
    assert fake_ray.connected == [True, False]
    monkeypatch.setattr(clusters, "_versions_of_nodes", lambda: {"node c": {"Python": "2"}})
    with pytest.raises(ValueError, match="node c of the Ray cluster: Python 2"), cluster():
        pytest.fail("connected")
    assert fake_ray.connected == [True, False, True, False]
    monkeypatch.setattr(fake_ray, "is_initialized", lambda: True)  # by somebody, who ends it
    with pytest.raises(ValueError, match="node c of the Ray cluster: Python 2"), cluster():
        pytest.fail("connected")
    assert len(fake_ray.connected) == 4


def test_a_failed_cluster_and_a_failed_task_are_told_apart(fake_ray):
    class TaskError(fake_ray.RayError, ValueError):
        """Ray makes them so: of its own class and of the one it stands for."""

    class TaskOSError(fake_ray.RayError, OSError):
        cause = OSError("a.txt: not on node7")

    with pytest.raises(OSError, match=r"Ray cluster failed \(RayError\): run again, it goes on"):
        raise_cause(fake_ray.RayError("a node is gone"))
    task = TaskError("ray::FlatMap() Traceback ...")
    task.cause = ValueError("a.txt:3: not UTF-8")
    with pytest.raises(ValueError, match="^a.txt:3: not UTF-8$"):
        raise_cause(task)
    with pytest.raises(OSError, match="^a machine of the Ray cluster: a.txt: not on node7; run"):
        raise_cause(TaskOSError("ray::FlatMap() Traceback ..."))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="ray"), cluster():
        pytest.fail("connected")


@pytest.mark.slow
def test_what_a_killed_process_had_is_computed_again(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ended = tmp_path / "ended"

    def squared(number):  # not of a module: Ray sends its code
        if number == 13 and not ended.exists():
            ended.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 99:
            os.kill(os.getpid(), signal.SIGKILL)
        return number**2

    with cluster():
        found = list(map_in_order(squared, numbered(*range(30)), "CPU"))
        assert found == [(f"item {number}", number**2) for number in range(30)]
        assert ended.exists() and ray.is_initialized()
        message = r"the Ray cluster failed \(WorkerCrashedError\): run again"
        with pytest.raises(OSError, match=message):
            list(map_in_order(squared, numbered(99), "CPU"))  # every process dies of it
    assert not ray.is_initialized()
