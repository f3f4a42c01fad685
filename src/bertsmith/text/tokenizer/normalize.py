"""From raw text to words: the clean-up of google-research/bert `tokenization.py`, with origins.

Written to be read, one text at a time; the compiled tokenizer takes its table of characters from
here. Each character has an origin, the index of the raw character it came from, so that a word can
be found again in the raw text.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

# Where str.split() cuts after control characters were dropped: tab, newline, return, category Zs,
# line and paragraph separators.
WHITE_SPACE = "\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CHUNK = re.compile(f"[^{WHITE_SPACE}]+")  # no rule below looks past its ends

# `_is_chinese_char`: ideographs, but neither Hangul nor Kana.
IDEOGRAPH = re.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)


@dataclass(frozen=True)
class Normalization:
    """Independent settings of the way from raw text to words. Errors: ValueError for other values.

    lowercase      lower-case every word
    strip_accents  "all": decompose (NFD) and drop every combining mark, BERT's rule for uncased
                   models, which also takes Hangul apart and the voicing marks off Kana; "latin":
                   drop the marks of Latin letters only; "none"
    unicode        "nfc" or "nfkc": bring the text to this form after clean-up; "none"
    split_cjk      every ideograph is a word of its own
    """

    lowercase: bool = True
    strip_accents: Literal["none", "latin", "all"] = "all"
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    split_cjk: bool = True

    def __post_init__(self):
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known or type(value) is not type(known[0]):  # 1 is no True here
                raise ValueError(f"{name} is {value!r}: known are {', '.join(map(str, known))}")


CHOICES = {
    "lowercase": (True, False),
    "strip_accents": ("none", "latin", "all"),
    "unicode": ("none", "nfc", "nfkc"),
    "split_cjk": (True, False),
}
GOOGLE_UNCASED = Normalization()
GOOGLE_CASED = Normalization(lowercase=False, strip_accents="none")
PRESETS = {
    "google-uncased": GOOGLE_UNCASED,
    "google-cased": GOOGLE_CASED,
    "multilingual": Normalization(strip_accents="none", unicode="nfc"),
}


class Word(NamedTuple):
    """Normalized characters and, for each, its index in the raw text."""

    characters: str
    origins: list[int]


def split_words(text: str, normalization: Normalization) -> list[Word]:
    """The words of a text: cleaned, split, lower-cased, stripped, punctuation set apart.

    >>> [word.characters for word in split_words("Caf\u00e9-au lait\u200b!", Normalization())]
    ['cafe', '-', 'au', 'lait', '!']
    >>> split_words("a\u00ad\u00c9", Normalization())
    [Word(characters='ae', origins=[0, 2])]
    """
    words = []
    for chunk in CHUNK.finditer(text):
        for word in _clean(chunk.group(), chunk.start(), normalization):
            if normalization.lowercase:  # the whole word: a final sigma depends on its neighbours
                lower = [len(character.lower()) for character in word.characters]  # U+0130: two
                origins = [o for o, n in zip(word.origins, lower, strict=True) for _ in range(n)]
                word = Word(word.characters.lower(), origins)
            if normalization.strip_accents == "all":
                word = _strip_accents(word)
            elif normalization.strip_accents == "latin":
                word = _strip_latin_accents(word)
            words.extend(_split_punctuation(word))
    return words


def is_dropped(character: str) -> bool:
    """True for U+FFFD and categories Cc and Cf, also U+0085 and form feed: no white space here."""
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf")


def is_punctuation(character: str) -> bool:
    """True for ASCII signs, also those Unicode calls symbols ($ + < = > ^ ` | ~), and for P*."""
    if character < "\x80":
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character)[0] == "P"


def is_ideograph(character: str) -> bool:
    """True for the Chinese ranges that BERT sets apart."""
    return IDEOGRAPH.match(character) is not None


def is_latin(character: str) -> bool:
    """True for a letter of the Latin script, by its name."""
    return character.isalpha() and "LATIN" in unicodedata.name(character, "").split()


def _clean(chunk: str, start: int, normalization: Normalization) -> Iterator[Word]:
    """Drop control characters from a chunk, bring it to its form of Unicode, cut at ideographs."""
    word = _word([(c, k) for k, c in enumerate(chunk, start) if not is_dropped(c)])
    if normalization.unicode != "none":
        word = _normalize(word, "NFC" if normalization.unicode == "nfc" else "NFKC")
    characters, origins = word
    # NFKC may have made white space of a character that was none.
    for part in CHUNK.finditer(characters):
        begin = part.start()
        if normalization.split_cjk:
            for match in IDEOGRAPH.finditer(characters, begin, part.end()):
                yield Word(characters[begin : match.start()], origins[begin : match.start()])
                begin = match.end()
                yield Word(match.group(), origins[match.start() : begin])
        yield Word(characters[begin : part.end()], origins[begin : part.end()])


def _normalize(word: Word, form: Literal["NFC", "NFKC"]) -> Word:
    """NFC or NFKC, segment by segment, so that origins are known.

    A segment ends before a character that no form joins to its left neighbour. Its characters come
    from the raw ones at the same index in it, those beyond its end from the last.
    """
    if unicodedata.is_normalized(form, word.characters):
        return word
    characters, origins, begin = "", [], 0
    for end in range(1, len(word.characters) + 1):
        if end < len(word.characters) and _joins_before(word.characters[end], form):
            continue
        segment = unicodedata.normalize(form, word.characters[begin:end])
        characters += segment
        origins += [word.origins[min(begin + i, end - 1)] for i in range(len(segment))]
        begin = end
    return Word(characters, origins)


@functools.cache
def _joins_before(character: str, form: Literal["NFC", "NFKC"]) -> bool:
    """True if NFC or NFKC may move or join a character to its left neighbour: if it combines, or
    ends a decomposition, as vowels and final consonants of Hangul and some Indic signs do.
    """
    first = unicodedata.normalize("NFD" if form == "NFC" else "NFKD", character)[0]
    return unicodedata.combining(first) != 0 or first in second_characters()


@functools.cache
def second_characters() -> frozenset[str]:
    """Characters that follow another in a canonical decomposition: NFC may join them to it."""
    jamo = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    characters = map(chr, range(sys.maxunicode + 1))
    pairs = (unicodedata.decomposition(character).split() for character in characters)
    return frozenset(jamo | {chr(int(p[1], 16)) for p in pairs if len(p) == 2 and p[0][0] != "<"})


def _strip_accents(word: Word) -> Word:
    """NFD, character by character to keep origins, and sorted as it does; then drop category Mn."""
    if word.characters.isascii():
        return word
    parts, run = [], 0
    for character, origin in zip(word.characters, word.origins, strict=True):
        for part in unicodedata.normalize("NFD", character):
            combining_class = unicodedata.combining(part)
            run += combining_class == 0  # begins with every other character
            parts.append(((run, combining_class), part, origin))
    parts.sort(key=lambda keyed: keyed[0])
    return _word([(part, at) for _, part, at in parts if unicodedata.category(part) != "Mn"])


def _strip_latin_accents(word: Word) -> Word:
    """Drop the marks (category Mn) on Latin letters."""
    if word.characters.isascii():
        return word
    kept: list[tuple[str, int]] = []
    after_latin = False
    for character, origin in zip(word.characters, word.origins, strict=True):
        parts = unicodedata.normalize("NFD", character)
        if unicodedata.category(character) != "Mn":
            after_latin = is_latin(parts[0])
        if after_latin:
            kept += [(part, origin) for part in parts if unicodedata.category(part) != "Mn"]
        else:
            kept.append((character, origin))
    return _word(kept)


def _word(characters: list[tuple[str, int]]) -> Word:
    return Word("".join(one for one, _ in characters), [origin for _, origin in characters])


def _split_punctuation(word: Word) -> Iterator[Word]:
    """Every punctuation character is a word of its own; empty words vanish."""
    pairs = zip(word.characters, word.origins, strict=True)
    for apart, group in groupby(pairs, lambda pair: is_punctuation(pair[0])):
        run = list(group)
        yield from (_word([pair]) for pair in run) if apart else (_word(run),)
