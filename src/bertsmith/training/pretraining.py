"""The pre-training task: rows of an objective, their loss, held-out figures (paper section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bertsmith.corpus.batch import PretrainingBatch
from bertsmith.corpus.mixture import Corpus, Stream, stream_of
from bertsmith.corpus.settings import ExampleSettings, Objective
from bertsmith.corpus.stream import Position
from bertsmith.kernels.cuda_masked_lm_loss import UNUSED
from bertsmith.model.encoder import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.operations import training_operations
from bertsmith.text.vocabulary import Vocabulary
from bertsmith.training.cores import computed
from bertsmith.training.engine import Engine
from bertsmith.training.loop import StepBatch
from bertsmith.training.memory import out_of_memory
from bertsmith.training.pretrain_settings import Phase, PretrainSettings, core_rows

HELD_OUT_SEED = 0
PAIR_NAMES = {"mlm+nsp": "nsp", "mlm+sop": "sop"}  # of the figures; the others have no pairs
PAIR_HEAD = ("pooler.", "nsp.")  # what the others do not train


class Pretraining:
    """The loop's task: batches from the stream, the objective's loss, held-out figures.

    `phase` None: the recipe's first.
    """

    compiled: Callable[..., Any] | None = None
    """Takes the place of the model's `losses` in training."""

    def __init__(
        self,
        model: PreTrainingModel,
        stream: Stream,
        held_out: Stream | None,
        settings: PretrainSettings,
        engine: Engine,
        phase: Phase | None = None,
    ) -> None:
        self.model, self.stream, self.held_out = model, stream, held_out
        if settings.objective not in PAIR_NAMES:  # else DDP would wait for their gradients
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(PAIR_HEAD))
        self.settings, self.engine = settings, engine
        self.phase = phase or settings.phases()[0]
        self._share = engine.ranks.share(self.phase.batch)
        self.rows_at_once = rows_at_once(settings, self.phase, engine, model.config)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        """This rank's share of the batch, with counts and tokens of its own."""
        rows, size, ranks = len(self._share), self.rows_at_once, self.engine.ranks
        batch, _ = self.stream.batch(self.stream.advance(position, self._share.start), rows)
        objective, static = self.settings.objective, self.engine.static_shapes
        micro = [
            micro_arrays(batch, objective, start, start + size, static)
            for start in range(0, rows, size)
        ]
        counts = {"masked": int(batch.masked_weights.sum()), "rows": rows}
        most = -(-self.phase.batch // ranks.size)  # rows of a rank
        first = ranks.rank * -(-most // size)
        tokens = int(batch.lengths.sum())
        return StepBatch(micro, counts, tokens, first), self.advance(position)

    def advance(self, position: Position) -> Position:
        return self.stream.advance(position, self.phase.batch)

    def loss(
        self, model: PreTrainingModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        sums = pretraining_sums(model, micro, self.engine, self.compiled)
        loss: Any = sums["mlm_loss"] / counts["masked"]
        if "nsp_loss" in sums:
            loss = loss + sums["nsp_loss"] / counts["rows"]
        assert isinstance(loss, Tensor)
        return loss, {**sums, "slots": float(micro["ids"].size)}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {
            **self.phase_figure,
            **named_figures(self.settings.objective, window),
            "padding_share": 1.0 - window["tokens"] / window["slots"],
        }

    def operations(self, batch: StepBatch) -> float:
        rows, length = batch.counts["rows"], self.phase.length
        predictions = round(batch.counts["masked"] / rows)
        outputs = predictions + (self.settings.objective in PAIR_NAMES)
        if self.settings.objective == "ltr":
            outputs = length
        return training_operations(self.model.config, rows, length, outputs, predictions)

    def evaluate(self, rows: int | None = None) -> dict[str, float]:
        """On the first `rows` held-out rows; None: as many as the settings say."""
        if self.held_out is None:
            return {}
        rows, batch = rows or self.settings.held_out_rows, self.rows_at_once
        figures = evaluate_pretraining(self.model, self.held_out, self.engine, rows, batch)
        return {**self.phase_figure, **figures}

    def out_of_memory(self, error: BaseException, sized: bool, begun: bool = False) -> str | None:
        """The line that says which settings lower the memory of a step; None for any other error.

        `sized`: whether the size of the model is one of them. `begun`: a checkpoint fixes both
        size and length.
        """
        return out_of_memory(
            error,
            micro_batch=self.rows_at_once,
            length=None if begun else self.phase.length,
            length_flag="--length" if self.phase.number == 1 else "--second-length",
            size=self.settings.size if sized and not begun else None,
            checkpoint_activations=self.settings.checkpoint_activations,
        )

    @property
    def phase_figure(self) -> dict[str, float]:
        """The phase, for the log of a run that has two."""
        return {"phase": self.phase.number} if self.settings.second_length else {}


def rows_at_once(
    settings: PretrainSettings, phase: Phase, engine: Engine, config: ModelConfig
) -> int:
    """Rows of a micro-batch of each worker on each rank, cut as evenly as can be.

    A longer second phase has fewer, so that its memory is the first's.

    >>> import torch
    >>> recipe = PretrainSettings(batch=32, micro_batch=8, second_length=512)
    >>> from bertsmith.model.sizes import config_for
    >>> engine, mini = Engine(torch.device("cpu"), "float32", threads=1), config_for("mini", 8000)
    >>> [rows_at_once(recipe, phase, engine, mini) for phase in recipe.phases()]
    [8, 2]
    """
    assert settings.micro_batch != "auto", "chosen before a run starts"
    workers = engine.workers * engine.ranks.size
    first = settings.micro_batch or settings.batch
    if settings.micro_batch is None and engine.device.type == "cpu":
        first = core_rows(settings.length, config.num_layers, config.hidden_size)
    first = min(first, -(-settings.batch // workers))
    share = -(-phase.batch // workers)
    most = max(1, min(first * settings.length // phase.length, share))
    pieces = -(-share // most)
    return -(-share // pieces)


def held_out_stream(
    store: Corpus, vocabulary: Vocabulary, length: int, objective: Objective
) -> Stream:
    """The rows on which every run of a store with this length and objective is measured.

    Always the paper's masks and pairs, so that recipes with others can be compared.
    """
    examples = ExampleSettings(length, objective=objective)
    return stream_of(store.held_out, vocabulary, examples, HELD_OUT_SEED)


def micro_arrays(
    batch: PretrainingBatch, objective: Objective, start: int, stop: int, static: bool = False
) -> dict[str, np.ndarray]:
    """Rows start..stop as the arrays a forward pass reads.

    Slots without a prediction are left out; with `static` they stay, labelled `UNUSED`, so that
    every batch has the same shapes (kernels/cuda_masked_lm_loss.py).
    """
    weights = batch.masked_weights[start:stop] > 0
    labels = np.where(weights, batch.masked_labels[start:stop], UNUSED).astype(np.int64)
    if objective == "ltr":  # every position but the last of a row predicts: none is picked
        last = ((0, 0), (0, 1))
        weights, labels = np.pad(weights, last), np.pad(labels, last, constant_values=UNUSED)
    micro = {
        "ids": batch.input_ids[start:stop],
        "types": batch.token_types[start:stop],
        "lengths": batch.lengths[start:stop],
        "labels": labels.flatten() if static else labels[weights],
    }
    if not static:
        micro["masked"] = np.flatnonzero(weights)
    if objective == "ltr":
        return micro
    micro["positions"] = batch.masked_positions[start:stop].astype(np.int64)
    if objective in PAIR_NAMES:
        micro["next"] = batch.next_labels[start:stop]
    return micro


def pretraining_sums(
    model: PreTrainingModel,
    micro: dict[str, np.ndarray],
    engine: Engine,
    losses: Callable[..., Any] | None = None,
) -> dict[str, Tensor | float]:
    """Summed losses in nats, how many predictions were right, and how many there were.

    `losses` None: the model's own. "mlm_..." are those of the tokens and "nsp_..." those of the
    pairs, whatever the objective.
    """
    full = bool((micro["lengths"] == micro["ids"].shape[1]).all())
    if engine.static_shapes and "next" in micro:
        full = False  # a batch of pairs that happens to be full would be compiled once more
    output = (losses or model.losses)(
        engine.tensor(micro["ids"]),
        engine.tensor(micro["types"]),
        None if full else engine.tensor(micro["lengths"]),
        engine.tensor(micro["positions"]) if "positions" in micro else None,
        engine.tensor(micro["masked"]) if "masked" in micro else None,
        engine.tensor(micro["labels"]),
        next_sentence="next" in micro,
    )
    sums: dict[str, Tensor | float] = {
        "mlm_loss": output.mlm_loss,
        "mlm_right": output.mlm_right,
        "masked": float((micro["labels"] != UNUSED).sum()),
        "rows": float(len(micro["ids"])),
    }
    if output.nsp_logits is not None:
        logits, following = output.nsp_logits.float(), engine.tensor(micro["next"])
        sums["nsp_loss"] = F.cross_entropy(logits, following, reduction="sum")
        sums["nsp_right"] = (logits.argmax(1) == following).sum()
    return sums


def token_name(objective: Objective) -> str:
    """What the figures of the predicted tokens begin with."""
    return "ltr" if objective == "ltr" else "mlm"


def named_figures(objective: Objective, sums: dict[str, Any]) -> dict[str, float]:
    """Mean losses (nats) and accuracies under the objective's names.

    >>> sums = {"mlm_loss": 60.0, "mlm_right": 5.0, "masked": 20.0}
    >>> named_figures("ltr", sums)
    {'ltr_loss': 3.0, 'ltr_accuracy': 0.25}
    """
    token, pair = token_name(objective), PAIR_NAMES.get(objective)
    figures = {
        f"{token}_loss": sums["mlm_loss"] / sums["masked"],
        f"{token}_accuracy": sums["mlm_right"] / sums["masked"],
    }
    if pair:
        figures[f"{pair}_loss"] = sums["nsp_loss"] / sums["rows"]
        figures[f"{pair}_accuracy"] = sums["nsp_right"] / sums["rows"]
    return figures


def evaluate_pretraining(
    model: PreTrainingModel,
    stream: Stream,
    engine: Engine,
    rows: int,
    batch: int = 32,
) -> dict[str, float]:
    """`named_figures` of the first `rows` examples of the stream, at all ranks, which share them.

    `batch`: rows that a worker of a rank computes at once.
    """
    model.eval()
    objective, ranks = stream.settings.objective, engine.ranks
    pieces: list[tuple[Position, int]] = []  # where this rank's share begins, how many rows it has
    position = Position(0, 0)
    rows = min(rows, stream.examples_in_epoch(0))
    for start in range(0, rows, batch * ranks.size):
        count = min(batch * ranks.size, rows - start)
        share = range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)
        pieces.append((stream.advance(position, share.start), len(share)))
        position = stream.advance(position, count)

    def sums_of(piece: tuple[Position, int]) -> dict[str, float]:
        # without a share a row is computed in vain: sharded weights need every rank in every pass
        examples, _ = stream.batch(piece[0], max(1, piece[1]))
        micro = micro_arrays(examples, objective, 0, len(examples.lengths))
        sums = pretraining_sums(model, micro, engine)
        return {name: float(value) if piece[1] else 0.0 for name, value in sums.items()}

    totals: dict[str, float] = {}
    for sums in computed(engine, sums_of, pieces):
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    return named_figures(objective, ranks.total(totals))


def unigram_entropy(store: Corpus, stream: Stream, rows: int) -> float:
    """Nats per held-out token to predict when guessing by the training text's counts alone.

    The cross-entropy of the labels under the counts, each raised by one so that a piece the
    training text lacks is not impossible. A model that has learned nothing else sits here.
    """
    counts = store.unigram_counts.astype(np.float64) + 1.0
    log_share = np.log(counts) - math.log(counts.sum())
    rows = min(rows, stream.examples_in_epoch(0))
    examples, _ = stream.batch(Position(0, 0), rows)
    return float(-log_share[examples.masked_labels[examples.masked_weights > 0]].mean())
