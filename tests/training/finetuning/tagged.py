"""A made-up language for taggers: names are told by the word, and sometimes by the one before."""

from pathlib import Path

import numpy as np

from ... import tiny

PEOPLE, PLACES = ("ann", "bob", "carl"), ("rome", "oslo", "lima")
OTHERS = ("sees", "the", "old", "house", "today", "again", "near")


def columns(count: int, seed: int, scheme: str = "IOB1") -> str:
    """Documents of three sentences in CoNLL columns."""
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        if number % 3 == 0:
            lines += ["-DOCSTART- -X- O", ""]
        for _ in range(random.integers(2, 6)):
            kind = random.integers(0, 4)
            if kind == 0:
                first, inside = {"IOB1": "II", "IOB2": "BI", "BIOES": "BE"}[scheme]
                lines += [f"{random.choice(PEOPLE)} N {first}-PER", f"rossi N {inside}-PER"]
            elif kind == 1:
                letter = {"IOB1": "I", "IOB2": "B", "BIOES": "S"}[scheme]
                lines.append(f"{random.choice(PLACES)} N {letter}-LOC")
            # so that no two names touch
            lines.append(f"{random.choice(OTHERS)} X O")
        lines.append("")
    return "\n".join(lines) + "\n"


def write_corpus(folder: Path, scheme: str = "IOB1", train: int = 60) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", train, 1), ("dev", 15, 2), ("test", 15, 3)):
        (folder / f"{split}.conll").write_text(columns(count, seed, scheme), encoding="utf-8")
    return folder


def write_model(folder: Path, size: str = "1x64") -> Path:
    return tiny.write_model(folder, [*PEOPLE, *PLACES, *OTHERS, "rossi"], size)
