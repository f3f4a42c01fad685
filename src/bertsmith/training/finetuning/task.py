"""Fine-tuning as the loop sees it: batches, loss, dev metrics (paper section 4.1, A.3); its parts.

`TrimmedEmbeddings` trains the rows of the token table that the data uses. A task's texts have a few
thousand of the vocabulary's pieces. The other rows have no gradient: all that AdamW does to them is
decay them, each step by one factor for all. Yet half of a small model's weights are such rows, and
the optimizer would read and write them in every step. So they are left out while training goes on,
and come back decayed at its end: the same weights, up to rounding.

`TargetScaler` standardizes scores while they are learned. A head begins near 0, and a step of Adam
moves a weight by the rate whatever the loss is, so that prices or percentages as they stand would
be out of reach of a few epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import SequenceClassifier, TaskModel
from bertsmith.tasks.features import Features, equal_batches
from bertsmith.tasks.metrics import METRICS
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.fit import Batches, EarlyStop
from bertsmith.training.finetuning.task_types.base import ModelTask, TaskType
from bertsmith.training.finetuning.task_types.losses import LOSSES, Objective
from bertsmith.training.loop.task import StepBatch, TrainingState
from bertsmith.training.replicas import TOKENS_AT_ONCE


class TrimmedEmbeddings:
    """The pieces that occur in some features, and a token table of these alone.

    One unused row stays, the longest: it shows what decay does to all of them.
    """

    def __init__(
        self, features: Sequence[Features], table: Tensor, pad_id: int, whole: bool = False
    ) -> None:
        """`table` [V, H] is that of the model before training; `whole`: no row is left out, for a
        language-model loss, which reads all, or a model that knows its pieces by number."""
        counts = np.zeros(len(table), np.int64)
        for part in features:
            counts += np.bincount(part.ids, minlength=len(table))
        used = (counts > 0) | whole
        used[pad_id] = True
        unused = np.flatnonzero(~used)
        self.decay_id = None
        if len(unused):
            norms = table.detach().norm(dim=1).cpu().numpy()
            self.decay_id = int(unused[norms[unused].argmax()])
            used[self.decay_id] = True
        self.rows = np.flatnonzero(used)  # int64 [U]
        self._new_ids = np.zeros(len(table), np.int32)
        self._new_ids[self.rows] = np.arange(len(self.rows), dtype=np.int32)

    def renumbered(self, features: Features) -> Features:
        """The features for the smaller table."""
        return replace(features, ids=self._new_ids[features.ids])

    def shrink(self, model: TaskModel) -> None:
        """Take the unused rows out of the model."""
        weight = model.encoder.embeddings.token.weight
        self._full = weight.detach()
        rows = torch.from_numpy(self.rows).to(weight.device)
        set_token_table(model, self._full[rows], int(self._new_ids[model.config.pad_id]))

    def grow(self, model: TaskModel) -> None:
        """Put the unused rows back, decayed as `decay_id` was."""
        trained = model.encoder.embeddings.token.weight.detach()
        full = self._full
        if self.decay_id is not None:
            before = full[self.decay_id].double()
            after = trained[int(self._new_ids[self.decay_id])].double()
            norm = (before @ before).item()
            if norm > 0:  # else they all are zeros, which decay leaves as they are
                full = full * ((before @ after).item() / norm)
        full = full.clone()
        full[torch.from_numpy(self.rows).to(full.device)] = trained
        set_token_table(model, full, int(self.rows[model.config.pad_id]))


def set_token_table(model: TaskModel, weight: Tensor, pad_id: int) -> None:
    """Give the model another token table, [V, H]."""
    model.encoder.embeddings.token = nn.Embedding.from_pretrained(weight, freeze=False)
    config = replace(model.config, vocab_size=len(weight), pad_id=pad_id)
    model.config = model.encoder.config = config


@dataclass(frozen=True)
class TargetScaler:
    """Mean and standard deviation of the scores of a training set."""

    mean: float
    std: float

    @classmethod
    def fit(cls, scores: np.ndarray) -> TargetScaler:
        """The scale of scores float32 [N], of which at least two differ.

        >>> TargetScaler.fit(np.array([100.0, 300.0], np.float32))
        TargetScaler(mean=200.0, std=100.0)
        """
        return cls(float(scores.mean(dtype=np.float64)), float(scores.std(dtype=np.float64)))

    def standardized(self, scores: np.ndarray) -> np.ndarray:
        """Learning targets in place of scores, float32.

        >>> TargetScaler(200.0, 100.0).standardized(np.array([150.0, 300.0])).tolist()
        [-0.5, 1.0]
        """
        return ((scores.astype(np.float64) - self.mean) / self.std).astype(np.float32)

    @torch.no_grad()
    def transform(self, model: TaskModel) -> None:
        """Make a head that gives scores give standardized ones."""
        assert isinstance(model, SequenceClassifier)
        model.classifier.bias.sub_(self.mean).div_(self.std)
        model.classifier.weight.div_(self.std)

    @torch.no_grad()
    def inverse_transform(self, model: TaskModel) -> None:
        """Undo `transform`."""
        assert isinstance(model, SequenceClassifier)
        model.classifier.bias.mul_(self.std).add_(self.mean)
        model.classifier.weight.mul_(self.std)

    @contextmanager
    def giving_scores(self, model: TaskModel) -> Iterator[None]:
        """Have the head give scores inside the block, and be bit for bit as before after it."""
        assert isinstance(model, SequenceClassifier)
        head = [model.classifier.weight, model.classifier.bias]
        before = [weight.detach().clone() for weight in head]
        self.inverse_transform(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, old in zip(head, before, strict=True):
                    weight.copy_(old)


@dataclass(eq=False)
class FineTuning:
    """The loop's task."""

    task_type: TaskType
    model: TaskModel
    train: Features
    batches: Batches
    """Of the units of `train`."""
    evaluate: Callable[[], dict[str, float]]
    objective: Objective
    engine: Engine
    teacher: np.ndarray | None = None
    """A row of outputs for each unit of `train`."""
    lm_weight: float = 0.0
    """Weight of the loss of the next token, a mean over rows, beside the task's."""

    def advance(self, position: Position) -> Position:
        return self.batches.advance(position)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        """A micro-batch a worker, or as many more as keep each at about `TOKENS_AT_ONCE`.

        The workers' shares have about as many tokens; each is cut into equal numbers of units.
        """
        units = self.batches[position]
        widths = -(-self.train.unit_lengths[units] // 8) * 8  # as they are padded
        shares = [units[rows] for rows in equal_batches(widths, self.engine.workers)]
        micro_batches = [self._micro_batch(share) for share in shares]
        largest = max(micro["ids"].size for micro in micro_batches)
        at_once = TOKENS_AT_ONCE * self.model.config.length_scale
        if self.engine.device.type == "cpu" and largest > at_once:
            rounds = min(math.ceil(largest / at_once), *map(len, shares))
            cut = zip(*(np.array_split(share, rounds) for share in shares), strict=True)
            micro_batches = [self._micro_batch(part) for parts in cut for part in parts]
        tokens = sum(int(micro["lengths"].sum()) for micro in micro_batches)
        labels = sum(self.task_type.num_labelled(micro["labels"]) for micro in micro_batches)
        counts = {"labels": labels, "rows": sum(len(micro["ids"]) for micro in micro_batches)}
        return StepBatch(micro_batches, counts, tokens), self.advance(position)

    def _micro_batch(self, units: np.ndarray) -> dict[str, np.ndarray]:
        micro = self.train.batch(units, self.model.config.pad_id)
        if self.teacher is not None:
            micro["teacher"] = self.teacher[units]
        return micro

    def loss(
        self, model: TaskModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        full = bool((micro["lengths"] == micro["ids"].shape[1]).all())
        rows = batch["ids"], batch["types"], None if full else batch["lengths"]
        lm_loss = None
        if self.lm_weight:
            outputs, lm_loss = model.with_next_tokens(*rows)
        else:
            outputs = model(*rows)
        outputs = outputs.float()
        if self.train.orders > 1:
            outputs = outputs.unflatten(0, (-1, self.train.orders)).mean(1)
        loss, correct = LOSSES[self.task_type.name](outputs, batch, self.objective)
        sums: dict[str, Tensor | float] = {} if correct is None else {"right": correct}
        sums["labels"] = float(self.task_type.num_labelled(micro["labels"]))
        loss = loss / counts["labels"]
        if lm_loss is not None:
            loss = loss + self.lm_weight * lm_loss / counts["rows"]
            sums |= {"lm_loss": lm_loss.detach(), "rows": float(len(micro["ids"]))}
        return loss, sums

    def metrics(self, window: dict[str, float]) -> dict[str, float]:
        figures = {}
        if "right" in window:
            figures["accuracy"] = window["right"] / window["labels"]
        if "lm_loss" in window:
            figures["lm_loss"] = window["lm_loss"] / window["rows"]
        return figures

    def flops(self, batch: StepBatch) -> float:
        return sum(self.model.flops(*micro["ids"].shape) for micro in batch.micro_batches)


@dataclass(frozen=True)
class DevEvaluation:
    """A model's answers on dev, and how good they are."""

    metrics: dict[str, float]
    """Metrics of the first dev set; those of others with its name before them."""
    notes: dict[str, str]
    """Those of them that are 0, or partly, for want of examples, each with the reason."""
    model_task: ModelTask
    """With the thresholds that were tuned on the first dev set."""
    answers: Any
    """To the first dev set."""


class BestOnDev:
    """Measures on dev, and keeps the weights of the best evaluation."""

    def __init__(
        self,
        model: TaskModel,
        measure: Callable[[], DevEvaluation],
        metric: str,
        state: TrainingState,
        patience: int = 0,
    ) -> None:
        """`patience`: evaluations without a gain after which to stop; 0: never."""
        self._model, self._measure, self._metric = model, measure, metric
        self._state, self._patience, self.without_gain = state, patience, 0
        self.weights: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, float]:
        """The metrics now; of equally good ones the last count, which saw more of the data.

        Errors: EarlyStop.
        """
        self.last_evaluation = evaluation = self._measure()
        now, metric = evaluation.metrics, self._metric
        gain = not self.weights or is_better(now, self.evaluation.metrics, metric)
        if gain or not is_better(self.evaluation.metrics, now, metric):
            self.evaluation, self.step = evaluation, self._state.step
            state = self._model.state_dict()
            self.weights = {name: value.detach().clone() for name, value in state.items()}
        self.without_gain = 0 if gain else self.without_gain + 1
        if self._patience and self.without_gain >= self._patience:
            raise EarlyStop(f"no gain in {self._patience} evaluations", now)
        return now

    @property
    def found(self) -> dict[str, int]:
        """The step of the best weights and the evaluations since; {} before the first."""
        return {"step": self.step, "without_gain": self.without_gain} if self.weights else {}

    def resume(self, weights: dict[str, Tensor], step: int, without_gain: int) -> None:
        """Resume with the best weights of a checkpoint; leaves them in the model."""
        self.weights, self.step, self.without_gain = weights, step, without_gain
        self.restore()
        self.evaluation = self._measure()

    def restore(self) -> None:
        """Put the best weights back into the model, whose memory replicas share."""
        with torch.no_grad():
            for name, value in self._model.state_dict().items():
                value.copy_(self.weights[name])


def is_better(figures: Mapping[str, float], than: Mapping[str, float], metric: str) -> bool:
    """True if the metric is better in the first.

    >>> is_better({"accuracy": 0.9}, {"accuracy": 0.8}, "accuracy")
    True
    >>> is_better({"mse": 2.0}, {"mse": 1.0}, "mse")
    False
    """
    if metric in METRICS and METRICS[metric].less_is_better:
        return figures[metric] < than[metric]
    return figures[metric] > than[metric]
