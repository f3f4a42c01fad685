"""A disk that is really full: a run in a file system of a few megabytes."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.corpus.build import build
from bertsmith.text.tokenizer.tokenizer import Tokenizer

from ..tiny import contents, write
from ..training.runs import assert_same_run

FLAGS = (
    "--size=2x64", "--max-length=32", "--batch-size=4", "--steps=24", "--threads=1",
    "--precision=float32", "--checkpoint-every=4", "--keep-checkpoints=2", "--keep-steps", "4", "8",
    "--eval-rows=8", "--loggers",
)  # fmt: skip


@contextmanager
def file_system(folder, kilobytes):
    """A file system in memory; only root may make one."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode:
        pytest.skip(f"may not mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def enlarge(disk, kilobytes):
    words = ["mount", "-o", f"remount,size={kilobytes}k", str(disk)]
    subprocess.run(words, check=True)


def pretrain(store, out):
    command = [sys.executable, "-m", "bertsmith", "pretrain", f"--corpus={store}", f"--out={out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [*command, *FLAGS, "--resume"]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


@pytest.mark.faults
def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on(small_store, tmp_path, tally):
    whole = tmp_path / "whole"
    assert pretrain(small_store, whole).returncode == 0
    checkpoint = RunFolder(whole).latest()
    kilobytes = sum(file.stat().st_size for file in checkpoint.iterdir()) // 1024
    for share in (2.3, 2.7, 3.4):  # of a checkpoint: it ends in one file or another
        with file_system(tmp_path / f"disk{share}", int(share * kilobytes)) as disk:
            out = disk / "run"
            full = pretrain(small_store, out)
            assert full.returncode == 1, full.stderr
            said = full.stderr.splitlines()[-1]
            assert "No space left on device: the checkpoint of step" in said
            good, _ = RunFolder(out).latest_valid()
            assert f"{good.name} is whole: free some space, then resume the run" in said
            enlarge(disk, 8 * kilobytes)
            assert pretrain(small_store, out).returncode == 0
            assert_same_run(whole, out)
            tally("disk full in a checkpoint: the one before whole, resumed to the same bits")


@pytest.mark.faults
def test_a_full_disk_keeps_the_finished_shards_of_a_build(
    small_store, tmp_path, tally, monkeypatch
):
    def make(out):
        build.build_store([text], tokenizer, out, settings)

    monkeypatch.setattr(build, "BATCH", 1000)
    texts = (f"The old owl {n} sleeps near tree {n}." * 9 for n in range(600))
    text = write(tmp_path / "text.txt", "\n\n".join(texts))
    tokenizer = Tokenizer.from_pretrained(small_store)
    settings = build.BuildSettings(held_out=0.2, shard_tokens=9000)
    make(tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    kilobytes = sum(-(-len(content) // 4096) * 4 for content in whole.values())
    for share in (0.4, 0.6, 0.8):
        with file_system(tmp_path / f"disk{share}", int(share * kilobytes)) as disk:
            out = disk / "store"
            with pytest.raises(OSError, match="No space left") as error:
                make(out)
            assert str(error.value.filename).startswith(str(out))
            kept = contents(out)
            assert "train-00000.tokens" in kept and "manifest.json" not in kept
            assert all(kept[name] == whole[name] for name in kept if name != build.BUILD)
            enlarge(disk, 4 * kilobytes)
            make(out)
            assert contents(out) == whole
            tally("disk full in a build: finished shards kept, the same bytes in the end")
