"""Vocabulary training beside the WordPiece trainer of the `tokenizers` library.

    python benchmarks/vocabulary.py --train FILE... --held-out FILE... [--sizes 8000 30522]
        [--rounds 3] [--gigabyte] [--out benchmarks/results]

The files are any that `bertsmith vocab` reads; both trainers get the same plain text, in a process
of their own, on two cores, taking turns; the peer with BertNormalizer, BertPreTokenizer and its
defaults. Seconds are those of the training call; the median of the rounds is reported. Memory is
the largest sum of resident sets of a trainer's processes. Pieces per word are counted by one
tokenizer, ours, with either vocabulary. With `--gigabyte` ours is also trained on 10^9 bytes: the
training text again and again, and random strings, of which hardly one comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tokenizers

from bertsmith.base.files import write_json, write_text
from bertsmith.text.readers.documents import read_documents
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.train import train_vocabulary

CORES, POLL, GIGABYTE = 2, 0.05, 1_000_000_000
SIGNS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789    ", np.uint8)


def train_ours(text: Path, size: int, workers: int) -> tuple[str, ...]:
    return train_vocabulary(read_documents([text]), size, workers=workers).pieces


def train_theirs(text: Path, size: int, workers: int) -> tuple[str, ...]:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    ids = tokenizer.get_vocab()
    return tuple(sorted(ids, key=lambda piece: ids[piece]))


TRAINERS = {"bertsmith": train_ours, "tokenizers": train_theirs}


def train_here(name: str, text: Path, size: int, workers: int, out: Path) -> None:
    """What the process of one run does."""
    began = time.perf_counter()
    pieces = TRAINERS[name](text, size, workers)
    out.write_text(json.dumps({"seconds": time.perf_counter() - began, "pieces": pieces}))


def measured(name: str, text: Path, size: int, workers: int = CORES) -> dict[str, Any]:
    """Seconds, largest memory in GB, and pieces of one run in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, __file__, "--run", name, *map(str, (text, size, workers, out))]
        process = subprocess.Popen(
            command,
            env={**os.environ, "RAYON_NUM_THREADS": str(workers)},
            stderr=subprocess.DEVNULL,
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(resident, family(process.pid))))
            time.sleep(POLL)
        assert process.returncode == 0, command
        return {**json.loads(out.read_text()), "gigabytes": peak / 1e9}


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            yield from family(int(child))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pieces_per_word(pieces: Sequence[str], text: Path) -> tuple[float, float]:
    """Pieces a word and the share of unknown words."""
    tokenizer = Tokenizer(Vocabulary(pieces))
    num_pieces = num_words = num_unknown = 0
    for document in read_documents([text]):
        encoded = tokenizer.encode_batch(document.lines)
        last = encoded.boundaries[1:][np.diff(encoded.boundaries) > 0] - 1
        num_words += int((encoded.word_ids[last] + 1).sum())
        num_pieces += len(encoded.ids)
        num_unknown += np.count_nonzero(encoded.ids == tokenizer.vocabulary.unk_id)
    return num_pieces / num_words, num_unknown / num_words


def compare(train: Path, held_out: Path, size: int, rounds: int) -> dict[str, Any]:
    runs = {name: [] for name in TRAINERS}
    for _ in range(rounds):
        for name in TRAINERS:
            runs[name].append(measured(name, train, size))
    for workers in (1, 3):
        again = measured("bertsmith", train, size, workers)["pieces"]
        assert again == runs["bertsmith"][0]["pieces"], f"another vocabulary with {workers} workers"
    row: dict[str, Any] = {"size": size}
    for name, results in runs.items():
        assert name != "bertsmith" or all(r["pieces"] == results[0]["pieces"] for r in results)
        per_word, unknown = pieces_per_word(results[0]["pieces"], held_out)
        row[name] = {
            "seconds": median(result["seconds"] for result in results),
            "gigabytes": max(result["gigabytes"] for result in results),
            "pieces_per_word": per_word,
            "unknown": unknown,
        }
    ratios = zip(runs["tokenizers"], runs["bertsmith"], strict=True)
    row["ratio"] = median(theirs["seconds"] / ours["seconds"] for theirs, ours in ratios)
    return row


def write_plain(inputs: list[Path], path: Path) -> int:
    """The text of the inputs, a paragraph a line; its bytes."""
    with path.open("w", encoding="utf-8") as file:
        for document in read_documents(inputs):
            file.writelines(line + "\n" for line in document.lines)
    return path.stat().st_size


def gigabyte_runs(train: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Seconds and memory for 10^9 bytes of text."""
    rows, text = {}, folder / "gigabyte.txt"
    for kind in ("training text again and again", "random strings"):
        source, size = np.random.default_rng(1), 0
        part = train.read_bytes()
        with text.open("wb") as file:
            while size < GIGABYTE:
                if kind == "random strings":
                    part = SIGNS[source.integers(0, len(SIGNS), 1 << 16)].tobytes() + b"\n"
                size += file.write(part[: GIGABYTE - size])
        result = measured("bertsmith", text, 30522)
        rows[kind] = {key: result[key] for key in ("seconds", "gigabytes")}
    return rows


def markdown(record: dict[str, Any]) -> str:
    lines = [
        "# Vocabulary training: bertsmith beside tokenizers",
        "",
        f"`{record['command']}`, {record['date']}, {CORES} cores of {record['cores']}, tokenizers "
        f"{tokenizers.__version__}. Trained on {record['train_bytes'] / 1e6:.1f} MB, held out "
        f"{record['held_out_bytes'] / 1e6:.1f} MB. Same text, normalization and size; medians of "
        f"{record['rounds']} rounds in which the two take turns. With 1, 2 and 3 workers and in "
        "every round bertsmith's vocabulary is the same.",
        "",
        "| pieces | trainer | seconds | ratio | memory | pieces a word, held out | unknown words |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        for name in TRAINERS:
            one = row[name]
            ratio = f"**{row['ratio']:.1f}x**" if name == "bertsmith" else ""
            lines.append(
                f"| {row['size']:,} | {name} | {one['seconds']:.1f} | {ratio} "
                f"| {one['gigabytes']:.2f} GB | {one['pieces_per_word']:.4f} "
                f"| {one['unknown']:.3%} |"
            )
    for kind, one in record["gigabyte"].items():
        lines += [
            "",
            f"10^9 bytes, {kind}: {one['seconds']:.0f} s, at most {one['gigabytes']:.2f} GB in all "
            "processes together (30,522 pieces).",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        name, text, size, workers, out = sys.argv[2:]
        return train_here(name, Path(text), int(size), int(workers), Path(out))
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8000, 30522])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabyte", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory() as folder:
        train, held_out = Path(folder) / "train.txt", Path(folder) / "held-out.txt"
        record: dict[str, Any] = {
            "command": "python benchmarks/vocabulary.py "
            + " ".join(word if word.startswith("-") else Path(word).name for word in sys.argv[1:]),
            "date": datetime.now(UTC).date().isoformat(),
            "cores": os.cpu_count(),
            "rounds": arguments.rounds,
            "train_bytes": write_plain(arguments.train, train),
            "held_out_bytes": write_plain(arguments.held_out, held_out),
        }
        train_ours(held_out, 2000, 1)  # what is compiled is kept on the disk
        record["rows"] = [
            compare(train, held_out, size, arguments.rounds) for size in arguments.sizes
        ]
        record["gigabyte"] = gigabyte_runs(train, Path(folder)) if arguments.gigabyte else {}
    write_json(arguments.out / "vocabulary.json", record)
    write_text(arguments.out / "vocabulary.md", markdown(record))
    print(markdown(record))


if __name__ == "__main__":
    main()
