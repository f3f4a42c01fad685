"""WordPiece as one reads it in the paper: one text, one word, one piece at a time.

This is what the tokenizer means. `kernel.py` computes the same, and hands the rare words it has no
table for to `encode_text`.
"""

from __future__ import annotations

from typing import NamedTuple

from bertsmith.text.normalize import Normalization, words_of
from bertsmith.text.vocabulary import Vocabulary

MAX_WORD = 200  # code points after normalisation; Hugging Face's default is 100


class Piece(NamedTuple):
    """A piece of a text: its id, the raw characters [start, end) it came from, its word."""

    id: int
    start: int
    end: int
    word: int


def encode_text(text: str, vocabulary: Vocabulary, normalization: Normalization) -> list[Piece]:
    """The pieces of one text.

    >>> vocabulary = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"])
    >>> encode_text("Playing?", vocabulary, Normalization())
    [Piece(id=5, start=0, end=4, word=0), Piece(id=6, start=4, end=7, word=0), \
Piece(id=1, start=7, end=8, word=1)]
    """
    pieces = []
    for number, word in enumerate(words_of(text, normalization)):
        begin = 0
        for piece, end in match_pieces(word.characters, vocabulary):
            origins = word.origins[begin:end]
            pieces.append(Piece(piece, min(origins), max(origins) + 1, number))
            begin = end
    return pieces


def match_pieces(word: str, vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """Greedy longest match (google-research/bert `WordpieceTokenizer`): (id, end) of each piece.

    A word with a part that no piece covers, or of more than 200 characters, is one [UNK].
    """
    if len(word) > MAX_WORD:
        return [(vocabulary.unk_id, len(word))]
    pieces: list[tuple[int, int]] = []
    begin, prefix = 0, ""
    while begin < len(word):
        for end in range(min(len(word), begin + vocabulary.longest), begin, -1):
            piece = vocabulary.ids.get(prefix + word[begin:end])
            if piece is not None:
                break
        else:
            return [(vocabulary.unk_id, len(word))]
        pieces.append((piece, end))
        begin, prefix = end, "##"
    return pieces
