"""Stores in a test's own folder, and a cache and a storage of its own."""

import functools

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from . import made


@pytest.fixture
def make_store(tmp_path):
    """documents -> TokenStore in the test's folder."""
    return functools.partial(made.make_store, tmp_path / "store")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache and an empty storage."""
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BERTSMITH_CACHE_GB", raising=False)
    MemoryFileSystem.store.clear()
    yield tmp_path / "cache"
    MemoryFileSystem.store.clear()
