"""One training of a fine-tuning run: a start, a task and a seed in, a model judged on dev out.

What a fine-tuning run starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertsmith.base.terminal import of_cases
from bertsmith.checkpoints.config_json import label_names as stored_names
from bertsmith.checkpoints.config_json import read_config, read_extra_config
from bertsmith.checkpoints.model_folder import load_model, load_tokenizer
from bertsmith.model.heads import TaskModel
from bertsmith.model.initialization import initialize
from bertsmith.model.lstm import FrozenTagger
from bertsmith.tasks.features import Features
from bertsmith.tasks.metrics import check_metrics
from bertsmith.tasks.task import TASKS, Task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.checkpointing import SeedCheckpoint
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task import (
    BestOnDev,
    EarlyStop,
    FineTuning,
    ScoreScale,
    UsedPieces,
    head_outputs,
)
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import (
    ModelTask,
    Objective,
    TaskType,
    balanced_weights,
)
from bertsmith.training.loop.log import RunLog
from bertsmith.training.loop.loop import train, write_evaluation
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import LoopSettings, State, Training
from bertsmith.training.optimizers import build_optimizer


@dataclass(frozen=True)
class Start:
    """A model folder, with its weights or for its shape alone."""

    folder: Path
    from_scratch: bool = False
    """True: the folder's shape and vocabulary with fresh random weights, for comparison."""

    def model(
        self,
        head: type[TaskModel],
        num_outputs: int,
        settings: FinetuneSettings,
        seed: int,
        label_names: Sequence[str] = (),
        scale: ScoreScale | None = None,
        task: str | None = None,
    ) -> TaskModel:
        """The model before its first step; fresh weights are a function of the seed.

        The head of an earlier fine-tuning is kept where it is of the same kind and classes, and not
        of another published data set than `task`: half of GLUE calls its classes 0 and 1. With a
        `scale` the model gives scores in that.

        Errors: ValueError when more layers are to be fresh than there are.
        """
        generator = torch.Generator().manual_seed(seed)
        changes: dict[str, Any] = {
            "dropout": settings.dropout,
            "attention_dropout": settings.attention_dropout,
        }
        config = replace(read_config(self.folder), **changes)
        if settings.reinit_layers > config.num_layers:
            raise ValueError(
                f"--reinit-layers {settings.reinit_layers}: the model has {config.num_layers}"
            )
        if self.from_scratch:
            model = head(config, num_outputs)
            return initialize(model, config.initializer_range, generator)
        # of other classes a head with as many outputs would be a wrong start
        same_classes = not label_names or (
            list(label_names) == stored_names(self.folder) and self._is_about(task)
        )
        loaded = load_model(
            self.folder,
            head,
            num_outputs=num_outputs,
            keep_head=same_classes,
            generator=generator,
            **changes,
        )
        model = loaded.model
        if scale and "classifier.weight" not in loaded.missing:
            scale.to_standardised(model)
        fresh = list(model.encoder.layers[config.num_layers - settings.reinit_layers :])
        if fresh and (pooler := getattr(model, "pooler", None)):
            fresh.append(pooler)
        for module in fresh:
            initialize(module, config.initializer_range, generator)
        return model

    def _is_about(self, task: str | None) -> bool:
        """Whether equal classes mean the same: own files name theirs, GLUE numbers them."""
        earlier = read_extra_config(self.folder).get("task")
        return earlier == task or not {earlier, task} <= TASKS.keys()


class Split(NamedTuple):
    """A dev set."""

    name: str
    data: Any
    features: Features


@dataclass(frozen=True)
class Judged:
    """What a model gives on dev."""

    figures: dict[str, float]
    """Metrics of the first dev set; those of others with its name before them."""
    undefined: dict[str, str]
    """Those of them that have no value and are 0, each with the reason."""
    model_task: ModelTask
    """With the decision that was tuned on the first dev set."""
    answers: Any
    """To the first dev set."""


@dataclass(frozen=True)
class Trained:
    """A model after its training."""

    model: TaskModel
    engine: Engine
    judged: Judged
    steps: int
    best_step: int
    """After which the weights were taken."""

    def outputs(self, features: Features) -> np.ndarray:
        """The head's outputs of any rows, without dropout."""
        return outputs_of(self.model, self.engine, features)


@dataclass(frozen=True)
class Job:
    """What all trainings of one run share: the start and the data, already tokenised."""

    start: Start
    task_type: TaskType
    model_task: ModelTask
    tokenizer: Tokenizer
    train_data: Any
    train: Features
    """With scores as they are learned."""
    dev: tuple[Split, ...]
    teacher: np.ndarray | None = None
    """Its outputs for the units of `train`, scores as they are learned."""
    scale: ScoreScale | None = None
    """Of the scores."""

    @classmethod
    def prepare(
        cls,
        start: Start,
        task: Task,
        train: Any,
        dev: Mapping[str, Any],
        settings: FinetuneSettings,
        teacher: np.ndarray | None = None,
    ) -> Job:
        """`train` and each dev set are what the kind's `read` gave; `teacher` is the outputs of a
        teacher for `train`, a row an example, float32 [N, K].

        Errors: ValueError for a length the model cannot read, a metric that is not of the task; as
        `load_tokenizer`.
        """
        task_type = TASK_TYPES[task.task_type]
        tokenizer = load_tokenizer(start.folder)
        config = read_config(start.folder)
        layout = settings.layout(task_type.default_length, config.max_positions)
        names = task_type.label_names(train)
        task = with_metric(task, settings.metric, names)
        splits = tuple(
            Split(name, data, task_type.featurise(tokenizer, data, layout, names))
            for name, data in dev.items()
        )
        rows = task_type.featurise(tokenizer, train, layout, names)
        if rows.token_types.max(initial=0) >= (segments := config.type_vocab_size):
            raise ValueError(
                f"{start.folder}: its type_vocab_size of {segments} tells no second text from a"
                " first: take a model that was trained on pairs, or leave --text-pair out"
            )
        model_task = ModelTask(task, names, layout)
        if teacher is not None and rows.unit_examples is not None:
            teacher = teacher[rows.unit_examples]  # a window is taught what its text means
        scale = None
        if task_type.has_scores:
            assert rows.labels is not None
            if (rows.labels == rows.labels[0]).all():  # all others were split off, or are in dev
                raise ValueError(
                    f"{train.source}: every training example has the score {rows.labels[0]:g}: give"
                    " others too, or name a dev set with --dev if one was split off"
                )
            scale = ScoreScale.of(rows.labels)
            rows = replace(rows, labels=scale.standardised(rows.labels))
            teacher = None if teacher is None else scale.standardised(teacher)
        return cls(start, task_type, model_task, tokenizer, train, rows, splits, teacher, scale)

    @property
    def metric(self) -> str:
        """What decides which weights are kept."""
        return self.model_task.task.main_metric

    @property
    def num_outputs(self) -> int:
        return self.task_type.num_outputs(self.model_task.label_names)

    def settled(self, settings: FinetuneSettings) -> FinetuneSettings:
        """The settings with what they left open."""
        width = read_config(self.start.folder).hidden_size
        return settings.settled(len(self.train.unit_lengths), width, self.task_type.default_batch)

    def told(self, figures: Mapping[str, float]) -> str:
        """The main metric in words, with the number of dev examples where it is small."""
        cases = of_cases(len(self.dev[0].data), "examples")
        return f"dev {self.metric} {figures[self.metric]:.4f}{cases}"

    def fresh_model(self, settings: FinetuneSettings, seed: int) -> TaskModel:
        """The model before its first step."""
        names, head = self.model_task.label_names, self.task_type.head
        if settings.frozen:
            head = FrozenTagger
        task = self.model_task.task.name
        return self.start.model(head, self.num_outputs, settings, seed, names, self.scale, task)

    def run(
        self,
        settings: FinetuneSettings,
        seed: int,
        folder: Path,
        label: str = "finetune",
        peak: float = 0.0,
        goes_on: bool = False,
    ) -> Trained:
        """Train with one seed and judge on dev; the log is in `folder`.

        With `goes_on` checkpoints are there too, and a training of this job with these settings
        that was stopped is taken up from the newest.

        Errors: KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step that
        is not finite.
        """
        settings = self.settled(settings)
        engine = choose_engine(settings.device, settings.precision, settings.threads)
        seeds = settings.seeds(seed)
        model = self.fresh_model(settings, seeds.init).to(engine.device)
        used = self._shrunk(model)
        dev = [split._replace(features=used.renumbered(split.features)) for split in self.dev]
        checkpoint = SeedCheckpoint.newest(folder) if goes_on else None
        state = checkpoint.state if checkpoint else State()

        def judged() -> Judged:
            with self.scale.giving_scores(model) if self.scale else nullcontext():
                return self.judge(lambda rows: outputs_of(model, engine, rows), settings, dev)

        best = BestOnDev(
            model,
            judged,
            self.metric,
            state,
            settings.early_stop,
        )
        task = FineTuning(
            self.task_type,
            model,
            used.renumbered(self.train),
            best,
            self._objective(settings, engine),
            settings.batch,
            seeds.order,
            engine,
            self.teacher,
        )
        optimizer = _optimizer(model, settings)
        if checkpoint:
            checkpoint.restore(model, optimizer, best.take_up)
        steps = settings.epochs * task.batches_per_epoch

        loop = _loop_settings(settings, steps, seeds.dropout, peak, label)
        loop = replace(loop, told=self.told)
        with RunLog(folder, state.step if checkpoint else None) as log:

            def save(state: State) -> None:
                if goes_on and state.step < steps:
                    log.sync()  # going on from here counts on the lines before
                    SeedCheckpoint.write(folder, model, optimizer, state, best.found, best.weights)

            _train(Training(task, optimizer, state, loop, engine, log, save), best)
        found, step = best.restore() if settings.keep == "best" else (best.judged_last, state.step)
        used.grow(model)
        if self.scale:
            self.scale.to_scores(model)
        return Trained(model, engine, found, state.step, step)

    def _shrunk(self, model: TaskModel) -> UsedPieces:
        """Leave the rows that the data does not use out of the token table."""
        features = [self.train, *(split.features for split in self.dev)]
        table = model.encoder.embeddings.token.weight
        used = UsedPieces(features, table, model.config.pad_id)
        used.shrink(model)
        return used

    def judge(
        self,
        outputs_of: Callable[[Features], np.ndarray],
        settings: FinetuneSettings,
        dev: Sequence[Split] | None = None,
        decision: dict[str, Any] | None = None,
    ) -> Judged:
        """Answers and figures on every dev set; `dev`: the same with other features; `decision`:
        one that was tuned before.
        """
        figures: dict[str, float] = {}
        undefined: dict[str, str] = {}
        model_task, first = replace(self.model_task, decision=decision or {}), None
        is_tuned = decision is None and (settings.tune_thresholds or self.task_type.always_tuned)
        for split in dev or self.dev:
            outputs = outputs_of(split.features)
            if first is None and is_tuned:
                decision = self.task_type.tune(outputs, split.features, split.data, model_task)
                model_task = replace(model_task, decision=decision)
            answers = self.task_type.answers(outputs, split.features, split.data, model_task)
            before = "" if first is None else f"{split.name}_"
            measured = self.task_type.measure(answers, split.data, model_task)
            reasons = self.task_type.undefined(answers, split.data, model_task)
            figures |= {before + name: value for name, value in measured.items()}
            undefined |= {before + name: reason for name, reason in reasons.items()}
            first = answers if first is None else first
        return Judged(figures, undefined, model_task, first)

    def _objective(self, settings: FinetuneSettings, engine: Engine) -> Objective:
        weights = None
        if settings.class_weights == "balanced":
            labels = self.train.labels
            assert labels is not None
            if not self.model_task.label_names:
                raise ValueError(
                    f"--class-weights balanced: a {self.task_type.name} has no classes"
                )
            labels = labels[labels >= 0] if labels.dtype.kind == "i" else labels
            count = len(self.model_task.label_names)
            weights = torch.from_numpy(balanced_weights(labels, count)).to(engine.device)
        return Objective(
            weights,
            settings.focal,
            0.0 if self.teacher is None else settings.teacher_share,
            settings.temperature,
        )


def with_metric(task: Task, metric: str, label_names: Sequence[str]) -> Task:
    """The task with the metric that decides before its own; "": its first does.

    Errors: ValueError for a metric that does not exist or does not fit.
    """
    names = tuple(dict.fromkeys((metric or task.main_metric, *task.metrics)))
    check_metrics(names, task.task_type, len(label_names))
    return replace(task, metrics=names)


def _optimizer(model: TaskModel, settings: FinetuneSettings) -> torch.optim.Optimizer:
    how = settings.optimizer, settings.rate, settings.weight_decay
    return build_optimizer(model, *how, layer_decay=settings.layer_decay)


def _loop_settings(
    settings: FinetuneSettings, steps: int, seed: int, peak: float, label: str
) -> LoopSettings:
    return LoopSettings(
        budget=Budget(steps=steps),
        rate=settings.rate,
        schedule=settings.schedule,
        warmup=settings.warmup,
        clip=settings.clip,
        seed=seed,
        checkpoint_every=settings.checkpoint_every,
        evaluations=settings.epochs * settings.evaluations,
        peak=peak,
        label=label,
    )


def _train(run: Training, best: BestOnDev[Judged]) -> None:
    """Train to the end of the budget, or until the dev figures have stopped getting better."""
    try:
        if not train(run):
            run.log.message(f"stopped by a signal at step {run.state.step}")
            raise KeyboardInterrupt
        write_evaluation(run, best())
    except EarlyStop as reason:
        write_evaluation(run, best.last)
        run.log.message(f"stopped early: {reason}")


def outputs_of(model: TaskModel, engine: Engine, features: Features) -> np.ndarray:
    """The head's outputs of any rows, in the engine's precision, without dropout."""
    pad_id = model.config.pad_id
    return head_outputs(model, features, pad_id, engine)
