"""A folder of fetched files, bounded in size: the least recently used leave first.

Any number of processes and threads of a machine may share it: a file is fetched once, and room for
it is taken before it is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from bertsmith.files import atomic_file

FOLDER, LIMIT = "BERTSMITH_CACHE", "BERTSMITH_CACHE_GB"  # environment
DEFAULT_GB = 50.0
LOCK_SUFFIX = ".lock"


def user_folder() -> Path:
    """Where fetched files and unfinished builds of this user are kept, in folders of their own."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(home) / "bertsmith")


class FileCache:
    """Files by key, at most `limit` bytes of them together.

    A file that leaves while it is open stays readable to who opened it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    @classmethod
    def from_environment(cls) -> FileCache:
        """The cache of this user. Errors: ValueError for a size that is no number above 0."""
        text = os.environ.get(LIMIT, str(DEFAULT_GB))
        try:
            limit = float(text)
        except ValueError:
            limit = 0.0
        if not 0 < limit < 1e9:
            raise ValueError(f"{LIMIT} = {text}: expected a number of gigabytes above 0")
        return cls(user_folder() / "stores", int(limit * 1e9))

    def open(self, key: str, num_bytes: int, fetch: Callable[[Path], None]) -> BinaryIO:
        """The file of this key, opened; where it is not there, `fetch` writes it first.

        Errors: ValueError when it is larger than the whole cache; those of `fetch`.
        """
        from filelock import FileLock

        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}{LOCK_SUFFIX}"):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                with atomic_file(path) as temporary:
                    with FileLock(self.folder / f"cache{LOCK_SUFFIX}"):
                        self._make_room(num_bytes)
                        with temporary.open("wb") as reserved:
                            reserved.truncate(num_bytes)  # sparse, and counted at its full size
                    fetch(temporary)
                return path.open("rb")
            with suppress(FileNotFoundError):  # it has just left, and stays readable here
                os.utime(path)
            return file

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self.limit:
            raise ValueError(
                f"{self.folder}: a cache of {self.limit / 1e9:g} GB has no room for a file of "
                f"{num_bytes / 1e9:.3g} GB: raise {LIMIT}"
            )
        files = []
        for path in self.folder.rglob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # it has just left, or got its name
                continue
            if path.is_file() and path.suffix != LOCK_SUFFIX:
                files.append((stat.st_mtime_ns, stat.st_size, path))
        total = num_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size
