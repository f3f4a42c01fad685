"""Files that are whole or absent: written under a temporary name, synced, then renamed.

A `fault_point` marks where a test may have this process killed, as `kill -9` does:

BERTSMITH_KILL_AT=step-weights:9 bertsmith pretrain ...    at the ninth fault_point("step-weights")
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_armed: dict[str, Any] = {"place": "", "left": 0}


def kill_at(where: str) -> None:
    """Arm one place, "PLACE:N"; an empty string disarms."""
    place, _, number = where.partition(":")
    _armed.update(place=place, left=int(number or 0))


def fault_point(place: str) -> None:
    """End the process here if the armed place is passed for the N-th time."""
    if place == _armed["place"]:
        _armed["left"] -= 1
        if _armed["left"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


kill_at(os.environ.get("BERTSMITH_KILL_AT", ""))

TEMPORARY_PREFIX = ".partial-"  # anything with this prefix is left over from a killed writer
CACHE = "BERTSMITH_CACHE"  # environment
NEAR = 0.8  # similarity of a name with two of its five letters swapped
FOLDER_LOCK = "folder.lock"  # there while a process holds the folder, or after it was killed


def user_folder() -> Path:
    """The folder of what is kept for this user, each kind of thing in a folder of its own."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(home) / "bertsmith")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`; on success sync it and rename it to `path`.

    A link stays, and what it leads to is replaced. On an error the temporary file is removed and
    `path` is as it was; an OSError that names no file (a full disk is reported so) is given the
    name of this one. Errors: ValueError for a device or a pipe.
    """
    path = _place(path)
    with _temporary(path) as temporary:
        yield temporary
        fault_point(f"write-{path.name}")
        sync(temporary)
        os.replace(temporary, path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`; on success sync its files and rename it to `path`.

    An existing `path` is renamed aside, replaced and then removed. Links, errors: as `atomic_file`.
    """
    path = _place(path)
    replaced = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-replaced-{path.name}")
    with _temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        try:
            if path.exists():
                os.replace(path, replaced)
            os.replace(temporary, path)
        finally:
            if replaced.exists() and not path.exists():
                os.replace(replaced, path)
            _remove(replaced)


def check_new(folder: Path) -> None:
    """Errors: ValueError for a file, or a folder with something in it, which would be replaced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: not empty: name a folder that is not there yet")


def is_special(path: Path) -> bool:
    """True for a device or a pipe, which a rename would replace by a file."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _place(path: Path) -> Path:
    """The end of a link, or the path as it is, for messages. Errors: as `atomic_file`."""
    if is_special(path):
        raise ValueError(f"{path} is a device or a pipe, not a file: name a file")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a free name next to `path`; what is there at the end is removed, the folder synced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    _remove(temporary)
    try:
        with named_errors(path, temporary):
            yield temporary
    finally:
        _remove(temporary)
    sync(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def nearby(path: Path, holds: str = "") -> str:
    """The end of a message on a path that is no file: that it is a folder, a device or a pipe,
    else a neighbour of nearly its name, or nothing.

    `holds`: what such a neighbour has in it.
    """
    if not holds and os.path.isdir(path):
        return " (it is a folder: name a file in it)"
    if not holds and os.path.exists(path) and not os.path.isfile(path):
        return " (it is a device or a pipe: write it to a file first)"
    # not Path.exists, which raises for a folder that this user cannot enter
    there = [one.name for one in path.parent.glob("*") if os.path.exists(one / holds)]
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=NEAR)
    return f" (did you mean '{near[0]}'?)" if near else ""


@contextmanager
def locked_folder(folder: Path, lock: str = FOLDER_LOCK) -> Iterator[None]:
    """Keep other processes from writing a folder; errors as `locked_file`.

    The folder is made when it is absent, and removed when the block leaves nothing in it. `lock` is
    the file's name, for a folder that may be locked within the block as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / lock
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
    _remove(going)
    if folder.exists():
        os.replace(folder, going)
        fault_point("folder-removed")
        shutil.rmtree(going)


def remove_leftovers(folder: Path) -> None:
    """Remove from a folder the files of killed writers."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        _remove(path)


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
    """Read a JSON file. Errors: FileNotFoundError; ValueError with file and line if not JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error
    return parse_json(text, path)


def parse_json(text: str, source: Path) -> Any:
    """The value of a JSON text. Errors: ValueError with the file it is from, and the line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}:{error.lineno}: not valid JSON ({error.msg})") from error
    except RecursionError:
        raise ValueError(f"{source}: JSON nested too deeply") from None
    except ValueError as error:  # a number of 5,000 digits
        raise ValueError(f"{source}: not valid JSON ({error})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Errors: as `read_json`, and ValueError for others."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file as `read_json_object`; {} without a file."""
    return read_json_object(path) if path.exists() else {}


def write_sealed_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with the SHA-256 of itself, so that no byte of it can change unseen."""
    write_text(path, _sealed(content))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote. Errors: ValueError where a byte differs; OSError."""
    stored = path.read_bytes()
    content = json_object(stored) or {}
    content.pop("sha256", None)
    # written again it is the same, to the byte, or it is not what was written
    if _sealed(content).encode() != stored:
        raise ValueError(f"{path}: truncated or damaged")
    return content


def kept_for_user(
    kind: str, digest: str, make: Callable[[], Mapping[str, Any]]
) -> tuple[dict[str, Any], str]:
    """(What is kept in `user_folder`/`kind` under a digest, a note on where it is).

    What is not there, or damaged, is made, and kept if the disk allows it. Of two processes that
    make it at once, both take that of the first.
    """
    try:
        file = user_folder() / kind / f"{digest[:32]}.json"
    except RuntimeError as error:  # a user without a home
        return dict(make()), f"not kept: {error}"
    with suppress(OSError, ValueError):
        return read_sealed_json(file), f"as measured before: {file}"
    content = dict(make())
    with suppress(OSError, ValueError):
        return read_sealed_json(file), f"as measured beside this process: {file}"
    try:
        write_sealed_json(file, content)
    except OSError as error:
        return content, f"not kept: {error}"
    return content, f"kept in {file}"


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
        value = json_object(line)
        if value is None and number < len(lines):
            raise ValueError(f"{path}:{number}: damaged line, not a JSON object")
        objects += [] if value is None else [value]
    return objects


def json_object(stored: bytes | str) -> dict[str, Any] | None:
    """The JSON object of bytes or a text; None for what is no object, no JSON or not UTF-8."""
    try:
        value = json.loads(stored)
    except (RecursionError, ValueError):
        return None
    return value if isinstance(value, dict) else None
