"""The pre-training task: masked pairs, MLM + NSP loss, held-out figures (paper section 3.1)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.stream import ExampleSettings, Position, PretrainingBatch, PretrainingStream
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.operations import training_operations
from bertsmith.text.vocabulary import Vocabulary
from bertsmith.training.engine import Engine
from bertsmith.training.loop import StepBatch
from bertsmith.training.pretrain_settings import PretrainSettings

HELD_OUT_SEED = 0


class Pretraining:
    """The loop's task: batches from the stream, MLM + NSP loss, held-out figures."""

    def __init__(
        self,
        model: PreTrainingModel,
        stream: PretrainingStream,
        held_out: PretrainingStream | None,
        settings: PretrainSettings,
        engine: Engine,
    ) -> None:
        self.model, self.stream, self.held_out = model, stream, held_out
        self.settings, self.engine = settings, engine

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        batch, following = self.stream.batch(position, self.settings.batch)
        rows, size = self.settings.batch, self.settings.micro_batch or self.settings.batch
        micro = [micro_arrays(batch, start, start + size) for start in range(0, rows, size)]
        counts = {"masked": int(batch.masked_weights.sum()), "rows": rows}
        return StepBatch(micro, counts, int(batch.lengths.sum())), following

    def advance(self, position: Position) -> Position:
        return self.stream.advance(position, self.settings.batch)

    def loss(
        self, micro: dict[str, np.ndarray], counts: dict[str, int], measure: bool
    ) -> tuple[Tensor, dict[str, float]]:
        sums, right = pretraining_sums(self.model, micro, self.engine, accuracy=measure)
        loss = sums["mlm_loss"] / counts["masked"] + sums["nsp_loss"] / counts["rows"]
        figures = {name: value.item() for name, value in sums.items()}
        masked, rows = float(len(micro["labels"])), float(len(micro["next"]))
        if measure:
            figures |= {**right, "measured": masked, "measured_rows": rows}
        return loss, {**figures, "masked": masked, "rows": rows}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {
            "mlm_loss": window["mlm_loss"] / window["masked"],
            "mlm_accuracy": window["mlm_right"] / window["measured"],
            "nsp_accuracy": window["nsp_right"] / window["measured_rows"],
        }

    def operations(self, batch: StepBatch) -> float:
        rows, length = batch.counts["rows"], self.settings.length
        predictions = round(batch.counts["masked"] / rows)
        return training_operations(self.model.config, rows, length, predictions + 1, predictions)

    def evaluate(self) -> dict[str, float]:
        if self.held_out is None:
            return {}
        return evaluate_pretraining(
            self.model, self.held_out, self.engine, self.settings.held_out_rows, self.settings.batch
        )


def example_settings(settings: PretrainSettings) -> ExampleSettings:
    """What of a recipe decides how examples are made."""
    return ExampleSettings(
        length=settings.length,
        mask_rate=settings.mask_rate,
        short_rate=settings.short_rate,
        whole_word=settings.whole_word,
    )


def held_out_stream(store: TokenStore, vocabulary: Vocabulary, length: int) -> PretrainingStream:
    """The examples on which every run of a store is measured at this length.

    Always the paper's masks, so that recipes with other masking can be compared.
    """
    return PretrainingStream(store.held_out, vocabulary, ExampleSettings(length), HELD_OUT_SEED)


def micro_arrays(batch: PretrainingBatch, start: int, stop: int) -> dict[str, np.ndarray]:
    """Rows start..stop as the arrays a forward pass reads; padded predictions are left out."""
    weights = batch.masked_weights[start:stop] > 0
    lengths = batch.lengths[start:stop]
    return {
        "ids": batch.input_ids[start:stop],
        "types": batch.token_types[start:stop],
        "lengths": lengths,
        "positions": batch.masked_positions[start:stop].astype(np.int64),
        "masked": np.flatnonzero(weights),
        "labels": batch.masked_labels[start:stop][weights].astype(np.int64),
        "next": batch.next_labels[start:stop],
    }


def pretraining_sums(
    model: PreTrainingModel, micro: dict[str, np.ndarray], engine: Engine, accuracy: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Summed losses in nats, and with `accuracy` how many predictions were right."""
    full = bool((micro["lengths"] == micro["ids"].shape[1]).all())
    labels, following = engine.tensor(micro["labels"]), engine.tensor(micro["next"])
    output = model(
        engine.tensor(micro["ids"]),
        engine.tensor(micro["types"]),
        None if full else engine.tensor(micro["lengths"]),
        engine.tensor(micro["positions"]),
        engine.tensor(micro["masked"]),
    )
    mlm_logits, nsp_logits = output.mlm_logits.float(), output.nsp_logits.float()
    sums = {
        "mlm_loss": F.cross_entropy(mlm_logits, labels, reduction="sum"),
        "nsp_loss": F.cross_entropy(nsp_logits, following, reduction="sum"),
    }
    if not accuracy:
        return sums, {}
    right = {
        "mlm_right": float((mlm_logits.argmax(1) == labels).sum()),
        "nsp_right": float((nsp_logits.argmax(1) == following).sum()),
    }
    return sums, right


@torch.inference_mode()
def evaluate_pretraining(
    model: PreTrainingModel,
    stream: PretrainingStream,
    engine: Engine,
    rows: int,
    batch: int = 32,
) -> dict[str, float]:
    """MLM loss (nats) and accuracy, NSP accuracy on the first `rows` examples of the stream."""
    model.eval()
    totals: dict[str, float] = {}
    position = Position(0, 0)
    rows = min(rows, stream.examples_in_epoch(0))
    for start in range(0, rows, batch):
        examples, position = stream.batch(position, min(batch, rows - start))
        micro = micro_arrays(examples, 0, len(examples.lengths))
        with engine.autocast():
            sums, right = pretraining_sums(model, micro, engine, accuracy=True)
        counted = {"masked": float(len(micro["labels"])), "rows": float(len(micro["next"]))}
        for name, value in {**sums, **right, **counted}.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return {
        "mlm_loss": totals["mlm_loss"] / totals["masked"],
        "mlm_accuracy": totals["mlm_right"] / totals["masked"],
        "nsp_loss": totals["nsp_loss"] / totals["rows"],
        "nsp_accuracy": totals["nsp_right"] / totals["rows"],
    }


def unigram_entropy(store: TokenStore, stream: PretrainingStream, rows: int) -> float:
    """Nats per held-out masked token when guessing by the training text's token counts alone.

    The cross-entropy of the masked labels under the counts, each raised by one so that a piece the
    training text lacks is not impossible. A model that has learned nothing else sits here.
    """
    counts = store.unigram_counts.astype(np.float64) + 1.0
    log_share = np.log(counts) - math.log(counts.sum())
    rows = min(rows, stream.examples_in_epoch(0))
    examples, _ = stream.batch(Position(0, 0), rows)
    return float(-log_share[examples.masked_labels[examples.masked_weights > 0]].mean())
