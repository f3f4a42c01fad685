"""Real steps before a run: the micro-batch that suits this machine, and what a recipe would take.

A trial trains a model of its own, which is thrown away, at the rate 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from bertsmith.corpus.mixture import Sources, Stream, open_corpus, stream_of
from bertsmith.corpus.stream import Position
from bertsmith.model.heads import PreTrainingModel
from bertsmith.training.accelerator import check_compile, compile_tasks
from bertsmith.training.batch_size import MicroBatch, find_micro_batch, fits_cpu, fits_cuda
from bertsmith.training.engine import AUTO_INT8, Engine, choose_engine, measure_peak
from bertsmith.training.estimate import Estimate, Speed, assumed_speed, estimate, measure_speed
from bertsmith.training.memory import FLOAT, StepShape, available_memory, step_memory
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretrain_settings import SECOND_PHASE, Phase, PretrainSettings, default
from bertsmith.training.pretraining import FEWEST_HELD_OUT, Pretraining, rows_at_once
from bertsmith.training.process_memory import keep_freed_memory
from bertsmith.training.product_times import with_faster_products
from bertsmith.training.ranks import ALONE, Ranks
from bertsmith.training.replicas import Replicas
from bertsmith.training.schedule import Budget
from bertsmith.training.start import check_shape, model_config, start_model
from bertsmith.training.step import optimizer_step, step_gradients
from bertsmith.training.task import LoopSettings, State

SECONDS_A_SIZE, SECONDS_A_PHASE = 0.5, 3.0
MEASURED_TOKENS = 2048  # of a core: more tell the same, and a large model takes long
PADDING_ROWS = 1024  # tell the share of padding within a percent of it
STILL = LoopSettings(Budget(steps=1), rate=0.0, schedule="linear", warmup=0.0, clip=1.0, seed=0)


def chosen(
    corpus: Sources, settings: PretrainSettings, init: Path | None, ranks: Ranks = ALONE
) -> tuple[PretrainSettings, Engine, str | None]:
    """The settings with what "auto" chooses on this machine, its engine, and the rule by which the
    micro-batch was chosen (None: it was given).

    Errors: ValueError for what this machine does not have, and as `Trial`.
    """
    engine = choose_engine(
        settings.device, settings.precision, settings.threads, ranks.sharding(settings.shard)
    )
    if settings.precision == AUTO_INT8:
        config = model_config(open_corpus(corpus).tokenizer, settings, init)
        engine = with_faster_products(engine, settings, config)
    resolved = {"pairs": settings.pair_rule, "bag_of_words": settings.bow_weight}
    settings = replace(settings, **resolved, **engine.settings())
    if settings.micro_batch != "auto":
        return settings, engine, None
    has_buckets = engine.ranks.size > 1 and not engine.ranks.shard
    found = Trial(corpus, settings, replace(engine, ranks=ALONE), init).micro_batch(has_buckets)
    rows = int(ranks.told_by_first("micro_batch", str(found.rows)))
    return replace(settings, micro_batch=rows), engine, found.rule


def dry_run(
    corpus: Sources,
    settings: PretrainSettings,
    init: Path | None = None,
    given: Collection[str] = (),
) -> tuple[list[Estimate], str | None]:
    """What a run would need: an estimate for each phase, and the rule as in `chosen`.

    Nothing is written. `given` are the settings that the user named.
    """
    settings.budget()
    check_shape(given, init)
    settings, engine, rule = chosen(corpus, settings, init)
    check_compile(settings.compile, engine)
    return Trial(corpus, settings, engine, init).estimates(), rule


class Trial:
    """A recipe on this machine before it runs.

    Errors: ValueError for a store, a model to go on from or settings that do not fit each other.
    """

    def __init__(
        self, corpus: Sources, settings: PretrainSettings, engine: Engine, init: Path | None
    ) -> None:
        self._settings, self._engine, self._init = settings, engine, init
        self._store = open_corpus(corpus)
        self._tokenizer = self._store.tokenizer
        self._config = model_config(self._tokenizer, settings, init)

    def micro_batch(self, has_buckets: bool = False) -> MicroBatch:
        """Rows at once for the first phase. Errors: ValueError when not even one fits.

        `has_buckets`: in the run DDP will hold the gradients once more.
        """
        phase, workers = self._settings.phases()[0], self._engine.workers
        if self._on_gpu:
            device = self._engine.device
            numbers = sum(weight.numel() for weight in self._model.parameters())

            def step(rows: int) -> int:
                # from the second micro-batch on gradients are there in the forward pass
                return self._step(self._part(phase, rows, 2 if rows < phase.batch else 1))()

            fits = fits_cuda(step, device, FLOAT * numbers if has_buckets else 0)
            return find_micro_batch(phase.batch, fits, workers=workers)

        def rate(rows: int) -> float:
            passes = self._step(self._part(phase, rows), update=False)  # a whole batch has only one
            return measure_speed(passes, SECONDS_A_SIZE).tokens_per_second

        fits = fits_cpu(self._config, self._shape(phase, 1), available_memory())
        return find_micro_batch(phase.batch, fits, rate, workers)

    def estimates(self) -> list[Estimate]:
        """One for each phase, at the speed measured here where there is memory for it."""
        found, started = [], 0.0
        for phase in self._settings.phases():
            rows = rows_at_once(self._settings, phase, self._engine, self._config)
            shape, available = self._shape(phase, rows), self._available()
            budget = _share_of(self._settings.budget(), phase.until - started)
            speed = self._speed(phase, shape, available)
            rows = self._evaluated_rows(phase.until - started)
            padding = self._padding(phase)
            found.append(estimate(self._config, shape, budget, speed, available, padding, rows))
            started = phase.until
        return found

    @property
    def _on_gpu(self) -> bool:
        return self._engine.device.type == "cuda"

    @cached_property
    def _model(self) -> PreTrainingModel:
        keep_freed_memory()
        model = start_model(self._tokenizer, self._settings, self._init).to(self._engine.device)
        self._engine.prepare(model)
        return model

    @cached_property
    def _replicas(self) -> Replicas:
        # made once, as in a run: a copy of the model costs more than a small step
        return Replicas(self._model, self._engine)

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self._model, self._settings.optimizer, 0.0, 0.0)

    @cached_property
    def _streams(self) -> dict[int, Stream]:
        """By the length of their rows."""
        split, vocabulary, settings = self._store.train, self._tokenizer.vocabulary, self._settings
        return {
            phase.length: stream_of(
                split, vocabulary, settings.examples(phase.length), settings.seed
            )
            for phase in settings.phases()
        }

    @cached_property
    def _tasks(self) -> list[Pretraining]:
        """The run's own, a phase each, compiled where the run's are."""
        settings, engine = self._settings, self._engine
        tasks = [
            Pretraining(self._model, self._streams[phase.length], None, settings, engine, phase)
            for phase in settings.phases()
        ]
        compile_tasks(settings.compile, tasks, measure_peak(engine))
        return tasks

    def _part(self, phase: Phase, rows: int, pieces: int = 1) -> Pretraining:
        """A task of the phase whose batches are so many micro-batches of so many rows for each
        worker."""
        settings = replace(
            self._settings,
            length=phase.length,
            batch=pieces * rows * self._engine.workers,
            micro_batch=rows,
            max_predictions=self._settings.examples(phase.length).max_predictions,
            **{name: default(name) for name in ("second_length", *SECOND_PHASE)},
        )
        stream = self._streams[phase.length]
        return Pretraining(self._model, stream, None, settings, self._engine)

    def _shape(self, phase: Phase, rows: int) -> StepShape:
        return StepShape(
            batch=phase.batch,
            micro_batch=rows,
            length=phase.length,
            predictions=self._settings.examples(phase.length).num_predictions,
            precision=self._engine.precision,
            optimizer=self._settings.optimizer,
            device=self._engine.device.type,
            workers=self._engine.workers,
            checkpoint_activations=self._settings.checkpoint_activations,
        )

    def _padding(self, phase: Phase) -> float:
        """The share of padding in the rows that the phase reads first."""
        batch, _ = self._streams[phase.length].batch(Position(), PADDING_ROWS)
        return 1.0 - float(batch.lengths.mean()) / phase.length

    def _evaluated_rows(self, share: float) -> float:
        """Held-out rows that are measured in this share of a run; its last figures come behind."""
        if self._store.held_out.num_documents < FEWEST_HELD_OUT:
            return 0.0
        return share * (self._settings.evaluations - 1) * self._settings.held_out_rows

    def _available(self) -> int | None:
        if self._on_gpu:
            return torch.cuda.mem_get_info(self._engine.device)[0]
        return available_memory()

    def _speed(self, phase: Phase, shape: StepShape, available: int | None) -> Speed:
        if available is not None and step_memory(self._config, shape).peak > available:
            return assumed_speed(self._config, shape, measure_peak(self._engine))
        if not self._on_gpu:
            rows = min(shape.micro_batch, max(1, MEASURED_TOKENS // phase.length))
            return self._speed_of_parts(phase, self._part(phase, rows))
        task = self._tasks[phase.number - 1]  # a part of a batch would leave it idle
        try:
            return measure_speed(self._step(task), SECONDS_A_PHASE)
        except torch.OutOfMemoryError as error:
            raise MemoryError(task.out_of_memory(error, sized=self._init is None)) from error

    def _speed_of_parts(self, phase: Phase, part: Pretraining) -> Speed:
        """Count the passes of a part as often as a whole step does them, and the update once.

        With one thread a tiny model makes 15% more steps than its parts with an update each say.
        """
        passes, with_update = (
            measure_speed(self._step(part, update), SECONDS_A_PHASE / 2).tokens_per_second
            for update in (False, True)
        )
        tokens, whole = (rows * phase.length for rows in (part.phase.batch, phase.batch))
        update = max(0.0, tokens / with_update - tokens / passes)
        return Speed(whole / (whole / passes + update), measured=True)

    def _step(self, task: Pretraining, update: bool = True) -> Callable[[], int]:
        """A step on the task's first batch, or its passes alone; it returns the tokens in it."""
        engine, replicas = self._engine, self._replicas
        batch, _ = task.batch(Position())
        staged = [engine.staged(micro) for micro in batch.micro_batches]  # as the run's loaders do
        batch = replace(batch, micro_batches=staged)

        def step() -> int:
            if update:
                optimizer_step(task, self._optimizer, batch, 0.0, STILL, engine, State(), replicas)
            else:
                step_gradients(task, batch, STILL.seed, engine, State(), replicas)
                replicas.forget()
            return task.phase.batch * task.phase.length

        return step


def _share_of(budget: Budget, share: float) -> Budget:
    """A share of the budget, at least one step of it."""
    if budget.steps is not None:
        return Budget(steps=max(1, round(share * budget.steps)))
    if budget.tokens is not None:
        return Budget(tokens=max(1, round(share * budget.tokens)))
    assert budget.minutes is not None
    return Budget(minutes=share * budget.minutes)
