"""The words of documents as 64-bit hashes, and the hashes of runs of n words.

A word is a run of letters, digits and marks, lower-cased; in scripts that are written without
spaces (Han, Kana, Thai, Lao, Burmese, Khmer) every letter is one. Near duplicates and overlaps are
found by the runs that two documents share, whatever their punctuation and line breaks.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.draws import bits
from bertsmith.text.normalize import IDEOGRAPH

APART = re.compile(
    f"{IDEOGRAPH.pattern}|[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\U00020000-\U0003ffff]"
)
NONE, LETTER, ALONE = range(3)  # kinds of characters
START = np.uint64(0x5851F42D4C957F2D)  # of a word: an empty run has another hash


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [W], the words of all texts, and int64 [D + 1], where each text's words begin.

    >>> words, starts = word_hashes(["The cat, THE CAT", "", "\u732b\u732b"])
    >>> starts.tolist(), bool(words[0] == words[2] != words[1]), bool(words[4] == words[5])
    ([0, 4, 4, 6], True, True)
    """
    lowered = [text.lower() for text in texts]
    lengths = np.array([len(text) for text in lowered], np.int64)
    codes = np.frombuffer("".join(lowered).encode("utf-32-le", "surrogatepass"), np.uint32)
    hashes = np.empty(len(codes), np.uint64)
    starts = np.zeros(len(texts) + 1, np.int64)
    count = _hash_words(codes, np.cumsum(lengths), _kinds(), hashes, starts)
    return hashes[:count], starts


def run_hashes(words: np.ndarray, starts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of `size` words, uint64 [R], and where each text's begin, int64 [D + 1].

    A text of fewer words is one run; one without words has none.

    >>> words, starts = word_hashes(["a b c d", "a b c", "b c d a", "a"])
    >>> runs, starts = run_hashes(words, starts, 3)
    >>> starts.tolist(), bool(runs[0] == runs[2]), bool(runs[1] == runs[3])
    ([0, 2, 3, 5, 6], True, True)
    """
    num_words = np.diff(starts)
    counts = np.where(num_words >= size, num_words - size + 1, num_words > 0)
    run_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    hashes = np.empty(run_starts[-1], np.uint64)
    _hash_runs(words, starts, size, run_starts, hashes)
    return hashes, run_starts


@functools.cache
def _kinds() -> np.ndarray:
    """uint8 [0x110000], NONE between words, LETTER within one, ALONE for a word by itself."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] in "LMN":
            kinds[code] = LETTER
    alone = [m.start() for m in APART.finditer("".join(map(chr, range(sys.maxunicode + 1))))]
    kinds[alone] = np.where(kinds[alone] == LETTER, ALONE, NONE)
    return kinds


@compiled
def _hash_words(codes, ends, kinds, hashes, starts):
    count = begin = 0
    for text in range(len(ends)):
        starts[text] = count
        value, inside = START, False
        for place in range(begin, ends[text]):
            kind = kinds[codes[place]]
            if inside and kind != LETTER:
                hashes[count] = value
                count += 1
                value, inside = START, False
            if kind == ALONE:
                hashes[count] = bits(START, codes[place])
                count += 1
            elif kind == LETTER:
                value, inside = bits(value, codes[place]), True
        if inside:
            hashes[count] = value
            count += 1
        begin = ends[text]
    starts[len(ends)] = count
    return count


@compiled
def _hash_runs(words, starts, size, run_starts, hashes):
    for text in range(len(starts) - 1):
        for run in range(run_starts[text], run_starts[text + 1]):
            begin = starts[text] + run - run_starts[text]
            value = np.uint64(0)
            for place in range(begin, min(begin + size, starts[text + 1])):
                value = bits(value, words[place])
            hashes[run] = value
