"""The feature-based approach (paper section 5.3): a BiLSTM tagger over a frozen encoder's states.

The states of all layers are computed once (`word_states.py`); a row of Table 7 then trains only its
tagger, through the loop that trains everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.corpus.stream import Position
from bertsmith.finetuning.frozen_settings import FrozenSettings, Row
from bertsmith.finetuning.losses import Objective, class_loss
from bertsmith.model.tagger import FeatureTagger
from bertsmith.tasks.features import training_batches
from bertsmith.tasks.tagging_features import IGNORED
from bertsmith.tasks.tagging_files import Sentences
from bertsmith.tasks.tagging_scores import tag_scores
from bertsmith.text.sequences import concatenated_ranges, pad
from bertsmith.training.cores import computed, row_batches
from bertsmith.training.engine import Engine
from bertsmith.training.loop import train
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.run_log import RunLog
from bertsmith.training.schedule import Budget
from bertsmith.training.task import LoopSettings, State, StepBatch

WEIGHT_DECAY = 0.01
CLIP = 1.0
BUDGET_WORDS = 4096  # of a batch of evaluation


@dataclass(frozen=True)
class TaggedStates:
    """Sentences with the states of their W words."""

    sentences: Sentences
    labels: np.ndarray  # int64 [W]
    states: np.ndarray  # float16 [L + 1, W, H]

    @property
    def lengths(self) -> np.ndarray:
        """Words of each sentence, int64 [N]."""
        return np.diff(self.sentences.boundaries)

    def batch(self, chosen: np.ndarray, layers: slice) -> dict[str, np.ndarray]:
        """States float16 [B, S, layers, H], labels int64 [B, S] and lengths int64 [B]."""
        lengths, boundaries = self.lengths[chosen], self.sentences.boundaries
        width = int(lengths.max())
        words = concatenated_ranges(boundaries[chosen], lengths)
        selected = self.states[layers]
        states = np.zeros((len(chosen), width, len(selected), selected.shape[2]), np.float16)
        states[np.arange(width) < lengths[:, None]] = selected[:, words].transpose(1, 0, 2)
        labels = pad(self.labels, boundaries, chosen, width, IGNORED)
        return {"states": states, "labels": labels, "lengths": lengths}


class FrozenTagging:
    """The loop's task: sentences of states in, a tag for every word out."""

    def __init__(
        self,
        model: FeatureTagger,
        data: TaggedStates,
        layers: slice,
        batch_size: int,
        seed: int,
        engine: Engine,
    ) -> None:
        self.model, self.data, self.layers = model, data, layers
        self.batch_size, self.seed, self.engine = batch_size, seed, engine
        self.batches_per_epoch = len(self._batches(0))
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        self._batches = functools.lru_cache(maxsize=2)(self._batches)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        return training_batches(self.data.lengths, self.batch_size, self.seed, epoch)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        chosen = self._batches(position.epoch)[position.index]
        parts = np.array_split(chosen, min(self.engine.workers, len(chosen)))
        pieces = [self.data.batch(part, self.layers) for part in parts]
        words = int(self.data.lengths[chosen].sum())
        return StepBatch(pieces, {"words": words}, words), self.advance(position)

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def loss(
        self, model: FeatureTagger, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        is_word = batch["labels"] != IGNORED
        logits = model(batch["states"], batch["lengths"]).float()[is_word]
        labels = batch["labels"][is_word]
        loss = class_loss(logits, labels, Objective()) / counts["words"]
        right = (logits.argmax(1) == labels).sum()
        return loss, {"right": right, "words": float(len(labels))}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["words"]}

    def operations(self, batch: StepBatch) -> float:
        return 6.0 * self.weights * batch.tokens  # each weight is used once a word

    def evaluate(self) -> dict[str, float]:
        return {}  # dev and test are measured at the end

    def classes(self, data: TaggedStates) -> np.ndarray:
        """The most probable class of every word, int64 [W]."""
        self.model.eval()
        result = np.empty(len(data.labels), np.int64)

        def best_of(chosen: np.ndarray) -> np.ndarray:
            batch = data.batch(chosen, self.layers)
            states, lengths = (self.engine.tensor(batch[name]) for name in ("states", "lengths"))
            best = self.model(states, lengths).argmax(2).cpu().numpy()
            return best[batch["labels"] != IGNORED]

        batches = row_batches(self.engine, data.lengths, BUDGET_WORDS)
        for chosen, best in zip(batches, computed(self.engine, best_of, batches), strict=True):
            words = concatenated_ranges(data.sentences.boundaries[chosen], data.lengths[chosen])
            result[words] = best
        return result


def train_row(
    row: Row,
    data: dict[str, TaggedStates],
    names: tuple[str, ...],
    settings: FrozenSettings,
    seed: int,
    engine: Engine,
    folder: Path,
) -> dict[str, dict[str, float]]:
    """Train one tagger on data["train"]; the scores on every other split. The log is in `folder`.

    Errors: KeyboardInterrupt when a signal asked to stop.
    """
    states = data["train"].states
    model = FeatureTagger(
        size=states.shape[2],
        num_read=len(states[row.layers]),
        mixed=row.mixed,
        num_outputs=len(names),
        hidden_size=settings.hidden_size,
        dropout=settings.dropout,
    ).initialize(torch.Generator().manual_seed(seed))
    task = FrozenTagging(
        model.to(engine.device), data["train"], row.layers, settings.batch, seed, engine
    )
    optimizer = build_optimizer(model, "adamw", settings.rate, WEIGHT_DECAY)
    steps = settings.epochs * task.batches_per_epoch
    loop_settings = LoopSettings(
        budget=Budget(steps=steps),
        rate=settings.rate,
        schedule="linear",
        warmup=0.1,
        clip=CLIP,
        seed=seed,
        checkpoint_every=steps + 1,
        evaluations=1,
        label=f"{row.title}, seed {seed}",
    )
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder)
    try:
        state = State()
        if not train(task, optimizer, state, loop_settings, engine, log, lambda _: None):
            raise KeyboardInterrupt
        scores = {split: _scores(task, data[split], names) for split in data if split != "train"}
        log.evaluate(state.step, **{f"{s}_{n}": v for s in scores for n, v in scores[s].items()})
    finally:
        log.close()
    return scores


def _scores(task: FrozenTagging, data: TaggedStates, names: tuple[str, ...]) -> dict[str, Any]:
    sentences = data.sentences
    assert sentences.tags is not None
    predicted = sentences.tags_of(task.classes(data), names)
    return tag_scores(sentences.tags, predicted, sentences.boundaries, sentences.scheme)
