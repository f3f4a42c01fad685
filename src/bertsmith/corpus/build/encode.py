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
from bertsmith.corpus.build.batches import Batch
from bertsmith.corpus.store.blocks import (
    BLOCK,
    MANIFEST,
    BlockSums,
    BlockWriter,
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
from bertsmith.text.tokenizer.files import CONFIG_FILE, TOKENIZER_FILE, VOCABULARY_FILE
from bertsmith.text.tokenizer.tokenizer import Tokenizer

GROUP = 1 << 15  # sentences tokenized together, however short they are: each takes 300 bytes
TOKENIZER_FILES = (VOCABULARY_FILE, TOKENIZER_FILE, CONFIG_FILE)
COUNTS = ("documents", "sentences", "tokens")
Position = tuple[int, int]  # of a batch: its piece, its number there


class Part(NamedTuple):
    """Documents as ids: the tokens of all sentences end to end."""

    ids: np.ndarray  # uint16 or uint32 [T]
    sentence_lengths: np.ndarray  # int64 [S], in tokens, none 0
    document_lengths: np.ndarray  # int64 [D], in sentences, none 0


class Encoded(NamedTuple):
    """A batch of documents on its way from a worker to the writer."""

    num_read: int  # documents, dropped ones included
    num_bytes: int  # of their text
    train: Part
    held_out: Part


@dataclass(frozen=True)
class Encoder:
    """Documents (lists of lines) -> `Encoded`."""

    tokenizer: Tokenizer
    sentence_per_line: bool
    held_out: float

    def __call__(self, documents: list[list[str]]) -> Encoded:
        groups, sentences = [], []
        counts, is_held_out, num_bytes = [], [], 0
        for lines in documents:
            text = "\n".join(lines).encode("utf-8", "surrogatepass")
            num_bytes += len(text)
            is_held_out.append(hash_share(text) < self.held_out)
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
        return Encoded(len(documents), num_bytes, *parts)

    def _encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all sentences, and the number of ids of each."""
        encoded = self.tokenizer.encode_batch(sentences, offsets=False, threads=1)
        ids = encoded.ids.astype(token_type(len(self.tokenizer.vocabulary)))
        return ids, np.diff(encoded.boundaries)


def hash_share(text: bytes) -> float:
    """A number in [0, 1) that is the text's own, so that equal documents get the same.

    >>> hash_share(b"a text") == hash_share(b"a text") != hash_share(b"another")
    True
    """
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "little") / 2**48


def encode_in_order(
    batches: Iterable[Batch], encoder: Encoder, workers: int
) -> Generator[tuple[Position, Encoded], None, None]:
    """Encode batches in `workers` processes (this one among them), at most three each under way.

    Errors: those of the batches and the encoder; OSError when a worker was killed.
    """
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
        with closing(map_in_order(load_encoder, arguments, labelled, workers)) as results:
            yield from results


def load_encoder(folder: str, sentence_per_line: bool, held_out: float) -> Encoder:
    """The encoder of a worker, with the tokenizer of a folder."""
    return Encoder(Tokenizer.from_pretrained(folder), sentence_per_line, held_out)


# --- files ---


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
) -> dict[str, Any]:
    """Make a store of the shards of both splits (their entries): count the pieces, save the
    tokenizer and, last of all, write the manifest, which is returned."""
    size = len(tokenizer.vocabulary)
    splits = {split: {**totals(shards[split]), "shards": shards[split]} for split in SPLITS}
    with ExitStack() as stack:
        counts = BlockWriter(stack, folder / UNIGRAM_COUNTS)
        counts.write(unigram_counts(folder, shards["train"], size))
    tokenizer.save(folder)
    files = []
    for name in (*TOKENIZER_FILES, UNIGRAM_COUNTS):
        sums = BlockSums()
        sums.add(memoryview((folder / name).read_bytes()))
        files.append({"name": name, "bytes": sums.num_bytes, CHECKSUMS: sums.checksums()})
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


def unigram_counts(folder: Path, entries: list[dict[str, Any]], size: int) -> np.ndarray:
    """int64 [size]: the count of each piece; reads back, and so verifies, every id written.

    One shard is mapped at a time: what was read of a mapped file counts as memory of the process.
    """
    counts = np.zeros(size, INDEX)
    for entry in entries:
        tokens = Shard(LocalFolder(folder), entry, token_type(size)).tokens
        for start in range(0, len(tokens), BLOCK):
            piece = tokens.read(start, min(start + BLOCK, len(tokens)))
            counts += np.bincount(piece, minlength=size)
    return counts
