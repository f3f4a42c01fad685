"""Whether a step is compiled: on a GPU, when that pays, and how."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bertsmith.corpus.stream import Position
from bertsmith.kernels.float8 import check_float8
from bertsmith.training.engine import Engine
from bertsmith.training.schedule import Budget

if TYPE_CHECKING:
    from bertsmith.training.pretraining import Pretraining

# Estimates, to be replaced by what benchmarks/gpu_pretrain.py measures on a device:
EAGER_SHARE = 0.25  # of the peak, that a step reaches which is not compiled
COMPILE_GAIN = 0.3  # of the time of such a step, that compiling saves
COMPILE_SECONDS, COMPILE_SECONDS_PER_LAYER = 15.0, 4.0
# A compiled step of fewer operations (some 5 ms) is over before its kernels could be sent one by
# one: they are recorded as a graph and sent at once.
GRAPH_OPERATIONS = 2.5e12


def compile_tasks(setting: str, tasks: list[Pretraining], peak: float) -> str:
    """Decide once for a run ("auto", "on", "off"), say why, and compile its tasks: "on" or "off".

    Errors: ValueError as `check_compile` and `check_float8`.
    """
    first = tasks[0]
    if first.engine.precision == "float8":
        for task in tasks:
            check_float8(task.model.config.hidden_size, task.rows_at_once * task.phase.length)
    if not check_compile(setting, first.engine):
        return "off"
    if setting == "auto":
        batch = first.batch(Position(0, 0))[0].over(first.engine.ranks)
        seconds = expected_seconds(
            first.settings.budget(), first.operations(batch), batch.tokens, EAGER_SHARE * peak
        )
        setting, reason = choose_compile(first.model.config.num_layers * len(tasks), seconds)
        _say(setting, reason)
    if setting == "on":
        for task in tasks:
            task.compiled = compiled_losses(task)
    return setting


def check_compile(setting: str, engine: Engine) -> bool:
    """Tell if a step can be compiled here at all; of a GPU a line says why it cannot.

    Errors: ValueError for "on" with a CPU, whose kernels are compiled already, or sharded weights.
    """
    if engine.device.type != "cuda":
        reason = (
            "a CPU's kernels are compiled already; the whole step compiled was measured at two "
            "thirds of its speed"
        )
        remedy = "use --compile off, or --device cuda"
    elif engine.ranks.shard:
        reason, remedy = "not with shard = true", "leave one of them out"
    else:
        return True
    if setting == "on":
        raise ValueError(f"compile = on: {reason}: {remedy}")
    if setting == "auto" and engine.device.type == "cuda":
        _say("off", reason)
    return False


def _say(setting: str, reason: str) -> None:
    print(f"compile: {setting} ({reason})", file=sys.stderr)


def choose_compile(layers: int, seconds: float) -> tuple[str, str]:
    """("on" or "off", why) for a run that would take this long without compiling.

    >>> choose_compile(12, 1200)
    ('on', 'saves about 360 s of 1200 s, for about 63 s of compiling')
    >>> choose_compile(12, 60)
    ('off', 'saves about 18 s of 60 s, for about 63 s of compiling')
    """
    cost = COMPILE_SECONDS + COMPILE_SECONDS_PER_LAYER * layers
    saved = COMPILE_GAIN * seconds
    reason = f"saves about {saved:.0f} s of {seconds:.0f} s, for about {cost:.0f} s of compiling"
    return "on" if saved > cost else "off", reason


def expected_seconds(budget: Budget, operations: float, tokens: int, rate: float) -> float:
    """How long a budget lasts with steps of these operations and tokens at `rate` operations/s.

    >>> expected_seconds(Budget(steps=10), operations=1e12, tokens=100, rate=1e12)
    10.0
    >>> expected_seconds(Budget(minutes=2), operations=1e12, tokens=100, rate=1e12)
    120
    """
    if budget.minutes is not None:
        return 60 * budget.minutes
    steps = budget.steps if budget.steps is not None else (budget.tokens or 0) / tokens
    return steps * operations / rate


def compiled_losses(task: Pretraining) -> Callable[..., Any]:
    """The model's `losses` compiled for static shapes.

    Small steps of one micro-batch are recorded as a CUDA graph. With several, the second would
    write over the first one's gradients, which a graph keeps in its own memory; with several ranks
    DDP keeps them in its own.
    """
    batch, _ = task.batch(Position(0, 0))
    whole = len(batch.micro_batches) == 1 and task.engine.ranks.size == 1
    small = whole and task.operations(batch) < GRAPH_OPERATIONS
    mode = "reduce-overhead" if small else None
    return torch.compile(task.model.losses, dynamic=False, fullgraph=True, mode=mode)
