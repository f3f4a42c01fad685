"""A pre-training run: store in, run directory out, resumable (paper section 3.1, A.2)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.checkpoints.run import RunFolder
from bertsmith.config import from_mapping, to_mapping
from bertsmith.corpus.draws import derive, seed_key
from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.stream import Position, PretrainingStream
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.accelerator import compile_tasks
from bertsmith.training.engine import Engine, measure_peak
from bertsmith.training.health import EntropyWatch, judge_corpus, judge_result
from bertsmith.training.log_writers import check_writers
from bertsmith.training.loop import LoopSettings, State, train
from bertsmith.training.memory import out_of_memory
from bertsmith.training.optimizers import build_optimizer, load_state_tensors, state_tensors
from bertsmith.training.pretrain_settings import PretrainSettings
from bertsmith.training.pretraining import (
    PAIR_NAMES,
    Pretraining,
    evaluate_pretraining,
    held_out_stream,
    token_name,
    unigram_entropy,
)
from bertsmith.training.run_log import RunLog
from bertsmith.training.run_record import (
    check_new,
    resumed_record,
    resumed_settings,
    run_record,
)
from bertsmith.training.schedule import warmup_share
from bertsmith.training.start import start_model
from bertsmith.training.trial import chosen

FEWEST_HELD_OUT = 2  # documents
PAIR_HEAD = ("pooler.", "nsp.")


def pretrain(
    corpus: Path,
    out: Path,
    settings: PretrainSettings,
    *,
    init: Path | None = None,
    resume: bool = False,
    given: Collection[str] = (),
    command: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Train on a token store and leave a run directory; the result, or None when interrupted.

    With `resume` an existing run goes on from its newest checkpoint with the settings stored in
    it; see `resumed_settings` for what may be `given` by name this time.

    Errors: ValueError for settings, a store or a run that do not fit each other; FloatingPointError
    when a step is not finite; MemoryError that names the settings which lower the memory.
    """
    run = RunFolder(out)
    checkpoint = run.latest() if resume else None
    if checkpoint is None:
        check_new(run, settings, given, init, resume)
    store = TokenStore.open(corpus)
    tokenizer = Tokenizer.from_pretrained(corpus)
    if resume and run.kind() == "pretrain":  # if only just begun, without a checkpoint
        settings = resumed_settings(run, settings, given, store, init)
        first = run.settings()["init"]
        init = Path(first) if first else None
    check_writers(settings.writers or ())
    # what "auto" chooses is stored, and used on a resume too
    settings, engine, rule = chosen(corpus, settings, init)
    model = start_model(tokenizer, settings, checkpoint or init).to(engine.device)
    tasks = pretraining_tasks(model, store, tokenizer, settings, engine)
    optimizer = build_optimizer(model, settings.optimizer, settings.rate, settings.weight_decay)
    state = State() if checkpoint is None else _restored(run, model, optimizer)
    # a damaged store is found here, before anything is written
    tasks[state.phase - 1].stream.batch(state.position, 1)
    assert len(store.unigram_counts)
    peak = measure_peak(engine)
    settings = replace(settings, compile=compile_tasks(settings.compile, tasks, peak))
    record = run_record(settings, store, model, engine, peak, command, init)
    run.write_settings(record if checkpoint is None else resumed_record(run, record, command))
    run.forget_result()
    log = RunLog(out, state.step if checkpoint is not None else None, settings.writers)
    try:
        if rule is not None:
            log.message(rule)
        if checkpoint is None:
            judge_corpus(tasks[0].stream, log)
        with _explained(store, run, tasks, state):
            save = _saver(run, model, tokenizer, optimizer, settings)
            if not _train_phases(tasks, optimizer, state, peak, log, save, store):
                log.message(f"stopped by a signal at step {state.step}; saved")
                return None
        result = _result(tasks[-1], store, state)
        if "held_out" in result:
            log.evaluate(state.step, **tasks[-1].phase_figure, **result["held_out"])
            judge_result(result["held_out"], token_name(settings.objective), log)
    finally:
        log.close()
    run.write_result(result)
    return result


def pretraining_tasks(
    model: PreTrainingModel,
    store: TokenStore,
    tokenizer: Tokenizer,
    settings: PretrainSettings,
    engine: Engine,
) -> list[Pretraining]:
    """One for each phase. A phase has a stream of its own, with another order and other masks."""
    vocabulary, number = tokenizer.vocabulary, store.held_out.num_documents
    if number < FEWEST_HELD_OUT:
        print(
            f"no held-out figures: the store holds out {number} documents "
            f"({FEWEST_HELD_OUT} are needed); see corpus --held-out",
            file=sys.stderr,
        )
    tasks = []
    for phase in settings.phases():
        seed = settings.seed
        if phase.number > 1:
            seed = int(derive(seed_key(seed), phase.number))
        stream = PretrainingStream(store.train, vocabulary, settings.examples(phase.length), seed)
        held_out = None
        if number >= FEWEST_HELD_OUT:
            held_out = held_out_stream(store, vocabulary, phase.length, settings.objective)
        tasks.append(Pretraining(model, stream, held_out, settings, engine, phase))
    return tasks


def _restored(run: RunFolder, model: PreTrainingModel, optimizer: torch.optim.Optimizer) -> State:
    """Fill the optimizer from the newest checkpoint; where the run stood."""
    tensors, stored = run.load_training_state()
    load_state_tensors(model, optimizer, tensors)
    return from_mapping(State, stored["loop"], str(run.latest()))


def _saver(
    run: RunFolder,
    model: PreTrainingModel,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer,
    settings: PretrainSettings,
) -> Callable[[State], None]:
    """Writes checkpoints; without the head of pairs where the objective does not train it."""
    untrained = [name for name in model.state_dict() if name.startswith(PAIR_HEAD)]

    def save(state: State) -> None:
        run.save_checkpoint(
            state.step,
            model,
            tokenizer,
            state_tensors(model, optimizer),
            {"loop": to_mapping(state)},
            keep=settings.keep,
            leave_out=() if settings.objective in PAIR_NAMES else untrained,
        )

    return save


def _train_phases(
    tasks: Sequence[Pretraining],
    optimizer: torch.optim.Optimizer,
    state: State,
    peak: float,
    log: RunLog,
    save: Callable[[State], None],
    store: TokenStore,
) -> bool:
    """Run the loop once for each phase that is left; False when a signal stopped it."""
    whole = _loop_settings(tasks[0].settings, peak)
    watch = EntropyWatch(store, token_name(tasks[0].settings.objective), whole.warmup, log)
    for task in tasks[state.phase - 1 :]:
        phase = task.phase
        if phase.number > state.phase:
            state.phase, state.position, state.window = phase.number, Position(), {}
            log.message(
                f"phase {phase.number} from step {state.step} on: "
                f"length {phase.length}, batch {phase.batch}"
            )
        settings = replace(whole, until=phase.until)
        if not train(task, optimizer, state, settings, task.engine, log, save, watch):
            return False
    return True


def _loop_settings(settings: PretrainSettings, peak: float) -> LoopSettings:
    budget = settings.budget()
    return LoopSettings(
        budget=budget,
        rate=settings.rate,
        schedule=settings.schedule,
        warmup=warmup_share(budget, settings.warmup, settings.warmup_steps),
        clip=settings.clip,
        seed=settings.seed,
        log_every=settings.log_every,
        checkpoint_every=settings.checkpoint_every,
        evaluations=settings.evaluations,
        loader_workers=settings.loader_workers,
        peak=peak,
        label="pretrain",
    )


@contextmanager
def _explained(
    store: TokenStore, run: RunFolder, tasks: Sequence[Pretraining], state: State
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
        task = tasks[state.phase - 1]
        line = out_of_memory(
            error,
            micro_batch=task.rows_at_once,
            length=task.phase.length,
            length_flag="--length" if state.phase == 1 else "--second-length",
            size=None if run.settings()["init"] else task.settings.size,
            checkpoint_activations=task.settings.checkpoint_activations,
        )
        if line is None:
            raise
        raise MemoryError(line) from error


def _result(task: Pretraining, store: TokenStore, state: State) -> dict[str, Any]:
    result: dict[str, Any] = {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
    }
    if task.held_out is not None:
        rows = 4 * task.settings.held_out_rows
        figures = evaluate_pretraining(
            task.model, task.held_out, task.engine, rows, task.rows_at_once
        )
        figures["unigram_entropy"] = unigram_entropy(store, task.held_out, rows)
        result["held_out"] = figures
    return result
