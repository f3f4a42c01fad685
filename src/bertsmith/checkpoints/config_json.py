"""config.json of a model folder <-> the configuration of a model of ours.

A model that transformers' BERT cannot compute (`pre_norm`, `gated`, a class read at the last token)
is written so that transformers refuses it: most of its tensors would fit, and the answers would be
wrong without a word.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_json_object
from bertsmith.base.settings import from_mapping
from bertsmith.checkpoints.tensorflow.google import GOOGLE_CONFIG, google_config
from bertsmith.model.config import ModelConfig

CONFIG_FILE = "config.json"
CONFIG_NAMES = {  # ours: as config.json calls it; the defaults are the same on both sides
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "pad_id": "pad_token_id",
    "causal": "is_decoder",
}
ACTIVATIONS = {  # as config.json calls it: ours; of several names for one we write the first
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}
OWN_TYPE = "bertsmith"  # the model_type of what transformers' BERT cannot compute
OWN_SETTINGS = "model"  # where its config.json has them, under our names


def config_entries(config: ModelConfig, own: bool = False) -> dict[str, Any]:
    """The entries of config.json on a model's arithmetic; `own`: transformers must refuse them."""
    if own:
        # AutoModel refuses the model_type; BertModel only warns of it, but refuses the activation
        return {"model_type": OWN_TYPE, "hidden_act": OWN_TYPE, OWN_SETTINGS: asdict(config)}
    entries = {theirs: getattr(config, ours) for ours, theirs in CONFIG_NAMES.items()}
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    return entries | {"model_type": "bert", "hidden_act": activation, "tie_word_embeddings": True}


def config_path(folder: Path) -> Path:
    """config.json, or Google's bert_config.json. Errors: ValueError for a folder with neither."""
    for path in (folder / CONFIG_FILE, folder / GOOGLE_CONFIG):
        if path.exists():
            return path
    if any(folder.glob("*.ckpt*")):
        raise ValueError(
            f"{folder}: no {GOOGLE_CONFIG}: copy it, and vocab.txt, from the folder of the model "
            "that this one was trained from"
        )
    raise ValueError(f"{folder}: no {CONFIG_FILE}, so not a folder with a model")


def read_stored_config(folder: Path) -> dict[str, Any]:
    """config.json as it is, Google's as if it were one. Errors: ValueError that names the file."""
    path = config_path(folder)
    return google_config(folder) if path.name == GOOGLE_CONFIG else read_json_object(path)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a folder's model. Errors: ValueError that names folder and value."""
    stored = read_stored_config(folder)
    path = config_path(folder)
    model_type = stored.get("model_type", "bert")
    if model_type not in ("bert", OWN_TYPE):
        known = f"bertsmith opens only 'bert' and '{OWN_TYPE}'"
        raise ValueError(f"{path}: model_type '{model_type}': {known}")
    values = _bert_values(path, stored) if model_type == "bert" else stored.get(OWN_SETTINGS)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: no '{OWN_SETTINGS}' with the settings of the model")
    try:
        return from_mapping(ModelConfig, values, path.name)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _bert_values(path: Path, stored: dict[str, Any]) -> dict[str, Any]:
    if (kind := stored.get("position_embedding_type", "absolute")) != "absolute":
        raise ValueError(f"{path}: position_embedding_type '{kind}': bertsmith has only 'absolute'")
    activation = str(stored.get("hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{path}: hidden_act '{activation}': bertsmith has only {known}")
    values = {ours: stored[name] for ours, name in CONFIG_NAMES.items() if name in stored}
    values["activation"] = ACTIVATIONS[activation]
    if values.get("pad_id", 0) is None:
        del values["pad_id"]
    return values


def label_names(folder: Path) -> list[str]:
    """The classes of a fine-tuned classifier in the order of its outputs; [] for other models."""
    labels = read_stored_config(folder).get("id2label") or {}
    if not isinstance(labels, dict) or sorted(labels) != sorted(map(str, range(len(labels)))):
        raise ValueError(f"{config_path(folder)}: id2label does not number the labels from 0")
    return [str(labels[str(k)]) for k in range(len(labels))]


def read_extra_config(folder: Path) -> dict[str, Any]:
    """The `extra_config` of `save_model`; {} in a folder of another program."""
    extra = read_stored_config(folder).get("bertsmith")
    return extra if isinstance(extra, dict) else {}
