"""A vector a text; how its model was trained for similarity, if it was; whitening."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

import numpy as np

from bertsmith.base.files import read_json, read_json_object
from bertsmith.checkpoints.config_json import read_config, read_extra_config
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.hidden_states import (
    Pool,
    check_pool,
    sentence_vectors,
    text_features,
    unit_length,
)

if TYPE_CHECKING:
    from bertsmith.inference.engines.precision import Compute
    from bertsmith.model.config import ModelConfig
    from bertsmith.model.encoder import Encoder
    from bertsmith.training.engine import Engine


class TextModel(Protocol):
    """The part of a `Predictor` that vectors of texts and words need."""

    folder: Path
    engine: Engine
    config: ModelConfig
    tokenizer: Tokenizer

    @cached_property
    def encoder(self) -> Encoder: ...
    def resolve_precision(self, count: int, compute: Compute, /) -> None: ...


@dataclass(frozen=True)
class PoolingSettings:
    """The way from texts to vectors."""

    pool: Pool = "mean"
    max_length: int | None = None
    """Tokens of a text, [CLS] and [SEP] among them; None: all that the model can read."""
    prompt: str = ""
    """The text before every text."""
    pools_prompt: bool = True
    """The vector of a text is also that of its prompt."""
    normalize: bool = False
    """Vectors have length 1."""
    lowercase: bool = False
    """Texts are lower-cased, whatever the tokenizer does."""

    def __str__(self) -> str:
        """
        >>> print(PoolingSettings("cls", 128, "query: ", normalize=True))
        the vector at [CLS], of at most 128 tokens, 'query: ' before every text, length 1
        """
        of = {"mean": "the mean of the tokens", "max": "the largest values of the tokens"}
        aside = "" if self.pools_prompt else " but not in the vector"
        parts = {
            of.get(self.pool, "the vector at [CLS]"): True,
            f"of at most {self.max_length} tokens": self.max_length is not None,
            f"{self.prompt!r} before every text{aside}": self.prompt,
            "lower-cased": self.lowercase,
            "length 1": self.normalize,
        }
        return ", ".join(part for part, is_so in parts.items() if is_so)


def embed(
    model: TextModel,
    texts: Sequence[str],
    pooling: PoolingSettings,
    on_batch: Callable[[int], None] | None = None,
    engine: Engine | None = None,
) -> tuple[np.ndarray, int]:
    """(Vectors float32 [N, H] of N texts, how many were cut to the length). `engine`: the model's.

    Errors: ValueError for a length that the model does not have or that the prompt fills, and as
    `check_pool`.
    """
    check_pool(pooling.pool, model.config)
    positions, tokenizer, prompt = model.config.max_positions, model.tokenizer, pooling.prompt
    max_length = positions if pooling.max_length is None else pooling.max_length
    if not 3 <= max_length <= positions:
        raise ValueError(f"`max_length={max_length}`: the model reads 3 to {positions} tokens")
    if pooling.lowercase and not tokenizer.normalization.lowercase:
        lower = replace(tokenizer.normalization, lowercase=True)
        tokenizer = Tokenizer(tokenizer.vocabulary, lower)
    prompt_length = 1 + len(tokenizer.encode_batch([prompt], offsets=False).ids)  # [CLS]
    if prompt_length + 2 > max_length:
        raise ValueError(
            f"`max_length={max_length}`: the prompt {prompt!r:.40} leaves no room for a text:"
            " shorten it, or raise the length"
        )
    features = text_features(tokenizer, [prompt + text for text in texts], max_length)
    skip = 0 if pooling.pools_prompt or not prompt else prompt_length
    vectors = sentence_vectors(
        model.encoder, features, engine or model.engine, pooling.pool, on_batch, skip=skip
    )
    return unit_length(vectors) if pooling.normalize else vectors, features.num_truncated


def resolve_precision(model: TextModel, texts: Sequence[str], pooling: PoolingSettings) -> None:
    """`Predictor.resolve_precision` by the vectors of some of the texts."""

    def vectors(engine: Engine, rows: np.ndarray) -> np.ndarray:
        return embed(model, [texts[int(k)] for k in rows], pooling, engine=engine)[0]

    model.resolve_precision(len(texts), vectors)


def pooling_settings(
    folder: Path,
    pool: Pool | None = None,
    max_length: int | None = None,
    prompt: str | None = None,
    normalize: bool | None = None,
) -> PoolingSettings:
    """The pooling given, else as the model was trained for similarity, else the mean of all tokens.

    Errors: ValueError for a model trained in a way that is not known here, where no pool is given.
    """
    trained = similarity_training(folder) or SimilarityTraining()
    if pool is None:
        unknown = None
        if trained.pool not in (None, *get_args(Pool)):
            unknown = f"pooled by {trained.pool}"
        elif trained.unread:
            unknown = f"made by layers after the pooling ({', '.join(trained.unread)})"
        if unknown:
            raise ValueError(
                f"{folder}: its vectors are {unknown}, which is not known here: read it with"
                " sentence-transformers, or otherwise than it was trained with `pool='mean'`"
            )
        pool = cast(Pool, trained.pool or "mean")
    return PoolingSettings(
        pool,
        max_length or trained.max_length,
        trained.prompt if prompt is None else prompt,
        trained.pools_prompt,
        trained.normalize if normalize is None else normalize,
        trained.lowercase,
    )


def pooling_warning(folder: Path, pooling: PoolingSettings) -> str | None:
    """A warning before similarities of a model are trusted; None: nothing speaks against them."""
    trained = similarity_training(folder)
    if trained is None:
        return (
            f"nothing says that {folder} was ever trained for similarity: the cosines of such "
            "vectors tell little, even those of unrelated texts are high: whiten them, or train "
            "the model with `bertsmith embed train`"
        )
    if trained.pool not in (None, pooling.pool):
        return f"{folder} was trained with {trained.pool} pooling, but is read with {pooling.pool}"
    if trained.unread:
        return (
            f"{folder} has layers after its pooling that are not read here,"
            f" {', '.join(trained.unread)}: use sentence-transformers for what it was trained for"
        )
    return None


# a folder of sentence-transformers has one of these
THEIR_FILES = ("modules.json", "config_sentence_transformers.json")
THEIR_MODULES = ("Transformer", "BERT", "Pooling", "Dropout", "Normalize")  # those read here


@dataclass(frozen=True)
class SimilarityTraining(PoolingSettings):
    """A model's training for similarity, as far as its folder tells."""

    pool: str | None = None
    """mean, cls, max, or another's way that is not known here, such as "mean and max"."""
    unread: tuple[str, ...] = ()
    """Layers after the pooling, by their types, that are not known here."""


def similarity_training(folder: Path) -> SimilarityTraining | None:
    """The training of a model's vectors for similarity; None: nothing tells of one.

    Such models are those of `bertsmith embed train` and of sentence-transformers.

    Errors: ValueError for a damaged file.
    """
    extra = read_extra_config(folder)
    if extra.get("trained_for") == "similarity":
        return SimilarityTraining(extra.get("pool"), extra.get("max_length"))
    if not any((folder / name).exists() for name in THEIR_FILES):
        return None
    transformer = _entries(folder / "sentence_bert_config.json")
    path = folder / "modules.json"
    modules = read_json(path) if path.exists() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path}: not a list of JSON objects")
    paths = {
        str(module.get("type")).rpartition(".")[2]: str(module.get("path")) for module in modules
    }
    pooling = _entries(folder / paths.get("Pooling", "1_Pooling") / "config.json")
    length = transformer.get("max_seq_length")
    if length is None:
        length = _entries(folder / "tokenizer_config.json").get("model_max_length")
    if length is not None and length >= read_config(folder).max_positions:
        length = None  # no fewer tokens than the model can read
    path = folder / "config_sentence_transformers.json"
    stored = _entries(path)
    name, prompts = stored.get("default_prompt_name"), stored.get("prompts") or {}
    if name is not None and name not in prompts:
        raise ValueError(f"{path}: default_prompt_name '{name}' is none of its prompts")
    return SimilarityTraining(
        _pools(pooling) or None,
        length,
        prompts.get(name) or "",
        pooling.get("include_prompt", True),
        "Normalize" in paths,
        bool(transformer.get("do_lower_case")),
        tuple(name for name in paths if name not in THEIR_MODULES),
    )


def _pools(pooling: dict[str, Any]) -> str:
    """The ways of pooling that a file of sentence-transformers names, in its new or old style.

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
    return read_json_object(path) if path.exists() else {}


FLAT = 1e-9  # a direction with less of the largest variance is rounding, not text


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

        `dimensions` None: all, turned back to where they were (ZCA), which moves every vector as
        little as can be; D: the D directions of the largest variance alone (PCA). Directions
        without variance stay 0: every BERT has one, since a LayerNorm's outputs, and their means,
        lie in a hyperplane.

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
