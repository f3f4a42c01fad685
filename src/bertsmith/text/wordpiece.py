"""WordPiece: texts in, flat arrays of piece ids and character offsets out.

White space is the only boundary that every rule of the tokenizer respects, so the texts are cut
there, each distinct chunk is worked out once (`Chunks`), and the result is gathered with NumPy:
no Python object is made for a token.
"""

from __future__ import annotations

import hashlib
import json
import threading
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.text.normalize import (
    CHUNK,
    GOOGLE_CASED,
    GOOGLE_UNCASED,
    Normalization,
    words_of,
)
from bertsmith.text.tokenizer_files import read_tokenizer, write_tokenizer
from bertsmith.text.vocabulary import Vocabulary

MAX_WORD = 200  # code points after normalisation; Hugging Face's default is 100
GROUP = 1 << 20  # characters encoded at a time, so that scratch memory is bounded
MAX_REMEMBERED = 1 << 21  # characters of all chunks in `Chunks`: about 60 MB with their pieces


@dataclass(frozen=True)
class Encoded:
    """The pieces of N texts, one after the other; text k is `boundaries[k]:boundaries[k + 1]`.

    ids         int32 [T]
    offsets     int32 [T, 2], code points of the ORIGINAL text a piece came from, end exclusive
    word_ids    int32 [T], number of the piece's word within its text (punctuation is a word)
    boundaries  int64 [N + 1]
    """

    ids: np.ndarray
    offsets: np.ndarray
    word_ids: np.ndarray
    boundaries: np.ndarray

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __getitem__(self, k: int) -> Encoded:
        """Text k alone, as views. Errors: IndexError."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"text {k} of {len(self)}")
        begin, end = self.boundaries[k % len(self)], self.boundaries[k % len(self) + 1]
        return Encoded(
            self.ids[begin:end],
            self.offsets[begin:end],
            self.word_ids[begin:end],
            np.array([0, end - begin]),
        )


class Tokenizer:
    """BERT's tokenizer (google-research/bert `tokenization.py`, paper section 3), with offsets.

    Special tokens in the text are split like any other ("[MASK]" -> "[", "mask", "]"): there is
    no list of words that are never split. May be shared by threads and sent to processes.

    >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
    >>> encoded = Tokenizer(Vocabulary(pieces)).encode_batch(["Playing!", "plays"])
    >>> encoded.ids.tolist(), encoded.boundaries.tolist()
    ([5, 6, 7, 1], [0, 3, 4])
    >>> encoded.offsets.tolist(), encoded.word_ids.tolist()
    ([[0, 4], [4, 7], [7, 8], [0, 5]], [0, 0, 1, 0])
    """

    def __init__(self, vocabulary: Vocabulary, normalization: Normalization = GOOGLE_UNCASED):
        self.vocabulary = vocabulary
        self.normalization = normalization
        self.fingerprint = _fingerprint(vocabulary, normalization)
        self._chunks = Chunks(vocabulary, normalization)
        self._lock = threading.Lock()

    def __reduce__(self):
        return Tokenizer, (self.vocabulary, self.normalization)

    @classmethod
    def from_vocab(cls, file: Path | str, lowercase: bool = True) -> Tokenizer:
        """A tokenizer from a `vocab.txt` alone, with the rules of Google's models.

        Errors: those of `Vocabulary.read`.
        """
        return cls(Vocabulary.read(file), GOOGLE_UNCASED if lowercase else GOOGLE_CASED)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Tokenizer:
        """The tokenizer of a model folder. Errors: those of `read_tokenizer`."""
        return cls(*read_tokenizer(Path(folder)))

    def save(self, folder: Path | str) -> None:
        """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json`."""
        write_tokenizer(Path(folder), self.vocabulary, self.normalization, MAX_WORD)

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts, without special tokens around them.

        A word with a piece missing from the vocabulary, or of more than 200 characters, is one
        [UNK] over the whole word. Lone surrogates are characters no vocabulary holds.

        Errors: ValueError for a text that is not a `str`, with its place in the batch.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one string: encode_batch takes a list of texts")
        texts = list(texts)
        for k, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(
                    f"text {k} of the batch is {type(text).__name__}, not str: "
                    "decode bytes and drop missing values first"
                )
        with self._lock:
            groups = [self._encode_group(group) for group in _groups(texts)]
        return _concatenate(groups)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The pieces joined by spaces, continuations to the piece before them.

        Where accents were stripped the text is composed again (NFC), which puts Hangul together.

        >>> tokenizer = Tokenizer(Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
        ...                                   "play", "##ing", "!"]))
        >>> tokenizer.decode([5, 6, 7])
        'playing !'

        Errors: ValueError for an id outside the vocabulary.
        """
        numbers = np.asarray(ids, dtype=np.int64)
        outside = (numbers < 0) | (numbers >= len(self.vocabulary))
        if outside.any():
            raise ValueError(
                f"id {numbers[outside][0]} is outside the vocabulary of {len(self.vocabulary):,}"
            )
        pieces = self.vocabulary.pieces
        text = " ".join(pieces[number] for number in numbers.tolist()).replace(" ##", "")
        return (
            unicodedata.normalize("NFC", text)
            if self.normalization.strip_accents == "all"
            else text
        )

    def _encode_group(self, texts: list[str]) -> Encoded:
        joined = "\n".join(texts)  # a line break is white space: no chunk spans two texts
        self._chunks.forget_when_full()
        rows = [self._chunks[chunk] for chunk in CHUNK.findall(joined)]
        pieces, num_pieces, num_words = self._chunks.gather(np.array(rows, np.int64))

        lengths = np.array([len(text) for text in texts], np.int64)
        text_starts = _sums_before(lengths + 1)[:-1]
        chunk_starts = np.array([match.start() for match in CHUNK.finditer(joined)], np.int64)
        first_chunks = np.searchsorted(chunk_starts, text_starts)  # [N]
        chunks_per_text = np.diff(first_chunks, append=len(rows))
        words_before = _sums_before(num_words)  # [chunks + 1], from the start of the group
        starts = chunk_starts - np.repeat(text_starts, chunks_per_text)
        words = words_before[:-1] - np.repeat(words_before[first_chunks], chunks_per_text)
        return Encoded(
            ids=pieces[:, 0],
            offsets=pieces[:, 1:3] + np.repeat(starts, num_pieces)[:, None],
            word_ids=pieces[:, 3] + np.repeat(words, num_pieces),
            boundaries=_sums_before(num_pieces)[np.append(first_chunks, len(rows))],
        )


class Chunks(dict[str, int]):
    """Chunk -> its row in a growing table; a chunk not met before is worked out on the spot.

    A row is (first piece, pieces, words); a piece is (id, start, end, word), counted from the
    start of the chunk. Both tables are flat arrays, extended in one call a chunk, so that an
    interrupt between two calls leaves unused entries but no wrong ones.
    """

    def __init__(self, vocabulary: Vocabulary, normalization: Normalization):
        super().__init__()
        self.vocabulary = vocabulary
        self.normalization = normalization
        self.longest = max(len(piece) for piece in vocabulary.pieces)
        self.rows = array("i")
        self.pieces = array("i")
        self.characters = 0

    def __missing__(self, chunk: str) -> int:
        first = len(self.pieces) // 4
        pieces: list[int] = []
        words = words_of(chunk, self.normalization)
        for number, word in enumerate(words):
            begin = 0
            for piece, end in match_pieces(word.characters, self.vocabulary, self.longest):
                origins = word.origins[begin:end]
                pieces += (piece, min(origins), max(origins) + 1, number)
                begin = end
        self.pieces.extend(pieces)
        row = len(self.rows) // 3
        self.rows.extend((first, len(pieces) // 4, len(words)))
        self.characters += len(chunk)
        self[chunk] = row
        return row

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of `rows` [R] one after the other [T, 4]; pieces [R] and words [R] of each."""
        first, num_pieces, num_words = np.asarray(self.rows).reshape(-1, 3)[rows].T
        places = np.repeat(first - _sums_before(num_pieces)[:-1], num_pieces)
        places += np.arange(len(places))
        return np.asarray(self.pieces).reshape(-1, 4)[places], num_pieces, num_words

    def forget_when_full(self) -> None:
        """Start afresh when too much is remembered; common chunks are soon back."""
        if self.characters > MAX_REMEMBERED:
            self.clear()
            self.rows, self.pieces, self.characters = array("i"), array("i"), 0


def match_pieces(word: str, vocabulary: Vocabulary, longest: int) -> list[tuple[int, int]]:
    """Greedy longest match: (id, end) of each piece, or one [UNK] for the whole word.

    `longest` is the length of the longest piece, which bounds the search.
    """
    if len(word) > MAX_WORD:
        return [(vocabulary.unk_id, len(word))]
    pieces: list[tuple[int, int]] = []
    begin, prefix = 0, ""
    while begin < len(word):
        for end in range(min(len(word), begin + longest), begin, -1):
            piece = vocabulary.ids.get(prefix + word[begin:end])
            if piece is not None:
                break
        else:
            return [(vocabulary.unk_id, len(word))]
        pieces.append((piece, end))
        begin, prefix = end, "##"
    return pieces


def _fingerprint(vocabulary: Vocabulary, normalization: Normalization) -> str:
    """SHA-256 of all that decides which pieces a text becomes."""
    strips = {"all": True, "none": False}.get(normalization.strip_accents, "latin")
    settings = [vocabulary.fingerprint, normalization.lowercase, strips, normalization.split_cjk]
    if normalization.unicode != "none":
        settings.append(normalization.unicode)
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Consecutive texts of about `GROUP` characters together."""
    begin = size = 0
    for k, text in enumerate(texts):
        size += len(text) + 1
        if size >= GROUP:
            yield texts[begin : k + 1]
            begin, size = k + 1, 0
    yield texts[begin:]


def _concatenate(parts: Sequence[Encoded]) -> Encoded:
    sizes = [part.boundaries[-1] for part in parts]
    boundaries = [
        part.boundaries[1:] + before
        for part, before in zip(parts, _sums_before(np.array(sizes)), strict=False)
    ]
    return Encoded(
        ids=np.concatenate([part.ids for part in parts]).astype(np.int32),
        offsets=np.concatenate([part.offsets for part in parts]).astype(np.int32),
        word_ids=np.concatenate([part.word_ids for part in parts]).astype(np.int32),
        boundaries=np.concatenate([np.zeros(1, np.int64), *boundaries]),
    )


def _sums_before(counts: np.ndarray) -> np.ndarray:
    """Sums of all earlier entries, and the whole sum at the end: [n] -> int64 [n + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
