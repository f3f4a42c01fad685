"""Where the files of a token store lie: a local folder or NFS, or, by URL, an object storage.

A local store is read where it lies. Of a store at a URL (s3://, gs://, memory://, file://, whatever
fsspec knows) each file is fetched when it is first wanted, verified on the way and kept in a cache
of bounded size (cache.py); file:// so makes a local copy of a store on a slow network disk.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from bertsmith.corpus.blocks import BLOCK, Content, checked_blocks
from bertsmith.corpus.cache import FileCache
from bertsmith.corpus.manifest import REBUILD
from bertsmith.files import atomic_file
from bertsmith.text.remote import file_system, is_url, storage_errors

SEND_AGAIN = "send it again with `bertsmith corpus-publish`"
FETCH_AGAIN = "remove this file of the cache: it is fetched again"
ATTEMPTS = 2  # a file that arrives damaged is fetched once more


class LocalFolder:
    """A store on a disk of this machine, or one that is mounted."""

    remedy = remedy_of_opened = REBUILD
    room: int | None = None
    """Bytes that may be held at once; None: all."""

    def __init__(self, path: Path) -> None:
        self.source = path

    def __str__(self) -> str:
        return str(self.source)

    def name(self, file: str) -> str:
        """What a file is called in a message."""
        return str(self.source / file)

    def read(self, file: str) -> bytes:
        """A small file, whole. Errors: FileNotFoundError, PermissionError, which name it."""
        return (self.source / file).read_bytes()

    def stream(self, file: str) -> BinaryIO:
        """A file to read from its beginning to its end. Errors as `read`."""
        return (self.source / file).open("rb")

    def open(self, file: str, content: Content) -> BinaryIO:
        """A file to map into memory. Errors as `read`."""
        return self.stream(file)


class RemoteFolder:
    """A store behind a URL.

    Errors: ValueError for a kind of URL that is not known or whose package is missing; every other
    trouble of the storage is an OSError in one line that names the URL.
    """

    remedy, remedy_of_opened = SEND_AGAIN, FETCH_AGAIN

    def __init__(self, url: str, cache: FileCache | None = None) -> None:
        self.source = url.rstrip("/")
        self._cache = cache or FileCache.from_environment()
        self.room: int | None = self._cache.limit
        self._system, self._root = file_system(self.source)
        self._key = hashlib.sha256(self.source.encode()).hexdigest()[:16]

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
        with storage_errors(self.name(file)):
            try:
                return self._system.info(f"{self._root}/{file}")["size"]
            except FileNotFoundError:
                return None

    def write(self, file: str, blocks: Iterable[bytes]) -> None:
        """A file made of blocks. An object storage and a disk (file://) have it when all have
        arrived; another storage may be left with a part of it."""
        from fsspec.implementations.local import LocalFileSystem

        path = f"{self._root}/{file}"
        with ExitStack() as stack:
            stack.enter_context(storage_errors(self.name(file)))
            if isinstance(self._system, LocalFileSystem):
                target = stack.enter_context(
                    stack.enter_context(atomic_file(Path(path))).open("wb")
                )
            else:
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
                target = stack.enter_context(self._system.open(path, "wb", block_size=16 * BLOCK))
            for block in blocks:
                target.write(block)

    def open(self, file: str, content: Content) -> BinaryIO:
        """The file in the cache; a file of other content under the same name is another one."""
        digest = zlib.crc32(content.checksums.tobytes())
        key = f"{self._key}/{file.replace('/', '-')}-{content.num_bytes}-{digest:08x}"
        return self._cache.open(
            key, content.num_bytes, lambda path: self._fetch(file, content, path)
        )

    def _fetch(self, file: str, content: Content, path: Path) -> None:
        for attempt in range(ATTEMPTS):
            try:
                with self.stream(file) as source, path.open("wb") as target:
                    for block in checked_blocks(source, content, self.name(file), self.remedy):
                        target.write(block)
                return
            except ValueError:
                if attempt == ATTEMPTS - 1:
                    raise


Folder = LocalFolder | RemoteFolder


def open_folder(source: str | Path) -> Folder:
    """The folder of a path or a URL."""
    if is_url(source):
        return RemoteFolder(str(source))
    return LocalFolder(Path(source))
