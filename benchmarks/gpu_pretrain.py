"""Pre-training steps on a CUDA device beside transformers' `BertForPreTraining`.

    PYTHONPATH=src python benchmarks/gpu_pretrain.py [--only NAME...] [--budget SECONDS] [--out DIR]

It needs PyTorch, NumPy, Numba and safetensors, and transformers for the peers. Rows are made in
memory. A case is SIZE-LENGTH-RECIPE: `fast` is full rows, MLM, no dropout, on both sides; `paper`
is sentence pairs of which a tenth is short, MLM and NSP, dropout 0.1 on both sides; `float8` is
`fast` in bf16 and in float8. The systems of a case take turns inside every round, with a product of
two 8192 x 8192 bf16 matrices of random numbers between them; the best of these is the peak that
shares refer to. Operations are 6 x weights used x tokens + attention, the masked-LM head at masked
positions only, for all systems. Tokens are real ones; padding does not count.

Results are written after every case, into the JSON of an earlier call where there is one; cases
that it has are left out unless --only names them. No case is begun that the budget may not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertsmith.corpus.stream import Position
from bertsmith.files import write_json, write_text
from bertsmith.kernels.attention import attention
from bertsmith.kernels.cuda_attention import row_pieces
from bertsmith.training.engine import Engine, choose_engine
from gpu_pretrain_report import markdown
from gpu_pretrain_systems import BATCHES, OURS, OURS_EAGER, Case, System, builders, our_task

CASES = [  # the most telling first
    Case("base", 128, "fast", 256),
    Case("base", 512, "fast", 64),
    Case("large", 128, "fast", 128),
    Case("base", 128, "paper", 256),
    Case("large", 512, "fast", 32),
    Case("tiny", 128, "fast", 512),
    Case("mini", 128, "fast", 512),
    Case("6x384", 128, "fast", 512),
    Case("base", 512, "paper", 64),
    Case("large", 128, "float8", 128),
    Case("large", 128, "paper", 128),
    Case("large", 512, "paper", 32),
    Case("tiny", 512, "fast", 128),
    Case("mini", 512, "fast", 128),
    Case("6x384", 512, "fast", 128),
]
TOY = [Case("2x64", 32, recipe, 4, pieces=200) for recipe in ("fast", "paper")]
PROFILED = ("base-128-fast", "2x64-32-fast")
ATTENTION = {"attention-128": (256, 128), "attention-512": (64, 512)}  # rows, length
FIRST_GUESS = 200.0  # seconds of a case, before one has been seen
ROUND_SECONDS = 0.5  # of a system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="two small cases, eager: a rehearsal")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("missing: no CUDA device at hand (--device cpu --toy rehearses)")
    started = time.monotonic()
    engine = choose_engine(arguments.device, "float32" if arguments.toy else "bf16")
    file = arguments.out / "gpu_pretrain.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"results": {}}
    record |= about(engine)
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in TOY if arguments.toy else CASES:
        jobs[case.name] = lambda case=case: measure(case, engine, arguments.rounds, arguments.toy)
    if not arguments.toy:
        jobs |= {name: lambda s=shape: attentions(*s, engine) for name, shape in ATTENTION.items()}
    names = arguments.only or [name for name in jobs if name not in record["results"]]
    if unknown := set(names) - set(jobs):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(jobs)}")
    longest = 0.0 if arguments.toy else FIRST_GUESS
    for name in names:
        begun = time.monotonic()
        if begun - started + longest > arguments.budget:
            print(f"{name}: left for another call", file=sys.stderr)
            continue
        record["results"][name] = jobs[name]()
        longest = time.monotonic() - begun
        record["results"][name]["seconds"] = round(longest, 1)
        write_json(file, record)
        write_text(arguments.out / "gpu_pretrain.md", markdown(record))
        print(name, json.dumps(record["results"][name]), file=sys.stderr, flush=True)
    print(markdown(record))


def about(engine: Engine) -> dict[str, Any]:
    cuda = engine.device.type == "cuda"
    return {
        "command": " ".join(["python benchmarks/gpu_pretrain.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def measure(case: Case, engine: Engine, rounds: int, toy: bool) -> dict[str, Any]:
    """Median speed of every system of a case, memory, seconds of the first step, ratios."""
    torch.compiler.reset()
    product = Product(engine, 256 if toy else 8192)
    systems: dict[str, System] = {}
    figures: dict[str, dict[str, Any]] = {}
    steps: dict[str, int] = {}  # of a round
    for name, build in builders(case, engine, compiling=not toy).items():
        systems[name], figures[name] = warm(build, engine)
        one = seconds(systems[name], range(BATCHES), engine) / BATCHES
        steps[name] = max(BATCHES, round(ROUND_SECONDS / one))
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(1 if toy else rounds):
        for name, system in systems.items():
            product()
            times[name].append(seconds(system, range(steps[name]), engine) / steps[name])
    task = our_task(case, engine)
    batches = [task.batch(Position(0, k * case.rows))[0] for k in range(BATCHES)]
    tokens = sum(batch.tokens for batch in batches) / BATCHES
    operations = sum(task.operations(batch) for batch in batches) / BATCHES
    for name, found in figures.items():
        step = median(times[name])
        found |= {
            "step_ms": round(1e3 * step, 3),
            "sequences_per_second": round(case.rows / step, 1),
            "tokens_per_second": round(tokens / step),
            "share_of_peak": round(operations / step / product.peak, 3),
        }
    ours = OURS if OURS in times else OURS_EAGER
    ratios = {
        name: round(median(a / b for a, b in zip(values, times[ours], strict=True)), 2)
        for name, values in times.items()
        if name != ours
    }
    result = {
        "rows": case.rows,
        "peak_tflops": round(product.peak / 1e12, 3),
        "systems": figures,
        "ratio": ratios,
        "rounds_ms": {name: [round(1e3 * s, 3) for s in t] for name, t in times.items()},
    }
    if case.name in PROFILED:
        result["profile"] = profile(systems[ours], engine)
    systems.clear()
    free(engine)
    return result


def warm(build: Callable[[], System], engine: Engine) -> tuple[System, dict[str, Any]]:
    """A system whose step is compiled and warm, with its memory and the time that took."""
    cuda = engine.device.type == "cuda"
    free(engine)
    before = torch.cuda.memory_allocated() if cuda else 0
    system = build()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = seconds(system, range(1), engine)
    seconds(system, range(BATCHES), engine)  # a CUDA graph is recorded at the second
    figures: dict[str, Any] = {"first_step_s": round(first, 2)}
    if cuda:
        most = torch.cuda.max_memory_allocated() - before
        figures["memory_gb"] = round(most / 1e9, 2)
    return system, figures


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


def profile(system: System, engine: Engine, top: int = 15) -> list[dict[str, Any]]:
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


def attentions(rows: int, length: int, engine: Engine) -> dict[str, Any]:
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
    found: dict[str, float | str] = {}
    for name, (backend, extra) in cases.items():

        def step(number: int, extra: dict[str, Any] = extra) -> None:
            q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
            attention(q, k, v, **extra).sum().backward()
            parts.grad = None

        with sdpa_kernel(backend):
            try:
                seconds(System(step), range(5), engine)
            except RuntimeError as error:  # this PyTorch or chip lacks the kernel
                found[name] = str(error).split("\n")[0]
                continue
            found[name] = round(1e3 * seconds(System(step), range(50), engine) / 50, 3)
    return {"rows": rows, "length": length, "milliseconds": found}


def free(engine: Engine) -> None:
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
