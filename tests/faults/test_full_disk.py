"""A disk that is really full: a run in a file system of a few megabytes."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from bertsmith.checkpoints.run import RunFolder

from ..training.test_pretrain import assert_same_run

FLAGS = (
    "--size=2x64", "--length=32", "--batch=4", "--steps=24", "--threads=1", "--precision=float32",
    "--checkpoint-every=4", "--keep-last=2", "--keep-at", "4", "8", "--held-out-rows=8",
    "--writers",
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
            good, _ = RunFolder(out).newest_whole()
            assert f"{good.name} is whole: free some space, then go on with --resume" in said
            remount = ["mount", "-o", f"remount,size={8 * kilobytes}k", str(disk)]
            subprocess.run(remount, check=True)
            assert pretrain(small_store, out).returncode == 0
            assert_same_run(whole, out)
            tally("disk full in a checkpoint: the one before whole, resumed to the same bits")
