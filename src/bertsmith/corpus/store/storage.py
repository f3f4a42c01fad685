"""The place of a token store's files: a local folder or NFS, or, by URL, an object storage.

A local store is read where it lies. Of a store at a URL (s3://, gs://, memory://, file://, whatever
fsspec knows) each file is fetched when it is first wanted, verified on the way and kept in a cache;
file:// so makes a local copy of a store on a slow network disk. The cache is a folder of bounded
size, which the least recently used files leave first, shared by all processes of a machine: a file
is fetched once, and its size counts before it is fetched.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from bertsmith.base.files import atomic_file, user_folder
from bertsmith.corpus.store.blocks import BLOCK, REBUILD, Content, checked_blocks
from bertsmith.text.readers.files import file_system, storage_errors, without_password

LIMIT = "BERTSMITH_CACHE_GB"  # environment
DEFAULT_GB = 50.0
LOCK_SUFFIX = ".lock"
SEND_AGAIN = "send it again with `bertsmith corpus publish`"
FETCH_AGAIN = "remove this file of the cache: it is fetched again"
ATTEMPTS = 2  # a file that arrives damaged is fetched once more


class LocalFolder:
    """A store on a disk of this machine, or one that is mounted; errors name the file."""

    hint = hint_of_opened = REBUILD
    capacity: int | None = None
    """Bytes that may be held at once; None: all."""

    def __init__(self, path: Path) -> None:
        self.source = path

    def __str__(self) -> str:
        return str(self.source)

    def name(self, file: str) -> str:
        return str(self.source / file)

    def read(self, file: str) -> bytes:
        """Read a small file."""
        return (self.source / file).read_bytes()

    def stream(self, file: str) -> BinaryIO:
        """Open a file to read it from its beginning to its end."""
        return (self.source / file).open("rb")

    def open(self, file: str, content: Content) -> BinaryIO:
        """Open a file to map it into memory."""
        return self.stream(file)


class RemoteFolder:
    """A store behind a URL.

    Errors: ValueError for an unknown kind of URL, or one whose package is missing; an OSError that
    names the URL for every trouble of the storage.
    """

    hint, hint_of_opened = SEND_AGAIN, FETCH_AGAIN

    def __init__(self, url: str) -> None:
        url = url.rstrip("/")
        self.source = without_password(url)  # it is in messages and records
        self._cache = FileCache.from_environment()
        self.capacity: int | None = self._cache.limit
        self._system, self._root = file_system(url)
        self._key = hashlib.sha256(url.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.source

    def name(self, file: str) -> str:
        return f"{self.source}/{file}"

    def read(self, file: str) -> bytes:
        with storage_errors(self.name(file)):
            return self._system.cat_file(f"{self._root}/{file}")

    def stream(self, file: str) -> BinaryIO:
        with storage_errors(self.name(file)):
            return self._system.open(f"{self._root}/{file}", "rb", block_size=16 * BLOCK)

    def size(self, file: str) -> int | None:
        """Bytes of a file; None when it is not there."""
        with storage_errors(self.name(file)), suppress(FileNotFoundError):
            return self._system.info(f"{self._root}/{file}")["size"]

    def write(self, file: str, blocks: Iterable[bytes]) -> None:
        """Write a file, atomically where the URL is a disk (file://) or an object storage."""
        from fsspec.implementations.local import LocalFileSystem

        path = f"{self._root}/{file}"
        with storage_errors(self.name(file)), ExitStack() as stack:
            if isinstance(self._system, LocalFileSystem):
                opened = stack.enter_context(atomic_file(Path(path))).open("wb")
            else:
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
                opened = self._system.open(path, "wb", block_size=16 * BLOCK)
            target = stack.enter_context(opened)
            for block in blocks:
                target.write(block)

    def open(self, file: str, content: Content) -> BinaryIO:
        """The file in the cache; a file of other content under the same name is another one."""
        digest = zlib.crc32(content.checksums.tobytes())
        key = f"{self._key}/{file.replace('/', '-')}-{content.num_bytes}-{digest:08x}"
        fetch = partial(self._fetch, file, content)
        return self._cache.open(key, content.num_bytes, fetch)

    def _fetch(self, file: str, content: Content, path: Path) -> None:
        for attempt in range(ATTEMPTS):
            try:
                # not "wb": the space that the cache has reserved would count as free
                with self.stream(file) as source, path.open("r+b") as target:
                    target.writelines(checked_blocks(source, content, self.name(file), self.hint))
                    target.truncate()  # an attempt before may have had too much
                return
            except ValueError:
                if attempt == ATTEMPTS - 1:
                    raise


Folder = LocalFolder | RemoteFolder


@dataclass(frozen=True)
class FileCache:
    """Files by key, at most `limit` bytes of them together.

    A file that leaves while it is open stays readable to who opened it.
    """

    folder: Path
    limit: int

    @classmethod
    def from_environment(cls) -> FileCache:
        """The cache of this user."""
        text = os.environ.get(LIMIT, str(DEFAULT_GB))
        limit = 0.0
        with suppress(ValueError):
            limit = float(text)
        if not 0 < limit < 1e9:
            raise ValueError(f"{LIMIT} = {text}: expected a number of gigabytes above 0")
        return cls(user_folder() / "stores", int(limit * 1e9))

    def open(self, key: str, num_bytes: int, fetch: Callable[[Path], None]) -> BinaryIO:
        """Open the file of this key; where it is not there, `fetch` writes it first."""
        from filelock import FileLock

        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}{LOCK_SUFFIX}"):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                with atomic_file(path) as temporary:
                    with FileLock(self.folder / f"cache{LOCK_SUFFIX}"):
                        self._free(num_bytes)
                        with temporary.open("wb") as reserved:
                            reserved.truncate(num_bytes)  # sparse, and counted at its full size
                    fetch(temporary)
                return path.open("rb")
            with suppress(FileNotFoundError):  # it has just left, and stays readable here
                os.utime(path)
            return file

    def _free(self, num_bytes: int) -> None:
        if num_bytes > self.limit:
            raise ValueError(
                f"{self.folder}: a cache of {self.limit / 1e9:g} GB has no room for a file of "
                f"{num_bytes / 1e9:.3g} GB: raise {LIMIT}"
            )
        files = []
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # it has just left, or got its name
                stat = path.stat()
                if path.is_file() and path.suffix != LOCK_SUFFIX:
                    files.append((stat.st_mtime_ns, stat.st_size, path))
        total = num_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size
