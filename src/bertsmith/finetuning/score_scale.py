"""The scale of scores: they are learned from their mean, in units of their spread.

A head begins near 0, and a step of Adam moves a weight by the rate whatever the loss is, so that
prices or percentages as they stand would be out of reach of a few epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bertsmith.model.heads import SequenceClassifier, TaskModel

HEAD = ("classifier.weight", "classifier.bias")


@dataclass(frozen=True)
class ScoreScale:
    """Mean and standard deviation of the scores of a training set."""

    mean: float
    spread: float

    @classmethod
    def of(cls, scores: np.ndarray) -> ScoreScale:
        """That of scores float32 [N], of which at least two differ.

        >>> ScoreScale.of(np.array([100.0, 300.0], np.float32))
        ScoreScale(mean=200.0, spread=100.0)
        """
        return cls(float(scores.mean(dtype=np.float64)), float(scores.std(dtype=np.float64)))

    def standardised(self, scores: np.ndarray) -> np.ndarray:
        """What is learned in place of scores, float32.

        >>> ScoreScale(200.0, 100.0).standardised(np.array([150.0, 300.0])).tolist()
        [-0.5, 1.0]
        """
        return ((scores.astype(np.float64) - self.mean) / self.spread).astype(np.float32)

    @torch.no_grad()
    def to_standardised(self, model: TaskModel) -> None:
        """Let a head that gives scores give what is learned in their place."""
        assert isinstance(model, SequenceClassifier)
        model.classifier.bias.sub_(self.mean).div_(self.spread)
        model.classifier.weight.div_(self.spread)

    @torch.no_grad()
    def to_scores(self, model: TaskModel) -> None:
        """The way back."""
        assert isinstance(model, SequenceClassifier)
        model.classifier.bias.mul_(self.spread).add_(self.mean)
        model.classifier.weight.mul_(self.spread)

    @contextmanager
    def giving_scores(self, model: TaskModel) -> Iterator[None]:
        """Inside the head gives scores, as it will when it is written; behind it is as before."""
        head = [weight for name, weight in model.named_parameters() if name in HEAD]
        before = [weight.detach().clone() for weight in head]
        self.to_scores(model)
        yield
        with torch.no_grad():
            for weight, old in zip(head, before, strict=True):
                weight.copy_(old)
