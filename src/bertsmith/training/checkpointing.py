"""Checkpoints: those of a pre-training run, written by a thread, and those of one fine-tuning seed.

A seed's checkpoint is all that a stopped fine-tuning needs to resume:

    FOLDER/checkpoint-00001000/
        training.safetensors    "now:NAME" weights, "best:NAME" those that were best on dev, with
                                the used rows of the token table; and the optimizer's tensors
        state.json              the loop's state, and when the best weights were found
        manifest.json           sizes and checksums of both, written last
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bertsmith.base.files import (
    atomic_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    write_json,
)
from bertsmith.base.settings import from_mapping, to_mapping
from bertsmith.checkpoints.model_folder import config_file
from bertsmith.checkpoints.run_folder import (
    CorruptCheckpoint,
    RunFolder,
    verify_checkpoint,
    write_manifest,
)
from bertsmith.checkpoints.snapshots import Snapshot, save_checkpoint
from bertsmith.checkpoints.tensors import read_tensor_file, write_tensors
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.loop.loop import stop_signals
from bertsmith.training.loop.task import Training, TrainingState
from bertsmith.training.optimizers import load_state_tensors, state_tensors

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class CheckpointFormat:
    """Contents of all checkpoints of a run besides tensors, and which ones are kept."""

    tokenizer: Tokenizer
    identity: str
    exclude: Sequence[str]
    """Weights that would look trained in a file, and are not."""
    keep_checkpoints: int
    keep_steps: Sequence[int]


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Writes a copy of the training's state in a thread, while training goes on.

    Its error is raised by the next `check`, `save` or end of the `with` block, which waits for the
    thread, and printed where another error is on its way already.
    """

    def __init__(self, run: RunFolder, training: Training, format: CheckpointFormat) -> None:
        self._run, self._format, self._log = run, format, training.log
        self._model: Any = training.task.model
        self._optimizer, self._ranks = training.optimizer, training.engine.ranks
        self._config = config_file(self._model, exclude=format.exclude)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, state: TrainingState) -> None:
        """Have rank 0 write a checkpoint, after the one before; all ranks must call it."""
        self._wait()
        exclude = self._format.exclude
        weights = self._model.state_dict()
        weights = self._ranks.gather({n: w for n, w in weights.items() if n not in exclude})
        optimizer = self._ranks.gather(state_tensors(self._model, self._optimizer))
        if self._ranks.rank > 0:
            return
        snapshot = Snapshot(
            step=state.step,
            identity=self._format.identity,
            config=self._config,
            weights=_copies(weights),
            optimizer=_copies(optimizer),
            state={"loop": to_mapping(state)},
        )
        self._under_way = self._thread.submit(self._write, snapshot)

    def check(self) -> None:
        """Raise the writing thread's OSError, if it has ended with one."""
        if self._under_way is not None and self._under_way.done():
            self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, snapshot: Snapshot) -> None:
        run, format = self._run, self._format
        try:
            self._log.sync()  # a resume from here counts on the lines before
            save_checkpoint(
                run, snapshot, format.tokenizer, format.keep_checkpoints, format.keep_steps
            )
        except OSError as error:
            good = run.latest()
            valid = f"{good.name} is whole" if good else "there is none before it"
            hint = "free some space" if error.errno in DISK_FULL else "mend that"
            raise OSError(
                f"{error.filename}: {error.strerror}: the checkpoint of step {snapshot.step} could "
                f"not be written, {valid}: {hint}, then resume the run"
            ) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._thread, stop_signals():  # the first signal lets the last checkpoint be written
            try:
                self._wait()
            except OSError as failed:
                if error is None:
                    raise
                print(f"warning: {failed}", file=sys.stderr)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


TENSORS_FILE, STATE_FILE = "training.safetensors", "state.json"
NOW, BEST = "now:", "best:"


@dataclass(frozen=True)
class SeedCheckpoint:
    """A complete checkpoint of one fine-tuning seed."""

    path: Path
    state: TrainingState
    best: dict[str, Any]
    """"step" and "without_gain" of the best weights; {} before the first evaluation."""

    @classmethod
    def newest(cls, folder: Path) -> SeedCheckpoint | None:
        """The newest valid checkpoint in `folder`, if any; names damaged ones on stderr."""
        for path in reversed(checkpoints_in(folder)):
            try:
                verify_checkpoint(path)
            except CorruptCheckpoint as reason:
                print(f"skipped {path}: {reason}", file=sys.stderr)
                continue
            stored = read_json(path / STATE_FILE)
            return cls(path, from_mapping(TrainingState, stored["loop"], str(path)), stored["best"])
        return None

    @staticmethod
    def write(
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer,
        state: TrainingState,
        best: Mapping[str, Any],
        best_weights: Mapping[str, Tensor],
    ) -> None:
        """Write a checkpoint, then remove older ones. Errors: OSError from the disk."""
        remove_leftovers(folder)
        older = checkpoints_in(folder)
        path = folder / f"checkpoint-{state.step:08d}"
        tensors = {
            **{NOW + name: weight for name, weight in model.state_dict().items()},
            **{BEST + name: weight for name, weight in best_weights.items()},
            **state_tensors(model, optimizer),
        }
        with atomic_folder(path) as temporary:
            write_tensors(temporary / TENSORS_FILE, tensors)
            write_json(temporary / STATE_FILE, {"loop": to_mapping(state), "best": dict(best)})
            write_manifest(temporary, {"step": state.step})
        for checkpoint in older:
            if checkpoint != path:
                remove_folder(checkpoint)

    def restore(self, model: nn.Module, optimizer: Optimizer, take_up: Callable[..., None]) -> None:
        """Restore model and optimizer; `take_up` gets the best weights, and `best`.

        Errors: ValueError for optimizer tensors that do not fit the model or are not finite.
        """
        tensors = read_tensor_file(self.path / TENSORS_FILE)

        def pop(prefix: str) -> dict[str, Tensor]:
            names = [name for name in tensors if name.startswith(prefix)]
            return {name.removeprefix(prefix): tensors.pop(name) for name in names}

        best, now = pop(BEST), pop(NOW)
        if self.best:
            take_up(best, **self.best)
        model.load_state_dict(now)
        load_state_tensors(model, optimizer, tensors)


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints, oldest first, complete or not."""
    return sorted(folder.glob("checkpoint-*"))
