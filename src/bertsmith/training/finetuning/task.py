"""Fine-tuning as the loop sees it: batches, loss, dev figures (paper section 4.1, A.3); its parts.

`UsedPieces` trains with the rows of the token table that the data uses. A task's texts have a few
thousand of the vocabulary's pieces. The other rows have no gradient: all that AdamW does to them is
decay them, each step by one factor for all. Yet half of a small model's weights are such rows, and
the optimizer would read and write them in every step. So they are left out while training goes on,
and come back decayed at its end: the same weights, up to rounding.

`ScoreScale` has scores learned from their mean, in units of their spread. A head begins near 0, and
a step of Adam moves a weight by the rate whatever the loss is, so that prices or percentages as
they stand would be out of reach of a few epochs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import SequenceClassifier, TaskModel
from bertsmith.tasks.features import Features, training_batches
from bertsmith.tasks.metrics import METRICS
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.task_types.base import Objective, TaskType
from bertsmith.training.loop.task import State, StepBatch
from bertsmith.training.replicas import TOKENS_AT_ONCE, computed, row_batches


class UsedPieces:
    """The pieces that some features have, and the token table of a model without the others.

    One row that is not used stays, the longest: what becomes of it is what decay does to all.
    """

    def __init__(self, features: Sequence[Features], table: torch.Tensor, pad_id: int) -> None:
        """`table` [V, H] is that of the model before training."""
        counts = np.zeros(len(table), np.int64)
        for part in features:
            counts += np.bincount(part.ids, minlength=len(table))
        used = counts > 0
        used[pad_id] = True
        unused = np.flatnonzero(~used)
        self.witness = None
        if len(unused):
            norms = table.detach().norm(dim=1).cpu().numpy()
            self.witness = int(unused[norms[unused].argmax()])
            used[self.witness] = True
        self.rows = np.flatnonzero(used)  # int64 [U]
        self._places = np.zeros(len(table), np.int32)
        self._places[self.rows] = np.arange(len(self.rows), dtype=np.int32)

    def renumbered(self, features: Features) -> Features:
        """The features for the smaller table."""
        return replace(features, ids=self._places[features.ids])

    def shrink(self, model: TaskModel) -> None:
        """Take the rows that are not used out of the model."""
        table = model.encoder.embeddings.token
        self._whole = table.weight.detach()
        rows = torch.from_numpy(self.rows).to(table.weight.device)
        self._set(model, self._whole[rows], int(self._places[model.config.pad_id]))

    def grow(self, model: TaskModel) -> None:
        """Put them back, decayed as the witness was."""
        trained = model.encoder.embeddings.token.weight.detach()
        pad_id = int(self.rows[model.config.pad_id])
        whole = self._whole
        if self.witness is not None:
            before = whole[self.witness].double()
            after = trained[int(self._places[self.witness])].double()
            norm = (before @ before).item()
            if norm > 0:  # else they all are zeros, which decay leaves as they are
                whole = whole * ((before @ after).item() / norm)
        whole = whole.clone()
        whole[torch.from_numpy(self.rows).to(whole.device)] = trained
        self._set(model, whole, pad_id)

    @staticmethod
    def _set(model: TaskModel, weight: torch.Tensor, pad_id: int) -> None:
        model.encoder.embeddings.token = nn.Embedding.from_pretrained(weight, freeze=False)
        config = replace(model.config, vocab_size=len(weight), pad_id=pad_id)
        model.config = model.encoder.config = config


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


class FineTuning:
    """The loop's task. A position's index counts batches, not examples."""

    def __init__(
        self,
        task_type: TaskType,
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
        self.task_type, self.model, self.train, self.evaluate = task_type, model, train, evaluate
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
        labels = sum(self.task_type.num_labelled(piece["labels"]) for piece in pieces)
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
        loss, right = self.task_type.loss(outputs, batch, self.objective)
        sums = {} if right is None else {"right": right}
        return loss / counts["labels"], {**sums, "labels": float(self._count(micro))}

    def _count(self, micro: dict[str, np.ndarray]) -> int:
        return self.task_type.num_labelled(micro["labels"])

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


def head_outputs(
    model: TaskModel,
    features: Features,
    pad_id: int,
    engine: Engine,
    budget_tokens: int = 8192,
    on_batch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """What the head gives, in the order of the rows, float32; dropout is off.

    [R, K] where it gives K numbers a row, [T, K] where it gives them for every token.
    `on_batch` is told after each batch how many rows were in it.
    """
    outputs = np.empty((0, model.num_outputs), np.float32)
    training = model.training
    model.eval()

    def given(rows: np.ndarray) -> np.ndarray:
        batch = map(engine.tensor, features.padded(rows, pad_id))
        return model(*batch).float().cpu().numpy()

    batches = row_batches(engine, features.lengths, budget_tokens)
    for rows, found in zip(batches, computed(engine, given, batches), strict=True):
        of_tokens = found.ndim == 3
        if not len(outputs):
            size = len(features.ids) if of_tokens else len(features)
            outputs = np.empty((size, model.num_outputs), np.float32)
        if of_tokens:
            lengths = features.lengths[rows]
            places = concatenated_ranges(features.boundaries[rows], lengths)
            outputs[places] = found[np.arange(found.shape[1]) < lengths[:, None]]
        else:
            outputs[rows] = found
        if on_batch:
            on_batch(len(rows))
    model.train(training)
    return outputs
