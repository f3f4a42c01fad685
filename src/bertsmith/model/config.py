"""The configuration of a model, its named sizes, and the operations of a training step.

The names are the paper's (Table 6, section 3) and those of small models of Turc et al. 2019. The
count of operations is the yardstick behind "share of peak". Without torch, for the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

SIZES = {  # name: (layers, hidden size); head size is 64, intermediate size 4 H (gated: 8/3 H)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the shape and arithmetic of a model; defaults: the paper's BASE."""

    vocab_size: int
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512
    type_vocab_size: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation: str = "gelu"
    """"gelu" (erf, most code bases) or "gelu_tanh" (google-research/bert's approximation)."""
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_id: int = 0
    causal: bool = False
    """True: a position sees only itself and what is left of it (the paper's LTR ablation, GPT)."""
    pre_norm: bool = False
    """LayerNorm before each sublayer rather than after its residual; one more at the end."""
    gated: bool = False
    """GeGLU feed-forward (Shazeer 2020, arXiv 2002.05202): activation(gate(x)) * up(x)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"activation {self.activation!r}: known are 'gelu' and 'gelu_tanh'")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not in [0, 1)")


def layers_and_hidden(size: str) -> tuple[int, int]:
    """The shape of a named size ("base") or of layers x hidden size ("6x384").

    Errors: ValueError for an unknown size; it lists the known ones.

    >>> layers_and_hidden("base"), layers_and_hidden("6x384")
    ((12, 768), (6, 384))
    """
    shape = re.fullmatch(r"(\d+)x(\d+)", size)
    if shape:
        layers, hidden = int(shape[1]), int(shape[2])
    elif size in SIZES:
        layers, hidden = SIZES[size]
    else:
        raise ValueError(
            f"unknown size '{size}': known are {', '.join(SIZES)} and LAYERSxHIDDEN such as 6x384"
        )
    if hidden % 64 or not hidden or not layers:
        raise ValueError(f"size '{size}': layers must be positive, hidden size a multiple of 64")
    return layers, hidden


def config_for(size: str, vocab_size: int, **changes: Any) -> ModelConfig:
    """The configuration of a named size ("base") or of layers x hidden size ("6x384").

    With `gated` the intermediate size is 8/3 H, rounded to a multiple of 64, in place of 4 H: three
    matrices of that size have about as many parameters as two of 4 H (Shazeer 2020, section 3).

    Errors: ValueError as `layers_and_hidden`.

    >>> config_for("mini", 8000).num_heads
    4
    >>> config_for("6x384", 30522).intermediate_size
    1536
    >>> config_for("base", 30522, gated=True).intermediate_size
    2048
    """
    layers, hidden = layers_and_hidden(size)
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        intermediate_size=64 * round(hidden / 24) if changes.get("gated") else 4 * hidden,
    )
    return replace(config, **changes)


def training_operations(
    config: ModelConfig, rows: int, length: int, outputs: int, predictions: int
) -> float:
    """Operations of matrix products, forward and backward, for `rows` rows of `length` tokens.

    6 x weights used x tokens (2 forward, 4 backward) plus the attention products. `outputs` is
    the number of positions in a row at which the last layer is computed, `predictions` the number
    at which the masked-LM head is (0: no such head). The poolers' few operations are left out.

    >>> tiny = ModelConfig(1000, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512)
    >>> training_operations(tiny, rows=1, length=128, outputs=128, predictions=0) / 1e6
    352.321536
    """
    size, wide = config.hidden_size, config.intermediate_size
    feed_forward = (3 if config.gated else 2) * size * wide
    per_query = 2 * size * size + feed_forward  # query, attention output, feed-forward
    per_key = 2 * size * size  # key and value
    weights = 0
    attention = 0
    for layer in range(config.num_layers):
        queries = outputs if layer == config.num_layers - 1 else length
        weights += queries * per_query + length * per_key
        attention += 2 * queries * length * size  # scores, and their product with the values
    weights += predictions * (size * size + size * config.vocab_size)
    return 6.0 * rows * (weights + attention)
