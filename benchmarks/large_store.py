"""A store of 1e9 tokens, and one of 1e11: opening, the first batch, a batch, memory.

    python benchmarks/large_store.py FOLDER [--rows 256] [--rounds 5]

Both stores are made up and left in FOLDER (2.5 GB): the ids of one shard of random text are copied
to 62 shards; the large store's manifest names these 62 a hundred times. Every measurement is a
fresh process that opens the store and reads 50 batches from a position on: that of step 10, and
that of step 1,000,000. Before "cold" ones the files are taken out of the memory of the system.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bertsmith.base.files import write_json, write_text
from bertsmith.corpus.build.encode import Part, ShardWriter, finish_store, totals
from bertsmith.corpus.store.blocks import MANIFEST, sealed, write_manifest
from bertsmith.corpus.store.store import KINDS, SPLITS, TokenStore
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

PIECES = 30522
SHARDS, TIMES = 62, 100
SHARD_TOKENS = 1 << 24
SENTENCE, DOCUMENT = 24, 40  # tokens and sentences, on average
OBJECTIVES = ("mlm+nsp", "mlm")
LENGTH, BATCHES = 128, 50
STEPS = (10, 1_000_000)


def make_billion(folder: Path) -> None:
    """62 shards of the same random text, about 1e9 tokens, and a small held-out side."""
    dice = np.random.default_rng(0)
    sentences = dice.integers(SENTENCE // 2, SENTENCE * 3 // 2, SHARD_TOKENS // SENTENCE)
    documents = np.full(len(sentences) // DOCUMENT, DOCUMENT)
    sentences = sentences[: documents.sum()]
    ids = dice.integers(5, PIECES, sentences.sum()).astype("<u2")
    few = Part(ids[: sentences[: 2 * DOCUMENT].sum()], sentences[: 2 * DOCUMENT], documents[:2])
    shards: dict[str, list[dict[str, Any]]] = {}
    for split, part in (("train", Part(ids, sentences, documents)), ("held_out", few)):
        with ExitStack() as stack:
            writer = ShardWriter(stack, folder, f"{split}-00000")
            writer.append(part)
            shards[split] = [writer.finish()]
    for number in range(1, SHARDS):
        name = f"train-{number:05d}"
        for kind in (*KINDS, "checksums"):
            shutil.copyfile(folder / f"train-00000.{kind}", folder / f"{name}.{kind}")
        shards["train"].append(shards["train"][0] | {"name": name})
    words = [f"w{number}" for number in range(PIECES - len(SPECIAL))]
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, *words]))
    finish_store(folder, tokenizer, shards, text_bytes=SHARDS * len(ids) * 5)


def make_hundred(folder: Path, billion: Path) -> None:
    """A manifest that names the shards of the smaller store a hundred times: about 1e11 tokens."""
    folder.mkdir(parents=True)
    manifest = TokenStore.open(billion).manifest
    for entry in manifest["files"]:
        shutil.copyfile(billion / entry["name"], folder / entry["name"])
    splits = {}
    for split, times in zip(SPLITS, (TIMES, 1), strict=True):
        shards = [
            entry | {"name": f"../{billion.name}/{entry['name']}"}
            for entry in manifest["splits"][split]["shards"]
        ]
        splits[split] = {**totals(shards * times), "shards": shards * times}
    whole = manifest | totals(list(splits.values())) | {"splits": splits}
    write_manifest(folder / MANIFEST, sealed(whole))


def forget(folder: Path) -> None:
    """Take the files of a folder out of the system's memory."""
    os.sync()
    for path in folder.glob("*.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident(kind: str = "VmRSS") -> float:
    """Memory of this process in MB; RssAnon: its own, without the pages of mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024 / 1e6


def measure(store: Path, objective: str, step: int, rows: int) -> dict[str, float]:
    """One process' way from nothing to some batches at a step's position."""
    from bertsmith.corpus.examples.settings import ExampleSettings
    from bertsmith.corpus.examples.stream import Position, PretrainingStream

    bare, started = resident(), time.perf_counter()
    opened = TokenStore.open(store)
    found = {"bare": bare, "open": time.perf_counter() - started, "resident_open": resident()}
    vocabulary = opened.tokenizer.vocabulary
    settings = ExampleSettings(LENGTH, objective=objective)  # type: ignore[arg-type]
    started, used = time.perf_counter(), time.process_time()
    stream = PretrainingStream(opened.train, vocabulary, settings, seed=1)
    sections = opened.train.num_sections
    # A step's position is in the checkpoint; here the rows of an epoch are told by the tokens.
    rows_a_section = int(opened.train.num_tokens / sections / (LENGTH - 2) * 0.99)
    place, index = divmod(step * rows, rows_a_section)
    position = Position(place // sections, index, place % sections)
    _, position = stream.batch(position, rows)
    found["first_batch"] = time.process_time() - used
    found["first_batch_wall"] = time.perf_counter() - started
    found["resident_first"] = resident()
    times = []
    for _ in range(BATCHES):
        used = time.process_time()
        _, position = stream.batch(position, rows)
        times.append(time.process_time() - used)
    found |= {"batch": median(times), "resident_batches": resident(), "own": resident("RssAnon")}
    return found | {"sections": sections}


def processes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every measurement, the cold ones and then `rounds` warm ones; medians of these."""
    results = []
    for name in ("billion", "hundred"):
        for objective in OBJECTIVES:
            for step in STEPS:
                words = [name, objective, str(step), str(arguments.rows)]
                command = [sys.executable, __file__, str(arguments.folder), "--measure", *words]
                forget(arguments.folder / "billion")
                runs = [
                    json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                    for _ in range(arguments.rounds + 1)
                ]
                warm = {key: median(run[key] for run in runs[1:]) for key in runs[0]}
                cold = {f"cold_{key}": runs[0][key] for key in ("open", "first_batch_wall")}
                results.append(
                    {"store": name, "objective": objective, "step": step, **warm, **cold}
                )
    return results


def constants(folder: Path) -> dict[str, float]:
    """Bytes a token, size of the manifest and rates of reading, for docs/design/scale.md."""
    from bertsmith.corpus.store.verify import verify_store

    billion, hundred = (TokenStore.open(folder / name) for name in ("billion", "hundred"))
    sizes = {
        f"bytes_a_token_{kind}": sum(
            path.stat().st_size for path in (folder / "billion").glob(f"train-*.{kind}")
        )
        / billion.train.num_tokens
        for kind in (*KINDS, "checksums")
    }
    forget(folder / "billion")
    rates = {}
    for name in ("cold", "warm"):
        read, started = [], time.perf_counter()
        assert not list(verify_store(folder / "billion", read.append))
        rates[f"verify_{name}_bytes_per_second"] = sum(read) / (time.perf_counter() - started)
    return {
        **sizes,
        **rates,
        "manifest_bytes_a_shard": (folder / "hundred" / MANIFEST).stat().st_size
        / len(hundred.train.shards),
        "tokens_billion": billion.train.num_tokens,
        "tokens_hundred": hundred.train.num_tokens,
        "shards_hundred": len(hundred.train.shards),
    }


def table(record: dict[str, Any]) -> str:
    names = {"billion": "1e9", "hundred": "1e11"}
    rows = "".join(
        f"| {names[run['store']]} | {run['sections']:,.0f} | {run['objective']} | {run['step']:,} "
        f"| {run['open'] * 1e3:,.0f} ms | {run['resident_open']:,.0f} MB "
        f"| {run['first_batch']:.2f} s ({run['cold_first_batch_wall']:.2f} s) "
        f"| {run['resident_first']:,.0f} MB | {run['batch'] * 1e3:.2f} ms "
        f"| {run['resident_batches']:,.0f} MB | {run['own']:,.0f} MB |\n"
        for run in record["runs"]
    )
    found = record["constants"]
    kinds = ", ".join(
        f"{kind} {found[f'bytes_a_token_{kind}']:.4f}" for kind in (*KINDS, "checksums")
    )
    cold, warm = (found[f"verify_{name}_bytes_per_second"] for name in ("cold", "warm"))
    bare = median(run["bare"] for run in record["runs"])
    return (
        "# A large store\n\n"
        f"`{record['command']}`, {record['date']}, {record['cpu']}, {record['cores']} cores. "
        f"Made-up text: sentences of {SENTENCE} tokens, documents of {DOCUMENT} sentences. 1e9 is "
        f"{found['tokens_billion']:,} tokens in {SHARDS} shards, 1e11 is "
        f"{found['tokens_hundred']:,} in {found['shards_hundred']:,}. Rows of {LENGTH}, batches of "
        f"{record['rows']}. Every line is a fresh process at the position of that step; medians of "
        f"{record['rounds']} with the files in the system's memory. Opening is in wall time, first "
        "batch and batch in processor time, on a machine with other work; in brackets wall time "
        "with the files on disk, once. "
        "Memory is all that is resident; a process that has only imported the package has "
        f"{bare:,.0f} MB.\n\n"
        "| tokens | sections of an epoch | objective | step | open | then resident | first batch "
        "(from disk) | then resident | a batch | after 50 | of this its own |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n" + rows + "\n"
        "Opening is the manifest alone. The first batch opens the shards of its section, makes the "
        "plan (pairs: verifies and walks the sentence index) and verifies the blocks of its rows. "
        "What is resident beyond the process' own are pages of mapped files, which the system "
        "takes back when it wants them.\n\n"
        "| constant | |\n|---|---|\n"
        f"| bytes of the store a token | {kinds} |\n"
        f"| bytes of the manifest a train shard | {found['manifest_bytes_a_shard']:,.0f} |\n"
        f"| `corpus verify`, one core, from disk | {cold / 1e6:,.0f} MB/s |\n"
        f"| the same from memory | {warm / 1e6:,.0f} MB/s |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, objective, step, rows = arguments.measure
        print(json.dumps(measure(arguments.folder / name, objective, int(step), int(rows))))
        return
    from bertsmith.training.engine import cpu_name

    if not (arguments.folder / "billion" / MANIFEST).is_file():
        make_billion(arguments.folder / "billion")
    if not (arguments.folder / "hundred" / MANIFEST).is_file():
        make_hundred(arguments.folder / "hundred", arguments.folder / "billion")
    record = {
        "command": "python benchmarks/large_store.py FOLDER",
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "rows": arguments.rows,
        "rounds": arguments.rounds,
        "runs": processes(arguments),
        "constants": constants(arguments.folder),
    }
    write_json(arguments.out / "large_store.json", record)
    write_text(arguments.out / "large_store.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
