"""Hash what every part computes, to show that a change of form changes no number.

    python benchmarks/same_numbers.py WORK [--only NAME ...]      writes WORK/numbers.json
    diff OLD/numbers.json NEW/numbers.json

WORK is a new folder, or one to go on in. The text, the labelled data and every command below are
made from one seed, so that two trees on one machine give the same hashes, or one of them computes
something else. Hashed are tensors, losses, vocabularies, token ids, shards and answers; not the
names of files and fields. Another processor may round otherwise: compare runs of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SMALL = "--size 4x64 --max-length 64 --batch-size 16 --steps 200 --seed 7"
PRETRAIN = {  # name -> flags, threads
    "mlm+nsp float32": (f"{SMALL} --precision float32 --threads 1", 1),
    "mlm+nsp float32 2 threads": (f"{SMALL} --precision float32 --threads 2", 1),
    "mlm+nsp bf16": (f"{SMALL} --precision bf16 --threads 1", 1),
    "mlm+nsp bf16 2 threads": (f"{SMALL} --precision bf16 --threads 2", 1),
    "mlm+nsp int8": (f"{SMALL} --precision int8 --threads 2", 1),
    "mlm+nsp 2 ranks": (f"{SMALL} --precision float32 --threads 1", 2),
    "mlm spans": (f"{SMALL} --objective mlm --masking span --threads 2", 1),
    "ltr": (f"{SMALL} --objective ltr --precision float32 --threads 2", 1),
    "mlm+sop words": (f"{SMALL} --objective mlm+sop --masking word --threads 2", 1),
    "paper": (
        f"{SMALL} --nsp-sampling paper --init-scheme paper --bag-of-words 0 --dropout 0.1 "
        "--attention-dropout 0.1 --optimizer paper-adam --schedule paper --precision float32 "
        "--phase2-length 96 --micro-batch-size 4 --activation-checkpointing --threads 2",
        1,
    ),
    "pre-norm gated lamb": (
        f"{SMALL} --layer-norm pre --glu --optimizer lamb --schedule cosine --threads 2",
        1,
    ),
    "muon": (f"{SMALL} --optimizer muon --activation gelu_tanh --threads 2", 1),
}
TUNE = "--epochs 2 --batch-size 16 --threads 2 --precision float32 --seeds 1,2"
PAIR = "--text a --text-pair b --label y"
FINETUNE = {
    "classify": f"classify --data classify.csv {PAIR} --tune-thresholds {TUNE}",
    "classify bf16": "classify --data classify.csv --text a --label y --epochs 1 --precision bf16",
    "regress": f"regress --data regress.csv {PAIR} {TUNE}",
    "multilabel": f"multilabel --data multilabel.csv --text a --label y {TUNE} --focal-gamma 2",
    "choice": f"choice --data choice.jsonl --text a --options options --label y {TUNE}",
    "tag": f"tag --data tag.conll {TUNE} --layer-decay 0.9",
    "tag frozen": f"tag --data tag.conll --freeze-encoder {TUNE}",
    "answer": f"answer --data squad {TUNE} --max-length 64 --doc-stride 16",
    "windows": f"classify --data long.csv --text a --label y --long-texts windows {TUNE}",
    "teacher": f"classify --data classify.csv {PAIR} --teacher tuned/classify {TUNE}",
}
USE = {  # name -> command line and what it writes, or prints when that is empty
    "fill": ("fill [LINE] --model run --json", ""),
    "fill jointly": ("fill [LINE] --model run --joint --json", ""),
    "fill words": ("fill [LINE] --model run --max-pieces 2 --json", ""),
    "embed": (
        "embed texts.txt --model run --out embed.npy --whiten input --dimensions 16",
        "embed.npy",
    ),
    "embed bf16": ("embed texts.txt --model run --precision bf16 --out bf16.npy", "bf16.npy"),
    "features": ("features texts.txt --model run --layers all --out words", "words"),
    "embed train": (
        "embed train --model run --data classify.csv --text a --text-pair b --batch-size 32 "
        "--threads 2 --precision float32 --out pairs",
        "pairs",
    ),
    "feature tagger": (
        "features ner --data ner --model run --rows last --epochs 2 --out table7",
        "table7",
    ),
    "predict classes": ("predict tuned/classify classify.csv --out classes.jsonl", "classes.jsonl"),
    "predict numbers": ("predict tuned/regress regress.csv --out numbers.jsonl", "numbers.jsonl"),
    "predict labels": ("predict tuned/multilabel multilabel.csv --out sets.jsonl", "sets.jsonl"),
    "predict options": ("predict tuned/choice choice.jsonl --out options.jsonl", "options.jsonl"),
    "predict tags": ("predict tuned/tag tag.conll --out tags.conll", "tags.conll"),
    "predict answers": ("predict tuned/answer squad/dev.json --out found.json", "found.json"),
    "predict entities": ("predict tuned/tag texts.txt --out entities.jsonl", "entities.jsonl"),
    "evaluate": ("evaluate run --held-out store --json", ""),
    "extend vocabulary": ("vocab extend part1.txt --model run --add 20 --out wider", "wider"),
    "extend positions": ("extend-positions run --positions 600 --out longer", "longer"),
    "convert": ("convert tuned/classify converted", "converted"),
}
NOT_NUMBERS = {"step_seconds", "seconds", "time", "written"}


def make_data(work: Path) -> None:
    """Documents of 400 word forms, and labelled data in which one word decides."""
    rng = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(400)]
    odd = ["Zürich", "naïve", "北京市", "서울", "Straße,", "don't", "U.S.", "e.g.", "3.14", "(yes)"]
    common = [1 / (rank + 3) for rank in range(len(words))]

    def sentence(least: int = 5, most: int = 18) -> str:
        chosen = rng.choices(words, common, k=rng.randint(least, most))
        if rng.random() < 0.3:
            chosen[rng.randrange(len(chosen))] = rng.choice(odd)
        return " ".join(chosen).capitalize() + rng.choice(".?!")

    def document() -> str:
        paragraphs = [" ".join(sentence() for _ in range(rng.randint(2, 6))) for _ in range(4)]
        return "\n".join(paragraphs)

    def table(path: str, rows: list[list[str]]) -> None:
        lines = ['"' + '","'.join(row) + '"' for row in [["a", "b", "y"], *rows]]
        (work / path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def records(path: str, rows: list[object]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (work / path).write_text(text, encoding="utf-8")

    for part in range(2):
        text = "\n\n".join(document() for _ in range(200)) + "\n"
        (work / f"part{part}.txt").write_text(text, encoding="utf-8")
    (work / "texts.txt").write_text("".join(f"{sentence()}\n" for _ in range(60)), encoding="utf-8")
    marks = words[:3]
    pairs = [(mark, f"{sentence()} {mark}", sentence()) for mark in marks * 50]
    rng.shuffle(pairs)
    table("classify.csv", [[a, b, "yes" if mark == marks[0] else "no"] for mark, a, b in pairs])
    table("regress.csv", [[a, b, str(marks.index(mark) * 1.7)] for mark, a, b in pairs])
    table(
        "multilabel.csv",
        [[a, b, ",".join(m for m in marks if m in f"{a} {b}".lower())] for _, a, b in pairs],
    )
    table("long.csv", [[f"{a} " + document().replace("\n", " "), b, m] for m, a, b in pairs[:60]])
    records("choice.jsonl", [{"a": a, "options": [m, b], "y": 0} for m, a, b in pairs])
    (work / "ner").mkdir()
    for path, size in (("tag.conll", 120), ("ner/train.txt", 60), ("ner/dev.txt", 30)):
        blocks = []
        for _ in range(size):
            tokens = sentence().split()
            tags = ["B-PER" if token.lower() in words[:6] else "O" for token in tokens]
            columns = (f"{token} {tag}\n" for token, tag in zip(tokens, tags, strict=True))
            blocks.append("".join(columns))
        (work / path).write_text("\n".join(blocks), encoding="utf-8")
    (work / "squad").mkdir()
    for split, size in (("train", 80), ("dev", 30)):
        asked = []
        for number in range(size):
            context = " ".join(sentence() for _ in range(6))
            word = rng.choice(context.split())
            answers = [{"text": word, "answer_start": context.index(word)}] if number % 4 else []
            question = {"id": str(number), "question": f"Where is {word}?", "answers": answers}
            question["is_impossible"] = not answers
            asked.append({"context": context, "qas": [question]})
        data = {"version": "v2.0", "data": [{"title": "t", "paragraphs": asked}]}
        (work / f"squad/{split}.json").write_text(json.dumps(data), encoding="utf-8")


def odd_texts() -> list[str]:
    """Strings of any code points, as a tokenizer may meet them."""
    rng = random.Random(2)
    ranges = [(32, 127), (160, 0x250), (0x300, 0x370), (0x400, 0x500), (0xAC00, 0xAD00)]
    ranges += [(0x3040, 0x3100), (0x4E00, 0x4F00), (0x1F600, 0x1F650), (1, 32), (0x2000, 0x2070)]
    return [
        "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(0, 60)))
        for _ in range(2000)
    ]


def run(words: str, work: Path, ranks: int = 1) -> str:
    """One command line of bertsmith in `work`; its standard output."""
    line = (work / "texts.txt").read_text(encoding="utf-8").split("\n")[0].split()
    mask = " ".join([*line[:2], "[MASK]", *line[3:5], "[MASK]", *line[6:]])
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*start, "bertsmith", *(mask if word == "[LINE]" else word for word in words.split())]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bertsmith {words}: {done.stderr[-2000:]}")
    return done.stdout


def tensors(path: Path) -> Iterator[bytes]:
    """Names, types, shapes and bytes of a safetensors file, in the order of the names."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name in sorted(header.keys() - {"__metadata__"}):
        first, last = header[name]["data_offsets"]
        yield f"{name} {header[name]['dtype']} {header[name]['shape']}".encode()
        yield content[8 + size + first : 8 + size + last]


def values(found: object) -> Iterator[bytes]:
    """Strings and numbers of a JSON value, not the names of its fields."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name not in NOT_NUMBERS:
                yield from values(value)
    elif isinstance(found, list):
        for value in found:
            yield from values(value)
    else:
        yield json.dumps(found).encode()


def losses(path: Path) -> Iterator[bytes]:
    """The losses of a log.jsonl, in their order."""
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        yield from (json.dumps(entry[name]).encode() for name in entry if name == "loss")


def parts(path: Path) -> Iterator[bytes]:
    """What is hashed of a file or folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            is_own = file.suffix in (".safetensors", ".npy", ".bin", ".tokens", ".sentences")
            if file.is_file() and (is_own or file.name in ("vocab.txt", "log.jsonl")):
                yield from parts(file)
    elif path.suffix == ".safetensors":
        yield from tensors(path)
    elif path.name == "log.jsonl":
        yield from losses(path)
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_text(encoding="utf-8")
        for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
            yield from values(json.loads(part))
    else:
        yield path.read_bytes()


def digest(found: Iterator[bytes]) -> str:
    together = hashlib.sha256()
    for part in found:
        together.update(len(part).to_bytes(8, "little") + part)
    return together.hexdigest()


def jobs(work: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, what computes and hashes it), in an order in which each finds what it needs."""

    def of_command(words: str, out: str, ranks: int = 1) -> str:
        printed = run(words, work, ranks)
        return digest(parts(work / out) if out else values(json.loads(printed)))

    def of_ids() -> str:
        from bertsmith import Tokenizer

        encoded = Tokenizer.from_pretrained(work / "vocab").encode_batch(odd_texts())
        return digest(iter([np.asarray(encoded.ids).tobytes()]))

    yield (
        "vocabulary",
        lambda: of_command("vocab part0.txt part1.txt --size 900 --out vocab", "vocab"),
    )
    yield "token ids", of_ids
    yield (
        "store",
        lambda: of_command(
            "corpus part0.txt part1.txt --vocab vocab --held-out 0.1 --out store", "store"
        ),
    )
    for name, (flags, ranks) in PRETRAIN.items():
        out = "run" if name == "mlm+nsp float32" else "runs/" + name.replace(" ", "-")
        words = f"pretrain --corpus store --out {out} {flags}"
        yield name, lambda words=words, out=out, ranks=ranks: of_command(words, out, ranks)
    for name, flags in FINETUNE.items():
        out = "tuned/" + name.replace(" ", "-")
        words = f"finetune {flags} --model run --out {out}"
        yield name, lambda words=words, out=out: of_command(words, out)
    for name, (words, out) in USE.items():
        yield name, lambda words=words, out=out: of_command(words, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    file, hashes = arguments.work / "numbers.json", {}
    if file.exists():
        hashes = json.loads(file.read_text(encoding="utf-8"))
    else:
        arguments.work.mkdir(parents=True)
        make_data(arguments.work)
    for name, compute in jobs(arguments.work):
        if name not in hashes and (not arguments.only or name in arguments.only):
            hashes[name] = compute()
            print(f"{name:28} {hashes[name][:16]}", flush=True)
            file.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
