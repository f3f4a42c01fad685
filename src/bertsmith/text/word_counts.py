"""How often each word occurs in a text, in bounded memory and in several processes.

Each block of text is cut into the stretches that normalisation looks at together, of which it has
far fewer distinct ones than words in all; each of these is normalised once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing

from bertsmith.progress import Progress
from bertsmith.text.normalize import Normalization, words_of
from bertsmith.text.readers import Document
from bertsmith.text.reference import MAX_WORD
from bertsmith.text.stretch_counts import count_stretches
from bertsmith.text.workers import map_in_order

BLOCK = 1 << 22  # characters counted at a time, by one process
MAX_LETTERS = 10_000_000  # of all distinct words kept: 1 GB at most while pieces are learned
MAX_REMEMBERED = 1 << 22  # characters of all stretches whose words a process remembers

Counts = tuple[int, dict[str, int]]  # characters of a block, counts of its words


def count_words(
    documents: Iterable[Document | str], normalization: Normalization, workers: int = 1
) -> dict[str, int]:
    """How often each normalised word occurs; words over 200 characters are left out.

    The text is counted in blocks of fixed size, and their counts are added up in order. When the
    distinct words together grow beyond ten million characters, the rarest so far are forgotten,
    down to half of that: as this goes by blocks, it is the same for any number of workers.

    Errors: those of the documents; OSError when a worker was killed.

    >>> count_words(["The cat, the hat."], Normalization())
    {'the': 2, 'cat': 1, ',': 1, 'hat': 1, '.': 1}
    """
    words: dict[str, int] = {}
    letters = 0
    with Progress("counting words", unit="M characters", scale=1e6) as progress:
        for characters, counts in _counted_blocks(documents, normalization, workers):
            if letters > MAX_LETTERS:
                words = _without_rare(words, MAX_LETTERS // 2)
                letters = sum(map(len, words))
            for word, count in counts.items():
                if word in words:
                    words[word] += count
                else:
                    words[word] = count
                    letters += len(word)
            progress.update(characters)
    return words


def _without_rare(words: dict[str, int], room: int) -> dict[str, int]:
    """The most frequent words, of at most `room` characters together.

    >>> _without_rare({"often": 9, "rare": 1, "seldom": 2, "seen": 1}, 12)
    {'often': 9, 'seldom': 2}
    """
    letters: Counter[int] = Counter()
    for word, count in words.items():
        letters[count] += len(word)
    kept, most = 0, 0
    for most in sorted(letters, reverse=True):
        kept += letters[most]
        if kept > room:
            break
    return {word: count for word, count in words.items() if count > most}


def _counted_blocks(
    documents: Iterable[Document | str], normalization: Normalization, workers: int
) -> Iterator[Counts]:
    """The counts of each block, in the order of the text."""
    items = ((None, block) for block in _blocks(documents))
    with closing(map_in_order(_BlockCounter, (normalization,), items, workers)) as results:
        yield from (counts for _, counts in results)


def _blocks(documents: Iterable[Document | str]) -> Iterator[str]:
    """Lines of text, gathered to about `BLOCK` characters."""
    lines, size = [], 0
    for document in documents:
        for line in [document] if isinstance(document, str) else document.lines:
            lines.append(line)
            size += len(line)
            if size >= BLOCK:
                yield "\n".join(lines)
                lines, size = [], 0
    if lines:
        yield "\n".join(lines)


class _BlockCounter:
    """Counts words; remembers the words of the stretches it has seen."""

    def __init__(self, normalization: Normalization):
        self._normalization = normalization
        self._known: dict[str, list[str]] = {}
        self._size = 0  # characters of what is known

    def __call__(self, text: str) -> Counts:
        plain, others = count_stretches(text, self._normalization)
        words = {word: count for word, count in plain.items() if len(word) <= MAX_WORD}
        for stretch, count in others.items():
            known = self._known.get(stretch)
            for word in self._learn(stretch) if known is None else known:
                words[word] = words.get(word, 0) + count
        return len(text), words

    def _learn(self, stretch: str) -> list[str]:
        """The words of a stretch, which are then known."""
        words = [word.characters for word in words_of(stretch, self._normalization)]
        words = [word for word in words if len(word) <= MAX_WORD]
        if self._size > MAX_REMEMBERED:
            self._known.clear()
            self._size = 0
        self._known[stretch] = words
        self._size += len(stretch)
        return words
