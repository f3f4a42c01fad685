"""Encoded texts, and the rows that BERT reads: [CLS] a [SEP] (b [SEP]), cut to a length.

Both are flat: text or row k is `boundaries[k]:boundaries[k + 1]`, no Python object per token.
Padding happens only on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from bertsmith.text.tokenizer.wordpiece import Vocabulary

Truncation = Literal["longest_first", "only_first", "only_second", "none"]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The T pieces of N texts, one after the other.

    ids         int32 [T]
    offsets     int32 [T, 2], code points of the ORIGINAL text a piece came from, end exclusive
    word_ids    int32 [T], number of the piece's word within its text (punctuation is a word)
    boundaries  int64 [N + 1]; text k is `boundaries[k]:boundaries[k + 1]`
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
        k %= len(self)
        text = slice(*self.boundaries[k : k + 2])
        boundaries = np.array([0, text.stop - text.start])
        return Encoded(self.ids[text], self.offsets[text], self.word_ids[text], boundaries)


def concatenate(parts: list[Encoded], each: Callable[..., list[Any]]) -> Encoded:
    """Put the parts one after the other; threads share the copying."""
    texts = np.cumsum([0, *map(len, parts)])
    pieces = np.cumsum([0, *(len(part.ids) for part in parts)])
    located = np.cumsum([0, *(len(part.offsets) for part in parts)])
    whole = Encoded(
        np.empty(pieces[-1], np.int32),
        np.empty((located[-1], 2), np.int32),
        np.empty(located[-1], np.int32),
        np.zeros(texts[-1] + 1, np.int64),
    )

    def copy(k: int) -> None:
        whole.ids[pieces[k] : pieces[k + 1]] = parts[k].ids
        whole.offsets[located[k] : located[k + 1]] = parts[k].offsets
        whole.word_ids[located[k] : located[k + 1]] = parts[k].word_ids
        whole.boundaries[texts[k] + 1 : texts[k + 1] + 1] = parts[k].boundaries[1:] + pieces[k]

    each(copy, range(len(parts)))
    return whole


class Padded(NamedTuple):
    """N rows of one width S, as a model takes them, each int32 [N, S]."""

    input_ids: np.ndarray
    token_types: np.ndarray  # 0 where padded
    attention_mask: np.ndarray  # 1 at a token, 0 where padded


@dataclass(frozen=True, eq=False)
class Rows:
    """N rows of T tokens in all; [CLS] and [SEP] have the offsets (0, 0) and the word id -1.

    ids          int32 [T]
    token_types  int32 [T], 0 up to the first [SEP], 1 after it
    offsets      int32 [T, 2], counted in the text the piece came from, first or second; empty
                 where the texts were encoded without
    word_ids     int32 [T], likewise
    boundaries   int64 [N + 1]
    is_cut       bool [N], true where a row lost a token
    """

    ids: np.ndarray
    token_types: np.ndarray
    offsets: np.ndarray
    word_ids: np.ndarray
    boundaries: np.ndarray
    is_cut: np.ndarray

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    @property
    def num_cut(self) -> int:
        return int(self.is_cut.sum())

    def padded(self, pad_id: int, *, length: int | None = None, multiple_of: int = 1) -> Padded:
        """Pad to `length` or to the longest row, rounded up. Errors: ValueError if `length` is less
        than a row or no multiple.
        """
        lengths = np.diff(self.boundaries)
        longest = int(lengths.max(initial=0))
        if length is not None and longest > length:
            fault = f"row {lengths.argmax()} has {longest} tokens, more than length = {length}"
            raise ValueError(f"{fault}: cut the rows with max_length = {length}")
        width = round_up(longest if length is None else length, multiple_of)
        if length not in (None, width):
            raise ValueError(f"length = {length} is no multiple of {multiple_of}: take {width}")
        rows = np.arange(len(self))
        ids = pad(self.ids, self.boundaries, rows, width, pad_id)
        token_types = pad(self.token_types, self.boundaries, rows, width, 0)
        return Padded(ids, token_types, (np.arange(width) < lengths[:, None]).astype(np.int32))


def make_rows(
    first: Encoded,
    second: Encoded | None,
    vocabulary: Vocabulary,
    *,
    max_length: int | None = None,
    truncation: Truncation = "longest_first",
) -> Rows:
    """Put [CLS] and [SEP] (see `Vocabulary.borders`) around each text, or text and second text.

    A row longer than `max_length` (special tokens included; None: no limit) is cut by `truncation`:

    longest_first  the longer text, if equal the second, loses its last token until the row fits
                   (google-research/bert `run_classifier.py`, `_truncate_seq_pair`)
    only_first     the first text alone is cut, of which one token must stay
    only_second    the second text alone, likewise
    none           nothing is cut

    Errors: ValueError when a row does not fit, naming the first; when `max_length` has no room for
    a token of each text; for an unknown truncation; for unequal numbers of texts; for a GPT that
    has no borders yet.
    """
    before, between, after = borders(vocabulary)
    if second is not None and len(second) != len(first):
        raise ValueError(f"{len(first)} texts, but {len(second)} second texts")
    a_all = np.diff(first.boundaries)
    b_all = np.zeros_like(a_all) if second is None else np.diff(second.boundaries)
    a, b = _kept(a_all, b_all, second is not None, max_length, truncation)

    boundaries = np.zeros(len(first) + 1, np.int64)
    np.cumsum(a + b + (2 if second is None else 3), out=boundaries[1:])
    starts, seconds = boundaries[:-1], boundaries[:-1] + 2 + a
    parts = [(starts + 1, a, first)]
    if second is not None:
        parts.append((seconds, b, second))
    num_tokens = int(boundaries[-1])
    num_located = num_tokens if all(len(e.word_ids) == len(e.ids) for _, _, e in parts) else 0
    ids = np.empty(num_tokens, np.int32)
    token_types = np.zeros(num_tokens, np.int32)
    offsets = np.zeros((num_located, 2), np.int32)
    word_ids = np.full(num_located, -1, np.int32)
    ids[starts], ids[starts + 1 + a] = before, between
    ids[boundaries[1:] - 1] = after
    for begins, kept, encoded in parts:
        there = concatenated_ranges(begins, kept)
        here = concatenated_ranges(encoded.boundaries[:-1], kept)
        ids[there] = encoded.ids[here]
        if num_located:
            offsets[there] = encoded.offsets[here]
            word_ids[there] = encoded.word_ids[here]
    if second is not None:
        token_types[concatenated_ranges(seconds, b + 1)] = 1
    is_cut = (a < a_all) | (b < b_all)
    return Rows(ids, token_types, offsets, word_ids, boundaries, is_cut)


def borders(vocabulary: Vocabulary) -> tuple[int, int, int]:
    """The pieces before, between and after texts. Errors: ValueError for a GPT without it."""
    if vocabulary.borders is None:
        raise ValueError(
            "a GPT as it was pre-trained has no pieces to stand around a text: "
            "`bertsmith finetune` adds them"
        )
    return vocabulary.borders


def _kept(
    a: np.ndarray, b: np.ndarray, is_pair: bool, max_length: int | None, truncation: Truncation
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tokens kept of the first and the second text of every row."""
    if truncation not in get_args(Truncation):
        known = ", ".join(get_args(Truncation))
        raise ValueError(f"truncation is {truncation!r}: known are {known}")
    if truncation == "only_second" and not is_pair:
        raise ValueError("truncation is 'only_second', but there are no second texts")
    if max_length is None:
        return a, b
    room = text_room(max_length, is_pair)
    if truncation == "longest_first":
        return truncate_pairs(a, b, room)
    if truncation == "only_first":
        a = np.minimum(a, np.maximum(room - b, 1))
    elif truncation == "only_second":
        b = np.minimum(b, np.maximum(room - a, 1))
    too_long = np.flatnonzero(a + b > room)
    if len(too_long):
        fault = f"row {too_long[0]} does not fit into max_length = {max_length}"
        hint = "allow more tokens, or cut with 'longest_first'"
        raise ValueError(f"{fault} with truncation {truncation!r}: {hint}")
    return a, b


def text_room(max_length: int, is_pair: bool) -> int:
    """Number of tokens of a text or pair that fit into a row; ValueError for less than one each.

    >>> text_room(512, is_pair=False), text_room(512, is_pair=True)
    (510, 509)
    """
    num_special = 3 if is_pair else 2
    smallest = 2 * num_special - 1
    if max_length < smallest:
        raise ValueError(f"max_length = {max_length} is too short: at least {smallest}")
    return max_length - num_special


def truncate_pairs(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tokens kept of each pair, int64 [N], [N] -> int64 [N], [N].

    The longer text (b if equal) loses its last token until both fit in `room`.

    >>> truncate_pairs(np.array([9, 2, 9]), np.array([3, 9, 9]), 7)
    (array([4, 2, 4]), array([3, 5, 3]))
    """
    a_kept = np.minimum(a, np.maximum(room - b, (room + 1) // 2))
    return a_kept, np.minimum(b, room - a_kept)


def pad(
    values: np.ndarray, boundaries: np.ndarray, indices: np.ndarray, width: int, filler: int
) -> np.ndarray:
    """Rows `indices` [B] of flat values [T], with `filler` after their ends: [B, S].

    >>> pad(np.array([7, 8, 9]), np.array([0, 1, 3]), np.array([1, 0]), 4, 0)
    array([[8, 9, 0, 0],
           [7, 0, 0, 0]])
    """
    starts, lengths = boundaries[:-1][indices], np.diff(boundaries)[indices]
    result = np.full((len(indices), width), filler, values.dtype)
    is_token = np.arange(width) < lengths[:, None]
    result[is_token] = values[concatenated_ranges(starts, lengths)]
    return result


def round_up(number: int, multiple_of: int) -> int:
    """Round up to a multiple: 9 to 16 for 8."""
    return -(-number // multiple_of) * multiple_of


def concatenated_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Numbers start, start + 1, ... of every range, one range after the other, int64.

    >>> concatenated_ranges(np.array([10, 50, 20]), np.array([2, 0, 3]))
    array([10, 11, 20, 21, 22])
    """
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)
