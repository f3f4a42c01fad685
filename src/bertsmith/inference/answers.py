"""The answers of a `Predictor`: frozen, each with `to_dict` for JSON and a repr of one line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from bertsmith.base.terminal import shortened


@dataclass(frozen=True, repr=False)
class Answer:
    """Every answer."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, also those of answers inside."""
        return asdict(self)

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        shown = (
            f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v!r}" for k, v in values.items()
        )
        return shortened(f"{type(self).__name__}({', '.join(shown)})", 100)


@dataclass(frozen=True, repr=False)
class Label(Answer):
    """The class of a text or pair.

    >>> answer = Label("good", 0.9312, {"bad": 0.0688, "good": 0.9312})
    >>> answer, answer.probabilities["bad"]
    (Label(label='good', confidence=0.931), 0.0688)
    """

    label: str
    confidence: float  # the probability of the label
    probabilities: dict[str, float] = field(repr=False, hash=False)  # of all classes


@dataclass(frozen=True, repr=False)
class LabelSet(Answer):
    """The labels of a text or pair, any number of them, by a multi-label model."""

    labels: tuple[str, ...]
    probabilities: dict[str, float] = field(hash=False)  # of each label by itself


@dataclass(frozen=True, repr=False)
class Entity(Answer):
    """A named entity: the characters start:end of the text."""

    text: str
    start: int
    end: int
    type: str
    confidence: float  # the mean probability of its words' tags


@dataclass(frozen=True, repr=False)
class TaggedText(Answer):
    """The words of a text with a tag each, and the entities that the tags say.

    >>> TaggedText(("Ann",), ("B-PER",), (0.9,), (Entity("Ann", 0, 3, "PER", 0.9),)).entities
    (Entity(text='Ann', start=0, end=3, type='PER', confidence=0.9),)
    """

    tokens: tuple[str, ...] = field(repr=False)
    tags: tuple[str, ...]
    confidences: tuple[float, ...] = field(repr=False)  # the probability of each tag
    entities: tuple[Entity, ...]


@dataclass(frozen=True, repr=False)
class AnswerSpan(Answer):
    """The answer to a question: the characters start:end of its context; "" where there is none.

    >>> AnswerSpan("", 0, 0, 0.75).has_answer
    False
    """

    text: str
    start: int
    end: int
    confidence: float
    null_odds: float | None = field(default=None, repr=False)
    # the score of "no answer" minus that of the best text; None of a model that always answers

    @property
    def has_answer(self) -> bool:
        """False for "the context has no answer", which models of SQuAD 2.0 may say."""
        return self.text != ""


@dataclass(frozen=True, repr=False)
class Choice(Answer):
    """The option that goes on best from a prompt."""

    option: str
    index: int  # of the option, from 0
    confidence: float
    probabilities: tuple[float, ...] = field(repr=False)  # of all options


@dataclass(frozen=True, repr=False)
class FillCandidate(Answer):
    """A piece of the vocabulary for a [MASK].

    >>> FillCandidate("cat", 4937, 0.31).to_dict()
    {'token': 'cat', 'id': 4937, 'probability': 0.31}
    """

    token: str
    id: int
    probability: float


@dataclass(frozen=True, repr=False)
class WordScore(Answer):
    """A word, or sign of punctuation, of a text that was explained, and its score."""

    text: str
    start: int
    end: int
    segment: str  # "text" or "text_pair", of which start:end are the characters
    score: float


@dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """The part of each word in an answer: see `Predictor.explain`.

    >>> words = WordScore("good", 2, 6, "text", 1.21), WordScore("film", 7, 11, "text", -0.1)
    >>> Explanation(3.2, None, "occlusion", "occlusion: how far ...", words).words[0]
    WordScore(text='good', start=2, end=6, segment='text', score=1.21)
    """

    answer: Label | LabelSet | float  # the model's to the text
    label: str | None  # the one that is explained; None of a score, and of rollout
    method: str
    measures: str = field(repr=False)  # what a score means, and what not
    words: tuple[WordScore, ...]  # those that the model has read, the first text's first


@dataclass(frozen=True, repr=False, eq=False)
class Attention(Answer):
    """Attention of the tokens of a text or pair: see `Predictor.attention`.

    >>> Attention(("[CLS]", "[SEP]"), np.full((1, 1, 2, 2), 0.5)).to_dict()["weights"]
    [[[[0.5, 0.5], [0.5, 0.5]]]]
    """

    tokens: tuple[str, ...]
    weights: np.ndarray = field(repr=False)  # float32 [layers, heads, T, T], rows that add up to 1

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "weights": self.weights.tolist()}
