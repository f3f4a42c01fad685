"""A build killed at every place where it writes, and at any moment, ends with the same bytes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from bertsmith.corpus.build import build
from bertsmith.text.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.faults

SHARDS = [
    f"write-{split}-{number:05d}.{kind}"
    for number in (0, 2)
    for split in ("train", "held_out")
    for kind in ("tokens", "sentences", "documents", "checksums")
]
RECORDS = [f"write-{build.BUILD}:{k}" for k in (1, 2, 4)]
END = ["write-unigram_counts.bin", "write-tokenizer.json", "write-manifest.json"]
SCRIPT = """
import sys
from pathlib import Path
from bertsmith.corpus.build import build
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.text.tokenizer.tokenizer import Tokenizer

build.BATCH = 1000
if __name__ == "__main__":
    vocabulary = Tokenizer.from_pretrained("vocab")
    build.build_store(
        [Path("a.txt"), Path("b.txt")], vocabulary, Path(sys.argv[1]),
        BuildSettings(workers=int(sys.argv[2]), held_out=0.2, shard_tokens=2000),
    )
"""


@pytest.fixture(scope="module")
def place(small_store, tmp_path_factory):
    """A folder with two files, a vocabulary, the script, and the store of an undisturbed build."""
    folder = tmp_path_factory.mktemp("build")
    Tokenizer.from_pretrained(small_store).save(folder / "vocab")
    (folder / "script.py").write_text(SCRIPT)
    for name in "ab":
        texts = (f"The old cat {k} sleeps. It is tree {k + 1}, {name}." * 9 for k in range(60))
        (folder / f"{name}.txt").write_text("\n\n".join(texts))
    assert start(folder, "whole").wait() == 0
    return folder


def start(folder, out, workers=1, kill_at=""):
    command = [sys.executable, "script.py", out, str(workers)]
    environment = os.environ | {"BERTSMITH_KILL_AT": kill_at}
    return subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("where", [*SHARDS, *RECORDS, *END])
def test_killed_where_it_writes(place, where, tally):
    kill_at = where if ":" in where else f"{where}:1"
    out = where.replace(":", "-")
    assert start(place, out, kill_at=kill_at).wait() == -signal.SIGKILL
    assert not (place / out / "manifest.json").exists()
    assert start(place, out).wait() == 0
    assert contents(place / out) == contents(place / "whole")
    tally("corpus build killed where it writes, ended with the same bytes")


def test_killed_with_its_workers_at_any_moment(place, tally):
    for tenth in range(10):
        process = start(place, "any", workers=2)
        time.sleep(0.4 + 0.25 * tenth)
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            tally("corpus build with two workers killed at any moment")
    assert start(place, "any", workers=2).wait() == 0
    assert contents(place / "any") == contents(place / "whole")
