"""A vector a text; whether the model was trained to tell similar ones; whitening."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bertsmith.checkpoints.model_config import read_extra_config
from bertsmith.files import read_json
from bertsmith.finetuning.sentence_vectors import Pool, check_pool, sentence_vectors, text_features
from bertsmith.inference.predictor import Predictor

FLAT = 1e-9  # a direction with less of the largest variance is rounding, not text

# a folder of sentence-transformers has one of these
THEIR_FILES = ("modules.json", "config_sentence_transformers.json")
THEIR_MODULES = ("Transformer", "BERT", "Pooling", "Dropout", "Normalize")  # need nothing more


@dataclass(frozen=True)
class SimilarityTraining:
    """How a model was trained for similarity, as far as its folder says."""

    pool: str | None
    """mean, cls, or another's way that is not known here, such as max or "mean and max"."""
    max_length: int | None
    unread: tuple[str, ...] = ()
    """Layers behind the pooling, by their types, that are not known here."""


def similarity_training(folder: Path) -> SimilarityTraining | None:
    """Whether a model's vectors were ever trained for similarity; None: nothing says so.

    Such models are those of `bertsmith embed-train` and of sentence-transformers.

    Errors: ValueError for a damaged file.
    """
    extra = read_extra_config(folder)
    if extra.get("trained_for") == "similarity":
        return SimilarityTraining(extra.get("pool"), extra.get("max_length"))
    if not any((folder / name).exists() for name in THEIR_FILES):
        return None
    length = _entries(folder / "sentence_bert_config.json").get("max_seq_length")
    pooling = _entries(folder / "1_Pooling" / "config.json")
    return SimilarityTraining(_pools(pooling) or None, length, _unread_modules(folder))


def _pools(pooling: dict[str, Any]) -> str:
    """The ways of pooling that a file of sentence-transformers names, in its new or its old style;
    the vectors of several stand side by side.

    >>> _pools({"pooling_mode": "cls"}), _pools({"pooling_mode_cls_token": True})
    ('cls', 'cls')
    >>> _pools({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    'mean and max'
    """
    start = "pooling_mode_"
    flags = [name for name, is_on in pooling.items() if name.startswith(start) and is_on]
    old = [name.removeprefix(start).split("_token")[0] for name in flags]
    new = pooling.get("pooling_mode") or old
    return " and ".join([new] if isinstance(new, str) else map(str, new))


def _entries(path: Path) -> dict[str, Any]:
    stored = read_json(path) if path.exists() else {}
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: not a JSON object")
    return stored


def _unread_modules(folder: Path) -> tuple[str, ...]:
    path = folder / "modules.json"
    stored = read_json(path) if path.exists() else []
    if not isinstance(stored, list) or not all(isinstance(module, dict) for module in stored):
        raise ValueError(f"{path}: not a list of JSON objects")
    types = [str(module.get("type")).rpartition(".")[2] for module in stored]
    return tuple(name for name in types if name not in THEIR_MODULES)


@dataclass(frozen=True)
class Reading:
    """How texts become vectors."""

    pool: Pool = "mean"
    max_length: int | None = None
    """Tokens of a text, [CLS] and [SEP] among them; None: all that the model can read."""


def reading_of(folder: Path, pool: Pool | None = None, max_length: int | None = None) -> Reading:
    """What is given, else as the model was trained for similarity, else the mean of all tokens.

    Errors: ValueError for a model trained in a way that is not known here, where no pool is given.
    """
    trained = similarity_training(folder)
    if trained is not None:
        if pool is None and trained.pool not in (None, *get_args(Pool)):
            raise ValueError(
                f"{folder}: its vectors are pooled by {trained.pool}, which is not known here: read"
                " it with sentence-transformers, or otherwise than it was trained with --pool mean"
            )
        pool = pool or ("cls" if trained.pool == "cls" else "mean")
        max_length = max_length or trained.max_length
    return Reading(pool or "mean", max_length)


def warning_of(folder: Path, reading: Reading) -> str | None:
    """What a person should know before trusting similarities of a model; None: nothing."""
    trained = similarity_training(folder)
    if trained is None:
        return (
            f"nothing says that {folder} was ever trained for similarity: the cosines of such "
            "vectors tell little, even those of unrelated texts are high: --whiten them, or train "
            "the model with `bertsmith embed-train`"
        )
    if trained.pool not in (None, reading.pool):
        return f"{folder} was trained with --pool {trained.pool}, but is read with {reading.pool}"
    if trained.unread:
        return (
            f"{folder} has layers behind its pooling that are not read here,"
            f" {', '.join(trained.unread)}: use sentence-transformers for what it was trained for"
        )
    return None


def embed(
    predictor: Predictor,
    texts: Sequence[str],
    reading: Reading,
    on_batch: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, int]:
    """(Vectors float32 [N, H] of N texts, how many texts were cut to the length).

    Errors: ValueError for a length that the model does not have, and as `check_pool`.
    """
    check_pool(reading.pool, predictor.config)
    positions = predictor.config.max_positions
    max_length = positions if reading.max_length is None else reading.max_length
    if not 3 <= max_length <= positions:
        raise ValueError(f"--max-length {max_length}: the model reads 3 to {positions} tokens")
    features = text_features(predictor.tokenizer, texts, max_length)
    encoder, pool = predictor.encoder, reading.pool
    predictor.settle_precision(
        len(features),
        lambda engine, rows: sentence_vectors(encoder, features.of_rows(rows), engine, pool),
    )
    vectors = sentence_vectors(encoder, features, predictor.engine, pool, on_batch)
    return vectors, features.num_truncated


@dataclass(frozen=True)
class Whitening:
    """A linear map after which vectors have mean 0 and the identity as covariance.

    Su et al. 2021 (arXiv 2103.15316), Huang et al. 2021 (arXiv 2104.01767).
    """

    mean: np.ndarray  # float64 [H]
    matrix: np.ndarray  # float64 [H, D]

    @classmethod
    def fit(cls, vectors: np.ndarray, dimensions: int | None = None) -> Whitening:
        """The whitening of vectors [N, H] by their own mean and covariance.

        dimensions  None: all of them, turned back to where they were (ZCA), so that every vector
                    stays as near to what it was as can be; D: the D directions of the largest
                    variance alone (PCA)

        Directions without variance stay 0. Every BERT has one, since what a LayerNorm gives lies in
        a hyperplane, and so do means of it; some have a few more.

        Errors: ValueError as `check`, and for more dimensions than are spanned.
        """
        size = vectors.shape[1]
        cls.check(len(vectors), size, dimensions)
        mean = vectors.mean(axis=0, dtype=np.float64)
        centred = vectors - mean
        variances, directions = np.linalg.eigh(centred.T @ centred / len(vectors))
        order = np.argsort(-variances)  # [H], the largest first
        variances, directions = variances[order], directions[:, order]
        spanned = int((variances > FLAT * variances[0]).sum()) if variances[0] > 0 else 0
        if spanned < (dimensions or 1):
            raise cls._too_few(len(vectors), spanned, dimensions or size)
        kept = dimensions or spanned
        matrix = directions[:, :kept] / np.sqrt(variances[:kept])
        return cls(mean, matrix if dimensions is not None else matrix @ directions[:, :kept].T)

    @classmethod
    def check(cls, texts: int, size: int, dimensions: int | None) -> None:
        """Errors: ValueError for no more texts than directions, more dimensions than there are."""
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"--dimensions {dimensions}: the model's vectors have 1 to {size}")
        if texts <= (dimensions or size):  # their differences from the mean are one fewer
            raise cls._too_few(texts, max(texts - 1, 0), dimensions or size)

    @staticmethod
    def _too_few(texts: int, spanned: int, wanted: int) -> ValueError:
        return ValueError(
            f"whitening: {texts:,} texts span {spanned} of {wanted} directions: give more texts, a"
            " large file with --whitening-from, or fewer --dimensions"
        )

    def apply(self, vectors: np.ndarray) -> np.ndarray:
        """[N, H] -> float32 [N, D]."""
        return ((vectors - self.mean) @ self.matrix).astype(np.float32)
