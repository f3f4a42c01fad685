"""Figures of vocabularies on a text: pieces per word, coverage, lengths, repeated lines.

`measure` makes one pass over the documents in bounded memory. A word is what the tokenizer takes
for one (a punctuation mark is a word); its length is counted in the raw text, so that vocabularies
of different normalizations can be compared.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.normalize import split_words
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL
from bertsmith.text.vocabulary.scripts import LetterCounts

BATCH = 1 << 20  # bytes of UTF-8 encoded at a time, and the rest of the document they end in
AROUND = 2  # [CLS] and [SEP] count in the length of a sequence
LIMITS = (128, 512)  # pieces a sequence may have: in most of pre-training, and at most
WORD_LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 16, 21])  # where a row begins
SEQUENCE_LENGTHS = np.rint(2 ** np.arange(1, 25, 0.5)).astype(int).tolist()  # 2, 3, 4, 6, 8, 11
MAX_LISTED = 10  # longest words, unknown characters, repeated lines
MAX_LINES = 1 << 20  # distinct lines remembered: about 100 MB
MAX_SHOWN = 80  # characters kept of a repeated line


def measure(
    documents: Iterable[Document],
    tokenizers: Mapping[str, Tokenizer],
    megabytes: float | None = None,
) -> dict[str, Any]:
    """Measure named tokenizers on documents, which are read once, in bounded memory.

    Returns {"text": {...}, "vocabularies": [{...}, ...]}, all of it JSON; docs/reference/formats.md
    explains the keys. `megabytes`: million bytes of UTF-8 after which reading ends with the
    document. No document at all gives figures of 0.
    """
    text = Counter(documents=0, lines=0, characters=0, bytes=0)
    letters, duplicates = LetterCounts(), DuplicateLines()
    sides = [_VocabularyFigures(tokenizer) for tokenizer in tokenizers.values()]
    with Progress("reading", unit="MB", scale=1e6) as progress:
        for batch in _batches(documents, float("inf") if megabytes is None else megabytes * 1e6):
            text.update(
                documents=len(batch.documents),
                lines=len(batch.lines),
                characters=len(batch.codes),
                bytes=batch.bytes,
            )
            duplicates.add(batch.lines)
            letters.add(batch.lines)
            for side in sides:
                side.add(batch)
            progress.update(batch.bytes)
    longest_words = [
        {"characters": len(word), "word": word, "pieces": [side.num_pieces(word) for side in sides]}
        for word in sides[0].longest
    ]
    vocabularies = []
    for name, side in zip(tokenizers, sides, strict=True):
        altered = letters.lost_letters(side.tokenizer.normalization)
        altered_letters = {
            "share": altered.fraction,
            "letters": altered.letters,
            "scripts": [dataclasses.asdict(script) for script in altered.scripts],
            "warning": letters.warning(side.tokenizer.normalization),
        }
        vocabularies.append({"name": name, **side.result(), "altered_letters": altered_letters})
    repeated = {"duplicate_lines": duplicates.result(), "longest_words": longest_words}
    return {"text": {**text, **repeated}, "vocabularies": vocabularies}


class _Batch:
    """Lines of whole documents, of which `documents` has the first line of each."""

    def __init__(self, lines: list[str], documents: list[int], num_bytes: int):
        self.lines, self.documents, self.bytes = lines, documents, num_bytes
        self.codes = np.frombuffer("".join(lines).encode("utf-32-le", "surrogatepass"), np.uint32)
        lengths = np.array([len(line) for line in lines])
        self.starts = np.cumsum(lengths) - lengths  # [lines], in `codes`


def _batches(documents: Iterable[Document], limit: float) -> Iterator[_Batch]:
    """Gather documents to batches, up to the one in which `limit` bytes are reached."""
    lines: list[str] = []
    firsts: list[int] = []
    size = total = 0
    for document in documents:
        firsts.append(len(lines))
        lines += document.lines
        text = "".join(document.lines)
        size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size >= BATCH or total + size >= limit:
            yield _Batch(lines, firsts, size)
            total += size
            if total >= limit:
                return
            lines, firsts, size = [], [], 0
    if lines:
        yield _Batch(lines, firsts, size)


class _VocabularyFigures:
    """Counts of one tokenizer over a text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.words = np.zeros(len(WORD_LENGTHS), np.int64)
        self.pieces = np.zeros(len(WORD_LENGTHS), np.int64)
        self.characters = self.unknown_words = self.unknown_characters = 0
        self.in_unknown: Counter[int] = Counter()  # code points of the words that are [UNK]
        self.lines: Counter[int] = Counter()  # length in pieces -> lines
        self.documents: Counter[int] = Counter()
        self.used = np.zeros(len(tokenizer.vocabulary), bool)
        self.longest: list[str] = []

    def add(self, batch: _Batch) -> None:
        encoded = self.tokenizer.encode_batch(batch.lines)
        pieces_of_line = np.diff(encoded.boundaries)
        pieces_of_document = np.add.reduceat(pieces_of_line, batch.documents)
        self.lines.update((pieces_of_line + AROUND).tolist())
        self.documents.update((pieces_of_document + AROUND).tolist())
        self.used[encoded.ids] = True

        first = np.empty(len(encoded.ids) + 1, bool)  # of a word; the last entry ends the last word
        first[1:-1] = encoded.word_ids[1:] != encoded.word_ids[:-1]
        first[encoded.boundaries] = True
        edges = np.flatnonzero(first)
        starts, pieces = edges[:-1], np.diff(edges)  # [words]
        line = np.repeat(np.arange(len(batch.lines)), pieces_of_line)[starts]
        begin = encoded.offsets[starts, 0] + batch.starts[line]
        # Marks that normalization sorts may end before they begin.
        lengths = np.maximum(1, encoded.offsets[edges[1:] - 1, 1] - encoded.offsets[starts, 0])

        rows = np.searchsorted(WORD_LENGTHS, lengths, side="right") - 1
        self.words += np.bincount(rows, minlength=len(self.words))
        self.pieces += np.bincount(rows, pieces, len(self.words)).astype(np.int64)
        self.characters += int(lengths.sum())
        unknown = encoded.ids[starts] == self.tokenizer.vocabulary.unk_id
        self.unknown_words += int(np.count_nonzero(unknown))
        self.unknown_characters += int(lengths[unknown].sum())
        characters = batch.codes[concatenated_ranges(begin[unknown], lengths[unknown])]
        self.in_unknown.update(characters.tolist())
        self._keep_longest(batch, begin, lengths)

    def _keep_longest(self, batch: _Batch, begin: np.ndarray, lengths: np.ndarray) -> None:
        # Longer than those known are few, but in the first batch or in a text of few words.
        least = len(self.longest[-1]) if len(self.longest) == MAX_LISTED else 0
        longer = np.flatnonzero(lengths > least)
        found: set[str] = set()
        for k in longer[np.argsort(-lengths[longer], kind="stable")].tolist():
            codes = batch.codes[begin[k] : begin[k] + lengths[k]]
            found.add(codes.tobytes().decode("utf-32-le", "surrogatepass"))
            if len(found) == MAX_LISTED:
                break
        found.update(self.longest)
        self.longest = sorted(found, key=lambda word: (-len(word), word))[:MAX_LISTED]

    def num_pieces(self, word: str) -> int | None:
        """Number of pieces of a word; None when it is [UNK]."""
        ids = self.tokenizer.encode_batch([word]).ids
        return None if self.tokenizer.vocabulary.unk_id in ids else len(ids)

    def result(self) -> dict[str, Any]:
        words, pieces = int(self.words.sum()), int(self.pieces.sum())
        # The special tokens never come out of a text.
        unused = int(np.count_nonzero(~self.used)) - len(SPECIAL) + bool(self.unknown_words)
        begins, ends = WORD_LENGTHS.tolist(), [*(WORD_LENGTHS[1:] - 1).tolist(), None]
        rows = zip(begins, ends, self.words.tolist(), self.pieces.tolist(), strict=True)
        return {
            "size": len(self.tokenizer.vocabulary),
            "normalization": dataclasses.asdict(self.tokenizer.normalization),
            "words": words,
            "pieces": pieces,
            "pieces_per_word": _ratio(pieces, words),
            "characters_per_piece": _ratio(self.characters, pieces),
            "word_coverage": 1 - _ratio(self.unknown_words, words),
            "character_coverage": 1 - _ratio(self.unknown_characters, self.characters),
            "unknown_pieces": _ratio(self.unknown_words, pieces),
            "unused_pieces": _ratio(unused, len(self.tokenizer.vocabulary) - len(SPECIAL)),
            "by_word_length": [
                {"from": begin, "to": end, "words": n, "pieces_per_word": _ratio(p, n)}
                for begin, end, n, p in rows
            ],
            "lines": _sequences(self.lines),
            "documents": _sequences(self.documents),
            "unknown_characters": self._unknown_characters(),
        }

    def _unknown_characters(self) -> list[dict[str, Any]]:
        """The most frequent characters of [UNK] words that no piece holds."""
        pieces = (piece for piece in self.tokenizer.vocabulary.pieces if piece not in SPECIAL)
        held = set("".join(piece.removeprefix("##") for piece in pieces))
        found = []
        for code, count in sorted(self.in_unknown.items(), key=lambda item: (-item[1], item[0])):
            words = split_words(chr(code), self.tokenizer.normalization)
            if not held.issuperset("".join(word.characters for word in words)):
                name = unicodedata.name(chr(code), unicodedata.category(chr(code)))
                character = {"character": chr(code), "code_point": f"U+{code:04X}", "name": name}
                found.append({**character, "count": count})
                if len(found) == MAX_LISTED:
                    break
        return found


def _sequences(counts: Counter[int]) -> dict[str, Any]:
    """Figures of sequences from their lengths in pieces, the two special tokens included."""
    total, lengths = counts.total(), sorted(counts)
    up_to = zip(lengths, accumulate(counts[n] for n in lengths), strict=True)
    bins: Counter[int] = Counter()
    for length in lengths:
        bins[bisect_right(SEQUENCE_LENGTHS, length)] += counts[length]
    return {
        "count": total,
        **{
            f"over_{limit}": _ratio(sum(counts[n] for n in lengths if n > limit), total)
            for limit in LIMITS
        },
        "median": next((length for length, count in up_to if 2 * count >= total), 0),
        "longest": lengths[-1] if lengths else 0,
        "histogram": [
            {"from": SEQUENCE_LENGTHS[k - 1], "to": SEQUENCE_LENGTHS[k] - 1, "count": bins[k]}
            for k in sorted(bins)
        ],
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class DuplicateLines:
    """Counts of the lines of a text by a 64-bit hash, in bounded memory.

    The counts are exact up to `MAX_LINES` distinct lines. Then the half whose hash has the next
    bit set is forgotten and passed over from then on. So a line is counted from its first copy to
    its last or not at all, shares stay unbiased, and every run gives the same result.

    >>> lines = DuplicateLines()
    >>> lines.add(["The End", "One", "The End", "Two", "The End"])
    >>> lines.result()["share"], lines.result()["most_frequent"]
    (0.4, [{'line': 'The End', 'count': 3}])
    """

    def __init__(self) -> None:
        self.one_in = 1  # of so many distinct lines one is counted
        self.counts: dict[int, int] = {}  # hash -> copies
        self.repeated: dict[int, str] = {}  # hash -> line, from its second copy on

    def add(self, lines: Iterable[str]) -> None:
        counts = self.counts
        for line in lines:
            digest = blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            number = int.from_bytes(digest, "little")
            if number % self.one_in:
                continue
            copies = counts[number] = counts.get(number, 0) + 1
            if copies == 2:
                self.repeated[number] = line[:MAX_SHOWN]
            if len(counts) > MAX_LINES:
                self.one_in *= 2
                counts = {n: copies for n, copies in counts.items() if n % self.one_in == 0}
                self.counts = counts
                self.repeated = {n: line for n, line in self.repeated.items() if n in counts}

    def result(self) -> dict[str, Any]:
        """Lines that repeat an earlier one: their number, share of all, and the most frequent.

        `counted` is the share of the distinct lines looked at; below 1 `count` is an estimate.
        """
        lines = sum(self.counts.values())
        repetitions = lines - len(self.counts)
        ranked = sorted(self.repeated, key=lambda n: (-self.counts[n], self.repeated[n]))
        return {
            "count": repetitions * self.one_in,
            "share": repetitions / lines if lines else 0.0,
            "counted": 1 / self.one_in,
            "most_frequent": [
                {"line": self.repeated[number], "count": self.counts[number]}
                for number in ranked[:MAX_LISTED]
            ],
        }
