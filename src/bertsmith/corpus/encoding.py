"""Documents -> sentences -> ids, by many processes, in the order of the input."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from bertsmith.corpus.sources import Batch
from bertsmith.corpus.store import token_type
from bertsmith.text.sentences import split_sentences
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.workers import map_in_order

Position = tuple[int, int]  # of a batch: its piece, its number there
GROUP = 1 << 15  # sentences tokenised together, however short they are: each takes 300 bytes


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
    """Documents (lists of lines) -> `Encoded`. Its result depends on the texts alone."""

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
        parts = [_part(ids, lengths, document, side) for side in (~held, held)]
        return Encoded(len(documents), num_bytes, *parts)

    def _encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all sentences, and the number of ids of each."""
        encoded = self.tokenizer.encode_batch(sentences, offsets=False, threads=1)
        ids = encoded.ids.astype(token_type(len(self.tokenizer.vocabulary)))
        return ids, np.diff(encoded.boundaries)


def _part(ids: np.ndarray, lengths: np.ndarray, document: np.ndarray, side: np.ndarray) -> Part:
    """The sentences where `side` holds, without empty ones and documents that have no other."""
    kept = side & (lengths > 0)
    counts = np.bincount(document[kept])
    return Part(ids[np.repeat(side, lengths)], lengths[kept], counts[counts > 0])


def hash_share(text: bytes) -> float:
    """A number in [0, 1) that is the text's own, so that equal documents get the same.

    >>> hash_share(b"a text") == hash_share(b"a text") != hash_share(b"another")
    True
    """
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "little") / 2**48


def load_encoder(folder: str, sentence_per_line: bool, held_out: float) -> Encoder:
    """The encoder of a worker, with the tokenizer of a folder."""
    return Encoder(Tokenizer.from_pretrained(folder), sentence_per_line, held_out)


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
