"""What benchmarks/gpu_pretrain.py compares: rows made in memory, our step, transformers' steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.settings import ExampleSettings
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.config import ModelConfig, config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.masked_lm_loss import UNUSED
from bertsmith.training.engine import Engine
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import LoopSettings, StepBatch, Training, TrainingState
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretraining.settings import PretrainSettings, read_recipe
from bertsmith.training.pretraining.task import Pretraining
from bertsmith.training.pretraining.trial import compiled_losses

RATE, CLIP, BATCHES = 1e-4, 1.0, 4
OURS, OURS_EAGER, OURS_FLOAT8 = "bertsmith", "bertsmith, eager", "bertsmith, float8"
RECIPE = "bertsmith, the recipe fast"
EAGER, COMPILED = "transformers, eager", "transformers, compiled"
MASKED_HEAD = "transformers, masked head, compiled"
PEERS = (EAGER, COMPILED, MASKED_HEAD)
SYSTEMS = {  # of the cases of a recipe, in the order in which they are built
    "fast": (OURS, EAGER, COMPILED),
    "others": (OURS, RECIPE, MASKED_HEAD, OURS_EAGER),
    "paper": (OURS, EAGER, COMPILED, MASKED_HEAD, OURS_EAGER),
    "float8": (OURS, OURS_FLOAT8),
}


@dataclass(frozen=True)
class Case:
    """A size, a length, and a recipe: what takes turns, and on which rows."""

    size: str
    length: int
    recipe: str
    rows: int
    pieces: int = 30522

    @property
    def name(self) -> str:
        return f"{self.size}-{self.length}-{self.recipe}"


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
        length, most = settings.max_length, settings.num_predictions
        batch = PretrainingBatch.empty(size, length, most, pad_id=0)
        batch.lengths[:] = length
        if settings.has_pairs:
            short = random.random(size) < 0.1
            batch.lengths[short] = random.integers(8, length, short.sum())
            batch.next_labels[:] = random.integers(0, 2, size)
        real = np.arange(length) < batch.lengths[:, None]
        batch.input_ids[real] = random.integers(5, self.pieces, int(real.sum()))
        batch.token_types[:] = settings.has_pairs & real & (np.arange(length) >= length // 2)
        counts = np.minimum((settings.mlm_probability * batch.lengths).round().astype(int), most)
        for row, count in enumerate(np.maximum(counts, 1)):
            chosen = np.sort(random.permutation(batch.lengths[row] - 2)[:count] + 1)
            batch.masked_positions[row, :count] = chosen
            batch.masked_labels[row, :count] = batch.input_ids[row, chosen]
            batch.masked_weights[row, :count] = 1.0
        return batch, self.advance(position, size)


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def systems_of(case: Case) -> list[str]:
    """The names of a case's systems; without transformers none of its."""
    return [name for name in SYSTEMS[case.recipe] if name not in PEERS or has_transformers()]


def settings_of(case: Case, name: str) -> PretrainSettings:
    """How a system trains; transformers' have the rows and the dropout of ours beside them."""
    if case.recipe == "paper":
        recipe = read_recipe("paper")
    elif name == RECIPE:
        recipe = replace(read_recipe("fast"), optimizer="adamw")  # auto's on a GPU
    else:
        recipe = PretrainSettings(objective="mlm", optimizer="adamw")
    return replace(
        recipe,
        size=case.size,
        max_length=case.length,
        phase2_length=None,
        batch_size=case.rows,
        micro_batch_size=None,  # all rows at once, as transformers' systems
        steps=1,
    )


def work(settings: PretrainSettings, pieces: int, engine: Engine) -> tuple[float, float]:
    """Real tokens and useful operations of a step, on average; no weight is made."""
    with torch.device("meta"):
        model = PreTrainingModel(config_of(settings, pieces))
    task = task_of(model, settings, pieces, engine)
    batches = made_batches(task)
    tokens = sum(batch.tokens for batch in batches)
    operations = sum(task.flops(batch) for batch in batches)
    return tokens / BATCHES, operations / BATCHES


def config_of(settings: PretrainSettings, pieces: int) -> ModelConfig:
    return config_for(
        settings.size,
        pieces,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
        activation=settings.activation,
        pre_norm=settings.layer_norm == "pre",
        gated=settings.glu,
    )


def task_of(
    model: PreTrainingModel, settings: PretrainSettings, pieces: int, engine: Engine
) -> Pretraining:
    stream: Any = MadeRows(settings.examples(settings.max_length), pieces)
    return Pretraining(model, stream, None, settings, engine)


def made_batches(task: Pretraining) -> list[StepBatch]:
    rows = task.settings.batch_size
    return [task.batch(Position(0, number * rows))[0] for number in range(BATCHES)]


def build(name: str, case: Case, engine: Engine, compiling: bool) -> System:
    """A system of a case by its name; without `compiling`, none is compiled."""
    settings = settings_of(case, name)
    compiled = compiling and name not in (EAGER, OURS_EAGER)
    if name in PEERS:
        return their_system(settings, case.pieces, engine, compiled, name == MASKED_HEAD)
    if name == OURS_FLOAT8:
        engine = replace(engine, precision="float8")
    return our_system(settings, case.pieces, engine, compiled)


def our_system(settings: PretrainSettings, pieces: int, engine: Engine, compiled: bool) -> System:
    """The step of `bertsmith pretrain`, its copies to the device included."""
    model = PreTrainingModel(config_of(settings, pieces))
    model = initialize(model, 0.02, torch.Generator().manual_seed(1)).to(engine.device)
    engine.prepare(model)
    task = task_of(model, settings, pieces, engine)
    if compiled:
        task.compiled = compiled_losses(task)
    optimizer = build_optimizer(model, settings.optimizer, RATE, 0.01)
    loop = LoopSettings(Budget(steps=1), RATE, "linear", 0.1, CLIP, seed=1)
    stepper = Stepper(Training(task, optimizer, TrainingState(), loop, engine))
    batches = [batch.staged(engine) for batch in made_batches(task)]

    def step(number: int) -> None:
        stepper.step(batches[number % BATCHES], RATE)

    return System(step, stepper.synchronize)  # which raises where a loss was not finite


def their_system(
    settings: PretrainSettings, pieces: int, engine: Engine, compiled: bool, masked_head: bool
) -> System:
    """transformers' own model and loss under autocast, fused AdamW; rows lie on the device."""
    import transformers

    shape = config_for(settings.size, pieces)
    config = transformers.BertConfig(
        vocab_size=pieces,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.attention_dropout,
        attn_implementation="sdpa",
    )
    model: Any = transformers.BertForPreTraining(config).train().to(engine.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    rows = MadeRows(settings.examples(settings.max_length), pieces)
    batches = [
        their_batch(rows, k, settings.batch_size, engine, masked_head) for k in range(BATCHES)
    ]

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


def their_batch(
    rows: MadeRows, number: int, size: int, engine: Engine, masked: bool
) -> dict[str, torch.Tensor]:
    batch, _ = rows.batch(Position(0, number * size), size)
    picked = batch.masked_weights > 0
    arrays = {
        "input_ids": batch.input_ids.astype(np.int64),
        "token_type_ids": batch.token_types.astype(np.int64),
        "next_sentence_label": batch.next_labels,
    }
    if rows.settings.has_pairs:  # full rows go without, which is faster
        real = np.arange(rows.settings.max_length) < batch.lengths[:, None]
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
