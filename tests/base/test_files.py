"""Files and folders are whole or absent, whatever stops the writer."""

import errno
import fcntl
import os
import shutil
import signal

import pytest

from bertsmith.base.files import (
    FOLDER_LOCK,
    atomic_file,
    atomic_folder,
    locked_folder,
    nearby,
    read_json,
    read_json_object,
    read_sealed_json,
    remove_folder,
    remove_leftovers,
    write_json,
    write_sealed_json,
    write_text,
)

from ..tiny import contents, python, write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_and_keeps_its_line_ends(tmp_path):
    path = tmp_path / "new" / "vocab.txt"
    write_text(path, "á\r\nb\n")
    assert path.read_bytes() == "á\r\nb\n".encode()
    assert names(path.parent) == ["vocab.txt"]


def test_an_error_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "vocab.txt", "old")
    with pytest.raises(ValueError, match="stop"), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise ValueError("stop")
    assert path.read_text() == "old" and names(tmp_path) == ["vocab.txt"]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "run"
    for text in ("old", "new"):
        with atomic_folder(path) as temporary:
            write(temporary / "inner" / text, text)
    assert names(path / "inner") == ["new"] and names(tmp_path) == ["run"]
    with pytest.raises(ValueError, match="stop"), atomic_folder(path) as temporary:
        raise ValueError("stop")
    assert names(path / "inner") == ["new"] and names(tmp_path) == ["run"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_the_old_folder_comes_back_where_the_new_one_does_not_come(tmp_path, monkeypatch, error):
    path, replace, calls = tmp_path / "run", os.replace, []
    write(path / "old", "")

    def second_fails(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise error
        replace(*paths)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(type(error)), atomic_folder(path) as temporary:
        write(temporary / "new", "")
    assert contents(tmp_path) == {"run/old": b""}


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    write(tmp_path / "disk" / "old", "old")
    (tmp_path / "disk" / "run").mkdir()
    for name in ("old", "new", "run"):
        (tmp_path / name).symlink_to(os.path.join("disk", name))
    write_text(tmp_path / "old", "a")
    write_text(tmp_path / "new", "b")
    with atomic_folder(tmp_path / "run") as temporary:
        write(temporary / "c", "c")
    assert all((tmp_path / name).is_symlink() for name in ("old", "new", "run"))
    assert contents(tmp_path / "disk") == {"new": b"b", "old": b"a", "run/c": b"c"}
    assert names(tmp_path) == ["disk", "new", "old", "run"]


@pytest.mark.parametrize("writer", [atomic_file, atomic_folder])
def test_a_pipe_is_not_replaced(tmp_path, writer):
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a device or a pipe, not a file"), writer(path):
        pass
    assert path.is_fifo() and names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("writer", [atomic_file, atomic_folder])
def test_a_full_disk_is_reported_with_the_name(tmp_path, writer):
    path = tmp_path / "model"
    with pytest.raises(OSError) as caught, writer(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(path) and names(tmp_path) == []


def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path):
    killed = """
import os, signal, sys
from pathlib import Path
from bertsmith.base.files import atomic_file
with atomic_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = write(tmp_path / "weights", "old")
    assert python(killed, path).code == -signal.SIGKILL and path.read_text() == "old"
    assert all(name == "weights" or name.startswith(".partial-") for name in names(tmp_path))


@pytest.mark.parametrize(
    "value", [{"text": "é", "loss": 1.5}, {"path": os.fsdecode(b"caf\xe9.txt"), "text": "\\é"}]
)
def test_json_is_read_back_even_names_of_files_that_are_not_utf_8(tmp_path, value):
    path = tmp_path / "run.json"
    write_json(path, value)
    assert read_json(path) == read_json_object(path) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == value


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_json, '{"a": 1,\n"b"', "run.json:2: not valid JSON"),
        (read_json, b'{"\xff": 1}', "run.json: not UTF-8 text at byte 2"),
        (read_json, "[" * 200_000, "run.json: JSON nested too deeply"),
        (read_json, "1" * 5000, r"run.json: not valid JSON \(Exceeds the limit"),
        (read_sealed_json, '{"a":' * 200_000, "run.json: truncated or damaged"),
        (read_json_object, "[]", "run.json: not a JSON object"),
    ],
)
def test_damaged_json_is_named(tmp_path, read, content, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "run.json", content))


def test_a_byte_order_mark_before_json_is_taken_off(tmp_path):
    assert read_json(write(tmp_path / "run.json", b'\xef\xbb\xbf{"a": 1}')) == {"a": 1}


def test_no_byte_of_sealed_json_changes_unseen(tmp_path):
    path, content = tmp_path / "manifest.json", {"format": 1, "files": {"é": {"bytes": 3}}}
    write_sealed_json(path, content)
    assert read_sealed_json(path) == content
    stored = path.read_bytes()
    changed = [stored[:k] + bytes([byte ^ 1]) + stored[k + 1 :] for k, byte in enumerate(stored)]
    for damaged in (*changed, b"", stored[:-1], stored + b" ", b"[]\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="manifest.json: truncated or damaged"):
            read_sealed_json(path)


def test_what_killed_writers_left_is_removed(tmp_path):
    for name in (".partial-1-a", ".partial-2-b/sub/file", "c"):
        write(tmp_path / name, "half")
    (tmp_path / ".partial-3-d").symlink_to(tmp_path)  # the link, not what is behind it
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["c"]
    remove_leftovers(tmp_path / "absent")


def test_a_folder_is_removed_with_what_a_kill_left_of_one_of_its_name(tmp_path):
    for name in ("a", ".partial-a"):
        (tmp_path / name / "sub").mkdir(parents=True)
    remove_folder(tmp_path / "a")
    assert names(tmp_path) == []
    remove_folder(tmp_path / "absent")


def test_a_folder_that_a_kill_interrupts_is_never_there_in_part(tmp_path, monkeypatch):
    write(tmp_path / "a" / "first", "")

    def killed(folder, **options):
        if not options:
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("where", "passed", "code"),
    [
        ("place:2", "1 2", -signal.SIGKILL),
        ("other:1", "", -signal.SIGKILL),
        ("place:4", "1 2 3", 0),
        ("nowhere:1", "1 2 3", 0),
        ("", "1 2 3", 0),
    ],
)
def test_the_process_dies_where_the_environment_says(where, passed, code):
    program = """
from bertsmith.base.files import fault_point
for number in range(1, 4):
    fault_point("other")
    print(number, flush=True)
    fault_point("place")
"""
    ran = python(program, BERTSMITH_KILL_AT=where)
    assert (ran.code, ran.out.split()) == (code, passed.split())


def test_the_lock_of_a_holder_that_ends_is_no_lock(tmp_path, monkeypatch):
    """Its file is gone when this process has locked it: another one would lock a new file."""
    lock, tries = fcntl.flock, []

    def late(descriptor, how):
        lock(descriptor, how)
        if not tries:
            (tmp_path / "s" / FOLDER_LOCK).unlink()
        tries.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked_folder(tmp_path / "s"):
        with pytest.raises(ValueError, match="in use"), locked_folder(tmp_path / "s"):
            pass
        assert len(tries) == 2
    assert not (tmp_path / "s").exists()  # nothing was written into it


def test_a_killed_holder_is_in_nobodys_way(tmp_path):
    for name in (FOLDER_LOCK, "kept"):
        write(tmp_path / name, b"")
    with locked_folder(tmp_path):
        pass
    assert list(contents(tmp_path)) == ["kept"]


def test_an_absent_path_is_told_its_neighbour(tmp_path):
    for name in ("reviews", "store"):
        (tmp_path / name).mkdir()
    assert nearby(tmp_path / "review") == " (did you mean 'reviews'?)"
    assert nearby(tmp_path / "stroe") == " (did you mean 'store'?)"
    assert nearby(tmp_path / "my-store") == nearby(tmp_path / "score-2") == ""
    assert nearby(tmp_path / "review", "run.json") == nearby(tmp_path / "no" / "review") == ""
    assert nearby(tmp_path) == " (it is a folder: name a file in it)"
    os.mkfifo(tmp_path / "pipe")
    assert nearby(tmp_path / "pipe") == " (it is a device or a pipe: write it to a file first)"
    assert nearby(tmp_path / "review", "x" * 300) == ""  # it cannot look: the name is too long
