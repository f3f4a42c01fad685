"""Questions about contexts, with the answers people gave and the span of text to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from bertsmith.tasks.examples import describe_words, dev_size, first_copies

Repair = Literal["", "bytes", "elsewhere"]


class Question(NamedTuple):
    """A question, as a reader finds it."""

    id: str
    text: str
    context: int  # index of its context
    answers: list[str] | None  # the correct answers; [] = it has none; None = unknown
    span: tuple[int, int] | None  # the answer to learn: characters of the context, end exclusive
    repair: Repair = ""  # why the span is not where the file said
    place: str = ""  # of the question in its file, for messages


@dataclass(frozen=True)
class Questions:
    """Q questions about C contexts."""

    ids: list[str]
    texts: list[str]
    context_numbers: np.ndarray  # int64 [Q]
    answers: list[list[str]] | None  # None when the file holds none
    spans: np.ndarray  # int64 [Q, 2], -1: no answer, or it is "lost", not in its context
    repairs: list[Repair]
    contexts: list[str]
    source: str  # file name, for messages
    places: list[str]  # of each question in the file, for messages
    rows: list[dict[str, Any]] | None = None  # the full rows, to be written with an answer each

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, found: Sequence[Question], contexts: list[str], source: str) -> Questions:
        """Put together the questions of a file.

        Errors: ValueError when there is none, or two have one id.
        """
        if not found:
            raise ValueError(f"{source}: no questions in this file")
        ids = [question.id for question in found]
        copies = first_copies(ids)
        if (twice := np.flatnonzero(copies != np.arange(len(ids)))).size:
            raise ValueError(f"{source}: two questions have the id '{ids[twice[0]]}'")
        answers = [question.answers for question in found if question.answers is not None]
        assert len(answers) in (0, len(found))
        return cls(
            ids=ids,
            texts=[question.text for question in found],
            context_numbers=np.array([question.context for question in found], np.int64),
            answers=answers or None,
            spans=np.array([question.span or (-1, -1) for question in found], np.int64),
            repairs=[question.repair for question in found],
            contexts=contexts,
            source=source,
            places=[question.place or f"'{question.id}'" for question in found],
        )

    def check_learnable(self) -> None:
        """Errors: ValueError when no question has an answer, or every one is lost."""
        if not self.has_answer.any():
            raise ValueError(
                f"{self.source}: no question has an answer: there is nothing to learn from it"
            )
        lost = self.is_lost
        if lost.any() and not (self.spans[:, 0] >= 0).any():
            raise ValueError(
                f"{self.source}: not one answer is in its context (first:"
                f" {self.places[lost.argmax()]}): answers must be copied out of the context"
            )

    @property
    def has_answer(self) -> np.ndarray:
        """Questions that are known to have an answer, bool [Q]."""
        return np.array([bool(a) for a in self.answers or [[]] * len(self)], bool)

    @property
    def is_lost(self) -> np.ndarray:
        """Questions with an answer that is not in the context: scored, not learned; bool [Q]."""
        return self.has_answer & (self.spans[:, 0] < 0)

    def select(self, indices: Sequence[int] | np.ndarray) -> Questions:
        """The questions at `indices`, in that order, with the contexts they are about."""
        chosen = np.asarray(indices, np.int64)
        kept, numbers = np.unique(self.context_numbers[chosen], return_inverse=True)
        answers = self.answers
        return replace(
            self,
            ids=[self.ids[i] for i in chosen],
            texts=[self.texts[i] for i in chosen],
            context_numbers=numbers,
            answers=None if answers is None else [answers[i] for i in chosen],
            spans=self.spans[chosen],
            repairs=[self.repairs[i] for i in chosen],
            places=[self.places[i] for i in chosen],
            contexts=[self.contexts[c] for c in kept],
        )

    def problems(self) -> list[str]:
        """Faults of the answers: those in another place, and those that are lost."""
        repairs = np.array(self.repairs)
        faults = {
            "answers whose answer_start counts bytes, not characters": repairs == "bytes",
            "answers not at their answer_start, found elsewhere": repairs == "elsewhere",
            "answers not in their context, left out of training": self.is_lost,
        }
        return [
            f"{wrong.sum():,} {fault} (first: {self.places[wrong.argmax()]})"
            for fault, wrong in faults.items()
            if wrong.any()
        ]

    def describe(self) -> str:
        """A line to read before training: counts, lengths, faults."""
        parts = [f"{len(self):,} questions about {len(self.contexts):,} contexts"]
        if self.answers is not None:
            without = int((~self.has_answer).sum())
            parts.append(f"{without:,} without an answer ({without / len(self):.1%})")
        parts.append(f"context {describe_words(self.contexts)}")
        return "; ".join([*parts, *self.problems()])


def locate_answer(
    context: str, answer: str, start: int | None
) -> tuple[tuple[int, int] | None, Repair]:
    """The span of the answer in the context, and why it is not at `start`.

    Tried in this order: at `start`; at `start` counted in bytes of UTF-8, as some tools write it;
    the occurrence nearest to `start`, any white space being as good as any other. Without a
    `start`: the first occurrence of whole words, or the first of any.

    >>> locate_answer("é é é", "é", 3), locate_answer("no, no and yes", "no", 5)
    (((2, 3), 'bytes'), ((4, 6), 'elsewhere'))
    >>> locate_answer("no, no and yes", "maybe", 0), locate_answer("a party of art", "art", None)
    ((None, ''), ((11, 14), ''))
    """
    if not answer.strip():
        return None, ""
    if start is None:
        match = phrase_pattern([answer]).search(context) or re.search(_spelled(answer), context)
        return (match.span() if match else None), ""
    begin = start + len(answer) - len(answer.lstrip())
    bare = answer.strip()
    if start >= 0 and context.startswith(bare, begin):
        return (begin, begin + len(bare)), ""
    if start >= 0 and not context.isascii():
        encoded = context.encode("utf-8", "surrogatepass")
        in_bytes = len(encoded[:start].decode("utf-8", "ignore"))
        if context.startswith(bare, in_bytes):
            return (in_bytes, in_bytes + len(bare)), "bytes"
    found = [match.span() for match in re.finditer(_spelled(answer), context)]
    if not found:
        return None, ""
    return min(found, key=lambda span: abs(span[0] - start)), "elsewhere"


def phrase_pattern(texts: Sequence[str], flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Any of the texts as whole words, the longest of those that begin at one place.

    >>> phrase_pattern(["York", "New York"]).search("in New  York").span()
    (3, 12)
    """
    spelled = {_spelled(text) for text in texts if text.strip()}
    longest_first = sorted(spelled, key=lambda pattern: (-len(pattern), pattern))
    return re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", flags)


def _spelled(text: str) -> str:
    """The pattern of a text with any white space between its words."""
    return r"\s+".join(map(re.escape, text.split()))


def split_questions(questions: Questions, share: float, seed: int) -> tuple[Questions, Questions]:
    """Cut a dev set of about `share` of the contexts, with all their questions, out of a training
    set that came without one. Equal contexts go together. A pure function of its arguments.

    Errors: ValueError when there is only one context.
    """
    original = first_copies(questions.contexts)
    distinct = np.unique(original)
    if len(distinct) < 2:
        raise ValueError(
            f"{questions.source}: a single context cannot be split: name a dev set with `dev`"
        )
    drawn = np.random.default_rng(seed).permutation(distinct)
    chosen = drawn[: dev_size(share, len(distinct))]
    in_dev = np.isin(original, chosen)[questions.context_numbers]
    return questions.select(np.flatnonzero(~in_dev)), questions.select(np.flatnonzero(in_dev))


def summarize_questions(train: Questions, dev: Questions) -> str:
    """Both sets described, and what they share."""
    seen, asked = set(train.contexts), set(_pairs(train))
    contexts = sum(context in seen for context in dev.contexts)
    questions = sum(pair in asked for pair in _pairs(dev))
    return (
        f"train: {train.describe()}\ndev:   {dev.describe()}\nexact duplicates: {contexts:,}"
        f" contexts of dev are also in train, {questions:,} questions with theirs"
    )


def _pairs(questions: Questions) -> list[tuple[str, str]]:
    contexts = [questions.contexts[index] for index in questions.context_numbers]
    return list(zip(questions.texts, contexts, strict=True))
