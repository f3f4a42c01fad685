"""The configuration of a model, its named sizes, and the FLOPs of a training step.

The sizes are named as in the paper (section 3) and in Turc et al. 2019. Without torch, so that the
command line may read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

from bertsmith.base.settings import (
    Bounds,
    Fraction,
    NotNegative,
    Positive,
    PositiveFraction,
    check_bounds,
)

SIZES = {  # name: (layers, hidden size); head size is 64, intermediate size 4 H (gated: 8/3 H)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}

# far above any model: a damaged config.json must not ask for the memory
Size = Bounds("must be 1 to 10,000,000", minimum=1, maximum=10_000_000)
SizeOrNone = Bounds("must be 0 to 10,000,000", minimum=0, maximum=10_000_000)
RELATIVES = {  # BERT's layers, other borders
    "distilbert": "DistilBERT",
    "electra": "ELECTRA",
    "gpt": "GPT",
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the shape and arithmetic of a model; defaults: the paper's BASE."""

    is_frozen = False
    """True: fine-tuning trains a head alone, over the layers as they are."""
    length_scale = 1
    """Tokens of a row where a BERT reads one: what lengths in tokens are multiplied with."""

    vocab_size: Annotated[int, Size]
    hidden_size: Annotated[int, Size] = 768
    num_layers: Annotated[int, Size] = 12
    num_heads: Annotated[int, Size] = 12
    intermediate_size: Annotated[int, Size] = 3072
    max_positions: Annotated[int, Size] = 512
    type_vocab_size: Annotated[int, SizeOrNone] = 2  # 0: segments are not told apart
    dropout: Annotated[float, Fraction] = 0.1
    attention_dropout: Annotated[float, Fraction] = 0.1
    activation: str = "gelu"  # erf; or "gelu_tanh", google-research/bert's approximation
    layer_norm_eps: Annotated[float, PositiveFraction] = 1e-12
    initializer_range: Annotated[float, NotNegative] = 0.02
    pad_id: int = 0
    causal: bool = False  # a position sees itself and what is left of it (the paper's LTR, GPT)
    directions: int = 1  # 2: one more reads right to left; each has half of the sizes (ELMo's way)
    bilstm: bool = False  # between the encoder and a task's head (paper section 5.1)
    pre_norm: bool = False  # LayerNorm before each sublayer, not after its residual; one at the end
    gated: bool = False  # GeGLU (Shazeer 2020, arXiv 2002.05202): activation(gate(x)) * up(x)
    family: str = "bert"  # or a key of RELATIVES
    embedding_size: Annotated[int | None, Size] = None  # ELECTRA's; None: the hidden size

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.hidden_size % self.num_heads:
            size, heads = self.hidden_size, self.num_heads
            raise ValueError(f"hidden_size {size} is not a multiple of num_heads {heads}")
        if not 0 <= self.pad_id < self.vocab_size:
            raise ValueError(f"pad_id {self.pad_id} is none of {self.vocab_size} pieces")
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"activation {self.activation!r}: known are 'gelu' and 'gelu_tanh'")
        if self.family not in ("bert", *RELATIVES):
            known = ", ".join(RELATIVES)
            raise ValueError(f"family {self.family!r}: known are bert, {known}")
        if (self.type_vocab_size == 0) != (self.family in ("distilbert", "gpt")):
            raise ValueError(f"type_vocab_size {self.type_vocab_size} for {self.family}")
        if self.family == "gpt" and not self.causal:
            raise ValueError("causal False: a gpt reads from left to right")
        own = {"bert": ("causal", "pre_norm", "gated"), "gpt": ("causal",)}.get(self.family, ())
        options = [name for name in ("causal", "pre_norm", "gated") if getattr(self, name)]
        if options := [name for name in options if name not in own]:
            raise ValueError(f"{' and '.join(options)}: BERT has that, {self.family} has not")
        halved = self.hidden_size, self.num_heads, self.intermediate_size
        if self.directions not in (1, 2):
            raise ValueError(f"directions {self.directions}: known are 1 and 2")
        if self.bilstm and self.hidden_size % 2:
            raise ValueError(f"bilstm: hidden_size {self.hidden_size} has no half")
        if self.directions == 2 and (not self.causal or any(size % 2 for size in halved)):
            raise ValueError(f"directions 2: not for causal {self.causal} and sizes {halved}")

    @property
    def table_size(self) -> int:
        """Numbers in a row of the token, position and segment embeddings."""
        return self.embedding_size or self.hidden_size // self.directions

    @property
    def one_direction(self) -> ModelConfig:
        """The configuration of each of the two directions; of another model its own."""
        sizes = "hidden_size", "num_heads", "intermediate_size"
        halves = {name: getattr(self, name) // self.directions for name in sizes}
        return replace(self, directions=1, **halves)


@dataclass(frozen=True)
class ElmoConfig(ModelConfig):
    """An ELMo (Peters et al. 2018); defaults: the released "original", 93.6 million parameters.

    Its tokens are bytes. `hidden_size` is that of both directions side by side, `intermediate_size`
    of an LSTM's cells, `embedding_size` of a byte's vector. Fields that are not here have no use.
    """

    is_frozen = True
    length_scale = 6  # bytes, with the end of a word

    vocab_size: Annotated[int, Size] = 262
    hidden_size: Annotated[int, Size] = 1024
    num_layers: Annotated[int, Size] = 2
    num_heads: Annotated[int, Size] = 1
    intermediate_size: Annotated[int, Size] = 4096
    max_positions: Annotated[int, Size] = 1_000_000  # there is no table of them
    attention_dropout: Annotated[float, Fraction] = 0.0
    initializer_range: Annotated[float, NotNegative] = 0.05
    family: str = "elmo"
    embedding_size: Annotated[int | None, Size] = 16
    filters: Annotated[tuple[int, ...], SizeOrNone] = (32, 32, 64, 128, 256, 512, 1024)
    """The number of those that are 1, 2, 3 ... bytes wide."""
    num_highways: Annotated[int, SizeOrNone] = 2
    cell_clip: Annotated[float, Positive] = 3.0
    projection_clip: Annotated[float, Positive] = 3.0
    skip_connections: bool = True  # a layer's input is added to its output, but for the first

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.family != "elmo" or self.hidden_size % 2 or not sum(self.filters):
            raise ValueError(
                f"family {self.family!r}, hidden_size {self.hidden_size}, filters {self.filters}: "
                "an elmo has two directions of one size, and filters"
            )

    @property
    def projection_size(self) -> int:
        """Size of a word's vector, and of the output of a direction of a layer."""
        return self.hidden_size // 2


ELMO_SIZES = {  # of the released models; all have the same filters
    "small": ElmoConfig(hidden_size=256, intermediate_size=1024, num_highways=1),
    "medium": ElmoConfig(hidden_size=512, intermediate_size=2048, num_highways=1),
    "original": ElmoConfig(),
}


def elmo_config(size: str) -> ElmoConfig:
    """The configuration of a named size or of "PROJECTIONxCELLS", whose filters are in proportion.

    >>> elmo_config("64x256").filters, elmo_config("small").hidden_size
    ((4, 4, 8, 16, 32, 64, 128), 256)

    Errors: ValueError for an unknown size.
    """
    if size in ELMO_SIZES:
        return ELMO_SIZES[size]
    if not (shape := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,5})", size)):
        raise ValueError(
            f"unknown size '{size}': known are {', '.join(ELMO_SIZES)} and PROJECTIONxCELLS such "
            "as 64x256"
        )
    projection, cells = int(shape[1]), int(shape[2])
    largest = ELMO_SIZES["original"]
    filters = tuple(-(-count * projection // largest.projection_size) for count in largest.filters)
    return ElmoConfig(
        hidden_size=2 * projection, intermediate_size=cells, num_highways=1, filters=filters
    )


def layers_hidden_heads(size: str) -> tuple[int, int, int]:
    """Number of layers, hidden size and number of heads, a head for each 64 of the hidden size
    where none is given, of a named size, "LAYERSxHIDDEN" or "LAYERSxHIDDENxHEADS".

    >>> layers_hidden_heads("base"), layers_hidden_heads("6x384"), layers_hidden_heads("6x768x3")
    ((12, 768, 12), (6, 384, 6), (6, 768, 3))
    """
    heads = 0
    if shape := re.fullmatch(r"(\d+)x(\d+)(?:x([1-9]\d*))?", size):
        layers, hidden, heads = int(shape[1]), int(shape[2]), int(shape[3] or 0)
    elif size in SIZES:
        layers, hidden = SIZES[size]
    else:
        raise ValueError(
            f"unknown size '{size}': known are {', '.join(SIZES)} and LAYERSxHIDDEN such as 6x384"
        )
    if hidden % 64 or not hidden or not layers:
        raise ValueError(f"size '{size}': layers must be positive, hidden size a multiple of 64")
    if heads and hidden % (2 * heads):  # a head's first weights are pairs (initialization.py)
        raise ValueError(
            f"size '{size}': each of {heads} heads must have an even part of {hidden}: "
            "name another number of heads"
        )
    return layers, hidden, heads or hidden // 64


def config_for(size: str, vocab_size: int, **changes: Any) -> ModelConfig:
    """The configuration of a size; errors as `layers_hidden_heads`.

    With `gated` the intermediate size is 8/3 H, rounded to a multiple of 64, in place of 4 H: three
    such matrices have about as many parameters as two of 4 H (Shazeer 2020, section 3). With two
    `directions` each of them has the size.

    >>> config_for("6x384", 30522).num_heads, config_for("6x384", 30522).intermediate_size
    (6, 1536)
    >>> config_for("4x192", 30522, causal=True, directions=2).hidden_size
    384
    >>> config_for("base", 30522, gated=True).intermediate_size
    2048
    """
    layers, hidden, heads = layers_hidden_heads(size)
    wide = 64 * round(hidden / 24) if changes.get("gated") else 4 * hidden
    directions = changes.get("directions", 1)
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=directions * hidden,
        num_layers=layers,
        num_heads=directions * heads,
        intermediate_size=directions * wide,
    )
    return replace(config, **changes)


def training_flops(
    config: ModelConfig, rows: int, length: int, outputs: int, predictions: int
) -> float:
    """FLOPs of the matrix products, forward and backward, for `rows` rows of `length` tokens.

    6 x weights used x tokens (2 forward, 4 backward) plus the attention products, without the
    poolers' few. In a row `outputs` positions of the last layer are computed, and the masked-LM
    head at `predictions` of them (0: no such head); with two directions each does all that.

    >>> tiny = ModelConfig(1000, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512)
    >>> training_flops(tiny, rows=1, length=128, outputs=128, predictions=0) / 1e6
    352.321536
    """
    directions, config = config.directions, config.one_direction
    size, wide = config.hidden_size, config.intermediate_size
    feed_forward = (3 if config.gated else 2) * size * wide
    per_query = 2 * size * size + feed_forward  # query, attention output, feed-forward
    per_key = 2 * size * size  # key and value
    keys = config.num_layers * length
    queries = keys - length + outputs
    weights = queries * per_query + keys * per_key
    transform = 0 if config.family == "gpt" else size
    weights += predictions * config.table_size * (transform + config.vocab_size)
    attention = 2 * queries * length * size  # scores, and their product with the values
    return 6.0 * directions * rows * (weights + attention)
