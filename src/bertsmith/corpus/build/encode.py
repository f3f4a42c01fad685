"""Documents -> sentences -> ids, by many processes, in the order of the input; ids -> shard files.

The result of a batch depends on its texts alone. Shards are written one by one, then what belongs
to all of them; the manifest, last of all, makes them a store.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.files import atomic_file
from bertsmith.base.processes import map_in_order
from bertsmith.corpus.build.batches import Batch, Position
from bertsmith.corpus.store.blocks import (
    BLOCK,
    MANIFEST,
    BlockWriter,
    block_checksums,
    sealed,
    write_manifest,
)
from bertsmith.corpus.store.storage import LocalFolder
from bertsmith.corpus.store.store import (
    CHECKSUMS,
    INDEX,
    KINDS,
    SPLITS,
    UNIGRAM_COUNTS,
    Shard,
    token_type,
)
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer.files import TOKENIZER_FILES
from bertsmith.text.tokenizer.tokenizer import Tokenizer

GROUP = 1 << 15  # sentences tokenized together, however short they are: each takes 300 bytes
COUNTS = ("documents", "sentences", "tokens")


class Part(NamedTuple):
    """Documents as ids: the tokens of all sentences end to end."""

    ids: np.ndarray  # uint16 or uint32 [T]
    sentence_lengths: np.ndarray  # int64 [S], in tokens, none 0
    document_lengths: np.ndarray  # int64 [D], in sentences, none 0


class Encoded(NamedTuple):
    """A batch of documents on its way from a worker to the writer."""

    num_bytes: int  # of their text, dropped documents included
    train: Part
    held_out: Part


@dataclass(frozen=True)
class Encoder:
    """Documents (lists of lines) -> `Encoded`."""

    tokenizer: Tokenizer
    sentence_per_line: bool
    held_out: float

    @classmethod
    def load(cls, folder: str, sentence_per_line: bool, held_out: float) -> Encoder:
        """The encoder of a worker, with the tokenizer of a folder."""
        return cls(Tokenizer.from_pretrained(folder), sentence_per_line, held_out)

    def __call__(self, documents: list[list[str]]) -> Encoded:
        groups, sentences = [], []
        counts, is_held_out, num_bytes = [], [], 0
        for lines in documents:
            text = "\n".join(lines).encode("utf-8", "surrogatepass")
            num_bytes += len(text)
            # by the text alone: equal documents are on the same side
            digest = int.from_bytes(blake2b(text, digest_size=6).digest(), "little")
            is_held_out.append(digest / 2**48 < self.held_out)
            counts.append(0)
            for line in lines:
                found = [line] if self.sentence_per_line else split_sentences(line)
                counts[-1] += len(found)
                sentences.extend(found)
                if len(sentences) >= GROUP:
                    groups.append(self._encode(sentences))
                    sentences = []
        groups.append(self._encode(sentences))
        ids, lengths = (np.concatenate(parts) for parts in zip(*groups, strict=True))
        document = np.repeat(np.arange(len(documents)), counts)  # of each sentence
        held = np.array(is_held_out, bool)[document]
        parts = []
        for side in (~held, held):  # without empty sentences, and documents that have no other
            kept = side & (lengths > 0)
            sizes = np.bincount(document[kept])
            parts.append(Part(ids[np.repeat(side, lengths)], lengths[kept], sizes[sizes > 0]))
        return Encoded(num_bytes, *parts)

    def _encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all sentences, and the number of ids of each."""
        encoded = self.tokenizer.encode_batch(sentences, offsets=False, threads=1)
        ids = encoded.ids.astype(token_type(len(self.tokenizer.vocabulary)))
        return ids, np.diff(encoded.boundaries)


def encode_in_order(
    batches: Iterable[Batch], encoder: Encoder, workers: int
) -> Generator[tuple[Position, Encoded], None, None]:
    """Encode batches in `workers` processes; errors as `map_in_order`."""
    labelled = (
        ((batch.piece, batch.number), [document.lines for _, document in batch.documents])
        for batch in batches
    )
    if workers == 1:
        yield from ((position, encoder(documents)) for position, documents in labelled)
        return
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        encoder.tokenizer.save(folder)
        arguments = (folder, encoder.sentence_per_line, encoder.held_out)
        with closing(map_in_order(Encoder.load, arguments, labelled, workers)) as results:
            yield from results


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
        sums = np.array([s for kind in KINDS for s in self._files[kind].checksums], "<u4")
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
    folder: Path, tokenizer: Tokenizer, shards: Mapping[str, list[dict[str, Any]]], text_bytes: int
) -> dict[str, Any]:
    """Make a store of the shards of both splits (their entries); returns its manifest.

    Counting the pieces reads every train id back, and so verifies it. The manifest is written last.
    """
    size = len(tokenizer.vocabulary)
    splits = {split: {**totals(shards[split]), "shards": shards[split]} for split in SPLITS}
    counts = np.zeros(size, INDEX)
    for entry in shards["train"]:  # one mapped at a time: what was read of it counts as memory
        tokens = Shard(LocalFolder(folder), entry, token_type(size)).tokens
        for start in range(0, len(tokens), BLOCK):
            ids = tokens.read(start, min(start + BLOCK, len(tokens)))
            counts += np.bincount(ids, minlength=size)
    with atomic_file(folder / UNIGRAM_COUNTS) as temporary:
        temporary.write_bytes(counts.tobytes())
    tokenizer.save(folder)
    files = []
    for name in (*TOKENIZER_FILES, UNIGRAM_COUNTS):
        content = (folder / name).read_bytes()
        files.append({"name": name, "bytes": len(content), CHECKSUMS: block_checksums(content)})
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
            "tokenizer_files": list(TOKENIZER_FILES),
            "unigram_counts": [UNIGRAM_COUNTS],
            "files": files,
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
