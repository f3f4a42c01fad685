"""For the fault suite: a count of what was done to runs and stores, shown at the end."""

from collections import Counter

import pytest

from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary

ANIMALS = ("cat", "dog", "cow", "owl", "fox")
COUNTS = pytest.StashKey[Counter]()


@pytest.fixture
def tally(request):
    """tally("byte flipped in a shard, found and named"), once the fault has been survived."""
    counts = request.config.stash.setdefault(COUNTS, Counter())
    return lambda what: counts.update([what])


@pytest.fixture(scope="session")
def small_store(tmp_path_factory):
    """A token store of twenty documents of six sentences."""
    texts = [
        " ".join(f"The old {ANIMALS[(n + k * k) % 5]} {k} sleeps near tree {n}." for k in range(6))
        for n in range(20)
    ]
    documents = [Document("made", n, [text]) for n, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("store")
    tokenizer = Tokenizer(train_vocabulary(documents, 70))
    build_store([], tokenizer, folder, BuildSettings(held_out=0.2), documents=documents)
    return folder


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(COUNTS, None)
    if counts and "not faults" not in config.option.markexpr:
        terminalreporter.section("faults")
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:6}  {what}")
