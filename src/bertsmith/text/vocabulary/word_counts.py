"""Counts of the words of a text, in bounded memory and in several processes.

A *segment* is a run of characters that no rule of normalization looks beyond: between white space,
and between ideographs where these are set apart. Compiled loops cut each block of text into its
distinct segments, far fewer than words in all. A *plain* segment, as most are, holds only
characters that become one other, or stay, whatever their neighbours; it is cut into words right
there. Any other is normalized by `split_words`, once.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.base.processes import map_in_order
from bertsmith.base.terminal import Progress
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.normalize import (
    IDEOGRAPH,
    WHITE_SPACE,
    Normalization,
    is_punctuation,
    second_characters,
    split_words,
)
from bertsmith.text.tokenizer.wordpiece import MAX_WORD

BLOCK = 1 << 22  # characters counted at a time, by one process
MAX_LETTERS = 10_000_000  # of all distinct words kept: 1 GB at most while pieces are learned
MAX_REMEMBERED = 1 << 22  # characters of all segments whose words a process remembers
EXPECTED = "give a list of texts, or what `read_documents` gives of files"

NUM_CODES = 0x110000
PLAIN_LIMIT = 0x2100  # scripts from Latin to Georgian, punctuation; further ones are seldom plain
OTHER, SPACE, APART, LETTER, MARK = range(5)  # kinds of characters; the last two are plain
START, LENGTH, COUNT, PLAIN, HASH = range(5)  # columns of `found`
OFFSET, PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # of the hash FNV-1a


def count_words(
    documents: Iterable[Document | str], normalization: Normalization, workers: int = 1
) -> dict[str, int]:
    """Count the normalized words of documents; words of more than 200 characters are left out.

    When the distinct words together grow beyond ten million characters, the rarest so far are
    forgotten, down to half of that. The result does not depend on the number of workers.

    Errors: those of the documents; OSError when a worker was killed.

    >>> count_words(["The cat, the hat."], Normalization())
    {'the': 2, 'cat': 1, ',': 1, 'hat': 1, '.': 1}
    """
    if workers < 1:
        raise ValueError(f"`workers={workers}`: must be at least 1")
    if isinstance(documents, str):
        raise ValueError(f"documents: {documents!r:.60} is one string: {EXPECTED}")
    words: dict[str, int] = {}
    letters = 0
    blocks = ((None, block) for block in _blocks(documents))
    with (
        Progress("counting words", unit="M characters", scale=1e6) as progress,
        closing(map_in_order(_BlockCounter, (normalization,), blocks, workers)) as results,
    ):
        for _, (characters, counts) in results:
            if letters > MAX_LETTERS:
                words = _without_rare(words, MAX_LETTERS // 2)
                letters = sum(map(len, words))
            letters += sum(len(word) for word in counts if word not in words)
            for word, count in counts.items():
                words[word] = words.get(word, 0) + count
            progress.update(characters)
    return words


def _without_rare(words: dict[str, int], max_letters: int) -> dict[str, int]:
    """The most frequent words, of at most `max_letters` characters together."""
    letters: Counter[int] = Counter()
    for word, count in words.items():
        letters[count] += len(word)
    kept, dropped = 0, 0  # dropped: the highest count of a word that is forgotten
    for dropped in sorted(letters, reverse=True):
        kept += letters[dropped]
        if kept > max_letters:
            break
    return {word: count for word, count in words.items() if count > dropped}


def _blocks(documents: Iterable[Document | str]) -> Iterator[str]:
    """Lines of text, gathered to about `BLOCK` characters."""
    lines, size = [], 0
    for document in documents:
        if not isinstance(document, str | Document):
            raise ValueError(f"documents: {document!r:.60} is no text (str): {EXPECTED}")
        for line in [document] if isinstance(document, str) else document.lines:
            lines.append(line)
            size += len(line)
            if size >= BLOCK:
                yield "\n".join(lines)
                lines, size = [], 0
    if lines:
        yield "\n".join(lines)


class _BlockCounter:
    """Counts the words of a block; remembers those of the segments that it normalized."""

    def __init__(self, normalization: Normalization):
        self._normalization = normalization
        self._known: dict[str, list[str]] = {}
        self._size = 0  # characters of what is known

    def __call__(self, text: str) -> tuple[int, dict[str, int]]:
        """Return the characters of a block and the counts of its words."""
        codes = np.frombuffer(bytearray(text, "utf-32-le", "surrogatepass"), np.uint32)
        found = _count(codes, *_tables(self._normalization))
        replaced = codes.tobytes().decode("utf-32-le", "surrogatepass")
        words: dict[str, int] = {}
        for start, length, count, plain in found[:, :HASH].tolist():
            segment = replaced[start : start + length]
            for word in [segment] if plain else self._words(segment):
                if len(word) <= MAX_WORD:
                    words[word] = words.get(word, 0) + count
        return len(text), words

    def _words(self, segment: str) -> list[str]:
        if segment not in self._known:
            if self._size > MAX_REMEMBERED:
                self._known.clear()
                self._size = 0
            self._known[segment] = [w.characters for w in split_words(segment, self._normalization)]
            self._size += len(segment)
        return self._known[segment]


@functools.cache
def _tables(normalization: Normalization) -> tuple[np.ndarray, np.ndarray]:
    """The kind of every code point, uint8 [1,114,112], and what plain ones become, uint32."""
    kinds, becomes = np.full(NUM_CODES, OTHER, np.uint8), np.zeros(PLAIN_LIMIT, np.uint32)
    for code in range(PLAIN_LIMIT):
        if character := _becomes(chr(code), normalization):
            kinds[code] = MARK if is_punctuation(character) else LETTER
            becomes[code] = ord(character)
    characters = "".join(map(chr, range(NUM_CODES)))
    for run in re.finditer(f"[{WHITE_SPACE}]+", characters):
        kinds[slice(*run.span())] = SPACE
    for run in re.finditer(f"{IDEOGRAPH.pattern}+", characters) if normalization.split_cjk else ():
        kinds[slice(*run.span())] = APART
    return kinds, becomes


def _becomes(character: str, normalization: Normalization) -> str | None:
    """The one character that a character becomes; None for several, or if neighbours count."""
    one = "".join(word.characters for word in split_words(character, normalization))
    composes = normalization.unicode != "none"
    depends = (
        len(one) != 1
        or character == "\N{GREEK CAPITAL LETTER SIGMA}"  # may be a final one
        or unicodedata.category(character) == "Mn"
        or unicodedata.combining(character) != 0
        or len(unicodedata.normalize("NFKC", character)) != 1
        or (composes and not second_characters().isdisjoint((character, one)))  # NFC joins them
    )
    return None if depends else one


@compiled
def _count(codes, kinds, becomes):
    """The distinct segments: int64 [n, 5]. Plain characters in `codes` are replaced."""
    found, num_found = np.empty((1024, 5), np.int64), 0
    buckets = np.full(4 * len(found), -1, np.int32)
    begin = 0
    while begin < len(codes):
        kind = kinds[codes[begin]]
        end = begin + 1
        plain = kind >= LETTER
        if kind != SPACE and kind != APART:
            while end < len(codes) and kinds[codes[end]] not in (SPACE, APART):
                plain = plain and kinds[codes[end]] >= LETTER
                end += 1
        while begin < end and kind != SPACE:  # a plain segment has several parts
            stop = _end_of_word(codes, kinds, becomes, begin, end) if plain else end
            hashed = _hash(codes, begin, stop)
            bucket = _bucket(codes, found, buckets, hashed, begin, stop - begin)
            if buckets[bucket] < 0:
                buckets[bucket] = num_found
                found[num_found, START], found[num_found, LENGTH] = begin, stop - begin
                found[num_found, COUNT], found[num_found, PLAIN] = 0, plain
                found[num_found, HASH] = hashed
                num_found += 1
            found[buckets[bucket], COUNT] += 1
            if num_found == len(found):
                found = np.concatenate((found, np.empty_like(found)))
                buckets = _hash_all(codes, found, num_found)
            begin = stop
        begin = end
    return found[:num_found]


@compiled
def _end_of_word(codes, kinds, becomes, begin, end):
    """End of the word of a plain segment; its characters are replaced on the way."""
    for k in range(begin, end):
        mark = kinds[codes[k]] == MARK
        if mark and k > begin:
            return k
        codes[k] = becomes[codes[k]]
        if mark:
            return k + 1
    return end


@compiled
def _hash(codes, begin, end):
    value = OFFSET
    for k in range(begin, end):
        value = (value ^ np.uint64(codes[k])) * PRIME
    return np.int64(value ^ value >> np.uint64(32))


@compiled
def _bucket(codes, found, buckets, hashed, start, length):
    """The bucket of a segment in the hash table, or the empty one where it belongs."""
    bucket = hashed & (len(buckets) - 1)
    while buckets[bucket] >= 0:
        row = buckets[bucket]
        if found[row, HASH] == hashed and found[row, LENGTH] == length:
            other, k = found[row, START], 0
            while k < length and codes[other + k] == codes[start + k]:
                k += 1
            if k == length:
                break
        bucket = (bucket + 1) & (len(buckets) - 1)
    return bucket


@compiled
def _hash_all(codes, found, num_found):
    buckets = np.full(4 * len(found), -1, np.int32)
    for k in range(num_found):
        hashed, start, length = found[k, HASH], found[k, START], found[k, LENGTH]
        buckets[_bucket(codes, found, buckets, hashed, start, length)] = k
    return buckets
