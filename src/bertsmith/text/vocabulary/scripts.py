"""Letters of a text that a normalization alters, counted by script.

Stripping accents was meant for English. It also takes Hangul apart, the voicing marks off Kana and
the vowel signs off Indic scripts, and a model never sees these letters again.

Letters and marks (categories L and M) of the composed text (NFC) are counted, however the text was
encoded. Lower-casing is not counted: that is what "uncased" asks for.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from bertsmith.text.tokenizer.normalize import Normalization, split_words

LIMIT = 0.01  # share of altered letters that is worth a warning
MAX_SCRIPTS = 4  # named in a warning


@dataclass(frozen=True)
class ScriptLosses:
    """Letters of one script, and the most frequent alteration: `before` became `after`."""

    script: str
    letters: int
    altered: int
    before: str
    after: str


@dataclass(frozen=True)
class LostLetters:
    """Letters of a text, those altered among them, and the altered scripts, the worst first."""

    letters: int
    altered: int
    scripts: list[ScriptLosses]

    @property
    def fraction(self) -> float:
        return self.altered / self.letters if self.letters else 0.0


class LetterCounts:
    """Counts of the letters of a text, and of each non-spacing mark with its letter.

    No normalization looks at more, so a few thousand counts stand for a text of any length.

    >>> letters = LetterCounts()
    >>> letters.add(["caf\u00e9 caf\u00e9", "ok"])
    >>> found = letters.lost_letters(Normalization())
    >>> found.letters, found.altered, found.scripts[0].script, found.scripts[0].after
    (10, 2, 'Latin', 'e')
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # "e", or "\u0915\u094d" for a mark on its letter

    def add(self, texts: Iterable[str]) -> None:
        # The line break in front is what a mark at the very beginning stands on.
        joined = unicodedata.normalize("NFC", "\n" + "\n".join(texts))
        occurrences = np.bincount(
            np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        )
        marks = ""
        for code in np.flatnonzero(occurrences).tolist():
            category = unicodedata.category(chr(code))
            if category == "Mn":
                marks += chr(code)
            elif category[0] in "LM":
                self.counts[chr(code)] += int(occurrences[code])
        marked = re.findall(f"(.)([{marks}]+)", joined, re.DOTALL) if marks else []
        pairs = Counter(letter + mark for letter, several in marked for mark in several)
        self.counts.update(dict(sorted(pairs.items())))

    def lost_letters(self, normalization: Normalization) -> LostLetters:
        """Count the letters that the normalization alters, lower-casing apart."""
        normalization = replace(normalization, lowercase=False)
        letters: Counter[str] = Counter()
        altered: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for key in sorted(self.counts, key=lambda key: (-self.counts[key], key)):
            script = letter_script(key)
            letters[script] += self.counts[key]
            if not key.isascii() and not _survives(key, normalization):
                altered[script] += self.counts[key]
                examples.setdefault(script, key)
        scripts = []
        for script, count in altered.most_common():
            before = examples[script].strip()
            after = _became(examples[script], normalization)
            if len(after) > len(before):
                after = " ".join(after)  # apart, or a terminal would join it again
            scripts.append(ScriptLosses(script, letters[script], count, before, after))
        return LostLetters(letters.total(), altered.total(), scripts)

    def warning(self, normalization: Normalization) -> str:
        """A line of warning; empty when 1% of the letters or less are altered."""
        found = self.lost_letters(normalization)
        if found.fraction <= LIMIT:
            return ""
        scripts = "; ".join(
            f"{one.script} {one.altered / one.letters:.1%}, {one.before} -> {one.after or '(none)'}"
            for one in found.scripts[:MAX_SCRIPTS]
        )
        hints = []  # settings with each of which the letters survive
        for name, value in (
            ("strip_accents", "latin"),
            ("strip_accents", "none"),
            ("unicode", "none"),
        ):
            if self.lost_letters(replace(normalization, **{name: value})).fraction <= LIMIT:
                hints.append(f"`{name}={value!r}`")
        hint = " or ".join(hints) or "`strip_accents='none'` `unicode='none'`"
        return (
            f"warning: {found.fraction:.1%} of the letters are altered, lower-casing apart "
            f"({scripts}): a vocabulary made with {hint} keeps them"
        )


def lost_letters_warning(lines: Iterable[str], normalization: Normalization) -> str:
    """A line of warning about lines of text, or an empty string."""
    letters = LetterCounts()
    letters.add(lines)
    return letters.warning(normalization)


def letter_script(key: str) -> str:
    """Name the script of a letter, or of a mark on its letter, by their names in Unicode.

    >>> [letter_script(one) for one in ("\u0439", "\ud55c", "e\u0301", "\u0915\u094d")]
    ['Cyrillic', 'Hangul', 'Latin', 'Devanagari']
    """
    script = _script(key[-1])
    return _script(key[0]) if script == "Combining" else script


@functools.cache
def _script(character: str) -> str:
    name = unicodedata.name(character, "other")
    first = name.removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ").partition(" ")[0]
    return "Han" if first == "CJK" else first.capitalize()


def _survives(key: str, normalization: Normalization) -> bool:
    """True if a letter, or a mark on whatever became of its letter, stays as it is."""
    became = _became(key, normalization)
    if len(key) == 1:
        return became == key
    before, after = (unicodedata.normalize("NFD", text) for text in (key, became))
    return after.count(key[1]) >= before.count(key[1])


def _became(key: str, normalization: Normalization) -> str:
    return "".join(word.characters for word in split_words(key, normalization))
