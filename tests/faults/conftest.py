"""For the fault suite: a count of what was done to runs and stores, shown at the end."""

from collections import Counter

import pytest

from ..tiny import ANIMALS, write_store

COUNTS = pytest.StashKey[Counter]()


@pytest.fixture
def tally(request):
    """tally("byte flipped in a shard, found and named"), once the fault has been survived."""
    counts = request.config.stash.setdefault(COUNTS, Counter())
    return lambda what: counts.update([what])


@pytest.fixture(scope="session")
def small_store(tmp_path_factory):
    """A token store of twenty documents of six sentences."""
    documents = []
    for n in range(20):
        animals = [ANIMALS[(n + k * k) % 5] for k in range(6)]
        text = (f"The old {animal} {k} sleeps near tree {n}." for k, animal in enumerate(animals))
        documents.append([" ".join(text)])
    return write_store(tmp_path_factory.mktemp("store"), documents)


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(COUNTS, None)
    if counts and "not faults" not in config.option.markexpr:
        terminalreporter.section("faults")
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:6}  {what}")
