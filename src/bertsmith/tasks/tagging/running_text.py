r"""Running text, or lists of words from Python -> sentences for a tagger.

Words are parted as in CoNLL-2003 and the Penn Treebank: by blanks, and between blanks

    (Rome, ran)      a sign of punctuation is a word of its own; runs of . - * = _ are one word
    U.S. a.m. J.     dots stay in initials, and in `ABBREVIATIONS` that a word follows
    Corp.'s Mo.-led  a dot with no blank before a comma, a hyphen or 's is an abbreviation's, too
    don't, it's      n't, 's, 'm, 'd, 're, 've and 'll are words of their own
    O'Neil AT&T a-b  ' & . - _ + @ stay between letters or digits
    two- and three   - stays before "and", "or" and "to"
    3.5 1/2 9:30     so do , / : between digits; + or a dot may begin a number
    US$ 5, € 5       $ stays after up to three capitals; currencies are words
    1. Rome          the dot stays after a number that begins the text
    https://a.b/c    an address is one word, without the signs after it
    \u6771\u4eac     every ideograph is a word
    😀👍             a run of emoji or other symbols is a word

Characters that the tokenizer drops (soft hyphens, joiners, marks of direction) part nothing, and no
word begins or ends with one.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.tasks.tagging.schemes import Scheme
from bertsmith.tasks.tagging.sentences import Columns, Sentences, check_words
from bertsmith.text.tokenizer.normalize import is_dropped, is_ideograph, is_punctuation
from bertsmith.text.tokenizer.tokenizer import as_items, as_texts

ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof Rev Jr Sr St Gen Gov Sen Rep Col Capt Lt Maj Sgt Inc Corp Ltd Co Bros vs No "
    "Jan Feb Mar Apr Jun Jul Aug Sept Sep Oct Nov Dec Calif Ala Fla Conn Mass Wash"
)
_DROPPED, _SYMBOL = "\x00", "\x01"
_LETTER = "[0-9A-Za-z]"
_NOT = rf"[nN]'[tT](?!{_LETTER})"
_CLITIC = rf"'(?:[sSmMdD]|re|ve|ll|RE|VE|LL)(?!['-]?{_LETTER})"
_RUN = rf"(?:(?!{_NOT}){_LETTER})+"
_CLOSING = r".,;:!?)\]>'\""  # at the end of an address they are not its own
_INNER = rf"(?!{_CLITIC})[-.&_+@'](?={_LETTER})|(?<=[0-9])[,:/](?=[0-9])"
_WORD = re.compile(
    "|".join(
        [
            rf"(?:https?://|www\.)(?:[^\s\x01\x80{_CLOSING}]++|[{_CLOSING}]++(?![\s\x01\x80]|$))+",
            r"^[0-9]+\.(?=\s)",
            rf"(?:{_LETTER}++-)*(?:[A-Za-z]\.){{2,}}(?:-{_LETTER}+)*(?!{_LETTER})",
            rf"(?:[A-Z]|{'|'.join(ABBREVIATIONS.split())})\.(?=\s+\S)",
            rf"[A-Za-z]++\.(?:(?:-{_LETTER}+)+|(?=,|{_CLITIC}))",
            r"[A-Z]{1,3}\$",
            _NOT,
            _CLITIC,
            rf"(?:\+(?=[0-9])|(?<!\S)\.(?=[0-9]))?{_RUN}(?:(?:{_INNER}){_RUN})*"
            r"(?:-(?=,?\s+(?:and|or|to)\s))?",
            r"([-.*=_\x01])\1*",
            r"\S",
        ]
    )
)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Begin and end of each word in the text, in its order.

    >>> text = "Dr. O'Neil doesn't like Rome, he said."
    >>> [text[begin:end] for begin, end in word_spans(text)]
    ['Dr.', "O'Neil", 'does', "n't", 'like', 'Rome', ',', 'he', 'said', '.']
    """
    plain = text.translate(_STAND_INS)
    skipped = len(plain) - len(plain.lstrip(f" {_DROPPED}"))
    places = [k for k in range(skipped, len(plain)) if plain[k] != _DROPPED]
    words = _WORD.finditer("".join(plain[k] for k in places))
    return [(places[word.start()], places[word.end() - 1] + 1) for word in words]


class _StandIns(dict[int, str]):
    """An ASCII character for each, that parts words as it does; \\x80 where it is alone always."""

    def __missing__(self, code: int) -> str:
        self[code] = found = _stand_in(chr(code))
        return found


def _stand_in(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace():
        return " "
    if is_dropped(character) or "\ufe00" <= character <= "\ufe0f":  # variants of a sign
        return _DROPPED
    if character < "\x80":
        return character
    if character in "\u2018\u2019\u201b\u02bc\u00b4\uff07":
        return "'"
    if character in "\u2010\u2011":
        return "-"
    if category == "So" or "\U0001f3fb" <= character <= "\U0001f3ff":  # colours of skin
        return _SYMBOL
    if category == "Sc":
        return "$"
    if category in ("Sm", "Sk") or is_punctuation(character) or is_ideograph(character):
        return "\x80"
    # letters that are in none of the words above
    return "0" if character.isdecimal() else "Q" if character.isupper() else "q"


_STAND_INS = _StandIns()


def running_text(texts: Sequence[str], scheme: Scheme, source: str) -> Sentences:
    """Sentences without tags: one a text, whose words are found by `word_spans`.

    Errors: ValueError when there is no word in them.
    """
    return check_words(_sentences(texts, list(map(word_spans, texts)), scheme, source))


def given_sentences(given: Any, scheme: Scheme) -> Sentences:
    """The sentences of a text, of texts, or of lists of words, which are joined by blanks.

    Errors: ValueError for anything else.
    """
    items = [given] if isinstance(given, str) else as_items(given, "text")
    if not items or isinstance(items[0], str):
        texts = as_texts(items, "text")
        return _sentences(texts, list(map(word_spans, texts)), scheme, "texts")
    for k, item in enumerate(items):
        if isinstance(item, str):
            raise ValueError(f"text[{k}] is a text, but text[0] is not: give texts, or lists")
    rows = [as_texts(item, f"text[{k}]") for k, item in enumerate(items)]
    spans = []
    for words in rows:
        ends = [end - 1 for end in itertools.accumulate(len(word) + 1 for word in words)]
        spans.append([(end - len(word), end) for word, end in zip(words, ends, strict=True)])
    return _sentences([" ".join(words) for words in rows], spans, scheme, "texts")


def _sentences(
    texts: Sequence[str], spans: list[list[tuple[int, int]]], scheme: Scheme, source: str
) -> Sentences:
    found = Columns()
    for line, (text, words) in enumerate(zip(texts, spans, strict=True), start=1):
        found.add_row([text[begin:end] for begin, end in words], line)
    flat = np.array([span for words in spans for span in words], np.int64).reshape(-1, 2)
    return replace(found.sentences(scheme, source), texts=list(texts), spans=flat)
