"""WordPiece as one reads it in the paper: one text, one word, one piece at a time.

`Vocabulary` is the list of pieces a model knows; `encode_text` defines the tokenizer. `kernel.py`
computes the same, and leaves the rare words it has no table for to `encode_text`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from bertsmith.base.files import write_text
from bertsmith.text.tokenizer.normalize import Normalization, split_words

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD = 200  # code points after normalization; Hugging Face's default is 100
# GPT's, before a text, between two and after the last: the last three pieces of its vocabulary, met
# at fine-tuning only (Radford et al. 2018)
BORDERS = ("_start_", "_delimiter_", "_classify_")
SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be written as UTF-8


class Vocabulary:
    """Pieces and their ids; immutable.

    pieces        all pieces in the order of their ids
    ids           piece -> id; of a piece listed twice the later id (as `load_vocab` in
                  google-research/bert `tokenization.py`)
    continuation  bool [V], true where a piece continues a word ("##ing")
    longest       characters of the longest piece, "##" included
    fingerprint   SHA-256 of the pieces, hexadecimal, by which stores and checkpoints are matched
    borders       ids of what stands before a text, between two texts and after the last; None: it
                  has none yet
    left_to_right True where these are GPT's: its model reads a word's end last

    >>> vocabulary = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"])
    >>> len(vocabulary), vocabulary.mask_id, vocabulary.ids["##ing"]
    (7, 4, 6)

    Errors: ValueError when a special token is missing or a piece cannot be a line of `vocab.txt`.
    """

    def __init__(self, pieces: Sequence[str]):
        for number, piece in enumerate(pieces):
            surrogate = not piece.isascii() and SURROGATE.search(piece)
            if piece != piece.strip() or "\n" in piece or surrogate:
                fault = f"piece {number}, {piece!r}, cannot be a line of vocab.txt"
                hint = "take away white space around it, line breaks and lone surrogates"
                raise ValueError(f"{fault}: {hint}")
        self._number(pieces)
        if missing := [token for token in SPECIAL if token not in self.ids]:
            fault = f"the vocabulary of {len(self.pieces):,} pieces lacks {', '.join(missing)}"
            raise ValueError(f"{fault}: BERT needs each of its five special tokens on its own line")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            self.ids[token] for token in SPECIAL
        )
        self._surround((self.cls_id, self.sep_id, self.sep_id))

    def _number(self, pieces: Sequence[str]) -> None:
        self.pieces = tuple(pieces)
        self.ids = dict(zip(self.pieces, range(len(self.pieces)), strict=True))
        self.continuation = np.array([piece[:2] == "##" for piece in self.pieces])
        self.continuation.flags.writeable = False
        self.longest = max(map(len, self.pieces), default=0)
        self.fingerprint = hashlib.sha256("\n".join(self.pieces).encode()).hexdigest()

    def _surround(self, borders: tuple[int, int, int] | None) -> None:
        """Put these around texts, or GPT's pieces where it has them."""
        self.left_to_right = self.pieces[-3:] == BORDERS
        if self.left_to_right:
            size = len(self)
            borders = self.cls_id, _, self.sep_id = size - 3, size - 2, size - 1
        self.borders = borders

    def with_borders(self) -> Self:
        """The same pieces, and GPT's three where they lack."""
        return self if self.left_to_right else type(self)([*self.pieces, *BORDERS])

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def read(cls, path: Path | str) -> Vocabulary:
        """Read a `vocab.txt`: one piece a line, white space around it dropped.

        Errors: FileNotFoundError; ValueError when it is not UTF-8 or lacks a special token.
        """
        data = Path(path).read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{path}:{line}: not UTF-8 text: save it as UTF-8") from error
        # Only "\n" ends a line: pieces may hold characters that str.splitlines would split at.
        lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n") if text else []
        try:
            return cls(list(map(str.strip, lines)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def write(self, path: Path | str) -> None:
        """Write `vocab.txt` atomically."""
        write_text(Path(path), "".join(piece + "\n" for piece in self.pieces))


class Piece(NamedTuple):
    """A piece of a text: its id, the raw characters [start, end) it came from, its word."""

    id: int
    start: int
    end: int
    word: int


def encode_text(text: str, vocabulary: Vocabulary, normalization: Normalization) -> list[Piece]:
    """The pieces of one text.

    >>> vocabulary = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"])
    >>> [tuple(piece) for piece in encode_text("Playing?", vocabulary, Normalization())]
    [(5, 0, 4, 0), (6, 4, 7, 0), (1, 7, 8, 1)]
    """
    pieces = []
    for number, word in enumerate(split_words(text, normalization)):
        begin = 0
        for piece, end in match_pieces(word.characters, vocabulary):
            origins = word.origins[begin:end]
            pieces.append(Piece(piece, min(origins), max(origins) + 1, number))
            begin = end
    return pieces


def match_pieces(word: str, vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """Id and end of each piece of a word; one [UNK] if none cover it, or over 200 characters."""
    pieces = cut_word(word, vocabulary.ids, vocabulary.longest) if len(word) <= MAX_WORD else []
    if word and not pieces:
        return [(vocabulary.unk_id, len(word))]
    lengths = (len(piece) - 2 * (k > 0) for k, piece in enumerate(pieces))
    return list(zip(map(vocabulary.ids.__getitem__, pieces), accumulate(lengths), strict=True))


def cut_word(word: str, known: Container[str], longest: int, *, inside: bool = False) -> list[str]:
    """Greedy longest match (google-research/bert `WordpieceTokenizer`) with the known pieces.

    Returns no piece for a word with a part that none covers. `longest`: length of the longest
    piece, "##" included. `inside`: the first piece continues a word, too.
    """
    pieces, begin, prefix = [], 0, "##" if inside else ""
    while begin < len(word):
        for end in range(min(len(word), begin + longest), begin, -1):
            if (piece := prefix + word[begin:end]) in known:
                break
        else:
            return []
        pieces.append(piece)
        begin, prefix = end, "##"
    return pieces
