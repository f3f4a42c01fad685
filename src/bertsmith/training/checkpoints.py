"""A run's checkpoints, written by a thread while the steps go on."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from bertsmith.checkpoints.folder import config_file
from bertsmith.checkpoints.run import RunFolder, Snapshot
from bertsmith.config import to_mapping
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.optimizers import state_tensors
from bertsmith.training.ranks import Ranks
from bertsmith.training.run_log import RunLog
from bertsmith.training.stop_signals import stop_signals
from bertsmith.training.task import State

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class CheckpointFormat:
    """What all checkpoints of a run hold besides tensors, and which of them stay."""

    tokenizer: Tokenizer
    identity: str
    leave_out: Sequence[str]
    """Weights that would look trained in a file, and are not."""
    keep_last: int
    keep_at: Sequence[int]


class Checkpoints:
    """`save` copies what training will change and has a thread of its own write it.

    What the writing meets is raised again by whichever comes next: `check`, `save` or the end of
    the `with` block, which waits for the thread. There an error that is on its way already goes
    first, and the thread's is printed.

    What is in the writing thread's hands is a copy: the weights may move on.
    """

    def __init__(
        self,
        run: RunFolder,
        model: PreTrainingModel,
        optimizer: Optimizer,
        ranks: Ranks,
        log: RunLog,
        format: CheckpointFormat,
    ) -> None:
        self._run, self._model, self._optimizer = run, model, optimizer
        self._ranks, self._log, self._format = ranks, log, format
        self._config = config_file(model, leave_out=format.leave_out)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, state: State) -> None:
        """Have rank 0 write a checkpoint, once the one before is written; all ranks must ask."""
        self._wait()
        weights = self._model.state_dict()
        weights = self._ranks.gathered(
            {n: weights[n] for n in weights if n not in self._format.leave_out}
        )
        optimizer = self._ranks.gathered(state_tensors(self._model, self._optimizer))
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
        """Raise what the writing met, if it has ended. Errors: OSError, which says what to do."""
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
            run.save_checkpoint(snapshot, format.tokenizer, format.keep_last, format.keep_at)
        except OSError as error:
            good = run.latest()
            left = f"{good.name} is whole" if good else "there is none before it"
            remedy = "free some space" if error.errno in DISK_FULL else "mend that"
            raise OSError(
                f"{error.filename}: {error.strerror}: the checkpoint of step {snapshot.step} could "
                f"not be written, {left}: {remedy}, then go on with --resume"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._thread, stop_signals():  # the first signal lets the last checkpoint be written
            try:
                self._wait()
            except OSError as failed:
                if error is None:
                    raise
                print(f"warning: {failed}", file=sys.stderr)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the memory of the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
