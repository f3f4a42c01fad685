"""Examples -> rows with labels for the model, and batches of them.

Everything is flat: row k is `boundaries[k]:boundaries[k + 1]`, no Python object per token. Training
draws units: a row, or (choice) the rows of an example. A text that does not fit into a row is cut,
keeps head and tail, or becomes several units, its windows, whose outputs `pool` makes one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.rows import (
    Encoded,
    Rows,
    concatenated_ranges,
    make_rows,
    pad,
    round_up,
    text_room,
    truncate_pairs,
)
from bertsmith.text.tokenizer.tokenizer import Tokenizer

HINTS = {
    "cut": "windows, head and tail, or a larger maximum length read more of them",
    "head-tail": "windows or a larger maximum length read all of them",
    "windows": "a larger maximum length reads more of them",
}
SORTED_TOGETHER = 50  # batches: little padding, yet an order that stays random


@dataclass(frozen=True)
class Features:
    """R rows as flat arrays of T tokens."""

    ids: np.ndarray  # int32 [T]
    token_types: np.ndarray  # int32 [T], 0 in the first text, 1 in the second
    boundaries: np.ndarray  # int64 [R + 1]
    labels: np.ndarray | None  # a unit each: int64 [R], float32 [R] or bool [R, K]
    max_length: int
    num_truncated: int  # examples of which a part is not read
    unit_examples: np.ndarray | None = None
    """With windows: the example each unit is of, int64 [U]. None: a unit is an example."""
    orders: int = 1
    """Rows of a unit, whose outputs are averaged: 2 of a pair that is read in both orders."""

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [R]."""
        return np.diff(self.boundaries)

    @property
    def unit_lengths(self) -> np.ndarray:
        """Tokens of the longest row of each unit, int64 [U]: batches are sorted by it."""
        return self.lengths.reshape(-1, self.orders).max(axis=1)

    @property
    def sorted_together(self) -> int:
        """Number of batches that `training_batches` sorts together."""
        return SORTED_TOGETHER

    def check_lengths(self, positions: int) -> None:
        """Errors: ValueError for a row of more tokens than a model knows positions."""
        if (longest := self.lengths.max(initial=0)) > positions:
            raise ValueError(
                f"a row of {longest} tokens, but the model knows {positions} positions: lower the"
                " length"
            )

    def batch(self, units: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
        """Rows and labels of some units: ids, types [B, S], lengths [B], labels."""
        assert self.labels is not None
        ids, types, lengths = self.padded(self.unit_rows(units), pad_id)
        return {"ids": ids, "types": types, "lengths": lengths, "labels": self.labels[units]}

    def unit_rows(self, units: np.ndarray) -> np.ndarray:
        """The indices of the rows of some units, those of a unit one after the other."""
        return (units[:, None] * self.orders + np.arange(self.orders)).reshape(-1)

    def pooled(self, outputs: np.ndarray, how: str, exclusive: bool = False) -> np.ndarray:
        """The outputs of rows [R, K] as those of examples [N, K]; with windows by `pool`."""
        if self.orders > 1:
            return outputs.reshape(-1, self.orders, outputs.shape[1]).mean(axis=1)
        if self.unit_examples is None:
            return outputs
        return pool(outputs, self.unit_examples, how, exclusive)

    def counts(self) -> dict[str, int]:
        """Numbers of "examples", their "units", and of those that are "cut"; see `long_note`."""
        of = self.unit_examples
        units = len(self.unit_lengths)
        examples = units if of is None else int(of[-1]) + 1
        return {"examples": examples, "units": units, "cut": self.num_truncated}

    def long_note(self, encoding: EncodingSettings) -> str | None:
        """A note on texts that do not fit into a row; None: all fit."""
        return long_note(encoding, **self.counts())

    def long_hint(self, encoding: EncodingSettings) -> str:
        """Name settings that would read more of the texts, in words for Python and commands."""
        return HINTS[encoding.long_texts]

    def of_rows(self, indices: np.ndarray) -> Features:
        """Some of the rows by themselves, without labels."""
        lengths = self.lengths[indices]
        tokens = concatenated_ranges(self.boundaries[indices], lengths)
        ids, types = self.ids[tokens], self.token_types[tokens]
        return Features(ids, types, cumulate(lengths), None, self.max_length, 0)

    def padded(self, indices: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A batch: (input_ids int32 [B, S], token_types int32 [B, S], lengths int32 [B]).

        S is the longest of the batch, rounded up to a multiple of 8 but not above max_length.
        """
        lengths = self.lengths[indices]
        width = min(round_up(int(lengths.max()), 8), self.max_length)
        input_ids = pad(self.ids, self.boundaries, indices, width, pad_id)
        token_types = pad(self.token_types, self.boundaries, indices, width, 0)
        return input_ids, token_types, lengths.astype(np.int32)


def long_note(encoding: EncodingSettings, examples: int, units: int, cut: int) -> str | None:
    """A note on texts that do not fit into a row; None: all fit."""
    at = f"{encoding.max_length} tokens"
    if encoding.long_texts == "windows":
        lost = f"; of {cut:,} the end of the shorter text is lost" if cut else ""
        note = f"{examples:,} examples are read in {units:,} windows of at most {at}{lost}"
        return note if units > examples or lost else None
    part = "end" if encoding.long_texts == "cut" else "middle"
    note = f"{cut:,} of {examples:,} examples have more than {at} and lose their {part}"
    return note if cut else None


def featurize(tokenizer: Tokenizer, examples: Examples, encoding: EncodingSettings) -> Features:
    """Tokenize examples into rows, see `text_rows`; every window of a text has its label.

    Errors: ValueError when max_length leaves no room for a token of each text.
    """
    found = text_rows(tokenizer, examples.texts, examples.pairs, encoding)
    return Features(**found.fields(examples.labels, encoding))


def training_batches(
    lengths: np.ndarray,
    batch_size: int,
    seed: int,
    epoch: int,
    sorted_together: int = SORTED_TOGETHER,
) -> list[np.ndarray]:
    """An epoch in batches of `batch_size` examples (one may be smaller), as arrays of indices.

    Shuffle, sort by length in pools of `sorted_together` batches, cut, shuffle the batches: the
    order is random, a pure function of (seed, epoch). A batch has its shortest example first.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), sorted_together * batch_size):
        pool = order[start : start + sorted_together * batch_size]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[k : k + batch_size] for k in range(0, len(pool), batch_size)]
    return [batches[k] for k in random.permutation(len(batches))]


def token_budget_batches(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Batches for evaluation: longest first, at most `budget` tokens with padding, or one example.

    >>> token_budget_batches(np.array([3, 9, 4, 4]), 10)
    [array([1]), array([2, 3]), array([0])]
    """
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // int(lengths[order[start]]))  # the first is the longest
        batches.append(order[start : start + size])
        start += size
    return batches


def equal_batches(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """At most `count` batches, of which the largest has as few tokens with padding as can be.

    >>> equal_batches(np.array([4, 4, 5, 5, 6, 20]), 2)
    [array([5]), array([4, 2, 3, 0, 1])]
    """
    longest = int(lengths.max())
    budgets = range(longest, longest * len(lengths) + 1)
    enough = bisect_left(
        budgets, True, key=lambda budget: len(token_budget_batches(lengths, budget)) <= count
    )
    return token_budget_batches(lengths, budgets[enough])


class TextRows(NamedTuple):
    """R rows of N texts or pairs."""

    rows: Rows
    texts: np.ndarray | None  # windows: the text of each row, int64 [R]; of a choice, of each unit
    is_cut: np.ndarray  # bool [N], True where a token is in no row
    orders: int = 1  # 2: a pair's rows are its own and that of the other order, in turn

    def fields(self, labels: np.ndarray | None, encoding: EncodingSettings) -> dict[str, Any]:
        """The fields of `Features`, by the labels of the texts."""
        if labels is not None and self.texts is not None:
            labels = labels[self.texts]
        return {
            "ids": self.rows.ids,
            "token_types": self.rows.token_types,
            "boundaries": self.rows.boundaries,
            "labels": labels,
            "max_length": encoding.max_length,
            "num_truncated": int(self.is_cut.sum()),
            "unit_examples": self.texts,
            "orders": self.orders,
        }


def text_rows(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    encoding: EncodingSettings,
    offsets: bool = False,
) -> TextRows:
    """Rows of N texts or pairs, as google-research/bert run_classifier.py has them.

    cut        the head stays; of a pair the longer text loses its last token until both fit
               (`_truncate_seq_pair` there)
    head-tail  as many tokens stay: a quarter is head, the rest tail, as Sun et al. 2019 keep the
               first 128 and the last 382 of 510 (arXiv 1905.05583, section 5.3.1)
    windows    the shorter text of a pair stands in every window, cut to half of the room; the
               longer (the second if equal) is read in windows that begin `stride` tokens apart, or
               less where they are shorter, the last of which ends with the text

    With `both_orders` a pair has two rows, one after the other: the head's linear layer over the
    sum of both states (Radford et al. 2018, section 3.3) is the mean of its outputs, but for the
    scale of its weights. `offsets`: the rows know the places and words of their pieces.

    Errors: ValueError when `max_length` leaves no room for a token of each text.
    """
    if encoding.both_orders == "on" and pairs is not None:
        sides = zip(texts, pairs, strict=True)
        both = [pair for one, other in sides for pair in ((one, other), (other, one))]
        one_order = replace(encoding, both_orders="off")
        first, second = ([pair[side] for pair in both] for side in (0, 1))
        found = text_rows(tokenizer, first, second, one_order, offsets)
        return found._replace(is_cut=found.is_cut[::2], orders=2)
    if encoding.long_texts == "cut":
        rows = tokenizer.rows(texts, pairs, max_length=encoding.max_length, offsets=offsets)
        return TextRows(rows, None, rows.is_cut)
    room = text_room(encoding.max_length, pairs is not None)
    first = tokenizer.encode_batch(texts, offsets=offsets)
    second = None if pairs is None else tokenizer.encode_batch(pairs, offsets=offsets)
    a = np.diff(first.boundaries)
    b = np.zeros_like(a) if second is None else np.diff(second.boundaries)
    if encoding.long_texts == "head-tail":
        a_kept, b_kept = truncate_pairs(a, b, room)
        first = _head_and_tail(first, a_kept)
        second = None if second is None else _head_and_tail(second, b_kept)
        rows = make_rows(first, second, tokenizer.vocabulary)
        return TextRows(rows, None, (a_kept < a) | (b_kept < b))
    kept = np.minimum(np.minimum(a, b), room // 2)
    row_texts, begins, counts = _windows(np.maximum(a, b), room - kept, encoding.doc_stride)
    first_is_long = (a > b)[row_texts]

    def shown(encoded: Encoded, is_long: np.ndarray) -> Encoded:
        starts = encoded.boundaries[row_texts] + np.where(is_long, begins, 0)
        return gather_spans(encoded, starts, np.where(is_long, counts, kept[row_texts]))

    second = None if second is None else shown(second, ~first_is_long)
    rows = make_rows(shown(first, first_is_long), second, tokenizer.vocabulary)
    return TextRows(rows, row_texts, kept < np.minimum(a, b))


def choice_windows(
    tokenizer: Tokenizer,
    contexts: Sequence[str],
    options: list[list[str]],
    encoding: EncodingSettings,
) -> TextRows:
    """Windows over N contexts, each with all n options: U * n rows of U windows, `is_cut` [N * n].

    The options of a window follow each other, next to the same part of the context, to be compared.
    An option keeps half of the room, or what the context leaves of it; the longest one decides how
    much of the context a window shows.

    Errors: ValueError when `max_length` leaves no room for a token of each text.
    """
    room, num_options = text_room(encoding.max_length, is_pair=True), len(options[0])
    first = tokenizer.encode_batch(contexts, offsets=False)
    second = tokenizer.encode_batch([o for row in options for o in row], offsets=False)
    a = np.diff(first.boundaries)
    b = np.diff(second.boundaries).reshape(-1, num_options)
    kept = np.minimum(b, np.maximum(room // 2, room - a)[:, None])  # [N, n]
    units, begins, counts = _windows(a, room - kept.max(axis=1), encoding.doc_stride)
    starts = np.repeat(first.boundaries[units] + begins, num_options)
    contexts_shown = gather_spans(first, starts, np.repeat(counts, num_options))
    starts = second.boundaries[:-1].reshape(-1, num_options)[units]
    options_shown = gather_spans(second, starts.reshape(-1), kept[units].reshape(-1))
    rows = make_rows(contexts_shown, options_shown, tokenizer.vocabulary)
    return TextRows(rows, units, (kept < b).reshape(-1))


def pool(outputs: np.ndarray, texts: np.ndarray, how: str, exclusive: bool) -> np.ndarray:
    """The outputs of windows [R, K] as those of their N texts, float32 [N, K].

    texts      int64 [R], the text of each window: 0 to N - 1 in order, each once or more
    exclusive  the outputs are logits of K classes of which one is right: pool log-probabilities.
               Else each output is for itself: a score, or a label's logit

    mean  the mean of the windows
    max   the largest, so one window that is sure is enough
    vote  of classes the logarithm of the fraction of votes: one of each window for its best class,
          and one divided as the mean of their probabilities, which decides ties; of others the
          median, which is above 0 where most of the windows are

    >>> pooled = pool(np.array([[3.0], [1.0], [2.0]]), np.array([0, 0, 1]), "mean", False)
    >>> pooled.tolist()
    [[2.0], [2.0]]
    """
    firsts = np.flatnonzero(np.diff(texts, prepend=-1))
    sizes = np.diff(np.append(firsts, len(texts)))[:, None]
    values = outputs.astype(np.float64)
    if exclusive:
        values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
    if how == "max":
        pooled = np.maximum.reduceat(values, firsts)
    elif how == "mean":
        pooled = np.add.reduceat(values, firsts) / sizes
    elif exclusive:
        best = np.arange(values.shape[1]) == values.argmax(axis=1)[:, None]
        votes = np.add.reduceat(best, firsts, dtype=np.int64)
        divided = np.add.reduceat(np.exp(values), firsts) / sizes
        pooled = np.log((votes + divided) / (sizes + 1))
    else:
        middles = firsts + (sizes[:, 0] - 1) // 2, firsts + sizes[:, 0] // 2
        ordered = [column[np.lexsort((column, texts))] for column in values.T]
        pooled = np.stack([sum(column[m] for m in middles) / 2 for column in ordered], axis=1)
    return pooled.astype(np.float32)


def _windows(
    lengths: np.ndarray, spans: np.ndarray, stride: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of at most spans [N] tokens over texts of lengths [N], at least one each.

    (Text of each window, its first token, its tokens), each int64 [R].

    >>> _windows(np.array([3, 12]), np.array([5, 5]), stride=4)
    (array([0, 1, 1, 1]), array([0, 0, 4, 7]), array([3, 5, 5, 5]))
    """
    beyond = np.maximum(lengths - spans, 0)
    # no token is skipped; a text without one may stand beside options that take all of the room
    step = np.maximum(np.minimum(spans, stride), 1)
    num_windows = 1 + -(-beyond // step)
    texts = np.repeat(np.arange(len(lengths)), num_windows)
    numbers = concatenated_ranges(np.zeros_like(lengths), num_windows)
    begins = np.minimum(numbers * step[texts], beyond[texts])
    return texts, begins, np.minimum(lengths, spans)[texts]


def _head_and_tail(encoded: Encoded, kept: np.ndarray) -> Encoded:
    """The first quarter and the last three of as many tokens of each text as are kept, [N]."""
    tokens = np.diff(encoded.boundaries)
    head = np.where(kept < tokens, (kept + 2) // 4, kept)
    starts = np.stack([encoded.boundaries[:-1], encoded.boundaries[1:] - (kept - head)], axis=1)
    return gather_spans(encoded, starts, np.stack([head, kept - head], axis=1))


def gather_spans(encoded: Encoded, starts: np.ndarray, counts: np.ndarray) -> Encoded:
    """Spans of tokens as texts of their own: the first token of each and the number, int64 [R]
    or, for several spans one after the other, [R, P]."""
    tokens = concatenated_ranges(starts.reshape(-1), counts.reshape(-1))
    boundaries = cumulate(counts.reshape(len(counts), -1).sum(axis=1))
    located = tokens if len(encoded.word_ids) else tokens[:0]
    return Encoded(
        encoded.ids[tokens], encoded.offsets[located], encoded.word_ids[located], boundaries
    )


def cumulate(counts: np.ndarray) -> np.ndarray:
    """The boundaries of rows of so many tokens.

    >>> cumulate(np.array([2, 3]))
    array([0, 2, 5])
    """
    return np.concatenate([[0], np.cumsum(counts)])
