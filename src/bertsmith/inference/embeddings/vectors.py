"""Vectors after the model: whitened, or narrowed to int8 and bits.

int8 and bits are those of sentence-transformers' `quantize_embeddings`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bertsmith.base.settings import checked
from bertsmith.inference.embeddings.vector_files import VectorFile

FLAT = 1e-9  # a direction with less of the largest variance is rounding, not text


@dataclass(frozen=True)
class Whitening:
    """A linear map after which vectors have mean 0 and the identity as covariance.

    Su et al. 2021 (arXiv 2103.15316), Huang et al. 2021 (arXiv 2104.01767).
    """

    mean: np.ndarray  # float64 [H]
    matrix: np.ndarray  # float64 [H, D]

    @classmethod
    def fit(
        cls, vectors: np.ndarray | Iterable[np.ndarray], dimensions: int | None = None
    ) -> Whitening:
        """The whitening of vectors [N, H] by their own mean and covariance.

        They may be given in parts [n, H], by what can be iterated twice.

        `dimensions` None: all, turned back to where they were (ZCA), which moves every vector as
        little as can be; D: the D directions of the largest variance alone (PCA). Directions
        without variance stay 0: every BERT has one, since a LayerNorm's outputs, and their means,
        lie in a hyperplane.

        Errors: ValueError as `check`, and for more dimensions than are spanned.
        """
        parts = (vectors,) if isinstance(vectors, np.ndarray) else vectors
        sums = [(len(part), part.sum(axis=0, dtype=np.float64)) for part in parts]
        count, size = sum(number for number, _ in sums), len(sums[0][1])
        cls.check(count, size, dimensions)
        mean, squares = np.sum([total for _, total in sums], axis=0) / count, np.zeros((size, size))
        for part in parts:
            centred = part - mean
            squares += centred.T @ centred
        variances, directions = np.linalg.eigh(squares / count)
        order = np.argsort(-variances)  # [H], the largest first
        variances, directions = variances[order], directions[:, order]
        spanned = int((variances > FLAT * variances[0]).sum()) if variances[0] > 0 else 0
        if spanned < (dimensions or 1):
            raise cls._too_few(count, spanned, dimensions or size)
        kept = dimensions or spanned
        matrix = directions[:, :kept] / np.sqrt(variances[:kept])
        return cls(mean, matrix if dimensions is not None else matrix @ directions[:, :kept].T)

    @classmethod
    def check(cls, texts: int, size: int, dimensions: int | None) -> None:
        """Errors: ValueError for no more texts than directions, more dimensions than there are."""
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"`dimensions={dimensions}`: the model's vectors have 1 to {size}")
        if texts <= (dimensions or size):  # their differences from the mean are one fewer
            raise cls._too_few(texts, max(texts - 1, 0), dimensions or size)

    @staticmethod
    def _too_few(texts: int, spanned: int, wanted: int) -> ValueError:
        return ValueError(
            f"whitening: {texts:,} texts span {spanned} of {wanted} directions: give more texts, "
            "such as a large file to whiten by, or fewer dimensions"
        )

    def apply(self, vectors: np.ndarray) -> np.ndarray:
        """[N, H] -> float32 [N, D]."""
        return ((vectors - self.mean) @ self.matrix).astype(np.float32)


Narrow = Literal["int8", "binary"]
ROWS = 65_536  # narrowed at once


@checked()
def quantize(vectors: np.ndarray, kind: Narrow, ranges: np.ndarray | None = None) -> np.ndarray:
    """Narrow float vectors [N, D] to int8 [N, D], or to bits, int8 [N, ceil(D / 8)].

    int8    a number's place among 256 equal steps from the least to the largest of its dimension,
            less 128; `ranges` [2, D] are these two, see `value_ranges`; None: the vectors' own
    binary  a bit a number, 1 above 0, the first in the highest place of a byte, less 128

    >>> quantize(np.array([[0.0, 2.0], [1.0, 4.0], [0.5, 9.0]]), "int8").tolist()
    [[-128, -128], [126, -56], [-1, 126]]
    >>> quantize(np.array([[0.5, -1.0, 2.0]]), "binary").tolist()
    [[32]]

    Errors: ValueError for other arrays, numbers that are not finite, ranges of another size, and
    int8 of one vector without.
    """
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise ValueError(
            f"vectors of {vectors.dtype} {list(vectors.shape)}: expected floats [N, D]"
        )
    if not (finite := np.isfinite(vectors)).all():
        row = int(finite.all(axis=1).argmin())
        raise ValueError(f"vectors: row {row} holds NaN or infinity: leave it out")
    if kind == "binary":
        return (np.packbits(vectors > 0, axis=1) ^ 0x80).view(np.int8)
    check_ranges(ranges, vectors.shape[1], len(vectors))
    ranges = value_ranges(vectors) if ranges is None else ranges
    least, largest = ranges.astype(np.float32, copy=False)
    steps = (largest - least) / 255
    steps = np.where(steps == 0, 1, steps)
    result = np.empty(vectors.shape, np.int8)
    for start in range(0, len(vectors), ROWS):
        part = np.floor((vectors[start : start + ROWS] - least) / steps)
        result[start : start + ROWS] = np.clip(part, 0, 255) - 128
    return result


def value_ranges(vectors: np.ndarray) -> np.ndarray:
    """The least and the largest value of each dimension, [2, D].

    >>> value_ranges(np.array([[1.0, 5.0], [3.0, 4.0]])).tolist()
    [[1.0, 4.0], [3.0, 5.0]]
    """
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def read_ranges(path: Path) -> np.ndarray:
    """A .npy that `value_ranges` gave. Errors: ValueError for another file."""
    file = VectorFile.open(path)
    if file.rows != 2:
        raise ValueError(f"{path}: {file.rows} rows: ranges are 2, the least and largest values")
    return np.load(path)


def check_ranges(ranges: np.ndarray | None, size: int, count: int) -> None:
    """Refuse (ValueError) ranges of another size, and none (None) where there are few vectors."""
    if ranges is None:
        if count < 2:
            raise ValueError("int8: the ranges of one vector say nothing: give `ranges` of many")
    elif ranges.shape != (2, size) or not np.isfinite(ranges).all():
        raise ValueError(
            f"ranges {list(ranges.shape)}: expected the least and the largest value, finite, of"
            f" each of {size} dimensions, [2, {size}]"
        )
