"""Every block of a finished store read: compared with its checksum, or copied to a URL.

`verify_store` names every fault. `publish` sends the manifest last.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import remove_folder, user_folder
from bertsmith.base.terminal import Progress
from bertsmith.corpus.store.blocks import (
    DIGEST,
    MANIFEST,
    Content,
    checked_blocks,
    earlier_manifest,
    manifest_text,
    read_manifest,
    scan_blocks,
)
from bertsmith.corpus.store.storage import Folder, RemoteFolder
from bertsmith.corpus.store.store import TokenStore, load_manifest, present
from bertsmith.text.readers.files import is_url

ELSEWHERE = "remove it or choose another URL"


def verify_store(
    source: str | Path, progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[str]:
    """Yield the faults of a store at a path or URL, each in one line that names file and block.

    It reads the manifests of all generations, the tokenizer, the counts and every shard, whatever
    is in a cache. `progress` gets the bytes that were read.

    Errors: ValueError when the newest manifest is missing or damaged; OSError.
    """
    store = TokenStore.open(source)
    storage = store.storage
    for generation, fingerprint in enumerate(store.manifest["earlier"], 1):
        name = earlier_manifest(generation)
        try:
            if load_manifest(storage, name)[DIGEST] != fingerprint:
                yield f"{storage.name(name)}: of another store; {storage.hint}"
        except ValueError as error:
            yield str(error)
    for name, content in store.small_files().items():
        yield from file_faults(storage, name, content, progress)
    for shard in store.shards:
        try:
            contents = shard.contents()
        except ValueError as error:
            yield f"{error} (its shard cannot be verified)"
            continue
        for name, content in contents.items():
            yield from file_faults(storage, name, content, progress)


def file_faults(
    storage: Folder,
    name: str,
    content: Content,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[str]:
    try:
        with present(storage, name), storage.stream(name) as file:
            for block, fault in scan_blocks(file, content, storage.name(name), storage.hint):
                progress(len(block))
                if fault:
                    yield fault
    except ValueError as error:
        yield str(error)


@contextmanager
def built_for(out: str) -> Iterator[Path]:
    """The folder in which to build the store of a path or a URL.

    For a URL it is one of this user, sent there and removed when the block ends; after a kill
    or trouble of the storage the next build for this URL resumes it.

    Errors: ValueError, at once, where a finished store is at the URL; those of `publish`.
    """
    if not is_url(out):
        yield Path(out)
        return
    folder = user_folder() / "builds" / hashlib.sha256(out.encode()).hexdigest()[:16]
    is_there = RemoteFolder(out).size(MANIFEST) is not None
    if is_there and not folder.exists():
        raise ValueError(f"{out}: holds a finished token store: {ELSEWHERE}")
    yield folder
    publish(folder, out)
    remove_folder(folder)  # a part of it would be taken for a build to resume


def publish(folder: Path, url: str) -> dict[str, Any]:
    """Copy the store of a folder to a URL; the manifest, which is returned, makes it a store there.

    A file that is there already, whole, is not sent again: it is read there and compared, or, of an
    earlier generation whose manifest is there, known by its size. So an interrupted copy resumes,
    a store that has grown sends what is new, and a damaged copy is mended.

    Errors: ValueError for a damaged file of the folder, and where another store is at the URL;
    OSError for trouble of the storage.
    """
    store, target = TokenStore.open(folder), RemoteFolder(url)
    source, sent_before = store.storage, _sent_before(store, target)
    with Progress("publish", store.num_bytes, "MB", 1e6) as progress:
        for name, content in all_files(store):
            is_sent = target.size(name) == content.num_bytes and (
                name in sent_before or not any(file_faults(target, name, content))
            )
            if not is_sent:
                with source.stream(name) as file:
                    blocks = checked_blocks(file, content, source.name(name), source.hint)
                    target.write(name, blocks)
            progress.update(content.num_bytes)
    earlier = [earlier_manifest(generation) for generation in range(1, store.generation)]
    for name in (*earlier, MANIFEST):
        target.write(name, [source.read(name)])
    return store.manifest


def all_files(store: TokenStore) -> Iterator[tuple[str, Content]]:
    """Yield all files of a store but its manifests."""
    yield from store.small_files().items()
    for shard in store.shards:
        contents = shard.contents()
        sums = np.concatenate([content.checksums for content in contents.values()]).tobytes()
        yield shard.checksums_file, Content(len(sums), np.array([zlib.crc32(sums)]))
        yield from contents.items()


def _sent_before(store: TokenStore, target: RemoteFolder) -> set[str]:
    """The files of the earlier generation of this store at the URL; any other is refused."""
    if target.size(MANIFEST) is None:
        return set()
    content = target.read(MANIFEST)
    if manifest_text(store.manifest).encode().startswith(content):
        return set()  # this store's, or what a kill left of it where a file is not written at once
    there = read_manifest(content, target.name(MANIFEST), ELSEWHERE)
    if store.fingerprint in there["earlier"]:
        raise ValueError(
            f"{target}: holds generation {there['generation']} of this store, {store.folder} is "
            f"generation {store.generation}: publish the folder that grew, or choose another URL"
        )
    if there[DIGEST] not in store.manifest["earlier"]:
        raise ValueError(f"{target}: holds another finished token store: {ELSEWHERE}")
    return {name for name, _ in all_files(TokenStore.open(store.folder, there[DIGEST]))}
