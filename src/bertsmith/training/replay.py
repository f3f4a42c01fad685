"""The batch at which a run stands, alone and row by row: which row, which tensor is not finite.

A run that met a loss or gradient that is not finite has saved its state before that step. Here the
step is done again with one row at a time, in the run's own precision, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.checkpoints.run import STATE_FILE, RunFolder
from bertsmith.config import from_mapping
from bertsmith.corpus.mixture import Sources
from bertsmith.corpus.stream import Position
from bertsmith.files import read_json
from bertsmith.kernels.dropout import seed_dropout
from bertsmith.model.heads import PreTrainingModel
from bertsmith.training.engine import choose_engine
from bertsmith.training.pretrain_settings import Phase, PretrainSettings
from bertsmith.training.pretraining import Pretraining, pretraining_tasks
from bertsmith.training.run_log import plain
from bertsmith.training.run_record import corpus_of, resumed_settings
from bertsmith.training.start import start_model
from bertsmith.training.step import step_seed
from bertsmith.training.task import State


@dataclass(frozen=True)
class RowFault:
    """What is not finite in one row of the batch."""

    row: int
    position: Position
    """Where the row is in its phase's data."""
    loss: float
    module: str | None
    """The first module whose output is not finite; None: all are."""
    gradients: list[str]
    """The parameters whose gradient is not finite."""


@dataclass(frozen=True)
class Replay:
    """What became of the rows of a batch."""

    step: int
    phase: int
    position: Position
    rows: int
    precision: str
    faults: list[RowFault]

    def mapping(self) -> dict[str, Any]:
        """For JSON."""
        return plain(asdict(self))

    def text(self) -> str:
        """The batch, then a line for each row with a fault."""
        where = f"phase {self.phase}, {self.position}"
        lines = [f"batch of step {self.step} ({where}) in {self.precision}:"]
        if not self.faults:
            lines[0] += f" all {self.rows} rows have finite losses, activations and gradients"
        for fault in self.faults:
            first = f"first not finite: {fault.module}" if fault.module else "activations finite"
            shown = ", ".join(fault.gradients[:3])
            more = f" and {len(fault.gradients) - 3} more" if len(fault.gradients) > 3 else ""
            lines.append(
                f"  row {fault.row} ({fault.position}): "
                f"loss {fault.loss:.4g}; {first}; gradients not finite: {shown or 'none'}{more}"
            )
        return "\n".join(lines)


def replay(
    corpus: Sources,
    out: Path,
    settings: PretrainSettings,
    given: Collection[str] = (),
    of_recipe: Collection[str] = (),
) -> Replay:
    """Do the next batch of a run again, a row at a time; the run is not changed.

    `given` settings replace the run's as on a resume: another precision, for one.

    Errors: ValueError for a folder without a pre-training run or a checkpoint, or another corpus.
    """
    run = RunFolder(out)
    checkpoint = run.newest_whole()[0] if run.kind() == "pretrain" else None
    if checkpoint is None:
        raise ValueError(f"{out}: no checkpoint of a pre-training run, so nothing to replay")
    store = corpus_of(run, corpus, resume=True)
    tokenizer = store.tokenizer
    settings = resumed_settings(run, settings, given, store, None, of_recipe=of_recipe)
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    state = from_mapping(State, read_json(checkpoint / STATE_FILE)["loop"], str(checkpoint))
    model = start_model(tokenizer, settings, checkpoint).to(engine.device)
    engine.prepare(model)
    phase = _phase(settings, state)
    alone = replace(settings, micro_batch=1)
    task = pretraining_tasks(model, store, tokenizer, alone, engine)[state.phase - 1]
    return Replay(
        step=state.step,
        phase=phase.number,
        position=state.position,
        rows=phase.batch,
        precision=engine.precision,
        faults=list(_faults(task, model.train(), state)),
    )


def _phase(settings: PretrainSettings, state: State) -> Phase:
    """The phase of the next batch; a state saved at a phase's end goes to the one behind it."""
    phases = settings.phases()
    done = settings.budget().progress(state.step, state.tokens, state.seconds)
    if state.phase < len(phases) and done >= phases[state.phase - 1].until:
        state.phase, state.position = state.phase + 1, Position()
    return phases[state.phase - 1]


def _faults(task: Pretraining, model: PreTrainingModel, state: State) -> Iterator[RowFault]:
    batch, _ = task.batch(state.position)
    positions = task.stream.positions(state.position, task.phase.batch)
    seed = step_seed(task.settings.seed, state.step)
    for row, (micro, position) in enumerate(zip(batch.micro_batches, positions, strict=True)):
        torch.manual_seed(seed)
        seed_dropout(seed + row)
        model.zero_grad()
        with task.engine.autocast(), _first_not_finite(model) as modules:
            loss, _ = task.loss(model, micro, batch.counts)
        loss.backward()
        gradients = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        if gradients or modules or not bool(loss.isfinite()):
            module = modules[0] if modules else None
            yield RowFault(row, position, loss.item(), module, gradients)


@contextmanager
def _first_not_finite(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules whose output is not finite, in the order in which they end."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                found.append(name)

        return hook

    handles = [
        module.register_forward_hook(look(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
