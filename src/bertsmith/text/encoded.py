"""What the tokenizer gives back: flat arrays, the room they are written in, their joining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

EachOf = Callable[[int, Callable[[int], None]], None]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The pieces of N texts, one after the other; text k is `boundaries[k]:boundaries[k + 1]`.

    ids         int32 [T]
    offsets     int32 [T, 2], code points of the ORIGINAL text a piece came from, end exclusive
    word_ids    int32 [T], number of the piece's word within its text (punctuation is a word)
    boundaries  int64 [N + 1]
    """

    ids: np.ndarray
    offsets: np.ndarray
    word_ids: np.ndarray
    boundaries: np.ndarray

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __getitem__(self, k: int) -> Encoded:
        """Text k alone, as views. Errors: IndexError."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"text {k} of {len(self)}")
        begin, end = self.boundaries[k % len(self)], self.boundaries[k % len(self) + 1]
        return Encoded(
            self.ids[begin:end],
            self.offsets[begin:end],
            self.word_ids[begin:end],
            np.array([0, end - begin]),
        )

    @classmethod
    def empty(cls) -> Encoded:
        """Of no text."""
        none = np.empty(0, np.int32)
        return cls(none, np.empty((0, 2), np.int32), none, np.zeros(1, np.int64))


class Room:
    """Where the kernel writes.

    block   int32 [S] and [S]: symbols and where they come from
    result  ids int32 [R], offsets int32 [R, 2], word_ids int32 [R], the last two without rows when
            nobody asks for them; what is never written takes no memory
    grown   whether it was too small
    """

    def __init__(self, pieces: int, symbols: int, offsets: bool):
        places = pieces if offsets else 0
        self.grown = False
        self.block = np.empty(symbols, np.int32), np.empty(symbols, np.int32)
        self.result = (
            np.empty(pieces, np.int32),
            np.empty((places, 2), np.int32),
            np.empty(places, np.int32),
        )

    def grow_block(self) -> None:
        """Twice the room for symbols."""
        self.grown, size = True, 2 * len(self.block[0])
        self.block = np.empty(size, np.int32), np.empty(size, np.int32)

    def grow_result(self) -> None:
        """Twice the room for pieces, at least for a block's, with those written so far."""
        self.grown = True
        more = max(len(self.result[0]), len(self.block[0]))
        ids, offsets, word_ids = self.result
        places = more if len(offsets) else 0
        self.result = _longer(ids, more), _longer(offsets, places), _longer(word_ids, places)


def _longer(array: np.ndarray, more: int) -> np.ndarray:
    larger = np.empty((len(array) + more, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def concatenate(parts: Sequence[Encoded], each: EachOf) -> Encoded:
    """The parts one after the other; the threads of `several` share the copying."""
    texts = np.cumsum([0, *map(len, parts)])
    pieces = np.cumsum([0, *(len(part.ids) for part in parts)])
    places = np.cumsum([0, *(len(part.offsets) for part in parts)])
    whole = Encoded(
        np.empty(pieces[-1], np.int32),
        np.empty((places[-1], 2), np.int32),
        np.empty(places[-1], np.int32),
        np.zeros(texts[-1] + 1, np.int64),
    )

    def copy(k: int) -> None:
        part = parts[k]
        whole.ids[pieces[k] : pieces[k + 1]] = part.ids
        whole.offsets[places[k] : places[k + 1]] = part.offsets
        whole.word_ids[places[k] : places[k + 1]] = part.word_ids
        whole.boundaries[texts[k] + 1 : texts[k + 1] + 1] = part.boundaries[1:] + pieces[k]

    each(len(parts), copy)
    return whole


@contextmanager
def several(threads: int) -> Iterator[EachOf]:
    """Threads, this one among them: each_of(count, work) calls work(0) to work(count - 1).

    Each thread takes the next number when it is free.

    Errors: the first that `work` raises.
    """
    with ThreadPoolExecutor(max(1, threads - 1)) as pool:

        def each_of(count: int, work: Callable[[int], None]) -> None:
            numbers = iter(range(count))  # shared: Python's lock lets one at a time take a number

            def run() -> None:
                try:
                    for k in numbers:
                        work(k)
                finally:
                    list(numbers)  # after an error no thread begins anything more

            others = [pool.submit(run) for _ in range(threads - 1)]
            run()
            for other in others:
                other.result()

        yield each_of
