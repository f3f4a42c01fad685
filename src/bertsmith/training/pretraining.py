"""The pre-training task: rows of an objective, their loss, held-out figures (paper section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bertsmith.corpus.batch import PretrainingBatch
from bertsmith.corpus.mixture import Corpus, Stream, stream_of
from bertsmith.corpus.settings import ExampleSettings, Objective
from bertsmith.corpus.stream import Position
from bertsmith.kernels.cuda_masked_lm_loss import UNUSED
from bertsmith.model.heads import PreTrainingModel, Targets
from bertsmith.model.operations import training_operations
from bertsmith.progress import of_cases
from bertsmith.text.vocabulary import Vocabulary
from bertsmith.training.batch_size import rows_at_once
from bertsmith.training.cores import computed
from bertsmith.training.engine import Engine
from bertsmith.training.loop import StepBatch
from bertsmith.training.memory import out_of_memory
from bertsmith.training.pretrain_settings import Phase, PretrainSettings

FEWEST_HELD_OUT = 2  # documents
HELD_OUT_SEED = 0
# In 19 of 20 cases an accuracy of 256 pairs lies within 6 points of that of many, one of 100 within
# 10, which hides all that a short run learns. A short text is read again for them, with other cuts,
# partners and masks; more than four times would only tell the same text better.
FEWEST_PAIRS, MOST_READINGS = 256, 4
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
        if self.settings.bow_weight:
            words = batch.words(UNUSED)
            counts["words"] = int((words != UNUSED).sum())
            for part, start in zip(micro, range(0, rows, size), strict=True):
                part["words"] = words[start : start + size]
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
        if "bow_loss" in sums:
            loss = loss + self.settings.bow_weight * sums["bow_loss"] / counts["words"]
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
        words = int(self.settings.bow_weight > 0)  # [CLS] is one more prediction
        outputs = predictions + max(words, self.settings.objective in PAIR_NAMES)
        if self.settings.objective == "ltr":
            outputs = length
        return training_operations(self.model.config, rows, length, outputs, predictions + words)

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
        Targets(
            engine.tensor(micro["positions"]) if "positions" in micro else None,
            engine.tensor(micro["masked"]) if "masked" in micro else None,
            engine.tensor(micro["labels"]),
            engine.tensor(micro["words"]) if "words" in micro else None,
            next_sentence="next" in micro,
        ),
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
    if output.bow_loss is not None:
        sums["bow_loss"] = output.bow_loss
        sums["words"] = float((micro["words"] != UNUSED).sum())
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
    if "words" in sums:
        figures["bow_loss"] = sums["bow_loss"] / sums["words"]
    return figures


def evaluate_pretraining(
    model: PreTrainingModel,
    stream: Stream,
    engine: Engine,
    rows: int,
    batch: int = 32,
) -> dict[str, float]:
    """Held-out figures of `num_rows` examples of the stream, at all ranks, which share them.

    Those of `named_figures`, and behind each accuracy its number of cases ("nsp_cases" pairs). That
    of fewer than FEWEST_PAIRS pairs is left out. `batch`: rows that a worker of a rank computes at
    once.
    """
    model.eval()
    objective, ranks = stream.settings.objective, engine.ranks
    pieces: list[tuple[Position, int]] = []  # where this rank's share begins, how many rows it has
    position = Position(0, 0)
    rows = num_rows(stream, rows)
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
    sums = ranks.total(totals)
    figures = named_figures(objective, sums)
    figures[f"{token_name(objective)}_cases"] = int(sums["masked"])
    if pair := PAIR_NAMES.get(objective):
        figures[f"{pair}_cases"] = int(sums["rows"])
        if sums["rows"] < FEWEST_PAIRS:
            del figures[f"{pair}_accuracy"], figures[f"{pair}_cases"]
    return figures


def num_rows(stream: Stream, wanted: int) -> int:
    """How many rows are measured: at most those of the text, or FEWEST_PAIRS of a short one."""
    rows = stream.examples_in_epoch(0)
    return min(wanted, max(rows, min(FEWEST_PAIRS, MOST_READINGS * rows)))


def held_out_words(figures: Mapping[str, float]) -> str:
    """Held-out figures in a line, with the number of cases of a share that has few.

    >>> pairs = {"nsp_accuracy": 0.75, "nsp_cases": 256}
    >>> held_out_words({"mlm_loss": 5.6291, "mlm_accuracy": 0.103, "mlm_cases": 9000} | pairs)
    'held-out MLM loss 5.629, 10.3% right, NSP 75.0% of 256'
    """
    name = "ltr" if "ltr_loss" in figures else "mlm"
    entropy = figures.get("unigram_entropy")
    beside = "" if entropy is None else f" nats (unigram entropy {entropy:.3f})"
    shares = {
        kind: f"{figures[f'{kind}_accuracy']:.1%}{of_cases(figures[f'{kind}_cases'])}"
        for kind in (name, *PAIR_NAMES.values())
        if f"{kind}_accuracy" in figures
    }
    loss = f"held-out {name.upper()} loss {figures[f'{name}_loss']:.3f}{beside}"
    right = f"{shares.pop(name)} right"
    return ", ".join([loss, right, *(f"{kind.upper()} {share}" for kind, share in shares.items())])


def unigram_entropy(store: Corpus, stream: Stream, rows: int) -> float:
    """Nats per held-out token to predict when guessing by the training text's counts alone.

    The cross-entropy of the labels under the counts, each raised by one so that a piece the
    training text lacks is not impossible. A model that has learned nothing else sits here.
    """
    counts = store.unigram_counts.astype(np.float64) + 1.0
    log_share = np.log(counts) - math.log(counts.sum())
    examples, _ = stream.batch(Position(0, 0), num_rows(stream, rows))
    return float(-log_share[examples.masked_labels[examples.masked_weights > 0]].mean())
