"""A model folder read without torch: its tokenizer, its tensors by our names, and if they fit.

Shapes are those of a BERT with the paper's layers; `model_folder.py` opens the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bertsmith.checkpoints.config_json import (
    CLASS_PREFIX,
    TASK_HEADS,
    TASK_KINDS,
    config_path,
    model_kind,
    read_config,
)
from bertsmith.checkpoints.names import TIED_MATRIX, TOKEN_EMBEDDING, hugging_face_names, spelled
from bertsmith.checkpoints.stored import StoredTensor, folder_tensors
from bertsmith.model.config import ModelConfig
from bertsmith.text.tokenizer.bytepair import BytePairTokenizer, is_byte_pair
from bertsmith.text.tokenizer.characters import CharacterTokenizer
from bertsmith.text.tokenizer.tokenizer import Tokenizer

ENCODER = ("bert.embeddings.", "bert.encoder.", "bert.left.", "bert.right.")
PADDED = 128  # rows of an embedding are filled up to a multiple of at most so many
Shapes = dict[str, tuple[int, ...]]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder; a line on stderr where much of the model has no piece.

    Errors: ValueError for more pieces than the model has.
    """
    config = read_config(folder)
    if config.family == "elmo":
        return CharacterTokenizer()
    kind = BytePairTokenizer if is_byte_pair(folder) else Tokenizer
    tokenizer, rows = kind.from_pretrained(folder), config.vocab_size
    pieces = len(tokenizer.vocabulary)
    said = f"{folder}: its vocabulary has {pieces:,} pieces, but its model {rows:,}"
    if pieces > rows:
        raise ValueError(
            f"{said}: take the model's own tokenizer: pieces were perhaps added to it alone"
        )
    if rows - pieces >= PADDED:
        print(f"warning: {said}: is it another model's?", file=sys.stderr)
    return tokenizer


class ModelTensors(Mapping[str, np.ndarray]):
    """Tensors by our names, float32, each read, or mapped, when it is asked for.

    Errors: ValueError for NaN and infinity, and for what is no weight, then.
    """

    def __init__(self, parts: Mapping[str, list[StoredTensor]], missing: list[str]) -> None:
        self._parts = parts
        self.missing = missing
        """Our names of a head's tensors that the folder lacks."""

    def __getitem__(self, name: str) -> np.ndarray:
        arrays = [part.array() for part in self._parts[name]]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def open_tensors(folder: Path, kind: str) -> ModelTensors:
    """The tensors that a model of `kind` (see `model_kind`) computes with; "Encoder": no head.

    Errors: ValueError that names the folder, file or tensor at fault; as `load_model`.
    """
    config, stored = read_config(folder), folder_tensors(folder)
    check_layers(folder, config, stored)
    outputs = head_size(folder, stored, kind)
    if outputs is None and kind in TASK_KINDS:
        raise not_made_for(folder, kind)
    shapes = model_shapes(config, kind, outputs or 0)
    wanted: Shapes = {}
    for name, (rows, *columns) in shapes.items():
        parts = hugging_face_names(name)
        wanted |= dict.fromkeys(parts, (rows // len(parts), *columns))
    check_shapes(folder, config, wanted, stored)
    if kind == "PreTrainingModel":
        check_tied(stored)
    found, missing = {}, []
    for name in shapes:
        parts = hugging_face_names(name)
        if all(part in stored for part in parts):
            found[name] = [stored[part] for part in parts]
        else:
            missing.append(name)
    return ModelTensors(found, missing)


def model_shapes(config: ModelConfig, kind: str, num_outputs: int) -> Shapes:
    """The shape of each tensor that answers are computed with, by our names.

    >>> shapes = model_shapes(ModelConfig(100, hidden_size=96), "SequenceClassifier", 3)
    >>> shapes["encoder.layers.11.qkv.weight"], shapes["classifier.bias"]
    ((288, 96), (3,))
    """
    size, wide = config.hidden_size, config.intermediate_size
    own = "encoder.embeddings"
    shapes: Shapes = {
        f"{own}.token.weight": (config.vocab_size, size),
        f"{own}.position.weight": (config.max_positions, size),
        f"{own}.segment.weight": (config.type_vocab_size, size),
        **_norm(f"{own}.norm", size),
    }
    for n in range(config.num_layers):
        layer = f"encoder.layers.{n}"
        shapes |= {
            **_linear(f"{layer}.qkv", 3 * size, size),
            **_linear(f"{layer}.attention_output", size, size),
            **_norm(f"{layer}.attention_norm", size),
            **_linear(f"{layer}.intermediate", wide, size),
            **_linear(f"{layer}.output", size, wide),
            **_norm(f"{layer}.output_norm", size),
        }
    if kind in ("SequenceClassifier", "OptionScorer"):
        shapes |= _linear("pooler.dense", size, size)
    if kind in ("SequenceClassifier", "OptionScorer", "TokenClassifier"):
        shapes |= _linear("classifier", num_outputs, size)
    elif kind == "SpanPredictor":
        shapes |= _linear("span", num_outputs, size)
    elif kind == "PreTrainingModel":
        shapes |= _linear("mlm.dense", size, size) | _norm("mlm.norm", size)
        shapes["mlm.bias"] = (config.vocab_size,)
    return shapes


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def head_size(folder: Path, stored: Mapping[str, StoredTensor], kind: str) -> int | None:
    """The number of outputs of a folder's task head; None: it has none of that kind."""
    # heads of different tasks have the same name, so the architecture must be the right one
    heads = [tensor for name, tensor in stored.items() if name.startswith(TASK_HEADS)]
    return heads[0].shape[0] if heads and model_kind(folder) == kind else None


def not_made_for(folder: Path, kind: str) -> ValueError:
    """The error for a folder without a head of that kind."""
    asked = "fine-tuned classifier" if kind == "SequenceClassifier" else kind
    found = model_kind(folder)
    but = f" but a {found}" if found in TASK_KINDS else ""
    return ValueError(f"{folder}: not a {asked}{but}: fine-tune a model first")


def check_layers(folder: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse another number of layers than the configuration's, which could be any. ValueError."""
    matches = (
        re.match(r"bert\.(?:left\.|right\.)?encoder\.layer\.(\d+)\.", name) for name in stored
    )
    layers = {int(match[1]) for match in matches if match}
    if (len(layers), max(layers, default=-1)) != (config.num_layers, config.num_layers - 1):
        raise ValueError(
            f"{folder}: {config_path(folder).name} says {config.num_layers} layers, but the "
            f"weights hold {len(layers)}"
        )


def check_shapes(
    folder: Path,
    config: ModelConfig,
    wanted: Mapping[str, tuple[int, ...]],
    usable: Mapping[str, StoredTensor],
) -> None:
    """Refuse tensors of other shapes than the `wanted` by canonical names, and an encoder without
    one of them. Errors: ValueError."""
    for name, shape in wanted.items():
        if name not in usable:
            if name.startswith(ENCODER):
                theirs = spelled(name, CLASS_PREFIX[config.family])
                raise ValueError(f"{folder}: the weights lack '{theirs}' of the encoder")
        elif (found := usable[name]).shape != shape:
            raise ValueError(
                f"{found.file}: '{found.name}' has shape {list(found.shape)}, but by "
                f"{config_path(folder).name} it should have {list(shape)}"
            )


def check_tied(stored: Mapping[str, StoredTensor]) -> None:
    """Refuse, by ValueError, a masked-LM head with another matrix than the token embedding."""
    if TIED_MATRIX in stored:
        token, output = stored[TOKEN_EMBEDDING], stored[TIED_MATRIX]
        if not np.array_equal(token.array(), output.array()):
            raise ValueError(
                f"{output.file}: '{output.name}' differs from the token embedding, to "
                "which bertsmith ties it"
            )
