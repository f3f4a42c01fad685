"""`kill -9` while text is appended: the store stays what it was, and the same command goes on."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from bertsmith.corpus.build.build import append_text
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import verify_store

PLACES = [
    "write-train-00000.tokens:1",
    "write-unigram_counts.bin:1",
    "write-manifest.json:1",  # of the new text
    "write-manifest-0001.json:1",
    "write-manifest.json:2",  # of the store
]


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.faults
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_append_loses_nothing(small_store, tmp_path, tally, place):
    text = tmp_path / "more.txt"
    text.write_text("\n\n".join(f"The old owl {n} sleeps near tree {n}." for n in range(9)))
    whole, store = (shutil.copytree(small_store, tmp_path / name) for name in ("whole", "killed"))
    append_text([text], whole)
    before = TokenStore.open(store).fingerprint
    command = [
        sys.executable,
        "-m",
        "bertsmith",
        "corpus",
        "append",
        str(text),
        "--store",
        str(store),
    ]
    ended = subprocess.run(command, env={**os.environ, "BERTSMITH_KILL_AT": place}, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert TokenStore.open(store).fingerprint == before
    assert list(verify_store(store)) == []
    subprocess.run(command, check=True, timeout=120)
    assert list(verify_store(store)) == []
    assert contents(store) == contents(whole)
    tally("kills of an append, the store as before and then whole")
