"""The way from hidden states to a vector: as asked for, else as the model's folder says.

Folders of sentence-transformers, which `bertsmith embed train` writes too, say it in these files:

    modules.json                        the modules in their order, each with its folder
    1_Pooling/config.json               the pooling
    2_Dense/config.json, *.safetensors  a linear layer behind it; there may be several
    sentence_bert_config.json           length, lower-casing
    config_sentence_transformers.json   prompts by name, the default one, dimensions
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from bertsmith.base.files import read_json, read_optional_json
from bertsmith.base.settings import nearest
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.stored import WEIGHTS, stored_tensors
from bertsmith.inference.engines.native import Head, head_linear, head_outputs
from bertsmith.tasks.metrics import sigmoid
from bertsmith.tasks.vectors import Pool
from bertsmith.text.tokenizer.files import TOKENIZER_CONFIG

LongTexts = Literal["cut", "windows"]


@dataclass(frozen=True)
class PoolingSettings:
    """The way from texts to vectors."""

    pool: Pool = "mean"
    max_length: int | None = None
    """Tokens of a row, [CLS] and [SEP] among them; None: all that the model can read."""
    prompt: str = ""
    """The text before every text."""
    pools_prompt: bool = True
    """The vector of a text is also that of its prompt."""
    normalize: bool = False
    """Vectors have length 1."""
    lowercase: bool = False
    """Texts are lower-cased, whatever the tokenizer does."""
    dense: tuple[Dense, ...] = ()
    """Linear layers behind the pooling, in their order."""
    dimensions: int | None = None
    """Vectors keep their first numbers, so many, before they are given length 1."""
    long_texts: LongTexts = "cut"
    """Longer texts keep their head, or are read in windows whose vectors become one."""

    def __str__(self) -> str:
        """
        >>> print(PoolingSettings("cls", 128, "query: ", normalize=True))
        the vector at [CLS], of at most 128 tokens, 'query: ' before every text, length 1
        """
        of = {
            "mean": "the mean of the tokens",
            "max": "the largest values of the tokens",
            "mean_sqrt_len": "the sum of the tokens over the root of their number",
        }
        aside = "" if self.pools_prompt else " but not in the vector"
        unit = "a window" if self.long_texts == "windows" else ""
        parts = {
            of.get(self.pool, "the vector at [CLS]"): True,
            f"of at most {self.max_length} tokens {unit}".rstrip(): self.max_length is not None,
            "in windows": unit and self.max_length is None,
            f"{self.prompt!r} before every text{aside}": self.prompt,
            "lower-cased": self.lowercase,
            "through " + ", ".join(layer.folder.name for layer in self.dense): self.dense,
            f"the first {self.dimensions} numbers": self.dimensions is not None,
            "length 1": self.normalize,
        }
        return ", ".join(part for part, is_so in parts.items() if is_so)

    def size(self, hidden_size: int) -> int:
        """Numbers of a vector. Errors: ValueError for more `dimensions` than there are."""
        size = self.dense[-1].sizes[1] if self.dense else hidden_size
        if self.dimensions is None:
            return size
        if not 1 <= self.dimensions <= size:
            raise ValueError(
                f"`dimensions={self.dimensions}`: the model's vectors have 1 to {size}"
            )
        return self.dimensions


def pooling_settings(
    of: Path | SimilarityTraining,
    pool: Pool | None = None,
    max_length: int | None = None,
    prompt: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    long_texts: LongTexts = "cut",
) -> PoolingSettings:
    """The pooling given, else as the model was trained for similarity, else the mean of all tokens.

    `of`: a model's folder, or what `training_of` read in it before. `prompt`: the name of one of
    its prompts, or the text itself, which is no bare word.

    Errors: ValueError for a model trained in a way that is not known here, where no pool is given;
    for an unknown name of a prompt or way to read long texts.
    """
    trained = of if isinstance(of, SimilarityTraining) else training_of(of)
    folder = trained.folder
    if long_texts not in get_args(LongTexts):
        raise ValueError(f"`long_texts={long_texts!r}`: known are {', '.join(get_args(LongTexts))}")
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
        trained.max_length if max_length is None else max_length,
        trained.prompt if prompt is None else _prompt_text(prompt, trained.prompts, folder),
        trained.pools_prompt,
        trained.normalize if normalize is None else normalize,
        trained.lowercase,
        trained.dense,
        trained.dimensions if dimensions is None else dimensions,
        long_texts,
    )


def _prompt_text(given: str, prompts: dict[str, str], folder: Path) -> str:
    if given in prompts or not re.fullmatch(r"[A-Za-z0-9_-]+", given):
        return prompts.get(given, given)
    hint = nearest(given, prompts) if prompts else "it has none"
    raise ValueError(
        f"`prompt={given!r}`: no prompt of {folder} has this name ({hint}); a text of your own has"
        " a blank or sign at its end, such as 'query: '"
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


PROMPTS_FILE = "config_sentence_transformers.json"
THEIR_FILES = ("modules.json", PROMPTS_FILE)  # a folder of sentence-transformers has one of these
BEFORE_POOLING = ("Transformer", "BERT", "Pooling", "Dropout")
VECTOR = "sentence_embedding"  # what a module reads and writes, where its config.json does not say


@dataclass(frozen=True)
class SimilarityTraining(PoolingSettings):
    """A model's training for similarity, as far as its folder tells."""

    pool: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `Pool`, or another's way that is not known here, such as "mean and max"."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Prompts by name."""
    unread: tuple[str, ...] = ()
    """Layers after the pooling, by their types, that are not known here."""
    folder: Path = field(default=Path(), compare=False)


def training_of(folder: Path) -> SimilarityTraining:
    """`similarity_training`, or one without settings where nothing tells of any."""
    return similarity_training(folder) or SimilarityTraining(folder=folder)


def similarity_training(folder: Path) -> SimilarityTraining | None:
    """The training of a model's vectors for similarity; None: nothing tells of one.

    Errors: ValueError for a damaged file.
    """
    prompts_file = folder / PROMPTS_FILE
    stored = read_optional_json(prompts_file)
    is_theirs = any((folder / name).exists() for name in THEIR_FILES)
    if not is_theirs or stored.get("model_type") == "CrossEncoder":
        return None
    transformer = read_optional_json(folder / "sentence_bert_config.json")
    modules = _modules(folder)
    place = next((path for kind, path in modules if kind == "Pooling"), folder / "1_Pooling")
    pooling = read_optional_json(place / "config.json")
    length = transformer.get("max_seq_length")
    if length is None:
        length = read_optional_json(folder / TOKENIZER_CONFIG).get("model_max_length")
    if length is not None and length >= read_config(folder).max_positions:
        length = None  # no fewer tokens than the model can read
    name, prompts = stored.get("default_prompt_name"), stored.get("prompts") or {}
    if name is not None and name not in prompts:
        raise ValueError(f"{prompts_file}: default_prompt_name '{name}' is none of its prompts")
    dense, unread = [], []
    after = [(kind, path) for kind, path in modules if kind not in BEFORE_POOLING]
    normalize = bool(after) and after[-1][0] == "Normalize"
    for kind, path in after[: len(after) - normalize]:
        layer = Dense(path, read_optional_json(path / "config.json")) if kind == "Dense" else None
        (dense.append(layer) if layer and layer.is_known else unread.append(kind))
    dimensions = stored.get("truncate_dim")
    if dimensions is not None:
        if not (isinstance(dimensions, int) and dimensions >= 1):
            raise ValueError(f"{prompts_file}: truncate_dim {dimensions!r} is not 1 or more")
        size = dense[-1].sizes[1] if dense and not unread else read_config(folder).hidden_size
        dimensions = dimensions if dimensions < size else None  # all, as that library does
    return SimilarityTraining(
        _pools(pooling) or None,
        length,
        prompts.get(name) or "",
        pooling.get("include_prompt", True),
        normalize,
        bool(transformer.get("do_lower_case")),
        () if unread else tuple(dense),
        dimensions,
        prompts=prompts,
        unread=tuple(unread),
        folder=folder,
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The type and folder of each module, in their order. Errors: ValueError."""
    path = folder / "modules.json"
    modules = read_json(path) if path.exists() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path}: not a list of JSON objects")
    found = []
    for module in modules:
        place = str(module.get("path", ""))
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ValueError(f"{path}: '{place}' is no folder beside it")
        found.append((str(module.get("type")).rpartition(".")[2], folder / place))
    return found


def _pools(pooling: dict[str, Any]) -> str:
    """The ways of pooling that a file of sentence-transformers names, in its new or old style.

    >>> _pools({"pooling_mode": "cls"}), _pools({"pooling_mode_cls_token": True})
    ('cls', 'cls')
    >>> _pools({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    'mean and max'
    >>> _pools({"pooling_mode": "mean_sqrt_len_tokens"})
    'mean_sqrt_len'
    """
    start = "pooling_mode_"
    flags = [name for name, is_on in pooling.items() if name.startswith(start) and is_on]
    old = [name.removeprefix(start).split("_token")[0] for name in flags]
    new = pooling.get("pooling_mode") or old
    names = [new] if isinstance(new, str) else map(str, new)
    return " and ".join(name.removesuffix("_tokens") for name in names)


_erf = np.vectorize(math.erf, otypes=[np.float32])
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of torch.nn, by its last part
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "Sigmoid": sigmoid,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * (0.5 + 0.5 * _erf(x / math.sqrt(2))),
    "SiLU": lambda x: x * sigmoid(x),
}


@dataclass(frozen=True)
class Dense:
    """A Dense module: a linear layer with a function behind it."""

    folder: Path
    settings: dict[str, Any] = field(compare=False, repr=False)
    """Its config.json."""
    layers: dict[str, Head] | None = field(default=None, compare=False, repr=False)
    """Its "linear" layer, and perhaps that of its "residual"; None: they are read whenever they are
    needed."""

    @property
    def is_known(self) -> bool:
        """False where it does not turn vectors into vectors, or by another function."""
        names = (self.settings.get(f"module_{way}_name") or VECTOR for way in ("input", "output"))
        return self.activation in ACTIVATIONS and all(name == VECTOR for name in names)

    @property
    def activation(self) -> str:
        name = str(self.settings.get("activation_function") or "torch.nn.modules.activation.Tanh")
        return name.rpartition(".")[2] if name.startswith("torch.nn.") else name

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of the vectors that it takes and gives."""
        sizes = self.settings.get("in_features"), self.settings.get("out_features")
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            path = self.folder / "config.json"
            raise ValueError(f"{path}: in_features and out_features are not numbers of 1 or more")
        return cast(tuple[int, int], sizes)

    def in_memory(self) -> Dense:
        """The same, whose files may change. Errors: ValueError for files that do not fit one
        another."""
        path, (taken, given) = self.folder / WEIGHTS, self.sizes
        if not path.exists():
            raise ValueError(
                f"{path}: no such file; pickled weights are never opened, since they can run any"
                " program: save the model again with sentence-transformers"
            )
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (given, taken)}
        if self.settings.get("bias", True):
            wanted["linear.bias"] = (given,)
        if self.settings.get("use_residual", False) and taken != given:
            wanted["residual.weight"] = (given, taken)
        stored = stored_tensors(path)
        if (found := {tensor.name: tensor.shape for tensor in stored}) != wanted:
            raise ValueError(f"{path}: has {found}, but by config.json it should have {wanted}")
        tensors, no_bias = {one.name: one.array() for one in stored}, np.zeros(given, np.float32)
        layers = {
            name: head_linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias", no_bias))
            for name in ("linear", "residual")
            if f"{name}.weight" in tensors
        }
        return replace(self, layers=layers)


def apply_dense(layer: Dense, vectors: np.ndarray) -> np.ndarray:
    """Vectors float32 [N, I] through a Dense module: [N, O].

    Errors: ValueError for a module of another size, and as `Dense.in_memory`.
    """
    taken, given = layer.sizes
    if taken != vectors.shape[1]:
        raise ValueError(
            f"{layer.folder}: takes vectors of {taken}, but gets {vectors.shape[1]} numbers"
        )
    layers = layer.layers or layer.in_memory().layers
    assert layers is not None
    # not NumPy's product, whose bits depend on the number of rows
    y = ACTIVATIONS[layer.activation](head_outputs(layers["linear"], vectors))
    if layer.settings.get("use_residual", False):
        y += head_outputs(layers["residual"], vectors) if taken != given else vectors
    return y
