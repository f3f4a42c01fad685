"""One table entry a code point: what the kernel has to do with it.

Entries are made from the running Python's `unicodedata`, through the reference code, a page of 256
code points at a time and only for pages that occur in a text; so nothing is kept on disk that could
belong to another version of Unicode, and a tokenizer is ready at once.

A positive entry is a letter: its code among the characters of the vocabulary, or UNKNOWN_LETTER.
Negative ones end a word: WHITE_SPACE; WORD_BY_ITSELF - a piece's id, for punctuation; IDEOGRAPH -
a piece's id. These three are also the symbols that the kernel makes of a text. What is not so
simple is below RARE, in 32 bits: 1, kind (3), combining class (8), value (20). The class is 0
unless the order of combining characters matters (see `_combining`).
"""

from __future__ import annotations

import sys
import unicodedata

import numpy as np

from bertsmith.text.normalize import (
    CHUNK,
    Normalization,
    is_dropped,
    is_ideograph,
    is_latin,
    is_punctuation,
    second_characters,
    words_of,
)
from bertsmith.text.vocabulary import Vocabulary

PAGE = 256
UNFAMILIAR = 0  # no entry yet: the page must be filled
UNKNOWN_LETTER = 1  # in no piece
WHITE_SPACE = -1
WORD_BY_ITSELF = -2
PIECE_BITS = 20
IDEOGRAPH = WORD_BY_ITSELF - (1 << PIECE_BITS)
RARE = -(1 << 22)
VALUE, KIND_SHIFT, CLASS_SHIFT = (1 << PIECE_BITS) - 1, 28, 20
(
    DROPPED,  # as if it were not there
    REFERENCE,  # depends on its neighbours: the word takes the reference path
    COMBINING,  # a letter, the value its code, that must be in order
    LATIN,  # the same, from which the marks that follow are stripped
    MARK,  # the same, dropped after a Latin letter
    EXPANSION,  # none or several characters, which stand in `expansions` at the value
    LATIN_EXPANSION,
) = range(7)
MOST_CHARACTERS = 8  # that one becomes, and more


class CharacterTable:
    """The entries of a vocabulary and a normalisation.

    codes       character -> code, from 2; the characters of the vocabulary's pieces
    entries     int32 [0x110000], UNFAMILIAR where the page has not been filled
    expansions  int32; at an entry's value stands the number of characters and then each one
    """

    def __init__(self, vocabulary: Vocabulary, normalization: Normalization):
        self.vocabulary = vocabulary
        self.normalization = normalization
        characters = sorted(set("".join(vocabulary.pieces)))
        self.codes = {
            character: code for code, character in enumerate(characters, UNKNOWN_LETTER + 1)
        }
        # Untouched pages of zeros take no memory. Neither array is ever replaced by a larger one,
        # so that a thread may read while another one fills pages: 2^17 leaves room for
        # the 11,172 Hangul syllables and every other character that expands.
        self.entries = np.zeros(sys.maxunicode + 1, np.int32)
        self.expansions = np.zeros(1 << 17, np.int32)
        self.num_expansions = 0
        self.fill(np.zeros(1, np.int64))

    def fill(self, pages: np.ndarray) -> None:
        """Make the entries of pages (code point // 256); those made before stay."""
        for page in pages.tolist():
            start = page * PAGE
            if self.entries[start] == UNFAMILIAR:
                entries = [self._entry(chr(code)) for code in range(start, start + PAGE)]
                self.entries[start : start + PAGE] = entries

    def _entry(self, character: str) -> int:
        normalization = self.normalization
        if not CHUNK.match(character):
            return WHITE_SPACE
        if is_dropped(character):
            return _rare(DROPPED)
        if _needs_neighbours(character, normalization):
            return _rare(REFERENCE)
        becomes = _becomes(character, normalization)
        combining = _combining(character, becomes, normalization)
        if combining < 0:
            return _rare(DROPPED if combining == NEUTRAL else REFERENCE)
        latin = False
        if normalization.strip_accents == "latin":
            if unicodedata.category(character) == "Mn":
                return _rare(MARK, combining, self._code(character))
            latin = is_latin(unicodedata.normalize("NFD", becomes[0])[0])
        if len(becomes) != 1:
            kind = LATIN_EXPANSION if latin else EXPANSION
            return _rare(kind, combining, self._expansion(becomes))
        [one] = becomes
        if normalization.split_cjk and is_ideograph(character):
            return IDEOGRAPH - self._piece(one)
        if is_punctuation(one):
            return WORD_BY_ITSELF - self._piece(one)
        if latin or combining:
            return _rare(LATIN if latin else COMBINING, combining, self._code(one))
        return self._code(one)

    def _code(self, character: str) -> int:
        return self.codes.get(character, UNKNOWN_LETTER)

    def _piece(self, character: str) -> int:
        return self.vocabulary.ids.get(character, self.vocabulary.unk_id)

    def _expansion(self, characters: list[str]) -> int:
        """Write the characters to `expansions` and return the place."""
        values = [
            WORD_BY_ITSELF - self._piece(c) if is_punctuation(c) else self._code(c)
            for c in characters
        ]
        assert len(values) <= MOST_CHARACTERS, characters
        place = self.num_expansions
        self.num_expansions += 1 + len(values)
        self.expansions[place : self.num_expansions] = [len(values), *values]
        return place


def _becomes(character: str, normalization: Normalization) -> list[str]:
    """The characters that the reference makes of one."""
    is_mark = unicodedata.category(character)[0] == "M"
    changes = is_mark or unicodedata.normalize("NFD", character) != character
    if not changes and character.lower() == character:
        return [character]  # for most of them a tenth of the time
    words = words_of(character, normalization)
    return [part for word in words for part in word.characters]


def _rare(kind: int, combining: int = 0, value: int = 0) -> int:
    return -(1 << 31) | kind << KIND_SHIFT | combining << CLASS_SHIFT | value


NEUTRAL, OUT_OF_ORDER = -1, -2


def _combining(character: str, becomes: list[str], normalization: Normalization) -> int:
    """The class by which the kernel watches the order of combining characters.

    With a form of Unicode asked for it is the character's own. Otherwise order matters only when
    all accents are stripped, and then only among the combining characters that stay; those that
    go are `NEUTRAL`: they neither stay nor end a run. What becomes a base and a combining
    character that stays is `OUT_OF_ORDER`, since it cannot be described by one class.
    """
    strips = normalization.strip_accents == "all"
    classes = [unicodedata.combining(c) for c in becomes]
    if strips and any(classes) and len(classes) > 1:
        return OUT_OF_ORDER
    if normalization.unicode != "none":
        return unicodedata.combining(character)
    if not strips:
        return 0
    if becomes:
        return classes[0]  # of several all are 0
    parts = unicodedata.normalize("NFD", character)
    return NEUTRAL if all(map(unicodedata.combining, parts)) else 0


def _needs_neighbours(character: str, normalization: Normalization) -> bool:
    """Whether what becomes of a character cannot be told from it and its combining class."""
    if character == "\u03a3" and normalization.lowercase:
        return True  # a final sigma is written differently
    if normalization.unicode == "none":
        return False
    form = "NFC" if normalization.unicode == "nfc" else "NFKC"
    return character in second_characters() or unicodedata.normalize(form, character) != character
