"""Outputs: found before the work where they cannot be written, whole or not there behind it."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from bertsmith.base.files import TEMPORARY_PREFIX
from bertsmith.cli.outputs import check_folder, check_new_folder, check_outputs

from ..tiny import bertsmith, refused

# Words before the output; what they name is not there, and would be missed as soon as it is read.
FOLDERS = [
    "vocab gone.txt --out",
    "vocab extend gone.txt --model gone --out",
    "extend-positions gone --positions 9 --out",
    "features gone.txt --model gone --out",
    "convert gone",
    "predict gone gone.tsv --submission --out",
    "pretrain --corpus gone --steps 9 --out",
    "finetune sst2 --model gone --data gone.csv --out",
    "features ner --model gone --data gone --out",
    "embed train --model gone --data gone.csv --text a --text-pair b --out",
]
FILES = [
    "predict gone gone.csv --out",
    "embed gone.txt --model gone --out",
    "report gone --out",
    "vocab report text.txt --vocab gone --plot",
    "corpus dedup text.txt --exact --out",
    "corpus report text.txt --html",
    "corpus contamination text.txt --tasks text.txt --out",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a cat\n")


@pytest.mark.parametrize("words", FOLDERS)
def test_a_folder_below_a_file(words):
    out, place = os.path.join("text.txt", "out"), Path("text.txt").resolve()
    line = refused(*words.split(), out)
    assert line.endswith(f"{out} cannot be written: {place} is no folder: name another folder")


def test_a_file_that_will_be_replaced_is_named(capsys):
    Path("old.csv").write_text("mine")
    check_outputs([], {"--out": Path("old.csv"), "--json": Path("new.json"), "--html": None})
    assert capsys.readouterr().err == "--out old.csv is there: the new file will replace it\n"
    assert Path("old.csv").read_text() == "mine"


@pytest.mark.parametrize("words", FILES)
def test_a_file_below_a_file_or_where_a_folder_is(words):
    words, out = words.split(), os.path.join("text.txt", "out.npy")
    line = refused(*words, out)
    assert f"{words[-1]} {out} cannot be written: " in line and "is no folder: name another" in line
    Path("folder.npy").mkdir()
    assert f"{words[-1]} folder.npy is a folder" in refused(*words, "folder.npy")


@pytest.mark.parametrize("flag", ["--html", "--json"])
def test_a_device_or_a_pipe_in_the_place_of_a_file(flag):
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    for out in (os.devnull, "pipe", "link"):
        line = refused("corpus", "report", "text.txt", flag, out)
        assert f"{flag} {out} is a device or a pipe, not a file: name another file" in line
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("command", ["vocab", "corpus", "pretrain", "finetune"])
def test_a_file_in_the_place_of_the_folder(command, made, refuse):
    out = Path("out")
    out.write_text("my thesis")
    refuse(*made.words(command, out), says=(out, "not there yet"))
    assert out.read_text() == "my thesis"


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


# what the disk has no room for, and what would then be mistaken for a result
FULL = {
    "vocab": ("tokenizer.json", "vocab.txt"),
    "corpus": ("train-00000.sentences", "manifest.json"),
    "pretrain": ("model.safetensors", "checkpoints/step-*"),
    "finetune": ("model.safetensors", "result.json"),
    "predict": ("answers.csv", "answers.csv"),
    "report": ("report.html", "report.html"),
    "convert": ("model.safetensors", "config.json"),
}


@pytest.mark.parametrize("command", FULL)
def test_a_full_disk(command, made, refuse, tmp_path, monkeypatch):
    """The file system refuses to sync one file, as one without space may do."""
    full, result = FULL[command]
    out, sync = tmp_path / "out", os.fsync

    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    words = made.words(command, out)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        refuse(*words, says=(full, "No space left", "free some space"), code=1)
    assert not list(out.glob(result)) and not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*"))
    bertsmith(*words, *(["--resume"] if command == "pretrain" else []))
    assert list(out.glob(result))
