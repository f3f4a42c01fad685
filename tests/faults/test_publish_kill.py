"""`kill -9` while a store is sent to a URL: no half of it is read, and the same command goes on."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from bertsmith.corpus.build.build import append_text
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish, verify_store

# Each file is written on this machine first, then sent to file://, which writes it once more.
FILES = ["vocab.txt", "unigram_counts.bin", "train-00000.checksums", "train-00000.tokens"]
FILES += ["held_out-00000.documents", "manifest.json"]


def run(words, where, kill_at=""):
    environment = os.environ | {"BERTSMITH_CACHE": str(where), "BERTSMITH_KILL_AT": kill_at}
    command = [sys.executable, "-m", "bertsmith", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.faults
@pytest.mark.parametrize("file", FILES)
def test_a_killed_upload_of_a_build_goes_on(small_store, tmp_path, tally, file):
    text, url = tmp_path / "text.txt", f"file://{tmp_path}/there"
    text.write_text("\n\n".join(f"The old owl {n} sleeps near tree {n}." for n in range(90)))
    words = ["corpus", text, "--vocab", small_store, "--held-out", "0.2", "--workers", "1"]
    killed = run([*words, "--out", url], tmp_path / "cache", f"write-{file}:2")
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(url)
    again = run([*words, "--out", url], tmp_path / "cache")
    assert again.returncode == 0 and "finished before" in again.stderr, again.stderr
    assert list(verify_store(url)) == []
    assert list((tmp_path / "cache" / "builds").iterdir()) == []
    assert run([*words, "--out", tmp_path / "local"], tmp_path / "cache").returncode == 0
    assert TokenStore.open(url).fingerprint == TokenStore.open(tmp_path / "local").fingerprint
    tally("kills of an upload, no store there before it was whole")


@pytest.mark.faults
@pytest.mark.parametrize("file", ["train-00000.tokens", "manifest-0001.json", "manifest.json"])
def test_a_killed_upload_of_new_text_leaves_the_store_before(small_store, tmp_path, tally, file):
    store, url = shutil.copytree(small_store, tmp_path / "store"), f"file://{tmp_path}/there"
    publish(store, url)
    before = TokenStore.open(url).fingerprint
    text = tmp_path / "more.txt"
    text.write_text("\n\n".join(f"The old owl {n} sleeps near tree {n}." for n in range(9)))
    append_text([text], store)
    words = ["corpus", "publish", store, url]
    assert run(words, tmp_path, f"write-{file}:1").returncode == -signal.SIGKILL
    assert TokenStore.open(url).fingerprint == before and list(verify_store(url)) == []
    assert run(words, tmp_path).returncode == 0
    assert TokenStore.open(url).generation == 2 and list(verify_store(url)) == []
    tally("kills of an upload of new text, the store as before and then whole")
