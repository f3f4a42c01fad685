"""Sentences of running text, by rules.

For English, German and other languages that set a space after a stop, whatever their letters, and
for the full stops of Chinese, Japanese and Korean. Every mark that may end a sentence is examined
once, with bounded text on both sides, so the time is linear in the length. Most marks follow an
ordinary word and precede white space and a capital; they are decided first, and cheaply.
"""

from __future__ import annotations

import re

# Of Latin, Greek, Cyrillic, Indian languages, Urdu, Arabic, Armenian, Amharic, Burmese and Khmer.
SPACED_STOPS = ".!?…।॥۔؟։።፧။។"
CJK_STOPS = "。！？．｡"
# Quotes close in one language and open in another (English “so”, German „so“, »so«, French «so»);
# the white space beside them decides.
QUOTES = "\"'“”‘’«»‹›＂"
CLOSERS = QUOTES + ")]}）」』】》〉］｣"
OPENERS = QUOTES + "([{„‚¿¡*_–—-（「『【《〈［｢"

# A stop with all stops and closing marks after it, the white space after them and the start of the
# next word. Possessive: a million dots are one match. One class of characters comes first, for
# which `re` searches fastest. After a full stop of CJK, which needs no space, “ always opens.
_STOPS = SPACED_STOPS + CJK_STOPS
_END = re.compile(
    f"[{_STOPS}](?:(?<=[{SPACED_STOPS}])[{_STOPS}{re.escape(CLOSERS)}]*+"
    f"|[{_STOPS}{re.escape(CLOSERS.translate(dict.fromkeys(map(ord, '“‘«‹'))))}]*+)"
    r"(?:\s»(?=\s|\Z))?+(\s*+)"  # French: « Oui. »
    f"(?=[{re.escape(OPENERS)}\\s]{{0,8}}(\\w{{0,24}}))"
)
_ANY_CJK_STOP = frozenset(CJK_STOPS)
_LAST_WORD = re.compile(r"[^\s(\[{\"'“‘„‚«»‹›]*\Z")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]\Z")  # J  e.g  U.S  z.B


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# After these a sentence goes on (lower case, without the last full stop).
_TITLES = _words(
    "mr mrs ms mx dr prof st ste mt ft rev fr sr hon gen col lt maj capt cmdr sgt cpl adm gov sen "
    "rep pres supt mme mlle mm messrs vs v cf viz al approx resp esp incl excl est "
    "hr frau bzw ca vgl inkl exkl sog evtl ggf geb gest allg dt engl"
)
# After these it goes on when a number follows.
_BEFORE_NUMBER = _words(
    "no nos nr fig figs eq eqs sec secs ch chap vol vols p pp pg par art op cap tab ref refs sect "
    "abb abs bd kap ver rev jan feb mar apr jun jul aug sep sept oct nov dec bl"
)
# After these, initials and "U.S." it goes on unless a word follows that often opens a sentence.
_COMPANIES = _words("inc ltd co corp jr bros dept univ assn ave blvd rd")
_OPENING_WORDS = _words(
    "The A An This That These Those It He She They We You I There Here In On At By As If When "
    "While After Before Since But And Or So Yet For Not No Yes His Her Its Their Our My What Who "
    "How Why Where However Then Now All Some Many Most One Der Die Das Ein Eine Er Sie Es Wir Ich "
    "Ihr Dies Diese Dieser Dieses Aber Und Doch Wenn Als Auch Nun Da Dort Im Am Nach"
)
_AFTER_ORDINAL = _words(  # "am 3. Oktober", "im 19. Jahrhundert"
    "Januar Jänner Februar März April Mai Juni Juli August September Oktober November "
    "Dezember Jahrhundert Jahrhunderts Jh Jahrhunderte Klasse Auflage Kapitel"
)
_ABBREVIATIONS = _TITLES | _BEFORE_NUMBER | _COMPANIES
# After a closing bracket these go on with the sentence: Japanese particles, commas.
_CONTINUATIONS = "とっはがをにのもでやへ、，,;:；："


def split_sentences(paragraph: str) -> list[str]:
    """Cut a paragraph into sentences; only the white space between them is lost.

    Closing quotes and brackets stay with their sentence. Where a full stop may end an abbreviation
    the sentence goes on: two joined sentences harm less than half a one.

    >>> split_sentences('Dr. J. R. Smith paid 3.50 (approx. half). "Really?!" he asked. Yes...')
    ['Dr. J. R. Smith paid 3.50 (approx. half).', '"Really?!" he asked.', 'Yes...']
    >>> split_sentences("今日は暑い。「行こう！」と言った。")
    ['今日は暑い。', '「行こう！」と言った。']
    >>> split_sentences("मैं जाता हूँ। वह आता है।")
    ['मैं जाता हूँ।', 'वह आता है।']
    """
    sentences = []
    start = 0
    for match in _END.finditer(paragraph):
        if match.end() < len(paragraph) and _ends_here(paragraph, start, match):
            sentences.append(paragraph[start : match.end()].strip())
            start = match.end()
    if rest := paragraph[start:].strip():
        sentences.append(rest)
    return sentences


def _ends_here(paragraph: str, start: int, match: re.Match[str]) -> bool:
    """True if the sentence from `start` ends with this match, which some text follows."""
    position, end = match.span()
    space, word = match.groups()
    marks = paragraph[position : min(end - len(space), position + 16)]
    has_cjk_stop = not _ANY_CJK_STOP.isdisjoint(marks)
    if not space:
        after = paragraph[end]
        if not has_cjk_stop or after.isdigit() or (after.isascii() and after.isalnum()):
            return False  # 3.14, ．９, example.com
        return paragraph[end - 1] not in CLOSERS or after not in _CONTINUATIONS
    if has_cjk_stop:
        return True
    if not word or word[0].islower():
        return False
    if marks[0] == "॥" and word[0].isdigit():
        return False  # the number of a verse, ॥ १ ॥
    if marks[0] != "." or (len(marks) > 1 and marks[1] in SPACED_STOPS):
        return True
    near = paragraph[max(start, position - 24) : position]
    before = near.rpartition(" ")[2]
    if len(before) > 1 and before.isalpha() and before.lower() not in _ABBREVIATIONS:
        return True  # an ordinary word
    before = _LAST_WORD.search(near)[0]  # type: ignore[index]
    if len(marks) > 1 and not _INITIALS.match(before):
        return True
    return _full_stop_ends(before, word, at_start=position - start == len(before))


def _full_stop_ends(before: str, after: str, *, at_start: bool) -> bool:
    """True if a full stop between two words ends a sentence."""
    lower = before.lower()
    if lower in _TITLES:
        return False
    if before.isdigit():
        if at_start or after[0].isdigit() or "가" <= after[0] <= "힣":
            return False  # "1. A point of a list", "2024. 3. 1. 입니다."
        return len(before) > 2 or after not in _AFTER_ORDINAL
    if lower in _BEFORE_NUMBER and after[0].isdigit():
        return False
    pronoun = before == "I" and not at_start
    if lower in _COMPANIES or (_INITIALS.match(before) and before.isascii() and not pronoun):
        return after in _OPENING_WORDS
    return True
