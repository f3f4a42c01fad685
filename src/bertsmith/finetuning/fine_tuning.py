"""Fine-tuning as the loop sees it: batches, loss and dev figures (paper section 4.1, A.3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from bertsmith.corpus.stream import Position
from bertsmith.finetuning.kind import Kind
from bertsmith.finetuning.losses import Objective
from bertsmith.model.heads import TaskModel
from bertsmith.tasks.features import Features, training_batches
from bertsmith.tasks.metrics import METRICS
from bertsmith.training.cores import TOKENS_AT_ONCE
from bertsmith.training.engine import Engine
from bertsmith.training.task import State, StepBatch


class FineTuning:
    """The loop's task. A position's index counts batches, not examples."""

    def __init__(
        self,
        kind: Kind,
        model: TaskModel,
        train: Features,
        evaluate: Callable[[], dict[str, float]],
        objective: Objective,
        batch_size: int,
        seed: int,
        engine: Engine,
        teacher: np.ndarray | None = None,
    ) -> None:
        """`seed` is that of the order. `teacher` holds a row of outputs for each unit of train."""
        self.kind, self.model, self.train, self.evaluate = kind, model, train, evaluate
        self.objective, self.teacher = objective, teacher
        self.batch_size, self.seed, self.engine = batch_size, seed, engine
        self.batches_per_epoch = len(self._batches(0))
        self._batches = functools.lru_cache(maxsize=2)(self._batches)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        train, together = self.train, self.train.sorted_together
        return training_batches(train.unit_lengths, self.batch_size, self.seed, epoch, together)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        pieces = self._pieces(self._batches(position.epoch)[position.index])
        tokens = sum(int(piece["lengths"].sum()) for piece in pieces)
        labels = sum(self.kind.num_labelled(piece["labels"]) for piece in pieces)
        return StepBatch(pieces, {"labels": labels}, tokens), self.advance(position)

    def _pieces(self, units: np.ndarray) -> list[dict[str, np.ndarray]]:
        """A batch in pieces: one a worker, or as many more as keep each about `TOKENS_AT_ONCE`."""
        workers = min(self.engine.workers, len(units))
        pieces = self._cut(units, workers)
        tokens = max(piece["ids"].size for piece in pieces)
        if self.engine.device.type == "cpu" and tokens > TOKENS_AT_ONCE:
            rounds = math.ceil(tokens / TOKENS_AT_ONCE)
            pieces = self._cut(units, min(workers * rounds, len(units)))
        return pieces

    def _cut(self, units: np.ndarray, count: int) -> list[dict[str, np.ndarray]]:
        pieces = []
        for part in np.array_split(units, count):
            piece = self.train.batch(part, self.model.config.pad_id)
            if self.teacher is not None:
                piece["teacher"] = self.teacher[part]
            pieces.append(piece)
        return pieces

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def loss(
        self, model: TaskModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        full = bool((micro["lengths"] == micro["ids"].shape[1]).all())
        outputs = model(batch["ids"], batch["types"], None if full else batch["lengths"]).float()
        loss, right = self.kind.loss(outputs, batch, self.objective)
        sums = {} if right is None else {"right": right}
        return loss / counts["labels"], {**sums, "labels": float(self._count(micro))}

    def _count(self, micro: dict[str, np.ndarray]) -> int:
        return self.kind.num_labelled(micro["labels"])

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        if "right" not in window:
            return {}
        return {"accuracy": window["right"] / window["labels"]}

    def operations(self, batch: StepBatch) -> float:
        return sum(self.model.operations(*piece["ids"].shape) for piece in batch.micro_batches)


class EarlyStop(Exception):
    """Raised by `BestOnDev` when the dev figures have stopped getting better."""


class Measured(Protocol):
    """What is measured on dev."""

    @property
    def figures(self) -> dict[str, float]: ...


Measure = TypeVar("Measure", bound=Measured)


class BestOnDev(Generic[Measure]):
    """Measures on dev, and remembers the weights of the best evaluation."""

    def __init__(
        self,
        model: TaskModel,
        measure: Callable[[], Measure],
        metric: str,
        state: State,
        patience: int = 0,
    ) -> None:
        """`patience`: evaluations without a gain after which to stop; 0: never."""
        self._model, self._measure, self._metric = model, measure, metric
        self._state, self._patience, self.without_gain = state, patience, 0
        self.weights: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, float]:
        """The figures now; of equally good ones the last count, which saw more of the data.

        Errors: EarlyStop.
        """
        self.judged_last = judged = self._measure()
        self.last = judged.figures
        if not self.weights or not is_better(self.judged.figures, self.last, self._metric):
            gain = not self.weights or is_better(self.last, self.judged.figures, self._metric)
            self.judged, self.step = judged, self._state.step
            state = self._model.state_dict()
            self.weights = {name: value.detach().clone() for name, value in state.items()}
        else:
            gain = False
        self.without_gain = 0 if gain else self.without_gain + 1
        if self._patience and self.without_gain >= self._patience:
            raise EarlyStop(f"no gain in {self._patience} evaluations")
        return self.last

    @property
    def found(self) -> dict[str, int]:
        """When the best weights were found; {} before the first evaluation."""
        return {"step": self.step, "without_gain": self.without_gain} if self.weights else {}

    def take_up(self, weights: dict[str, Tensor], step: int, without_gain: int) -> None:
        """As it was when it had these; leaves them in the model."""
        self.weights, self.step, self.without_gain = weights, step, without_gain
        self._put_back()
        self.judged = self._measure()

    def restore(self) -> tuple[Measure, int]:
        """Put the best weights back: (what was measured with them, the step after which)."""
        self._put_back()
        return self.judged, self.step

    def _put_back(self) -> None:
        with torch.no_grad():  # into the memory that replicas share
            for name, value in self._model.state_dict().items():
                value.copy_(self.weights[name])


def is_better(figures: Mapping[str, float], than: Mapping[str, float], metric: str) -> bool:
    """Whether the metric is better in the first.

    >>> is_better({"accuracy": 0.9}, {"accuracy": 0.8}, "accuracy")
    True
    >>> is_better({"mse": 2.0}, {"mse": 1.0}, "mse")
    False
    """
    if metric in METRICS and METRICS[metric].less_is_better:
        return figures[metric] < than[metric]
    return figures[metric] > than[metric]
