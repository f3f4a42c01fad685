"""For all tests."""

import pytest

from bertsmith import compiled


@pytest.fixture(autouse=True, scope="session")
def _no_notice_of_compiling():
    """On a fresh machine one test in each process would find it among what a command says."""
    compiled._Notice.given = True
