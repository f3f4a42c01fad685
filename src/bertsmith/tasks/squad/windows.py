"""Questions -> windows over their contexts: [CLS] question [SEP] part of the context [SEP].

A context too long for one window is read in several that overlap (google-research/bert
`run_squad.py`, `convert_examples_to_features`). Everything is flat, see `features.py`; a context is
tokenised once, however many questions are about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertsmith.base.jit import compiled
from bertsmith.tasks.features import Features
from bertsmith.tasks.squad.questions import Questions
from bertsmith.tasks.task import Layout
from bertsmith.text.tokenizer.rows import Encoded
from bertsmith.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Windows(Features):
    """W windows of Q questions, in the questions' order; T tokens, D context tokens.

    `labels` are int64 [W, 2]: places in the window of the answer's first and last token, 0 and 0
    ([CLS]) where the window does not hold all of it. `num_truncated` counts cut questions. A unit
    of training is a window of a question whose answer is not lost.
    """

    question_windows: np.ndarray  # int64 [Q + 1]: windows of question q, from and to
    context_begins: np.ndarray  # int64 [W], place in the window of its first context token
    context_tokens: np.ndarray  # int64 [W], number of that token in context_offsets
    context_offsets: np.ndarray  # int32 [D, 2], characters of the context a token is from
    is_max_context: np.ndarray  # bool [T], true where no other window shows more around the token
    learnable: np.ndarray  # int64 [U], the windows that training draws from

    @property
    def unit_lengths(self) -> np.ndarray:
        return self.lengths[self.learnable]

    @property
    def sorted_together(self) -> int:
        """One batch: questions about one context are as long as each other, and sorted over
        several batches they would meet in one. Pieces of a batch are short enough to pad little."""
        return 1

    def batch(self, units: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
        return super().batch(self.learnable[units], pad_id)

    def long_note(self, layout: Layout) -> str | None:
        if not self.num_truncated:
            return None
        cut, questions = f"{self.num_truncated:,}", f"{len(self.question_windows) - 1:,} questions"
        return f"{cut} of {questions} have more than {most_asked(layout)} tokens and lose their end"

    def long_remedy(self, layout: Layout) -> str:
        flag = "max-question" if most_asked(layout) == layout.max_question else "max-length"
        return f"a larger --{flag} reads more of them"

    def characters(self, window: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Characters of the context that flat token numbers [N] of windows [N] are from: [N, 2]."""
        begins = self.boundaries[window] + self.context_begins[window]
        return self.context_offsets[self.context_tokens[window] + tokens - begins]


def most_asked(layout: Layout) -> int:
    """Tokens that a question keeps: `max_question`, but a quarter of a window is the context's.

    >>> most_asked(Layout(max_length=384)), most_asked(Layout(max_length=64))
    (64, 45)
    """
    return min(layout.max_question, 3 * (layout.max_length - 3) // 4)


def featurise_questions(tokenizer: Tokenizer, questions: Questions, layout: Layout) -> Windows:
    """Tokenise questions and lay them out in windows of at most `max_length` tokens.

    A question keeps its first tokens, as many as `most_asked` says. A window begins `stride` tokens
    after the one before it. The token of an answer that begins or ends inside it belongs to the
    answer. (There the original takes all of the answer's words, punctuation included, when the
    answer's own tokens are not found among theirs.)

    Errors: ValueError when `max_length` leaves no room for a token of the context.
    """
    max_length, most = layout.max_length, most_asked(layout)
    if max_length < 4:
        raise ValueError(f"max_length = {max_length} has no room for a context: at least 4")
    asked = tokenizer.encode_batch(questions.texts, offsets=False, max_pieces=most + 1)
    contexts = tokenizer.encode_batch(questions.contexts)
    num_asked = np.diff(asked.boundaries)
    num_truncated = int((num_asked > most).sum())
    num_asked = np.minimum(num_asked, most)
    room = max_length - 3 - num_asked
    step = np.minimum(room, layout.stride)
    num_tokens = np.diff(contexts.boundaries)[questions.context_numbers]
    num_windows = 1 + -(-np.maximum(num_tokens - room, 0) // step)

    question_windows = _cumulated(num_windows)
    numbers = np.repeat(np.arange(len(questions)), num_windows)
    begins = (np.arange(len(numbers)) - question_windows[numbers]) * step[numbers]  # [W]
    counts = np.minimum(room[numbers], num_tokens[numbers] - begins)  # [W]
    boundaries = _cumulated(num_asked[numbers] + counts + 3)
    context_tokens = contexts.boundaries[questions.context_numbers[numbers]] + begins
    ids = np.empty(boundaries[-1], np.int32)
    token_types = np.zeros(boundaries[-1], np.int32)
    is_max_context = np.zeros(boundaries[-1], np.bool_)
    vocabulary = tokenizer.vocabulary
    _write_rows(
        (asked.ids, asked.boundaries, num_asked),
        (contexts.ids, context_tokens, counts),
        (numbers, boundaries, vocabulary.cls_id, vocabulary.sep_id),
        (ids, token_types),
    )
    _mark_max_context(question_windows, begins, counts, boundaries, is_max_context)
    labels = None
    if questions.answers is not None:
        places = _answer_tokens(questions, contexts)[numbers] - context_tokens[:, None]  # [W, 2]
        inside = (places[:, 0] >= 0) & (places[:, 1] < counts) & (places[:, 0] <= places[:, 1])
        labels = np.where(inside[:, None], places + num_asked[numbers, None] + 2, 0)
    return Windows(
        ids=ids,
        token_types=token_types,
        boundaries=boundaries,
        labels=labels,
        max_length=max_length,
        num_truncated=num_truncated,
        question_windows=question_windows,
        context_begins=num_asked[numbers] + 2,
        context_tokens=context_tokens,
        context_offsets=contexts.offsets,
        is_max_context=is_max_context,
        learnable=np.flatnonzero(~questions.is_lost[numbers]),
    )


def _answer_tokens(questions: Questions, contexts: Encoded) -> np.ndarray:
    """The first and last context token that share a character with the answer, int64 [Q, 2].

    First after last where there is none. All contexts are laid out on one line of characters, on
    which tokens lie in order.
    """
    lengths = np.array([len(text) + 1 for text in questions.contexts], np.int64)
    line = _cumulated(lengths)[:-1]  # [C]: where each context begins
    places = contexts.offsets + np.repeat(line, np.diff(contexts.boundaries))[:, None]  # [D, 2]
    spans = questions.spans + line[questions.context_numbers, None]
    first = np.searchsorted(places[:, 1], spans[:, 0], side="right")
    last = np.searchsorted(places[:, 0], spans[:, 1], side="left") - 1
    last[questions.spans[:, 0] < 0] = -1
    first[questions.spans[:, 0] < 0] = 0
    return np.stack([first, last], axis=1)


def _cumulated(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


@compiled
def _write_rows(asked, contexts, rows, out):
    """[CLS] question [SEP] context part [SEP], and 1 as the type of the second half."""
    asked_ids, asked_boundaries, num_asked = asked
    context_ids, context_tokens, counts = contexts
    numbers, boundaries, cls_id, sep_id = rows
    ids, token_types = out
    for w in range(len(numbers)):
        place, question = boundaries[w], numbers[w]
        ids[place] = cls_id
        place += 1
        begin = asked_boundaries[question]
        for k in range(begin, begin + num_asked[question]):
            ids[place] = asked_ids[k]
            place += 1
        ids[place] = sep_id
        place += 1
        for k in range(context_tokens[w], context_tokens[w] + counts[w]):
            ids[place] = context_ids[k]
            token_types[place] = 1
            place += 1
        ids[place] = sep_id
        token_types[place] = 1


@compiled
def _mark_max_context(question_windows, begins, counts, boundaries, is_max_context):
    """Mark each context token in the window that shows most around it.

    That is min(tokens to the left, to the right) + 0.01 * tokens of the window; of equal windows
    the first (`_check_is_max_context` of the original).
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
            behind = boundaries[best + 1] - 1 - counts[best]  # flat number of its first
            is_max_context[behind + token - begins[best]] = True
