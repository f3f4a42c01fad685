"""The token store: opened in constant time, its shards read when they are first used.

    manifest.json          written last: a folder without it is not a store (blocks.py)
    vocab.txt ...          the tokenizer that made the ids
    unigram_counts.bin     int64 [V], how often each piece occurs in the train split
    train-00000.tokens     ids, uint16 (uint32 when V > 65,536), all documents end to end
    train-00000.sentences  int64 [S + 1], sentence s is tokens sentences[s]:sentences[s + 1]
    train-00000.documents  int64 [D + 1], document d is sentences documents[d]:documents[d + 1]
    train-00000.checksums  uint32, CRC-32 of every 1 MiB block of the three files, in that order
    held_out-00000.*       the same for the documents kept out of training
    generation-0002/       text that was appended: a whole store of its own (build.py)
    corpus-build.json      the record of the build (build.py)

Numbers are little-endian. No document lies in two shards.
"""

from __future__ import annotations

import errno
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertsmith.corpus.store.blocks import (
    MANIFEST,
    CheckedFile,
    Content,
    checked_blocks,
    earlier_manifest,
    num_blocks,
    read_manifest,
)
from bertsmith.corpus.store.storage import Folder, LocalFolder, RemoteFolder
from bertsmith.text.readers.files import is_url
from bertsmith.text.tokenizer.tokenizer import Tokenizer

UNIGRAM_COUNTS = "unigram_counts.bin"
KINDS = ("tokens", "sentences", "documents")
CHECKSUMS = "checksums"
SPLITS = ("train", "held_out")
INDEX = np.dtype("<i8")
FETCHES = 8  # shards opened side by side, for a storage that takes its time
SECTION_TOKENS = 1 << 28  # of a section, half a gigabyte of ids: 2 million rows of 128


def token_type(vocabulary_size: int) -> np.dtype:
    """The smallest type of ids of a vocabulary.

    >>> token_type(30522), token_type(65537)
    (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


class Shard:
    """Consecutive documents. Nothing is opened before it is used.

    Errors, then: ValueError for a damaged file, OSError for one that cannot be read.
    """

    def __init__(self, folder: Folder, entry: dict[str, Any], dtype: np.dtype) -> None:
        self._folder, self._name, self._checksum = folder, entry["name"], entry["checksums"]
        self.num_documents: int = entry["documents"]
        self.num_sentences: int = entry["sentences"]
        self.num_tokens: int = entry["tokens"]
        counts = (self.num_tokens, self.num_sentences + 1, self.num_documents + 1)
        self._types = (dtype, INDEX, INDEX)
        self._sizes = [c * t.itemsize for c, t in zip(counts, self._types, strict=True)]
        self.num_bytes = sum(self._sizes)
        self.checksums_file = f"{self._name}.{CHECKSUMS}"

    def contents(self) -> dict[str, Content]:
        """The contents of its files, by name."""
        blocks = [num_blocks(size) for size in self._sizes]
        with present(self._folder, self.checksums_file):
            content = self._folder.read(self.checksums_file)
        if len(content) != 4 * sum(blocks) or zlib.crc32(content) != self._checksum:
            name = self._folder.name(self.checksums_file)
            raise ValueError(f"{name}: damaged or truncated; {self._folder.hint}")
        parts = np.split(np.frombuffer(content, "<u4"), np.cumsum(blocks)[:-1])
        return {
            f"{self._name}.{kind}": Content(size, part)
            for kind, size, part in zip(KINDS, self._sizes, parts, strict=True)
        }

    def open(self) -> None:
        """Open its files, if need be beyond the 1,024 that most systems give a process unasked."""
        for is_retry in (False, True):
            try:
                _ = self.files
                return
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                if is_retry:
                    hint = "too many open files: raise the limit (ulimit -n) or build anew"
                    raise OSError(errno.EMFILE, hint, self._folder.name(self._name)) from error
            if sys.platform == "linux":
                import resource

                _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    @cached_property
    def files(self) -> tuple[CheckedFile, CheckedFile, CheckedFile]:
        folder, opened = self._folder, []
        for (name, content), dtype in zip(self.contents().items(), self._types, strict=True):
            with present(folder, name), folder.open(name, content) as file:
                opened.append(CheckedFile(file, dtype, content, folder.hint_of_opened))
        return opened[0], opened[1], opened[2]

    @property
    def tokens(self) -> CheckedFile:
        return self.files[0]

    @cached_property
    def sentences(self) -> np.ndarray:
        return self.files[1].read(0, self.num_sentences + 1)

    @cached_property
    def documents(self) -> np.ndarray:
        return self.files[2].read(0, self.num_documents + 1)

    @cached_property
    def packed_documents(self) -> np.ndarray:
        """int64 [D + 1]: the begin of each when every document is followed by one separator."""
        return self.sentences[self.documents] + np.arange(len(self.documents))


def load_manifest(storage: Folder, name: str) -> dict[str, Any]:
    """Read one of the manifests. Errors: ValueError where it is missing or damaged."""
    with present(storage, name):
        return read_manifest(storage.read(name), storage.name(name), storage.hint)


@contextmanager
def present(folder: Folder, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{folder.name(name)}: missing; {folder.hint}") from error


class Section:
    """Documents that are read together, numbered through their shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        ends = np.cumsum([0, *(shard.num_documents for shard in shards)])
        self.num_documents = int(ends[-1])
        self.first_documents = ends[:-1]  # number of each shard's first one

    def open(self) -> None:
        """Open all files, so that one that is missing or truncated is known at once."""
        if self.shards:
            with ThreadPoolExecutor(min(FETCHES, len(self.shards))) as pool:
                list(pool.map(Shard.open, self.shards))

    def document(self, number: int) -> list[np.ndarray]:
        """The sentences of a document, each an array of ids."""
        k = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        shard, local = self.shards[k], number - int(self.first_documents[k])
        first, last = shard.documents[local : local + 2]
        bounds = shard.sentences[first : last + 1].tolist()
        return [shard.tokens.read(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


class Split(Section):
    """One side of the store, which is read in `num_sections` parts one after the other."""

    def __init__(self, storage: Folder, name: str, manifest: dict[str, Any]) -> None:
        self.storage, self.name = storage, name
        self.vocabulary_fingerprint: str = manifest["vocabulary_fingerprint"]
        self.num_sentences: int = manifest["splits"][name]["sentences"]
        self.num_tokens: int = manifest["splits"][name]["tokens"]
        self._entries = manifest["splits"][name]["shards"]
        self._dtype = np.dtype(manifest["token_type"])
        super().__init__([Shard(storage, entry, self._dtype) for entry in self._entries])
        self.num_sections = max(1, min(len(self.shards), self.num_tokens // SECTION_TOKENS))

    def section(self, numbers: Sequence[int]) -> Section:
        """The shards of these numbers, whose files are closed when the section is dropped."""
        return Section([Shard(self.storage, self._entries[k], self._dtype) for k in numbers])

    @property
    def bytes_at_once(self) -> int:
        """Bytes mapped at once: two sections."""
        size = sum(shard.num_bytes for shard in self.shards)
        return size // self.num_sections * min(2, self.num_sections)


def check_capacity(splits: Sequence[Split]) -> None:
    """Errors: ValueError when the cache is too small for what is read together of remote stores."""
    remote = [split for split in splits if split.storage.capacity is not None]
    size = sum(split.bytes_at_once for split in remote)
    capacity = min((split.storage.capacity or 0 for split in remote), default=size)
    if size > capacity:
        raise ValueError(
            f"{', '.join(str(split.storage) for split in remote)}: {size / 1e9:.3g} GB are read "
            f"together, the cache has {capacity / 1e9:.3g} GB: raise BERTSMITH_CACHE_GB"
        )


def by_number(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each number with the indices at which it stands.

    >>> [(number, indices.tolist()) for number, indices in by_number(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    """
    for number in sorted(set(numbers.tolist())):
        yield number, np.flatnonzero(numbers == number)


class TokenStore:
    """A finished store. Opening reads the manifest alone."""

    weights = (1.0,)
    """Fraction of the rows per store: here one store has all."""

    def __init__(self, storage: Folder, manifest: dict[str, Any], newest: int) -> None:
        self.storage, self.manifest = storage, manifest
        self.folder = storage.source
        """Path, or URL (str), without a password."""
        self.fingerprint: str = manifest["sha256"]  # checksums of all files are in it
        self.generation: int = manifest["generation"]
        self.newest = newest
        """The newest generation that there is."""
        self.tokenizer_fingerprint: str = manifest["tokenizer_fingerprint"]
        self.train, self.held_out = (Split(storage, name, manifest) for name in SPLITS)
        self.shards = [*self.train.shards, *self.held_out.shards]
        self.num_bytes = sum(shard.num_bytes for shard in self.shards)

    @classmethod
    def open(cls, source: str | Path, fingerprint: str | None = None) -> TokenStore:
        """Open the store at a path or URL: its newest generation, or the earlier one of
        `fingerprint` where there is such a one.

        Errors: ValueError when there is no finished store, or its manifest is damaged or of another
        format; OSError for a folder that cannot be read.
        """
        storage = RemoteFolder(str(source)) if is_url(source) else LocalFolder(Path(source))
        try:
            content = storage.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(
                f"{storage}: no finished token store (no {MANIFEST} in it): make one with "
                "`bertsmith corpus`"
            ) from error
        manifest = read_manifest(content, storage.name(MANIFEST), storage.hint)
        newest: int = manifest["generation"]
        if fingerprint in manifest["earlier"]:
            number = manifest["earlier"].index(fingerprint) + 1
            manifest = load_manifest(storage, earlier_manifest(number))
        return cls(storage, manifest, newest)

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """The stores of a corpus: a mixture has several."""
        return (self,)

    def record(self) -> dict[str, Any]:
        return {"path": str(self.folder), "fingerprint": self.fingerprint}

    def small_files(self) -> dict[str, Content]:
        return {
            entry["name"]: Content(entry["bytes"], np.array(entry["checksums"], np.uint32))
            for entry in self.manifest["files"]
        }

    def _read(self, name: str) -> bytes:
        storage, content = self.storage, self.small_files()[name]
        with present(storage, name), storage.stream(name) as file:
            return b"".join(checked_blocks(file, content, storage.name(name), storage.hint))

    @cached_property
    def unigram_counts(self) -> np.ndarray:
        """int64 [V]: the count of each piece in the train split."""
        files = self.manifest["unigram_counts"]  # one for each generation
        return np.sum([np.frombuffer(self._read(name), INDEX) for name in files], axis=0)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        with TemporaryDirectory(prefix="bertsmith-") as folder:
            for name in self.manifest["tokenizer_files"]:
                (Path(folder) / name).write_bytes(self._read(name))
            tokenizer = Tokenizer.from_pretrained(folder)
        self.check_tokenizer(tokenizer, self.folder)
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer, source: Path | str) -> None:
        """Refuse a tokenizer other than the store's; the ValueError names `source`, its origin."""
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise ValueError(
                f"{self.folder}: built with tokenizer {self.tokenizer_fingerprint[:12]} "
                f"({self.manifest['vocabulary_size']:,} pieces), but {source} has "
                f"{tokenizer.fingerprint[:12]} ({len(tokenizer.vocabulary):,} pieces); "
                f"build a store with `bertsmith corpus ... --vocab {source}`"
            )
