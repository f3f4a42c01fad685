"""Learn a WordPiece vocabulary from text.

The learner of the paper was never released. This one counts words and then, as the WordPiece
trainer of the `tokenizers` library does, starts from single characters and joins the most frequent
pair of neighbouring pieces until the vocabulary is full (byte-pair encoding with "##" marks).
Equal counts go in the order of the pieces' code points, so the result depends on the text alone.
"""

from __future__ import annotations

import heapq
import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

from bertsmith.progress import Progress
from bertsmith.text.normalize import CHUNK, GOOGLE_UNCASED, Normalization, words_of
from bertsmith.text.readers import Document
from bertsmith.text.vocabulary import SPECIAL, Vocabulary
from bertsmith.text.wordpiece import MAX_WORD
from bertsmith.text.workers import start_worker

BLOCK = 1 << 22  # characters counted at a time, by one process
MAX_WORDS = 1_000_000  # distinct words kept; about 1 GB while the pieces are learned
GOOGLE_UNUSED = 99  # [unused0] to [unused98] stand between [PAD] and [UNK] in Google's files


def train_vocabulary(
    documents: Iterable[Document | str],
    size: int,
    normalization: Normalization = GOOGLE_UNCASED,
    *,
    reserve_unused: int = 0,
    min_frequency: int = 2,
    max_alphabet: int | None = None,
    workers: int = 1,
) -> Vocabulary:
    """Learn a vocabulary of exactly `size` pieces.

    First come the special tokens (see `special_pieces`), then the alphabet by code point (each
    character in the forms seen: "c" at the start of a word, "##c" inside), then joined pieces in
    the order they were learned.

    documents       documents, or plain strings; read once, in bounded memory
    normalization   how text becomes words, as in `Tokenizer`
    reserve_unused  number of [unused] pieces to set aside
    min_frequency   a pair of pieces seen less often is not joined
    max_alphabet    keep this many characters, the most frequent; a word with another one is [UNK]
                    and teaches nothing. None: all characters
    workers         processes that count words; the result does not depend on it

    When a text has more than a million distinct words the rarest are forgotten on the way.

    Errors: ValueError for no text, for a size below special tokens + alphabet (says the least
    possible), for a size the text cannot give (says how many pieces it gives).

    >>> vocabulary = train_vocabulary(["low lower lowest", "low slow"], 15)
    >>> vocabulary.pieces[5:]
    ('l', 's', '##e', '##l', '##o', '##r', '##s', '##t', '##w', '##ow')
    """
    _check(min_frequency, reserve_unused, max_alphabet, workers)
    words = count_words(documents, normalization, workers)
    if not words:
        raise ValueError("no words in the text: a vocabulary needs some text to learn from")
    pieces = special_pieces(reserve_unused)
    characters = _alphabet(words, max_alphabet)
    words = {word: count for word, count in words.items() if characters.issuperset(word)}
    pairs = _Pairs(words)
    pieces += sorted(pairs.pieces, key=lambda piece: (piece.startswith("##"), piece))
    if len(pieces) > size:
        raise ValueError(
            f"a vocabulary of {size:,} is too small: special tokens and the text's "
            f"{len(characters):,} characters need --size {len(pieces)} or more "
            "(or fewer characters with --max-alphabet)"
        )
    _learn(pieces, pairs, size, min_frequency)
    return Vocabulary(pieces)


def special_pieces(reserve_unused: int = 0) -> list[str]:
    """Special tokens and reserved pieces in the order of BERT's vocabularies.

    With room for 99 reserved pieces or more they stand as in the released `vocab.txt` files:
    [PAD] 0, [unused0..98] 1-99, [UNK] 100, [CLS] 101, [SEP] 102, [MASK] 103, the rest after them.

    >>> special_pieces(2)
    ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[unused0]', '[unused1]']
    >>> special_pieces(100).index("[MASK]")
    103
    """
    unused = [f"[unused{i}]" for i in range(reserve_unused)]
    early = GOOGLE_UNUSED if reserve_unused >= GOOGLE_UNUSED else 0
    return [SPECIAL[0], *unused[:early], *SPECIAL[1:], *unused[early:]]


def count_words(
    documents: Iterable[Document | str], normalization: Normalization, workers: int = 1
) -> dict[str, int]:
    """How often each normalised word occurs; words over 200 characters are left out.

    The text is counted in blocks of fixed size, and their counts are added up in order, so that
    also what is forgotten of more than a million words is the same for any number of workers.
    """
    words: Counter[str] = Counter()
    with Progress("counting words", unit="M characters", scale=1e6) as progress:
        for characters, counts in _counted_blocks(documents, normalization, workers):
            words.update(counts)
            least = 1
            while len(words) > MAX_WORDS:
                least += 1
                words = Counter({word: n for word, n in words.items() if n >= least})
            progress.update(characters)
    return dict(words)


def _counted_blocks(
    documents: Iterable[Document | str], normalization: Normalization, workers: int
) -> Iterator[tuple[int, dict[str, int]]]:
    """(characters, word counts) of each block, in the order of the text."""
    if workers == 1:
        for block in _blocks(documents):
            yield _count_block(block, normalization)
        return
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[tuple[int, dict[str, int]]]] = deque()
    with ProcessPoolExecutor(workers, context, start_worker) as pool:
        for block in _blocks(documents):
            waiting.append(pool.submit(_count_block, block, normalization))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _blocks(documents: Iterable[Document | str]) -> Iterator[list[str]]:
    """Lines of text, gathered to about `BLOCK` characters."""
    block, size = [], 0
    for document in documents:
        for line in [document] if isinstance(document, str) else document.lines:
            block.append(line)
            size += len(line)
            if size >= BLOCK:
                yield block
                block, size = [], 0
    if block:
        yield block


def _count_block(lines: list[str], normalization: Normalization) -> tuple[int, dict[str, int]]:
    # Stretches between white space are counted first: normalising each distinct one once saves
    # most of the work in languages that write spaces.
    chunks: Counter[str] = Counter()
    for line in lines:
        chunks.update(CHUNK.findall(line))
    words: dict[str, int] = {}
    for chunk, count in chunks.items():
        for word in words_of(chunk, normalization):
            characters = word.characters
            if len(characters) <= MAX_WORD:
                words[characters] = words.get(characters, 0) + count
    return sum(map(len, lines)), words


def _alphabet(words: dict[str, int], limit: int | None) -> set[str]:
    """The characters of the words, or the `limit` most frequent of them."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    for character in [c for c in counts if "\ud800" <= c <= "\udfff"]:
        del counts[character]  # half of a surrogate pair cannot be written to a file
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return set(ranked[:limit])


def _check(min_frequency: int, reserve_unused: int, max_alphabet: int | None, workers: int) -> None:
    for flag, value, least in (
        ("--min-frequency", min_frequency, 1),
        ("--reserve-unused", reserve_unused, 0),
        ("--max-alphabet", max_alphabet, 1),
        ("--workers", workers, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value}: must be {least} or more")


def _learn(pieces: list[str], pairs: _Pairs, size: int, min_frequency: int) -> None:
    """Join pairs until there are `size` pieces."""
    known = set(pieces)
    with Progress("vocabulary", total=size, unit="pieces") as progress:
        while len(pieces) < size:
            piece = pairs.join_most_frequent(min_frequency)
            if piece is None:
                raise ValueError(
                    f"the text gives only {len(pieces):,} of {size:,} pieces: use --size "
                    f"{len(pieces)} or less, give more text, or lower --min-frequency "
                    f"({min_frequency})"
                )
            if piece not in known:  # "abc" is learned once, be it of "ab ##c" or of "a ##bc"
                known.add(piece)
                pieces.append(piece)
                progress.update(done=len(pieces))


class _Pairs:
    """Words as rows of pieces, and how often each pair of pieces stands side by side.

    The queue holds a pair at every count it rose to; counts that have fallen since are put right
    when they come up. A pair's set of words may hold words it has left.
    """

    def __init__(self, words: dict[str, int]):
        self.pieces: dict[str, int] = {}  # piece -> its number
        self.names: list[str] = []
        self.rows: list[list[int]] = []
        self.row_counts: list[int] = []
        self.counts: dict[tuple[int, int], int] = {}
        self.places: dict[tuple[int, int], set[int]] = {}
        for word, count in words.items():
            row = [self._number(word[0]), *(self._number("##" + c) for c in word[1:])]
            place = len(self.rows)
            self.rows.append(row)
            self.row_counts.append(count)
            for pair in zip(row, row[1:], strict=False):
                self.counts[pair] = self.counts.get(pair, 0) + count
                self.places.setdefault(pair, set()).add(place)
        self.queue = [self._entry(pair) for pair in self.counts]
        heapq.heapify(self.queue)

    def join_most_frequent(self, min_frequency: int) -> str | None:
        """Join the most frequent pair everywhere; its piece, or None when none is left."""
        while self.queue:
            negative, left, right, pair = heapq.heappop(self.queue)
            count = self.counts.get(pair, 0)
            if count < -negative:
                if count >= min_frequency:
                    heapq.heappush(self.queue, self._entry(pair))
                continue
            if count < min_frequency:
                return None
            joined = left + right.removeprefix("##")
            self._join(pair, self._number(joined))
            return joined
        return None

    def _join(self, pair: tuple[int, int], joined: int) -> None:
        left, right = pair
        counts, places = self.counts, self.places
        risen: set[tuple[int, int]] = set()
        for place in places.pop(pair):
            row, count = self.rows[place], self.row_counts[place]
            i = 0
            while (i := _find(row, left, right, i)) >= 0:
                row[i : i + 2] = [joined]
                if i > 0:
                    counts[row[i - 1], left] -= count
                    new = (row[i - 1], joined)
                    counts[new] = counts.get(new, 0) + count
                    places.setdefault(new, set()).add(place)
                    risen.add(new)
                i += 1
                if i < len(row):
                    counts[right, row[i]] -= count
                    new = (joined, row[i])
                    counts[new] = counts.get(new, 0) + count
                    places.setdefault(new, set()).add(place)
                    risen.add(new)
        del counts[pair]
        for new in risen:
            if counts.get(new, 0) > 0:
                heapq.heappush(self.queue, self._entry(new))

    def _entry(self, pair: tuple[int, int]) -> tuple[int, str, str, tuple[int, int]]:
        return -self.counts[pair], self.names[pair[0]], self.names[pair[1]], pair

    def _number(self, piece: str) -> int:
        number = self.pieces.setdefault(piece, len(self.pieces))
        if number == len(self.names):
            self.names.append(piece)
        return number


def _find(row: list[int], left: int, right: int, start: int) -> int:
    """Where `left` is followed by `right` in the row, from `start` on; -1 if nowhere.

    >>> _find([5, 7, 5, 6], 5, 6, 0)
    2
    """
    last = len(row) - 1
    while start < last:
        try:
            start = row.index(left, start, last)
        except ValueError:
            return -1
        if row[start + 1] == right:
            return start
        start += 1
    return -1
