"""For all tests."""

import io
import pickle
import random
import signal
import sys
import types

import pytest

from bertsmith.base import cluster
from bertsmith.base import jit as compiled
from bertsmith.training.engine import MatmulTimes, measure_peak
from bertsmith.training.loop import matmul_times


@pytest.fixture(autouse=True, scope="session")
def _no_notice_of_compiling():
    """On a fresh machine one test in each process would find it among what a command says."""
    compiled._Notice.given = True


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard():
    """A shell's background job ignores SIGINT, and so would all that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_their_own(tmp_path_factory):
    """Nothing that is measured here is kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERTSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _a_small_product_tells_the_rate():
    """Every training measures the machine's rates first; no test needs the true ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_peak, "__defaults__", (128, 0.0))
        patch.setattr(matmul_times, "SECONDS", 0.0)
        # or trainings that are compared might have different precisions
        patch.setattr(matmul_times, "measure_matmuls", lambda *what: MatmulTimes(1, 1.0, 1.0))
        yield


@pytest.fixture
def standard_input(monkeypatch):
    """A function that makes bytes what the command's standard input holds."""

    def hold(data):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    return hold


class FakeRay(types.ModuleType):
    """What we call of Ray, in this process: tasks on copies, computed in no order of ours."""

    class RayError(Exception):
        """Ray raises one of its own for a task's, with the task's inside."""

        cause = None

    def __init__(self, **resources):
        super().__init__("ray")
        self.exceptions = types.ModuleType("ray.exceptions")
        self.exceptions.RayError = self.RayError
        self.resources, self.options, self.connected = resources, None, []
        self.under_way, self.most, self._draw = [], 0, random.Random(1)

    def is_initialized(self):
        return False

    def init(self, **_):
        self.connected.append(True)

    def shutdown(self):
        self.connected.append(False)

    def cluster_resources(self):
        return self.resources

    def put(self, value):
        return pickle.dumps(value)

    def remote(self, **options):
        self.options = options
        return lambda function: types.SimpleNamespace(
            remote=lambda sent, item: self._submit(function, sent, pickle.dumps(item))
        )

    def _submit(self, *task):
        self.under_way.append(task := [*task])
        self.most = max(self.most, len(self.under_way))
        self._compute(self._draw.choice(self.under_way))
        return task

    def _compute(self, task):
        if len(task) == 3:
            function, sent, item = task
            try:
                task.append((function(pickle.loads(sent), pickle.loads(item)), None))
            except (ValueError, OSError) as error:
                task.append((None, error))

    def get(self, task):
        self._compute(task)
        self.under_way.remove(task)
        result, error = task[3]
        if error:
            raised = self.RayError("ray::_call() Traceback ...")
            raised.cause = error
            raise raised
        return result


@pytest.fixture
def fake_ray(monkeypatch):
    """A cluster of two cores."""
    ray = FakeRay(CPU=2.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    monkeypatch.setattr(cluster, "_versions_of_nodes", lambda: {"node a": cluster.VERSIONS})
    return ray
