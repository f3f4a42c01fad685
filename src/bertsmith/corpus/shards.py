"""Writing the shards of a token store; store.py describes and reads them."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.corpus.encoding import Part
from bertsmith.corpus.store import BLOCK, INDEX, KINDS
from bertsmith.files import atomic_file


class BlockWriter:
    """A file written in pieces, under a temporary name, with the checksums of its blocks."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self._file = stack.enter_context(stack.enter_context(atomic_file(path)).open("wb"))
        self._checksums: list[int] = []
        self._filled = self._checksum = 0  # of the last, unfinished block

    def write(self, values: np.ndarray) -> None:
        content = memoryview(values.tobytes())
        self._file.write(content)
        while content:
            piece, content = content[: BLOCK - self._filled], content[BLOCK - self._filled :]
            self._checksum = zlib.crc32(piece, self._checksum)
            self._filled += len(piece)
            if self._filled == BLOCK:
                self._checksums.append(self._checksum)
                self._filled = self._checksum = 0

    def checksums(self) -> list[int]:
        """CRC-32 of every block so far, an unfinished last one included."""
        return self._checksums + [self._checksum] * (self._filled > 0)


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
        with atomic_file(self._folder / f"{self._name}.checksums") as temporary:
            temporary.write_bytes(sums.tobytes())
        return {
            "name": self._name,
            "documents": self._num_documents,
            "sentences": self._num_sentences,
            "tokens": self.num_tokens,
            "checksums": zlib.crc32(sums.tobytes()),
        }
