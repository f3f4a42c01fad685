"""What run.json says of a pre-training run, and what a resume may change of it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.base.settings import from_mapping, to_mapping
from bertsmith.checkpoints.run_folder import RunFolder, Skipped, describe
from bertsmith.checkpoints.tensors import WEIGHTS
from bertsmith.corpus.examples.mixture import Corpus, Sources, open_corpus
from bertsmith.model.heads import PreTrainingModel
from bertsmith.training.engine import AUTO, Engine, machine
from bertsmith.training.pretraining.settings import BUDGETS, PretrainSettings
from bertsmith.training.pretraining.task import check_shape

# Besides the budget; they decide no example and no shape.
RESUMABLE = {
    "loader_workers", "checkpoint_every", "keep_last", "keep_at", "threads", "device", "precision",
    "rate", "writers", "micro_batch", "checkpoint_activations", "compile", "shard", "rank_timeout",
}  # fmt: skip


def starting_point(
    run: RunFolder,
    settings: PretrainSettings,
    given: Collection[str],
    init: Path | None,
    resume: bool,
) -> tuple[Path | None, list[Skipped]]:
    """The checkpoint to go on from, None for a new run; and the newer ones that cannot be used.

    Errors: ValueError for what contradicts itself or a folder in use, before anything is opened.
    """
    checkpoint, skipped = run.newest_whole() if resume else (None, [])
    for path, reason in skipped:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    if checkpoint is None:
        _check_new(run, settings, given, init, resume, skipped)
    return checkpoint, skipped


def _check_new(
    run: RunFolder,
    settings: PretrainSettings,
    given: Collection[str],
    init: Path | None,
    resume: bool,
    skipped: Sequence[Skipped],
) -> None:
    begun = resume and run.kind() == "pretrain"  # but stopped before its first checkpoint
    if not begun:
        run.check_not_held()
        settings.budget()
    elif run.saved() or (run.path / WEIGHTS).exists():
        why = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
        raise ValueError(
            f"{run.path}: it has trained, but there is no whole checkpoint to go on from "
            f"({why or 'none at all'}): put one back from a copy, or start another run"
        )
    check_shape(given, init)
    for name, what in (("manifest.json", "a token store"), ("vocab.txt", "a vocabulary")):
        if (run.path / name).exists() and not run.exists():
            raise ValueError(f"{run.path} holds {what}: name another --out")
    if run.exists() and not (resume and run.kind() == "pretrain"):
        ours = run.kind() == "pretrain"
        if ours and not run.saved() and not (run.path / WEIGHTS).exists():
            raise ValueError(
                f"{run.path} holds a run that stopped before its first checkpoint: name another "
                "--out, add --resume to begin it anew with its settings, or remove it"
            )
        going_on = " or add --resume to go on with it" if ours else ""
        raise ValueError(f"{run.path} holds a model already: name another --out{going_on}")
    if resume:
        print(f"{run.path}: no checkpoint to go on from, starting anew", file=sys.stderr)


def corpus_of(run: RunFolder, sources: Sources, resume: bool) -> Corpus:
    """What a run reads; on a resume the generation of each store on which the run began."""
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


def stored_settings(run: RunFolder, store: Corpus) -> PretrainSettings:
    """The settings of a run on this store. Errors: ValueError when it was trained on another."""
    record = run.settings()
    was = record["corpus"]
    if was["fingerprint"] != store.fingerprint and was["path"] == str(store.folder):
        raise ValueError(
            f"{store.folder} has changed since {run.path} began to train on it: put the old store "
            f"back, or start another run, with --init {run.path} if from its model"
        )
    if was["fingerprint"] != store.fingerprint:
        raise ValueError(
            f"{run.path} was trained on another corpus than {store.folder}: resume with "
            f"--corpus {was['path']}"
        )
    return from_mapping(PretrainSettings, record["settings"], str(run.path / "run.json"))


def resumed_settings(
    run: RunFolder,
    settings: PretrainSettings,
    given: Collection[str],
    store: Corpus,
    init: Path | None,
    ranks: int = 1,
    of_recipe: Collection[str] = (),
) -> PretrainSettings:
    """The run's own settings with the new budget; a contradiction is an error, never a surprise.

    `of_recipe` are those of `given` that a recipe file says: where another value may be given now,
    the run keeps its own, which a flag may have set, and a line on stderr says so. What is given as
    "auto" stays what the run has: there it was chosen already. But with another number of ranks
    than it had the threads of each are chosen anew.
    """
    stored = stored_settings(run, store)
    if ranks != run.settings()["machine"].get("ranks", 1):
        stored = replace(stored, threads=None)
    if init is not None and str(init) != (first := run.settings()["init"]):
        raise ValueError(
            f"{run.path} was started {f'from {first}' if first else 'without --init'}, not from "
            f"{init}: leave --init out on --resume, or start another run"
        )
    given = set(given) - _kept(run, stored, settings, given, of_recipe)
    new = {name: getattr(settings, name) for name in given}
    new = {name: value for name, value in new.items() if value not in AUTO}
    for name in new.keys() - RESUMABLE - set(BUDGETS):
        if new[name] != getattr(stored, name):
            raise ValueError(
                f"{run.path} was started with {name} = {getattr(stored, name)}, not "
                f"{new[name]}: leave it out on --resume, and a --config that says it, or "
                "start another run"
            )
    changes = {name: new[name] for name in RESUMABLE & new.keys()}
    if set(BUDGETS) & set(given):
        changes |= {name: getattr(settings, name) for name in BUDGETS}
    resumed = replace(stored, **changes)
    resumed.budget()  # refuses a new one that is not longer than the run's warm-up
    return resumed


def _kept(
    run: RunFolder,
    stored: PretrainSettings,
    settings: PretrainSettings,
    given: Collection[str],
    of_recipe: Collection[str],
) -> set[str]:
    """What may be given anew, and the run has, but a recipe alone gives."""
    has = {name for name in RESUMABLE if getattr(stored, name) is not None}
    kept = set(of_recipe) & {*has, *BUDGETS}
    pairs = [(name, name) for name in sorted(kept - set(BUDGETS))]
    if kept & set(BUDGETS) and not set(BUDGETS) & (set(given) - kept):
        pairs += [(was, now) for was in BUDGETS for now in BUDGETS if getattr(stored, was)]
    for was, now in pairs:
        here, there = getattr(stored, was), getattr(settings, now)
        if there not in (None, *AUTO) and (was != now or here != there):
            print(
                f"{run.path}: goes on with {was} = {here}, not the recipe's {now} = {there}: give"
                f" --{now.replace('_', '-')} to change it",
                file=sys.stderr,
            )
    return kept


def run_record(
    settings: PretrainSettings,
    store: Corpus,
    model: PreTrainingModel,
    engine: Engine,
    peak: float,
    command: Sequence[str],
    init: Path | None,
) -> dict[str, Any]:
    """What run.json holds of a new run."""
    facts = {
        "corpus": store.record(),
        "machine": machine(engine, peak),
        **({"products": times.record()} if (times := engine.product_times) else {}),
        "init": None if init is None else str(init),
        "identity": _identity(settings, store, init),
    }
    return describe("pretrain", command, to_mapping(settings), model, **facts)


def shared_facts(record: dict[str, Any], store: Corpus, checkpoint: Path | None) -> dict[str, Any]:
    """What must be the same at all ranks of a run; each may have its own number of threads."""
    facts = {name: value for name, value in record["settings"].items() if name != "threads"}
    name = checkpoint and checkpoint.name
    return {**facts, "corpus": store.fingerprint, "newest checkpoint": name}


def _identity(settings: PretrainSettings, store: Corpus, init: Path | None) -> str:
    """What decides the weights; checkpoints of runs in which it is the same are of one run."""
    free = {*RESUMABLE, *BUDGETS}
    deciding = {name: value for name, value in to_mapping(settings).items() if name not in free}
    text = json.dumps([deciding, store.fingerprint, str(init)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resumed_record(
    run: RunFolder, record: dict[str, Any], command: Sequence[str], step: int
) -> dict[str, Any]:
    """The run stays what it was; this command is one of its resumes, from `step` on.

    What it changes of the settings is said on stderr and kept, old and new.
    """
    first, settings = run.settings(), record["settings"]
    before = first["settings"]
    changes = [
        {"setting": name, "step": step, "old": before.get(name), "new": settings[name]}
        for name in settings
        if before.get(name) != settings[name]
    ]
    if changes:
        told = ", ".join(f"{one['setting']} {one['old']} -> {one['new']}" for one in changes)
        print(f"{run.path}: {told} from step {step} on", file=sys.stderr)
    names = ("created", "command", "init", "identity", "products")
    kept = {name: first[name] for name in names if name in first}
    lists = {
        "resumes": [*first.get("resumes", []), list(command)],
        "changes": [*first.get("changes", []), *changes],
    }
    return {**record, **kept, **lists}
