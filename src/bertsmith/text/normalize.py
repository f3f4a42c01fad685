"""From raw text to words: the clean-up of google-research/bert `tokenization.py`, with origins.

Everything here works on one text and is written to be read; `wordpiece.py` calls it once for each
distinct stretch between white space. Beside every character goes its origin, the index of the
character of the raw text it came from, so that a word can be found again in the original.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Where str.split() cuts after control characters were dropped: tab, newline, return, the
# category Zs, and the line and paragraph separators.
WHITE_SPACE = "\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CHUNK = re.compile(f"[^{WHITE_SPACE}]+")
"""A stretch between white space: no rule below looks past its ends."""

# `_is_chinese_char`: the ideographs, neither Hangul nor Kana, which are written with spaces or are
# split by the vocabulary.
_IDEOGRAPH = re.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)


@dataclass(frozen=True)
class Normalization:
    """How raw text becomes words.

    lowercase      lower-case every word
    strip_accents  decompose (NFD) and drop combining marks; None: as `lowercase`, which is BERT's
                   rule. Stripping also takes Hangul apart and the voicing marks off Kana, as the
                   released uncased models expect; train with False for Korean or Japanese.
    split_cjk      every ideograph is a word of its own
    """

    lowercase: bool = True
    strip_accents: bool | None = None
    split_cjk: bool = True

    @property
    def strips(self) -> bool:
        """Whether accents are stripped, the default resolved."""
        return self.lowercase if self.strip_accents is None else self.strip_accents


class Word(NamedTuple):
    """A run of normalised characters and, for each, its index in the raw text."""

    characters: str
    origins: list[int]


def words_of(text: str, normalization: Normalization) -> list[Word]:
    """The words of a text: cleaned, split, lower-cased, stripped, punctuation set apart.

    >>> [word.characters for word in words_of("Caf\u00e9-au lait\u200b!", Normalization())]
    ['cafe', '-', 'au', 'lait', '!']
    >>> words_of("a\u00ad\u00c9", Normalization())
    [Word(characters='ae', origins=[0, 2])]
    """
    words = []
    for chunk in CHUNK.finditer(text):
        for word in _clean(chunk.group(), chunk.start(), normalization.split_cjk):
            if normalization.lowercase:
                word = _lower(word)
            if normalization.strips:
                word = _strip_accents(word)
            words.extend(_split_punctuation(word))
    return words


def is_dropped(character: str) -> bool:
    """Whether clean-up removes a character: NUL, U+FFFD, categories Cc and Cf.

    U+0085 and the form feed are of category Cc, so they join their neighbours, never split them.
    """
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf")


def is_punctuation(character: str) -> bool:
    """ASCII signs, also those Unicode calls symbols ($ + < = > ^ ` | ~), and every category P*."""
    if character < "\x80":
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character)[0] == "P"


def _clean(chunk: str, start: int, split_cjk: bool) -> Iterator[Word]:
    """Drop control characters from a chunk and set ideographs apart."""
    kept = [
        (character, start + i) for i, character in enumerate(chunk) if not is_dropped(character)
    ]
    characters = "".join(character for character, _ in kept)
    origins = [origin for _, origin in kept]
    begin = 0
    if split_cjk:
        for match in _IDEOGRAPH.finditer(characters):
            yield Word(characters[begin : match.start()], origins[begin : match.start()])
            begin = match.end()
            yield Word(match.group(), origins[match.start() : begin])
    yield Word(characters[begin:], origins[begin:])


def _lower(word: Word) -> Word:
    """Lower-case a whole word: the final sigma depends on its neighbours.

    Only the length is asked of single characters; U+0130 becomes two.
    """
    origins = [
        origin
        for character, origin in zip(word.characters, word.origins, strict=True)
        for _ in character.lower()
    ]
    return Word(word.characters.lower(), origins)


def _strip_accents(word: Word) -> Word:
    """NFD, then drop category Mn.

    Characters are decomposed one by one to keep their origins; what NFD of the whole word does
    beyond that is to sort each run of combining characters by class.
    """
    if word.characters.isascii():
        return word
    kept: list[tuple[str, int]] = []
    run: list[tuple[str, int]] = []
    for character, origin in zip(word.characters, word.origins, strict=True):
        for part in unicodedata.normalize("NFD", character):
            if unicodedata.combining(part) == 0:
                kept += sorted(run, key=_combining_class)
                run.clear()
                kept.append((part, origin))
            else:
                run.append((part, origin))
    kept += sorted(run, key=_combining_class)
    kept = [(part, origin) for part, origin in kept if unicodedata.category(part) != "Mn"]
    return Word("".join(part for part, _ in kept), [origin for _, origin in kept])


def _combining_class(part_and_origin: tuple[str, int]) -> int:
    return unicodedata.combining(part_and_origin[0])


def _split_punctuation(word: Word) -> Iterator[Word]:
    """Every punctuation character is a word of its own; empty words vanish."""
    begin = 0
    for i, character in enumerate(word.characters):
        if is_punctuation(character):
            if begin < i:
                yield Word(word.characters[begin:i], word.origins[begin:i])
            yield Word(character, word.origins[i : i + 1])
            begin = i + 1
    if begin < len(word.characters):
        yield Word(word.characters[begin:], word.origins[begin:])
