"""What benchmarks/gpu_pretrain.py compares: rows made in memory, our step, transformers' steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bertsmith.corpus.batch import PretrainingBatch
from bertsmith.corpus.settings import ExampleSettings
from bertsmith.corpus.stream import Position
from bertsmith.kernels.cuda_masked_lm_loss import UNUSED
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initial_weights import initialize
from bertsmith.model.sizes import config_for
from bertsmith.training.accelerator import compiled_losses
from bertsmith.training.engine import Engine
from bertsmith.training.loop import LoopSettings, State, optimizer_step
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretrain_settings import PretrainSettings
from bertsmith.training.pretraining import Pretraining
from bertsmith.training.replicas import Replicas
from bertsmith.training.schedule import Budget
from bertsmith.training.step_guard import StepGuard

RATE, CLIP, BATCHES = 1e-4, 1.0, 4
OURS, OURS_EAGER, OURS_FLOAT8 = "bertsmith", "bertsmith, eager", "bertsmith, float8"
EAGER, COMPILED = "transformers, eager", "transformers, compiled"
MASKED_HEAD = "transformers, masked head, compiled"


@dataclass(frozen=True)
class Case:
    """A size, a length and a recipe: "fast" is packed MLM, "paper" pairs with dropout 0.1."""

    size: str
    length: int
    recipe: str
    rows: int
    pieces: int = 30522

    @property
    def name(self) -> str:
        return f"{self.size}-{self.length}-{self.recipe}"

    @property
    def dropout(self) -> float:
        return 0.1 if self.recipe == "paper" else 0.0

    def settings(self) -> PretrainSettings:
        return PretrainSettings(
            size=self.size,
            length=self.length,
            batch=self.rows,
            steps=1,
            objective="mlm+nsp" if self.recipe == "paper" else "mlm",
            dropout=self.dropout,
            attention_dropout=self.dropout,
        )


@dataclass
class System:
    """step(number) trains on one batch, finish() looks whether all steps were well."""

    step: Callable[[int], None]
    finish: Callable[[], None] = lambda: None


class MadeRows:
    """Stands for a stream: random rows, full ("mlm") or with a tenth of them short ("mlm+nsp")."""

    def __init__(self, settings: ExampleSettings, pieces: int) -> None:
        self.settings, self.pieces = settings, pieces

    def advance(self, position: Position, size: int) -> Position:
        return Position(position.epoch, position.index + size)

    def batch(self, position: Position, size: int) -> tuple[PretrainingBatch, Position]:
        settings, random = self.settings, np.random.default_rng(position.index)
        length = settings.length
        batch = PretrainingBatch.empty(size, length, settings.num_predictions, pad_id=0)
        batch.lengths[:] = length
        if settings.has_pairs:
            short = random.random(size) < 0.1
            batch.lengths[short] = random.integers(8, length, short.sum())
            batch.next_labels[:] = random.integers(0, 2, size)
        real = np.arange(length) < batch.lengths[:, None]
        batch.input_ids[real] = random.integers(5, self.pieces, int(real.sum()))
        batch.token_types[:] = settings.has_pairs & real & (np.arange(length) >= length // 2)
        counts = np.minimum((0.15 * batch.lengths).round().astype(int), settings.num_predictions)
        for row, count in enumerate(np.maximum(counts, 1)):
            chosen = np.sort(random.permutation(batch.lengths[row] - 2)[:count] + 1)
            batch.masked_positions[row, :count] = chosen
            batch.masked_labels[row, :count] = batch.input_ids[row, chosen]
            batch.masked_weights[row, :count] = 1.0
        return batch, self.advance(position, size)


def our_task(case: Case, engine: Engine) -> Pretraining:
    settings = case.settings()
    config = config_for(
        case.size, case.pieces, dropout=case.dropout, attention_dropout=case.dropout
    )
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    model.to(engine.device)
    engine.prepare(model)
    stream: Any = MadeRows(settings.examples(case.length), case.pieces)
    return Pretraining(model, stream, None, settings, engine)


def our_system(case: Case, engine: Engine, compiled: bool) -> System:
    """The step of `bertsmith pretrain`, its copies to the device included."""
    task = our_task(case, engine)
    if compiled:
        task.compiled = compiled_losses(task)
    optimizer = build_optimizer(task.model, "adamw", RATE, 0.01)
    loop = LoopSettings(Budget(steps=1), RATE, "linear", 0.1, CLIP, seed=1)
    replicas = Replicas(task.model, engine)
    guard = StepGuard.where_it_fits(engine.device, optimizer)
    batches = [task.batch(Position(0, k * case.rows))[0] for k in range(BATCHES)]
    for batch in batches:
        batch.micro_batches = [engine.staged(micro) for micro in batch.micro_batches]
    state = State()

    def step(number: int) -> None:
        batch = batches[number % BATCHES]
        optimizer_step(task, optimizer, batch, RATE, loop, engine, state, replicas, guard)

    def finish() -> None:
        if guard:
            guard.settle(state)  # raises where a loss was not finite

    return System(step, finish)


def their_system(case: Case, engine: Engine, compiled: bool, masked_head: bool = False) -> System:
    """transformers' own model and loss under autocast, fused AdamW; rows lie on the device."""
    import transformers

    ours = config_for(case.size, case.pieces)
    config = transformers.BertConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        intermediate_size=ours.intermediate_size,
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
        attn_implementation="sdpa",
    )
    model: Any = transformers.BertForPreTraining(config).train().to(engine.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    batches = [their_batch(case, k, engine, masked_head) for k in range(BATCHES)]

    def plain(**inputs: Any) -> torch.Tensor:
        return model(**inputs).loss

    def at_masked(positions: torch.Tensor, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        following = inputs.pop("next_sentence_label")
        hidden, pooled = model.bert(**inputs)[:2]
        index = positions[:, :, None].expand(-1, -1, hidden.shape[2])
        scores, pairs = model.cls(hidden.gather(1, index), pooled)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        return loss + F.cross_entropy(pairs.float(), following)

    function: Callable[..., torch.Tensor] = at_masked if masked_head else plain
    if compiled:
        function = torch.compile(function, dynamic=False)

    def step(number: int) -> None:
        with engine.autocast():
            loss = function(**batches[number % BATCHES])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return System(step)


def their_batch(case: Case, number: int, engine: Engine, masked: bool) -> dict[str, torch.Tensor]:
    rows = MadeRows(case.settings().examples(case.length), case.pieces)
    batch, _ = rows.batch(Position(0, number * case.rows), case.rows)
    picked = batch.masked_weights > 0
    arrays = {
        "input_ids": batch.input_ids.astype(np.int64),
        "token_type_ids": batch.token_types.astype(np.int64),
        "next_sentence_label": batch.next_labels,
    }
    if (batch.lengths < case.length).any():  # full rows go without, which is faster
        real = np.arange(case.length) < batch.lengths[:, None]
        arrays["attention_mask"] = real.astype(np.int64)
    if masked:
        arrays["positions"] = batch.masked_positions.astype(np.int64)
        arrays["labels"] = np.where(picked, batch.masked_labels, UNUSED).astype(np.int64)
    else:
        labels = np.full(batch.input_ids.shape, UNUSED, np.int64)
        where, slots = np.nonzero(picked)
        labels[where, batch.masked_positions[where, slots]] = batch.masked_labels[where, slots]
        arrays["labels"] = labels
    return {name: engine.tensor(array) for name, array in arrays.items()}


def builders(case: Case, engine: Engine, compiling: bool) -> dict[str, Callable[[], System]]:
    """The systems of a case by name, to be built one after the other."""
    if case.recipe == "float8":
        float8 = replace(engine, precision="float8")
        return {
            OURS: lambda: our_system(case, engine, compiling),
            OURS_FLOAT8: lambda: our_system(case, float8, compiling),
        }
    found: dict[str, Callable[[], System]] = {}
    if compiling:
        found[OURS] = lambda: our_system(case, engine, True)
        found[COMPILED] = lambda: their_system(case, engine, True)
        if case.recipe == "fast":
            found[MASKED_HEAD] = lambda: their_system(case, engine, True, masked_head=True)
    found[OURS_EAGER] = lambda: our_system(case, engine, False)
    found[EAGER] = lambda: their_system(case, engine, False)
    return found
