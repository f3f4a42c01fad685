"""Files that are whole or absent: written under a temporary name, synced, then renamed.

A `fault_point` is a place at which a test has this process killed, as `kill -9` does; nothing else
uses them:

BERTSMITH_KILL_AT=step-weights:9 bertsmith pretrain ...    at the ninth fault_point("step-weights")
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class _Armed:
    place = ""
    left = 0


def kill_at(where: str) -> None:
    """Arm one place, "PLACE:N"; an empty string disarms."""
    place, _, number = where.partition(":")
    _Armed.place, _Armed.left = place, int(number or 0)


def fault_point(place: str) -> None:
    """End the process here if this is the armed place's N-th passing."""
    if place == _Armed.place:
        _Armed.left -= 1
        if _Armed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


kill_at(os.environ.get("BERTSMITH_KILL_AT", ""))


TEMPORARY_PREFIX = ".partial-"  # anything with this prefix is left over from a killed writer
FOLDER_LOCK = "folder.lock"  # there while a process holds the folder, or after it was killed


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success sync it and rename it to `path`.

    On an error the temporary file is removed and `path` is as it was; an OSError that names no file
    (a full disk is reported so) is given the name of this one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        with named_errors(path, temporary):
            yield temporary
            fault_point(f"write-{path.name}")
            sync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success sync its files and rename it to `path`.

    An existing `path` is renamed aside, replaced and then removed. On an error the temporary folder
    is removed, `path` is as it was, and an OSError that names no file is given the folder's name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    replaced = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-replaced-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with named_errors(path, temporary):
            yield temporary
            for file in temporary.rglob("*"):
                sync(file)
            sync(temporary)
            if path.exists():
                os.replace(path, replaced)
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    sync(path.parent)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a folder; errors as `locked_file`.

    The folder is made when it is absent, and removed when the block leaves nothing in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FOLDER_LOCK
    in_use = f"{folder}: in use, another process writes here: wait until it has ended"
    with locked_file(path, "folder", in_use):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                folder.rmdir()


@contextmanager
def locked_file(path: Path, kind: str, in_use: str) -> Iterator[None]:
    """Lock a file for this process alone; the system unlocks it when the process ends.

    On a file system without locks a line on stderr says so, and every process may enter.

    Errors: ValueError with the text `in_use` where another process has it; OSError from the disk.
    """
    from filelock import FileLock, Timeout  # here: it loads asyncio

    # A holder that ends may remove the file: the time is for locking the next one.
    lock = FileLock(path, timeout=0.1, poll_interval=0.01, fallback_to_soft=False)
    try:
        lock.acquire()
    except (Timeout, FileNotFoundError) as error:  # the folder can go with the file
        raise ValueError(in_use) from error
    except OSError as error:
        if error.filename is not None:  # it could not be opened
            raise
        print(
            f"{path}: no locks on this file system ({error.strerror}): see that no second "
            f"process is started on this {kind}",
            file=sys.stderr,
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def named_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Give an OSError of the block that names no file, or a temporary one, the name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # an OSError made with a message has no number
            name = os.fsdecode(error.filename or path)
            error.filename = name.replace(str(temporary), str(path)) if temporary else name
        raise


def sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never outruns the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there. Its name goes first: it is never there in part."""
    going = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    shutil.rmtree(going, ignore_errors=True)
    if folder.exists():
        os.replace(folder, going)
        fault_point("folder-removed")
        shutil.rmtree(going)


def remove_leftovers(folder: Path) -> None:
    """Remove from a folder what killed writers left there."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, without newline translation."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN is refused, since other readers would."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # A file name that is not UTF-8 has lone surrogates: JSON can hold them as \udcff alone.
    write_text(path, text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is named.

    Errors: FileNotFoundError; ValueError with file and line when it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Errors: as `read_json`, and ValueError for others."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def write_sealed_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with the SHA-256 of itself, so that no byte of it can change unseen."""
    write_text(path, _sealed(content))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote. Errors: ValueError where a byte differs; OSError."""
    stored = path.read_bytes()
    try:
        content = json.loads(stored)
    except ValueError:  # neither JSON nor UTF-8
        content = None
    if isinstance(content, dict):
        content.pop("sha256", None)
    # written again it is the same, to the byte, or it is not what was written
    if not isinstance(content, dict) or _sealed(content).encode() != stored:
        raise ValueError(f"{path}: truncated or damaged")
    return content


def _sealed(content: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=2) + "\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line; a half-written last line is left out.

    Errors: FileNotFoundError; ValueError with file and line when an earlier line is damaged.
    """
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    objects = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError
        except ValueError as error:  # also what is not UTF-8
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: damaged line, not a JSON object") from error
        objects.append(value)
    return objects
