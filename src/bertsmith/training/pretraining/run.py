"""A pre-training run: store in, run directory out, resumable (paper section 3.1, A.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.base.settings import from_mapping
from bertsmith.checkpoints.run_folder import RunFolder, Skipped, load_training_state
from bertsmith.corpus.examples.mixture import Corpus, Mixture, Sources
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import PreTrainingModel
from bertsmith.training.checkpointing import CheckpointFormat, Checkpoints
from bertsmith.training.engine import measure_peak
from bertsmith.training.loop.log import NoLog, RunLog, check_writers
from bertsmith.training.loop.loop import train
from bertsmith.training.loop.schedule import default_rate, warmup_share
from bertsmith.training.loop.task import EVALUATED_ROW, LoopSettings, State, Training
from bertsmith.training.optimizers import build_optimizer, load_state_tensors
from bertsmith.training.pretraining.diagnostics import (
    EntropyWatch,
    RepeatWatch,
    explain_losses,
    judge_corpus,
    judge_result,
    mixture_line,
)
from bertsmith.training.pretraining.evaluation import (
    evaluate_pretraining,
    held_out_words,
    unigram_entropy,
)
from bertsmith.training.pretraining.objectives import token_name
from bertsmith.training.pretraining.resume import (
    corpus_of,
    resumed_record,
    resumed_settings,
    run_record,
    shared_facts,
    starting_point,
)
from bertsmith.training.pretraining.settings import PretrainSettings
from bertsmith.training.pretraining.task import (
    Pretraining,
    pretraining_tasks,
    start_model,
    untrained,
)
from bertsmith.training.pretraining.trial import chosen, compile_tasks
from bertsmith.training.ranks import Ranks, joined, shard_


def pretrain(
    corpus: Sources,
    out: Path,
    settings: PretrainSettings,
    *,
    init: Path | None = None,
    resume: bool = False,
    given: Collection[str] = (),
    of_recipe: Collection[str] = (),
    command: Sequence[str] = (),
    time_limit: float = math.inf,
) -> dict[str, Any] | None:
    """Train on a token store, or several mixed, and leave a run directory; None when interrupted.

    With `resume` an existing run goes on from its newest whole checkpoint with the settings stored
    in it; see `resumed_settings` for what may be `given` by name this time, and for those of these
    names that are `of_recipe`. After `time_limit`
    seconds from now it ends as when a signal interrupts it.

    The processes that torchrun started are one run: rank 0 writes, each of them returns the result.
    When torchrun has started them again they resume.

    Errors: ValueError for settings, a store or a run that do not fit each other; FloatingPointError
    when a step is not finite; MemoryError that names the settings which lower the memory; OSError
    that says which checkpoint is good when one cannot be written.
    """
    deadline = time.monotonic() + time_limit
    run = RunFolder(out)
    with joined(settings.rank_timeout) as ranks, ExitStack() as to_the_end:
        resume = resume or ranks.restarted
        if begun := resume and run.kind() == "pretrain":  # what is read now nobody may write
            to_the_end.enter_context(_held(run, ranks, begun))
        checkpoint, skipped = starting_point(run, settings, given, init, resume)
        store = corpus_of(run, corpus, resume)
        tokenizer = store.tokenizer
        if begun:  # if only just, without a checkpoint
            settings = resumed_settings(run, settings, given, store, init, ranks.size, of_recipe)
            first = run.settings()["init"]
            init = Path(first) if first else None
        check_writers(settings.writers or ())
        # what "auto" chooses is stored, and used on a resume too
        settings, engine, rule = chosen(corpus, settings, init, ranks)
        origin = checkpoint or init
        model = start_model(tokenizer, settings, origin, store.unigram_counts).to(engine.device)
        shard_(model, engine.ranks, engine.device)
        settings = replace(settings, rate=settings.rate or default_rate(model.config.hidden_size))
        tasks = pretraining_tasks(model, store, tokenizer, settings, engine)
        optimizer, state = _restored(checkpoint, model, settings)
        # a damaged store is found here, before anything is written
        tasks[state.phase - 1].stream.batch(state.position, 1)
        assert len(store.unigram_counts)
        peak = ranks.total({"peak": measure_peak(engine)})["peak"]
        settings = replace(settings, compile=compile_tasks(settings.compile, tasks, peak))
        record = run_record(settings, store, model, engine, peak, command, init)
        if begun:
            record = resumed_record(run, record, command, state.step)
        ranks.agree(shared_facts(record, store, checkpoint))
        if not begun:  # until now it could be refused, with nothing written
            to_the_end.enter_context(_held(run, ranks, begun))
        with _opened(run, record, checkpoint, skipped, state, ranks) as log:
            for line in filter(None, (rule, engine.reason)):
                log.message(line)
            if checkpoint is None:
                if isinstance(store, Mixture):
                    log.message(mixture_line(store, settings))
                for stream in tasks[0].stream.streams:
                    judge_corpus(stream, log)
            loop = replace(_loop_settings(settings, peak), deadline=deadline)
            left_out = untrained(tasks[0], origin)
            keep = settings.keep_last, settings.keep_at
            format = CheckpointFormat(tokenizer, record["identity"], left_out, *keep)
            saver = Checkpoints(run, model, optimizer, ranks, log, format)
            training = Training(
                tasks[0], optimizer, state, loop, engine, log, saver.save, before_step=saver.check
            )
            with _explained(store, run, tasks, state), saver:
                done = _train_phases(training, tasks, store)
            if not done:
                reason = "the time limit" if time.monotonic() >= deadline else "a signal"
                log.message(f"stopped by {reason} at step {state.step}; saved")
                return None
            result = _result(tasks[-1], store, state, log)
        if ranks.rank == 0:
            run.write_result(result)
        return result


def _held(run: RunFolder, ranks: Ranks, begun: bool) -> AbstractContextManager[None]:
    """Keeps other processes from a run's folder, in which only rank 0 writes."""
    return run.held(begun) if ranks.rank == 0 else nullcontext()


def _opened(
    run: RunFolder,
    record: dict[str, Any],
    checkpoint: Path | None,
    skipped: Sequence[Skipped],
    state: State,
    ranks: Ranks,
) -> RunLog:
    """The log of a run whose folder now says that it goes on; only rank 0 writes either."""
    if ranks.rank > 0:
        return NoLog()
    if checkpoint is not None:
        run.return_to(checkpoint, skipped)
    run.write_settings(record)
    run.forget_result()
    step = state.step if checkpoint is not None else None
    log = RunLog(run.path, step, record["settings"]["writers"])
    for path, reason in skipped:
        log.message(f"skipped {path}: {reason}")
    return log


def _restored(
    checkpoint: Path | None, model: PreTrainingModel, settings: PretrainSettings
) -> tuple[torch.optim.Optimizer, State]:
    """The optimizer as a checkpoint has it, and where the run stood; without one as they begin."""
    assert settings.rate is not None, "pretrain has filled it in"
    optimizer = build_optimizer(model, settings.optimizer, settings.rate, settings.weight_decay)
    if checkpoint is None:
        return optimizer, State()
    tensors, stored = load_training_state(checkpoint)
    load_state_tensors(model, optimizer, tensors)
    return optimizer, from_mapping(State, stored["loop"], str(checkpoint))


def _train_phases(whole: Training, tasks: Sequence[Pretraining], store: Corpus) -> bool:
    """Run the loop once for each phase that is left; False when it was stopped before its end."""
    state, log = whole.state, whole.log
    if state.step == 0:
        explain_losses(store.unigram_counts)
    name = token_name(tasks[0].settings.objective)
    entropy = EntropyWatch(store, name, whole.settings.warmup, log)
    repeats = RepeatWatch(store, state.position, log)

    def watch(done: float, figures: dict[str, float]) -> None:
        entropy(done, figures)
        repeats(state.position)

    for task in tasks[state.phase - 1 :]:
        phase = task.phase
        if phase.number > state.phase:
            state.phase, state.position, state.window = phase.number, Position(), {}
            log.message(
                f"phase {phase.number} from step {state.step} on: "
                f"length {phase.length}, batch {phase.batch}"
            )
        settings = replace(whole.settings, until=phase.until)
        if settings.budget.minutes is not None:
            task.evaluate(rows=1)  # what it compiles is not of the budget's minutes either
        if not train(replace(whole, task=task, settings=settings, on_log=watch)):
            return False
    return True


def _loop_settings(settings: PretrainSettings, peak: float) -> LoopSettings:
    budget = settings.budget()
    assert settings.rate is not None, "pretrain has filled it in"
    return LoopSettings(
        budget=budget,
        rate=settings.rate,
        schedule=settings.schedule,
        warmup=warmup_share(budget, settings.warmup, settings.warmup_steps),
        clip=settings.clip,
        seed=settings.seed,
        log_every=settings.log_every,
        checkpoint_every=settings.checkpoint_every,
        keep_at=settings.keep_at,
        evaluations=settings.evaluations,
        evaluation_steps=EVALUATED_ROW * settings.held_out_rows / settings.batch,
        loader_workers=settings.loader_workers,
        peak=peak,
        label="pretrain",
        told=held_out_words,
    )


@contextmanager
def _explained(
    store: Corpus, run: RunFolder, tasks: Sequence[Pretraining], state: State
) -> Iterator[None]:
    """Say of a step that failed what the user can do."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(
            f"phase {state.phase}, {error}. Which row and which tensor tells: "
            f"bertsmith pretrain --corpus {store.folder} --out {run.path} --replay"
        ) from error
    except (MemoryError, RuntimeError) as error:
        sized, begun = not run.settings()["init"], bool(run.saved())
        line = tasks[state.phase - 1].out_of_memory(error, sized, begun)
        if line is None:
            raise
        nothing = f"nothing was saved: remove {run.path}, or name another --out"
        how = "go on with --resume" if begun else nothing
        raise MemoryError(f"{line}; {how}") from error


def _result(task: Pretraining, store: Corpus, state: State, log: RunLog) -> dict[str, Any]:
    """What came out; held-out figures, which are in the log as well."""
    result: dict[str, Any] = {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "objective": task.settings.objective,
    }
    if task.held_out is not None:
        rows = 4 * task.settings.held_out_rows
        figures = evaluate_pretraining(
            task.model, task.held_out, task.engine, rows, task.rows_at_once
        )
        figures["unigram_entropy"] = unigram_entropy(store, task.held_out, rows)
        result["held_out"] = figures
        log.evaluate(state.step, **task.phase_figure, **figures)
        judge_result(figures, token_name(task.settings.objective), log)
    return result
