"""`kill -9` while a store is built, grows or is sent: nothing is lost, the same command goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bertsmith.corpus.build import build
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish, verify_store
from bertsmith.text.tokenizer.tokenizer import Tokenizer

from ..tiny import contents, write

pytestmark = pytest.mark.faults


def fingerprint(store):
    return TokenStore.open(store).fingerprint


def owls(path, count):
    return write(path, "\n\n".join(f"The old owl {n} sleeps near tree {n}." for n in range(count)))


SHARDS = [
    f"write-{split}-{number:05d}.{kind}:1"
    for number in (0, 2)
    for split in ("train", "held_out")
    for kind in ("tokens", "sentences", "documents", "checksums")
]
RECORDS = [f"write-{build.BUILD}:{k}" for k in (1, 2, 4)]
END = ["write-unigram_counts.bin:1", "write-tokenizer.json:1", "write-manifest.json:1"]
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
    write(folder / "script.py", SCRIPT)
    for name in "ab":
        texts = (f"The old cat {k} sleeps. It is tree {k + 1}, {name}." * 9 for k in range(60))
        write(folder / f"{name}.txt", "\n\n".join(texts))
    assert start(folder, "whole").wait() == 0
    return folder


def start(folder, out, workers=1, kill_at=""):
    command = [sys.executable, "script.py", out, str(workers)]
    how = {"env": os.environ | {"BERTSMITH_KILL_AT": kill_at}, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **how)


@pytest.mark.parametrize("where", [*SHARDS, *RECORDS, *END])
def test_a_build_killed_where_it_writes(place, where, tally):
    out = where.replace(":", "-")
    assert start(place, out, kill_at=where).wait() == -signal.SIGKILL
    assert not (place / out / "manifest.json").exists()
    assert start(place, out).wait() == 0
    assert contents(place / out) == contents(place / "whole")
    tally("corpus build killed where it writes, ended with the same bytes")


def test_a_build_killed_with_its_workers_at_any_moment(place, tally):
    for tenth in range(10):
        process = start(place, "any", workers=2)
        time.sleep(0.4 + 0.25 * tenth)
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            tally("corpus build with two workers killed at any moment")
    assert start(place, "any", workers=2).wait() == 0
    assert contents(place / "any") == contents(place / "whole")


def run(words, cache, kill_at=""):
    environment = os.environ | {"BERTSMITH_CACHE": str(cache), "BERTSMITH_KILL_AT": kill_at}
    command = [sys.executable, "-m", "bertsmith", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


APPENDED = [
    "write-train-00000.tokens:1",
    "write-unigram_counts.bin:1",
    "write-manifest.json:1",  # of the new text
    "write-manifest-0001.json:1",
    "write-manifest.json:2",  # of the store
]


@pytest.mark.parametrize("where", APPENDED)
def test_a_killed_append_loses_nothing(small_store, tmp_path, tally, where):
    text = owls(tmp_path / "more.txt", 9)
    whole, store = (shutil.copytree(small_store, tmp_path / name) for name in ("whole", "killed"))
    build.append_text([text], whole)
    before, words = fingerprint(store), ["corpus", "append", text, "--store", store]
    assert run(words, tmp_path, where).returncode == -signal.SIGKILL
    assert fingerprint(store) == before and list(verify_store(store)) == []
    assert run(words, tmp_path).returncode == 0
    assert list(verify_store(store)) == [] and contents(store) == contents(whole)
    tally("kills of an append, the store as before and then whole")


# Each file is written on this machine first, then sent to file://, which writes it once more.
SENT = ["vocab.txt", "unigram_counts.bin", "train-00000.checksums", "train-00000.tokens"]
SENT += ["held_out-00000.documents", "manifest.json"]


@pytest.mark.parametrize("file", SENT)
def test_a_killed_upload_of_a_build_goes_on(small_store, tmp_path, tally, file):
    text, url = owls(tmp_path / "text.txt", 90), f"file://{tmp_path}/there"
    cache, local = tmp_path / "cache", tmp_path / "local"
    words = ["corpus", text, "--vocab", small_store, "--held-out", "0.2", "--workers", "1", "--out"]
    assert run([*words, url], cache, f"write-{file}:2").returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(url)
    again = run([*words, url], cache)
    assert again.returncode == 0 and "finished before" in again.stderr, again.stderr
    assert list(verify_store(url)) == [] and list((cache / "builds").iterdir()) == []
    assert run([*words, local], cache).returncode == 0
    assert fingerprint(url) == fingerprint(local)
    tally("kills of an upload, no store there before it was whole")


@pytest.mark.parametrize("file", ["train-00000.tokens", "manifest-0001.json", "manifest.json"])
def test_a_killed_upload_of_new_text_leaves_the_store_before(small_store, tmp_path, tally, file):
    store, url = shutil.copytree(small_store, tmp_path / "store"), f"file://{tmp_path}/there"
    publish(store, url)
    before = fingerprint(url)
    build.append_text([owls(tmp_path / "more.txt", 9)], store)
    words = ["corpus", "publish", store, url]
    assert run(words, tmp_path, f"write-{file}:1").returncode == -signal.SIGKILL
    assert fingerprint(url) == before and list(verify_store(url)) == []
    assert run(words, tmp_path).returncode == 0
    assert TokenStore.open(url).generation == 2 and list(verify_store(url)) == []
    tally("kills of an upload of new text, the store as before and then whole")
