"""Extend a vocabulary by the pieces that shorten a text most.

A candidate joins neighbouring pieces of a word: a whole word, the start of one, or a part inside it
("##..."). The one that saves most is added, the words that hold it are cut anew by greedy longest
match, and so are the savings of all candidates in these words: once "iterable" is a piece,
"iter ##able" saves nothing there any more.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary, cut_word

MAX_RUN = 8  # pieces joined at a time; the result may be joined again
_UNUSED = re.compile(r"\[unused(\d+)\]")


class Addition(NamedTuple):
    """A piece to add, and how often the text uses it when all are added."""

    piece: str
    frequency: int


def mine_additions(
    words: Mapping[str, int],
    vocabulary: Vocabulary,
    limit: int,
    *,
    min_frequency: int = 1,
    keep: Sequence[str] = (),
) -> list[Addition]:
    """Choose the pieces that shorten a text most, each with those before it in place.

    words          normalized words and how often each occurs (`count_words`)
    limit          number of pieces to choose; fewer when the text gives no more
    min_frequency  a piece used less often is not chosen, or dropped again when later ones take its
                   place ("htt" once "http" and "https" are pieces)
    keep           pieces added before any is chosen, outside the limit, in this order

    No piece is chosen that would make a known word [UNK]. Words that are [UNK] teach nothing. Equal
    savings go in the order of code points.

    >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "##er", "##able", "##s"]
    >>> words = {"iter": 4, "iterable": 5, "iterables": 2}
    >>> [tuple(addition) for addition in mine_additions(words, Vocabulary(pieces), 2)]
    [('iterable', 7), ('iter', 4)]
    """
    text = _Text(words, vocabulary.pieces)
    for piece in dict.fromkeys(keep):
        if piece not in text.known:
            text.add(piece, text.changes(piece))
    kept = len(text.uses)
    with Progress("words to add", total=limit, unit="pieces") as progress:
        while len(text.uses) - kept < limit and (best := text.best(min_frequency)):
            for piece in sorted(text.add(*best).difference(keep)):
                if text.uses[piece] < min_frequency:
                    text.drop(piece)
            progress.update(done=len(text.uses) - kept)
    return [Addition(piece, uses) for piece, uses in text.uses.items()]


def extended_vocabulary(
    vocabulary: Vocabulary, new: Sequence[str], rows: int, size: int
) -> Vocabulary:
    """Old pieces with their ids, new ones from id `rows` on, [unused] ones elsewhere up to `size`.

    >>> old = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused7]", "it"])
    >>> extended_vocabulary(old, ["iter"], 8, 10).pieces[7:]
    ('[unused8]', 'iter', '[unused9]')
    """
    old = vocabulary.pieces
    numbers = (int(match[1]) for piece in old if (match := _UNUSED.fullmatch(piece)))
    first = 1 + max(numbers, default=-1)
    unused = [f"[unused{first + k}]" for k in range(size - len(old) - len(new))]
    between = rows - len(old)
    return Vocabulary([*old, *unused[:between], *new, *unused[between:]])


def piece_counts(words: Mapping[str, int], vocabulary: Vocabulary) -> np.ndarray:
    """Count the pieces of a text: int64 [V].

    >>> old = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "##er"])
    >>> piece_counts({"iter": 4, "it": 1, "you": 2}, old).tolist()
    [0, 2, 0, 0, 0, 5, 4]
    """
    counts = np.zeros(len(vocabulary), np.int64)
    for word, count in words.items():
        for piece in cut_word(word, vocabulary.ids, vocabulary.longest) or [SPECIAL[1]]:
            counts[vocabulary.ids[piece]] += count
    return counts


def old_pieces(piece: str, vocabulary: Vocabulary) -> list[int]:
    """Ids of the pieces that a vocabulary cuts a new piece into.

    >>> old = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "##er", "##able"])
    >>> old_pieces("iterable", old), old_pieces("##erable", old), old_pieces("xyz", old)
    ([5, 6, 7], [6, 7], [1])
    """
    word, inside = piece.removeprefix("##"), piece.startswith("##")
    cut = cut_word(word, vocabulary.ids, vocabulary.longest, inside=inside)
    return [vocabulary.ids[part] for part in cut] if cut else [vocabulary.unk_id]


Changes = list[tuple[int, list[str]]]  # word number, its pieces then


class _Text:
    """The text's words, each cut into pieces, and what every candidate would save.

    A saving is summed over the runs of pieces that the candidate would replace. Cuts that it
    changes elsewhere (it may end inside another piece) count when its turn comes. The queue holds a
    candidate once, at its entry of `bounds`, which may be too high by then and is put right.
    """

    def __init__(self, words: Mapping[str, int], pieces: Sequence[str]):
        self.known = set(pieces)
        self.longest = max(map(len, pieces))
        self.words = sorted(words)
        self.counts = [words[word] for word in self.words]
        self.rows = [cut_word(word, self.known, self.longest) for word in self.words]
        self.joined = "".join(f"\n{word}" for word in self.words) + "\n"  # to find parts of words
        self.starts = list(accumulate((len(word) + 1 for word in self.words), initial=0))
        self.uses: dict[str, int] = {}  # added piece -> how often the text has it
        self.dropped: set[str] = set()
        self.savings: dict[str, int] = {}
        self.bounds: dict[str, int] = {}
        self.queue: list[tuple[int, str]] = []
        for number in range(len(self.words)):
            self._count(number, 1)
        for piece, saved in self.savings.items():
            self._push(piece, saved)

    def best(self, min_frequency: int) -> tuple[str, Changes] | None:
        """The candidate that saves most, with its changes; None when none is left."""
        while self.queue:
            bound, piece = heapq.heappop(self.queue)
            if self.bounds.get(piece) != -bound:
                continue
            saved = self.savings[piece]
            if saved < -bound:
                self._push(piece, saved)
                continue
            del self.bounds[piece]
            if piece in self.dropped:
                continue
            changes = self.changes(piece)
            known = [(number, row) for number, row in changes if self.rows[number]]
            saved = sum(self.counts[n] * (len(self.rows[n]) - len(row)) for n, row in known)
            frequency = sum(self.counts[n] * row.count(piece) for n, row in changes)
            harms = not all(row for _, row in known)  # a known word would become [UNK]
            if harms or saved <= 0 or frequency < min_frequency:
                continue
            if not self.queue or saved >= -self.queue[0][0]:
                return piece, changes
            self._push(piece, saved)
        return None

    def changes(self, piece: str) -> Changes:
        """The words that a new piece would cut in another way."""
        self.known.add(piece)  # for a moment
        cuts = self._cuts(piece, max(self.longest, len(piece)))
        self.known.discard(piece)
        return [(number, cut) for number, cut in cuts if cut != self.rows[number]]

    def _cuts(self, piece: str, longest: int) -> Changes:
        """The words with a piece's letters, at their start or, for "##...", anywhere; cut anew."""
        part = piece[2:] if piece.startswith("##") else f"\n{piece}"
        cuts = []
        position = self.joined.find(part)
        while position >= 0:
            number = bisect_right(self.starts, position) - 1
            cuts.append((number, cut_word(self.words[number], self.known, longest)))
            position = self.joined.find(part, self.starts[number + 1])
        return cuts

    def add(self, piece: str, changes: Changes) -> set[str]:
        """Add a piece with its changes; the pieces added before that it takes words from."""
        losing = {part for number, _ in changes for part in self.rows[number] if part in self.uses}
        self.known.add(piece)
        self.longest = max(self.longest, len(piece))
        self.uses[piece] = 0
        self._apply(changes)
        return losing

    def drop(self, piece: str) -> None:
        """Take an added piece out again, for good."""
        self.known.discard(piece)
        self._apply(self._cuts(piece, self.longest))
        del self.uses[piece]
        self.dropped.add(piece)

    def _apply(self, changes: Changes) -> None:
        touched: set[str] = set()
        for number, row in changes:
            self._count(number, -1)
            self.rows[number] = row
            touched.update(self._count(number, 1))
        for candidate in touched:
            if self.savings[candidate] > self.bounds.get(candidate, 0):
                self._push(candidate, self.savings[candidate])

    def _count(self, number: int, sign: int) -> set[str]:
        """Add a word to uses and savings, or subtract it; its candidates."""
        row, count = self.rows[number], self.counts[number]
        for piece in row:
            if piece in self.uses:
                self.uses[piece] += sign * count
        candidates = set()
        for first in range(len(row) - 1):
            joined = row[first]
            for saved, part in enumerate(row[first + 1 : first + MAX_RUN], start=1):
                joined += part[2:]
                candidates.add(joined)
                self.savings[joined] = self.savings.get(joined, 0) + sign * saved * count
        return candidates

    def _push(self, piece: str, saved: int) -> None:
        self.bounds[piece] = saved
        if saved > 0:
            heapq.heappush(self.queue, (-saved, piece))
