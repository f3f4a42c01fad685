"""The token store on disk: a folder of memory-mapped shards, opened in constant time.

    manifest.json          written last: a folder without it is not a store
    vocab.txt ...          the tokenizer that made the ids
    unigram_counts.bin     int64 [V], how often each piece occurs in the train split
    train-00000.tokens     ids, uint16 (uint32 when V > 65,536), all documents end to end
    train-00000.sentences  int64 [S + 1], sentence s is tokens sentences[s]:sentences[s + 1]
    train-00000.documents  int64 [D + 1], document d is sentences documents[d]:documents[d + 1]
    train-00000.checksums  uint32, CRC-32 of every 1 MiB block of the three files, in that order
    held_out-00000.*       the same for the documents kept out of training
    corpus-build.json      how far the build came, see build.py

Numbers are little-endian. No document lies in two shards.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.files import read_json
from bertsmith.text.wordpiece import Tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
UNIGRAM_COUNTS = "unigram_counts.bin"
BLOCK = 1 << 20  # bytes under one checksum
KINDS = ("tokens", "sentences", "documents")
SPLITS = ("train", "held_out")
INDEX = np.dtype("<i8")
REBUILD = "remove the folder and build it again with `bertsmith corpus`"


def token_type(vocabulary_size: int) -> np.dtype:
    """The smallest type of ids of a vocabulary.

    >>> token_type(30522), token_type(65537)
    (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


def num_blocks(num_bytes: int) -> int:
    """How many checksums a file of `num_bytes` has.

    >>> num_blocks(0), num_blocks(1 << 20), num_blocks((1 << 20) + 1)
    (0, 1, 2)
    """
    return -(-num_bytes // BLOCK)


class CheckedFile:
    """A memory-mapped array [count] whose blocks are verified when they are first read.

    Errors: ValueError that names the file: at opening when it is absent or its size differs from
    the manifest's, at reading when a block differs from its checksum.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int, checksums: np.ndarray) -> None:
        self.path, self._checksums = path, checksums
        expected = count * dtype.itemsize
        if not path.is_file():
            raise ValueError(f"{path}: missing; {REBUILD}")
        if path.stat().st_size != expected:
            raise ValueError(
                f"{path}: {path.stat().st_size:,} bytes where the manifest says {expected:,} "
                f"(truncated or replaced); {REBUILD}"
            )
        self._bytes = memoryview(b"")
        if expected:  # an empty file cannot be mapped
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._bytes = memoryview(mapped)
        self._array = np.frombuffer(self._bytes, dtype)
        # Two threads may verify the same block at once: they come to the same answer.
        self._verified = np.zeros(len(checksums), bool)

    def __len__(self) -> int:
        return len(self._array)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items start:stop as a read-only view, after their blocks were found sound."""
        size = self._array.itemsize
        for block in range(start * size // BLOCK, num_blocks(stop * size)):
            if not self._verified[block]:
                self._verify(block)
        return self._array[start:stop]

    def verified(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The whole array, of which starts[k]:stops[k] were found sound and may be read."""
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.read(start, stop)
        return self._array

    def _verify(self, block: int) -> None:
        found = zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK])
        if found != self._checksums[block]:
            raise ValueError(
                f"{self.path}: block {block} (1 MiB from byte {block * BLOCK:,}) is damaged: "
                f"CRC-32 {found:08x}, written as {self._checksums[block]:08x}; {REBUILD}"
            )
        self._verified[block] = True


class Shard:
    """One run of whole documents: ids, sentence boundaries and document boundaries."""

    def __init__(self, folder: Path, entry: dict[str, Any], dtype: np.dtype) -> None:
        self.num_documents: int = entry["documents"]
        self.num_sentences: int = entry["sentences"]
        counts = (entry["tokens"], self.num_sentences + 1, self.num_documents + 1)
        layout = list(zip(KINDS, (dtype, INDEX, INDEX), counts, strict=True))
        blocks = [num_blocks(count * kind_type.itemsize) for _, kind_type, count in layout]
        checksums = _read_checksums(folder / f"{entry['name']}.checksums", sum(blocks), entry)
        parts = np.split(checksums, np.cumsum(blocks)[:-1])
        self.tokens, self._sentences, self._documents = (
            CheckedFile(folder / f"{entry['name']}.{kind}", kind_type, count, part)
            for (kind, kind_type, count), part in zip(layout, parts, strict=True)
        )

    @cached_property
    def sentences(self) -> np.ndarray:
        """int64 [S + 1]: sentence s is tokens sentences[s]:sentences[s + 1]."""
        return self._sentences.read(0, len(self._sentences))

    @cached_property
    def documents(self) -> np.ndarray:
        """int64 [D + 1]: document d is sentences documents[d]:documents[d + 1]."""
        return self._documents.read(0, len(self._documents))

    @cached_property
    def packed_documents(self) -> np.ndarray:
        """int64 [D + 1]: where each begins when every document is followed by one separator."""
        return self.sentences[self.documents] + np.arange(len(self.documents))


class Split:
    """The documents of one side of the store, numbered through all its shards."""

    def __init__(self, folder: Path, name: str, manifest: dict[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.vocabulary_fingerprint: str = manifest["vocabulary_fingerprint"]
        entry = manifest["splits"][name]
        self.num_documents: int = entry["documents"]
        self.num_sentences: int = entry["sentences"]
        self.num_tokens: int = entry["tokens"]
        dtype = np.dtype(manifest["token_type"])
        self.shards = [Shard(folder, shard, dtype) for shard in entry["shards"]]
        ends = np.cumsum([0, *(shard.num_documents for shard in self.shards)])
        self.first_documents: list[int] = ends.tolist()[:-1]  # number of each shard's first one

    def locate(self, document: int) -> tuple[int, int]:
        """(shard, number of the document within the shard)."""
        shard = bisect_right(self.first_documents, document) - 1
        return shard, document - self.first_documents[shard]

    def document(self, number: int) -> list[np.ndarray]:
        """The sentences of a document, each an array of ids."""
        shard_number, local = self.locate(number)
        shard = self.shards[shard_number]
        first, last = shard.documents[local : local + 2]
        bounds = shard.sentences[first : last + 1].tolist()
        return [shard.tokens.read(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def by_number(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each number and the places where it stands.

    >>> [(number, places.tolist()) for number, places in by_number(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    """
    for number in sorted(set(numbers.tolist())):
        yield number, np.flatnonzero(numbers == number)


class TokenStore:
    """A finished store. Opening reads the manifest and the checksums and maps the files.

    Errors of `open`: ValueError when the folder is no finished store, is of another format, or a
    file of it is absent or of the wrong size.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        content = json.dumps(manifest, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(content).hexdigest()  # checksums of all files are in it
        self.tokenizer_fingerprint: str = manifest["tokenizer_fingerprint"]
        self.train, self.held_out = (Split(folder, name, manifest) for name in SPLITS)
        checksums = np.array(manifest["unigram_checksums"], np.uint32)
        size = manifest["vocabulary_size"]
        self._unigram_counts = CheckedFile(folder / UNIGRAM_COUNTS, INDEX, size, checksums)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{folder}: no finished token store (no {MANIFEST} in it): make one with "
                "`bertsmith corpus`"
            )
        try:
            manifest = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; {REBUILD}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f"{path}: not a token store of format {FORMAT}; {REBUILD}")
        return cls(folder, manifest)

    @cached_property
    def unigram_counts(self) -> np.ndarray:
        """int64 [V]: how often each piece occurs in the train split."""
        return self._unigram_counts.read(0, len(self._unigram_counts))

    def check_tokenizer(self, tokenizer: Tokenizer, source: Path | str) -> None:
        """Refuse a tokenizer other than the store's; `source` says in the error where it is from.

        Errors: ValueError that names both.
        """
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise ValueError(
                f"{self.folder}: built with tokenizer {self.tokenizer_fingerprint[:12]} "
                f"({self.manifest['vocabulary_size']:,} pieces), but {source} has "
                f"{tokenizer.fingerprint[:12]} ({len(tokenizer.vocabulary):,} pieces); "
                f"build a store with `bertsmith corpus ... --vocab {source}`"
            )


def _read_checksums(path: Path, count: int, entry: dict[str, Any]) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path}: missing; {REBUILD}")
    content = path.read_bytes()
    if len(content) != 4 * count or zlib.crc32(content) != entry["checksums"]:
        raise ValueError(f"{path}: damaged or truncated; {REBUILD}")
    return np.frombuffer(content, "<u4")
