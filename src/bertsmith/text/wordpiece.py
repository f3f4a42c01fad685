"""WordPiece: texts in, flat arrays of piece ids and character offsets out.

What the tokenizer means is in `reference.py`; the work is done in `kernel.py`. Here many texts
are joined, cut into groups that fit a processor's cache, given to the threads and put together
again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from bertsmith.text import kernel
from bertsmith.text.character_table import PAGE, CharacterTable
from bertsmith.text.normalize import GOOGLE_CASED, GOOGLE_UNCASED, Normalization
from bertsmith.text.reference import MAX_WORD, encode_text
from bertsmith.text.sequences import Rows, Truncation, rows_of
from bertsmith.text.tokenizer_files import read_tokenizer, write_tokenizer
from bertsmith.text.trie import build_trie
from bertsmith.text.vocabulary import Vocabulary
from bertsmith.text.workers import usable_cores

GROUP = 1 << 17  # characters encoded at a time: 512 KiB of code points
BLOCK = 1 << 12  # symbols between the kernel's two halves: 32 KiB with their places
RARE_WORDS = 1 << 14  # remembered of those that take the reference path
NO_LIMIT = 1 << 40


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
        self._characters = CharacterTable(vocabulary, normalization)
        characters = self._characters.entries, self._characters.expansions
        self._tables = (*characters, *build_trie(vocabulary, self._characters.codes))
        encode_rare = partial(_encode_rare, vocabulary=vocabulary, normalization=normalization)
        self._encode_rare = lru_cache(RARE_WORDS)(encode_rare)
        self._filling = threading.Lock()
        self._rooms: list[Room] = []  # one for each thread that was at work at once

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

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        offsets: bool = True,
        max_pieces: int | None = None,
        threads: int | None = None,
    ) -> Encoded:
        """Encode texts, without special tokens around them.

        A word with a piece missing from the vocabulary, or of more than 200 characters, is one
        [UNK] over the whole word. Lone surrogates are characters no vocabulary holds.

        offsets     also say where each piece stands; False: `offsets` and `word_ids` have no rows
        max_pieces  keep only the first pieces of each text, and do not read on
        threads     at most this many; None: as many as there are cores, for large batches

        Errors: ValueError for a text that is not a `str`, with its place in the batch.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one string: encode_batch takes a list of texts")
        if max_pieces is not None and max_pieces < 0:
            raise ValueError(f"max_pieces = {max_pieces}: expected 0 or more")
        texts = texts if isinstance(texts, list) else list(texts)
        limit = NO_LIMIT if max_pieces is None else max_pieces
        try:
            starts = np.zeros(len(texts) + 1, np.int64)  # of the texts, a space after each
            np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1, out=starts[1:])
            if starts[-1] <= GROUP:
                return self._encode_group(texts, starts, offsets, limit)
            threads = usable_cores() if threads is None else threads

            def encode(group: tuple[list[str], np.ndarray]) -> Encoded:
                return self._encode_group(*group, offsets=offsets, limit=limit)

            groups = _groups(texts, starts)
            if threads == 1:
                return _concatenate([encode(group) for group in groups], map)
            with ThreadPoolExecutor(threads) as pool:
                return _concatenate(list(pool.map(encode, groups)), pool.map)
        except TypeError:
            for k, text in enumerate(texts):
                if not isinstance(text, str):
                    raise ValueError(
                        f"text {k} of the batch is {type(text).__name__}, not str: "
                        "decode bytes and drop missing values first"
                    ) from None
            raise

    def rows(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        max_length: int | None = None,
        truncation: Truncation = "longest_first",
        offsets: bool = True,
    ) -> Rows:
        """[CLS] text [SEP], or [CLS] text [SEP] second text [SEP], cut to `max_length` tokens.

        >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
        >>> rows = Tokenizer(Vocabulary(pieces)).rows(["playing", "play"], ["!", "play!"])
        >>> rows.padded(pad_id=0).input_ids
        array([[2, 5, 6, 3, 7, 3],
               [2, 5, 3, 5, 7, 3]], dtype=int32)

        Errors: see `rows_of`.
        """
        most = None if max_length is None else max(max_length, 0)  # more is never kept
        first = self.encode_batch(texts, offsets=offsets, max_pieces=most)
        second = None
        if pairs is not None:
            second = self.encode_batch(pairs, offsets=offsets, max_pieces=most)
        return rows_of(first, second, self.vocabulary, max_length=max_length, truncation=truncation)

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
        stripped = self.normalization.strip_accents == "all"
        return unicodedata.normalize("NFC", text) if stripped else text

    def _encode_group(
        self, texts: list[str], starts: np.ndarray, offsets: bool, limit: int
    ) -> Encoded:
        joined = " ".join([*texts, ""])
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        boundaries, state = np.zeros(len(starts), np.int64), np.zeros(5, np.int64)
        try:
            room = self._rooms.pop()
        except IndexError:  # more threads than ever before
            room = Room()
        while need := kernel.encode(
            codes, starts, self._tables, limit, room.block, room.result[offsets], boundaries, state
        ):
            if need == kernel.NEEDS_PAGES:
                with self._filling:
                    self._characters.fill(np.unique(codes // PAGE))
            elif need == kernel.NEEDS_REFERENCE:
                self._encode_unit(joined, starts, room, state)
            elif need == kernel.NEEDS_SYMBOLS:
                room.grow_block()
            else:
                room.grow_result()
        ids, places, word_ids = (part[: boundaries[-1]].copy() for part in room.result[offsets])
        if not room.grown:  # what a huge text took is given back
            self._rooms.append(room)
        return Encoded(ids, places, word_ids, boundaries)

    def _encode_unit(self, joined: str, starts: np.ndarray, room: Room, state: np.ndarray) -> None:
        """Encode the unit at `state` by the reference code, and step over it."""
        text, begin, count, words, end = state.tolist()
        remembers = end - begin <= MAX_WORD
        encode_rare = self._encode_rare if remembers else self._encode_rare.__wrapped__
        pieces = encode_rare(joined[begin:end])
        after = count + len(pieces)
        while after > len(room.result[True][0]):
            room.grow_result()
        if len(pieces):
            ids, offsets, word_ids = room.result[True]
            ids[count:after] = pieces[:, 0]
            offsets[count:after] = pieces[:, 1:3] + (begin - starts[text])
            word_ids[count:after] = pieces[:, 3] + words
            words += int(pieces[-1, 3]) + 1
        state[:] = text, end, after, words, 0


class Room:
    """Where the kernel writes. It is kept between calls: fresh memory is slow at first touch.

    block   int32 [S] and [S]: symbols and their places
    result  ids int32 [R], offsets int32 [R, 2], word_ids int32 [R]; under False the last two
            without rows, which are not written
    """

    def __init__(self):
        self.grown = False
        self.block = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
        self._use(
            np.empty(GROUP, np.int32), np.empty((GROUP, 2), np.int32), np.empty(GROUP, np.int32)
        )

    def _use(self, ids: np.ndarray, offsets: np.ndarray, word_ids: np.ndarray) -> None:
        self.result = {
            True: (ids, offsets, word_ids),
            False: (ids, offsets[:0], word_ids[:0]),
        }

    def grow_block(self) -> None:
        """Twice the room for symbols."""
        self.grown, size = True, 2 * len(self.block[0])
        self.block = np.empty(size, np.int32), np.empty(size, np.int32)

    def grow_result(self) -> None:
        """Twice the room for pieces, with those written so far."""
        self.grown = True
        ids, offsets, word_ids = self.result[True]
        self._use(_doubled(ids), _doubled(offsets), _doubled(word_ids))


def _doubled(array: np.ndarray) -> np.ndarray:
    return np.concatenate((array, np.empty_like(array)))


def _encode_rare(text: str, vocabulary: Vocabulary, normalization: Normalization) -> np.ndarray:
    """The reference's pieces, int64 [T, 4]: id, start, end, word."""
    return np.array(encode_text(text, vocabulary, normalization), np.int64).reshape(-1, 4)


def _groups(texts: list[str], starts: np.ndarray) -> list[tuple[list[str], np.ndarray]]:
    """Consecutive texts of about `GROUP` characters together, and where they begin in these."""
    cuts = np.searchsorted(starts[1:], np.arange(GROUP, starts[-1], GROUP)) + 1
    ends = np.unique(np.append(cuts, len(texts))).tolist()
    return [
        (texts[begin:end], starts[begin : end + 1] - starts[begin])
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def _fingerprint(vocabulary: Vocabulary, normalization: Normalization) -> str:
    """SHA-256 of all that decides which pieces a text becomes."""
    strips = {"all": True, "none": False}.get(normalization.strip_accents, "latin")
    settings = [vocabulary.fingerprint, normalization.lowercase, strips, normalization.split_cjk]
    if normalization.unicode != "none":
        settings.append(normalization.unicode)
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _concatenate(parts: Sequence[Encoded], apply: Callable) -> Encoded:
    """The parts one after the other; `apply` is `map`, or a pool's, whose threads share the work."""
    sums = np.cumsum([part.boundaries[-1] for part in parts])
    boundaries = [parts[0].boundaries]
    boundaries += [p.boundaries[1:] + before for p, before in zip(parts[1:], sums, strict=False)]
    ids, offsets, word_ids, boundaries = apply(
        np.concatenate,
        (
            [part.ids for part in parts],
            [part.offsets for part in parts],
            [part.word_ids for part in parts],
            boundaries,
        ),
    )
    return Encoded(ids, offsets, word_ids, boundaries)
