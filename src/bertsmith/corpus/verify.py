"""Every block of a store read and compared with its checksum; every fault named."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bertsmith.corpus.blocks import Content, blocks_of, check_block, check_size
from bertsmith.corpus.manifest import earlier_manifest, read_manifest
from bertsmith.corpus.storage import Folder
from bertsmith.corpus.store import Shard, TokenStore


def verify_store(
    source: str | Path, progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[str]:
    """The faults of a store at a path or URL, each in one line that names file and block.

    Read are the manifests of all generations, the tokenizer, the counts and every shard, whatever
    is in a cache. `progress` is told the bytes that were read.

    Errors: ValueError when the newest manifest is missing or damaged, since nothing else can be
    told then; OSError for a file that cannot be read.
    """
    store = TokenStore.open(source)
    storage = store.storage
    for generation, fingerprint in enumerate(store.manifest["earlier"], 1):
        yield from _faults_of_manifest(storage, earlier_manifest(generation), fingerprint)
    for name, content in store.small_files().items():
        yield from file_faults(storage, name, content, progress)
    for split in (store.train, store.held_out):
        for shard in split.shards:
            yield from _faults_of_shard(storage, shard, progress)


def store_bytes(store: TokenStore) -> int:
    """Of the shards of both splits together."""
    return sum(shard.num_bytes for split in (store.train, store.held_out) for shard in split.shards)


def files_of(store: TokenStore) -> Iterator[tuple[str, Content]]:
    """All files of a store but its manifests, and what they must hold.

    Errors: ValueError that names a damaged file of checksums.
    """
    yield from store.small_files().items()
    for split in (store.train, store.held_out):
        for shard in split.shards:
            contents = shard.contents()
            sums = np.concatenate([content.checksums for content in contents.values()]).tobytes()
            yield shard.checksums_file, Content(len(sums), np.array([zlib.crc32(sums)]))
            yield from contents.items()


def _faults_of_manifest(storage: Folder, name: str, fingerprint: str) -> Iterator[str]:
    try:
        found = read_manifest(storage.read(name), storage.name(name), storage.remedy)
        if found["sha256"] != fingerprint:
            raise ValueError(f"{storage.name(name)}: of another store; {storage.remedy}")
    except FileNotFoundError:
        yield f"{storage.name(name)}: missing; {storage.remedy}"
    except ValueError as error:
        yield str(error)


def _faults_of_shard(
    storage: Folder, shard: Shard, progress: Callable[[int], None]
) -> Iterator[str]:
    try:
        contents = shard.contents()
    except ValueError as error:
        yield f"{error} (its shard cannot be judged)"
        return
    for name, content in contents.items():
        yield from file_faults(storage, name, content, progress)


def file_faults(
    storage: Folder, name: str, content: Content, progress: Callable[[int], None]
) -> Iterator[str]:
    """The faults of one file. Errors: OSError for one that cannot be read."""
    full_name, size = storage.name(name), 0
    try:
        with storage.stream(name) as file:
            for number, block in enumerate(blocks_of(file, full_name)):
                size += len(block)
                progress(len(block))
                if number < len(content.checksums):
                    written = int(content.checksums[number])
                    try:
                        check_block(full_name, number, zlib.crc32(block), written, storage.remedy)
                    except ValueError as error:
                        yield str(error)
        check_size(full_name, size, content.num_bytes, storage.remedy)
    except FileNotFoundError:
        yield f"{full_name}: missing; {storage.remedy}"
    except ValueError as error:
        yield str(error)
