"""Pre-training steps beside transformers' `BertForPreTraining`, taking turns in one run.

    python benchmarks/pretrain.py [--rounds 5] [--sizes tiny mini 6x384 base] [--lengths 128 512]

Every system (benchmarks/pretrain_systems.py) has a process of its own, with its own memory, and
waits while another one steps. At base size, where each takes 3 GB, half of them wait for a second
group, in which "bertsmith, fast" takes its turns again: a table of its own. All but "the recipe
fast" train on the same rows: the paper's pairs, 15% masked, 30,522 pieces, 4,096 tokens a step
(base: 1,024). "Fast" is our step without dropout and in that recipe's precision, int8 where it is
faster; "paper" is the step with dropout 0.1 everywhere; "the recipe fast" has the rows, masks and
shape of that recipe. The peers beyond "as shipped" have bf16 where this processor multiplies in
it, else float32. "Masked head": logits at the masked positions only. "Kept memory": freed memory is
kept and pages are huge, as ours are. Between the turns a 2048-cubed product tells how fast the
machine is at that moment. Tokens are real ones, padding not counted. Medians of the rounds; ratios
are medians of the ratios of rounds in one group. Share of the peak: useful operations (6 x weights
used x tokens + attention, the head at masked positions) over the best product of the run, which
int8 could exceed. "First step": the first step alone, compilation included, of a process that
starts beside the others of its group; from the command to its end: benchmarks/first_step.py.
Results go to results/pretrain, one file a kind of processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.training.engine import Engine, choose_engine, cpu_name, machine, measure_peak
from inference_report import kind_of_processor
from pretrain_systems import PAIRS, SYSTEMS, make_rows, make_store

FAST, PAPER, RECIPE = "bertsmith, fast", "bertsmith, paper", "bertsmith, the recipe fast"
NO_INT8, SHIPPED = "bertsmith, fast, without int8", "transformers, as shipped"
ENVIRONMENT = dict(os.environ)  # of every system: before `choose_engine` asks for huge pages here
TURN = 4.0  # seconds of work that a system's turn should take, at least one step


class System:
    """A process that steps on command: `python SCRIPT NAME WORDS`."""

    def __init__(self, name: str, script: str, *words: object) -> None:
        path = Path(__file__).with_name(script)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(path), name, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.name = name
        self.facts: dict[str, Any] = {}
        self.steps, self.memory_mb = 1, 0
        self.rates: list[float] = []

    def wait(self) -> None:
        """Until it is built and warm; how many steps make a turn."""
        self.facts = self.answer()
        self.steps = max(1, round(TURN / self.turn()))

    def turn(self) -> float:
        """Seconds of one turn."""
        answer = self.ask(self.steps)
        self.memory_mb = answer["memory_mb"]
        return answer["seconds"]

    def result(self, peak: float) -> dict[str, Any]:
        """Its row; `peak` is the machine's."""
        rate = median(self.rates)
        found = {
            "tokens_per_second": round(rate, 1),
            "rounds": [round(value, 1) for value in self.rates],
            "memory_mb": self.memory_mb,
            "first_step_seconds": self.facts["first_step_seconds"],
        }
        if "operations" in self.facts:
            operations = self.facts["operations"] / self.facts["tokens"]
            found["share_of_peak"] = round(rate * operations / peak, 3)
        return found

    def ask(self, number: float) -> dict[str, Any]:
        """Its answer to a line with a number."""
        assert self.process.stdin is not None
        print(number, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(store: Path, size: str, length: int, rounds: int, engine: Engine) -> dict[str, Any]:
    """Every system's tokens/s, first step, memory; the peak of the machine in between."""
    groups, peak = [], 0.0
    for names in groups_of(size):
        words = "pretrain_systems.py", size, length, store
        systems = [System(name, *words) for name in names]
        peak = max(peak, take_turns(systems, rounds, engine))
        groups.append(systems)
    first, second = [{system.name: system.result(peak) for system in group} for group in groups]
    return {
        "size": size,
        "length": length,
        "rows": make_rows(size, length),
        "cpu": cpu_name(),
        "precision": engine.precision,
        "pairs": PAIRS["nsp_sampling"],
        "peak_gflops": round(peak / 1e9, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "systems": first,
        "second_group": second,
    }


def groups_of(size: str) -> tuple[list[str], list[str]]:
    """The systems that take turns: all at once, but at base size, for memory, in two groups."""
    later = [NO_INT8, RECIPE, *(name for name in SYSTEMS if "masked head" in name)]
    if size != "base":
        return list(SYSTEMS), []
    return [name for name in SYSTEMS if name not in later], [FAST, *later]


def take_turns(systems: list[System], rounds: int, engine: Engine) -> float:
    """Fill in the systems' rates and end their processes; the best rate of a product in between."""
    peak = 0.0
    for system in systems:
        system.wait()
    for _ in range(rounds):
        for system in systems:
            torch.set_num_threads(engine.threads)
            peak = max(peak, measure_peak(engine, size=2048, seconds=0.2))
            seconds = system.turn()
            system.rates.append(system.facts["tokens"] * system.steps / seconds)
    for system in systems:
        system.close()
    return peak


def ratio(result: dict[str, Any], name: str, other: str) -> float:
    """The median of the rounds' ratios, of the group that has both."""
    groups = result["systems"], result.get("second_group", {})
    group = next(group for group in groups if name in group and other in group)
    pairs = zip(group[name]["rounds"], group[other]["rounds"], strict=True)
    return median(a / b for a, b in pairs)


def fastest_peer(result: dict[str, Any]) -> str:
    """The peer without dropout that `fast` is ahead of by the least."""
    known = result["systems"] | result.get("second_group", {})
    peers = [name for name in known if name.startswith("transf") and name.endswith("dropout 0")]
    return min(peers, key=lambda peer: ratio(result, FAST, peer))


def table(record: dict[str, Any]) -> str:
    about = record["machine"]
    text = (
        "# Pre-training step: bertsmith beside transformers\n\n"
        f"The last of its commands: `{record['command']}`, {record['date']}, "
        f"{about['threads']} threads, "
        f"torch {about['torch']}, transformers {record['transformers']}. What the columns mean is "
        "at the top of `benchmarks/pretrain.py`.\n"
    )
    for result in record["results"]:
        systems, later = result["systems"], result.get("second_group", {})
        rounds = len(systems[FAST]["rounds"])
        text += (
            f"\n## {result['size']}, {result['rows']} x {result['length']}, {result['cpu']}\n\n"
            f"{result['date']}, {rounds} rounds; pairs: {result['pairs']}; peak in "
            f"{result['precision']} {result['peak_gflops']:,.0f} GFLOP/s.\n\n"
        )
        text += group_table(systems)
        if later:
            text += "\nAfter them, by themselves:\n\n" + group_table(later)
        best = fastest_peer(result)
        pairs = [(FAST, best), (FAST, f"{SHIPPED}, dropout 0"), (PAPER, SHIPPED), (PAPER, FAST)]
        if NO_INT8 in systems | later:
            pairs.append((FAST, NO_INT8))
        ratios = (f"{a} / {b} **{ratio(result, a, b):.2f}x**" for a, b in pairs)
        text += f"\nThe fastest peer: {best}. Ratios: {'; '.join(ratios)}.\n"
    return text


def group_table(systems: dict[str, Any]) -> str:
    text = (
        "| system | tokens/s | memory, MB | first step, s | share of peak |\n"
        "|---|---|---|---|---|\n"
    )
    for name, row in systems.items():
        share = f"{row['share_of_peak']:.0%}" if "share_of_peak" in row else ""
        text += (
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['memory_mb']:,} "
            f"| {row['first_step_seconds']:.1f} | {share} |\n"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mini", "6x384", "base"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/pretrain")
    arguments = parser.parse_args()
    engine = choose_engine("cpu")
    path = arguments.out / f"{kind_of_processor()}.json"
    results = read_json(path)["results"] if path.exists() else []
    chosen = [(size, length) for size in arguments.sizes for length in arguments.lengths]
    results = [
        row
        for row in results
        if row["cpu"] != cpu_name() or (row["size"], row["length"]) not in chosen
    ]
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        make_store(store)
        for length in arguments.lengths:
            for size in arguments.sizes:
                results.append(compare(store, size, length, arguments.rounds, engine))
                record = {
                    "command": " ".join(["python benchmarks/pretrain.py", *sys.argv[1:]]),
                    "date": datetime.now(UTC).date().isoformat(),
                    "machine": machine(engine, max(r["peak_gflops"] for r in results) * 1e9),
                    "transformers": transformers.__version__,
                    "results": results,
                }
                write_json(path, record)
                write_text(path.with_suffix(".md"), table(record))
                print(table({**record, "results": results[-1:]}), flush=True)


if __name__ == "__main__":
    main()
