"""A cache and a storage of their own for every test."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache and an empty storage."""
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BERTSMITH_CACHE_GB", raising=False)
    MemoryFileSystem.store.clear()
    yield tmp_path / "cache"
    MemoryFileSystem.store.clear()
