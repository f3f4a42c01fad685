"""Real steps before a run: the micro-batch that suits this machine, and what a recipe would take.

A trial trains a model of its own, which is thrown away, at learning rate 0. The size of a
micro-batch changes speed and memory, and the result by rounding alone, as gradients are summed.
Here is also decided if a step is compiled on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bertsmith.base.processes import keep_freed_memory
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.corpus.examples.mixture import Sources, Stream, open_corpus, open_stream
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.kernels.quantized_linear import check_float8
from bertsmith.training.engine import Engine, choose_engine, measure_peak
from bertsmith.training.loop.matmul_times import with_faster_matmul
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import LoopSettings, Training, TrainingState
from bertsmith.training.memory import FLOAT, StepShape, available_memory, step_memory
from bertsmith.training.optimizers import build_optimizer, choose_optimizer
from bertsmith.training.pretraining.estimate import (
    Estimate,
    Speed,
    assumed_speed,
    estimate,
    measure_speed,
)
from bertsmith.training.pretraining.settings import (
    SECOND_PHASE,
    Phase,
    PretrainSettings,
    Recipe,
    make_recipe,
)
from bertsmith.training.pretraining.task import (
    FEWEST_HELD_OUT,
    Pretraining,
    model_config,
    rows_per_forward,
    start_model,
)
from bertsmith.training.ranks import SINGLE_PROCESS, Ranks
from bertsmith.training.replicas import Replicas
from bertsmith.training.settings import AUTO_INT8

MARGIN = 0.1  # of the memory, left free: rows of a later batch may hold more predictions
GAIN = 1.05  # a larger micro-batch must be this much faster, or it only costs memory


class MicroBatch(NamedTuple):
    rows: int
    rule: str
    """The reason for `rows`, in one line."""


def find_micro_batch(
    batch: int,
    fits: Callable[[int], bool],
    rate: Callable[[int], float] | None = None,
    workers: int = 1,
) -> MicroBatch:
    """The largest number of rows that divides the batch and fits.

    With `rate` (tokens a second at that many rows) it grows only while that makes it faster: a
    CPU's caches are full long before its memory is. Each of `workers` gets equally many
    micro-batches where the batch allows it. The sizes tried at least double.

    Errors: ValueError when not even one row fits.

    >>> find_micro_batch(96, fits=lambda rows: rows <= 50).rows
    48
    >>> find_micro_batch(256, fits=lambda rows: True, rate=lambda rows: min(rows, 16)).rows
    16
    """
    sizes = [n for n in range(1, batch + 1) if batch % n == 0]
    even = [n for n in sizes if batch // n % workers == 0]
    # without any there are fewer rows than workers, or not a multiple of them
    sizes = even or [n for n in sizes if n == 1 or n * workers < batch]
    chosen, best, why = 0, 0.0, f"all {batch} rows at once fit"
    for size in sizes:
        if size < 2 * chosen:
            continue
        if not fits(size):
            between = [n for n in sizes if chosen < n < size] if rate is None else []
            chosen = next((n for n in reversed(between) if fits(n)), chosen)
            why = f"{size} rows would fill more than {1 - MARGIN:.0%} of the memory"
            break
        if rate is not None:
            found = rate(size)
            if found < GAIN * best:
                why = f"{size} rows are not {GAIN - 1:.0%} faster"
                break
            best = found
        chosen = size
    else:
        if workers > 1:
            why = f"the batch's share of each of {workers} cores"
    if not chosen:
        raise ValueError(
            "`micro_batch_size='auto'`: not even one row fits in the memory; lower `max_length`, "
            "take a smaller `size`, or add `activation_checkpointing=True` if it is not there yet"
        )
    return MicroBatch(chosen, f"micro-batch {chosen} of batch {batch}: {why}")


def fits_cpu(config: ModelConfig, shape: StepShape, available: int | None, rows: int) -> bool:
    """True if a step with so many rows at once should leave `MARGIN` of `available` bytes."""
    peak = step_memory(config, replace(shape, micro_batch_size=rows)).peak
    return available is None or peak <= (1 - MARGIN) * available


def fits_cuda(
    step: Callable[[int], object], device: torch.device, more: int = 0
) -> Callable[[int], bool]:
    """Test if a real step with so many rows at once runs and leaves `MARGIN` of the GPU.

    `more`: bytes that a run holds besides.
    """

    def fits(rows: int) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            step(rows)
        except torch.OutOfMemoryError:
            return False
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        needed = torch.cuda.max_memory_reserved(device) + others + more
        return needed <= (1 - MARGIN) * total

    return fits


EAGER_SHARE = 0.25  # of the peak, at most, of a step that is not compiled (an estimate)
# Its kernels are sent one by one, however small they are. A layer of mini took 4 ms of a step on an
# H100 that was shared with seven other programs; alone it should take less (an estimate).
EAGER_SECONDS_PER_LAYER = 2.5e-3
COMPILE_GAIN = 0.3  # of the time of such a step, saved by compiling (an estimate)
# On an H100: 28 s for base at 512, 49 s for large at 128 (beside other programs).
COMPILE_SECONDS, COMPILE_SECONDS_PER_LAYER = 8.0, 1.7
# A shorter compiled step (some 5 ms) is over before its kernels could be sent one by one: they are
# recorded as a graph and sent at once.
GRAPH_FLOPS = 2.5e12


def compile_tasks(setting: str, tasks: list[Pretraining], peak: float) -> str:
    """Resolve "auto", "on" or "off" to "on" or "off", say why, and compile a run's tasks.

    Errors: ValueError as `check_compile` and `check_float8`.
    """
    first = tasks[0]
    if first.engine.precision == "float8":
        for task in tasks:
            check_float8(
                task.model.config.one_direction.hidden_size,
                task.rows_per_forward * task.phase.length,
            )
    if not check_compile(setting, first.engine):
        return "off"
    if setting == "auto":
        batch = first.batch(Position(0, 0))[0].over(first.engine.ranks)
        budget, num_layers = first.settings.budget(), first.model.config.num_layers
        steps = budget.steps or (budget.tokens or 0) / batch.tokens
        eager = first.flops(batch) / (EAGER_SHARE * peak)
        seconds = steps * max(eager, EAGER_SECONDS_PER_LAYER * num_layers)
        if budget.minutes is not None:
            seconds = 60 * budget.minutes
        # a phase compiles its layers anew
        cost = COMPILE_SECONDS + COMPILE_SECONDS_PER_LAYER * num_layers * len(tasks)
        saved = COMPILE_GAIN * seconds
        setting = "on" if saved > cost else "off"
        print(
            f"compile: {setting} (saves about {saved:.0f} s of {seconds:.0f} s, for about "
            f"{cost:.0f} s of compiling)",
            file=sys.stderr,
        )
    if setting == "on":
        for task in tasks:
            task.compiled = compiled_losses(task)
    return setting


def check_compile(setting: str, engine: Engine) -> bool:
    """True if a step can be compiled here; for a GPU a line on stderr says why not.

    Errors: ValueError for "on" with a CPU or sharded weights.
    """
    if engine.device.type != "cuda":
        reason = "a CPU's kernels are compiled already; a compiled step is a third slower"
        hint = "use `compile='off'`, or `device='cuda'`"
    elif engine.ranks.shard:
        reason, hint = "not with shard = true", "leave one of them out"
    else:
        return True
    if setting == "on":
        raise ValueError(f"compile = on: {reason}: {hint}")
    if setting == "auto" and engine.device.type == "cuda":
        print(f"compile: off ({reason})", file=sys.stderr)
    return False


def compiled_losses(task: Pretraining) -> Callable[..., Any]:
    """The model's `losses` compiled for static shapes.

    Small steps of one micro-batch on one rank are recorded as a CUDA graph, which keeps gradients
    in its own memory: a second micro-batch would overwrite them, and DDP has memory of its own.
    """
    batch, _ = task.batch(Position(0, 0))
    whole = len(batch.micro_batches) == 1 and task.engine.ranks.size == 1
    small = whole and task.flops(batch) < GRAPH_FLOPS
    mode = "reduce-overhead" if small else None
    return torch.compile(task.model.losses, dynamic=False, fullgraph=True, mode=mode)


SECONDS_A_SIZE, SECONDS_A_PHASE = 0.5, 3.0
MEASURED_TOKENS = 2048  # of a core: more tell the same, and a large model takes long
PADDING_ROWS = 1024  # tell the share of padding within a percent of it
STILL = LoopSettings(
    Budget(steps=1),
    learning_rate=0.0,
    schedule="linear",
    warmup_ratio=0.0,
    max_grad_norm=1.0,
    seed=0,
)


def resolve(
    corpus: Sources,
    settings: PretrainSettings,
    base_model: Path | None,
    ranks: Ranks = SINGLE_PROCESS,
) -> tuple[PretrainSettings, Engine, str | None]:
    """Resolve every "auto" on this machine: (settings, engine, why the micro-batch is what it is).

    Errors: ValueError for what this machine does not have, and as `Trial`.
    """
    engine = choose_engine(
        settings.device, settings.precision, settings.threads, ranks.sharding(settings.shard)
    )
    config = model_config(open_corpus(corpus).tokenizer, settings, base_model)
    if settings.optimizer == "auto":
        tokens = settings.batch_size * settings.max_length // ranks.size
        chosen = choose_optimizer(config.one_direction.hidden_size, tokens)
        fits = engine.device.type == "cpu" and not (base_model or settings.shard)
        settings = replace(settings, optimizer=chosen if fits else "adamw")
    if settings.precision == AUTO_INT8:
        known = settings  # "auto" micro-batches are tried in the precision that is chosen here
        if settings.micro_batch_size == "auto":
            known = replace(settings, micro_batch_size=None)
        phase = known.phases()[0]
        rows = rows_per_forward(known, phase, engine, config)
        predictions = rows * settings.examples(phase.length).num_predictions
        engine = with_faster_matmul(engine, config, rows * phase.length, predictions)
    resolved: dict[str, Any] = {
        "nsp_sampling": settings.pair_rule,
        "bag_of_words": settings.bow_weight,
    }
    if base_model and read_config(base_model).family == "gpt":
        resolved["architecture"] = "gpt"
    settings = replace(settings, **resolved, **engine.settings())
    if settings.micro_batch_size != "auto":
        return settings, engine, None
    has_buckets = engine.ranks.size > 1 and not engine.ranks.shard
    found = Trial(corpus, settings, replace(engine, ranks=SINGLE_PROCESS), base_model).micro_batch(
        has_buckets
    )
    rows = int(ranks.broadcast("micro_batch", str(found.rows)))
    return replace(settings, micro_batch_size=rows), engine, found.rule


def dry_run(
    corpus: Sources,
    recipe: Recipe | PretrainSettings | Path | str,
    model: Path | str | None = None,
) -> tuple[list[Estimate], str | None]:
    """Estimates of a run's phases, and why the micro-batch is as it is; nothing is written."""
    base_model = open_model_folder(model) if model else None
    settings = make_recipe(recipe, {}, base_model).settings
    settings.budget()
    settings, engine, rule = resolve(corpus, settings, base_model)
    check_compile(settings.compile, engine)
    return Trial(corpus, settings, engine, base_model).estimates(), rule


class Trial:
    """A recipe on this machine before it runs.

    Errors: ValueError for a store, a model to start from or settings that do not fit each other.
    """

    def __init__(
        self, corpus: Sources, settings: PretrainSettings, engine: Engine, base_model: Path | None
    ) -> None:
        self._settings, self._engine, self._base_model = settings, engine, base_model
        self._store = open_corpus(corpus)
        self._tokenizer = self._store.tokenizer
        self._config = model_config(self._tokenizer, settings, base_model)

    def micro_batch(self, has_buckets: bool = False) -> MicroBatch:
        """Rows at once in the first phase; `has_buckets`: DDP will hold the gradients once more.

        Errors: ValueError when not even one row fits.
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

        fits = partial(fits_cpu, self._config, self._shape(phase, 1), available_memory())
        return find_micro_batch(phase.batch, fits, rate, workers)

    def estimates(self) -> list[Estimate]:
        """Estimate each phase, at the speed measured here where there is memory for it."""
        settings, found, started = self._settings, [], 0.0
        evaluated_rows = (settings.evaluations - 1) * settings.eval_rows
        if self._store.held_out.num_documents < FEWEST_HELD_OUT:
            evaluated_rows = 0
        for phase in settings.phases():
            shape = self._shape(
                phase, rows_per_forward(settings, phase, self._engine, self._config)
            )
            available = available_memory()
            if self._on_gpu:
                available = torch.cuda.mem_get_info(self._engine.device)[0]
            speed = self._speed(phase, shape, available)
            batch, _ = self._streams[phase.length].batch(Position(), PADDING_ROWS)
            padding = 1.0 - float(batch.lengths.mean()) / phase.length
            part = phase.until - started
            budget, rows = _fraction(settings.budget(), part), part * evaluated_rows
            found.append(estimate(self._config, shape, budget, speed, available, padding, rows))
            started = phase.until
        return found

    @property
    def _on_gpu(self) -> bool:
        return self._engine.device.type == "cuda"

    @cached_property
    def _model(self) -> PreTrainingModel:
        keep_freed_memory()
        model = start_model(self._tokenizer, self._settings, self._base_model).to(
            self._engine.device
        )
        self._engine.prepare(model)
        return model

    @cached_property
    def _replicas(self) -> Replicas:
        # made once, as in a run: a copy of the model costs more than a small step
        return Replicas(self._model, self._engine)

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        how = self._settings.optimizer, 0.0, 0.0
        return build_optimizer(self._model, *how, products=self._engine.autocast_dtype)

    @cached_property
    def _streams(self) -> dict[int, Stream]:
        """By the length of their rows."""
        split, vocabulary, settings = self._store.train, self._tokenizer.vocabulary, self._settings
        lengths = [phase.length for phase in settings.phases()]
        return {
            n: open_stream(split, vocabulary, settings.examples(n), settings.seed) for n in lengths
        }

    @cached_property
    def _tasks(self) -> list[Pretraining]:
        """The run's own, one a phase, compiled where the run's are."""
        settings, engine = self._settings, self._engine
        tasks = [
            Pretraining(self._model, self._streams[phase.length], None, settings, engine, phase)
            for phase in settings.phases()
        ]
        compile_tasks(settings.compile, tasks, measure_peak(engine))
        return tasks

    def _part(self, phase: Phase, rows: int, passes: int = 1) -> Pretraining:
        """A task of the phase in whose step each worker computes `passes` times `rows` rows."""
        settings = replace(
            self._settings,
            max_length=phase.length,
            batch_size=passes * rows * self._engine.workers,
            micro_batch_size=rows,
            max_predictions_per_seq=self._settings.examples(phase.length).max_predictions_per_seq,
            **{name: getattr(PretrainSettings, name) for name in ("phase2_length", *SECOND_PHASE)},
        )
        return Pretraining(self._model, self._streams[phase.length], None, settings, self._engine)

    def _shape(self, phase: Phase, rows: int) -> StepShape:
        return StepShape(
            batch_size=phase.batch,
            micro_batch_size=rows,
            length=phase.length,
            predictions=self._settings.examples(phase.length).num_predictions,
            precision=self._engine.precision,
            optimizer=self._settings.optimizer,
            device=self._engine.device.type,
            workers=self._engine.workers,
            activation_checkpointing=self._settings.activation_checkpointing,
        )

    def _speed(self, phase: Phase, shape: StepShape, available: int | None) -> Speed:
        if available is not None and step_memory(self._config, shape).peak > available:
            return assumed_speed(self._config, shape, measure_peak(self._engine))
        if not self._on_gpu:
            rows = min(shape.micro_batch_size, max(1, MEASURED_TOKENS // phase.length))
            return self._speed_from_parts(phase, self._part(phase, rows))
        task = self._tasks[phase.number - 1]  # a part of a batch would leave it idle
        try:
            return measure_speed(self._step(task), SECONDS_A_PHASE)
        except torch.OutOfMemoryError as error:
            raise MemoryError(task.out_of_memory(error, sized=self._base_model is None)) from error

    def _speed_from_parts(self, phase: Phase, part: Pretraining) -> Speed:
        """Count a part's passes as often as a whole step makes them, and the update once.

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
        """A step on the task's first batch, or its passes alone; returns its tokens."""
        optimizer: Any = self._optimizer if update else None  # passes alone need none
        run = Training(task, optimizer, TrainingState(), STILL, self._engine)
        stepper = Stepper(run, self._replicas)
        batch = task.batch(Position())[0].staged(self._engine)  # as the run's loaders do

        def step() -> int:
            if update:
                stepper.step(batch, 0.0)
                stepper.synchronize()
            else:
                stepper.gradients(batch)
                stepper.replicas.zero_grad()
            return task.phase.batch * task.phase.length

        return step


def _fraction(budget: Budget, fraction: float) -> Budget:
    """A fraction of the budget, at least one step or token."""
    name, amount = next((name, x) for name, x in vars(budget).items() if x is not None)
    part = fraction * amount
    return Budget(**{name: part if name == "minutes" else max(1, round(part))})
