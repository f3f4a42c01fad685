"""Documents that repeat an earlier one, word for word or nearly: found through files on the disk.

    documents -> workers: a hash of the text, a MinHash signature -> files, 544 bytes a document
    files -> equal hashes; candidates, band by band -> their similarity -> exclusion list

Two documents are near duplicates when the Jaccard similarity of their sets of word 3-grams is
at least `similarity`, as 128 MinHash values estimate it (rensa's R-MinHash; the standard error is
at most 0.044). Candidates share one of 32 bands of four values (locality-sensitive hashing; Broder,
On the resemblance and containment of documents, 1997): at similarity 0.75, which 5% replaced words
leave, all but one pair in 10^5. In a band a document is compared with the first of its like and
with the one before it, so that the work is linear. The first copy always stays.

A word is a run of letters, digits and marks, lower-cased; in scripts that are written without
spaces (Han, Kana, Thai, Lao, Burmese, Khmer) every letter is one.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.base.processes import map_in_order
from bertsmith.corpus.build.batches import Batch, Numbered
from bertsmith.corpus.examples.rng import random_bits
from bertsmith.text.tokenizer.normalize import IDEOGRAPH

SIMILARITY = 0.6  # of near duplicates: about 9% of the words replaced
NGRAM = 3  # words
BANDS, ROWS = 32, 4
SEED = 42
MIXER = np.uint64(0x9E3779B97F4A7C15)
EXACT, NEAR = "duplicate", "near duplicate"
APART = re.compile(
    f"{IDEOGRAPH.pattern}|[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\U00020000-\U0003ffff]"
)
NONE, LETTER, SINGLE = range(3)  # kinds of characters
START = np.uint64(0x5851F42D4C957F2D)  # of a word: an empty n-gram has another hash


def check_similarity(similarity: float) -> None:
    """Errors: ValueError below 0.5, where the bands would miss an eighth of the pairs."""
    if not 0.5 <= similarity <= 1:
        raise ValueError(f"`similarity={similarity}`: expected 0.5 to 1")


class Signed(NamedTuple):
    """The figures of a batch of documents that are kept."""

    exact: np.ndarray  # uint64 [D, 2], a 128-bit hash of the text
    signatures: np.ndarray  # uint32 [D, 128]; [D, 0] when only equal texts are looked for
    sizes: np.ndarray  # int64 [D], bytes of UTF-8


class Signer:
    """Texts -> `Signed`. Needs the package rensa when `near`."""

    def __init__(self, near: bool) -> None:
        self._min_hash = None
        if near:
            from rensa import RMinHash  # type: ignore[import-not-found]

            self._min_hash = RMinHash

    def __call__(self, texts: list[str]) -> Signed:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        digests = b"".join(blake2b(text, digest_size=16).digest() for text in encoded)
        exact = np.frombuffer(digests, "<u8").reshape(-1, 2)
        sizes = np.array([len(text) for text in encoded], np.int64)
        if self._min_hash is None:
            return Signed(exact, np.zeros((len(texts), 0), np.uint32), sizes)
        ngrams, starts = ngram_hashes(*word_hashes(texts), NGRAM)
        matrix = self._min_hash.digest_matrix_from_flat_token_hashes(
            ngrams, starts.astype(np.uint64), BANDS * ROWS, SEED
        )
        signatures = np.array(matrix.to_rows(), np.uint32).reshape(len(texts), BANDS * ROWS)
        # Texts without a word would all have the same signature: theirs is the hash of the text.
        wordless = np.diff(starts) == 0
        signatures[wordless] = np.tile(exact.view(np.uint32), BANDS)[wordless]
        return Signed(exact, signatures, sizes)


class Repetition(NamedTuple):
    """A document to exclude, and the one that stays."""

    document: int
    of: int
    similarity: float  # 1.0 for equal texts


class DuplicateFinder:
    """Gathers signed documents in files of `folder`, then finds the repetitions.

    Memory of the search: 60 bytes a document, 40 a pair of candidates, 300 a repetition.
    """

    def __init__(self, stack: ExitStack, folder: Path, near: bool) -> None:
        self.folder, self.near = folder, near
        names = ["exact", "numbers", *(f"band-{band:02d}" for band in range(BANDS * near))]
        self._files = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        self._sources: list[str] = []
        self._first: list[int] = []  # number of the first document of each source
        self.num_documents = self.num_bytes = 0
        self.num_staying = 0
        """So many of the first documents stay, whatever they are like: others are compared."""

    def add(self, documents: list[Numbered], signed: Signed) -> None:
        """Take in a batch of documents."""
        for k, (number, document) in enumerate(documents, self.num_documents):
            if number == 0:
                self._sources.append(document.source)
                self._first.append(k)
        self.num_documents += len(documents)
        self.num_bytes += int(signed.sizes.sum())
        self._files["exact"].write(signed.exact.tobytes())
        lines = np.array([document.line for _, document in documents], np.int64)
        self._files["numbers"].write(np.stack([lines, signed.sizes], axis=1).tobytes())
        for band in range(BANDS * self.near):
            values = signed.signatures[:, band * ROWS : (band + 1) * ROWS]
            self._files[f"band-{band:02d}"].write(values.tobytes())

    def repetitions(self, similarity: float = SIMILARITY) -> list[Repetition]:
        """All documents to exclude, in order."""
        for file in self._files.values():
            file.flush()
        if not self.num_documents:
            return []
        exact = np.fromfile(self.folder / "exact", np.uint64).reshape(-1, 2)
        order = np.lexsort((exact[:, 1], exact[:, 0]))  # stable: the first copy comes first
        ordered = exact[order]
        first = np.empty(len(order), np.int64)  # the first document with the same hash
        first[order] = order[_group_begins((ordered[1:] != ordered[:-1]).any(axis=1))]
        first[: self.num_staying] = np.arange(self.num_staying)
        is_first = first == np.arange(len(first))
        like = self._near(np.flatnonzero(is_first), similarity) if self.near else {}
        for document in np.flatnonzero(~is_first).tolist():
            copy = int(first[document])  # which may be excluded itself, as near to another one
            like[document] = like.get(copy, Repetition(copy, copy, 1.0))._replace(document=document)
        return [like[document] for document in sorted(like)]

    def entries(self, repetitions: list[Repetition]) -> Iterator[dict[str, Any]]:
        """Yield the lines of an exclusion list (build/batches.py)."""
        for found in repetitions:
            yield {
                **self._name(found.document),
                "bytes": int(self._numbers[found.document, 1]),
                "reason": EXACT if found.similarity == 1.0 else NEAR,
                "similarity": round(found.similarity, 3),
                "of": self._name(found.of),
            }

    def repeated_bytes(self, repetitions: list[Repetition]) -> int:
        """Bytes of text in documents to exclude."""
        documents = [found.document for found in repetitions]
        return int(self._numbers[documents, 1].sum()) if documents else 0

    def _name(self, document: int) -> dict[str, Any]:
        source = bisect_right(self._first, document) - 1
        return {
            "source": self._sources[source],
            "document": document - self._first[source],
            "line": int(self._numbers[document, 0]),
        }

    @cached_property
    def _numbers(self) -> np.ndarray:
        """int64 [D, 2]: line and size of each document."""
        return np.memmap(self.folder / "numbers", np.int64, "r").reshape(-1, 2)

    def _band(self, band: int) -> np.ndarray:
        return np.memmap(self.folder / f"band-{band:02d}", np.uint32, "r").reshape(-1, ROWS)

    def _near(self, documents: np.ndarray, similarity: float) -> dict[int, Repetition]:
        """The near duplicates among some documents (int64, ascending), keyed by number."""
        pairs = np.zeros(0, np.int64)  # earlier * N + later
        for band in range(BANDS):
            keys = self._band(band).view(np.uint64)
            earlier, later = _bucket_pairs(keys[:, 0] ^ keys[:, 1] * MIXER, documents)
            pairs = np.union1d(pairs, earlier * self.num_documents + later)
        earlier, later = np.divmod(pairs, self.num_documents)
        equal = np.zeros(len(pairs), np.int16)
        for band in range(BANDS):
            values = self._band(band)
            equal += (values[earlier] == values[later]).sum(axis=1, dtype=np.int16)
        similarities = equal / (BANDS * ROWS)
        order = np.lexsort((earlier, later))
        like: dict[int, Repetition] = {}
        for k in order[similarities[order] >= similarity].tolist():
            document, of = int(later[k]), int(earlier[k])
            if document >= self.num_staying and document not in like and of not in like:
                # Below 1, which stands for equal texts; these differ at least in their signs.
                like[document] = Repetition(document, of, min(float(similarities[k]), 0.999))
        return like


def sign(
    batches: Iterable[Batch], finder: DuplicateFinder, workers: int
) -> Iterator[tuple[list[Numbered], Signed]]:
    """Sign all batches in `workers` processes, add them to the finder and yield them."""
    labelled = ((batch.documents, batch.texts()) for batch in batches)
    with closing(map_in_order(Signer, (finder.near,), labelled, workers)) as results:
        for documents, signed in results:
            finder.add(documents, signed)
            yield documents, signed


def _bucket_pairs(keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(earlier, later): each document with the first of its bucket and with the one before it.

    >>> [side.tolist() for side in _bucket_pairs(np.array([4, 9, 4, 4]), np.arange(4))]
    [[0, 0, 2], [2, 3, 3]]
    """
    order = np.argsort(keys[documents], kind="stable")
    ordered = documents[order]
    begins = _group_begins(keys[ordered][1:] != keys[ordered][:-1])
    later = np.flatnonzero(begins < np.arange(len(begins)))
    third = later[later - 1 > begins[later]]  # or a further one of its bucket
    earlier, later = np.concatenate([begins[later], third - 1]), np.concatenate([later, third])
    rank = np.lexsort((ordered[earlier], ordered[later]))
    return ordered[earlier[rank]], ordered[later[rank]]


def _group_begins(differs: np.ndarray) -> np.ndarray:
    """int64 [N]: begin of each item's group; differs: bool [N - 1], each from the one before."""
    is_new = np.concatenate([[True], differs])
    return np.flatnonzero(is_new)[np.cumsum(is_new) - 1]


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [W], the words of all texts, and int64 [D + 1], where each text's words begin.

    >>> words, starts = word_hashes(["The cat, THE CAT", "", "\u732b\u732b"])
    >>> starts.tolist(), bool(words[0] == words[2] != words[1]), bool(words[4] == words[5])
    ([0, 4, 4, 6], True, True)
    """
    lowered = [text.lower() for text in texts]
    lengths = np.array([len(text) for text in lowered], np.int64)
    codes = np.frombuffer("".join(lowered).encode("utf-32-le", "surrogatepass"), np.uint32)
    hashes = np.empty(len(codes), np.uint64)
    starts = np.zeros(len(texts) + 1, np.int64)
    count = _hash_words(codes, np.cumsum(lengths), _kinds(), hashes, starts)
    return hashes[:count], starts


def ngram_hashes(words: np.ndarray, starts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [N], all n-grams of `size` words, and int64 [D + 1], where each text's begin.

    A text of fewer words is one n-gram; one without words has none.

    >>> words, starts = word_hashes(["a b c d", "a b c", "b c d a", "a"])
    >>> ngrams, starts = ngram_hashes(words, starts, 3)
    >>> starts.tolist(), bool(ngrams[0] == ngrams[2]), bool(ngrams[1] == ngrams[3])
    ([0, 2, 3, 5, 6], True, True)
    """
    num_words = np.diff(starts)
    counts = np.where(num_words >= size, num_words - size + 1, num_words > 0)
    ngram_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    hashes = np.empty(ngram_starts[-1], np.uint64)
    _hash_ngrams(words, starts, size, ngram_starts, hashes)
    return hashes, ngram_starts


@functools.cache
def _kinds() -> np.ndarray:
    """uint8 [0x110000], NONE between words, LETTER within one, SINGLE for a word by itself."""
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    is_letter = np.array([unicodedata.category(one)[0] in "LMN" for one in characters])
    kinds = np.where(is_letter, LETTER, NONE).astype(np.uint8)
    alone = [match.start() for match in APART.finditer("".join(characters))]
    kinds[alone] = np.where(is_letter[alone], SINGLE, NONE)
    return kinds


@compiled
def _hash_words(codes, ends, kinds, hashes, starts):
    count = begin = 0
    for text in range(len(ends)):
        starts[text] = count
        value, inside = START, False
        for position in range(begin, ends[text]):
            kind = kinds[codes[position]]
            if inside and kind != LETTER:
                hashes[count] = value
                count += 1
                value, inside = START, False
            if kind == SINGLE:
                hashes[count] = random_bits(START, codes[position])
                count += 1
            elif kind == LETTER:
                value, inside = random_bits(value, codes[position]), True
        if inside:
            hashes[count] = value
            count += 1
        begin = ends[text]
    starts[len(ends)] = count
    return count


@compiled
def _hash_ngrams(words, starts, size, ngram_starts, hashes):
    for text in range(len(starts) - 1):
        for ngram in range(ngram_starts[text], ngram_starts[text + 1]):
            begin = starts[text] + ngram - ngram_starts[text]
            value = np.uint64(0)
            for position in range(begin, min(begin + size, starts[text + 1])):
                value = random_bits(value, words[position])
            hashes[ngram] = value
