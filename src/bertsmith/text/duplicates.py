"""Lines that a corpus repeats, counted in one pass and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

MAX_LINES = 1 << 20  # distinct lines remembered: about 100 MB
MAX_SHOWN = 80  # characters kept of a repeated line


class DuplicateLines:
    """Counts of lines by a 64-bit hash.

    The counts are exact up to `limit` distinct lines. Beyond it half of the lines are forgotten,
    those whose hash has the next bit set, and their like are passed over from then on; so every
    line is either counted from its first copy to its last or not at all, and shares stay
    unbiased. The result is the same on every run.

    >>> lines = DuplicateLines()
    >>> lines.add(["The End", "One", "The End", "Two", "The End"])
    >>> lines.result()["share"], lines.result()["most_frequent"]
    (0.4, [{'line': 'The End', 'count': 3}])
    """

    def __init__(self, limit: int = MAX_LINES):
        self.limit = limit
        self.one_in = 1  # of so many distinct lines one is counted
        self.counts: dict[int, int] = {}  # hash -> copies
        self.repeated: dict[int, str] = {}  # hash -> line, from its second copy on

    def add(self, lines: Iterable[str]) -> None:
        """Count some lines."""
        counts = self.counts
        for line in lines:
            digest = blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            number = int.from_bytes(digest, "little")
            if number % self.one_in:
                continue
            copies = counts[number] = counts.get(number, 0) + 1
            if copies == 2:
                self.repeated[number] = line[:MAX_SHOWN]
            if len(counts) > self.limit:
                self._halve()
                counts = self.counts

    def result(self, most: int = 10) -> dict[str, Any]:
        """Lines that repeat an earlier one: their number, share of all, and the most frequent.

        `counted` is the share of the distinct lines that was looked at; below 1 the number of
        repetitions is an estimate.
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
                for number in ranked[:most]
            ],
        }

    def _halve(self) -> None:
        self.one_in *= 2
        self.counts = {n: copies for n, copies in self.counts.items() if n % self.one_in == 0}
        self.repeated = {n: line for n, line in self.repeated.items() if n % self.one_in == 0}
