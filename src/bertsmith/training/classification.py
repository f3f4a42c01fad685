"""The fine-tuning task: a classifier's batches, loss and dev figures (paper section 4.1, A.3)."""

from __future__ import annotations

import functools

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bertsmith.corpus.stream import Position
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.operations import training_operations
from bertsmith.tasks.features import Features, training_batches
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.training.engine import PRECISIONS, Engine
from bertsmith.training.loop import StepBatch
from bertsmith.training.scoring import logits


class Classification:
    """The loop's task for one label a text. A position's index counts batches, not examples."""

    def __init__(
        self,
        model: SequenceClassifier,
        train: Features,
        dev: Features,
        metrics: tuple[str, ...],
        batch_size: int,
        seed: int,
        engine: Engine,
    ) -> None:
        assert train.labels is not None and dev.labels is not None
        self.model, self.train, self.dev, self.metrics = model, train, dev, metrics
        self.batch_size, self.seed, self.engine = batch_size, seed, engine
        self.batches_per_epoch = len(self._batches(0))
        self._batches = functools.lru_cache(maxsize=2)(self._batches)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        return training_batches(self.train.lengths, self.batch_size, self.seed, epoch)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        indices = self._batches(position.epoch)[position.index]
        assert self.train.labels is not None
        pieces = []
        for part in np.array_split(indices, min(self.engine.workers, len(indices))):
            ids, types, lengths = self.train.padded(part, self.model.config.pad_id)
            arrays = {"ids": ids, "types": types, "lengths": lengths}
            pieces.append({**arrays, "labels": self.train.labels[part]})
        tokens = sum(int(piece["lengths"].sum()) for piece in pieces)
        return StepBatch(pieces, {"examples": len(indices)}, tokens), self.advance(position)

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def loss(
        self, model: SequenceClassifier, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        tensor, lengths = self.engine.tensor, micro["lengths"]
        full = bool((lengths == micro["ids"].shape[1]).all())
        scores = model(
            tensor(micro["ids"]), tensor(micro["types"]), None if full else tensor(lengths)
        ).float()
        labels = tensor(micro["labels"])
        loss = F.cross_entropy(scores, labels, reduction="sum") / counts["examples"]
        right = (scores.argmax(1) == labels).sum()
        return loss, {"right": right, "examples": float(len(labels))}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["examples"]}

    def operations(self, batch: StepBatch) -> float:
        shapes = [piece["ids"].shape for piece in batch.micro_batches]
        config = self.model.config
        return sum(
            training_operations(config, *shape, outputs=1, predictions=0) for shape in shapes
        )

    def scores(self, features: Features) -> np.ndarray:
        """Class scores [N, K] of any examples, without dropout."""
        autocast = None if self.engine.precision == "float32" else PRECISIONS[self.engine.precision]
        return logits(
            self.model,
            features,
            self.model.config.pad_id,
            device=self.engine.device,
            autocast=autocast,
        )

    def evaluate(self) -> dict[str, float]:
        assert self.dev.labels is not None
        predicted = self.scores(self.dev).argmax(axis=1)
        num_labels = self.model.classifier.out_features
        return compute_metrics(self.metrics, predicted, self.dev.labels, num_labels)
