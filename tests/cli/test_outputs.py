"""An output that cannot be written is found before the work, whatever the command."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from bertsmith.cli.main import command_name, main
from bertsmith.cli.outputs import check_folder, check_new_folder, check_outputs

# Words before the output; what they name is not there, and would be missed as soon as it is read.
FOLDERS = {
    "vocab": ["vocab", "gone.txt", "--out"],
    "vocab extend": ["vocab", "extend", "gone.txt", "--model", "gone", "--out"],
    "extend-positions": ["extend-positions", "gone", "--positions", "9", "--out"],
    "features": ["features", "gone.txt", "--model", "gone", "--out"],
    "convert": ["convert", "gone"],
    "predict": ["predict", "gone", "gone.tsv", "--submission", "--out"],
    "pretrain": ["pretrain", "--corpus", "gone", "--steps", "9", "--out"],
    "finetune": ["finetune", "sst2", "--model", "gone", "--data", "gone.csv", "--out"],
    "features ner": ["features", "ner", "--model", "gone", "--data", "gone", "--out"],
    "embed train": ["embed", "train", "--model", "gone", "--data", "gone.csv", "--text", "a"]
    + ["--text-pair", "b", "--out"],
}
FILES = {
    "predict": ["predict", "gone", "gone.csv", "--out"],
    "embed": ["embed", "gone.txt", "--model", "gone", "--out"],
    "report": ["report", "gone", "--out"],
    "vocab report": ["vocab", "report", "text.txt", "--vocab", "gone", "--plot"],
    "corpus dedup": ["corpus", "dedup", "text.txt", "--exact", "--out"],
    "corpus report": ["corpus", "report", "text.txt", "--html"],
    "corpus contamination": ["corpus", "contamination", "text.txt", "--tasks", "text.txt", "--out"],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a cat\n")


def refused(capsys, *words):
    assert main(list(words)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"bertsmith {command_name([*map(str, words)])}: ")
    return line


@pytest.mark.parametrize("words", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_below_a_file(capsys, words):
    out = os.path.join("text.txt", "out")
    place = Path("text.txt").resolve()
    line = refused(capsys, *words, out)
    assert line.endswith(f"{out} cannot be written: {place} is no folder: name another folder")


@pytest.mark.parametrize("words", FILES.values(), ids=FILES)
def test_a_file_below_a_file_or_where_a_folder_is(capsys, words):
    out = os.path.join("text.txt", "out.npy")
    line = refused(capsys, *words, out)
    assert f"{words[-1]} {out} cannot be written: " in line and "is no folder: name another" in line
    Path("folder.npy").mkdir()
    assert f"{words[-1]} folder.npy is a folder" in refused(capsys, *words, "folder.npy")


def test_a_disk_that_takes_nothing(monkeypatch):
    """Its permissions may allow all, as those of a file system that is mounted to be read."""

    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    for check in (check_folder, check_new_folder, lambda out: check_outputs([], {"--out": out})):
        with pytest.raises(ValueError, match="--out new/out cannot be .*: Read-only file system"):
            check(Path("new/out"))


def test_looking_leaves_nothing_behind():
    check_outputs([], {"--out": Path("new/out.csv"), "--json": Path("out.json"), "--html": None})
    check_folder(Path("new/out"))
    check_folder(Path())
    assert [path.name for path in Path().iterdir()] == ["text.txt"]


def test_an_output_is_no_input_and_no_other_output():
    with pytest.raises(ValueError, match="--out text.txt is an input itself: name another file"):
        check_outputs([Path("text.txt")], {"--out": Path("./text.txt")})
    with pytest.raises(ValueError, match="--json a is written under another flag"):
        check_outputs([], {"--out": Path("a"), "--json": Path("a")})
