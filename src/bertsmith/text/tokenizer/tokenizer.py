"""`Tokenizer`: texts in, flat arrays of piece ids and character offsets out.

`wordpiece.py` defines the result, `kernel.py` computes it. Here many texts are joined, cut into
groups that fit a processor's cache, given to threads and put together again.
"""

from __future__ import annotations

import hashlib
import json
import operator
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertsmith.base.processes import usable_cores
from bertsmith.text.tokenizer import kernel
from bertsmith.text.tokenizer.files import MODEL_MAX_LENGTH, read_tokenizer, write_tokenizer
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED, Normalization
from bertsmith.text.tokenizer.rows import Encoded, Rows, Truncation, concatenate, make_rows
from bertsmith.text.tokenizer.tables import PAGE, CharacterTable, build_trie
from bertsmith.text.tokenizer.wordpiece import Vocabulary, encode_text

FEW = 1 << 10  # texts
GROUP = 1 << 17  # characters encoded at a time: 512 KiB of code points
BLOCK = 1 << 12  # symbols between the kernel's two halves: 32 KiB with their positions
RARE_WORDS, RARE_LENGTH = 1 << 14, 40  # number and length of those of the reference that are cached
MAX_TEXT = 1 << 30  # characters; positions are kept in 32 bits
NO_LIMIT = 1 << 40
MODEL_INPUTS = "input_ids", "token_type_ids", "attention_mask"


class Tokenizer:
    """BERT's tokenizer (google-research/bert `tokenization.py`, paper section 3), with offsets.

    Special tokens in the text are split like any other ("[MASK]" -> "[", "mask", "]"). May be
    shared by threads and sent to processes.

    >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
    >>> encoded = Tokenizer(Vocabulary(pieces)).encode_batch(["Playing!", "plays"])
    >>> encoded.ids.tolist(), encoded.boundaries.tolist()
    ([5, 6, 7, 1], [0, 3, 4])
    >>> encoded.offsets.tolist(), encoded.word_ids.tolist()
    ([[0, 4], [4, 7], [7, 8], [0, 5]], [0, 0, 1, 0])
    """

    def __init__(self, vocabulary: Vocabulary, normalization: Normalization = GOOGLE_UNCASED):
        self.vocabulary, self.normalization = vocabulary, normalization
        strips = {"all": True, "none": False}.get(normalization.strip_accents, "latin")
        settings = [vocabulary.fingerprint, normalization.lowercase, strips]
        settings.append(normalization.split_cjk)
        if normalization.unicode != "none":
            settings.append(normalization.unicode)
        # SHA-256 of all that decides which pieces a text becomes
        self.fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        self._characters = CharacterTable(vocabulary, normalization)

        @lru_cache(RARE_WORDS)
        def encode_rare(text: str) -> np.ndarray:  # int32 [T, 4]: id, start, end, word
            return np.array(encode_text(text, vocabulary, normalization), np.int32).reshape(-1, 4)

        self._encode_rare = encode_rare
        self._filling = threading.Lock()
        # With and without offsets, buffers for each thread that has worked at the same time.
        self._free: dict[bool, list[_Buffers]] = {True: [], False: []}

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.vocabulary, self.normalization)

    @cached_property
    def _tables(self) -> tuple[Any, ...]:
        """The kernel's tables; not built where nothing is encoded, as in pre-training."""
        characters = self._characters.entries, self._characters.expansions
        return (*characters, *build_trie(self.vocabulary, self._characters.codes))

    @classmethod
    def from_vocab(cls, file: Path | str, lowercase: bool = True) -> Tokenizer:
        """The tokenizer of a `vocab.txt` by Google's rules. Errors: as `Vocabulary.read`."""
        return cls(Vocabulary.read(file), GOOGLE_UNCASED if lowercase else GOOGLE_CASED)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Tokenizer:
        """The tokenizer of a model folder; of a model on the hub: `bertsmith.load(name).tokenizer`.

        Errors: those of `read_tokenizer`.
        """
        return cls(*read_tokenizer(Path(folder)))

    def save(
        self, folder: Path | str, max_length: int = MODEL_MAX_LENGTH, token_types: bool = True
    ) -> None:
        """Write the tokenizer's three files.

        transformers will cut texts at `max_length` tokens, and leave out the token types of a model
        that has none.
        """
        settings = self.normalization, max_length, token_types
        write_tokenizer(Path(folder), self.vocabulary, *settings)

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        offsets: bool = True,
        max_pieces: int | None = None,
        threads: int | None = None,
    ) -> Encoded:
        """Encode texts, without special tokens around them.

        A word that no pieces cover, or of more than 200 characters, is one [UNK].

        offsets     False: `offsets` and `word_ids` have no rows
        max_pieces  keep only the first pieces of each text, and do not read on
        threads     at most this many; None: as many as there are cores, for large batches

        Errors: ValueError for a text that is not a `str`, with its place in the batch, and for
        anything else than a list, tuple, array or Series of them.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one string: encode_batch takes a list of texts")
        if max_pieces is not None and max_pieces < 0:
            raise ValueError(f"max_pieces = {max_pieces}: expected 0 or more")
        if threads is not None and threads < 1:
            raise ValueError(f"threads = {threads}: expected 1 or more")
        texts = texts if isinstance(texts, list) else as_items(texts, "texts")
        limit = NO_LIMIT if max_pieces is None else min(operator.index(max_pieces), NO_LIMIT)
        try:
            return self._encode_all(texts, offsets, limit, threads)
        except TypeError:
            for k, text in enumerate(texts):
                if not isinstance(text, str):
                    fault = f"text {k} of the batch is {type(text).__name__}, not str"
                    hint = "decode bytes and drop missing values first"
                    raise ValueError(f"{fault}: {hint}") from None
            raise

    def encode_words(self, words: Sequence[str]) -> Encoded:
        """The pieces of words of data, without offsets and word ids."""
        return self.encode_batch(words, offsets=False)

    def rows(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        max_length: int | None = None,
        truncation: Truncation = "longest_first",
        offsets: bool = True,
    ) -> Rows:
        """Rows [CLS] text [SEP], or [CLS] text [SEP] second text [SEP], cut to `max_length` tokens.

        >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
        >>> rows = Tokenizer(Vocabulary(pieces)).rows(["playing", "play"], ["!", "play!"])
        >>> rows.padded(pad_id=0).input_ids
        array([[2, 5, 6, 3, 7, 3],
               [2, 5, 3, 5, 7, 3]], dtype=int32)

        Errors: see `make_rows`.
        """
        limit = None if max_length is None else max(max_length, 0)  # more is never kept
        first = self.encode_batch(texts, offsets=offsets, max_pieces=limit)
        second = None
        if pairs is not None:
            second = self.encode_batch(pairs, offsets=offsets, max_pieces=limit)
        return make_rows(
            first, second, self.vocabulary, max_length=max_length, truncation=truncation
        )

    def tokenize(self, text: str) -> list[str]:
        """The pieces of one text, without special tokens.

        >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
        >>> Tokenizer(Vocabulary(pieces)).tokenize("Playing!")
        ['play', '##ing', '!']
        """
        return [self.vocabulary.pieces[k] for k in self.encode_batch([text], offsets=False).ids]

    def encode(
        self, text: str, text_pair: str | None = None, *, max_length: int | None = None
    ) -> list[int]:
        """The ids of [CLS] text [SEP] or of [CLS] text [SEP] second text [SEP], see `rows`.

        >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
        >>> Tokenizer(Vocabulary(pieces)).encode("playing", "play!", max_length=6)
        [2, 5, 6, 3, 5, 3]
        """
        pairs = None if text_pair is None else [text_pair]
        return self.rows([text], pairs, max_length=max_length, offsets=False).ids.tolist()

    def __call__(
        self,
        text: str | Iterable[str],
        text_pair: str | Iterable[str] | None = None,
        *,
        max_length: int | None = None,
        padding: bool | Literal["max_length"] = False,
        return_tensors: Literal["np"] | None = None,
    ) -> dict[str, Any]:
        """The input_ids, token_type_ids and attention_mask of a text or of several, as lists.

        max_length      rows are cut to so many tokens, see `rows`; None: not at all
        padding         True: to the longest row; "max_length": to `max_length`
        return_tensors  "np": arrays, int64 [N, S], of which `torch.from_numpy` makes tensors

        Unlike transformers', a "[MASK]" in a text is no special token.

        >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
        >>> tokenizer = Tokenizer(Vocabulary(pieces))
        >>> tokenizer("playing")
        {'input_ids': [2, 5, 6, 3], 'token_type_ids': [0, 0, 0, 0], 'attention_mask': [1, 1, 1, 1]}
        >>> tokenizer(["playing", "play"], padding=True)["input_ids"]
        [[2, 5, 6, 3], [2, 5, 3, 0]]

        Errors: ValueError as `rows`; for arrays of rows that are not of one length.
        """
        if return_tensors not in (None, "np"):
            raise ValueError(
                f"`return_tensors={return_tensors!r}`: known is np: `torch.from_numpy` makes "
                "tensors of its arrays"
            )
        if padding not in (True, False, "max_length"):
            raise ValueError(f"`padding={padding!r}`: True, False or 'max_length'")
        if padding == "max_length" and max_length is None:
            raise ValueError("`padding='max_length'` needs `max_length`")
        texts, pairs = as_texts(text, "text"), None
        if text_pair is not None:
            pairs = as_texts(text_pair, "text_pair")
        rows = self.rows(texts, pairs, max_length=max_length, offsets=False)
        lengths = np.diff(rows.boundaries)
        width = max_length if padding == "max_length" else None
        padded = rows.padded(self.vocabulary.pad_id, length=width)
        arrays = dict(zip(MODEL_INPUTS, padded, strict=True))
        if return_tensors is None:
            ends = [None if padding else length for length in lengths]
            lists = {
                name: [row[:end].tolist() for row, end in zip(array, ends, strict=True)]
                for name, array in arrays.items()
            }
            is_one = isinstance(text, str)
            return {name: rows[0] for name, rows in lists.items()} if is_one else lists
        if not padding and len(set(lengths.tolist())) > 1:
            raise ValueError("arrays need rows of one length: use `padding=True`")
        return {name: array.astype(np.int64) for name, array in arrays.items()}

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Join the pieces, with spaces between words; composed (NFC) if accents were stripped.

        >>> pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"]
        >>> Tokenizer(Vocabulary(pieces)).decode([5, 6, 7])
        'playing !'

        Errors: ValueError for an id outside the vocabulary.
        """
        text = " ".join(self._pieces_of(ids)).replace(" ##", "")
        stripped = self.normalization.strip_accents == "all"
        return unicodedata.normalize("NFC", text) if stripped else text

    def with_borders(self) -> Tokenizer:
        """The same with GPT's pieces to stand around texts; see `Vocabulary.with_borders`."""
        return Tokenizer(self.vocabulary.with_borders(), self.normalization)

    def _pieces_of(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        numbers = np.asarray(ids)
        if numbers.size and (numbers.ndim != 1 or numbers.dtype.kind not in "iu"):
            given = f"{numbers.dtype} {list(numbers.shape)}"
            raise ValueError(f"ids are {given}: expected a list of ints")
        outside = (numbers < 0) | (numbers >= len(self.vocabulary))
        if outside.any():
            size = len(self.vocabulary)
            raise ValueError(f"id {numbers[outside][0]} is outside the vocabulary of {size:,}")
        return [self.vocabulary.pieces[number] for number in numbers.tolist()]

    def _encode_all(
        self, texts: list[str], offsets: bool, limit: int, threads: int | None
    ) -> Encoded:
        def encode(group: list[str]) -> Encoded:
            return self._encode_part(group, text_starts(group), offsets, limit)

        if len(texts) <= FEW:
            starts = text_starts(texts)
            if starts[-1] <= GROUP:
                return self._encode_part(texts, starts, offsets, limit)
        threads = usable_cores() if threads is None else threads
        if threads == 1 or len(texts) == 1:
            return self._encode_groups(texts, offsets, limit)
        with _several(threads) as each:
            return concatenate(each(encode, text_groups(texts, threads)), each)

    def _encode_part(
        self, texts: list[str], starts: np.ndarray, offsets: bool, limit: int
    ) -> Encoded:
        """Encode a group of texts in buffers that are kept: fresh memory is slow at first touch."""
        try:
            buffers = self._free[bool(offsets)].pop()
        except IndexError:  # more threads than ever before
            buffers = _Buffers(GROUP, BLOCK, offsets)
        boundaries = np.zeros(len(starts), np.int64)
        self._append(texts, starts, limit, buffers, boundaries)
        ids, spans, word_ids = (array[: boundaries[-1]].copy() for array in buffers.result)
        if not buffers.grown:  # the memory of a huge text is given back
            self._free[bool(offsets)].append(buffers)
        return Encoded(ids, spans, word_ids, boundaries)

    def _encode_groups(self, texts: list[str], offsets: bool, limit: int) -> Encoded:
        """Encode texts in this thread, group after group, into arrays that are the result."""
        starts = text_starts(texts)
        buffers = _Buffers(int(starts[-1]) + BLOCK, BLOCK, offsets)
        boundaries = np.zeros(len(starts), np.int64)
        cuts = np.searchsorted(starts[1:], np.arange(GROUP, starts[-1], GROUP)) + 1
        ends = np.unique(np.append(cuts, len(texts))).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            within = starts[begin : end + 1] - starts[begin]
            self._append(texts[begin:end], within, limit, buffers, boundaries[begin : end + 1])
        ids, spans, word_ids = (array[: boundaries[-1]] for array in buffers.result)
        return Encoded(ids, spans, word_ids, boundaries)

    def _append(
        self,
        texts: list[str],
        starts: np.ndarray,
        limit: int,
        buffers: _Buffers,
        boundaries: np.ndarray,
    ) -> None:
        """Write the pieces of texts after the first boundaries[0] in the buffers."""
        joined = " ".join([*texts, ""])
        if joined.isascii():  # the conversion in NumPy lets other threads run
            codes = np.frombuffer(joined.encode("ascii"), np.uint8).astype(np.uint32)
            codes.flags.writeable = False  # as below: the kernel is compiled for one type
        else:
            codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        state = np.zeros(5, np.int64)
        state[kernel.PIECES] = boundaries[0]
        while need := kernel.encode(
            codes, starts, self._tables, limit, buffers.block, buffers.result, boundaries, state
        ):
            if need == kernel.NEEDS_PAGES:
                with self._filling:
                    self._characters.fill(np.unique(codes // PAGE))
            elif need == kernel.NEEDS_REFERENCE:
                self._encode_unit(joined, starts, buffers, state)
            elif need == kernel.NEEDS_SYMBOLS:
                buffers.grow_block()
            else:
                buffers.grow_result()

    def _encode_unit(
        self, joined: str, starts: np.ndarray, buffers: _Buffers, state: np.ndarray
    ) -> None:
        """Encode the unit at `state` by the reference code, and step over it."""
        text, begin, count, words, end = state.tolist()
        remembers = end - begin <= RARE_LENGTH
        encode_rare = self._encode_rare if remembers else self._encode_rare.__wrapped__
        pieces = encode_rare(joined[begin:end])
        after = count + len(pieces)
        while after > len(buffers.result[0]):
            buffers.grow_result()
        ids, offsets, word_ids = buffers.result
        ids[count:after] = pieces[:, 0]
        if len(offsets):
            offsets[count:after] = pieces[:, 1:3] + (begin - starts[text])
            word_ids[count:after] = pieces[:, 3] + words
        words += int(pieces[-1, 3]) + 1 if len(pieces) else 0
        state[:] = text, end, after, words, 0


class _Buffers:
    """Arrays that the kernel writes.

    block   int32 [S] and [S]: symbols and where they come from
    result  ids int32 [R], offsets int32 [R, 2], word_ids int32 [R]; without offsets the last two
            have no rows. Memory that is never written is never taken.
    grown   True once they were too small
    """

    def __init__(self, pieces: int, symbols: int, offsets: bool):
        located = pieces if offsets else 0
        self.grown = False
        self.block = np.empty(symbols, np.int32), np.empty(symbols, np.int32)
        offsets_and_words = np.empty((located, 2), np.int32), np.empty(located, np.int32)
        self.result = np.empty(pieces, np.int32), *offsets_and_words

    def grow_block(self) -> None:
        """Double the symbols that fit."""
        self.grown, size = True, 2 * len(self.block[0])
        self.block = np.empty(size, np.int32), np.empty(size, np.int32)

    def grow_result(self) -> None:
        """Double the pieces that fit; what is written stays."""
        self.grown = True
        ids, offsets, words = (np.concatenate((a, np.empty_like(a))) for a in self.result)
        self.result = ids, offsets, words


@contextmanager
def _several(threads: int) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]]:
    """Threads, this one among them: each(work, items) is [work(item), ...], begun in order.

    One future a thread: one an item, as of `pool.map`, made two threads slower.
    """
    with ThreadPoolExecutor(threads - 1) as pool:

        def each(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
            results, left = [None] * len(items), iter(range(len(items)))  # one for all threads

            def run() -> None:
                try:
                    for k in left:
                        results[k] = work(items[k])
                finally:
                    list(left)  # after an error no thread begins anything more

            others = [pool.submit(run) for _ in range(threads - 1)]
            run()
            for other in others:
                other.result()
            return results

        yield each


def text_groups(texts: list[str], threads: int) -> list[list[str]]:
    """Groups of about `GROUP` characters, smaller ones at the end, so that threads end together."""
    # By number, not by length: asking every text for its length is work for the threads.
    sampled = texts[:: -(-len(texts) // FEW)]
    largest = 1 + GROUP * len(sampled) // sum(map(len, sampled), start=1)
    groups, begin = [], 0
    while begin < len(texts):
        left = (len(texts) - begin) // (2 * threads)
        end = begin + max(1, min(largest, max(largest // 4, left)))
        groups.append(texts[begin:end])
        begin = end
    return groups


def text_starts(texts: list[str]) -> np.ndarray:
    """Start of each text when they are joined, a white space after each: int64 [N + 1]."""
    starts = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1, out=starts[1:])
    if starts[-1] > MAX_TEXT and np.diff(starts).max() > MAX_TEXT:
        raise ValueError(f"a text of more than {MAX_TEXT:,} characters: divide it")
    return starts


def as_texts(given: Any, name: str = "texts") -> list[str]:
    """The texts of a string (one), list, tuple, array, pandas Series or iterator.

    >>> as_texts("a text"), as_texts(("one", "two"))
    (['a text'], ['one', 'two'])

    Errors: ValueError, which calls them `name`, for no texts and for an item that is none.
    """
    if isinstance(given, str):
        return [given]
    texts = as_items(given, name)
    for k, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{k}] is {_shown(text)}: expected a text (str)")
    return texts


def as_items(given: Any, name: str) -> list[Any]:
    """The items of anything ordered that has one dimension, strings and bytes left out.

    Errors: ValueError for anything else.
    """
    # a table (pandas) has two dimensions and iterates over the names of its columns
    flat = isinstance(given, Iterable) and getattr(given, "ndim", 1) == 1
    if not flat or isinstance(given, str | bytes | bytearray | Mapping | Set):
        expected = "expected a text (str) or a list, array or Series of texts"
        raise ValueError(f"{name}: {expected}, not {_shown(given)}")
    return list(given)


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
