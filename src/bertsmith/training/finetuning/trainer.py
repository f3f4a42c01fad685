"""One training of a fine-tuning run: model, data and a seed in; a model measured on dev out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertsmith.base.terminal import of_cases
from bertsmith.checkpoints.config_json import label_names as stored_names
from bertsmith.checkpoints.config_json import read_config, read_extra_config
from bertsmith.checkpoints.model_folder import TASK_CLASSES, family_class, load_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.model.config import ModelConfig
from bertsmith.model.directions import encoders
from bertsmith.model.heads import FrozenTagger, TaskModel
from bertsmith.model.initialization import initialize
from bertsmith.tasks.features import Features
from bertsmith.tasks.metrics import check_metrics
from bertsmith.tasks.task import TASKS, Task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.checkpointing import SeedCheckpoint
from bertsmith.training.engine import Engine, choose_engine, has_bf16
from bertsmith.training.finetuning.fit import Batches, fit
from bertsmith.training.finetuning.hidden_states import head_outputs
from bertsmith.training.finetuning.settings import DROPOUTS, GPT_LM_WEIGHT, FinetuneSettings
from bertsmith.training.finetuning.task import (
    BestOnDev,
    DevEvaluation,
    FineTuning,
    TargetScaler,
    TrimmedEmbeddings,
    set_token_table,
)
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask, TaskType, balanced_weights
from bertsmith.training.finetuning.task_types.losses import Objective
from bertsmith.training.loop.loop import Stopped, stop_signals
from bertsmith.training.loop.matmul_times import with_faster_matmul
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.step import LOWER_RATE
from bertsmith.training.loop.task import LoopSettings, TrainingState
from bertsmith.training.optimizers import READER_RATE, build_optimizer
from bertsmith.training.replicas import TOKENS_AT_ONCE
from bertsmith.training.settings import AUTO_INT8


@dataclass(frozen=True)
class InitialModel:
    """A model folder, with its weights or for its shape alone."""

    folder: Path
    from_scratch: bool = False
    """True: the folder's shape and vocabulary with fresh random weights, for comparison."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's; a GPT's gets the pieces that stand around texts. Errors: ValueError."""
        tokenizer = load_tokenizer(self.folder)
        return tokenizer.with_borders() if self.is_gpt else tokenizer

    @property
    def is_gpt(self) -> bool:
        return read_config(self.folder).family == "gpt"

    def check(self, settings: FinetuneSettings) -> None:
        """Refuse settings that this model cannot have. Errors: ValueError that names them."""
        if settings.lm_weight and not self.is_gpt:
            raise ValueError(
                f"`lm_weight={settings.lm_weight}`: {self.folder} is no GPT: leave `lm_weight` out"
            )
        check_frozen(self.folder, read_config(self.folder), settings)

    def model(
        self,
        head: type[TaskModel],
        num_outputs: int,
        settings: FinetuneSettings,
        seed: int,
        label_names: Sequence[str] = (),
        scaler: TargetScaler | None = None,
        task: str | None = None,
    ) -> TaskModel:
        """The model before its first step; fresh weights are a function of the seed.

        The head of an earlier fine-tuning is kept if it is of the same type and classes, and not of
        another published data set than `task`: half of GLUE calls its classes 0 and 1. With a
        `scaler` it gives standardized scores.

        Errors: ValueError when more layers are to be fresh than there are.
        """
        generator = torch.Generator().manual_seed(seed)
        given = {name: getattr(settings, name) for name in (*DROPOUTS, "bilstm")}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        there = read_config(self.folder)
        config = replace(there, **changes)
        pieces = max(config.vocab_size, len(self.tokenizer.vocabulary))
        if settings.reinit_layers > config.num_layers:
            raise ValueError(
                f"`reinit_layers={settings.reinit_layers}`: the model has {config.num_layers}"
            )
        if self.from_scratch:
            config = replace(config, vocab_size=pieces)
            kind = family_class(head, config, self.folder)
            return initialize(kind(config, num_outputs), config.initializer_range, generator)
        # of other classes a head with as many outputs would be a wrong start
        own = read_extra_config(self.folder)
        earlier, kind = own.get("task"), TASKS[task].task_type if task in TASKS else task
        same_kind = not own.get("kind") or kind in (None, own["kind"])
        same_classes = not label_names or (
            list(label_names) == stored_names(self.folder)
            # own files name their classes, GLUE numbers them
            and (earlier == task or not {earlier, task} <= TASKS.keys())
        )
        loaded = load_model(
            self.folder,
            head,
            num_outputs=num_outputs,
            keep_head=same_kind and same_classes and config.bilstm == there.bilstm,
            generator=generator,
            **changes,
        )
        model = loaded.model
        add_pieces(model, pieces - config.vocab_size, generator)
        if scaler and "classifier.weight" not in loaded.missing:
            scaler.transform(model)
        first = config.num_layers - settings.reinit_layers
        fresh = [layer for one in encoders(model.encoder) for layer in one.layers[first:]]
        if fresh and (pooler := getattr(model, "pooler", None)):
            fresh.append(pooler)
        for module in fresh:
            initialize(module, config.initializer_range, generator)
        return model


def add_pieces(model: TaskModel, count: int, generator: torch.Generator) -> None:
    """Add rows at the end of the token table, drawn from N(0, 0.02) (Radford et al. 2018)."""
    if count:
        table = model.encoder.embeddings.token.weight.detach()
        new = 0.02 * torch.randn(count, table.shape[1], generator=generator)
        set_token_table(model, torch.cat([table, new]), model.config.pad_id)


class Split(NamedTuple):
    """A dev set."""

    name: str
    data: Any
    features: Features


@dataclass(frozen=True)
class Trained:
    """A model after its training."""

    model: TaskModel
    engine: Engine
    evaluation: DevEvaluation
    steps: int
    best_step: int
    """The step after which the weights were taken."""
    flops: float
    """Of the training's matrix products."""

    def outputs(self, features: Features) -> np.ndarray:
        """The head's outputs of any rows, without dropout."""
        return head_outputs(self.model, features, self.engine)


@dataclass(frozen=True)
class Trainer:
    """Common parts of all trainings of a run: the initial model and the tokenized data."""

    start: InitialModel
    task_type: TaskType
    model_task: ModelTask
    tokenizer: Tokenizer
    train_data: Any
    train: Features
    """With standardized scores."""
    dev: tuple[Split, ...]
    teacher: np.ndarray | None = None
    """Its outputs for the units of `train`, scores standardized."""
    scaler: TargetScaler | None = None
    """Of the scores."""
    teacher_sha256: str = ""
    """Of the teacher's weights, where it has any."""

    @classmethod
    def prepare(
        cls,
        start: InitialModel,
        task: Task,
        train: Any,
        dev: Mapping[str, Any],
        settings: FinetuneSettings,
        teacher: np.ndarray | None = None,
    ) -> Trainer:
        """Tokenize `train` and each dev set, which the task type has read.

        `teacher` float32 [N, K] are a teacher's outputs for the N examples of `train`.

        Errors: ValueError for a length that the model cannot read, pairs for a model of single
        texts, a metric that is not of the task, scores that are all the same; as `load_tokenizer`.
        """
        task_type = TASK_TYPES[task.task_type]
        tokenizer, config = start.tokenizer, read_config(start.folder)
        start.check(settings)
        encoding = settings.encoding(
            task_type.default_length, config.max_positions, config.length_scale
        )
        if encoding.both_orders == "auto":
            both = task.symmetric and start.is_gpt and encoding.long_texts != "windows"
            encoding = replace(encoding, both_orders="on" if both else "off")
        names = task_type.label_names(train)
        task = with_metric(task, settings.metric, names)
        model_task = ModelTask(task, names, encoding, task_type.first_thresholds(train))
        splits = tuple(
            Split(name, data, task_type.featurize(tokenizer, data, model_task))
            for name, data in dev.items()
        )
        rows = task_type.featurize(tokenizer, train, model_task)
        if 0 < (segments := config.type_vocab_size) <= rows.token_types.max(initial=0):
            raise ValueError(
                f"{start.folder}: with its type_vocab_size of {segments} it cannot read second"
                " texts: take a model that was trained on pairs, or leave `text_pair` out"
            )
        if teacher is not None and rows.unit_examples is not None:
            teacher = teacher[rows.unit_examples]  # a window learns the answer to its text
        scaler = None
        if task_type.has_scores:
            assert rows.labels is not None
            if (rows.labels == rows.labels[0]).all():  # all others were split off, or are in dev
                raise ValueError(
                    f"{train.source}: every training example has the score {rows.labels[0]:g}: give"
                    " others too, or name a dev set with `dev` if one was split off"
                )
            scaler = TargetScaler.fit(rows.labels)
            rows = replace(rows, labels=scaler.standardized(rows.labels))
            teacher = None if teacher is None else scaler.standardized(teacher)
        return cls(start, task_type, model_task, tokenizer, train, rows, splits, teacher, scaler)

    @property
    def metric(self) -> str:
        """The metric that decides which weights are kept."""
        return self.model_task.task.main_metric

    def with_defaults(self, settings: FinetuneSettings) -> FinetuneSettings:
        """The settings with defaults for what they leave open."""
        config = read_config(self.start.folder)
        examples, batch = len(self.train.unit_lengths), self.task_type.default_batch
        settings = settings.with_defaults(examples, config, batch)
        if settings.lm_weight is None and not settings.freeze_encoder:
            weight = GPT_LM_WEIGHT if self.start.is_gpt else 0.0
            settings = replace(settings, lm_weight=weight)
        return settings

    def with_faster_precision(
        self, settings: FinetuneSettings, begun: Mapping[str, Any] | None = None
    ) -> FinetuneSettings:
        """The settings with int8 or bf16 for "auto-int8", whichever is faster on this machine.

        Measured with as many tokens as a core has in a step. `begun` are the settings of a run that
        goes on: it keeps its precision where that can be computed.
        """
        config = read_config(self.start.folder).one_direction
        learns = not (settings.freeze_encoder or config.is_frozen)
        if settings.precision != AUTO_INT8 or not learns:
            return settings
        device, threads = settings.device, settings.threads
        if begun:
            with suppress(ValueError):  # another machine may not have it
                before = choose_engine(device, begun["precision"], threads)
                if before.precision != "bf16" or has_bf16(before.device):
                    return replace(settings, precision=before.precision)
        engine = choose_engine(device, settings.precision, threads)
        units, tokens = len(self.train.unit_lengths), len(self.train.ids)
        share = self.with_defaults(settings).batch_size * tokens / units / engine.workers
        share /= math.ceil(share / TOKENS_AT_ONCE)
        engine = with_faster_matmul(engine, config, math.ceil(share))
        if engine.reason:
            print(f"finetune: {engine.reason}", file=sys.stderr)
        return replace(settings, precision=engine.precision)

    def describe(self, figures: Mapping[str, float]) -> str:
        """The main metric for a log line, with the number of dev examples if that is small."""
        cases = of_cases(len(self.dev[0].data), "examples")
        return f"dev {self.metric} {figures[self.metric]:.4f}{cases}"

    def fresh_model(self, settings: FinetuneSettings, seed: int) -> TaskModel:
        """The model before its first step."""
        names, task = self.model_task.label_names, self.model_task.task.name
        head = FrozenTagger if settings.freeze_encoder else TASK_CLASSES[self.task_type.head]
        num_outputs = self.task_type.num_outputs(names)
        return self.start.model(head, num_outputs, settings, seed, names, self.scaler, task)

    def run(
        self,
        settings: FinetuneSettings,
        seed: int,
        folder: Path,
        label: str = "finetune",
        peak: float = 0.0,
        resume: bool = False,
    ) -> Trained:
        """Train with one seed and measure on dev; the log is in `folder`.

        The precision "auto-int8" counts as "auto" here: see `with_faster_precision`.
        With `resume` it writes checkpoints there, and resumes from the newest.

        Errors: KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step, or
        answers to dev, that are not finite.
        """
        settings = self.with_defaults(settings)
        engine = choose_engine(settings.device, settings.precision, settings.threads)
        seeds = settings.part_seeds(seed)
        model = self.fresh_model(settings, seeds.init).to(engine.device)
        used = TrimmedEmbeddings(
            [self.train, *(split.features for split in self.dev)],
            model.encoder.embeddings.token.weight,
            model.config.pad_id,
            whole=bool(settings.lm_weight) or model.config.is_frozen,
        )
        used.shrink(model)
        train = used.renumbered(self.train)
        dev = [split._replace(features=used.renumbered(split.features)) for split in self.dev]
        checkpoint = SeedCheckpoint.newest(folder) if resume else None
        state = checkpoint.state if checkpoint else TrainingState()

        def heed_stop(_: int) -> None:
            if stop:
                raise Stopped

        def outputs(rows: Features) -> np.ndarray:
            found = head_outputs(model, rows, engine, heed_stop)
            if not np.isfinite(found).all():
                raise FloatingPointError(f"step {state.step}: answers not finite: {LOWER_RATE}")
            return found

        def measure() -> DevEvaluation:
            with self.scaler.giving_scores(model) if self.scaler else nullcontext():
                return self.evaluate(outputs, settings, dev)

        best = BestOnDev(model, measure, self.metric, state, settings.early_stopping_patience)
        batches = Batches(
            train.unit_lengths, settings.batch_size, seeds.order, train.sorted_together
        )
        objective = self._objective(settings, engine)
        task = FineTuning(self.task_type, model, train, batches, best, objective, engine)
        task.teacher, task.lm_weight = self.teacher, settings.lm_weight or 0.0
        how = settings.optimizer, settings.learning_rate, settings.weight_decay
        rates = settings.layer_decay, READER_RATE if settings.bilstm else 1.0
        optimizer = build_optimizer(model, *how, *rates)
        steps = settings.epochs * batches.per_epoch

        def save(state: TrainingState) -> None:
            if resume and (stop or state.step < steps):
                SeedCheckpoint.write(folder, model, optimizer, state, best.found, best.weights)

        loop = LoopSettings.of(
            settings,
            budget=Budget(steps=steps),
            seed=seeds.dropout,
            num_evals=settings.epochs * settings.evals_per_epoch,
            peak=peak,
            label=label,
            describe=self.describe,
        )
        with stop_signals() as stop:  # the loop's, which goes on for the evaluation of the end
            if checkpoint:
                checkpoint.restore(model, optimizer, best.resume)
            fit(task, optimizer, loop, engine, folder, state, save)
        evaluation, step = best.last_evaluation, state.step
        if settings.keep == "best":
            best.restore()
            evaluation, step = best.evaluation, best.step
        used.grow(model)
        if self.scaler:
            self.scaler.inverse_transform(model)
        return Trained(model, engine, evaluation, state.step, step, state.flops)

    def evaluate(
        self,
        outputs_of: Callable[[Features], np.ndarray],
        settings: FinetuneSettings,
        dev: Sequence[Split] | None = None,
        thresholds: dict[str, Any] | None = None,
    ) -> DevEvaluation:
        """Answers and metrics on every dev set.

        `dev`: the same with other features. `thresholds`: tuned before.
        """
        figures: dict[str, float] = {}
        notes: dict[str, str] = {}
        model_task, first = self.model_task, None
        if thresholds is not None:
            model_task = replace(model_task, thresholds=thresholds)
        is_tuned = thresholds is None and (settings.tune_thresholds or self.task_type.always_tuned)
        for split in dev or self.dev:
            outputs = outputs_of(split.features)
            if first is None and is_tuned:
                thresholds = self.task_type.tune(outputs, split.features, split.data, model_task)
                model_task = replace(model_task, thresholds=thresholds)
            answers = self.task_type.answers(outputs, split.features, split.data, model_task)
            prefix = "" if first is None else f"{split.name}_"
            measured = self.task_type.measure(answers, split.data, model_task)
            beside = self.task_type.notes(answers, split.data, model_task)
            figures |= {prefix + name: value for name, value in measured.items()}
            notes |= {prefix + name: note for name, note in beside.items()}
            first = answers if first is None else first
        return DevEvaluation(figures, notes, model_task, first)

    def _objective(self, settings: FinetuneSettings, engine: Engine) -> Objective:
        weights = None
        if settings.class_weights == "balanced":
            labels = self.train.labels
            assert labels is not None
            if not (count := len(self.model_task.label_names)):
                raise ValueError(
                    f"`class_weights='balanced'`: a {self.task_type.name} has no classes"
                )
            labels = labels[labels >= 0] if labels.dtype.kind == "i" else labels
            weights = torch.from_numpy(balanced_weights(labels, count)).to(engine.device)
        share = 0.0 if self.teacher is None else settings.distillation_weight
        return Objective(weights, settings.focal_gamma, share, settings.temperature)


def check_frozen(folder: Path, config: ModelConfig, settings: FinetuneSettings) -> None:
    """Refuse settings of layers that never learn. Errors: ValueError that names them."""
    names = ("freeze_encoder", "reinit_layers", "attention_dropout", "layer_decay", "bilstm")
    given = [name for name in names if getattr(settings, name) != getattr(FinetuneSettings, name)]
    if config.is_frozen and given:
        listed = ", ".join(f"`{name}`" for name in given)
        raise ValueError(
            f"{folder}: {listed}: fine-tuning never changes the layers of a model of the family "
            f"{config.family}, but trains a head over them: leave it out"
        )


def with_metric(task: Task, metric: str, label_names: Sequence[str]) -> Task:
    """The task with this metric as its main one; "": its own first.

    Errors: ValueError for a metric that does not exist or does not fit.
    """
    names = tuple(dict.fromkeys((metric or task.main_metric, *task.metrics)))
    check_metrics(names, task.task_type, len(label_names))
    return replace(task, metrics=names)
