"""Questions -> windows over their contexts: [CLS] question [SEP] part of the context [SEP].

A context too long for one window is read in several that overlap (google-research/bert
`run_squad.py`, `convert_examples_to_features`), and tokenized once for all of its questions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.tasks.features import Features, cumulate
from bertsmith.tasks.squad.questions import Questions
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.rows import Encoded, borders
from bertsmith.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Windows(Features):
    """W windows of Q questions, in the questions' order; T tokens, D context tokens.

    `labels` are int64 [W, 2]: positions in the window of the answer's first and last token, 0 and 0
    ([CLS]) where the window does not hold all of it. `num_truncated` counts cut questions. A unit
    of training is a window of a question whose answer is not lost.
    """

    question_windows: np.ndarray  # int64 [Q + 1]: windows of question q, from and to
    context_begins: np.ndarray  # int64 [W], position in the window of its first context token
    context_tokens: np.ndarray  # int64 [W], index of that token in context_offsets
    context_offsets: np.ndarray  # int32 [D, 2], characters of the context a token is from
    is_max_context: np.ndarray  # bool [T], true where no other window shows more around the token
    learnable: np.ndarray  # int64 [U], the windows that training draws from

    @property
    def unit_lengths(self) -> np.ndarray:
        return self.lengths[self.learnable]

    @property
    def sorted_together(self) -> int:
        """One batch: questions about one context are of one length, and would meet in a batch."""
        return 1

    def batch(self, units: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
        return super().batch(self.learnable[units], pad_id)

    def long_note(self, encoding: EncodingSettings) -> str | None:
        if not self.num_truncated:
            return None
        counts = f"{self.num_truncated:,} of {len(self.question_windows) - 1:,} questions"
        return f"{counts} have more than {max_question_tokens(encoding)} tokens and lose their end"

    def long_hint(self, encoding: EncodingSettings) -> str:
        is_limit = max_question_tokens(encoding) == encoding.max_question_length
        return f"a larger maximum {'question ' * is_limit}length reads more of them"

    def characters(self, window: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Characters of the context that `tokens` [N], indices into `ids`, are from: [N, 2]."""
        begins = self.boundaries[window] + self.context_begins[window]
        return self.context_offsets[self.context_tokens[window] + tokens - begins]


def max_question_tokens(encoding: EncodingSettings) -> int:
    """Tokens a question keeps: `max_question_length`, but a quarter of a window is the context's.

    >>> [max_question_tokens(EncodingSettings(length)) for length in (384, 64)]
    [64, 45]
    """
    return min(encoding.max_question_length, 3 * (encoding.max_length - 3) // 4)


def featurize_questions(
    tokenizer: Tokenizer, questions: Questions, encoding: EncodingSettings
) -> Windows:
    """Tokenize questions and lay them out in windows of at most `max_length` tokens.

    A question keeps its first `max_question_tokens`. A window begins `doc_stride` tokens after the
    one before it. A token in which an answer begins or ends belongs to it; the original takes all
    of the answer's words, with punctuation, where its own tokens are not found among theirs.

    Errors: ValueError when `max_length` leaves no room for a token of the context.
    """
    max_length, most = encoding.max_length, max_question_tokens(encoding)
    if max_length < 4:
        raise ValueError(f"max_length = {max_length} has no room for a context: at least 4")
    asked = tokenizer.encode_batch(questions.texts, offsets=False, max_pieces=most + 1)
    contexts = tokenizer.encode_batch(questions.contexts)
    num_asked = np.minimum(np.diff(asked.boundaries), most)
    room = max_length - 3 - num_asked
    step = np.minimum(room, encoding.doc_stride)
    num_tokens = np.diff(contexts.boundaries)[questions.context_numbers]
    num_windows = 1 + -(-np.maximum(num_tokens - room, 0) // step)

    question_windows = cumulate(num_windows)
    owners = np.repeat(np.arange(len(questions)), num_windows)  # [W]: the question of each window
    begins = (np.arange(len(owners)) - question_windows[owners]) * step[owners]
    counts = np.minimum(room[owners], num_tokens[owners] - begins)
    context_begins = num_asked[owners] + 2
    boundaries = cumulate(context_begins + counts + 1)
    context_tokens = contexts.boundaries[questions.context_numbers[owners]] + begins
    before, between, after = borders(tokenizer.vocabulary)
    ids = np.full(boundaries[-1], after, np.int32)
    ids[boundaries[:-1]], ids[boundaries[:-1] + context_begins - 1] = before, between
    token_types, is_max_context = np.zeros_like(ids), np.zeros(len(ids), np.bool_)
    _write_rows(
        (boundaries, context_begins, ids, token_types),
        (asked.boundaries[owners], asked.ids),
        (context_tokens, contexts.ids),
    )
    _mark_max_context(question_windows, begins, counts, boundaries, is_max_context)
    labels = None
    if questions.answers is not None:
        positions = _answer_tokens(questions, contexts)[owners] - context_tokens[:, None]  # [W, 2]
        first, last = positions.T
        inside = (first >= 0) & (last < counts) & (first <= last)
        labels = np.where(inside[:, None], positions + context_begins[:, None], 0)
    return Windows(
        ids=ids,
        token_types=token_types,
        boundaries=boundaries,
        labels=labels,
        max_length=max_length,
        num_truncated=int((np.diff(asked.boundaries) > most).sum()),
        question_windows=question_windows,
        context_begins=context_begins,
        context_tokens=context_tokens,
        context_offsets=contexts.offsets,
        is_max_context=is_max_context,
        learnable=np.flatnonzero(~questions.is_lost[owners]),
    )


def _answer_tokens(questions: Questions, contexts: Encoded) -> np.ndarray:
    """The first and last context token that share a character with the answer, int64 [Q, 2].

    First after last where there is none. All contexts are laid out on one line of characters, on
    which tokens lie in order.
    """
    line = cumulate(np.array([len(text) + 1 for text in questions.contexts], np.int64))[:-1]  # [C]
    places = contexts.offsets + np.repeat(line, np.diff(contexts.boundaries))[:, None]  # [D, 2]
    spans = questions.spans + line[questions.context_numbers, None]
    first = np.searchsorted(places[:, 1], spans[:, 0], side="right")
    last = np.searchsorted(places[:, 0], spans[:, 1], side="left") - 1
    has_none = questions.spans[:, 0] < 0
    return np.stack([np.where(has_none, 0, first), np.where(has_none, -1, last)], axis=1)


@compiled
def _write_rows(rows, asked, contexts):
    """The question and the part of its context into each row of [CLS] and [SEP], and its types."""
    boundaries, context_begins, ids, token_types = rows
    asked_starts, asked_ids = asked
    context_starts, context_ids = contexts
    for w in range(len(asked_starts)):
        row, second = ids[boundaries[w] : boundaries[w + 1]], context_begins[w]
        row[1 : second - 1] = asked_ids[asked_starts[w] : asked_starts[w] + second - 2]
        row[second:-1] = context_ids[context_starts[w] : context_starts[w] + len(row) - second - 1]
        token_types[boundaries[w] + second : boundaries[w + 1]] = 1


@compiled
def _mark_max_context(question_windows, begins, counts, boundaries, is_max_context):
    """Mark each context token in the window that shows most around it (the first if equal).

    That is min(tokens to the left, to the right) + 0.01 * tokens of the window
    (`_check_is_max_context` of the original).
    """
    for q in range(len(question_windows) - 1):
        first, after = question_windows[q], question_windows[q + 1]
        lowest = first  # the first window that reaches the token
        for token in range(begins[after - 1] + counts[after - 1]):
            while begins[lowest] + counts[lowest] <= token:
                lowest += 1
            best, best_score = lowest, -1.0
            w = lowest
            while w < after and begins[w] <= token:
                left = token - begins[w]
                score = min(left, counts[w] - 1 - left) + 0.01 * counts[w]
                if score > best_score:
                    best, best_score = w, score
                w += 1
            first_token = boundaries[best + 1] - 1 - counts[best]
            is_max_context[first_token + token - begins[best]] = True
