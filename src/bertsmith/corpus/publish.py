"""A finished store copied to a URL: every block verified on its way, the manifest last."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.corpus.blocks import checked_blocks
from bertsmith.corpus.cache import user_folder
from bertsmith.corpus.manifest import MANIFEST, earlier_manifest
from bertsmith.corpus.storage import LocalFolder, RemoteFolder
from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.verify import files_of
from bertsmith.text.remote import is_url


@contextmanager
def built_for(out: str) -> Iterator[Path]:
    """The folder in which to build the store of a path or a URL.

    For a URL it is one of this user, sent there and removed when the block ends; after a kill
    or trouble of the storage it is what the next build for this URL goes on with.
    """
    if not is_url(out):
        yield Path(out)
        return
    folder = user_folder() / "builds" / hashlib.sha256(out.encode()).hexdigest()[:16]
    yield folder
    publish(folder, out)
    shutil.rmtree(folder)


def publish(
    folder: Path, url: str, progress: Callable[[int], None] = lambda num_bytes: None
) -> dict[str, Any]:
    """Copy the store of a folder to a URL; the manifest, which is returned, makes it a store there.

    What is there already under the same name and with the same size is not sent again, so that a
    copy that was interrupted, or one of a store that has grown, goes on.

    Errors: ValueError for a damaged file of the folder, and where another store is at the URL;
    OSError for trouble of the storage.
    """
    store = TokenStore.open(folder)
    source, target = LocalFolder(folder), RemoteFolder(url)
    _check_target(store, target)
    for name, content in files_of(store):
        if target.size(name) != content.num_bytes:
            with source.stream(name) as file:
                blocks = checked_blocks(file, content, source.name(name), source.remedy)
                target.write(name, blocks)
        progress(content.num_bytes)
    earlier = [earlier_manifest(generation) for generation in range(1, store.generation)]
    for name in (*earlier, MANIFEST):
        target.write(name, [source.read(name)])
    return store.manifest


def _check_target(store: TokenStore, target: RemoteFolder) -> None:
    """Nothing is written over a store that is not an earlier generation of this one."""
    if target.size(MANIFEST) is None:
        return
    there = TokenStore.open(str(target))
    if there.fingerprint not in (store.fingerprint, *store.manifest["earlier"]):
        raise ValueError(
            f"{target}: holds another finished token store: remove it or choose another URL"
        )
