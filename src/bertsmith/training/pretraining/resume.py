"""Begin or resume a run: its checkpoint, corpus and settings, and its record in run.json."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from bertsmith.base.settings import from_mapping, nearest, to_mapping
from bertsmith.checkpoints.run_folder import (
    RESULT_FILE,
    SETTINGS_FILE,
    RunFolder,
    Skipped,
    describe,
)
from bertsmith.checkpoints.stored import WEIGHTS
from bertsmith.checkpoints.tensors import google_optimizer
from bertsmith.corpus.examples.mixture import Corpus, Sources, open_corpus
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.readers.files import without_password
from bertsmith.training.engine import AUTO, Engine, machine
from bertsmith.training.optimizers import PaperAdam, load_state_tensors
from bertsmith.training.pretraining.settings import BUDGETS, PretrainSettings, Recipe

# Besides the budget; they decide no example and no shape.
RESUMABLE = {
    "num_workers", "checkpoint_every", "keep_checkpoints", "keep_steps", "threads", "device",
    "precision", "learning_rate", "loggers", "micro_batch_size", "activation_checkpointing",
    "compile", "shard", "dist_timeout",
}  # fmt: skip


def starting_point(
    run: RunFolder, recipe: Recipe, resume: bool
) -> tuple[Path | None, list[Skipped]]:
    """The checkpoint to resume from, None for a new run; and newer ones that are damaged.

    Errors: ValueError for contradictions or a folder in use, before anything is opened.
    """
    checkpoint, skipped = run.latest_valid() if resume and run.exists() else (None, [])
    for path, reason in skipped:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    if checkpoint is not None:
        return checkpoint, skipped
    ours = run.kind() == "pretrain"
    has_trained = bool(run.saved()) or (run.path / WEIGHTS).exists()
    if not (resume and ours):
        run.check_unlocked()
        recipe.settings.budget()
    elif has_trained:
        why = "; ".join(f"{path.name}: {reason}" for path, reason in skipped) or "none at all"
        raise ValueError(
            f"{run.path}: it has trained, but there is no whole checkpoint to go on from "
            f"({why}): put one back from a copy, or start another run"
        )
    if not run.exists():
        if (run.path / "manifest.json").exists():
            raise ValueError(f"{run.path} holds a token store: name another `out`")
        run.check_unused()
    elif not (resume and ours):
        if ours and not has_trained:
            raise ValueError(
                f"{run.path} holds a run that stopped before its first checkpoint: name another "
                "`out`, add `resume=True` to begin it anew with its settings, or remove it"
            )
        or_resume = " or add `resume=True` to go on with it" if ours else ""
        is_finished = ours and (run.path / RESULT_FILE).exists()
        held = "a finished run, ready to use" if is_finished else "a model already"
        raise ValueError(f"{run.path} holds {held}: name another `out`{or_resume}")
    if resume and ours:
        print(f"{run.path}: no checkpoint to go on from, starting anew", file=sys.stderr)
    elif resume:
        runs = [file.parent.name for file in run.path.parent.glob(f"*/{SETTINGS_FILE}")]
        hint = nearest(run.path.name, runs)
        hint = f"; {hint}" if hint.startswith("did") else ""
        print(f"{run.path}: no run to resume yet, so one begins{hint}", file=sys.stderr)
    return None, skipped


def open_run_corpus(run: RunFolder, sources: Sources, resume: bool) -> Corpus:
    """Open a run's corpus; a resume takes the version of each store on which the run began."""
    if not (resume and run.kind() == "pretrain"):
        return open_corpus(sources)
    corpus = open_corpus(sources, run.settings()["corpus"])
    for store in corpus.stores:
        if store.newest > store.generation:
            print(
                f"{store.folder}: goes on with generation {store.generation} of {store.newest}, on "
                "which the run began",
                file=sys.stderr,
            )
    return corpus


def resumed_settings(
    run: RunFolder, recipe: Recipe, store: Corpus, base_model: Path | None, ranks: int = 1
) -> PretrainSettings:
    """The run's own settings with the explicit ones of `recipe` that a resume may change.

    "auto" keeps what was chosen before, but with another number of ranks threads are chosen anew.

    Errors: ValueError for another corpus or model, or a setting that a resume cannot change.
    """
    stored, record = _stored_settings(run, store), run.settings()
    if ranks != record["machine"].get("ranks", 1):
        stored = replace(stored, threads=None)
    if base_model is not None and str(base_model) != (first := record["base_model"]):
        raise ValueError(
            f"{run.path} was started {f'from {first}' if first else 'without `model`'}, not from "
            f"{base_model}: leave `model` out with `resume=True`, or start another run"
        )
    explicit = recipe.explicit - _kept(run, stored, recipe)
    new = {name: getattr(recipe.settings, name) for name in explicit}
    new = {name: value for name, value in new.items() if value not in AUTO}
    for name in new.keys() - RESUMABLE - set(BUDGETS):
        if new[name] != getattr(stored, name):
            raise ValueError(
                f"{run.path} was started with {name} = {getattr(stored, name)}, not "
                f"{new[name]}: leave it out with `resume=True`, and a `recipe` that says it, or "
                "start another run"
            )
    changes = {name: new[name] for name in RESUMABLE & new.keys()}
    if explicit & set(BUDGETS):
        changes |= {name: getattr(recipe.settings, name) for name in BUDGETS}
    resumed = replace(stored, **changes)
    resumed.budget()  # refuses one that is not longer than the run's warm-up
    return resumed


def _stored_settings(run: RunFolder, store: Corpus) -> PretrainSettings:
    record = run.settings()
    corpus = record["corpus"]
    is_same_place = corpus["path"] == str(store.folder)
    if corpus["fingerprint"] != store.fingerprint and is_same_place:
        raise ValueError(
            f"{store.folder} has changed since {run.path} began to train on it: put the old store "
            f"back, or start another run, with `model={str(run.path)!r}` if from its model"
        )
    if corpus["fingerprint"] != store.fingerprint:
        path = corpus["path"]
        sources = path.split(" ") if "stores" in corpus else path  # of a mixture a word each
        raise ValueError(
            f"{run.path} was trained on another corpus than {store.folder}: resume with "
            f"`corpus={sources!r}`"
        )
    return from_mapping(PretrainSettings, record["settings"], str(run.path / "run.json"))


def _kept(run: RunFolder, stored: PretrainSettings, recipe: Recipe) -> set[str]:
    """Settings of the recipe file for which the run keeps its own; named on stderr if different.

    A resume may change them, but the run's may come from a flag, so only a flag changes them.
    """
    budgets = set(BUDGETS)
    kept = {n for n in recipe.from_file & RESUMABLE if getattr(stored, n) is not None}
    pairs = [(name, name) for name in sorted(kept)]
    kept |= recipe.from_file & budgets
    if kept & budgets and not budgets & (recipe.explicit - kept):
        pairs += [(was, now) for was in BUDGETS for now in BUDGETS if getattr(stored, was)]
    for was, now in pairs:
        here, there = getattr(stored, was), getattr(recipe.settings, now)
        if there not in (None, *AUTO) and (was != now or here != there):
            print(
                f"{run.path}: goes on with {was} = {here}, not the recipe's {now} = {there}: give"
                f" {now} by itself to change it",
                file=sys.stderr,
            )
    return kept


def take_over_adam(folder: Path, model: PreTrainingModel, optimizer: Optimizer) -> str | None:
    """Give Google's Adam the state that a pre-training of Google's left in `folder`; say so.

    None where the folder has none, or the optimizer is another. Only the learning rate depends on
    the step there, so that the run's own schedule goes on from where it is told to.
    """
    found = google_optimizer(folder) if isinstance(optimizer, PaperAdam) else None
    if found is None or "exp_avg:mlm.bias" not in found[0]:  # of a fine-tuned model, perhaps
        return None
    state, step = found
    names = dict(model.named_parameters())
    fitting = {key: value for key, value in state.items() if key.split(":")[1] in names}
    load_state_tensors(model, optimizer, fitting)
    return f"Adam goes on with its state of step {step:,} in {folder}"


def run_record(
    settings: PretrainSettings,
    store: Corpus,
    model: PreTrainingModel,
    engine: Engine,
    peak: float,
    command: Sequence[str],
    base_model: Path | None,
) -> dict[str, Any]:
    """The content of run.json for a new run."""
    free = {*RESUMABLE, *BUDGETS}
    stored = to_mapping(settings)
    deciding = {name: value for name, value in stored.items() if name not in free}
    identity = json.dumps([deciding, store.fingerprint, str(base_model)], sort_keys=True)
    facts = {
        "corpus": store.record(),
        "machine": machine(engine, peak),
        **({"matmul_times": times.record()} if (times := engine.matmul_times) else {}),
        "base_model": None if base_model is None else str(base_model),
        # checkpoints of runs with the same one are of one run: it has all that decides the weights
        "identity": hashlib.sha256(identity.encode()).hexdigest()[:16],
    }
    return describe("pretrain", command, stored, model, **facts)


def resumed_record(
    run: RunFolder, record: dict[str, Any], command: Sequence[str], step: int
) -> dict[str, Any]:
    """The record of a run that this command resumes at `step`; changed settings go to stderr."""
    first, settings = run.settings(), record["settings"]
    before = first["settings"]
    changes = [
        {"setting": name, "step": step, "old": before.get(name), "new": settings[name]}
        for name in settings
        if before.get(name) != settings[name]
    ]
    if changes:
        listed = ", ".join(f"{one['setting']} {one['old']} -> {one['new']}" for one in changes)
        print(f"{run.path}: {listed} from step {step} on", file=sys.stderr)
    names = ("created", "command", "base_model", "identity", "matmul_times")
    kept = {name: first[name] for name in names if name in first}
    lists = {
        "resumes": [*first.get("resumes", []), [without_password(word) for word in command]],
        "changes": [*first.get("changes", []), *changes],
    }
    return {**record, **kept, **lists}


def shared_facts(record: dict[str, Any], store: Corpus, checkpoint: Path | None) -> dict[str, Any]:
    """Facts that all ranks of a run must agree on; each may have its own number of threads."""
    facts = {name: value for name, value in record["settings"].items() if name != "threads"}
    name = checkpoint and checkpoint.name
    return {**facts, "corpus": store.fingerprint, "newest checkpoint": name}
