"""What several tests of the room need."""

from collections.abc import Iterable

from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary


def vocabulary_of(*pieces: str) -> Vocabulary:
    """The special tokens, then some pieces."""
    return Vocabulary([*SPECIAL, *pieces])


def letter_vocabulary(letters: Iterable[str]) -> Vocabulary:
    """One that knows every letter, where a word begins and inside."""
    letters = list(letters)
    return vocabulary_of(*letters, *("##" + letter for letter in letters))
