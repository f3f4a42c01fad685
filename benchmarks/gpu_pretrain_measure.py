"""How benchmarks/gpu_pretrain.py measures: turns, the peak between them, kernels, what failed."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertsmith.model.kernels.attention import attention, row_pieces
from bertsmith.training.engine import Engine
from gpu_pretrain_systems import BATCHES, OURS, Case, System, build, settings_of, work

PROFILED = ("base-128-fast", "2x64-32-fast")
ROUND_SECONDS = 0.5  # of a system
CUT_OFF = "the call was cut off in its first steps"
# What may end one system and no other: memory, the device, PyTorch's compiler (all RuntimeError), a
# step that is not finite, and a release of transformers that is not as it was.
FAILURES = (
    RuntimeError, ArithmeticError, ImportError, AttributeError, TypeError, ValueError,
)  # fmt: skip

Outcome = TypeVar("Outcome")


def measure(
    case: Case,
    names: list[str],
    engine: Engine,
    rounds: int,
    compiling: bool,
    result: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Fill in speed, share of the peak, memory, first step and ratios of a case's systems.

    Saved after every system, with one turn of each, and with all rounds at the end. A system whose
    error the result has from an earlier call is left out.
    """
    torch.compiler.reset()
    product = Product(engine, 8192 if compiling else 256)
    found = result.setdefault("systems", {})
    result |= {"rows": case.rows, "rounds": 0}
    works = {name: work(settings_of(case, name), case.pieces, engine) for name in names}
    systems: dict[str, System] = {}
    times: dict[str, list[float]] = {}
    for name in names:
        if "error" in found.get(name, {}):
            continue
        found.setdefault(name, {"error": CUT_OFF})
        save()
        print(f"{case.name}: {name}", file=sys.stderr, flush=True)
        product()
        ready = attempt(partial(warm, case, name, engine, compiling), found, name)
        if ready:
            systems[name], found[name], one = ready
            times[name] = [one]
            summarize(result, case.rows, works, times, product.peak)
        save()
    steps = {name: max(BATCHES, round(ROUND_SECONDS / one)) for name, (one,) in times.items()}
    times = {name: [] for name in systems}
    for _ in range(rounds):
        for name in list(systems):
            product()
            one = attempt(partial(turn, systems[name], steps[name], engine), found, name)
            if one is None:
                del systems[name], times[name]
            else:
                times[name].append(one)
    summarize(result, case.rows, works, times, product.peak)
    result["rounds"] = rounds
    save()
    if case.name in PROFILED and OURS in systems:
        profile = attempt(partial(kernels_of, systems[OURS], engine), result, "profile")
        if profile:
            result["profile"] = profile
    systems.clear()
    free(engine)


def attempt(action: Callable[[], Outcome], found: dict[str, Any], name: str) -> Outcome | None:
    """What the action gives; where it fails None, and the error's text goes into `found`.

    Errors: torch.AcceleratorError, after which nothing of this process reaches the device.
    """
    try:
        return action()
    except FAILURES as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(f"{name}: {found[name]['error']}", file=sys.stderr, flush=True)
        if isinstance(error, torch.AcceleratorError):
            raise
    return None


def summarize(
    result: dict[str, Any],
    rows: int,
    works: dict[str, tuple[float, float]],
    times: dict[str, list[float]],
    peak: float,
) -> None:
    """Put speeds, shares and ratios into the result: seconds of a step, one a round, by system."""
    for name, values in times.items():
        step, (tokens, operations) = median(values), works[name]
        result["systems"][name] |= {
            "step_ms": round(1e3 * step, 3),
            "sequences_per_second": round(rows / step, 1),
            "tokens_per_second": round(tokens / step),
            "share_of_peak": round(operations / step / peak, 3),
        }
    ours = times.get(OURS)
    result["ratio"] = {
        name: round(median(a / b for a, b in zip(values, ours, strict=True)), 2)
        for name, values in times.items()
        if ours and name != OURS
    }
    result["rounds_ms"] = {name: [round(1e3 * s, 3) for s in t] for name, t in times.items()}
    result["peak_tflops"] = round(peak / 1e12, 3)


def warm(
    case: Case, name: str, engine: Engine, compiling: bool
) -> tuple[System, dict[str, Any], float]:
    """A system whose step is compiled and warm, its memory and first step, seconds of a step."""
    cuda = engine.device.type == "cuda"
    free(engine)
    before = torch.cuda.memory_allocated() if cuda else 0
    system = build(name, case, engine, compiling)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = seconds(system, range(1), engine)
    seconds(system, range(BATCHES), engine)  # a CUDA graph is recorded at the second
    figures: dict[str, Any] = {"first_step_s": round(first, 2)}
    if cuda:
        most = torch.cuda.max_memory_allocated() - before
        figures["memory_gb"] = round(most / 1e9, 2)
    return system, figures, turn(system, BATCHES, engine)


def turn(system: System, steps: int, engine: Engine) -> float:
    """Seconds of a step, the mean of so many."""
    return seconds(system, range(steps), engine) / steps


def warm_turn(system: System, engine: Engine) -> float:
    seconds(system, range(5), engine)
    return turn(system, 50, engine)


def seconds(system: System, numbers: range, engine: Engine) -> float:
    started = time.perf_counter()
    for number in numbers:
        system.step(number)
    system.finish()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class Product:
    """A large square product of random bf16 matrices; `peak` is the best rate seen."""

    def __init__(self, engine: Engine, size: int) -> None:
        self.engine, self.size, self.peak = engine, size, 0.0
        dtype = torch.bfloat16 if engine.device.type == "cuda" else torch.float32
        self.left = torch.randn(size, size, device=engine.device, dtype=dtype)
        for _ in range(3):
            self()
        self.peak = 0.0

    def __call__(self, count: int = 10) -> None:
        def products(number: int) -> None:
            torch.mm(self.left, self.left)

        taken = seconds(System(products), range(count), self.engine)
        self.peak = max(self.peak, 2.0 * self.size**3 * count / taken)


def kernels_of(system: System, engine: Engine, top: int = 15) -> list[dict[str, Any]]:
    """Where the time of some steps goes: the kernels that take most, with their share."""
    cuda = engine.device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as found:
        seconds(system, range(BATCHES), engine)
    spent = {
        event.key: event.self_device_time_total if cuda else event.self_cpu_time_total
        for event in found.key_averages()
    }
    total = sum(spent.values())
    largest = sorted(spent.items(), key=lambda item: -item[1])[:top]
    return [
        {"kernel": name, "ms_per_step": round(us / 1e3 / BATCHES, 3), "share": round(us / total, 3)}
        for name, us in largest
    ]


def attentions(
    rows: int, length: int, engine: Engine, result: dict[str, Any], save: Callable[[], None]
) -> None:
    """Milliseconds of attention alone, forward and backward, 12 heads of 64, by kernel."""
    shape = (rows, length, 3, 12, 64)  # as a layer makes them
    parts = torch.randn(shape, device=engine.device, dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.full((rows,), length, device=engine.device)
    lengths[::10] = length // 2
    mask = (torch.arange(length, device=engine.device) < lengths[:, None])[:, None, None]
    pieces = row_pieces(lengths, length)
    cases: dict[str, tuple[SDPBackend, dict[str, Any]]] = {
        "flash, full rows": (SDPBackend.FLASH_ATTENTION, {}),
        "cuDNN, full rows": (SDPBackend.CUDNN_ATTENTION, {}),
        "memory-efficient, mask": (SDPBackend.EFFICIENT_ATTENTION, {"mask": mask}),
        "cuDNN, mask": (SDPBackend.CUDNN_ATTENTION, {"mask": mask}),
        "variable length, pieces": (SDPBackend.FLASH_ATTENTION, {"pieces": pieces}),
        "flash, dropout 0.1": (SDPBackend.FLASH_ATTENTION, {"dropout": 0.1}),
    }
    found: dict[str, Any] = {}
    for name, (backend, extra) in cases.items():

        def step(number: int, extra: dict[str, Any] = extra) -> None:
            q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
            attention(q, k, v, **extra).sum().backward()
            parts.grad = None

        with sdpa_kernel(backend):  # which this PyTorch or chip may lack
            one = attempt(partial(warm_turn, System(step), engine), found, name)
        if one is not None:
            found[name] = round(1e3 * one, 3)
    result |= {"rows": rows, "length": length, "milliseconds": found}
    save()


def free(engine: Engine) -> None:
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
