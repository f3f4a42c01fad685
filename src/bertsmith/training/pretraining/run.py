"""Pre-training: a token store in, a run folder out, resumable (paper sections 3.1 and A.2).

`pretrain` is the whole way. The loop itself is loop/loop.py; the losses are in objectives.py.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from bertsmith.base.settings import checked, from_mapping
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.run_folder import RunFolder, Skipped, step_number
from bertsmith.checkpoints.snapshots import load_training_state
from bertsmith.corpus.examples.mixture import Corpus, Mixture, Sources
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import PreTrainingModel
from bertsmith.training.checkpointing import CheckpointFormat, Checkpoints
from bertsmith.training.engine import measure_peak
from bertsmith.training.loop.log import NoLog, RunLog, check_writers
from bertsmith.training.loop.loop import train
from bertsmith.training.loop.schedule import default_rate, warmup_share
from bertsmith.training.loop.task import EVALUATED_ROW, LoopSettings, Training, TrainingState
from bertsmith.training.optimizers import build_optimizer, load_state_tensors
from bertsmith.training.pretraining import diagnostics
from bertsmith.training.pretraining.evaluation import describe_evaluation, unigram_entropy
from bertsmith.training.pretraining.objectives import token_name
from bertsmith.training.pretraining.resume import (
    open_run_corpus,
    resumed_record,
    resumed_settings,
    run_record,
    shared_facts,
    starting_point,
    take_over_adam,
)
from bertsmith.training.pretraining.settings import PretrainSettings, Recipe, make_recipe
from bertsmith.training.pretraining.task import (
    Pretraining,
    pretraining_tasks,
    start_model,
    untrained,
)
from bertsmith.training.pretraining.trial import compile_tasks, resolve
from bertsmith.training.ranks import Ranks, process_group, shard_


@dataclass(frozen=True)
class PretrainResult:
    """A pre-training run that has ended, or was stopped and saved."""

    folder: Path
    finished: bool
    """False: a signal or the time limit stopped it; it goes on with `resume=True`."""
    objective: str
    steps: int
    tokens: int
    flops: float
    """Of the training's matrix products."""
    seconds: float
    losses: dict[str, float]
    """Training losses (nats) in the last line of the log."""
    eval_metrics: dict[str, float]
    """Figures on held-out text at the end, if there is any."""

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        names = ("steps", "tokens", "flops", "seconds", "objective")
        result = {name: getattr(self, name) for name in names}
        return {**result, "held_out": self.eval_metrics} if self.eval_metrics else result

    def __repr__(self) -> str:
        state = "" if self.finished else "stopped after "
        figures = f", {describe_evaluation(self.eval_metrics)}" if self.eval_metrics else ""
        return f"<{self.folder}: {state}{self.steps:,} steps, {self.tokens:,} tokens{figures}>"


@checked(PretrainSettings)
def pretrain(
    corpus: Sources,
    out: Path | str,
    recipe: Path | str | PretrainSettings | Recipe | None = None,
    *,
    model: Path | str | None = None,
    resume: bool = False,
    time_limit: float = math.inf,
    command: Sequence[str] = (),
    **fields: Any,
) -> PretrainResult:
    """Pre-train a BERT on a token store, or several mixed, and write it to the folder `out`.

        result = pretrain("store", "run", size="mini", minutes=60)
        result = pretrain("store", "run", resume=True, steps=40_000)
        pretrain(["books=0.7", "news=0.3"], "run", "continue", model="bert-base-cased", minutes=60)

    `recipe`: a TOML file, the name of one that comes along (fast, paper, continue), or
    `PretrainSettings`, whose fields the keywords change. `model`: a model to start from: a run, a
    Hugging Face folder or a hub name. `resume`: continue from the newest valid checkpoint with the
    run's own settings, but for keywords such as the budget. After `time_limit` seconds the run
    saves and stops, as for a signal. `command` is kept in run.json. The processes that torchrun
    started are one run; each returns the result, and restarted ones resume.

    Errors: ValueError for settings, a store or a run that do not fit each other; FloatingPointError
    for a step that is not finite; MemoryError that names the settings which lower the memory;
    OSError that names the last good checkpoint when one cannot be written.
    """
    deadline = time.monotonic() + time_limit
    run = RunFolder(out, writes=("checkpoints",))
    base_model = open_model_folder(model) if model else None
    recipe = make_recipe(recipe, fields, base_model)
    settings = recipe.settings
    with process_group(settings.dist_timeout) as ranks, ExitStack() as until_end:
        # where to begin: a run's folder is locked before it is read
        resume = resume or ranks.restarted
        if begun := resume and run.kind() == "pretrain":
            until_end.enter_context(_locked(run, ranks, begun))
        checkpoint, skipped = starting_point(run, recipe, resume)
        store = open_run_corpus(run, corpus, resume)
        if begun:
            settings = resumed_settings(run, recipe, store, base_model, ranks.size)
            first = run.settings()["base_model"]
            base_model = Path(first) if first else None
        check_writers(settings.loggers or ())

        # machine, model, data, optimizer: what "auto" becomes is stored, for a resume too
        origin = checkpoint or base_model
        # of a resumed run its checkpoint: the model it began with may be gone
        shape = origin if base_model else None
        settings, engine, rule = resolve(corpus, settings, shape, ranks)
        network = start_model(store.tokenizer, settings, origin, store.unigram_counts)
        shard_(network.to(engine.device), engine.ranks, engine.device)
        hidden_size = network.config.one_direction.hidden_size
        rate = settings.learning_rate or default_rate(hidden_size)
        settings = replace(settings, learning_rate=rate)
        tasks = pretraining_tasks(network, store, settings, engine)
        how = settings.optimizer, rate, settings.weight_decay
        optimizer = build_optimizer(network, *how, products=engine.autocast_dtype)
        state, adam = TrainingState(), None
        if checkpoint:
            state = _restored(checkpoint, network, optimizer)
        elif base_model:
            adam = take_over_adam(base_model, network, optimizer)
        tasks[state.phase - 1].stream.batch(state.position, 1)  # fails if the store is damaged
        peak = ranks.all_reduce({"peak": measure_peak(engine)})["peak"]
        settings = replace(settings, compile=compile_tasks(settings.compile, tasks, peak))

        # run.json: until here a new run can be refused with nothing written
        record = run_record(settings, store, network, engine, peak, command, base_model)
        if begun:
            record = resumed_record(run, record, command, state.step)
        ranks.agree(shared_facts(record, store, checkpoint))
        if not begun:
            until_end.enter_context(_locked(run, ranks, begun))
        with _open_log(run, record, checkpoint, skipped, ranks) as log:
            _log_start(log, store, tasks[0], filter(None, (rule, engine.reason, adam)), checkpoint)

            # train
            kept = untrained(tasks[0], origin), settings.keep_checkpoints, settings.keep_steps
            format = CheckpointFormat(store.tokenizer, record["identity"], *kept)
            loop = replace(_loop_settings(settings, peak), deadline=deadline)
            training = Training(tasks[0], optimizer, state, loop, engine, log)
            saver = Checkpoints(run, training, format)
            training.save, training.before_step = saver.save, saver.check
            with _explained(store, run, tasks, state), saver:
                finished = _train_phases(training, tasks, store)
            held_out = _evaluate_end(tasks[-1], store, state, log) if finished else {}
            if not finished:
                reason = "the time limit" if time.monotonic() >= deadline else "a signal"
                log.message(f"stopped by {reason} at step {state.step}; saved")
        losses = {name: x for name, x in training.metrics.items() if name.endswith("loss")}
        counts = state.step, state.tokens, state.flops, round(state.seconds, 1)
        result = PretrainResult(run.path, finished, settings.objective, *counts, losses, held_out)
        if finished and ranks.rank == 0:
            run.write_result(result.to_dict())
        return result


def _restored(checkpoint: Path, model: PreTrainingModel, optimizer: Optimizer) -> TrainingState:
    tensors, stored = load_training_state(checkpoint)
    load_state_tensors(model, optimizer, tensors)
    return from_mapping(TrainingState, stored["loop"], str(checkpoint))


def _log_start(
    log: RunLog, store: Corpus, task: Pretraining, reasons: Iterable[str], checkpoint: Path | None
) -> None:
    """Log how the machine was chosen and, for a new run, what the corpus is like."""
    for line in reasons:
        log.message(line)
    if checkpoint is None:
        if isinstance(store, Mixture):
            log.message(diagnostics.mixture_line(store, task.settings))
        for stream in task.stream.streams:
            diagnostics.check_corpus(stream, log)


def _train_phases(run: Training, tasks: Sequence[Pretraining], store: Corpus) -> bool:
    """Run the loop for each phase that is left; False when it was stopped before the end."""
    state, log = run.state, run.log
    if state.step == 0:
        diagnostics.explain_losses(store.unigram_counts)
    elif run.done() == 1.0:
        where = f"at step {state.step:,}: a budget is that of the whole run: give a larger one"
        print(f"nothing is left to train, the budget was used {where}", file=sys.stderr)
    name = token_name(tasks[0].settings.objective)
    entropy = diagnostics.EntropyWatch(store, name, run.settings.warmup_ratio, log)
    repeats = diagnostics.RepeatWatch(store, state.position, log)

    def watch(done: float, figures: dict[str, float]) -> None:
        entropy(done, figures)
        repeats(state.position)

    run.on_log = watch
    for task in tasks[state.phase - 1 :]:
        phase = task.phase
        if phase.number > state.phase:
            state.phase, state.position, state.since_log = phase.number, Position(), {}
            log.message(
                f"phase {phase.number} from step {state.step} on: "
                f"length {phase.length}, batch {phase.batch}"
            )
            if run.done() == 1.0:
                remedy = "give a longer budget, or a larger phase2_ratio"
                diagnostics.warn(f"phase {phase.number} has no step: {remedy}", log)
        run.task, run.settings = task, replace(run.settings, until=phase.until)
        if run.settings.budget.minutes is not None:
            task.evaluate(rows=1)  # compile it outside of the budget's minutes
        if not train(run):
            return False
    return True


def _evaluate_end(
    task: Pretraining, store: Corpus, state: TrainingState, log: RunLog
) -> dict[str, float]:
    """Held-out figures on four times as many rows as on the way; {} without held-out text."""
    if task.held_out is None:
        return {}
    rows = 4 * task.settings.eval_rows
    logged = task.evaluate(rows)
    logged["unigram_entropy"] = unigram_entropy(store, task.held_out, rows)
    log.evaluate(state.step, **logged)
    figures = {name: x for name, x in logged.items() if name not in task.phase_figure}
    diagnostics.check_result(figures, token_name(task.settings.objective), log)
    return figures


def _loop_settings(settings: PretrainSettings, peak: float) -> LoopSettings:
    budget = settings.budget()
    assert settings.learning_rate is not None, "pretrain has filled it in"
    return LoopSettings.of(
        settings,
        budget=budget,
        warmup_ratio=warmup_share(budget, settings.warmup_ratio, settings.warmup_steps),
        num_evals=settings.evaluations,
        evaluation_steps=EVALUATED_ROW * settings.eval_rows / settings.batch_size,
        peak=peak,
        label="pretrain",
        describe=describe_evaluation,
    )


def _locked(run: RunFolder, ranks: Ranks, begun: bool) -> AbstractContextManager[None]:
    return run.locked(begun) if ranks.rank == 0 else nullcontext()  # the others do not write


def _open_log(
    run: RunFolder,
    record: dict[str, Any],
    checkpoint: Path | None,
    skipped: Sequence[Skipped],
    ranks: Ranks,
) -> RunLog:
    """Begin to write the run's folder: run.json, the log; only rank 0 does."""
    if ranks.rank > 0:
        return NoLog()
    if checkpoint is not None:
        run.return_to(checkpoint, skipped)
    run.write_settings(record)
    run.forget_result()
    step = step_number(checkpoint) if checkpoint is not None else None
    log = RunLog(run.path, step, record["settings"]["loggers"])
    for path, reason in skipped:
        log.message(f"skipped {path}: {reason}")
    return log


@contextmanager
def _explained(
    store: Corpus, run: RunFolder, tasks: Sequence[Pretraining], state: TrainingState
) -> Iterator[None]:
    """Add to the error of a failed step what the user can do."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(
            f"phase {state.phase}, {error}, also with `resume=True`. The row and the tensor: "
            f"`bertsmith pretrain --corpus {store.folder} --out {run.path} --replay`"
        ) from error
    except (MemoryError, RuntimeError) as error:
        is_sized, begun = not run.settings()["base_model"], bool(run.saved())
        line = tasks[state.phase - 1].out_of_memory(error, is_sized, begun)
        if line is None:
            raise
        nothing = f"nothing was saved: remove {run.path}, or name another `out`"
        raise MemoryError(f"{line}; {'go on with `resume=True`' if begun else nothing}") from error
