"""For all tests."""

import io
import signal

import pytest

from bertsmith.base import jit as compiled


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


@pytest.fixture
def standard_input(monkeypatch):
    """A function that makes bytes what the command's standard input holds."""

    def hold(data):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    return hold
