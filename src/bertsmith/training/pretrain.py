"""A pre-training run: store in, run directory out, resumable (paper section 3.1, A.2)."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.checkpoints.folder import load_model
from bertsmith.checkpoints.run import RunFolder
from bertsmith.config import from_mapping, to_mapping
from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.stream import PretrainingStream
from bertsmith.model.encoder import initialize
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.local_start import local_start
from bertsmith.model.sizes import config_for
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training import engine as engines
from bertsmith.training.loop import LoopSettings, State, train
from bertsmith.training.optimizers import build_optimizer, load_state_tensors, state_tensors
from bertsmith.training.pretrain_settings import BUDGETS, PretrainSettings
from bertsmith.training.pretraining import (
    Pretraining,
    evaluate_pretraining,
    example_settings,
    held_out_stream,
    unigram_entropy,
)
from bertsmith.training.run_log import RunLog

RESUMABLE = {"loader_workers", "keep", "threads", "device", "precision", "rate"}  # on a resume
SHAPE = {"size", "start", "activation", "initializer_range"}  # --init has these already
NEAR_ENTROPY = 0.3  # nats: a model this close to the unigram entropy has learned counts only


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
    it. Of those that were `given` by name this time, only the budget and what `RESUMABLE` lists may
    differ.

    Errors: ValueError for settings, a store or a run that do not fit each other; FloatingPointError
    when a step is not finite.
    """
    run = RunFolder(out)
    checkpoint = run.latest() if resume else None
    if checkpoint is None:
        _check_new(run, settings, given, init, resume)
    store = TokenStore.open(corpus)
    tokenizer = Tokenizer.from_pretrained(corpus)
    if checkpoint is not None:
        settings = _stored_settings(run, settings, given, store)
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    settings = replace(settings, **engine.settings())  # what "auto" chose is used on a resume too
    stream = PretrainingStream(
        store.train, tokenizer.vocabulary, example_settings(settings), settings.seed
    )
    model = _start_model(tokenizer, settings, init, checkpoint).to(engine.device)
    task = Pretraining(model, stream, _held_out(store, tokenizer, settings), settings, engine)
    optimizer = build_optimizer(model, settings.optimizer, settings.rate, settings.weight_decay)
    state = State() if checkpoint is None else _restored(run, model, optimizer)
    # a damaged store is found here, before anything is written
    stream.batch(state.position, 1)
    assert len(store.unigram_counts)
    peak = engines.measure_peak(engine)
    record = _record(settings, store, model, engine, peak, command)
    record["init"] = None if init is None else str(init)
    run.write_settings(record if checkpoint is None else _resumed_record(run, record, command))
    run.forget_result()

    def save(state: State) -> None:
        run.save_checkpoint(
            state.step,
            model,
            tokenizer,
            state_tensors(model, optimizer),
            {"loop": to_mapping(state)},
            keep=settings.keep,
        )

    log = RunLog(out, resume_step=state.step if checkpoint is not None else None)
    try:
        if not train(task, optimizer, state, _loop_settings(settings, peak), engine, log, save):
            log.message(f"stopped by a signal at step {state.step}; saved")
            return None
        result = _result(task, store, state)
        log.evaluate(state.step, **result.get("held_out", {}))
        _warn(result, log)
    finally:
        log.close()
    run.write_result(result)
    return result


def _check_new(
    run: RunFolder,
    settings: PretrainSettings,
    given: Collection[str],
    init: Path | None,
    resume: bool,
) -> None:
    """Refuse what contradicts itself, or a folder in use, before anything is opened."""
    settings.budget()
    fixed = SHAPE & set(given)
    if init is not None and fixed:
        names = ", ".join(sorted(fixed))
        raise ValueError(f"{names}: fixed by the model that --init goes on from; leave it out")
    if run.exists() and not (resume and run.kind() == "pretrain"):
        going_on = " or add --resume to go on with it" if run.kind() == "pretrain" else ""
        raise ValueError(f"{run.path} holds a model already: name another --out{going_on}")
    if resume:
        print(f"{run.path}: no checkpoint to go on from, starting anew", file=sys.stderr)


def _restored(run: RunFolder, model: PreTrainingModel, optimizer: torch.optim.Optimizer) -> State:
    """Fill the optimizer from the newest checkpoint; where the run stood."""
    tensors, stored = run.load_training_state()
    load_state_tensors(model, optimizer, tensors)
    return from_mapping(State, stored["loop"], str(run.latest()))


def _resumed_record(
    run: RunFolder, record: dict[str, Any], command: Sequence[str]
) -> dict[str, Any]:
    """The run stays what it was; this command is one of its resumes."""
    first = run.settings()
    kept = {name: first[name] for name in ("created", "command", "init")}
    return {**record, **kept, "resumes": [*first.get("resumes", []), list(command)]}


def _loop_settings(settings: PretrainSettings, peak: float) -> LoopSettings:
    return LoopSettings(
        budget=settings.budget(),
        rate=settings.rate,
        schedule=settings.schedule,
        warmup=settings.warmup,
        clip=settings.clip,
        seed=settings.seed,
        log_every=settings.log_every,
        checkpoint_every=settings.checkpoint_every,
        evaluations=settings.evaluations,
        loader_workers=settings.loader_workers,
        peak=peak,
        label="pretrain",
    )


def _start_model(
    tokenizer: Tokenizer, settings: PretrainSettings, init: Path | None, checkpoint: Path | None
) -> PreTrainingModel:
    """The checkpoint's model, or that of --init, or fresh weights of the size asked for."""
    generator = torch.Generator().manual_seed(settings.seed)
    changes: dict[str, Any] = {
        "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
    }
    folder = checkpoint or init
    if folder is not None:
        _check_tokenizer(Tokenizer.from_pretrained(folder), tokenizer, folder)
        model = load_model(folder, PreTrainingModel, generator=generator, **changes).model
        if settings.length > model.config.max_positions:
            raise ValueError(
                f"length = {settings.length}: {folder} knows {model.config.max_positions} positions"
            )
        return model
    config = config_for(
        settings.size,
        len(tokenizer.vocabulary),
        max_positions=max(512, settings.length),
        activation=settings.activation,
        pad_id=tokenizer.vocabulary.pad_id,
        **changes,
    )
    std = settings.initializer_range or 1 / math.sqrt(3 * config.hidden_size)
    model = PreTrainingModel(replace(config, initializer_range=std))
    initialize(model, std, generator)
    if settings.start == "local":
        local_start(model.encoder, std)
    return model


def _check_tokenizer(theirs: Tokenizer, tokenizer: Tokenizer, folder: Path) -> None:
    """The model of `folder` was trained with the store's tokenizer."""
    if theirs.fingerprint == tokenizer.fingerprint:
        return
    sizes = len(theirs.vocabulary), len(tokenizer.vocabulary)
    what = f"vocabulary ({sizes[0]:,} pieces) than the store ({sizes[1]:,})"
    if theirs.vocabulary.fingerprint == tokenizer.vocabulary.fingerprint:
        what = f"normalization ({theirs.normalization}) than the store ({tokenizer.normalization})"
    raise ValueError(
        f"{folder} has another {what}: build it with `bertsmith corpus ... --vocab {folder}`"
    )


def _held_out(
    store: TokenStore, tokenizer: Tokenizer, settings: PretrainSettings
) -> PretrainingStream | None:
    if store.held_out.num_documents < 2:
        print(
            "no held-out figures: the store holds out "
            f"{store.held_out.num_documents} documents (two are needed); see corpus --held-out",
            file=sys.stderr,
        )
        return None
    return held_out_stream(store, tokenizer.vocabulary, settings.length)


def _stored_settings(
    run: RunFolder, settings: PretrainSettings, given: Collection[str], store: TokenStore
) -> PretrainSettings:
    """The run's own settings with the new budget; a contradiction is an error, never a surprise."""
    record = run.settings()
    stored = from_mapping(PretrainSettings, record["settings"], str(run.path / "run.json"))
    if record["corpus"]["fingerprint"] != store.fingerprint:
        raise ValueError(
            f"{run.path} was trained on another corpus than {store.folder}: resume with "
            f"--corpus {record['corpus']['path']}"
        )
    for name in set(given) - RESUMABLE - set(BUDGETS):
        if getattr(settings, name) != getattr(stored, name):
            raise ValueError(
                f"{run.path} was started with {name} = {getattr(stored, name)}, not "
                f"{getattr(settings, name)}: leave it out on --resume, or start another run"
            )
    changes = {name: getattr(settings, name) for name in RESUMABLE & set(given)}
    if set(BUDGETS) & set(given):
        changes |= {name: getattr(settings, name) for name in BUDGETS}
    return replace(stored, **changes)


def _record(
    settings: PretrainSettings,
    store: TokenStore,
    model: PreTrainingModel,
    engine: engines.Engine,
    peak: float,
    command: Sequence[str],
) -> dict[str, Any]:
    return {
        "kind": "pretrain",
        "command": list(command),
        "settings": to_mapping(settings),
        "corpus": {"path": str(store.folder), "fingerprint": store.fingerprint},
        "machine": engines.machine(engine, peak),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _result(task: Pretraining, store: TokenStore, state: State) -> dict[str, Any]:
    result: dict[str, Any] = {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
    }
    if task.held_out is not None:
        rows = 4 * task.settings.held_out_rows
        figures = evaluate_pretraining(
            task.model, task.held_out, task.engine, rows, task.settings.batch
        )
        figures["unigram_entropy"] = unigram_entropy(store, task.held_out, rows)
        result["held_out"] = figures
    return result


def _warn(result: dict[str, Any], log: RunLog) -> None:
    """Say so when the model has learned no more than how often each piece occurs."""
    figures = result.get("held_out")
    if figures and figures["mlm_loss"] > figures["unigram_entropy"] - NEAR_ENTROPY:
        text = (
            f"held-out MLM loss {figures['mlm_loss']:.2f} is at the unigram entropy "
            f"{figures['unigram_entropy']:.2f}: so far only frequencies were learned; train longer"
        )
        log.message(text)
        print(f"warning: {text}", file=sys.stderr)
