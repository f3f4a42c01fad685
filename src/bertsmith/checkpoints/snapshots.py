"""A checkpoint of a training: its content, the folder that it is written to, and back.

`run_folder.py` says which checkpoints of a run count, and reads all else of it without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bertsmith.base.files import atomic_folder, fault_point, read_json, remove_folder, write_json
from bertsmith.checkpoints.model_folder import write_model
from bertsmith.checkpoints.run_folder import (
    OPTIMIZER_FILE,
    STATE_FILE,
    RunFolder,
    step_number,
    write_manifest,
)
from bertsmith.checkpoints.tensors import read_tensor_file, write_tensors
from bertsmith.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: tensors on the CPU that nothing changes any more, and JSON."""

    step: int
    identity: str  # the run's; checkpoints of runs with another cannot take this one's place
    config: dict[str, Any]  # the entries of config.json
    weights: Mapping[str, Tensor]  # by our names
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]


def save_checkpoint(
    run: RunFolder,
    snapshot: Snapshot,
    tokenizer: Tokenizer,
    keep_checkpoints: int,
    keep_steps: Collection[int],
) -> None:
    """Write a checkpoint, make its model the run's own, and delete older ones.

    The newest `keep_checkpoints` stay, and those of the steps `keep_steps`. A kill or full disk
    leaves the checkpoints of before (but one of the same step), or those and this one.
    """
    assert keep_checkpoints >= 1 and 0 <= snapshot.step < 10**8, (
        keep_checkpoints,
        snapshot.step,
    )
    run.clear_leftovers()
    path = run.checkpoints / f"step-{snapshot.step:08d}"
    with atomic_folder(path) as temporary:
        write_model(temporary, tokenizer, snapshot.config, snapshot.weights)
        write_tensors(temporary / OPTIMIZER_FILE, snapshot.optimizer)
        write_json(temporary / STATE_FILE, {"step": snapshot.step, **snapshot.state})
    fault_point("checkpoint-renamed")
    write_manifest(path, {"step": snapshot.step, "identity": snapshot.identity})
    run.publish(path)
    older = [old for old in run.saved() if step_number(old) <= snapshot.step]
    for old in older[:-keep_checkpoints]:
        if step_number(old) not in keep_steps:
            remove_folder(old)


def load_training_state(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(optimizer tensors, state with "step") of a checkpoint. Errors: ValueError for damage."""
    return read_tensor_file(checkpoint / OPTIMIZER_FILE), read_json(checkpoint / STATE_FILE)
