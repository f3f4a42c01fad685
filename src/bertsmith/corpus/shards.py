"""Writing a token store: shards one by one, then what belongs to all of them; store.py reads it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.corpus.blocks import BLOCK, BlockSums, BlockWriter
from bertsmith.corpus.encoding import Part
from bertsmith.corpus.manifest import MANIFEST, sealed, write_manifest
from bertsmith.corpus.storage import LocalFolder
from bertsmith.corpus.store import (
    CHECKSUMS,
    INDEX,
    KINDS,
    SPLITS,
    UNIGRAM_COUNTS,
    Shard,
    token_type,
)
from bertsmith.files import atomic_file
from bertsmith.text.tokenizer_files import CONFIG_FILE, TOKENIZER_FILE, VOCABULARY_FILE
from bertsmith.text.wordpiece import Tokenizer

TOKENIZER_FILES = (VOCABULARY_FILE, TOKENIZER_FILE, CONFIG_FILE)
COUNTS = ("documents", "sentences", "tokens")


class ShardWriter:
    """The three files of a shard; the `stack` renames them when it is closed without an error."""

    def __init__(self, stack: ExitStack, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._files = {kind: BlockWriter(stack, folder / f"{name}.{kind}") for kind in KINDS}
        self.num_tokens = self._num_sentences = self._num_documents = 0
        self._files["sentences"].write(np.zeros(1, INDEX))
        self._files["documents"].write(np.zeros(1, INDEX))

    def append(self, part: Part) -> None:
        sentences = np.cumsum(part.sentence_lengths, dtype=INDEX) + self.num_tokens
        documents = np.cumsum(part.document_lengths, dtype=INDEX) + self._num_sentences
        self._files["tokens"].write(part.ids)
        self._files["sentences"].write(sentences)
        self._files["documents"].write(documents)
        self.num_tokens += len(part.ids)
        self._num_sentences += len(sentences)
        self._num_documents += len(documents)

    def finish(self) -> dict[str, Any]:
        """Write the checksums; returns the shard's entry in the manifest."""
        sums = np.array([s for kind in KINDS for s in self._files[kind].checksums()], "<u4")
        with atomic_file(self._folder / f"{self._name}.{CHECKSUMS}") as temporary:
            temporary.write_bytes(sums.tobytes())
        return {
            "name": self._name,
            "documents": self._num_documents,
            "sentences": self._num_sentences,
            "tokens": self.num_tokens,
            CHECKSUMS: zlib.crc32(sums.tobytes()),
        }


def finish_store(
    folder: Path,
    tokenizer: Tokenizer,
    shards: Mapping[str, list[dict[str, Any]]],
    text_bytes: int,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a store of the shards of both splits (their entries): count the pieces, save the
    tokenizer and, last of all, write the manifest, which is returned.

    `about` is put into the manifest: what else is to be known of the text, as JSON.
    """
    size = len(tokenizer.vocabulary)
    splits = {split: {**totals(shards[split]), "shards": shards[split]} for split in SPLITS}
    with ExitStack() as stack:
        counts = BlockWriter(stack, folder / UNIGRAM_COUNTS)
        counts.write(unigram_counts(folder, shards["train"], size))
    tokenizer.save(folder)
    manifest = sealed(
        {
            "generation": 1,
            "earlier": [],
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocabulary_fingerprint": tokenizer.vocabulary.fingerprint,
            "vocabulary_size": size,
            "token_type": token_type(size).str,
            "text_bytes": text_bytes,
            **totals(list(splits.values())),
            **(about or {}),
            "tokenizer_files": list(TOKENIZER_FILES),
            "unigram_counts": [UNIGRAM_COUNTS],
            "files": [file_entry(folder, name) for name in (*TOKENIZER_FILES, UNIGRAM_COUNTS)],
            "splits": splits,
        }
    )
    write_manifest(folder / MANIFEST, manifest)
    return manifest


def totals(parts: list[dict[str, Any]]) -> dict[str, int]:
    """Documents, sentences and tokens of shards, or of splits, together.

    >>> totals([{"documents": 1, "sentences": 2, "tokens": 9}] * 2)
    {'documents': 2, 'sentences': 4, 'tokens': 18}
    """
    return {name: sum(part[name] for part in parts) for name in COUNTS}


def unigram_counts(folder: Path, entries: list[dict[str, Any]], size: int) -> np.ndarray:
    """int64 [size]: how often each piece occurs; reads back, and so verifies, every id written.

    One shard is mapped at a time: what was read of a mapped file counts as memory of the process.
    """
    counts = np.zeros(size, INDEX)
    for entry in entries:
        tokens = Shard(LocalFolder(folder), entry, token_type(size)).tokens
        for start in range(0, len(tokens), BLOCK):
            piece = tokens.read(start, min(start + BLOCK, len(tokens)))
            counts += np.bincount(piece, minlength=size)
    return counts


def file_entry(folder: Path, name: str) -> dict[str, Any]:
    """What the manifest says of a small file."""
    sums = BlockSums()
    sums.add(memoryview((folder / name).read_bytes()))
    return {"name": name, "bytes": sums.num_bytes, CHECKSUMS: sums.checksums()}
