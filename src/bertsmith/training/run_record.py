"""What run.json says of a pre-training run, and what a resume may change of it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.checkpoints.run import RunFolder
from bertsmith.config import from_mapping, to_mapping
from bertsmith.corpus.store import TokenStore
from bertsmith.model.heads import PreTrainingModel
from bertsmith.training.engine import Engine, machine
from bertsmith.training.pretrain_settings import BUDGETS, PretrainSettings
from bertsmith.training.start import check_shape

# Besides the budget; they decide no example and no shape.
RESUMABLE = {
    "loader_workers", "keep", "threads", "device", "precision", "rate", "writers", "micro_batch",
    "checkpoint_activations", "compile",
}  # fmt: skip


def check_new(
    run: RunFolder,
    settings: PretrainSettings,
    given: Collection[str],
    init: Path | None,
    resume: bool,
) -> None:
    """Refuse what contradicts itself, or a folder in use, before anything is opened."""
    begun = resume and run.kind() == "pretrain"  # but stopped before its first checkpoint
    if not begun:
        settings.budget()
    check_shape(given, init)
    for name, what in (("manifest.json", "a token store"), ("vocab.txt", "a vocabulary")):
        if (run.path / name).exists() and not run.exists():
            raise ValueError(f"{run.path} holds {what}: name another --out")
    if run.exists() and not (resume and run.kind() == "pretrain"):
        going_on = " or add --resume to go on with it" if run.kind() == "pretrain" else ""
        raise ValueError(f"{run.path} holds a model already: name another --out{going_on}")
    if resume:
        print(f"{run.path}: no checkpoint to go on from, starting anew", file=sys.stderr)


def stored_settings(run: RunFolder, store: TokenStore) -> PretrainSettings:
    """The settings of a run on this store. Errors: ValueError when it was trained on another."""
    record = run.settings()
    if record["corpus"]["fingerprint"] != store.fingerprint:
        raise ValueError(
            f"{run.path} was trained on another corpus than {store.folder}: resume with "
            f"--corpus {record['corpus']['path']}"
        )
    return from_mapping(PretrainSettings, record["settings"], str(run.path / "run.json"))


def resumed_settings(
    run: RunFolder,
    settings: PretrainSettings,
    given: Collection[str],
    store: TokenStore,
    init: Path | None,
) -> PretrainSettings:
    """The run's own settings with the new budget; a contradiction is an error, never a surprise.

    What is given as "auto" stays what the run has: there it was chosen already.
    """
    stored = stored_settings(run, store)
    if init is not None and str(init) != (first := run.settings()["init"]):
        raise ValueError(
            f"{run.path} was started {f'from {first}' if first else 'without --init'}, not from "
            f"{init}: leave --init out on --resume, or start another run"
        )
    new = {name: getattr(settings, name) for name in given}
    new = {name: value for name, value in new.items() if value != "auto"}
    for name in new.keys() - RESUMABLE - set(BUDGETS):
        if new[name] != getattr(stored, name):
            raise ValueError(
                f"{run.path} was started with {name} = {getattr(stored, name)}, not "
                f"{new[name]}: leave it out on --resume, or start another run"
            )
    changes = {name: new[name] for name in RESUMABLE & new.keys()}
    if set(BUDGETS) & set(given):
        changes |= {name: getattr(settings, name) for name in BUDGETS}
    resumed = replace(stored, **changes)
    resumed.budget()  # refuses a new one that is not longer than the run's warm-up
    return resumed


def run_record(
    settings: PretrainSettings,
    store: TokenStore,
    model: PreTrainingModel,
    engine: Engine,
    peak: float,
    command: Sequence[str],
    init: Path | None,
) -> dict[str, Any]:
    """What run.json holds of a new run."""
    return {
        "kind": "pretrain",
        "command": list(command),
        "settings": to_mapping(settings),
        "corpus": {"path": str(store.folder), "fingerprint": store.fingerprint},
        "machine": machine(engine, peak),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "init": None if init is None else str(init),
    }


def resumed_record(
    run: RunFolder, record: dict[str, Any], command: Sequence[str]
) -> dict[str, Any]:
    """The run stays what it was; this command is one of its resumes."""
    first = run.settings()
    kept = {name: first[name] for name in ("created", "command", "init")}
    return {**record, **kept, "resumes": [*first.get("resumes", []), list(command)]}
