"""A folder with a vector for every word of some texts, read without being loaded.

vectors.npy     float16 [R, ...]: a row a word, or a piece; memory-mapped
boundaries.npy  int64 [N + 1]: text k has the rows boundaries[k]:boundaries[k + 1]
word_ids.npy    int32 [R], where a row is a piece: the number of its word in the text
words.jsonl     the words of each text, a list a line
index.json      where all this came from; written last
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.files import read_json, write_json

FORMAT = 1
INDEX, VECTORS, BOUNDARIES = "index.json", "vectors.npy", "boundaries.npy"
WORD_IDS, WORDS = "word_ids.npy", "words.jsonl"


@dataclass(frozen=True, eq=False)
class WordVectors:
    """The vectors of N texts; those of text k are `[k]`, read from the disk when they are used."""

    folder: Path
    vectors: np.ndarray  # float16 [R, H], [R, layers * H] or, each layer by itself, [R, layers, H]
    boundaries: np.ndarray  # int64 [N + 1]
    word_ids: np.ndarray | None  # int32 [R] where a row is a piece; None where it is a word
    description: dict[str, Any]  # index.json: model, layers, pool, align, source, ...

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __getitem__(self, k: int) -> np.ndarray:
        """The rows of text k, as a view. Errors: IndexError."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"text {k} of {len(self)}")
        return self.vectors[self.boundaries[k % len(self)] : self.boundaries[k % len(self) + 1]]

    @functools.cached_property
    def words(self) -> list[list[str]]:
        """The words of each text; row by row those of `vectors`, unless a row is a piece."""
        with (self.folder / WORDS).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def open_features(folder: Path | str) -> WordVectors:
    """Open what `bertsmith features` wrote; at once, however large it is.

    Errors: ValueError that names a folder or file which is not one of features, or is damaged.
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder}: no {INDEX}, so not a folder of `bertsmith features`")
    description = read_json(folder / INDEX)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{folder / INDEX}: not of format {FORMAT}, which this bertsmith reads")
    vectors, boundaries = _load(folder / VECTORS), _load(folder / BOUNDARIES)
    word_ids = _load(folder / WORD_IDS) if description["align"] == "pieces" else None
    if boundaries[-1] != len(vectors) or (word_ids is not None and len(word_ids) != len(vectors)):
        raise ValueError(f"{folder}: its files do not fit one another: extract the features again")
    return WordVectors(folder, vectors, boundaries, word_ids, description)


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:  # cut short, or no such file at all
        raise ValueError(f"{path}: damaged ({error}): extract the features again") from error


def write_index(
    folder: Path,
    words: Sequence[Sequence[str]],
    boundaries: np.ndarray,
    word_ids: np.ndarray | None,
    description: dict[str, Any],
) -> None:
    """All but the vectors."""
    np.save(folder / BOUNDARIES, boundaries)
    if word_ids is not None:
        np.save(folder / WORD_IDS, word_ids)
    with (folder / WORDS).open("w", encoding="utf-8", newline="") as file:
        file.writelines(json.dumps(text) + "\n" for text in words)
    write_json(folder / INDEX, {"format": FORMAT, **description})
