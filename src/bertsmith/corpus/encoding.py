"""Documents -> sentences -> ids, by many processes, in the order of the input."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from bertsmith.corpus.store import token_type
from bertsmith.text.sentences import split_sentences
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.workers import interrupts_held, start_worker


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
        sentences: list[str] = []
        counts, is_held_out, num_bytes = [], [], 0
        for lines in documents:
            text = "\n".join(lines).encode("utf-8", "surrogatepass")
            num_bytes += len(text)
            is_held_out.append(hash_share(text) < self.held_out)
            before = len(sentences)
            if self.sentence_per_line:
                sentences.extend(lines)
            else:
                for line in lines:
                    sentences.extend(split_sentences(line))
            counts.append(len(sentences) - before)
        encoded = self.tokenizer.encode_batch(sentences, offsets=False, threads=1)
        ids = encoded.ids.astype(token_type(len(self.tokenizer.vocabulary)))
        lengths = np.diff(encoded.boundaries)
        document = np.repeat(np.arange(len(documents)), counts)  # of each sentence
        held = np.array(is_held_out, bool)[document]
        parts = [_part(ids, lengths, document, side) for side in (~held, held)]
        return Encoded(len(documents), num_bytes, *parts)


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


_encoder: Encoder  # of a worker process


def _start_worker(folder: str, sentence_per_line: bool, held_out: float) -> None:
    global _encoder
    _encoder = Encoder(Tokenizer.from_pretrained(folder), sentence_per_line, held_out)
    start_worker()


def _encode(documents: list[list[str]]) -> Encoded:
    return _encoder(documents)


def encode_in_order(
    batches: Iterable[list[list[str]]], encoder: Encoder, workers: int
) -> Generator[Encoded, None, None]:
    """Encode batches in `workers` processes (1: in this one), at most twice as many under way.

    Errors: those of the batches and the encoder; OSError when a worker was killed.
    """
    if workers == 1:
        yield from map(encoder, batches)
        return
    encoder([["a"]])  # where nothing is compiled yet, it is done here, once for all workers
    with TemporaryDirectory(prefix="bertsmith-") as folder, ExitStack() as stack:
        # The tokenizer goes by file: were it an argument, too large for a pipe, this process would
        # wait for ever for a worker that died at its start.
        encoder.tokenizer.save(folder)
        pool = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("spawn"),
            _start_worker,
            (folder, encoder.sentence_per_line, encoder.held_out),
        )
        stack.callback(pool.shutdown, cancel_futures=True)
        under_way = deque()
        try:
            for batch in batches:
                with interrupts_held():
                    under_way.append(pool.submit(_encode, batch))
                if len(under_way) >= 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process died, most likely for want of memory: run again with fewer "
                "workers, it goes on where it was (a script needs `if __name__ == '__main__':` "
                "around its work)"
            ) from error
