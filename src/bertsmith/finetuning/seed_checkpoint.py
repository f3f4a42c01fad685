"""Checkpoints of one seed's fine-tuning: all that a stopped one needs to go on.

    FOLDER/checkpoint-00001000/
        training.safetensors    "now:NAME" the weights, "best:NAME" those that were best on dev, and
                                the optimizer's tensors
        state.json              where the loop stands, and when the best weights were found
        manifest.json           sizes and checksums of both, written last

The token table has the rows that the data uses, as in training (used_pieces.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bertsmith.checkpoints.manifest import NotWhole, read_whole, write_manifest
from bertsmith.checkpoints.tensors import read_tensor_file, write_tensors
from bertsmith.config import from_mapping, to_mapping
from bertsmith.files import atomic_folder, read_json, remove_folder, remove_leftovers, write_json
from bertsmith.model.heads import TaskModel
from bertsmith.training.optimizers import load_state_tensors, state_tensors
from bertsmith.training.task import State

TENSORS_FILE, STATE_FILE = "training.safetensors", "state.json"
NOW, BEST = "now:", "best:"


@dataclass(frozen=True)
class SeedCheckpoint:
    """One that was written to its end."""

    path: Path
    state: State
    best: dict[str, Any]
    """"step" and "without_gain" of the best weights; {} before the first evaluation."""

    @classmethod
    def newest(cls, folder: Path) -> SeedCheckpoint | None:
        """The newest whole one in `folder`, None without one; what is damaged is told of."""
        for path in reversed(checkpoints_in(folder)):
            try:
                read_whole(path)
            except NotWhole as reason:
                print(f"skipped {path}: {reason}", file=sys.stderr)
                continue
            stored = read_json(path / STATE_FILE)
            return cls(path, from_mapping(State, stored["loop"], str(path)), stored["best"])
        return None

    @staticmethod
    def write(
        folder: Path,
        model: TaskModel,
        optimizer: Optimizer,
        state: State,
        best: Mapping[str, Any],
        best_weights: Mapping[str, Tensor],
    ) -> None:
        """Write one, then remove those before it. Errors: OSError from the disk."""
        remove_leftovers(folder)
        older = checkpoints_in(folder)
        path = folder / f"checkpoint-{state.step:08d}"
        tensors = {
            **_named(NOW, model.state_dict()),
            **_named(BEST, best_weights),
            **state_tensors(model, optimizer),
        }
        with atomic_folder(path) as temporary:
            write_tensors(temporary / TENSORS_FILE, tensors)
            write_json(temporary / STATE_FILE, {"loop": to_mapping(state), "best": dict(best)})
            write_manifest(temporary, {"step": state.step})
        for checkpoint in older:
            if checkpoint != path:
                remove_folder(checkpoint)

    def restore(self, model: TaskModel, optimizer: Optimizer, take_up: Callable[..., None]) -> None:
        """Make model and optimizer what they were; `take_up` gets the best weights, and `best`.

        Errors: ValueError when the optimizer's tensors do not fit the model or are not finite.
        """
        tensors = read_tensor_file(self.path / TENSORS_FILE)
        if self.best:
            take_up(_taken(tensors, BEST), **self.best)
        model.load_state_dict(_taken(tensors, NOW))
        load_state_tensors(model, optimizer, tensors)


def checkpoints_in(folder: Path) -> list[Path]:
    """Oldest first, whole or not."""
    return sorted(folder.glob("checkpoint-*"))


def _named(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: weight for name, weight in weights.items()}


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those with the prefix, without it; they are removed from `tensors`."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}
