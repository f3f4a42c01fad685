"""A finished store copied to a URL: every block verified on its way, the manifest last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.corpus.blocks import checked_blocks
from bertsmith.corpus.cache import user_folder
from bertsmith.corpus.manifest import (
    DIGEST,
    MANIFEST,
    earlier_manifest,
    manifest_text,
    read_manifest,
)
from bertsmith.corpus.storage import LocalFolder, RemoteFolder
from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.verify import file_faults, files_of, store_bytes
from bertsmith.files import remove_folder
from bertsmith.progress import Progress
from bertsmith.text.remote import is_url

ELSEWHERE = "remove it or choose another URL"


@contextmanager
def built_for(out: str) -> Iterator[Path]:
    """The folder in which to build the store of a path or a URL.

    For a URL it is one of this user, sent there and removed when the block ends; after a kill
    or trouble of the storage it is what the next build for this URL goes on with.

    Errors: before anything is built, ValueError where a finished store is at the URL, and OSError
    for trouble of the storage; those of `publish`.
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
    remove_folder(folder)  # a part of it would be taken for a build to go on with


def publish(folder: Path, url: str) -> dict[str, Any]:
    """Copy the store of a folder to a URL; the manifest, which is returned, makes it a store there.

    A file that is there already, whole, is not sent again: it is read there and compared, or, of an
    earlier generation whose manifest is there, known by its size. So a copy that was interrupted
    goes on, one of a store that has grown takes what is new, and one that was damaged is mended.

    Errors: ValueError for a damaged file of the folder, and where another store is at the URL;
    OSError for trouble of the storage.
    """
    store = TokenStore.open(folder)
    source, target = LocalFolder(folder), RemoteFolder(url)
    sent_before = _sent_before(store, target)
    with Progress("publish", store_bytes(store), "MB", 1e6) as progress:
        for name, content in files_of(store):
            is_whole = target.size(name) == content.num_bytes and (
                name in sent_before
                or not any(file_faults(target, name, content, lambda num_bytes: None))
            )
            if not is_whole:
                with source.stream(name) as file:
                    blocks = checked_blocks(file, content, source.name(name), source.remedy)
                    target.write(name, blocks)
            progress.update(content.num_bytes)
    earlier = [earlier_manifest(generation) for generation in range(1, store.generation)]
    for name in (*earlier, MANIFEST):
        target.write(name, [source.read(name)])
    return store.manifest


def _sent_before(store: TokenStore, target: RemoteFolder) -> set[str]:
    """The files of the earlier generation of this store that is at the URL.

    Errors: ValueError for anything else, which is not written over.
    """
    if target.size(MANIFEST) is None:
        return set()
    content = target.read(MANIFEST)
    if manifest_text(store.manifest).encode().startswith(content):
        return set()  # this store's, or what a kill left of it where a file is not written at once
    there = read_manifest(content, target.name(MANIFEST), ELSEWHERE)
    if there[DIGEST] not in store.manifest["earlier"]:
        raise ValueError(f"{target}: holds another finished token store: {ELSEWHERE}")
    return {name for name, _ in files_of(TokenStore.open(store.folder, there[DIGEST]))}
