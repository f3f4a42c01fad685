"""Cased text for ELMo: sentences as numbers of words, in batches or as endless streams.

A word goes in as its bytes; what is predicted is its number by falling count. The first numbers are
those of the borders of a sentence and of words that the softmax does not know.

Letters: B rows, S steps.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertsmith.corpus.examples.stream import Position
from bertsmith.experiments.lineage.settings import NO_WORDS
from bertsmith.model.elmo import (
    MOST_BYTES,
    SENTENCE_BEGIN,
    SENTENCE_END,
    WORD_BEGIN,
    WORD_END,
    WORD_NUMBERS,
    WORD_PAD,
)
from bertsmith.text.readers.documents import no_text, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer.characters import CharacterTokenizer
from bertsmith.training.finetuning.fit import Batches

DIRECTIONS = "ahead", "back"
RIGHT_BORDER, LEFT_BORDER, UNKNOWN = range(NO_WORDS)  # numbers before those of the words
NAMES = ["</S>", "<S>", "<UNK>"]
WINDOW = 20  # words of a step, where the state is carried
MOST_WORDS = 200  # of a sentence; a longer one becomes several
HELD_OUT = 100  # one sentence of so many
IGNORED = -100  # a label that is none
READ_TOGETHER = 10_000  # sentences


@dataclass(frozen=True)
class ElmoText:
    """Sentences as numbers of words, the most frequent word first."""

    characters: np.ndarray  # int16 [types, 50], the bytes of each word as ELMo reads them
    names: list[str]  # of all types
    tokens: np.ndarray  # int32 [N], without borders
    boundaries: np.ndarray  # int64 [sentences + 1]

    @classmethod
    def read(cls, inputs: Sequence[Path]) -> ElmoText:
        """Read files, see `read_documents`. Errors: ValueError for no text."""
        tokenizer, numbers = CharacterTokenizer(), dict[bytes, int]()
        tokens, lengths, waiting = list[int](), list[int](), list[str]()

        def take() -> None:
            encoded = tokenizer.encode_batch(waiting, offsets=False)
            for k in range(len(encoded)):
                ids = encoded[k].ids
                ends = np.flatnonzero(ids == WORD_END)
                values, begin = (ids - 1).astype(np.uint8).tobytes(), 0
                found = []
                for end in ends.tolist():
                    found.append(numbers.setdefault(values[begin:end], len(numbers)))
                    begin = end + 1
                for start in range(0, len(found), MOST_WORDS):
                    part = found[start : start + MOST_WORDS]
                    tokens.extend(part)
                    lengths.append(len(part))
            waiting.clear()

        for document in read_documents(inputs):
            for line in document.lines:
                waiting += split_sentences(line)
            if len(waiting) >= READ_TOGETHER:
                take()
        take()
        if not tokens:
            raise no_text(inputs)
        found = np.array(tokens, np.int64)
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        trained = np.repeat(~is_held_out(len(lengths)), lengths)
        counts = np.bincount(found[trained], minlength=len(numbers))
        order = np.argsort(-counts, kind="stable")
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(NO_WORDS, NO_WORDS + len(order))
        words = list(numbers)
        types = [words[k] for k in order]
        names = NAMES + [word.decode("utf-8", "replace") for word in types]
        borders = [bytes(0)] * len(NAMES)
        characters = _characters(borders + types)
        characters[RIGHT_BORDER, 1:3] = SENTENCE_END, WORD_END
        characters[LEFT_BORDER, 1:3] = SENTENCE_BEGIN, WORD_END
        return cls(characters, names, place[found], boundaries)

    def fingerprint(self) -> str:
        """SHA-256 of words and sentences."""
        known = hashlib.sha256(self.characters.tobytes())
        known.update(self.tokens.tobytes() + self.boundaries.tobytes())
        return known.hexdigest()

    def with_borders(self, sentence: int) -> np.ndarray:
        """<S> words </S>, int32."""
        begin, end = self.boundaries[sentence : sentence + 2]
        return np.concatenate([[LEFT_BORDER], self.tokens[begin:end], [RIGHT_BORDER]])


def _characters(words: Sequence[bytes]) -> np.ndarray:
    rows = np.full((len(words), WORD_NUMBERS), WORD_PAD, np.int16)
    rows[:, 0] = WORD_BEGIN
    for row, word in zip(rows, words, strict=True):
        size = min(len(word), MOST_BYTES)
        row[1 : 1 + size] = np.frombuffer(word, np.uint8, size).astype(np.int16) + 1
        row[1 + size] = WORD_END
    return rows


def is_held_out(sentences: int) -> np.ndarray:
    """bool [sentences], True for one of a hundred, and for the last of fewer."""
    held_out = np.arange(sentences) % HELD_OUT == HELD_OUT // 2
    held_out[-1] |= not held_out.any() and sentences > 1
    return held_out


class Streams(NamedTuple):
    """Read by a step in each direction: words and, as far on, those to be predicted.

    Both int64 [B, S], in the order in which the direction meets them; no prediction is IGNORED.
    """

    inputs: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


class SentenceStream:
    """Whole sentences, those of about one length together, the same in both directions."""

    def __init__(self, text: ElmoText, chosen: np.ndarray, batch_size: int, seed: int) -> None:
        self._text, self._chosen = text, chosen
        self._batches = Batches(np.diff(text.boundaries)[chosen], batch_size, seed)
        self.per_epoch, self.advance = self._batches.per_epoch, self._batches.advance

    def at(self, position: Position) -> Streams:
        return self.of(self._chosen[self._batches[position]])

    def of(self, sentences: np.ndarray) -> Streams:
        rows = [self._text.with_borders(sentence) for sentence in sentences]
        shape = len(rows), max(map(len, rows)) - 1
        inputs = {name: np.full(shape, RIGHT_BORDER, np.int64) for name in DIRECTIONS}
        labels = {name: np.full(shape, IGNORED, np.int64) for name in DIRECTIONS}
        for number, row in enumerate(rows):
            for name, ordered in zip(DIRECTIONS, (row, row[::-1]), strict=True):
                inputs[name][number, : len(row) - 1] = ordered[:-1]
                labels[name][number, : len(row) - 1] = ordered[1:]
        return Streams(inputs, labels)


class WindowStream:
    """Windows of 20 words; row k of a step goes on where row k of the step before ended."""

    def __init__(self, text: ElmoText, chosen: np.ndarray, batch_size: int, seed: int) -> None:
        self._text, self._chosen, self._rows, self._seed = text, chosen, batch_size, seed
        words = int((np.diff(text.boundaries)[chosen] + 2).sum())
        self.per_epoch = (words - 1) // (batch_size * WINDOW)
        if self.per_epoch == 0:
            raise ValueError(
                f"`batch_size={batch_size}`: {words:,} words do not fill a window of {WINDOW} "
                "words in each row: lower it"
            )
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def at(self, position: Position) -> Streams:
        columns = np.arange(WINDOW) + WINDOW * position.index
        starts = np.arange(self._rows)[:, None] * self.per_epoch * WINDOW
        streams = self._epoch(position.epoch)
        return Streams(
            {name: stream[starts + columns].astype(np.int64) for name, stream in streams.items()},
            {
                name: stream[starts + columns + 1].astype(np.int64)
                for name, stream in streams.items()
            },
        )

    def _shuffled(self, epoch: int) -> dict[str, np.ndarray]:
        """An epoch in each direction, whose orders have nothing to do with each other."""
        found = {}
        for number, (name, turn) in enumerate(zip(DIRECTIONS, (1, -1), strict=True)):
            order = np.random.default_rng([self._seed, epoch, number]).permutation(self._chosen)
            rows = [self._text.with_borders(sentence)[::turn] for sentence in order]
            found[name] = np.concatenate(rows)
        return found
