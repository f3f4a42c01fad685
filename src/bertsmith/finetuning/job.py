"""One training of a fine-tuning run: a start, a task and a seed in, a model judged on dev out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertsmith.checkpoints.folder import load_tokenizer
from bertsmith.checkpoints.model_config import read_config
from bertsmith.finetuning.fine_tuning import BestOnDev, EarlyStop, FineTuning
from bertsmith.finetuning.finetune_settings import FinetuneSettings
from bertsmith.finetuning.kind import Kind, Purpose
from bertsmith.finetuning.kinds import KINDS
from bertsmith.finetuning.losses import Objective, balanced_weights
from bertsmith.finetuning.score_scale import ScoreScale
from bertsmith.finetuning.scoring import head_outputs
from bertsmith.finetuning.seed_checkpoint import SeedCheckpoint
from bertsmith.finetuning.start import Start
from bertsmith.finetuning.used_pieces import UsedPieces
from bertsmith.model.heads import TaskModel
from bertsmith.model.tagger import FrozenTagger
from bertsmith.progress import of_cases
from bertsmith.tasks.features import Features
from bertsmith.tasks.metrics import check_metrics
from bertsmith.tasks.table import Task
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.loop import evaluated, train
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.run_log import RunLog
from bertsmith.training.schedule import Budget
from bertsmith.training.task import LoopSettings, State


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
    purpose: Purpose
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
    kind: Kind
    purpose: Purpose
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
        kind = KINDS[task.kind]
        tokenizer = load_tokenizer(start.folder)
        config = read_config(start.folder)
        layout = settings.layout(kind.default_length, config.max_positions)
        names = kind.label_names(train)
        task = with_metric(task, settings.metric, names)
        splits = tuple(
            Split(name, data, kind.featurise(tokenizer, data, layout, names))
            for name, data in dev.items()
        )
        rows = kind.featurise(tokenizer, train, layout, names)
        if rows.token_types.max(initial=0) >= (segments := config.type_vocab_size):
            raise ValueError(
                f"{start.folder}: its type_vocab_size of {segments} tells no second text from a"
                " first: take a model that was trained on pairs, or leave --text-pair out"
            )
        purpose = Purpose(task, names, layout)
        if teacher is not None and rows.unit_examples is not None:
            teacher = teacher[rows.unit_examples]  # a window is taught what its text means
        scale = None
        if kind.has_scores:
            assert rows.labels is not None
            if (rows.labels == rows.labels[0]).all():  # all others were split off, or are in dev
                raise ValueError(
                    f"{train.source}: every training example has the score {rows.labels[0]:g}: give"
                    " others too, or name a dev set with --dev if one was split off"
                )
            scale = ScoreScale.of(rows.labels)
            rows = replace(rows, labels=scale.standardised(rows.labels))
            teacher = None if teacher is None else scale.standardised(teacher)
        return cls(start, kind, purpose, tokenizer, train, rows, splits, teacher, scale)

    @property
    def metric(self) -> str:
        """What decides which weights are kept."""
        return self.purpose.task.main_metric

    @property
    def num_outputs(self) -> int:
        return self.kind.num_outputs(self.purpose.label_names)

    def settled(self, settings: FinetuneSettings) -> FinetuneSettings:
        """The settings with what they left open."""
        width = read_config(self.start.folder).hidden_size
        return settings.settled(len(self.train.unit_lengths), width, self.kind.default_batch)

    def told(self, figures: Mapping[str, float]) -> str:
        """The main metric in words, with the number of dev examples where it is small."""
        cases = of_cases(len(self.dev[0].data), "examples")
        return f"dev {self.metric} {figures[self.metric]:.4f}{cases}"

    def fresh_model(self, settings: FinetuneSettings, seed: int) -> TaskModel:
        """The model before its first step."""
        names, head = self.purpose.label_names, self.kind.head
        if settings.frozen:
            head = FrozenTagger
        task = self.purpose.task.name
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
            self.kind,
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

            _train(task, optimizer, state, loop, log, save, best)
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
        purpose, first = replace(self.purpose, decision=decision or {}), None
        is_tuned = decision is None and (settings.tune_thresholds or self.kind.always_tuned)
        for split in dev or self.dev:
            outputs = outputs_of(split.features)
            if first is None and is_tuned:
                decision = self.kind.tune(outputs, split.features, split.data, purpose)
                purpose = replace(purpose, decision=decision)
            answers = self.kind.answers(outputs, split.features, split.data, purpose)
            before = "" if first is None else f"{split.name}_"
            measured = self.kind.measure(answers, split.data, purpose)
            reasons = self.kind.undefined(answers, split.data, purpose)
            figures |= {before + name: value for name, value in measured.items()}
            undefined |= {before + name: reason for name, reason in reasons.items()}
            first = answers if first is None else first
        return Judged(figures, undefined, purpose, first)

    def _objective(self, settings: FinetuneSettings, engine: Engine) -> Objective:
        weights = None
        if settings.class_weights == "balanced":
            labels = self.train.labels
            assert labels is not None
            if not self.purpose.label_names:
                raise ValueError(f"--class-weights balanced: a {self.kind.name} has no classes")
            labels = labels[labels >= 0] if labels.dtype.kind == "i" else labels
            count = len(self.purpose.label_names)
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
    check_metrics(names, task.kind, len(label_names))
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


def _train(
    task: FineTuning,
    optimizer: torch.optim.Optimizer,
    state: State,
    settings: LoopSettings,
    log: RunLog,
    save: Callable[[State], None],
    best: BestOnDev[Judged],
) -> None:
    """To the end of the budget, or until the dev figures have stopped getting better."""
    try:
        if not train(task, optimizer, state, settings, task.engine, log, save):
            log.message(f"stopped by a signal at step {state.step}")
            raise KeyboardInterrupt
        evaluated(best(), state, settings, log)
    except EarlyStop as reason:
        evaluated(best.last, state, settings, log)
        log.message(f"stopped early: {reason}")


def outputs_of(model: TaskModel, engine: Engine, features: Features) -> np.ndarray:
    """The head's outputs of any rows, in the engine's precision, without dropout."""
    pad_id = model.config.pad_id
    return head_outputs(model, features, pad_id, engine)
