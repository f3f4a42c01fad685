"""IBM model 1 (Brown et al. 1993, "The Mathematics of Statistical Machine Translation", section 4).

Each word e of a translation comes from one word f of the source, or from none (NULL), wherever it
stands: p(e_1 .. e_T | f_1 .. f_S) is the product over e of the mean over f of p(e | f), f_0 being
NULL. EM finds p(e | f): the E step shares every e among the f of its sentence by p(e | f), the M
step takes what each f got as the new p. The likelihood has no maximum below its highest one, so EM
comes to that from any start.

Translation word for word takes the best e of each f, in the order of the source.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bertsmith.base.files import atomic_file
from bertsmith.experiments.lineage.pairs import Pairs, join, words
from bertsmith.text.tokenizer.rows import concatenated_ranges

ITERATIONS = 10
LEAST = 1e-4  # smaller probabilities are not kept
NULL = ""  # the first of the source words


@dataclass(frozen=True, eq=False)
class WordForWord:
    """p(e | f) of K pairs of words; those that are not there have 0. Words keep their joiners.

    source_words   words f, NULL first
    target_words   words e
    sources        int32 [K], rising: which f
    targets        int32 [K]: which e
    probabilities  float32 [K]
    """

    source_words: np.ndarray
    target_words: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def train(cls, pairs: Pairs, iterations: int = ITERATIONS) -> WordForWord:
        """Run EM from equal probabilities; it takes some 50 bytes for each f of each e."""
        rows = [[NULL, *row] for row in words(pairs.source)], words(pairs.target)
        (source_words, f), (target_words, e) = map(_numbered, rows)
        # Every e meets the f of its sentence one after the other.
        num_sources, num_targets = (np.array([len(row) for row in side]) for side in rows)
        choices = np.repeat(num_sources, num_targets)  # of each e
        begins = np.repeat(np.cumsum(num_sources) - num_sources, num_targets)
        met = f[concatenated_ranges(begins, choices)] * len(target_words) + np.repeat(e, choices)
        cells, cell_of = np.unique(met, return_inverse=True)
        sources, targets = np.divmod(cells, len(target_words))

        probabilities = np.ones(len(cells))
        starts = np.cumsum(choices) - choices
        for _ in range(iterations):
            shares = probabilities[cell_of]
            shares /= np.repeat(np.add.reduceat(shares, starts), choices)
            counts = np.bincount(cell_of, shares)
            probabilities = counts / np.bincount(sources, counts)[sources]
        kept = probabilities >= LEAST
        values = probabilities[kept].astype(np.float32)
        sources, targets = (side[kept].astype(np.int32) for side in (sources, targets))
        return cls(source_words, target_words, sources, targets, values)

    @classmethod
    def open(cls, path: Path) -> WordForWord:
        """Open what `save` wrote. Errors: ValueError for another file; OSError."""
        try:
            with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as arrays:
                return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a word-for-word model, or damaged") from error

    def save(self, path: Path) -> None:
        """Write one npz file."""
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @cached_property
    def table(self) -> dict[str, dict[str, float]]:
        """{f: {e: p(e | f)}}, the likeliest e first."""
        order = np.lexsort((-self.probabilities, self.sources))
        columns = self.source_words[self.sources], self.target_words[self.targets]
        sorted_ = (column[order].tolist() for column in (*columns, self.probabilities))
        table: dict[str, dict[str, float]] = {}
        for f, e, p in zip(*sorted_, strict=True):
            table.setdefault(f, {})[e] = p
        return table

    def translate(self, texts: Sequence[str]) -> list[str]:
        """The likeliest word for each; words that training did not have are copied."""
        return [join([next(iter(self.table.get(f, [f]))) for f in row]) for row in words(texts)]


def _numbered(rows: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words in the order of the text; the number of each word of all rows."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(word, len(numbers)) for row in rows for word in row]
    return np.array([*numbers]), np.array(found)
