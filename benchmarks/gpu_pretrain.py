"""Pre-training steps on a CUDA device beside transformers' `BertForPreTraining`.

    PYTHONPATH=src python benchmarks/gpu_pretrain.py [--only NAME...] [--budget SECONDS] [--out DIR]

It needs PyTorch, NumPy, Numba and safetensors; without transformers its systems are left out. Rows
are made in memory. A case is SIZE-LENGTH-RECIPE: `fast` is full rows, MLM, no dropout, on both
sides; `others` the same beside the recipe fast (25% masks), a masked head for transformers and our
step not compiled; `paper` the recipe paper's step on sentence pairs of which a tenth is short,
dropout 0.1 on both sides; `float8` is `fast` in bf16 and in float8. The systems of a case take
turns inside every round, with a product of two 8192 x 8192 bf16 matrices of random numbers between
them; the best of these is the peak that shares refer to. Operations are 6 x weights used x tokens
+ attention, the masked-LM head at masked positions only, for all systems. Tokens are real ones;
padding does not count.

Results are written after every system, into the JSON of an earlier call where there is one. A call
goes on with what that lacks: a case without its rounds is measured again, but for the systems that
failed or were cut off, which --only CASE tries once more. No case is begun that the budget may not
hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.model.config import layers_hidden_heads
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.pretraining.trial import COMPILE_SECONDS, COMPILE_SECONDS_PER_LAYER
from gpu_pretrain_measure import attentions, measure
from gpu_pretrain_report import NO_PEERS, markdown
from gpu_pretrain_systems import Case, has_transformers, systems_of

TOKENS = {"tiny": 65536, "mini": 65536, "6x384": 65536, "base": 32768, "large": 16384}  # of a step
NAMES = """
    base-128-fast base-512-fast large-128-fast
    base-128-paper base-128-others large-512-fast tiny-128-fast mini-128-fast 6x384-128-fast
    base-512-paper large-128-float8 large-128-paper tiny-128-paper mini-128-paper 6x384-128-paper
    large-512-paper tiny-512-fast mini-512-fast 6x384-512-fast
    tiny-512-paper mini-512-paper 6x384-512-paper
    tiny-128-others mini-128-others 6x384-128-others large-128-others
    base-512-others large-512-others tiny-512-others mini-512-others 6x384-512-others
"""  # what the bars ask comes first, then the most telling
TOY = [Case("2x64", 32, recipe, 4, pieces=200) for recipe in ("fast", "paper", "others")]
ATTENTION = {"attention-128": (256, 128), "attention-512": (64, 512)}  # rows, length
# Guesses, until a case has been seen: what a system takes besides compiling, and kernels of a shape
SYSTEM_SECONDS, ATTENTION_SECONDS = 15.0, 20.0


@dataclass
class Job:
    """Fills in a result, which it is given with what saves the record."""

    run: Callable[[dict[str, Any], Callable[[], None]], None]
    seconds: float
    systems: list[str]

    def is_done(self, result: dict[str, Any]) -> bool:
        rounds = result.get("rounds") and set(self.systems) <= set(result["systems"])
        return bool(rounds or "milliseconds" in result)


def main() -> None:
    arguments = parsed()
    started = time.monotonic()
    engine = choose_engine(arguments.device, "float32" if arguments.toy else "bf16")
    jobs = jobs_of(arguments, engine)
    file = arguments.out / "gpu_pretrain.json"
    record = read_json(file) if file.exists() else {"results": {}}
    record |= about(engine)
    results = record["results"]
    names = arguments.only or [
        name for name in jobs if not jobs[name].is_done(results.get(name, {}))
    ]
    if unknown := set(names) - set(jobs):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(jobs)}")
    if not has_transformers():
        print(NO_PEERS, file=sys.stderr)

    def save() -> None:
        write_json(file, record)
        write_text(file.with_suffix(".md"), markdown(record))

    for name in names:
        begun = time.monotonic()
        if begun - started + expected(jobs[name], jobs, results) > arguments.budget:
            print(f"{name}: left for another call", file=sys.stderr)
            continue
        results[name] = {} if arguments.only else results.get(name, {})
        try:
            jobs[name].run(results[name], save)
        except torch.AcceleratorError as error:
            save()
            sys.exit(f"{name}: {error}\nThe device answers this process no more: call again")
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        save()
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    print(markdown(record))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="small cases, not compiled: a rehearsal")
    arguments = parser.parse_args()
    if arguments.out is None and (arguments.toy or arguments.device != "cuda"):
        sys.exit("missing: --out DIR: a rehearsal must not take the place of benchmarks/results")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("missing: no CUDA device at hand (--device cpu --toy --out DIR rehearses)")
    arguments.out = arguments.out or Path(__file__).parent / "results"
    return arguments


def all_cases() -> list[Case]:
    """The cases of `NAMES`, in their order."""
    found = []
    for name in NAMES.split():
        size, length, recipe = name.split("-")
        found.append(Case(size, int(length), recipe, rows=TOKENS[size] // int(length)))
    return found


def jobs_of(arguments: argparse.Namespace, engine: Engine) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    rounds = 1 if arguments.toy else arguments.rounds
    for case in TOY if arguments.toy else all_cases():
        names = systems_of(case)
        layers, *_ = layers_hidden_heads(case.size)
        one = SYSTEM_SECONDS + COMPILE_SECONDS + COMPILE_SECONDS_PER_LAYER * layers
        run = partial(measure, case, names, engine, rounds, not arguments.toy)
        jobs[case.name] = Job(run, len(names) * one, names)
    for name, shape in {} if arguments.toy else ATTENTION.items():
        jobs[name] = Job(partial(attentions, *shape, engine), ATTENTION_SECONDS, [])
    return jobs


def expected(job: Job, jobs: dict[str, Job], results: dict[str, Any]) -> float:
    """Seconds that a job may take: its guess, by the worst that guesses proved to be so far."""
    known = [name for name in jobs if "seconds" in results.get(name, {})]
    rates = [results[name]["seconds"] / jobs[name].seconds for name in known]
    return job.seconds * max(rates, default=1.0)


def about(engine: Engine) -> dict[str, Any]:
    cuda = engine.device.type == "cuda"
    command = " ".join(["python benchmarks/gpu_pretrain.py", *sys.argv[1:]])
    return {
        "command": re.sub(r" --out[ =]\S+", "", command),  # whose folder that is matters to nobody
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "transformers": importlib.metadata.version("transformers") if has_transformers() else None,
    }


if __name__ == "__main__":
    main()
