"""Vocabularies by their pieces or letters, and the plain way to match a word."""

from collections.abc import Container, Iterable

from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary


def vocabulary_of(*pieces: str) -> Vocabulary:
    """The special tokens, then some pieces."""
    return Vocabulary([*SPECIAL, *pieces])


def letter_vocabulary(letters: Iterable[str]) -> Vocabulary:
    """One that knows every letter, where a word begins and inside."""
    letters = list(letters)
    return vocabulary_of(*letters, *("##" + letter for letter in letters))


def longest_match(word: str, pieces: Container[str]) -> list[str] | None:
    """The pieces of a word, each found by trial from its end; None where that fails."""
    row, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        tried = (prefix + word[start:end] for end in range(len(word), start, -1))
        piece = next((piece for piece in tried if piece in pieces), None)
        if piece is None:
            return None
        row.append(piece)
        start += len(piece) - len(prefix)
    return row
